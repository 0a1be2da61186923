"""What a name holds on this rank, as digests; and how far its tensors are from another rank's bytes.

`look` walks a value down to its leaves and takes of each tensor a BLAKE2b digest of its raw bytes (so a NaN
equals the same NaN, and no rounding hides a bit), its L2 norm in float64, shape and dtype.
No collective is called and no group is needed: DTensors are taken as this rank's own shard. For
tensors that differ `read` gives some bytes of the reference, and `measure` compares them
with this rank's own.

The walk: parameters and buffers of a module by name (DDP and torch.compile unwrapped, tied ones
once); an optimizer's state by parameter and key, and its settings; items of dicts, lists, tuples and data classes;
else the `state_dict` of an object that has one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nbddp.compat import torch as torch_compat
from nbddp.protocol import pickling
from nbddp.worker.parts import RankWorker

CHUNK = 1 << 24  # bytes that are looked at at once
DEEPEST = 32  # containers within containers
TEXT = 60  # characters of a value that is shown
Found = Iterator[tuple[str, str, Any]]


def compare(
    worker: RankWorker, buffers: Sequence[Any], *, part: str, names: Sequence[str] = (), spans: Sequence[Any] = ()
) -> list[bytes]:
    """What names hold, as digests; or, to see how far tensors are apart, some bytes of them, given or taken."""
    held = worker.shell.user_ns
    if part == "look":
        return [pickling.pack_or_words(look(held, n)) for n in names]
    if part == "read":
        return read(held, spans)
    return [pickling.pack_or_words(measure(held, spans, buffers))]


def look(namespace: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Type and leaves of what `name` holds, as plain data (`nbddp.capabilities.compare.replicas.Leaf`); None if there
    is no such name."""
    if name not in namespace:
        return None
    import torch

    if torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)  # what other streams still write
    value = namespace[name]
    with torch.no_grad():
        names = _names(namespace)
        leaves = [_leaf(path, kind, thing) for path, kind, thing in _walk(value, "", "", names, 0)]
    ddp = torch.nn.parallel.DistributedDataParallel
    broadcasts = isinstance(value, ddp) and bool(value.will_sync_module_buffers())
    return {"type": _type(value), "leaves": {leaf["path"]: leaf for leaf in leaves}, "broadcasts": broadcasts}


def read(namespace: Mapping[str, Any], spans: Sequence[tuple[str, str, int, int]]) -> list[bytes]:
    """The bytes `start` to `stop` of the tensors at (name, path)."""
    import torch

    with torch.no_grad():
        found = _tensors(namespace, {(name, path) for name, path, _, _ in spans})
        return [_raw(found[name, path])[a:b].cpu().numpy().tobytes() for name, path, a, b in spans]


