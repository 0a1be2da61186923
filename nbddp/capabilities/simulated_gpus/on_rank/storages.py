"""What Python sees of storages and tensors: `UntypedStorage` on a GPU, subclasses of Tensor, and a loaded script."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from nbddp.capabilities.simulated_gpus.on_rank import devices, machine, memory

Storage = torch.UntypedStorage


def install() -> None:
    _storages()
    # `nn.Parameter(tensor)` and the like make a view in C++ and give it a Python object. A view that comes from a
    # kernel in Python has one already. So the argument looks like a CPU tensor during the call.
    torch.Tensor._make_subclass = staticmethod(_as_cpu(torch.Tensor._make_subclass, 1))
    torch.Tensor.as_subclass = _as_cpu(torch.Tensor.as_subclass, 0)
    torch.jit.load = _labelled(torch.jit.load)


def _labelled(load: Callable[..., Any]) -> Callable[..., Any]:
    """C++ makes the tensors of a script from their storages, which say cpu."""

    @functools.wraps(load)
    def loaded(*args: Any, **kwargs: Any) -> Any:
        script = load(*args, **kwargs)
        for tensor in (*script.parameters(), *script.buffers()):
            index = memory.index_of(tensor.untyped_storage())
            if index >= 0:
                machine.set_index(tensor, index)
        return script

    return loaded


def _as_cpu(make: Callable[..., Any], at: int) -> Callable[..., Any]:
    key = torch._C.DispatchKey

    def labelled(*args: Any, **kwargs: Any) -> Any:  # torch._dynamo compares signatures, and takes this one
        tensor = args[at] if len(args) > at else None
        keys = torch._C._dispatch_keys(tensor) if isinstance(tensor, torch.Tensor) else None
        if keys is None or not keys.has(key.CUDA) or keys.has(key.Python):
            return make(*args, **kwargs)
        label = machine.take_label(tensor)
        try:
            made = make(*args, **kwargs)
        finally:
            machine.restore_label(tensor, label)
        machine.like_label(made, label)
        return made

    return labelled


_new, _copy, _resize = Storage.__new__, Storage.copy_, Storage.resize_
_device = torch._C.StorageBase.device
_is_shared = Storage.is_shared


def _storages() -> None:
    Storage.__new__, Storage.copy_, Storage.resize_ = new, copy, resize
    Storage.device = property(device)
    Storage.is_cuda = property(lambda self: memory.index_of(self) >= 0)
    Storage.get_device = memory.index_of
    Storage.is_shared = lambda self: memory.index_of(self) >= 0 or _is_shared(self)


def new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    if device is None or torch.device(device).type != "cuda":
        return _new(cls, *args, **kwargs) if device is None else _new(cls, *args, device=device, **kwargs)
    index = devices.index_for(torch.device(device))
    if args and isinstance(args[0], int):
        memory.make_room(index, args[0])
    made = _new(cls, *args, **kwargs)
    memory.adopt(made, index)
    return made


def copy(self: Any, source: Any, non_blocking: bool | None = None) -> Any:
    if self.device.type != "cuda" and source.device.type != "cuda":
        return _copy(self, source, bool(non_blocking))
    if self.nbytes() != source.nbytes():
        raise RuntimeError("size does not match")
    ctypes.memmove(self.data_ptr(), source.data_ptr(), self.nbytes())
    return self


def resize(self: Any, size: int) -> Any:
    index = memory.index_of(self)
    if index >= 0 and size > self.nbytes():
        memory.make_room(index, size - self.nbytes())
    _resize(self, size)
    if index >= 0:
        memory.adopt(self, index)
    return self


def device(self: Any) -> Any:
    index = memory.index_of(self)
    return _device.__get__(self) if index < 0 else torch.device("cuda", index)
