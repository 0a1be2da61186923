"""Sends of a rank to itself: NCCL takes them in a batch, and gloo has no connection from a rank to itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from nbddp.capabilities.simulated_gpus.on_rank import machine


@dataclass
class Own:
    """What one rank of a group has sent to itself and not received yet, or the reverse. NCCL does not look at tags."""

    sent: deque[Any] = field(default_factory=deque)  # copies of tensors
    waiting: deque[tuple[Any, Any]] = field(default_factory=deque)  # tensors, and the futures of their receives


def _send(own: Own, tensor: Any) -> Any:
    content, done = machine.twin(tensor).clone(), torch.futures.Future[Any]()
    done.set_result([])
    if own.waiting:
        _arrive(content, *own.waiting.popleft())
    else:
        own.sent.append(content)
    return _work(done)


def _receive(own: Own, tensor: Any) -> Any:
    done = torch.futures.Future[Any]()
    if own.sent:
        _arrive(own.sent.popleft(), tensor, done)
    else:
        own.waiting.append((tensor, done))
    return _work(done)


def _arrive(content: Any, tensor: Any, done: Any) -> None:
    machine.twin(tensor).view(-1).copy_(content.view(-1))
    done.set_result([tensor])


def _work(done: Any) -> Any:
    return torch._C._distributed_c10d._create_work_from_future(done).boxed()


OF: Mapping[str, Callable[[Own, Any], Any]] = {"c10d::send": _send, "c10d::recv_": _receive}
