"""torch.distributed.rpc: calls. A program that uses `rpc.remote` and does all this twice hangs in shutdown by itself
(torch 2.13), and a cell is run twice here."""

import json
import os

import torch
import torch.distributed.rpc as rpc

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world)
if rank == 0:
    found = [rpc.rpc_sync(f"worker{r}", torch.add, args=(torch.ones(2), r)).tolist() for r in range(world)]
    later = rpc.rpc_async("worker1", torch.mul, args=(torch.ones(2), 5)).wait()
    print("RESULT", json.dumps([found, later.tolist()]))
rpc.shutdown()
