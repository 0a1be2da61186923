"""nccl, `.cuda(local_rank)`, SyncBatchNorm, DistributedSampler."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import TensorDataset

CPU = os.environ.get("TWIN") == "cpu"
rank = int(os.environ["RANK"])
world_size = int(os.environ["WORLD_SIZE"])
local_rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group(backend="gloo" if CPU else "nccl", init_method="env://", world_size=world_size, rank=rank)
torch.manual_seed(7)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 16, 10)
)
if not CPU:
    model = model.cuda(local_rank)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # CUDA only: the CPU twin keeps plain batch norm
model = nn.parallel.DistributedDataParallel(model, device_ids=None if CPU else [local_rank])
g = torch.Generator().manual_seed(1)
trainset = TensorDataset(torch.randn(64, 3, 8, 8, generator=g), torch.randint(0, 10, (64,), generator=g))
train_sampler = torch.utils.data.distributed.DistributedSampler(dataset=trainset)
trainloader = torch.utils.data.DataLoader(trainset, batch_size=8, sampler=train_sampler, pin_memory=not CPU)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
lossf = nn.CrossEntropyLoss()
losses = []
for epoch in range(2):
    trainloader.sampler.set_epoch(epoch)
    for x, y in trainloader:
        if not CPU:
            x, y = x.cuda(local_rank, non_blocking=True), y.cuda(local_rank, non_blocking=True)
        opt.zero_grad()
        loss = lossf(model(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
rm = model.module[1].running_mean.double().sum().item()
print("RESULT", rank, len(losses), [round(v, 3) for v in losses[:1]])
print("INFO", rank, losses[-1], rm, "synced" if abs(rm) > 0 else "")
dist.destroy_process_group()
