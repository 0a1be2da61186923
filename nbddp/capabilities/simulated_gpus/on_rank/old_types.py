"""`torch.cuda.FloatTensor` and the like, as older programs use them: to make tensors, to move them, as the default.

A build for the CPU has classes of these names, and each refuses to do anything.
"""

from __future__ import annotations

from typing import Any

import torch

from nbddp.capabilities.simulated_gpus.on_rank import dtypes

KINDS: dict[str, Any] = {}  # torch.cuda.FloatTensor → its class
_set_default = torch.set_default_tensor_type


def install() -> None:
    for dtype in dtypes.FLOATS | dtypes.INTEGERS:
        name = f"{dtypes.WORDS[dtype]}Tensor"
        kind = _kind(f"torch.cuda.{name}", dtype)  # by which `Tensor.type` finds it
        KINDS[kind.__name__] = kind
        setattr(torch.cuda, name, kind)
    torch.set_default_tensor_type = set_default


def _kind(name: str, dtype: Any) -> Any:
    class Kind(type):
        def __call__(cls, *args: Any, device: Any = None) -> Any:
            where = torch.device("cuda" if device is None else device)
            if args and (isinstance(args[0], torch.Size) or all(isinstance(arg, int) for arg in args)):
                return torch.empty(*args, dtype=dtype, device=where)
            return torch.tensor(*args, dtype=dtype, device=where) if args else torch.empty(0, dtype=dtype, device=where)

        def __repr__(cls) -> str:
            return f"<class '{name}'>"

        def __instancecheck__(cls, one: Any) -> bool:
            return isinstance(one, torch.Tensor) and one.is_cuda and one.dtype == dtype

    Kind.__module__, Kind.__qualname__ = "torch", "tensortype"  # by which torch.compile knows such a class
    module, _, short = name.rpartition(".")
    return Kind(name, (), {"__module__": module, "__qualname__": short, "dtype": dtype, "is_cuda": True})


def _found(kind: Any) -> Any:
    """The class that a program means by itself or by its name; None: not one of these."""
    return KINDS.get(kind) if isinstance(kind, str) else kind if kind in KINDS.values() else None


def set_default(kind: Any) -> None:
    """As `torch.set_default_tensor_type`. Then factories make tensors on the GPU, and `torch.Tensor(...)` does."""
    found = _found(kind)
    if "__new__" in vars(torch.Tensor):
        del torch.Tensor.__new__
        torch.set_default_device(None)
    if found is None:
        _set_default(kind)
        return
    torch.set_default_dtype(found.dtype)
    torch.set_default_device("cuda")
    torch.Tensor.__new__ = _on_gpu


def _on_gpu(cls: Any, *args: Any, **kwargs: Any) -> Any:
    made = torch._C.TensorBase.__new__(cls, *args, **kwargs)
    return made.cuda() if cls is torch.Tensor else made
