"""fully_shard with a checkpoint of torch.distributed.checkpoint that is loaded into another model."""

import json
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))


def make(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


model = make(0)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
draw = torch.Generator().manual_seed(dist.get_rank())
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 16, generator=draw)).square().mean().backward()
    optimizer.step()
folders = [tempfile.mkdtemp()]
dist.broadcast_object_list(folders, 0)
dcp.save(get_model_state_dict(model), checkpoint_id=folders[0])
other = make(7)
state = get_model_state_dict(other)
dcp.load(state, checkpoint_id=folders[0])
set_model_state_dict(other, state)
out = [p.full_tensor().flatten().tolist() for p in other.parameters()]
same = all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(model.parameters(), other.parameters(), strict=True))
if dist.get_rank() == 0:
    print("RESULT", json.dumps([same, out]))
dist.destroy_process_group()
