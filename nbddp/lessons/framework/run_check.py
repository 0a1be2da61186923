"""Runs a learner's function on ranks so that it cannot hang the notebook, and words its failure.

The pool is the notebook's own, with all names on its ranks; where there is none yet, two workers are started.
"""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any, Generic, TypeVar, cast

from nbddp.errors import BadInput, RankStatus, RunFailed, RunHung, RunStopped, RunTimedOut, WorkerFailed, listed
from nbddp.execution.report import ended, headline
from nbddp.execution.values import RankValues
from nbddp.launch.options import LaunchSpec
from nbddp.launch.topology import rank_words
from nbddp.lessons.framework import lost_names
from nbddp.lessons.framework.answer import OK, Answer, Wrong, shown_by, watched_by
from nbddp.lessons.framework.closure import refuse_unsendable
from nbddp.lessons.framework.exceptions import explained
from nbddp.lessons.framework.on_rank import enter, leave, seeded, tabulate
from nbddp.lessons.framework.tables import Case, Outcome, TableExercise
from nbddp.lessons.framework.worlds import end_worlds, make_world, within
from nbddp.output.screens import NullScreen, Screen, for_shell
from nbddp.pool.pool import WorkerPool
from nbddp.public import Pool, inner

DEADLINE = 20.0  # seconds a check's run may take
CLEANUP = 2.0  # seconds that ranks have to clean up when it is ended
ALIKE = "all ranks call the same collectives in the same order, with tensors of one shape"
HANG_AFTER = 1.0  # seconds a deadlock stands before it is reported
BADGE = "border: 1.5px solid #2e9e5b; border-radius: 4px; padding: 1px 8px; margin-right: 6px; font-weight: 600"
NAMES = 8  # of those that are lost, that a line has
ENDINGS = (RankStatus.DIED, RankStatus.REPLACED, RankStatus.ENDED)  # with its process a rank loses its variables
WORKERS = LaunchSpec(nproc=2, device="cpu")  # where no pool stands; two ranks communicate, and a CPU is everywhere

T = TypeVar("T")
AnyPool = TypeVar("AnyPool", Pool, WorkerPool)
Known = Mapping[str, Mapping[int, object]]  # the name of a reference → rank → what is right there
_given: list[WorkerPool] = []
_known: list[Known] = []
_own: list[WorkerPool] = []
_screens: list[Screen] = []  # of the check that runs
_gone: set[int] = set()  # ranks whose processes have ended in the check that runs


@contextmanager
def on(pool: AnyPool) -> Iterator[AnyPool]:
    """Context manager: inside the block, checks run on this pool, for tests and to grade outside a notebook.

    - pool (`nbddp.Pool`): it starts with the first check if it is not running.

    Example:

        from nbddp.teach import check
        with check.on(pool):
            check.gpus_of(lambda local_rank, gpus_per_proc: [local_rank])
    """
    _given.append(inner(pool))
    try:
        yield pool
    finally:
        _given.pop()


def pool(at_least: int = 1) -> WorkerPool:
    """The pool on which checks run now, started. Raises Wrong if it has fewer than `at_least` ranks."""
    found = _given[-1] if _given else _standing()
    if not found.running:
        spec = WORKERS if at_least <= 2 else LaunchSpec(nproc=at_least, device="cpu")
        found.ensure(spec, progress=this_screen().progress)
    if found.world_size < at_least:
        raise Wrong(
            f"this check needs {at_least} ranks and the pool has {found.world_size}; "
            f"%ddp start --nproc {at_least} makes them"
        )
    return found


def _standing() -> WorkerPool:
    from nbddp.notebook.magics import standing_pool

    found = standing_pool()
    if found is not None:
        return found
    if not _own:
        _own.append(WorkerPool())
    return _own[0]


def on_ranks(
    function: Callable[..., Any],
    *args: Any,
    ranks: Sequence[int] | None = None,
    at_least: int = 1,
    deadline: float | None = None,
    hang_after: float | None = HANG_AFTER,
    screen: Screen | None = None,
) -> RankValues[Any]:
    """`function(*args)` on every rank (or `ranks`) of the pool; the values.

    What the function prints is shown. Raises Wrong with the learner's line if it raises, hangs, takes longer than
    `deadline` seconds (DEADLINE), ends its process, or cannot be sent. hang_after: as `Pool.call` has it.
    """
    limit = DEADLINE if deadline is None else deadline
    workers = pool(at_least)
    seen = screen or (_screens[-1] if _screens else None)
    with _told(limit):
        try:
            found = workers.call(
                function, args, ranks=ranks, screen=seen, hang_after=hang_after, timeout=limit, shutdown_timeout=CLEANUP
            )
        except BadInput:
            for handed in filter(
                inspect.isfunction, [*args, *(a for some in args if type(some) is tuple for a in some)]
            ):
                refuse_unsendable(handed)
            raise
    asked = range(workers.world_size) if ranks is None else ranks
    left = sorted(set(asked) - set(found.ranks))
    if left:
        who = rank_words(left) if len(left) < len(asked) else "every rank"
        raise Wrong(f"{who} called sys.exit() instead of returning an answer")
    return found


