"""An operator's arguments on their way to the CPU's kernel: twins for CUDA tensors, and the check of their devices."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nbddp.capabilities.simulated_gpus.on_rank import machine, memory, versions

Tensor, Device = torch.Tensor, torch.device
ON_CPU = torch.device("cpu")
CUDA_KEYS = torch._C.DispatchKey.CUDA, torch._C.DispatchKey.SparseCUDA, torch._C.DispatchKey.SparseCsrCUDA

MIXED = {  # operators whose tensors may be on several devices → why
    "aten::copy_": "it copies between devices",
    "aten::_copy_from": "it copies between devices",
    "aten::_foreach_copy_": "it copies between devices",
    "aten::index": "indices may be on the CPU; the kernel checks them by itself",
    "aten::_unsafe_index": "as index",
    "aten::index_put_": "as index, and a value of no dimensions may be on the CPU",
    "aten::_index_put_impl_": "as index_put_",
    "aten::index_put": "as index_put_",
    "aten::_unsafe_index_put": "as index_put_",
    "aten::is_set_to": "it compares storages",
    "aten::repeat_interleave": "its repeats may be on the CPU",
    "aten::_ctc_loss": "its lengths are on the CPU",
    "aten::_ctc_loss_backward": "its lengths are on the CPU",
    "aten::_amp_foreach_non_finite_check_and_unscale_": "gradients of several devices have their own found_inf",
    "aten::multi_margin_loss": "its kernel checks by itself",
}  # fmt: skip
INDEXING = {"aten::index", "aten::_unsafe_index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"}


class Relabelled:
    """The arguments of one call for the CPU's kernel."""

    __slots__ = ("args", "device", "kwargs", "mixed", "originals")

    def __init__(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
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
    if index < 0 or not torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.CUDA):
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


@functools.cache
def _native() -> Mapping[str, tuple[bool, bool]]:
    """Operator → (whether devices are checked before its kernel, whether it is structured): torch's own table."""
    path = Path(torch.__file__).parents[1] / "torchgen" / "packaged/ATen/native/native_functions.yaml"
    found: dict[str, tuple[bool, bool]] = {}
    name = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("- func: "):
            name = line[8:].split("(")[0]
            found[name] = True, False
        elif line.startswith("  device_check: NoCheck"):
            found[name] = False, found[name][1]
        elif line.startswith("  structured"):
            found[name] = found[name][0], True
    return found


def check_devices(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Two devices among the arguments: allowed, or torch's error."""
    schema = op._schema
    if schema.name in INDEXING:
        for index in flat(args[1:2]):
            if index.is_cuda and index.device != args[0].device:
                raise RuntimeError(
                    f"indices should be either on cpu or on the same device as the indexed tensor ({args[0].device})"
                )
    if schema.name in MIXED or not schema.name.startswith("aten::"):
        return
    name, overload = schema.name[6:], schema.overload_name
    checked, structured = _native().get(f"{name}.{overload}" if overload else name, (True, False))
    values = {arg.name: value for arg, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)
    if checked:
        method = f"wrapper_CUDA_{overload}_{name}"
        if structured:
            method = f"wrapper_CUDA_{name}{'_' + overload if overload else ''}"
        _check_each(schema, values, method)
    else:
        _check_iterator(values)


def _check_each(schema: Any, values: Mapping[str, Any], method: str) -> None:
    """Every tensor is on the device of the first, in the order of the declaration."""
    common = None
    for argument in schema.arguments:
        for tensor in flat([values.get(argument.name)]):
            common = common or tensor.device
            if tensor.device != common:
                raise versions.other_device(argument.name, tensor.device, common, method)


def _check_iterator(values: Mapping[str, Any]) -> None:
    """As TensorIterator: the first CUDA device is the common one, and a CPU tensor of no dimensions is a number."""
    tensors = [*flat([values.get("out")]), *flat([v for k, v in values.items() if k != "out"])]
    common = next(tensor.device for tensor in tensors if tensor.is_cuda)
    for tensor in tensors:
        if tensor.device != common and not (tensor.dim() == 0 and not tensor.is_cuda):
            raise versions.two_devices(common, tensor.device)
