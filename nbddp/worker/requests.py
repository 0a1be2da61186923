"""Requests that a worker carries out besides running cells, and questions that it answers meanwhile: a row of a table
for each."""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from nbddp.deadlock.on_rank import flight, position
from nbddp.protocol.capability import load, rows
from nbddp.protocol.codec import Json, from_json
from nbddp.protocol.messages import JupyterMessage
from nbddp.protocol.outcome import Outcome
from nbddp.protocol.position import CallHistory, Whereabouts
from nbddp.protocol.run_spec import RunSpec
from nbddp.worker import exit_info
from nbddp.worker.cell_end import StartedProcesses
from nbddp.worker.parts import RankWorker
from nbddp.worker.program import WorkerInterrupts


def _end_group(worker: RankWorker, buffers: Sequence[Any], *, through: bool = False) -> list[bytes]:
    """End the process group after a run that has broken it, and let go of what failed calls held."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is ended whole, or the process is replaced
    if through:  # others may be at work
        worker.release.let_through()
    worker.reserve.free()
    worker.groups.drop(broken=True)
    worker.leaves = True
    return []


def _exits(worker: RankWorker, buffers: Sequence[Any]) -> list[bytes]:
    """The worker is about to be ended: what programs have registered for their end."""
    worker.exits.call()
    return []


# each is given the worker, the request's buffers and, as keyword arguments, its fields; it answers with buffers
REQUESTS: dict[str, Callable[..., list[bytes]]] = {
    "end_group": _end_group,
    "exits": _exits,
}


def known_requests() -> dict[str, Callable[..., list[bytes]]]:
    """These, and those of capabilities."""
    return {**REQUESTS, **{op: load(target) for row in rows() for op, target in row.requests.items()}}


# -- questions --------------------------------------------------------------------------------------

# Questions to a worker while its main thread works, over the control channel: a row of a table for each.
# The control channel's own thread answers them, so they only look. They change three things: a worker's debugger, its
# release from a blocked call, and its interrupt.

UNTOLD = "untold"
Sent = tuple[Outcome, "list[bytes] | None", JupyterMessage]  # an outcome, its buffers, and what asked for it


class QuestionsKernel(RankWorker, Protocol):
    """What these need of the IPython kernel besides. known: what the flight recorders held when it was asked last.
    told: run → its outcome, of the last run and what that left to do, without buffers that are too large to keep.
    awaited: the code of a cell that awaits something."""

    interrupts: WorkerInterrupts
    children: StartedProcesses
    awaited: asyncio.Future[Any] | None
    begun: int
    known: position.KnownEntries | None
    told: dict[int, Sent]

    def send_outcome(self, outcome: Outcome, buffers: list[bytes], parent: JupyterMessage) -> None: ...


# -- where the rank is -------------------------------------------------------------------------------


def _where(worker: QuestionsKernel, run: int | None = None, history: bool = False, names: bool = False) -> Whereabouts:
    """Where the main thread is in run `run`; with `history`, also the collectives it has called, with `names` what
    cells have assigned. That it is idle is said in any case."""
    try:
        return _look(worker, run, history, names)
    except Exception as e:
        if worker.spec is not None:
            raise
        acts = ("what it could not tell",)
        return Whereabouts(idle=True, begun=_has_begun(worker, run), acts=acts, why=f"{type(e).__name__}: {e}")


def _has_begun(worker: QuestionsKernel, run: int | None) -> bool:
    return run is None or _was_last(worker, run)


def _look(worker: QuestionsKernel, run: int | None, history: bool, names: bool) -> Whereabouts:
    shown, groups, recorded = worker.files.shown, worker.groups, _recorded(worker, history)
    at_work = worker.spec is not None
    if at_work:
        found = position.position(shown, groups, worker.began[0], recorded.open, worker.parts.of("claim"))
        found = replace(found, user=found.user or position.awaits(worker.awaited, shown))
    else:
        found = position.idle(shown, groups, recorded.open, begun=_has_begun(worker, run))
    taken, over = (worker.interrupts.taken, not worker.interrupts.is_on) if at_work else (False, False)
    past = _past(worker, recorded) if history else None
    assigned, imports = user_names(worker.shell) if names else (None, None)
    found = replace(found, past=past, names=assigned, imports=imports, interrupted=taken, over=over)
    for known in worker.parts.of("position") if at_work else ():
        found = known(found)
    return found


def _recorded(worker: QuestionsKernel, whole: bool) -> flight.FlightRecords:
    """What the flight recorders hold; without `whole` only what may not be done. The first is kept for this run: an
    unblocked rank reports the call that it was unblocked from."""
    if not whole:
        return flight.FlightRecords([], flight.entries(flight.dumps(active=True)))
    held = flight.held()
    worker.known = position.KnownEntries(held.of_all)
    return held


def _past(worker: QuestionsKernel, recorded: flight.FlightRecords) -> CallHistory:
    own = {group: calls for called in worker.parts.of("called") for group, calls in called().items()}
    return position.record(recorded.of_all, own)


def user_names(shell: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names that cells have assigned on this rank, and those that they have imported."""
    found: tuple[list[str], list[str]] = ([], [])
    for name, value in list(shell.user_ns.items()):
        if not name.startswith("_") and name not in shell.user_ns_hidden:
            found[is_import(value)].append(name)
    return tuple(found[0]), tuple(found[1])


