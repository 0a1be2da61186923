"""A program that starts processes of its own: GPUs in each, tensors between them, and one memory.

`python -m tests.contract.gpu_programs.spawned` runs it on simulated GPUs, and prints what it found as JSON.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train(rank: int, port: int, sent: Any, read: Any) -> None:
    """A rank that `mp.spawn` starts, and two tensors that it sends."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=2)
    model = DDP(nn.Linear(3, 2).to(rank), device_ids=[rank])
    model(torch.ones(2, 3).to(rank)).sum().backward()
    sent.put(torch.full((2,), float(rank), device=f"cuda:{rank}"))
    sent.put(nn.Parameter(torch.ones(1, device=rank)))
    read.wait(60)
    dist.destroy_process_group()


def add(tensor: Any, sent: Any) -> None:
    tensor.add_(1)
    sent.put((str(tensor.device), torch.cuda.memory_allocated()))


def hold(size: int, sent: Any, end: Any) -> None:
    held = torch.empty(size, dtype=torch.uint8, device="cuda")
    sent.put(held.numel())
    end.wait(60)


class OnGpu(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, at: int) -> Any:
        return torch.full((1,), float(at), device="cuda:1")


def main() -> None:
    found: dict[str, Any] = {}
    loader = torch.utils.data.DataLoader(OnGpu(), num_workers=1, multiprocessing_context="forkserver")
    found["loaded"] = [(str(one.device), one.item()) for one in loader]
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    context = mp.get_context("spawn")
    sent, read = context.Queue(), context.Event()
    ranks = mp.spawn(train, (port, sent, read), nprocs=2, join=False)
    got = [sent.get(timeout=60) for _ in range(4)]
    found["sent"] = sorted((type(t).__name__, str(t.device), t.tolist(), t.requires_grad) for t in got)
    read.set()
    del got
    while not ranks.join(timeout=30):
        pass

    tensor = torch.zeros(3, device="cuda")
    found["shared"] = tensor.is_shared()
    child = context.Process(target=add, args=(tensor, sent))
    child.start()
    found["there"] = sent.get(timeout=60)
    child.join()
    found["here"] = tensor.tolist()

    end = context.Event()
    child = context.Process(target=hold, args=(6 << 30, sent, end))
    child.start()
    sent.get(timeout=60)
    try:
        torch.empty(10 << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        found["full"] = str(error)
    end.set()
    child.join()
    found["later"] = torch.empty(10 << 30, dtype=torch.uint8, device="cuda").numel()
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    from nbddp.capabilities.simulated_gpus.cards import cards_of
    from nbddp.capabilities.simulated_gpus.on_rank import install

    install(cards_of("2"))
    main()
