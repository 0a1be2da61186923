"""Functions and values between notebook and ranks: `Pool.run`, `call`, `push`, `pull`, and the commands so named."""

from __future__ import annotations

import functools
import linecache
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from nbddp.errors import BadInput, CommandStopped, RankStatus, RunStopped, WorkerFailed, in_own_frames
from nbddp.execution import report
from nbddp.execution.values import RankValues, answered
from nbddp.launch.topology import rank_words
from nbddp.notebook.commands import Asked, CommandLine
from nbddp.notebook.history import Ran
from nbddp.output.screens import Screen, for_shell
from nbddp.pool.runs import shell
from nbddp.pool.worker_group import check_ranks
from nbddp.protocol import pickling
from nbddp.protocol.capability import given, load, with_options
from nbddp.protocol.outcome import RankExit
from nbddp.protocol.request import HANG_AFTER, SHUTDOWN, Request
from nbddp.protocol.run_spec import CALL

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from nbddp.capabilities import RunArguments
    from nbddp.pool.pool import WorkerPool

P = ParamSpec("P")
T = TypeVar("T")
MOST = 500  # objects whose code is looked for


def run(pool: WorkerPool, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> RankValues[T]:
    """Call `function(*args, **kwargs)` on every rank. Returns every rank's value. `call` also takes options.

    Function and arguments are sent by cloudpickle. Raises the first failing rank's own exception, with the
    WorkerFailed that holds the remote traceback as its cause; or the WorkerFailed itself if the exception cannot be
    sent.
    """
    try:
        return pool.call(function, args, kwargs)
    except WorkerFailed as failed:
        assert pool.last_run is not None
        error = carried(failed, pool.last_run.ended)
        if error is None:
            raise
        if hasattr(error, "add_note"):  # since Python 3.11
            error.add_note(report.note(failed))
            failed.add_note(failed.report.removeprefix(str(failed)).strip("\n"))
        failed.__cause__ = error.__cause__  # its own is still to be reported
        raise in_own_frames(error) from failed.with_traceback(None)


def call(
    pool: WorkerPool,
    function: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    ranks: Sequence[int] | None = None,
    screen: Screen | None = None,
    hang_after: float | None = HANG_AFTER,
    timeout: float | None = None,
    shutdown_timeout: float = SHUTDOWN,
    **options: Unpack[RunArguments],
) -> RankValues[T]:
    """As `run`, on some ranks, with limits in seconds and with the options of `run_cell`.

        pool.call(train, [config], sanitize=True)
        print(pool.findings())

    The ranks keep their variables. Raises BadInput if something cannot be sent, or a RunFailed: WorkerFailed,
    RunStopped, RunHung or RunTimedOut. A rank whose function calls `sys.exit()` has no value.
    """
    screen = screen or for_shell(shell())
    for note in [] if pool.running else pool.start():
        screen.say(note)
    chosen = check_ranks(ranks, pool.world_size, "ranks")
    limits = {"hang_after": hang_after, "timeout": timeout, "shutdown_timeout": shutdown_timeout}
    said = given("call", "run", options)
    request = request_of(function, args, kwargs, chosen, pool.writes, shell(), **limits, **said)
    run = pool.runs.run(request, screen)
    return answered(run.ended, load(pool.writes).read if pool.writes else pickling.unpack)


with_options("run")(call)  # not as a decorator: type checkers find the table in a circle


def push(pool: WorkerPool, names: Mapping[str, object], ranks: Sequence[int] | None = None) -> None:
    """Copy values to names on the ranks. Raises BadInput if one cannot be pickled; then none is set."""
    pool.group.need_running()
    chosen = check_ranks(ranks, pool.world_size, "--ranks")
    buffers = [packed(value, name) for name, value in names.items()]
    pool.answers("push", chosen, buffers, names=list(names), sources=sources_of(names.values(), shell()))


def pull(
    pool: WorkerPool, names: str | Sequence[str], ranks: Sequence[int] | None = None
) -> dict[str, RankValues[Any]]:
    """Fetch one name or several from the ranks. Raises BadInput if a name is not defined on every rank."""
    pool.group.need_running()
    chosen = check_ranks(ranks, pool.world_size, "--ranks")
    wanted = [names] if isinstance(names, str) else list(names)
    return pulled(wanted, pool.answers("pull", chosen, names=wanted))


# -- on their way ------------------------------------------------------------------------------------


def request_of(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, object] | None,
    ranks: Sequence[int],
    writes: str,
    shell: Any = None,
    **limits: Any,
) -> Request:
    """The request of a call on ranks. writes: the module that writes what comes back, else it is pickled; shell: of the
    notebook whose cells the function may come from. Raises BadInput if something cannot be sent."""
    name = getattr(function, "__name__", "the function")
    data = packed((function, tuple(args), dict(kwargs or {})), name)
    fields = {"writes": writes, "argv": list(sys.argv), "sources": sources_of([function], shell)}
    return Request(CALL, fields, [data], f"running {name}", ranks=ranks, **limits)


