"""DeepSpeed's engine with ZeRO stage 1 and a torch optimizer, on CPU."""

import json
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch

deepspeed.init_distributed(dist_backend="gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
config = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
data = torch.Generator().manual_seed(rank)
losses = []
for _ in range(8):
    x = torch.randn(8, 16, generator=data)
    loss = torch.nn.functional.mse_loss(engine(x), x[:, :4])
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
if rank == 0:
    weights = [p.detach().double().sum().item() for p in engine.module.parameters()]
    print("RESULT", json.dumps({"losses": losses, "weights": weights}))
engine.destroy()
torch.distributed.destroy_process_group()
