"""The value of a variable on this rank, as digests, and the distance of its tensors from another rank's bytes.

`look` takes of each tensor in a value (`analysis.on_rank_walk`) a BLAKE2b digest of its raw bytes, its L2 norm in
float64, shape and dtype. By its bytes a NaN equals the same NaN, and no rounding hides a bit. No collective is called
and no group is needed: DTensors are taken as this rank's own shard. For tensors that differ `read` gives some bytes of
the reference, and `measure` compares them with this rank's own.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nbddp.analysis.on_rank_walk import parameter_names, unwrapped, walk
from nbddp.capabilities.compare.replicas import HeldValue, Leaf
from nbddp.protocol import pickling
from nbddp.worker.parts import RankWorker

if TYPE_CHECKING:
    import torch

CHUNK = 1 << 24  # bytes that are looked at at once
TEXT = 60  # characters of a value that is shown


def compare(
    worker: RankWorker, buffers: Sequence[Any], *, part: str, names: Sequence[str] = (), spans: Sequence[Any] = ()
) -> list[bytes]:
    """What names hold, as digests; or, to see how far tensors are apart, some bytes of them, given or taken."""
    held = worker.shell.user_ns
    if part == "look":
        return [pickling.pack_answer(look(held, n)) for n in names]
    if part == "read":
        return read(held, spans)
    return [pickling.pack_answer(measure(held, spans, buffers))]


def look(namespace: Mapping[str, object], name: str) -> HeldValue | None:
    """What `name` holds; None if there is no such name."""
    if name not in namespace:
        return None
    import torch

    if torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)  # what other streams still write
    value = namespace[name]
    with torch.no_grad():
        leaves = [_leaf(*found) for found in walk(namespace, name)]
    ddp = torch.nn.parallel.DistributedDataParallel
    broadcasts = isinstance(value, ddp) and bool(value.will_sync_module_buffers())
    return HeldValue(_type(value), {leaf.path: leaf for leaf in leaves}, broadcasts)


def read(namespace: Mapping[str, object], spans: Sequence[tuple[str, str, int, int]]) -> list[bytes]:
    """The bytes `start` to `stop` of the tensors at (name, path)."""
    import torch

    with torch.no_grad():
        found = _tensors(namespace, {(name, path) for name, path, _, _ in spans})
        return [_raw(found[name, path])[a:b].cpu().numpy().tobytes() for name, path, a, b in spans]


def measure(
    namespace: Mapping[str, object], spans: Sequence[tuple[str, str, int, int]], theirs: Sequence[Any]
) -> list[float]:
    """Per span the largest absolute difference between this rank's bytes and `theirs`: NaN if a NaN meets a number."""
    import torch

    with torch.no_grad():
        found = _tensors(namespace, {(name, path) for name, path, _, _ in spans})
        apart = []
        for (name, path, a, b), data in zip(spans, theirs, strict=True):
            own = found[name, path]
            mine = _raw(own)[a:b].cpu()
            apart.append(_largest(mine, torch.frombuffer(bytearray(data), dtype=torch.uint8), own.dtype))
        return apart


def _tensors(namespace: Mapping[str, object], wanted: set[tuple[str, str]]) -> dict[tuple[str, str], torch.Tensor]:
    """The local tensors at these (name, path)."""
    names = parameter_names(namespace)
    return {
        (name, path): _as_tensor(thing)
        for name in {n for n, _ in wanted}
        for path, _, thing in walk(namespace, name, names)
        if (name, path) in wanted
    }


# -- leaves ----------------------------------------------------------------------------------


