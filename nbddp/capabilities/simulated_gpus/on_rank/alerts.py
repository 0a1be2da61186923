"""What `use_deterministic_algorithms` and `set_sync_debug_mode` find in CUDA's kernels; the CPU's are not like them.

Names and words are an H100's with torch 2.11.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

Kernel = Callable[..., Any]
WITHOUT_ORDER: Mapping[str, str] = {  # operator → CUDA's kernel, whose additions come in any order
    "nll_loss2d_forward": "nll_loss2d_forward_out_cuda_template",
    "adaptive_max_pool2d_backward": "adaptive_max_pool2d_backward_cuda",
    "median.dim_values": "median CUDA with indices output",
    "histc": "_histc_cuda with floating point input",
    "bincount": "_bincount_cuda",
}
ALERT = (
    "{} does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True)'. You can "
    "turn off determinism just for this operation, or you can use the 'warn_only=True' option, if that's acceptable "
    "for your application. You can also file an issue at https://github.com/pytorch/pytorch/issues to help us "
    "prioritize adding deterministic support for this operation."
)
ONLY_WARNED = (
    "{} does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True, "
    "warn_only=True)'. You can file an issue at https://github.com/pytorch/pytorch/issues to help us prioritize adding "
    "deterministic support for this operation."
)
WAITING = frozenset(("_local_scalar_dense", "nonzero"))  # operators in which the host waits for the GPU
WAITED = "called a synchronizing CUDA operation"
mode = 0  # of set_sync_debug_mode: 1 warns, 2 is an error


def set_mode(to: int) -> None:
    global mode
    mode = to


def alerting(name: str, kernel: Kernel) -> Kernel:
    """The kernel with what these two find. The operators without a row keep theirs."""
    words, waits = WITHOUT_ORDER.get(name), name in WAITING
    if words is None and not waits:
        return kernel

    def called(*args: Any, **kwargs: Any) -> Any:
        if words is not None and torch.are_deterministic_algorithms_enabled():
            _alert(words, args)
        if waits and mode:
            _waited()
        return kernel(*args, **kwargs)

    return called


def _alert(words: str, args: Any) -> None:
    if words == "_bincount_cuda" and (len(args) < 2 or args[1] is None):
        return
    if torch.is_deterministic_algorithms_warn_only_enabled():
        warnings.warn(ONLY_WARNED.format(words), stacklevel=4)
    else:
        raise RuntimeError(ALERT.format(words))


def _waited() -> None:
    if mode > 1:
        raise RuntimeError(WAITED)
    warnings.warn(WAITED, stacklevel=4)