def carried(failed: WorkerFailed, ended: Mapping[int, RankExit]) -> Exception | None:
    """The exception object of the first failing rank, if it travelled."""
    buffers = ended[failed.rank].buffers if failed.cause.kind == "raised" else []
    error = pickling.unpack(buffers[0]) if buffers else None
    return error if isinstance(error, Exception) else None


def pulled(names: Sequence[str], answers: Mapping[int, Sequence[Any]]) -> dict[str, RankValues[Any]]:
    """Name → its values. Raises BadInput if a rank has no such name."""
    found = {}
    for i, name in enumerate(names):
        lacking = [r for r, answer in answers.items() if not answer[i]]
        if lacking:
            raise BadInput(f"{name!r} is not defined on {rank_words(lacking)}; assign it in a %%ddp cell")
        found[name] = RankValues({r: pickling.unpack(answer[i]) for r, answer in answers.items()})
    return found


def packed(value: Any, name: str) -> bytes:
    """Raises BadInput, with the name, for what cannot be sent."""
    try:
        return pickling.pack(value)
    except Exception as e:
        raise BadInput(
            f"{name!r} cannot be sent to the ranks ({pickling.reason(e)}); create it in a %%ddp cell instead"
        ) from None


# -- the text of the notebook's cells that functions come from ----------------------------------------

# Ranks have no file of it: without its text a traceback there shows no lines, and calls the cell by a path.


def sources_of(values: Iterable[Any], shell: Any = None) -> list[tuple[str, str, str]]:
    """File, name and text of each cell that has code of these functions, or of others that they use. The name is empty
    if the shell knows none."""
    found: dict[str, tuple[str, str, str]] = {}
    for code in _codes(values):
        file = code.co_filename
        if file not in found:
            text = "".join(linecache.getlines(file))
            found[file] = file, _name(file, shell), text
    return [source for source in found.values() if source[2]]


def _name(file: str, shell: Any) -> str:
    named = getattr(getattr(shell, "compile", None), "format_code_name", None)  # IPython 7 has none
    return " ".join(named(file) or ()) if named is not None else ""


def _codes(values: Iterable[Any]) -> Iterator[CodeType]:
    """The code that has no file: of the functions, then of what their globals, closures and classes lead to."""
    left = list(values)
    seen = set(map(id, left))
    while left and len(seen) < MOST:
        at = left.pop()
        if isinstance(at, FunctionType) and not os.path.exists(at.__code__.co_filename):
            yield at.__code__
        for other in _used(at):
            if id(other) not in seen and isinstance(other, FunctionType | MethodType | type | functools.partial):
                seen.add(id(other))
                left.append(other)


def _used(at: Any) -> Iterator[Any]:
    """What an object of a cell leads to; what lies in a file on disk leads nowhere."""
    if isinstance(at, MethodType):
        yield at.__func__
    elif isinstance(at, functools.partial):
        yield at.func
    elif isinstance(at, type):
        if at.__module__ == "__main__":
            yield from (getattr(value, "__func__", value) for value in vars(at).values())
            yield from at.__bases__
    elif not isinstance(at, FunctionType):
        yield type(at)
    elif not os.path.exists(at.__code__.co_filename):
        yield getattr(at, "__wrapped__", None)
        yield from (at.__globals__.get(name) for name in _names(at.__code__))
        for cell in at.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # it has no value yet
                continue


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


# -- commands ----------------------------------------------------------------------------------------


def push_names(asked: Asked, line: CommandLine) -> None:
    """`%ddp push`."""
    names, ranks, namespace = line.args["names"], line.args["ranks"], asked.shell.user_ns
    unknown = [n for n in names if n not in namespace]
    if unknown:
        raise BadInput(f"{unknown[0]!r} is not defined in the notebook; assign it in a cell without %%ddp first")
    pushed = {n: namespace[n] for n in names}
    try:
        asked.pool.push(pushed, ranks)
    except RunStopped as stopped:
        done = [s.rank for s in stopped.states if s.status == RankStatus.FINISHED]
        became = f"the variables are set on {rank_words(done) if done else 'no rank'}"
        raise CommandStopped(f"%ddp push was stopped by the user; {became}") from None
    asked.history.push(Ran(asked.number(), None, pushed=pushed, ranks=ranks, where=asked.where()))


def pull_names(asked: Asked, line: CommandLine) -> None:
    """`%ddp pull`."""
    asked.shell.user_ns.update(asked.pool.pull(line.args["names"], line.args["ranks"]))
