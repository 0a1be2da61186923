"""Kernels that a program brings: CUDA extensions and Triton's. They are refused by name where they would be used.

Modules that define these are imported late or never, so each is changed when its import has ended.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

EXTENSION = "simulated GPUs cannot run the CUDA extension {}: its kernels are machine code of a GPU, and there is none"
TRITON = "simulated GPUs cannot run the Triton kernel {}: Triton compiles for a GPU, and there is none"
SOURCE = "simulated GPUs cannot run CUDA C++: it compiles for a GPU, and there is none"
CUDA_SOURCES = (".cu", ".cuh")


def install() -> None:
    sys.meta_path.insert(0, _ChangingFinder())
    for name, change in MODULES.items():
        if name in sys.modules:
            change(sys.modules[name])
    if hasattr(torch.cuda, "_compile_kernel"):  # from 2.8 on
        torch.cuda._compile_kernel = _refusing(torch.cuda._compile_kernel, lambda *args, **kwargs: SOURCE)


class _ChangingFinder(MetaPathFinder):
    """Finds these modules as ever, and has them changed once they are imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        change = MODULES.get(fullname)
        spec = None if change is None else PathFinder.find_spec(fullname, path, target)
        if change is None or spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def loaded(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec


def _refusing(call: Callable[..., Any], why: Callable[..., str]) -> Callable[..., Any]:
    """The function, or the refusal that `why` gives for its arguments."""

    @functools.wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        refusal = why(*args, **kwargs)
        if refusal:
            raise NotImplementedError(refusal)
        return call(*args, **kwargs)

    return checked


def _load(name: str, sources: Any = (), *args: Any, with_cuda: bool | None = None, **kwargs: Any) -> str:
    files = [sources] if isinstance(sources, str) else sources
    is_cuda = any(str(file).endswith(CUDA_SOURCES) for file in files) if with_cuda is None else with_cuda
    return EXTENSION.format(repr(name)) if is_cuda else ""


def _load_inline(
    name: str, cpp_sources: Any = None, cuda_sources: Any = None, *args: Any, with_cuda: bool | None = None,
    **kwargs: Any,
) -> str:  # fmt: skip
    return EXTENSION.format(repr(name)) if cuda_sources or with_cuda else ""


def _of_torch(module: Any) -> None:
    module.load = _refusing(module.load, _load)
    module.load_inline = _refusing(module.load_inline, _load_inline)
    module.CUDAExtension = _refusing(module.CUDAExtension, lambda name, *args, **kw: EXTENSION.format(repr(name)))


def _of_triton(module: Any) -> None:
    """A kernel is defined as ever; a launch is refused."""
    kind = module.JITFunction
    kind.run = _refusing(kind.run, lambda self, *args, **kwargs: TRITON.format(self.__name__))


def _without_triton(module: Any) -> None:
    """What inductor, for the CPU too, asks before it asks Triton for a driver."""
    module.has_triton = lambda *args, **kwargs: False


MODULES: Mapping[str, Callable[[Any], None]] = {  # module → what changes it
    "torch.utils.cpp_extension": _of_torch,
    "torch.utils._triton": _without_triton,
    "triton.runtime.jit": _of_triton,
}
