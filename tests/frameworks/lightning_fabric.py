"""Fabric with strategy="ddp"."""

import json
import os

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp")
fabric.launch()
fabric.seed_everything(0)
model = torch.nn.Linear(8, 2)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.arange(512.0).view(64, 8) / 512), batch_size=4))
for (x,) in loader:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    fabric.backward(loss)
    optimizer.step()
mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
if fabric.global_rank == 0:
    print("RESULT", json.dumps([fabric.world_size, mean.item(), [p.tolist() for p in model.parameters()]]))
