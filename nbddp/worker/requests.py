"""What a worker carries out when it is asked, besides running cells: a row of a table for each request."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from nbddp.capabilities.memory import on_rank_sizes
from nbddp.capabilities.memory.on_rank import Memory
from nbddp.capabilities.memory.on_rank_timeline import AllocationRecorder
from nbddp.capabilities.timings import on_rank_clocks
from nbddp.capabilities.timings.on_rank import Recorder
from nbddp.capabilities.trace.on_rank import Tracer
from nbddp.protocol import json_values, pickling
from nbddp.protocol.capability import load, rows
from nbddp.worker.cell_end import Exits
from nbddp.worker.process_groups import Groups
from nbddp.worker.release import Release
from nbddp.worker.spare_fds import Reserve


class RequestsKernel(Protocol):
    """What requests need of the kernel."""

    shell: Any
    groups: Groups
    release: Release
    reserve: Reserve
    exits: Exits
    recorder: Recorder
    tracer: Tracer
    memory: Memory
    allocations: AllocationRecorder


def _call(worker: RequestsKernel, buffers: Sequence[Any], *, argv: Sequence[str], plain: bool = False) -> list[bytes]:
    """Call a pickled function; its value, or the exception, goes back pickled, or as JSON and without the exception
    where the client trusts no rank (`plain`)."""
    import cloudpickle

    sys.argv = list(argv)
    function, arguments, options = cloudpickle.loads(bytes(buffers[0]))
    value = function(*arguments, **options)
    return [json_values.write(value) if plain else pickling.pack_or_words(value)]


def _push(worker: RequestsKernel, buffers: Sequence[Any], *, names: Sequence[str]) -> list[bytes]:
    import cloudpickle

    found = {n: cloudpickle.loads(bytes(b)) for n, b in zip(names, buffers, strict=True)}
    worker.shell.user_ns.update(found)
    return []


def _pull(worker: RequestsKernel, buffers: Sequence[Any], *, names: Sequence[str]) -> list[bytes]:
    """One buffer per name; an empty one for a name that is not there."""
    held = worker.shell.user_ns
    return [pickling.pack_or_words(held[n]) if n in held else b"" for n in names]


def _evaluate(worker: RequestsKernel, buffers: Sequence[Any], *, text: str) -> list[bytes]:
    """An expression of the names that cells have set: its value in words, or its error."""
    try:
        said = repr(eval(text, worker.shell.user_ns))
    except Exception as e:
        said = f"{type(e).__name__}: {e}"
    return [said.encode("utf-8", "backslashreplace")]


def _end_group(worker: RequestsKernel, buffers: Sequence[Any], *, through: bool = False) -> list[bytes]:
    """End the process group after a run that has broken it, and let go of what failed calls held."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is ended whole, or the process is replaced
    if through:  # others may be at work
        worker.release.let_through()
    worker.reserve.free()
    worker.groups.drop(broken=True)
    return []


def _exits(worker: RequestsKernel, buffers: Sequence[Any]) -> list[bytes]:
    """The worker is about to be ended: what programs have registered for their end."""
    worker.exits.call()
    return []


def _leave(worker: RequestsKernel, buffers: Sequence[Any]) -> list[bytes]:
    """The pool goes, and the engine, which is not its own, stays."""
    from nbddp.capabilities.attached import engine_side

    engine_side.leave()
    return []


def _timings(worker: RequestsKernel, buffers: Sequence[Any]) -> list[bytes]:
    """What the recorder has of the last run with DDP steps."""
    return [pickling.pack_or_words(worker.recorder.collect())]


def _trace(worker: RequestsKernel, buffers: Sequence[Any]) -> list[bytes]:
    """The trace of the last cell that was traced, or why it left none."""
    return [pickling.pack_or_words(worker.tracer.last or {"why": worker.tracer.why})]


def _together(worker: RequestsKernel, buffers: Sequence[Any]) -> list[bytes]:
    """The collectives of the last run that called some; None without any."""
    from nbddp.capabilities.collectives import on_rank as collectives_on_rank

    return [pickling.pack_or_words(collectives_on_rank.collect(worker.recorder))]


def _clocks(worker: RequestsKernel, buffers: Sequence[Any]) -> list[bytes]:
    """How far the other ranks' clocks are from rank 0's."""
    with worker.groups.sockets.watch():
        found = on_rank_clocks.measure(
            worker.groups.store("clocks"), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        )
    return [pickling.pack_or_words(found)]


def _memory(worker: RequestsKernel, buffers: Sequence[Any]) -> list[bytes]:
    """Where this rank's memory is; None without a module or optimizer."""
    return [pickling.pack_or_words(worker.memory.collect(worker.shell.user_ns, worker.recorder))]


def _named_memory(worker: RequestsKernel, buffers: Sequence[Any], *, names: Sequence[str]) -> list[bytes]:
    """What names hold, in bytes."""
    return [pickling.pack_or_words(on_rank_sizes.sizes(worker.shell.user_ns, names))]


def _allocations(worker: RequestsKernel, buffers: Sequence[Any], *, part: str, step: int | None = None) -> list[bytes]:
    """Which steps the recording of the last recorded cell has, or one of them."""
    own = worker.allocations
    return [pickling.pack_or_words(own.summary() if part == "steps" else own.of_step(step))]


def _environment(worker: RequestsKernel, buffers: Sequence[Any], *, variables: Mapping[str, str | None]) -> list[bytes]:
    """Variables that a living process can take (`--env`); None takes one away."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return []


# each is given the worker, the request's buffers and, as keyword arguments, its fields; it answers with buffers
REQUESTS: dict[str, Callable[..., list[bytes]]] = {
    "call": _call,
    "push": _push,
    "pull": _pull,
    "evaluate": _evaluate,
    "end_group": _end_group,
    "exits": _exits,
    "leave": _leave,
    "timings": _timings,
    "trace": _trace,
    "together": _together,
    "clocks": _clocks,
    "memory": _memory,
    "named_memory": _named_memory,
    "allocations": _allocations,
    "environment": _environment,
}


def known() -> dict[str, Callable[..., list[bytes]]]:
    """These, and those of capabilities."""
    return {**REQUESTS, **{op: load(target) for row in rows() for op, target in row.requests.items()}}
