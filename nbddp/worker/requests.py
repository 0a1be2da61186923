"""Requests that a worker carries out besides running cells: a row of a table for each."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from nbddp.protocol import json_values, pickling
from nbddp.protocol.capability import load, rows
from nbddp.worker.parts import RankWorker


def _call(worker: RankWorker, buffers: Sequence[Any], *, argv: Sequence[str], plain: bool = False) -> list[bytes]:
    """Call a pickled function; its value, or the exception, goes back pickled, or as JSON and without the exception
    where the client trusts no rank (`plain`)."""
    import cloudpickle

    sys.argv = list(argv)
    function, arguments, options = cloudpickle.loads(bytes(buffers[0]))
    try:
        value = function(*arguments, **options)
    except BaseException as e:
        worker.parts.ended(e)
        raise
    worker.parts.ended(None)
    return [json_values.write(value) if plain else pickling.pack_or_words(value)]


def _push(worker: RankWorker, buffers: Sequence[Any], *, names: Sequence[str]) -> list[bytes]:
    import cloudpickle

    found = {n: cloudpickle.loads(bytes(b)) for n, b in zip(names, buffers, strict=True)}
    worker.shell.user_ns.update(found)
    return []


def _pull(worker: RankWorker, buffers: Sequence[Any], *, names: Sequence[str]) -> list[bytes]:
    """One buffer per name; an empty one for a name that is not there."""
    held = worker.shell.user_ns
    return [pickling.pack_or_words(held[n]) if n in held else b"" for n in names]


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
    "call": _call,
    "push": _push,
    "pull": _pull,
    "end_group": _end_group,
    "exits": _exits,
}


def known() -> dict[str, Callable[..., list[bytes]]]:
    """These, and those of capabilities."""
    return {**REQUESTS, **{op: load(target) for row in rows() for op, target in row.requests.items()}}
