"""Nested tensors in the strided layout: C++ makes them of a storage, which says cpu, so their device is set here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nbddp.capabilities.simulated_gpus.on_rank import devices, kernels, machine, memory

aten = torch.ops.aten
KEY = "NestedTensorCUDA"
ON_HOST = ("_nested_tensor_size", "_nested_tensor_strides", "_nested_tensor_storage_offsets")


def install() -> None:
    for name in ("nested_tensor", "as_nested_tensor"):
        setattr(torch.nested, name, _made(getattr(torch.nested, name)))
    library = kernels.library("aten")
    library.impl("_to_copy", to_copy, "NestedTensorCPU")
    library.impl("_nested_tensor_from_tensor_list", from_list, "CUDA")
    kernels.own.add("_nested_tensor_from_tensor_list")
    own = {"_to_copy": to_copy, **{name: _on_host(getattr(aten, name).default) for name in ON_HOST}}
    for name, kernel in own.items():
        library.impl(name, kernel, KEY)
    kernels.own |= {f"{KEY} {name}" for name in own}


def _made(make: Callable[..., Any]) -> Callable[..., Any]:
    def labelled(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        if made.layout is torch.strided and torch._C._dispatch_keys(made).has(torch._C.DispatchKey.NestedTensorCUDA):
            machine.set_index(made, memory.index_of(made.untyped_storage()))
        return made

    return labelled


def from_list(tensors: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None) -> Any:
    """Below autograd, which notes the device of what it gets."""
    made = aten._nested_tensor_from_tensor_list([machine.twin(one) for one in tensors], dtype, layout)
    to = tensors[0].device if device is None else device
    return made.to(to) if to.type == "cpu" else kernels.labelled(made.data, devices.index_for(to))


def _on_host(op: Any) -> Callable[..., Any]:
    """They are on the CPU, those of a GPU's tensor too."""
    return lambda tensor: op(machine.twin(tensor))


def to_copy(tensor: Any, *, dtype: Any = None, device: Any = None, **others: Any) -> Any:
    """To another type of elements or device."""
    to = tensor.device if device is None else device
    index = devices.index_for(to) if to.type == "cuda" else -1
    whole = machine.twin(tensor).clone(memory_format=torch.contiguous_format)
    sizes = whole._nested_tensor_size()
    places = torch._nested_compute_contiguous_strides_offsets(sizes)
    made = torch._nested_view_from_buffer(whole.values().to(dtype or tensor.dtype), sizes, *places)
    return made if index < 0 else kernels.labelled(made.data, index)