@contextmanager
def _told(limit: float) -> Iterator[None]:
    """Whatever ends the run inside, of at most `limit` seconds, becomes Wrong with the learner's line."""
    try:
        with _ranks_that_end():
            yield
    except WorkerFailed as failed:
        raise Wrong(failure_words(failed)) from failed
    except RunTimedOut as late:
        raise Wrong(f"no answer after {limit:g} s: is there an endless loop, or a wait that never ends?") from late
    except RunStopped as stopped:
        raise Wrong("stopped before there was an answer") from stopped
    except (RunHung, BadInput) as told:
        raise Wrong(str(told)) from told


@contextmanager
def _ranks_that_end() -> Iterator[None]:
    """Keep in mind which ranks' processes end in the run inside: their variables are lost."""
    try:
        yield
    except RunFailed as failed:
        _gone.update(s.rank for s in failed.states if s.status in ENDINGS)
        raise


def _cost() -> list[str]:
    """Which names the ranks have lost, and which cells make them again, in a sentence; none if nothing is lost."""
    from nbddp.notebook.magics import standing_history

    if not _gone or _given:
        return []
    made = lost_names.made(standing_history().every())
    if not made.names:
        return []
    ranks = sorted(_gone)
    who = f"rank {ranks[0]}'s process" if len(ranks) == 1 else f"the processes of {rank_words(ranks)}"
    more = [f"{len(made.names) - NAMES} more"] if len(made.names) > NAMES else []
    names, are = listed([*made.names[:NAMES], *more]), "is" if len(made.names) == 1 else "are"
    cells = listed([f"In[{n}]" for n in made.cells])
    return [f"{who} ended, and with {'it' if len(ranks) == 1 else 'them'} {names} {are} gone: run {cells} again"]


@contextmanager
def grouped(at_least: int = 2) -> Iterator[None]:
    """All ranks have a default process group inside the block. One that a cell has left is used and stays; one that was
    made ends after the block, on all ranks."""
    made = on_ranks(enter, at_least=at_least, screen=NullScreen())
    try:
        yield
    finally:
        on_ranks(end_worlds, screen=NullScreen())
        if any(made):
            on_ranks(leave, screen=NullScreen())


def in_group(function: Callable[..., T], *args: Any, at_least: int = 2, screen: Screen | None = None) -> dict[int, T]:
    """By rank what `function(*args)` gives in a process group of all ranks, each of which has a seed of its own.

    screen: where prints are seen, `this_screen()` for several runs; without one the run has its own. Raises Wrong as
    `on_ranks` does.
    """
    with grouped(at_least):
        found = on_ranks(seeded, function, *args, at_least=at_least, screen=screen)
    return found.by_rank()


def in_world(size: int, function: Callable[..., T], *args: Any, screen: Screen | None = None) -> dict[int, T]:
    """As `in_group`, in a world of the first `size` ranks, inside a block of `grouped`. All ranks take part, and what
    only some wait for ends with the block."""
    on_ranks(make_world, size, at_least=size, screen=NullScreen())
    found = on_ranks(within, size, function, args, at_least=size, screen=screen)
    return {rank: found[rank] for rank in range(size)}


def world_sizes() -> tuple[int, int]:
    """World sizes on which an exercise is tried: the pool's, and one rank fewer. No number written in the place of the
    world size is right on both."""
    whole = pool(at_least=2).world_size
    return whole, whole - 1


class Reference(Generic[T]):
    """What is right, where only a run can tell: `function(*args)`, without a learner's code, by rank.

    In a notebook the ranks of the pool work it out. With strangers' code on the ranks it was worked out before
    (`knowing`), on ranks that had run none: an answer could change its own reference.
    """

    every: list[Reference[Any]] = []

    def __init__(self, function: Callable[..., T], *args: Any):
        self.name, self.function, self.args = f"{function.__module__}.{function.__qualname__}", function, args
        Reference.every.append(self)

    def by_rank(self) -> Mapping[int, T]:
        """Raises Wrong as `in_group` does."""
        if not _known:
            return in_group(self.function, *self.args, screen=NullScreen())
        pool(at_least=2)
        return cast(Mapping[int, T], _known[-1][self.name])