def is_import(value: Any) -> bool:
    """Whether a name that has this value was imported: a module, or a class or function that no cell has defined."""
    if inspect.isclass(value) or inspect.isroutine(value):
        return getattr(value, "__module__", None) != "__main__"
    return inspect.ismodule(value)


def _stack(worker: QuestionsKernel, run: int | None = None, history: bool = False, names: bool = False) -> Whereabouts:
    """As `where`, and the main thread's frames."""
    found = _where(worker, run, history, names)
    if found.idle:
        return found
    worker.release.note()
    return replace(found, stack=position.stack(worker.files.shown))


# -- its run -----------------------------------------------------------------------------------------


def _was_last(worker: QuestionsKernel, run: int) -> bool:
    """Whether this rank has carried out `run`, and nothing since but what that left to do."""
    return run in worker.told or run == worker.begun


def _repeat(worker: QuestionsKernel, run: int) -> bool | str:
    """Send the outcome of run `run` once more, because its message was lost. False: this rank has not seen the run;
    UNTOLD: it has ended it, and has said nothing."""
    if worker.spec is not None or not _was_last(worker, run):
        return False
    if run not in worker.told:
        return UNTOLD
    outcome, buffers, parent = worker.told[run]
    if buffers is None:
        error = ConnectionError("this rank's answer was lost on the way and is too large to be sent again")
        outcome = exit_info.unworded(outcome, None, error)
    worker.send_outcome(outcome, buffers or [], parent)
    return True


def _through(worker: QuestionsKernel) -> bool:
    """Whether a message is let through before anything is shut."""
    return worker.release.is_draining


def _release(worker: QuestionsKernel, run: int, spares: bool, then: Json | None) -> Any:
    """Free the main thread from a blocked call of run `run`; with `spares` not where the program has had the
    interrupt, and does what it does on its way out. then: the request to carry out after that."""
    if worker.spec is None or worker.spec.run != run:
        return False
    if spares and worker.interrupts.taken:
        return False
    return worker.release.start(from_json(RunSpec, then) if then is not None else None)


def _interrupt(worker: QuestionsKernel, again: int | None = None) -> bool:
    """SIGINT for the program of the current run, where no signal comes from elsewhere. again: for this run alone,
    unless it has had one. The operating system may give a process's signal to another thread, and then nothing wakes
    the main thread. Two that wait are one to Python's own handler; an event loop's is called for each."""
    if worker.spec is None:
        return False
    if again is not None and (worker.spec.run != again or worker.interrupts.taken):
        return False
    if again is not None and signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]
    return True


def _interrupt_started(worker: QuestionsKernel, run: int) -> None:
    """SIGINT for what the program of run `run` has started."""
    if worker.spec is not None and worker.spec.run == run and worker.interrupts.is_on:
        worker.children.interrupt()


# each is given the worker and, as keyword arguments, the question's fields
QUESTIONS: dict[str, Callable[..., Any]] = {
    "where": _where,
    "stack": _stack,
    "repeat": _repeat,
    "through": _through,
    "release": _release,
    "interrupt": _interrupt,
    "interrupt_started": _interrupt_started,
}


def known_questions() -> dict[str, Callable[..., Any]]:
    """These, and those of capabilities: loaded now, since an import while the main thread is in one would wait."""
    return {**QUESTIONS, **{op: load(target) for row in rows() for op, target in row.questions.items()}}
