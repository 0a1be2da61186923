"""An operator's arguments on their way to the CPU's kernel: twins for CUDA tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from nbddp.capabilities.simulated_gpus.on_rank import machine, memory

Tensor, Device = torch.Tensor, torch.device
ON_CPU = torch.device("cpu")
Keywords = Mapping[str, Any]  # arguments of an operator by name


class Relabelled:
    """The arguments of one call for the CPU's kernel."""

    __slots__ = ("args", "device", "kwargs", "mixed", "originals")

    def __init__(self, op: Any, args: Sequence[Any], kwargs: Keywords) -> None:
        self.device: int | None = None  # index of the first CUDA tensor's device
        self.mixed = False  # whether there is a second device
        self.originals: dict[int, tuple[Any, Any]] = {}  # id of a twin → (its tensor, the twin)
        # A list comprehension and a method: a recursive closure would be a reference cycle and keep tensors alive.
        self.args = [self._one(arg, op) for arg in args]
        self.kwargs = {name: self._one(arg, op) for name, arg in kwargs.items()} if kwargs else {}

    def _one(self, arg: Any, op: Any) -> Any:
        if isinstance(arg, Tensor):
            return self._tensor(arg, op)
        if isinstance(arg, list | tuple):
            return [self._one(part, op) for part in arg]
        if isinstance(arg, Device):
            return ON_CPU if arg.type == "cuda" else arg
        return arg

    def _tensor(self, tensor: Any, op: Any) -> Any:
        if not tensor.is_cuda and not _heal(tensor):
            self.mixed = True
            return tensor
        index = machine.index_of(tensor)
        if self.device is None:
            self.device = index
        elif self.device != index:
            self.mixed = True
        if type(tensor) is not Tensor and torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python):
            raise NotImplementedError(f"{op}: a wrapper of type {type(tensor).__name__} reached the kernel for CUDA")
        twin = machine.twin(tensor)
        self.originals[id(twin)] = (tensor, twin)
        return twin


def _heal(tensor: Any) -> bool:
    """Labels a view that C++ has made from a storage, which says cpu. Whether this was one."""
    if tensor.layout is not torch.strided:
        return False
    index = memory.index_of(tensor.untyped_storage())
    keys, of = torch._C._dispatch_keys(tensor), torch._C.DispatchKey
    if index < 0 or not (keys.has(of.CUDA) or keys.has(of.NestedTensorCUDA)):
        return False
    machine.to_cuda(tensor, index)
    return True


def flat(args: Any) -> Iterator[Any]:
    """The tensors among arguments, those in lists too."""
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from flat(arg)
