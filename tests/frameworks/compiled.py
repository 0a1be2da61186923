"""torch.compile of a DDP model, and DDP of a compiled one."""

import json

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
found = []
for wrap in (
    lambda m: torch.compile(DDP(m), backend="aot_eager"),
    lambda m: DDP(torch.compile(m, backend="aot_eager")),
):
    torch.manual_seed(0)
    model = wrap(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 8, generator=draw)).square().mean().backward()
        optimizer.step()
    found.append([p.flatten().tolist() for p in model.parameters()])
if dist.get_rank() == 0:
    print("RESULT", json.dumps(found))
dist.destroy_process_group()