@contextmanager
def knowing(references: Known | None) -> Iterator[None]:
    """Inside the block references are not worked out but taken from here; None: as without it."""
    _known[:] = [] if references is None else [references]
    try:
        yield
    finally:
        _known.clear()


def tabulated(
    cases: Sequence[Case], judge: Callable[[Mapping[int, Sequence[Outcome]]], str], ranks: Sequence[int] | None = None
) -> Callable[[Any], str]:
    """The judge of a function by what it gives for all cases, on every rank or on `ranks`."""
    return lambda function: judge(on_ranks(tabulate, function, cases, ranks=ranks).by_rank())


def judged_by(table: TableExercise) -> Callable[[Any], str]:
    """The judge that has a table worked out on every rank."""
    return tabulated(table.cases, table.judge)


def in_both_worlds(name: str, words: Callable[[int], str], judge: Callable[[int, Screen], str]) -> str:
    """Judge in the world of all ranks and in that of one less, inside a group.

    The line says in which world, unless it begins with the function's name. Prints are seen once.
    """
    screen = this_screen()
    with grouped():
        for world in world_sizes():
            try:
                line = judge(world, screen)
            except Wrong as wrong:
                raise Wrong(f"{words(world)}: {wrong}") from wrong
            if line != OK:
                return line if line.startswith(name) else f"{words(world)}: {line}"
            screen = NullScreen()
    return OK


def this_screen() -> Screen:
    """One screen for all runs of a check: the notebook's cell gets one live view, and a saved one no blank lines."""
    from IPython.core.getipython import get_ipython

    return _screens[-1] if _screens else for_shell(get_ipython())


@contextmanager
def _watched(words: str) -> Iterator[list[str]]:
    """Shows that a check runs, until there is an answer; gives what the check has cost."""
    costs: list[str] = []
    _screens.append(this_screen())
    _gone.clear()
    try:
        _screens[-1].progress(words)
        yield costs
        costs += _cost()
    finally:
        _screens.pop().ready()


def _shown(answer: Answer) -> None:
    """In a notebook an `ok` that says what was verified is a badge; all else is printed."""
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    if not answer.verified or getattr(shell, "kernel", None) is None:
        print(answer.describe())
        return
    html = f'<div><span style="{BADGE}">✓ {answer.line}</span> {escape(answer.verified)}</div>'
    shell.display_pub.publish({"text/plain": answer.describe(), "text/html": html})


watched_by(_watched)
shown_by(_shown)


def failure_words(failed: WorkerFailed) -> str:
    """`rank 1 raised ValueError: text (line 3, in average)`: the innermost place in the learner's own code.

    The line is the same in every run. If several ranks fail, the first in time is by chance, and not named. gloo's own
    messages hold addresses, so the likely cause is shown instead.
    """
    cause = failed.cause
    if cause.overrun:
        return f"{cause.overrun}, and were stopped"
    who = f"rank {cause.rank}" if _alone(failed) else "a rank"
    if cause.kind == "exit":
        return f"{who} called sys.exit({cause.code!r}) instead of returning an answer"
    if cause.kind == "died" and cause.code == -signal.SIGABRT:
        return f"a rank's process aborted, as it does when a tensor arrives that is larger than its buffer: {ALIKE}"
    if cause.kind == "died":
        return f"{who} {ended(cause.code)}"
    if not cause.chain:  # it left its peers' collective
        return headline(cause)
    last = cause.chain[-1]
    if "gloo" in last.message:
        return f"the connection between two ranks broke, as it does when tensors of different sizes meet: {ALIKE}"
    place = next((f" (line {f.line}, in {f.name})" for f in reversed(last.frames) if f.user), "")
    message = last.message.splitlines()[0] if last.message else ""
    if last.type == "Misused":
        return last.message
    if last.type == "NotImplementedError" and not message:
        return f"{who} raised NotImplementedError{place}: you have not written that part yet"
    told, semicolon, means = explained(message).partition("; ") if message else ("", "", "")
    return f"{who} raised {last.type}{': ' * bool(told)}{told}{place}{semicolon}{means}"


def _alone(failed: WorkerFailed) -> bool:
    """Whether all other ranks were through or waited for others when one failed: none was about to fail, too."""
    others = (s for s in failed.states if s.rank != failed.rank)
    return all(s.status == RankStatus.FINISHED or (s.status != RankStatus.FAILED and s.doing) for s in others)
