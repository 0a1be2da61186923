"""Walks the value of a variable on a rank, down to its leaves.

Parameters and buffers of a module by name (DDP and torch.compile unwrapped, tied ones once); an optimizer's state by
parameter and key, and its settings; items of dicts, lists, tuples and data classes; else the `state_dict` of an object
that has one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nbddp.compat.extra import torch as torch_extra

DEEPEST = 32  # containers within containers
Found = Iterator[tuple[str, str, Any]]


def walk(namespace: Mapping[str, object], name: str, names: Mapping[int, str] | None = None) -> Found:
    """(path, kind, leaf) of everything that a name holds. names: `parameter_names`, for who walks several."""
    return _walk(namespace[name], "", "", parameter_names(namespace) if names is None else names, 0)


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
        elif torch_extra.is_compiled(module):
            module = torch_extra.compiled_from(module)
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


def parameter_names(namespace: Mapping[str, object]) -> dict[int, str]:
    """id of each parameter of the namespace's modules → its name there."""
    import torch

    modules = [v for v in list(namespace.values()) if isinstance(v, torch.nn.Module)]
    return {id(p): name for m in reversed(modules) for name, p in unwrapped(m).named_parameters()}


def _tensor(tensor: Any, path: str, kind: str) -> Found:
    """A sparse COO tensor as its indices and values, any other as itself."""
    import torch

    if tensor.layout is torch.sparse_coo:
        indices, values = torch_extra.sparse_parts(tensor)
        yield f"{path}.indices" if path else "indices", kind, indices
        yield f"{path}.values" if path else "values", kind, values
    else:
        yield path, kind, tensor
