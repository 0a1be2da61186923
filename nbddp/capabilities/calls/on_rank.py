"""A rank's side of calls, pushes and pulls."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Sequence
from typing import Any

from nbddp.protocol import pickling
from nbddp.protocol.capability import load
from nbddp.worker.parts import RankWorker
from nbddp.worker.program import CellFiles

CellSource = tuple[str, str, str]  # as from `command.sources_of`: file, name, text


def call(
    worker: RankWorker, buffers: Sequence[Any], *, argv: Sequence[str], sources: Sequence[CellSource], writes: str = ""
) -> list[bytes]:
    """Call a pickled function; its value, or the exception, goes back pickled. Where the client trusts no rank, the
    module `writes` writes the value, and no exception goes back."""
    import cloudpickle

    sys.argv = list(argv)
    take(worker.files, sources)
    function, arguments, options = cloudpickle.loads(bytes(buffers[0]))
    try:
        value = function(*arguments, **options)
    except BaseException as e:
        worker.parts.ended(e)
        raise
    worker.parts.ended(None)
    return [load(writes).write(value) if writes else pickling.pack_or_words(value)]


def push(
    worker: RankWorker, buffers: Sequence[Any], *, names: Sequence[str], sources: Sequence[CellSource]
) -> list[bytes]:
    import cloudpickle

    take(worker.files, sources)
    found = {n: cloudpickle.loads(bytes(b)) for n, b in zip(names, buffers, strict=True)}
    worker.shell.user_ns.update(found)
    return []


def pull(worker: RankWorker, buffers: Sequence[Any], *, names: Sequence[str]) -> list[bytes]:
    """One buffer per name; an empty one for a name that is not there."""
    held = worker.shell.user_ns
    return [pickling.pack_or_words(held[n]) if n in held else b"" for n in names]


def take(files: CellFiles, sources: Sequence[CellSource]) -> None:
    """Functions of these cells arrive. Their code names the notebook's files, which ranks do not have."""
    for path, name, text in sources:
        linecache.cache[path] = len(text), None, text.splitlines(keepends=True), path
        if name:
            files.shown.pop(path, None)
            files.shown[path] = name
