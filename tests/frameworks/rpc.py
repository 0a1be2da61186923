"""torch.distributed.rpc: calls, remote references."""

import json
import os

import torch
import torch.distributed.rpc as rpc

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world)
if rank == 0:
    found = [rpc.rpc_sync(f"worker{r}", torch.add, args=(torch.ones(2), r)).tolist() for r in range(world)]
    held = rpc.remote("worker1", torch.mul, args=(torch.ones(2), 5))
    print("RESULT", json.dumps([found, held.to_here().tolist()]))
rpc.shutdown()
