"""A loop like nanoGPT's in float32."""

import contextlib
import os
import tempfile

import torch
import torch.nn as nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

CPU = os.environ.get("TWIN") == "cpu"
HALF = False
init_process_group(backend="gloo" if CPU else "nccl")
ddp_rank, ddp_local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
world = int(os.environ["WORLD_SIZE"])
device = "cpu" if CPU else f"cuda:{ddp_local_rank}"
if not CPU:
    torch.cuda.set_device(device)
torch.manual_seed(1337)
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
device_type = "cuda" if "cuda" in device else "cpu"
ctx = torch.amp.autocast(device_type=device_type, dtype=torch.float16) if HALF else contextlib.nullcontext()
V, B, T, C, H = 65, 4, 16, 32, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))

    def forward(self, x):
        q, k, v = self.qkv(self.ln1(x)).split(C, dim=2)
        q, k, v = (t.view(B, T, H, C // H).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, C), nn.Embedding(T, C)
        self.h = nn.ModuleList([Block() for _ in range(2)])
        self.ln, self.head = nn.LayerNorm(C), nn.Linear(C, V, bias=False)
        self.wte.weight = self.head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(0, T, dtype=torch.long, device=idx.device))
        for b in self.h:
            x = b(x)
        logits = self.head(self.ln(x))
        return logits, F.cross_entropy(logits.view(-1, V), targets.view(-1))


data = torch.randint(0, V, (2000,), generator=torch.Generator().manual_seed(5 + ddp_rank))


def get_batch():
    ix = torch.randint(len(data) - T, (B,))
    x = torch.stack([data[i : i + T] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + T] for i in ix])
    if device_type == "cuda":
        x, y = x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    return x, y


model = GPT().to(device)
scaler = torch.amp.GradScaler(device_type, enabled=HALF)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
model = DDP(model, device_ids=None if CPU else [ddp_local_rank])
losses = []
for _ in range(5):
    for micro_step in range(2):
        model.require_backward_grad_sync = micro_step == 1
        x, y = get_batch()
        with ctx:
            logits, loss = model(x, y)
            loss = loss / 2
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item())
path = os.path.join(tempfile.gettempdir(), f"gs_ckpt_{os.environ['MASTER_PORT']}.pt")
if ddp_rank == 0:
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, path)
torch.distributed.barrier()
ck = torch.load(path, map_location=None if CPU else {"cuda:0": f"cuda:{ddp_local_rank}"})
w = ck["model"]["head.weight"]
assert str(w.device) == device, (w.device, device)
model.module.load_state_dict(ck["model"])
optimizer.load_state_dict(ck["optimizer"])
torch.distributed.barrier()
if ddp_rank == 0:
    os.remove(path)
print("RESULT", ddp_rank, losses, norm.item(), logits.dtype, w.double().sum().item(), scaler.get_scale())
destroy_process_group()
