"""Parts that the rules' examples share. The examples are the tests of the rules, and what `--explain` shows."""

HEAD = """\
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
dataset = torch.utils.data.TensorDataset(torch.arange(32.0).reshape(32, 1))
model = DDP(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
TRAIN = """\
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
"""
END = "dist.destroy_process_group()\n"
BATCHES = """\
for (x,) in loader:
    optimizer.zero_grad()
"""
LOAD = "sampler = DistributedSampler(dataset)\nloader = DataLoader(dataset, batch_size=4, sampler=sampler)\n"
DATA = HEAD + LOAD
