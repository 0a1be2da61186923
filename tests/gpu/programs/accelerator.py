"""The program of the torchrun tutorial (accelerator API)."""

import os

import torch
import torch.distributed
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP

CPU = os.environ.get("TWIN") == "cpu"  # the only change for the CPU twin


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def demo_basic(rank):
    print(f"rank = {torch.distributed.get_rank()}, " + f"world_size = {torch.distributed.get_world_size()}")
    torch.manual_seed(rank)
    model = ToyModel()
    if not CPU:
        model = model.to(rank)
    ddp_model = DDP(model, device_ids=None if CPU else [rank])
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)
    for _ in range(3):
        optimizer.zero_grad()
        outputs = ddp_model(torch.randn(20, 10))
        labels = torch.randn(20, 5)
        if not CPU:
            labels = labels.to(rank)
        loss = loss_fn(outputs, labels)
        loss.backward()
        optimizer.step()
    print(f"RESULT rank {rank} loss {loss.item()!r} sum {sum(p.double().sum().item() for p in model.parameters())!r}")


def spmd_main():
    env_dict = {key: os.environ[key] for key in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")}
    rank = int(env_dict["RANK"])
    print(f"Initializing process group with: {env_dict}")
    if CPU:
        torch.distributed.init_process_group(backend="gloo")
    else:
        acc = torch.accelerator.current_accelerator()
        vendor_backend = torch.distributed.get_default_backend_for_device(acc)
        torch.accelerator.set_device_index(rank)
        torch.distributed.init_process_group(backend=vendor_backend)
    demo_basic(rank)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    spmd_main()
