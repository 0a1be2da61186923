"""What a child process tries before simulated GPUs are used with a build of torch (`probe.py`)."""

from __future__ import annotations

from typing import Any

import torch

from nbddp.capabilities.simulated_gpus.cards import cards_of
from nbddp.capabilities.simulated_gpus.on_rank import install
from nbddp.capabilities.simulated_gpus.on_rank.machine import Unfit
from nbddp.capabilities.simulated_gpus.probe import FITS


def try_all() -> None:
    """Ends the process with an error, or by a signal, if this build of torch does not fit."""
    install(cards_of("2"))
    weight = torch.randn(4, 3, device="cuda:1", requires_grad=True)
    loss = _loss(torch.nn.Parameter(torch.ones(2, 4, device="cuda:1")), weight)
    loss.backward()
    on_cpu = weight.detach().cpu().requires_grad_()
    _loss(torch.ones(2, 4), on_cpu).backward()
    with torch.autocast("cuda", dtype=torch.float16):
        half = (torch.ones(2, 4, device="cuda:1") @ weight).dtype
    places = {str(one.device) for one in (loss, weight.grad, weight.untyped_storage())}
    if places != {"cuda:1"} or half != torch.float16 or not torch.equal(weight.grad.cpu(), on_cpu.grad):
        raise Unfit("a first backward gave wrong results")
    if torch.cuda.memory_allocated(1) < 1024 or torch.cuda.memory_allocated(0):
        raise Unfit("memory was counted wrongly")
    pinned = torch.ones(2, pin_memory=True)
    if not pinned.is_pinned() or torch.ones(2).is_pinned():
        raise Unfit("pinned memory is not known as such")
    print(FITS)


def _loss(x: Any, weight: Any) -> Any:
    return (x @ weight).view(-1)[1:].relu().sum()
