"""Batches: which of a rank's values is one, and how several are joined to the batch of one process.

Tensors are joined along their first dimension. Anything else stays as it is where all ranks have the same; a whole
number that is the number of samples is added, and a list with an entry for each sample is joined. What fits none of
these is refused by its path.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nbddp.capabilities.prove.on_rank_reach import is_tensor, items, leaves

SAMPLE = 1 << 20  # elements of a large tensor that are digested
WHOLE = 1 << 24
IGNORED = -100  # torch's ignore_index


class CannotJoin(Exception):
    """The batches of the ranks make no batch for one process; its text says why and what to do."""


def samples(value: Any) -> int:
    """The first dimension of the first tensor that has one; 0 without such a tensor."""
    return next((int(leaf.shape[0]) for _, leaf in leaves(value) if is_tensor(leaf) and leaf.dim() > 0), 0)


def digest(value: Any) -> str:
    """Equal for equal values; of a large tensor, of each n-th element."""
    import torch

    made = hashlib.blake2b(digest_size=12)
    for path, leaf in leaves(value):
        made.update(path.encode())
        if is_tensor(leaf):
            flat = leaf.detach().reshape(-1)
            flat = flat if flat.numel() <= WHOLE else flat[:: flat.numel() // SAMPLE]
            made.update(f"{tuple(leaf.shape)}{leaf.dtype}".encode())
            made.update(flat.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, np.ndarray):
            made.update(np.ascontiguousarray(leaf).tobytes())
        else:
            made.update(repr(leaf).encode())
    return made.hexdigest()


def counted(value: Any) -> dict[str, int]:
    """Of whole-number tensors with ignored entries, and of masks: how many entries count."""
    import torch

    found = {}
    for path, leaf in leaves(value):
        if is_tensor(leaf) and leaf.dim() > 0:
            if leaf.dtype is torch.bool:
                found[path] = int(leaf.sum())
            elif not leaf.is_floating_point() and not leaf.is_complex():
                found[path] = int((leaf != IGNORED).sum())
    return found


def joined(parts: Sequence[Any], path: str, sizes: Sequence[int]) -> Any:
    """One value of the ranks' values. sizes: samples on each rank. Raises CannotJoin."""
    first = parts[0]
    held = items(first)
    if held is None:
        return _joined_leaf(parts, path, sizes)
    if any(type(p) is not type(first) for p in parts):
        raise CannotJoin(f"{path} is a {type(first).__name__} on rank 0 and not on all ranks")
    if isinstance(first, list) and not any(is_tensor(leaf) for _, leaf in leaves(first)):
        if [len(p) for p in parts] == list(sizes):
            return [entry for part in parts for entry in part]
        if all(p == first for p in parts):
            return first
    keys = [[key for key, _ in items(p) or ()] for p in parts]
    if any(k != keys[0] for k in keys):
        raise CannotJoin(f"{path} has other keys on other ranks; give each rank's batch the same form")
    values = [[value for _, value in items(p) or ()] for p in parts]
    made = [joined([v[i] for v in values], _at(path, key), sizes) for i, key in enumerate(keys[0])]
    return _like(first, keys[0], made)


def _at(path: str, key: Any) -> str:
    return f"{path}[{key!r}]"


def _like(first: Any, keys: Sequence[Any], made: list[Any]) -> Any:
    """A container of the same kind."""
    if isinstance(first, Mapping):
        try:
            return type(first)(zip(keys, made, strict=True))  # type: ignore[call-arg]
        except (TypeError, ValueError):  # a mapping that is made otherwise
            return dict(zip(keys, made, strict=True))
    if isinstance(first, tuple) and type(first) is not tuple:  # one with names
        return type(first)(*made)
    if isinstance(first, list | tuple):
        return type(first)(made)
    return replace(first, **dict(zip(keys, made, strict=True)))


def _joined_leaf(parts: Sequence[Any], path: str, sizes: Sequence[int]) -> Any:
    first = parts[0]
    if all(is_tensor(p) for p in parts):
        return _joined_tensors(parts, path, sizes)
    if all(isinstance(p, np.ndarray) and p.ndim and len(p) == n for p, n in zip(parts, sizes, strict=True)):
        return np.concatenate(parts)
    same = len({digest(p) for p in parts}) == 1
    whole = all(isinstance(p, int) and not isinstance(p, bool) for p in parts)
    if whole and list(parts) == list(sizes):
        return sum(parts)
    if same:
        return first
    raise CannotJoin(
        f"{path} is {first!r} on rank 0 and {next(p for p in parts if digest(p) != digest(first))!r} on another, and "
        "no tensor: one process can be given only one of them. Compute it in the step from tensors of the batch"
    )


def _joined_tensors(parts: Sequence[Any], path: str, sizes: Sequence[int]) -> Any:
    import torch

    first = parts[0]
    equal = len({digest(p) for p in parts}) == 1
    if first.dim() == 0 or (equal and [p.shape[0] for p in parts] != list(sizes)):
        if equal:
            return first
        if [int(p) for p in parts] == list(sizes) and not first.is_floating_point():
            return sum(parts)
        raise CannotJoin(
            f"{path} is one number, and another on each rank; compute it in the step from tensors of the batch"
        )
    if len({tuple(p.shape[1:]) for p in parts}) > 1:
        shapes = " and ".join(str(tuple(p.shape)) for p in parts[:2])
        raise CannotJoin(f"{path} has the shapes {shapes} on ranks 0 and 1; pad the batches to one shape")
    made = torch.cat([p.detach() for p in parts])
    return made.requires_grad_() if first.requires_grad else made


def like(value: Any, own: Any) -> Any:
    """A batch of another rank on the devices of this rank's."""
    device = next((leaf.device for _, leaf in leaves(own) if is_tensor(leaf)), None)
    held = items(value)
    if held is None:
        return value.to(device) if is_tensor(value) and device is not None and value.device != device else value
    return _like(value, [key for key, _ in held], [like(part, own) for _, part in held])


def cut(value: Any, size: int, to: int) -> Any:
    """The first `to` samples of a batch of `size`."""
    held = items(value)
    if held is None:
        return value[:to] if is_tensor(value) and value.dim() and value.shape[0] == size else value
    if isinstance(value, list) and len(value) == size and not any(is_tensor(leaf) for _, leaf in leaves(value)):
        return value[:to]
    return _like(value, [key for key, _ in held], [cut(part, size, to) for _, part in held])