def _leaf(path: str, kind: str, thing: Any) -> Leaf:
    import torch

    if isinstance(thing, torch.Tensor | np.ndarray):
        try:
            return _digested(path, kind, thing)
        except (RuntimeError, TypeError, NotImplementedError, ValueError):  # meta, nested, quantized, of objects
            return Leaf(path, "opaque", f"{_type(thing)} of {thing.dtype}")
    if isinstance(thing, np.generic) and np.issubdtype(thing.dtype, np.number):
        thing = thing.item()
    if isinstance(thing, int | float | complex) and not isinstance(thing, bool):
        kind, value, text = kind or "number", thing, repr(thing)
    elif thing is None or isinstance(thing, str | bytes | bool | torch.dtype | torch.device | np.generic):
        kind, value, text = kind or "value", None, repr(thing)
    elif isinstance(thing, set | frozenset):
        kind, value, text = kind or "value", None, f"{{{', '.join(sorted(map(repr, thing)))}}}"
    else:
        return Leaf(path, "opaque", _type(thing))
    kind = "number" if kind == "state tensor" else kind
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    short = text if len(text) <= TEXT else text[: TEXT - 1] + "…"
    return Leaf(path, kind, _type(thing), digest=digest, value=value, text=short)


def _digested(path: str, kind: str, thing: Any) -> Leaf:
    """A tensor; of a sharded one this rank's part."""
    tensor = _as_tensor(thing)
    raw = _raw(tensor)
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(thing.shape)
    digest = hashlib.blake2b(f"{dtype} {tuple(tensor.shape)} {shape}".encode(), digest_size=16)
    norm = 0.0
    for start in range(0, raw.numel(), CHUNK):
        piece = raw[start : start + CHUNK].cpu()
        digest.update(memoryview(piece.numpy()))
        norm = float(np.hypot(norm, _norm(piece, tensor.dtype)))
    return Leaf(path, kind, dtype, shape, digest.hexdigest(), norm, raw.numel(), _part(thing))


def _as_tensor(thing: Any) -> Any:
    """A plain tensor: a numpy array's memory, a DTensor's local shard."""
    import torch

    if isinstance(thing, np.ndarray):
        plain = np.ascontiguousarray(thing) if thing.flags.writeable else np.array(thing, order="C")
        return torch.from_numpy(plain.reshape(thing.shape))
    return thing.to_local() if _is_dtensor(thing) else thing


def _is_dtensor(thing: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(thing, module.DTensor)


def _part(thing: Any) -> str:
    """Which part of a sharded tensor this rank has: the mesh's ranks, and the place along its sharded dimensions.
    Empty for a tensor that every rank has whole."""
    if not _is_dtensor(thing):
        return ""
    at = thing.device_mesh.get_coordinate() or ()
    placed = [(i, c) for i, (p, c) in enumerate(zip(thing.placements, at, strict=False)) if not p.is_replicate()]
    return f"{placed} of ranks {thing.device_mesh.mesh.flatten().tolist()}" if placed else ""


def _raw(tensor: Any) -> Any:
    """All elements in order as a flat uint8 tensor; a copy only if they do not lie so in memory."""
    import torch

    if tensor.is_quantized:
        raise TypeError("a quantized tensor has no plain bytes")
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _norm(piece: Any, dtype: Any) -> float:
    import torch

    wide = torch.complex128 if dtype.is_complex else torch.float64
    return float(torch.linalg.vector_norm(piece.view(dtype).to(wide)))


def _largest(mine: Any, theirs: Any, dtype: Any) -> float:
    """The largest absolute difference of two flat uint8 tensors that hold elements of `dtype`."""
    import torch

    if not dtype.is_floating_point and not dtype.is_complex:
        return _largest_whole(mine, theirs, dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    a, b = (x.view(dtype).to(wide) for x in (mine, theirs))
    same = (a == b) | (a.isnan() & b.isnan())
    apart = torch.where(same, 0.0, (a - b).abs())
    return float("nan") if bool(apart.isnan().any()) else float(apart.max())


def _largest_whole(mine: Any, theirs: Any, dtype: Any) -> float:
    """As `_largest`, for whole numbers and booleans: exact also where the difference overflows the dtype."""
    import torch

    a, b = (x.view(torch.uint8 if dtype is torch.bool else dtype).numpy() for x in (mine, theirs))
    apart = np.maximum(a, b) - np.minimum(a, b)  # wraps around, and read without a sign it is right again
    return float(apart.view(f"u{a.dtype.itemsize}").max())


def _type(value: Any) -> str:
    import torch

    if isinstance(value, torch.nn.Module):
        return type(unwrapped(value)).__name__
    return "Tensor" if isinstance(value, torch.nn.Parameter) else type(value).__name__
