"""How far this machine's clock is from rank 0's: questions and answers over a process group of its own.

The group lives for the measurement alone; the user's groups, their sequence numbers and their stores see nothing
of it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from nbddp.capabilities.timings import on_rank
from nbddp.protocol import pickling
from nbddp.worker.parts import RankWorker

ROUNDS = 60
TIMEOUT = timedelta(seconds=30)


def measure(store: Any, rank: int, size: int) -> dict[int, list[tuple[int, int, int]]]:
    """On rank 0: rank → (asked, read, answered) of each round, nanoseconds; empty on the others. Every rank of
    0 … size - 1 calls it at once, with a store that all reach."""
    import torch
    import torch.distributed as dist

    if size < 2:
        return {}
    group = dist.ProcessGroupGloo(store, rank, size, TIMEOUT)
    number = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        return {peer: [_ask(group, number, peer) for _ in range(ROUNDS)] for peer in range(1, size)}
    for _ in range(ROUNDS):
        group.recv([number], 0, 0).wait()
        number[0] = on_rank.now()
        group.send([number], 0, 0).wait()
    return {}


def _ask(group: Any, number: Any, peer: int) -> tuple[int, int, int]:
    asked = on_rank.now()
    group.send([number], peer, 0).wait()
    group.recv([number], peer, 0).wait()
    answered = on_rank.now()
    return asked, int(number[0]), answered


def clocks(worker: RankWorker, buffers: Sequence[Any]) -> list[bytes]:
    """How far the other ranks' clocks are from rank 0's."""
    with worker.groups.sockets.watch():
        found = measure(worker.groups.store("clocks"), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    return [pickling.pack_answer(found)]
