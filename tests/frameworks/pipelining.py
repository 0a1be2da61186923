"""torch.distributed.pipelining: two stages, GPipe."""

import json

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
part = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
stage = PipelineStage(part, rank, world, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 4, loss_fn=lambda y, t: (y - t).square().mean())
x, target, losses = torch.arange(128.0).view(16, 8) / 128, torch.ones(16, 8), []
if rank == 0:
    schedule.step(x)
elif rank == world - 1:
    schedule.step(target=target, losses=losses)
else:
    schedule.step()
norms = [None] * world
dist.all_gather_object(norms, [float(p.grad.square().sum()) for p in part.parameters()])
told = [[loss.item() for loss in losses]]
dist.broadcast_object_list(told, world - 1)
if rank == 0:
    print("RESULT", json.dumps([norms, told[0]]))
dist.destroy_process_group()
