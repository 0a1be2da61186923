"""Processes that a program starts: CUDA after fork(), GPUs in spawned processes, and CUDA tensors between processes."""

from __future__ import annotations

import multiprocessing.spawn
import os
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from nbddp.capabilities.simulated_gpus import cards
from nbddp.capabilities.simulated_gpus.on_rank import AGAIN, again, devices, machine, memory


class _Again:
    """Simulates the same GPUs where it is read."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return again, ()


def install() -> None:
    os.environ[AGAIN] = cards.typed(devices.of_machine())
    os.register_at_fork(after_in_child=_forked)
    prepared = multiprocessing.spawn.get_preparation_data

    def with_gpus(name: str) -> Any:
        """What a process of `spawn` or `forkserver` reads before it does anything."""
        return {**prepared(name), "nbddp_simulated_gpus": _Again()}

    multiprocessing.spawn.get_preparation_data = with_gpus
    for kind in (torch.Tensor, torch.nn.Parameter):
        _send(kind, reductions.reduce_tensor)


def _forked() -> None:
    """A driver that was in use cannot be used after fork(); torch reports that at the next use."""
    if torch.cuda._initialized:
        devices.forked = True


def _send(kind: Any, otherwise: Callable[[Any], Any]) -> None:
    def reduce(tensor: Any) -> Any:
        """A tensor of a GPU goes as one of shared memory, and gets its label again where it arrives."""
        if type(tensor) is not kind or not tensor.is_cuda or tensor.layout is not torch.strided:
            return otherwise(tensor)
        if tensor.requires_grad and not tensor.is_leaf:
            return otherwise(tensor)  # which refuses that
        index = tensor.get_device()
        shared = machine.twin(tensor)
        storage = shared.untyped_storage()
        block = memory.blocks.pop(storage._cdata, None)  # for a moment, so that it is a CPU storage for torch too
        try:
            function, args = otherwise(shared)
            sent = ForkingPickler.dumps((function, args))
        finally:
            if block is not None:
                memory.blocks[storage._cdata] = block
        return _arrived, (kind, bytes(sent), index, tensor.requires_grad)

    ForkingPickler.register(kind, reduce)


def _arrived(kind: Any, sent: bytes, index: int, requires_grad: bool) -> Any:
    """The tensor of another process. Its memory is counted there."""
    devices.index_for(torch.device("cuda", index))
    function, args = ForkingPickler.loads(sent)
    tensor = function(*args)
    memory.adopt(tensor.untyped_storage(), index, counted=False)
    machine.to_cuda(tensor, index)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)
