"""A rank's look at buffers that the program's own modules move: statistics, codebooks, queues. DDP's forward copies
rank 0's to all ranks, so what the others have added is lost."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nbddp.capabilities.sanitizer import on_rank_digest as digest
from nbddp.compat.extra import torch as torch_extra

MOST, SAMPLED = 16, 10  # buffers; training forwards before which they are sampled
READS_AT = 1  # the training forward within which it is seen what the loss depends on
FOLLOWED = 64  # values that are made of buffers


class OwnBuffers:
    """Of one model: floating buffers of a checkpoint whose module's class is the program's. Running statistics as
    those of BatchNorm are no part of a training forward, and left out."""

    def __init__(self, inner: Any, is_programs: Callable[[str], bool]) -> None:
        found = (
            (f"{path}.{name}" if path else name, weakref.ref(module), name)
            for path, module in inner.named_modules() if _is_own(module, is_programs)
            for name, each in module.named_buffers(recurse=False)
            if each.dtype.is_floating_point and type(each) is torch.Tensor
            and "running" not in name and name not in torch_extra.passing_buffers(module)
        )  # fmt: skip
        self._held = list(islice(found, MOST))

    @property
    def names(self) -> list[str]:
        return [path for path, _, _ in self._held]

    def tensors(self) -> list[Any]:
        modules = [(reference(), name) for _, reference, name in self._held]
        return [getattr(module, name, None) for module, name in modules]

    def sample(self) -> Any:
        return digest.sample(self.tensors())

    def reads(self, found: list[str]) -> _Reads:
        """While this is open, names of buffers that values with gradients are made of go into `found`."""
        return _Reads({id(each): name for name, each in zip(self.names, self.tensors(), strict=True)}, found)


def _is_own(module: Any, is_programs: Callable[[str], bool]) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and is_programs(code.co_filename)


class _Reads(TorchFunctionMode):  # type: ignore[misc]
    def __init__(self, names: dict[int, str], found: list[str]) -> None:
        super().__init__()
        self.names, self.found = names, found
        self.made: list[Any] = []  # so that no other value gets the id of one

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {self.names[id(each)] for each in digest.tensors_in([args, kwargs]) if id(each) in self.names}
        if given and isinstance(out, torch.Tensor):
            if out.requires_grad:
                self.found.extend(sorted(given - {*self.found}))
            elif id(out) not in self.names and len(self.made) < FOLLOWED:
                self.made.append(out)
                self.names[id(out)] = min(given)
        return out
