"""The bytes of variables on this rank: each storage once, a DTensor's own shard, and the variables that share it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nbddp.analysis import on_rank_walk
from nbddp.capabilities.memory.on_rank import storages, user_names
from nbddp.capabilities.memory.parts import NameSize
from nbddp.compat.extra import torch as torch_extra
from nbddp.protocol import pickling
from nbddp.worker.parts import RankWorker

KINDS = {"parameter": "parameters", "buffer": "module buffers", "state tensor": "optimizer state"}
Storage = tuple[str, int, int]  # device, address, bytes


def sizes(namespace: Mapping[str, object], names: Sequence[str]) -> dict[str, NameSize | None]:
    """Name → what it holds; None if there is no such name."""
    others = {n: set(_storages(namespace, n)) for n in user_names(namespace)}
    return {n: _size(namespace, n, others) if n in namespace else None for n in names}


def _size(namespace: Mapping[str, object], name: str, others: Mapping[str, set[Storage]]) -> NameSize:
    seen: set[Storage] = set()
    parts: dict[str, int] = {}
    sharded: list[str] = []
    used = tied = whole = 0
    for kind, thing in _tensors(namespace, name):
        own = storages_of(thing)
        tied += bool(own) and all(s in seen for s in own)
        fresh = [s for s in own if s not in seen]
        seen.update(fresh)
        held = sum(size for _, _, size in fresh)
        parts[kind] = parts.get(kind, 0) + held
        used += _spanned(thing)
        whole += thing.numel() * thing.element_size() if _is_sharded(thing) else held
        if _is_sharded(thing) and (text := _placement(thing)) not in sharded:
            sharded.append(text)
    held = sum(parts.values())
    shared = {n: sum(s[2] for s in its & seen) for n, its in others.items() if n != name and its & seen}
    view = held if held > used and len(seen) == 1 and not tied else 0
    kind, spans = type(namespace[name]).__name__, used if view else held
    return NameSize(kind, parts, tied, spans, whole, sharded, shared, len(seen))


def _storages(namespace: Mapping[str, object], name: str) -> Iterator[Storage]:
    for _, thing in _tensors(namespace, name):
        yield from storages_of(thing)


def _tensors(namespace: Mapping[str, object], name: str) -> Iterator[tuple[str, Any]]:
    """(part, tensor or array) of what a name holds, gradients of parameters included."""
    import torch

    for _, kind, thing in on_rank_walk.walk(namespace, name):
        if isinstance(thing, torch.Tensor | np.ndarray):
            yield KINDS.get(kind, "tensors"), thing
            gradient = getattr(thing, "grad", None) if kind == "parameter" else None
            if gradient is not None:
                yield "gradients", gradient


def storages_of(thing: Any) -> list[Storage]:
    """What a tensor or an array lies in; an array has the address that a tensor of the same memory has."""
    if isinstance(thing, np.ndarray):
        base = thing
        while isinstance(base.base, np.ndarray):
            base = base.base
        return [("cpu", base.__array_interface__["data"][0], base.nbytes)] if base.nbytes else []
    return storages(thing)


def _spanned(thing: Any) -> int:
    """Bytes of its own elements on this rank."""
    own = thing if isinstance(thing, np.ndarray) else torch_extra.shard(thing)
    return int(own.nbytes)


def _is_sharded(thing: Any) -> bool:
    return hasattr(thing, "placements") and any(not p.is_replicate() for p in thing.placements)


def _placement(thing: Any) -> str:
    """`Shard(dim=0) over 4 ranks`."""
    by = ", ".join(repr(p) for p in thing.placements)
    return f"{by} over {thing.device_mesh.size()} ranks"


def named_memory(worker: RankWorker, buffers: Sequence[Any], *, names: Sequence[str]) -> list[bytes]:
    """What names hold, in bytes."""
    return [pickling.pack_answer(sizes(worker.shell.user_ns, names))]
