"""Random numbers of the GPU from fixed seeds."""

import os

import torch

CPU = os.environ.get("TWIN") == "cpu"
dev = "cpu" if CPU else "cuda"
out = []
torch.manual_seed(3)
a = torch.randn(5, device=dev)
out.append(a.sum().item())
if not CPU:
    torch.cuda.manual_seed_all(4)
else:
    torch.manual_seed(4)
out.append(torch.rand(7, device=dev).sum().item())
g = torch.Generator(device=dev).manual_seed(5)
out.append(torch.randn(3, generator=g, device=dev).tolist())
out.append(torch.randint(0, 100, (4,), generator=g, device=dev).tolist())
out.append(torch.randperm(10, generator=g, device=dev).tolist())
torch.manual_seed(6)
x = torch.ones(50, device=dev)
out.append(torch.nn.functional.dropout(x, 0.3).sum().item())
out.append(torch.bernoulli(torch.full((20,), 0.5, device=dev)).sum().item())
out.append(torch.multinomial(torch.tensor([0.1, 0.2, 0.7], device=dev), 5, replacement=True).tolist())
out.append(torch.empty(4, device=dev).uniform_(0, 2).tolist())
out.append(torch.empty(4, device=dev).normal_(generator=g).tolist())
lin = torch.nn.Linear(3, 3, device=dev)
out.append(lin.weight.sum().item())
st = torch.cuda.get_rng_state(0) if not CPU else torch.get_rng_state()
r1 = torch.randn(2, device=dev).tolist()
torch.cuda.set_rng_state(st, 0) if not CPU else torch.set_rng_state(st)
assert torch.randn(2, device=dev).tolist() == r1
if not CPU:
    assert str(g.device) == "cuda:0", g.device
    assert torch.cuda.initial_seed() == 6
    try:
        torch.randn(2, device="cuda", generator=torch.Generator())
        print("no error")
    except RuntimeError as e:
        print(e)
    with torch.random.fork_rng(devices=[0]):
        torch.randn(3, device="cuda")
print("RESULT", out, r1)