def measure(
    namespace: Mapping[str, Any], spans: Sequence[tuple[str, str, int, int]], theirs: Sequence[Any]
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


# -- the walk --------------------------------------------------------------------------------


def walk(namespace: Mapping[str, Any], name: str) -> Found:
    """(path, kind, leaf) of everything that a name holds."""
    return _walk(namespace[name], "", "", _names(namespace), 0)


def _walk(value: Any, path: str, kind: str, names: Mapping[int, str], depth: int) -> Found:
    """(path, kind, leaf) of everything in `value`. `names`: id of a parameter → its name in a module."""
    import torch

    if depth > DEEPEST:
        yield path, "opaque", value
    elif isinstance(value, torch.nn.Module):
        yield from _module(unwrapped(value), path)
    elif isinstance(value, torch.optim.Optimizer):
        yield from _optimizer(value, path, names, depth)
    elif isinstance(value, torch.Tensor):
        yield from _tensor(value, path, kind or "tensor")
    elif isinstance(value, np.ndarray):
        yield path, kind or "tensor", value
    else:
        parts = _parts(value)
        if parts is None:
            yield path, kind, value
            return
        for key, part in parts:
            at = f"{path}{key}" if key.startswith("[") or not path else f"{path}.{key}"
            yield from _walk(part, at, kind, names, depth + 1)


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """Items of a container with their keys as a path has them; None if it is none."""
    if isinstance(value, Mapping):
        return [(k if isinstance(k, str) else f"[{k!r}]", v) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return [(f"[{i}]", v) for i, v in enumerate(value)]
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    state = getattr(value, "state_dict", None)
    return _parts(state()) if callable(state) else None


def _module(module: Any, path: str) -> Found:
    for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in named:
            yield from _tensor(tensor, f"{path}.{name}" if path else name, kind)


def unwrapped(module: Any) -> Any:
    """The user's own module within DDP and torch.compile."""
    from torch.nn.parallel import DistributedDataParallel

    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif torch_compat.is_compiled(module):
            module = torch_compat.compiled_from(module)
        else:
            return module


def _optimizer(optimizer: Any, path: str, names: Mapping[int, str], depth: int) -> Found:
    """State by parameter and key; then the settings of each group."""
    before = f"{path}." if path else ""
    labels = _labels(optimizer, names)
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        yield from _walk(optimizer.state.get(parameter, {}), before + labels[number], "state tensor", names, depth + 1)
    for number, group in enumerate(optimizer.param_groups):
        settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        yield from _walk(settings, f"{before}group {number}", "setting", names, depth + 1)


def _labels(optimizer: Any, names: Mapping[int, str]) -> list[str]:
    """A name for each parameter of the optimizer: as a module of the namespace has it, or else its number."""
    some = [p for group in optimizer.param_groups for p in group["params"]]
    labels = [names.get(id(p), f"parameter {i}") for i, p in enumerate(some)]
    return labels if len(set(labels)) == len(labels) else [f"parameter {i}" for i in range(len(some))]


def _names(namespace: Mapping[str, Any]) -> dict[int, str]:
    """id of each parameter of the namespace's modules → its name there."""
    import torch

    modules = [v for v in list(namespace.values()) if isinstance(v, torch.nn.Module)]
    return {id(p): name for m in reversed(modules) for name, p in unwrapped(m).named_parameters()}


def _tensor(tensor: Any, path: str, kind: str) -> Found:
    """A sparse COO tensor as its indices and values, any other as itself."""
    import torch

    if tensor.layout is torch.sparse_coo:
        indices, values = torch_compat.sparse_parts(tensor)
        yield f"{path}.indices" if path else "indices", kind, indices
        yield f"{path}.values" if path else "values", kind, values
    else:
        yield path, kind, tensor


def _tensors(namespace: Mapping[str, Any], wanted: set[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """The local tensors at these (name, path)."""
    names = _names(namespace)
    return {
        (name, path): _as_tensor(thing)
        for name in {n for n, _ in wanted}
        for path, _, thing in _walk(namespace[name], "", "", names, 0)
        if (name, path) in wanted
    }


# -- leaves ----------------------------------------------------------------------------------


def _leaf(path: str, kind: str, thing: Any) -> dict[str, Any]:
    import torch

    if isinstance(thing, torch.Tensor | np.ndarray):
        try:
            return {"path": path, "kind": kind, **_digested(thing)}
        except (RuntimeError, TypeError, NotImplementedError, ValueError):  # meta, nested, quantized, of objects
            return {"path": path, "kind": "opaque", "type": f"{_type(thing)} of {thing.dtype}"}
    if isinstance(thing, np.generic) and np.issubdtype(thing.dtype, np.number):
        thing = thing.item()
    if isinstance(thing, int | float | complex) and not isinstance(thing, bool):
        kind, value, text = kind or "number", thing, repr(thing)
    elif thing is None or isinstance(thing, str | bytes | bool | torch.dtype | torch.device | np.generic):
        kind, value, text = kind or "value", None, repr(thing)
    elif isinstance(thing, set | frozenset):
        kind, value, text = kind or "value", None, f"{{{', '.join(sorted(map(repr, thing)))}}}"
    else:
        return {"path": path, "kind": "opaque", "type": _type(thing)}
    kind = "number" if kind == "state tensor" else kind
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    short = text if len(text) <= TEXT else text[: TEXT - 1] + "…"
    return {"path": path, "kind": kind, "type": _type(thing), "digest": digest, "value": value, "text": short}


def _digested(thing: Any) -> dict[str, Any]:
    """Digest, norm, shape and dtype of a tensor; of a sharded one those of this rank's part."""
    part = _part(thing)
    tensor = _as_tensor(thing)
    raw = _raw(tensor)
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(thing.shape)
    digest = hashlib.blake2b(f"{dtype} {tuple(tensor.shape)} {shape}".encode(), digest_size=16)
    norm = 0.0
    for start in range(0, raw.numel(), CHUNK):
        piece = raw[start : start + CHUNK].cpu()
        digest.update(memoryview(piece.numpy()))
        norm = float(np.hypot(norm, _norm(piece, tensor.dtype)))
    return {
        "type": dtype, "shape": shape, "digest": digest.hexdigest(), "norm": norm, "bytes": raw.numel(), "part": part,
    }  # fmt: skip


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
