"""Tensors of two devices in one call: whether CUDA's kernel takes them, and if not, what it says.

Most kernels are behind a check that torch writes from `native_functions.yaml`, a table that its wheels have. Others
leave it to TensorIterator, and some check by themselves (`OWN`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nbddp.capabilities.simulated_gpus.on_rank import versions
from nbddp.capabilities.simulated_gpus.on_rank.arguments import flat

Values = Mapping[str, Any]  # name of an argument → its value

MOST_OWN = 2  # dimensions of a batch norm that torch does not leave to cuDNN
MIXED = {  # operators whose tensors may be on several devices → why
    "aten::copy_": "it copies between devices",
    "aten::_copy_from": "it copies between devices",
    "aten::_foreach_copy_": "it copies between devices",
    "aten::is_set_to": "it compares storages",
    "aten::repeat_interleave": "its repeats may be on the CPU",
    "aten::_ctc_loss": "its lengths are on the CPU",
    "aten::_ctc_loss_backward": "its lengths are on the CPU",
    **dict.fromkeys(("aten::_nested_from_padded", "aten::_nested_view_from_buffer"), "nested sizes are on the CPU"),
    "aten::_amp_foreach_non_finite_check_and_unscale_": "gradients of several devices have their own found_inf",
}


@dataclass
class Native:
    """What torch's table says of an operator's kernel for CUDA."""

    checked: bool = True  # whether devices are checked before it
    structured: bool = False
    cuda: bool = False  # whether it has one; else a composite calls the kernel of the variant with `out`


@functools.cache
def _natives() -> Mapping[str, Native]:
    path = Path(torch.__file__).parents[1] / "torchgen/packaged/ATen/native/native_functions.yaml"
    found: dict[str, Native] = {}
    one = Native()
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("- func: "):
            one = found[line[8:].split("(")[0]] = Native()
        elif line.startswith("  device_check: NoCheck"):
            one.checked = False
        elif line.startswith("  structured"):
            one.structured = one.cuda = True
        elif line.startswith("    ") and "CUDA" in re.split(r"[:,\s]+", line):
            one.cuda = True
    return found


def check(op: Any, args: Sequence[Any], kwargs: Values) -> None:
    """Two devices among the arguments: nothing, or torch's error."""
    schema = op._schema
    if schema.name in MIXED or not schema.name.startswith("aten::"):
        return
    name, overload = schema.name[6:], schema.overload_name
    values = {arg.name: value for arg, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)
    if name in OWN:
        OWN[name](values)
        return
    native = _natives().get(f"{name}.{overload}" if overload else name, Native())
    if native.checked:
        _check_each(_in_order(schema), values, _method(name, overload, native, values))
    else:
        _check_iterator(values)


def _method(name: str, overload: str, native: Native, values: Values) -> str:
    """The C++ function that checks."""
    if name == "native_batch_norm" and values["input"].is_cuda and values["input"].dim() > MOST_OWN:
        return "wrapper_CUDA__cudnn_batch_norm"
    sparse = any(tensor.is_cuda and tensor.layout is not torch.strided for tensor in flat(values.values()))
    if sparse:
        return f"wrapper_SparseCUDA_{overload}_{name}"
    if not native.cuda and f"{name}.out" in _natives():
        return f"wrapper_CUDA_out_{name}_out"
    own = f"{name}_out" if overload.endswith("out") else name
    if native.structured:
        return f"wrapper_CUDA_{own}{'_' + overload if overload else ''}"
    return f"wrapper_CUDA_{overload}_{own}"


def _in_order(schema: Any) -> Iterator[str]:
    """Arguments as the C++ function has them: those that are written to come first."""
    out = [arg.name for arg in schema.arguments if arg.kwarg_only and arg.alias_info and arg.alias_info.is_write]
    yield from out
    yield from (arg.name for arg in schema.arguments if arg.name not in out)


def _check_each(names: Iterator[str], values: Values, method: str) -> None:
    """Every tensor is on the device of the first."""
    common = None
    for name in names:
        for tensor in flat([values.get(name)]):
            common = common or tensor.device
            if tensor.device != common:
                raise versions.other_device(name, tensor.device, common, method)


def _check_iterator(values: Values) -> None:
    """As TensorIterator: the first CUDA device is the common one, and a CPU tensor of no dimensions is a number."""
    tensors = [*flat([values.get("out")]), *flat([v for k, v in values.items() if k != "out"])]
    common = next(tensor.device for tensor in tensors if tensor.is_cuda)
    for tensor in tensors:
        if tensor.device != common and not (tensor.dim() == 0 and not tensor.is_cuda):
            raise versions.two_devices(common, tensor.device)


def _index(values: Values) -> None:
    """Indices may be on the CPU. A value of no dimensions may be there too."""
    self, value = values["self"], values.get("values")
    for index in flat([values.get("indices")]):
        if index.is_cuda and index.device != self.device:
            raise RuntimeError(
                f"indices should be either on cpu or on the same device as the indexed tensor ({self.device})"
            )
    if value is not None and value.device != self.device and value.dim():
        first, second = (self, value) if self.is_cuda else (value, self)
        raise versions.two_devices(first.device, second.device)


def _masked_fill(values: Values) -> None:
    self, mask, value = values["self"], values["mask"], values["value"]
    if self.device != mask.device:
        raise RuntimeError(
            f"expected self and mask to be on the same device, but got mask on {mask.device} and self on {self.device}"
        )
    if isinstance(value, torch.Tensor) and value.is_cuda and value.device != self.device:
        raise RuntimeError("masked_fill_: Expected inputs to be on same device")


OWN: Mapping[str, Callable[[Values], None]] = {  # kernels that check by themselves
    **dict.fromkeys(
        ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"), _index
    ),
    **dict.fromkeys(("masked_fill", "masked_fill_"), _masked_fill),
}


def convolution(x: Any, weight: Any, bias: Any, sizes: Sequence[Any]) -> None:
    """Types of input, weight and bias, as the backend that torch would take names them. sizes: stride and so on."""
    transposed = sizes[3]
    for what, other in (("weight", weight), ("bias", bias)):
        if other is None or (x.is_cuda, x.dtype) == (other.is_cuda, other.dtype):
            continue
        same = f"Input type ({x.type()}) and {what} type ({other.type()}) should be the same"
        if x.is_cuda or not other.is_cuda:
            raise RuntimeError(same)
        backend = torch._C._select_conv_backend(x, weight, bias, *sizes).name
        if backend == "Mkldnn":
            raise RuntimeError(f"{same} or input should be a MKLDNN tensor and weight is a dense tensor")
        method = SLOW.get(backend)
        raise RuntimeError(same) if method is None else versions.other_device(what, other.device, x.device, method)
    if weight.device != x.device:
        method = f"wrapper_CUDA__cudnn_convolution{'_transpose' if transposed else ''}"
        raise versions.other_device("weight", weight.device, x.device, method)
    if bias is not None and bias.device != x.device:
        raise versions.two_devices(x.device, bias.device)  # cuDNN takes none, so it is added


SLOW = {  # torch's own kernels of a convolution → the function that checks devices
    "Slow2d": "wrapper_CUDA___slow_conv2d_forward",
    "SlowTranspose2d": "wrapper_CUDA_slow_conv_transpose2d",
    "SlowTranspose3d": "wrapper_CUDA__slow_conv_transpose3d",
    "SlowDilated2d": "wrapper_CUDA__slow_conv_dilated2d",
    "SlowDilated3d": "wrapper_CUDA__slow_conv_dilated3d",
}
