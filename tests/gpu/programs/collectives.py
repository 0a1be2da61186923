"""All collectives of one rank."""

import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc

CPU = os.environ.get("TWIN") == "cpu"
dist.init_process_group("gloo" if CPU else "nccl")
r, n = dist.get_rank(), dist.get_world_size()
dev = "cpu" if CPU else f"cuda:{r}"
if not CPU:
    torch.cuda.set_device(r)
out = []
x = torch.arange(4.0, device=dev) + r
for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
    y = x.clone()
    dist.all_reduce(y, op)
    out.append(y.tolist())
y = x.clone()
if CPU:
    dist.all_reduce(y)
    y /= n
else:
    dist.all_reduce(y, dist.ReduceOp.AVG)
out.append(y.tolist())
y = x.clone()
dist.broadcast(y, 0)
out.append(y.tolist())
parts = [torch.empty(4, device=dev) for _ in range(n)]
dist.all_gather(parts, x)
out.append([t.tolist() for t in parts])
assert parts[0].device == torch.device(dev)
b = torch.empty(4 * n, device=dev)
dist.all_gather_into_tensor(b, x)
out.append(b.tolist())
y = x.clone()
dist.reduce(y, 0)
out.append(y.tolist() if r == 0 else 0)
s = torch.empty(4, device=dev)
dist.reduce_scatter_tensor(s, x.clone())
out.append(s.tolist())
s = torch.empty(4, device=dev)
dist.reduce_scatter(s, [x.clone() for _ in range(n)])
out.append(s.tolist())
s = torch.empty(4, device=dev)
dist.scatter(s, [x.clone() + 10 for _ in range(n)] if r == 0 else None, 0)
out.append(s.tolist())
g = [torch.empty(4, device=dev) for _ in range(n)] if r == 0 else None
dist.gather(x, g, 0)
out.append([t.tolist() for t in g] if g else 0)
s = torch.empty(4, device=dev)
dist.all_to_all_single(s, x.clone())
out.append(s.tolist())
o = [None] * n
dist.all_gather_object(o, {"rank": r})
out.append(o)
o = ["a" if r == 0 else None]
dist.broadcast_object_list(o, 0)
out.append(o)
w = dist.all_reduce(x, async_op=True)
w.wait()
out.append(x.tolist())
sub = dist.new_group([0])
y = torch.ones(2, device=dev)
dist.all_reduce(y, group=sub)
out.append(y.tolist())
dist.barrier()
out.append(fc.all_reduce(torch.ones(2, device=dev), "sum", dist.group.WORLD).tolist())
print("RESULT", r, out, dist.get_backend() in ("nccl", "gloo"))
dist.destroy_process_group()
