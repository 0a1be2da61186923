"""Training steps of many shapes, and what `%ddp prove` says of each: verdict, and words of the text."""

# ruff: noqa: E501 - lines of programs

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """verdict: of the proof, or `refused`. always: part of a short run. timeout: in seconds."""

    name: str
    code: str
    verdict: str
    words: str = ""
    line: str = "step"
    always: bool = False
    timeout: float = 60.0
    batch: tuple[str, ...] = ()


# fmt: off
SHARDED = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (world_size,)); m2 = net()
for part in (m2[0], m2): fully_shard(part, mesh=mesh)
o2 = torch.optim.Adam(m2.parameters(), lr=.1)
"""
PARALLEL = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh = init_device_mesh("cpu", (world_size,)); m2 = net()
parallelize_module(m2, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
o2 = torch.optim.Adam(m2.parameters(), lr=.1, foreach=False)
"""
STEPS = (
    Step("dict_batch", """
batch = {"x": x, "nested": {"y": y}, "n": 6, "names": [f"{rank}-{i}" for i in range(6)], "w": torch.ones(4)}
def step(model, batch):
    assert len(batch["names"]) == len(batch["x"]) == batch["n"]
    F.cross_entropy(model(batch["x"]), batch["nested"]["y"], weight=batch["w"]).backward()
""", "proven", "batch 6+6", line="step model batch", always=True),
    Step("gan", """
G, D = DDP(nn.Sequential(nn.Linear(8, 8))), DDP(nn.Sequential(nn.Linear(8, 1)))
og, od = torch.optim.Adam(G.parameters()), torch.optim.Adam(D.parameters())
z = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))
def step():
    od.zero_grad(); (D(x).mean() - D(G(z).detach()).mean()).backward(); od.step()
    og.zero_grad(); D(G(z)).pow(2).mean().backward(); og.step()
""", "proven"),
    Step("unequal", """
xx, yy = data(6 if rank == 0 else 2)
def step(): F.cross_entropy(model(xx), yy).backward()
""", "differs", "Cause: the ranks have 6 and 2 samples"),
    Step("head_added", """
m2 = DDP(net()); m2.module.append(nn.Linear(4, 4));
def step(): F.cross_entropy(m2(x), y).backward()
""", "differs", "were not averaged", always=True),
    Step("float32_only", """
def step(): F.cross_entropy(model(x.to(torch.float32)), y).backward()
""", "proven", "float64 was not possible"),
    Step("writes", """
def step():
    F.cross_entropy(model(x), y).backward(); torch.save(model.state_dict(), "never.pt")
""", "refused", "writes no files", always=True),
    Step("raises", """
def step(): F.cross_entropy(model(x), y).backward(); raise ValueError("on purpose")
""", "refused", "ValueError: on purpose"),
    Step("raises_in_a_module", """
import pathlib, sys
own = pathlib.Path("{folder}", str(rank), "nbddp"); own.mkdir(parents=True)
(own / "losses.py").write_text("def loss(x):\\n    raise ValueError('mine')\\n"); sys.path.insert(0, str(own))
import losses
def step(): y; losses.loss(model(x))
""", "refused", "ValueError: mine (line 2: raise ValueError('mine'))"),
    Step("subgroup", """
sub = dist.new_group(list(range(world_size))); m2 = DDP(net(), process_group=sub)
def step():
    F.cross_entropy(m2(x), y).backward(); t = torch.ones(1); dist.all_reduce(t, group=sub)
""", "proven", always=True),
    Step("batch_norm", """
torch.manual_seed(0); m2 = DDP(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)))
def step(): F.cross_entropy(m2(x), y).backward()
""", "differs", "Cause: BatchNorm"),
    Step("closure", """
def make():
    m = DDP(net()); a, b = data(); o = torch.optim.SGD(m.parameters(), lr=.1)
    def step():
        o.zero_grad(); F.cross_entropy(m(a), b).backward(); o.step()
    return step
step = make()
""", "proven"),
    Step("method", """
class Trainer:
    def __init__(self): self.model = DDP(net()); self.batch = data(); self.opt = torch.optim.AdamW(self.model.parameters()); self.other = torch.randn(3)
    def loss(self): a, b = self.batch; return F.cross_entropy(self.model(a), b)
    def step(self): self.opt.zero_grad(set_to_none=True); self.loss().backward(); self.opt.step()
trainer = Trainer()
""", "proven", line="trainer.step"),
    Step("accumulation", """
def step():
    opt.zero_grad()
    h = len(x) // 2
    with model.no_sync(): (F.cross_entropy(model(x[:h]), y[:h]) / 2).backward()
    (F.cross_entropy(model(x[h:]), y[h:]) / 2).backward()
    opt.step()
""", "proven"),
    Step("no_sync_wrong", """
def step():
    opt.zero_grad()
    with model.no_sync(): F.cross_entropy(model(x), y).backward()
    opt.step()
""", "differs", "were not averaged"),
    Step("autocast", """
def step():
    with torch.autocast("cpu", torch.bfloat16): l = F.cross_entropy(model(x), y)
    l.backward()
""", "proven", "float64"),
    Step("scaler", """
sc = torch.amp.GradScaler("cpu")
def step():
    opt.zero_grad()
    with torch.autocast("cpu", torch.bfloat16): l = F.cross_entropy(model(x), y)
    sc.scale(l).backward(); sc.step(opt); sc.update()
""", "proven"),
    Step("unused", """
class M(nn.Module):
    def __init__(self): super().__init__(); self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)
    def forward(self, x): return self.a(x)
torch.manual_seed(0); m2 = DDP(M(), find_unused_parameters=True)
def step(): F.cross_entropy(m2(x), y).backward()
""", "proven"),
    Step("static_graph", """
m2 = DDP(net(), static_graph=True)
def step(): F.cross_entropy(m2(x), y).backward()
""", "proven"),
    Step("hook_sum", """
m2 = DDP(net())
def hook(state, bucket): return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])
m2.register_comm_hook(None, hook)
def step(): F.cross_entropy(m2(x), y).backward()
""", "differs", "Known meaning of N:"),
    Step("hook_fp16", """
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
m2 = DDP(net()); m2.register_comm_hook(None, default_hooks.fp16_compress_hook)
def step(): F.cross_entropy(m2(x), y).backward()
""", "proven", "float16"),
    Step("hook_builtin", """
m2 = DDP(net()); m2._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
def step(): F.cross_entropy(m2(x), y).backward()
""", "proven"),
    Step("unfrozen", """
n = net(); n[0].weight.requires_grad_(False); m2 = DDP(n); n[0].weight.requires_grad_(True)
def step(): F.cross_entropy(m2(x), y).backward()
""", "differs", "were not averaged"),
    Step("dropout", """
m2 = DDP(nn.Sequential(net(), nn.Dropout(.3)))
def step(): F.cross_entropy(m2(x), y).backward()
""", "proven", "Dropout was off"),
    Step("noise", """
def step(): F.cross_entropy(model(x + .1*torch.randn_like(x)), y).backward()
""", "not known", "torch.randn_like"),
    Step("numpy_noise", """
def step(): F.cross_entropy(model(x + float(np.random.rand())), y).backward()
""", "not known", "numpy.random"),
    Step("unequal_weighted", """
xx, yy = data(6 if rank == 0 else 2)
def step():
    n = torch.tensor(float(len(xx))); dist.all_reduce(n)
    (F.cross_entropy(model(xx), yy, reduction="sum") * dist.get_world_size() / n).backward()
""", "proven"),
    Step("tokens", """
yy = y.clone(); yy[: (0 if rank == 0 else 4)] = -100
def step(): F.cross_entropy(model(x), yy).backward()
""", "differs", "of yy 6 and 2 entries count"),
    Step("tokens_right", """
yy = y.clone(); yy[: (0 if rank == 0 else 4)] = -100
def step():
    n = (yy != -100).sum(); dist.all_reduce(n)
    (F.cross_entropy(model(x), yy, reduction="sum") * dist.get_world_size() / n).backward()
""", "proven"),
    Step("by_hand", """
m3 = net();
def step():
    F.cross_entropy(m3(x), y).backward()
    for p in m3.parameters(): dist.all_reduce(p.grad); p.grad /= world_size
""", "proven", "There world_size = 1"),
    Step("drifted", """
m2 = DDP(net())
if rank == 0:
    with torch.no_grad(): m2.module[0].weight += 1
def step(): F.cross_entropy(m2(x), y).backward()
""", "not known", "differ before the step, first 0.weight"),
    Step("sparse", """
ids = torch.randint(0, 10, (6,), generator=torch.Generator().manual_seed(rank))
torch.manual_seed(0); m2 = DDP(nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Linear(8, 4)))
def step(): F.cross_entropy(m2(ids), y).backward()
""", "proven"),
    Step("transformer", """
torch.manual_seed(0); m2 = DDP(nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=.1, batch_first=True), nn.Flatten(), nn.Linear(24, 4)))
xs = torch.randn(6, 3, 8, generator=torch.Generator().manual_seed(rank))
def step(): F.cross_entropy(m2(xs), y).backward()
""", "proven", "Dropout was off"),
    Step("lstm", """
class L(nn.Module):
    def __init__(s): super().__init__(); s.l = nn.LSTM(8, 8, 2, dropout=.2, batch_first=True); s.o = nn.Linear(8, 4)
    def forward(s, x): return s.o(s.l(x)[0][:, -1])
torch.manual_seed(0); m2 = DDP(L()); xs = torch.randn(6, 3, 8, generator=torch.Generator().manual_seed(rank))
def step(): F.cross_entropy(m2(xs), y).backward()
""", "proven", "Dropout was off"),
    Step("compiled", """
m2 = torch.compile(DDP(net()), backend="aot_eager")
F.cross_entropy(m2(x), y).backward()
def step(): F.cross_entropy(m2(x), y).backward()
""", "proven"),
    Step("checkpointed", """
from torch.utils.checkpoint import checkpoint
class C(nn.Module):
    def __init__(s): super().__init__(); s.n = net()
    def forward(s, x): return checkpoint(s.n, x, use_reentrant=False)
m2 = DDP(C())
def step(): F.cross_entropy(m2(x), y).backward()
""", "proven"),
    Step("tied", """
class T(nn.Module):
    def __init__(s): super().__init__(); s.e = nn.Embedding(4, 8); s.o = nn.Linear(8, 4, bias=False); s.o.weight = s.e.weight
    def forward(s, i): return s.o(s.e(i))
torch.manual_seed(0); m2 = DDP(T())
def step(): F.cross_entropy(m2(y), y).backward()
""", "proven"),
    Step("mutates", """
def step():
    x.mul_(2); y[y < 1] = 0; F.cross_entropy(model(x), y).backward()
""", "proven"),
    Step("loader_batch", """
from torch.utils.data import DataLoader, TensorDataset
batch = next(iter(DataLoader(TensorDataset(*data(12)), batch_size=6, num_workers=1)))
first, second = batch  # in shared memory
assert second.is_shared()
def step():
    a, b = batch; b.fill_(1); a.mul_(2); F.cross_entropy(model(a), b).backward()
""", "proven"),
    Step("clipped", """
def step():
    opt.zero_grad(); F.cross_entropy(model(x), y).backward(); nn.utils.clip_grad_norm_(model.parameters(), .01); opt.step(); opt.zero_grad()
""", "proven"),
    Step("contrast_right", """
from torch.distributed.nn.functional import all_gather
def step():
    z = F.normalize(model(x)); s = torch.cat(all_gather(z)); lab = torch.arange(len(z)) + dist.get_rank() * len(z)
    F.cross_entropy(z @ s.T / .1, lab).backward()
""", "proven"),
    Step("penalty", """
def step():
    a = x.clone().requires_grad_(); o = model(a); (g,) = torch.autograd.grad(o.sum(), a, create_graph=True)
    (F.cross_entropy(o, y) + g.pow(2).sum(1).mean()).backward()
""", "proven"),
    Step("float32_inside", """
class C(nn.Module):
    def __init__(s): super().__init__(); s.a = nn.Linear(8, 16); s.b = nn.Linear(16, 4)
    def forward(s, x): return s.b(F.layer_norm(s.a(x).float(), (16,)).type_as(x))
torch.manual_seed(0); m2 = DDP(C())
def step(): F.cross_entropy(m2(x), y).backward()
""", "proven", "in float32"),
    Step("same_batch_given", """
xx = torch.ones(6, 8)
def step(model, xx, y): F.cross_entropy(model(xx), y).backward()
""", "proven", line="step model xx y"),
    Step("accum_no_division", """
def step():
    for i in range(len(x)): (F.cross_entropy(model(x[i:i+1]), y[i:i+1])).backward()
""", "not known", "calls backward 6 times on a rank and 12 times"),
    Step("print_and_log", """
log = open(f"{folder}/log{rank}.txt", "w"); log.write("a"); log.flush()
def step():
    print("hello"); log.write("b"); log.flush(); F.cross_entropy(model(x), y).backward()
""", "proven"),
    Step("manual_update", """
def step():
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for p in model.parameters(): p -= .1 * p.grad; p.grad = None
""", "proven"),
    Step("moved_by_ranks_alone", """
def step():
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()): p -= .1 * p.grad if i or world_size > 1 else 0; p.grad = None
""", "differs", "0.weight has an update on 2 ranks, and none in one process"),
    Step("leftover_gradients", """
with model.no_sync(): F.cross_entropy(model(x), y).backward()
def step(): F.cross_entropy(model(x), y).backward()
""", "proven"),
    Step("armed", """
out = model(x)
def step(): F.cross_entropy(model(x), y).backward()
""", "proven"),
    Step("batch_size_name", """
batch_size = 6
def step(): (F.cross_entropy(model(x), y, reduction="sum") / batch_size).backward()
""", "proven", "There batch_size = 12"),
    Step("microbatches_chunk", """
def step():
    for a, b in zip(x.chunk(3), y.chunk(3)): (F.cross_entropy(model(a), b) / 3).backward()
""", "proven"),
    Step("microbatches_split", """
def step():
    for a, b in zip(x.split(2), y.split(2)): (F.cross_entropy(model(a), b) / 3).backward()
""", "not known", "calls backward"),
    Step("summed", """
def step(): F.cross_entropy(model(x), y, reduction="sum").backward()
""", "differs", "the loss grows with the number of samples"),
    Step("twice", """
def step(): (F.cross_entropy(model(x), y) / dist.get_world_size()).backward()
""", "differs", "divided by the number of ranks"),
    Step("hangs", """
def step(): time.sleep(1000); x
""", "refused", "time limit", timeout=1.5, batch=("x",)),
    Step("hangs_in_collective", """
def step():
    F.cross_entropy(model(x), y).backward()
    if dist.get_rank() == 1: dist.barrier()
""", "refused", "time limit", timeout=3),
    Step("kills", """
import signal
def step():
    F.cross_entropy(model(x), y).backward()
    import ctypes; ctypes.string_at(0)
""", "refused", "SIGSEGV"),
    Step("exits", """
def step(): x; y; raise SystemExit(3)
""", "refused", "SystemExit"),
    Step("from_loader", """
from torch.utils.data import DataLoader, TensorDataset
it = iter(DataLoader(TensorDataset(*data(12)), batch_size=6))
def step():
    a, b = next(it); F.cross_entropy(model(a), b).backward()
""", "refused", "next(iter(loader))"),
    Step("fsdp", """
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (world_size,)); m2 = net()
for part in (m2[0], m2): fully_shard(part, mesh=mesh)
o2 = torch.optim.Adam(m2.parameters(), lr=.1)
def step(): o2.zero_grad(); F.cross_entropy(m2(x), y).backward(); nn.utils.clip_grad_norm_(m2.parameters(), .1); o2.step()
step(); m2.eval()(x); m2.train()
""", "proven", "in float64", always=True),
    Step("fsdp_divided_by_the_mesh", f"""{SHARDED}
def step(): (F.cross_entropy(m2(x), y) / mesh.size()).backward()
""", "differs", "Known meaning of 1/N: the loss or the gradient is divided"),
    Step("fsdp_unequal", f"""{SHARDED}
xx, yy = data(6 if rank == 0 else 2)
def step(): F.cross_entropy(m2(xx), yy).backward()
""", "differs", "Cause: the ranks have 6 and 2 samples"),
    Step("fsdp_never_exchanged", f"""{SHARDED}
def step(): m2.set_requires_gradient_sync(False); F.cross_entropy(m2(x), y).backward()
""", "differs", "0.weight has a gradient in one process, and none on 2 ranks"),
    Step("fsdp_clipped_by_each_shard", f"""{SHARDED}
def step():
    F.cross_entropy(m2(x), y).backward()
    norm = sum(p.grad.to_local().square().sum() for p in m2.parameters()).sqrt()
    for p in m2.parameters(): p.grad.to_local().mul_(.1 / norm)
""", "refused", "in one process with all batches: AttributeError: 'Tensor' object has no attribute 'to_local'"),
    Step("fsdp_accumulates", f"""{SHARDED}
def step():
    o2.zero_grad()
    for k in range(2):
        m2.set_requires_gradient_sync(k == 1); (F.cross_entropy(m2(x[k::2]), y[k::2]) / 2).backward()
    o2.step()
""", "proven", "in float64"),
    Step("fsdp_mixed_precision", """
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
m2 = net(); few = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for part in (m2[0], m2): fully_shard(part, mp_policy=few)
def step(): F.cross_entropy(m2(x), y).backward()
step()
""", "proven", "The mixed precision of FSDP2 was off"),
    Step("fsdp_1", """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
m2 = FSDP(net(), device_id=torch.device("cpu"))
def step(): F.cross_entropy(m2(x), y).backward()
""", "refused", "m2 is a model of FSDP 1, which keeps parameters as parts of flat tensors; wrap it by fully_shard"),
    Step("tensor_parallel", f"""{PARALLEL}
x3, y3 = torch.randn(6, 8, generator=torch.Generator().manual_seed(3)), torch.arange(6) % 4
def step(m2, x3, y3): o2.zero_grad(); F.cross_entropy(m2(x3), y3).backward(); o2.step()
step(m2, x3, y3)
""", "proven", "one process with 6 samples", line="step m2 x3 y3"),
    Step("tensor_parallel_batches_differ", f"""{PARALLEL}
def step(): F.cross_entropy(m2(x), y).backward()
""", "refused", "ranks 0 and 1 hold parts of one model, and have different batches"),
    Step("same_batch", """
xx = torch.ones(6, 8)
def step(): model(xx).mean().backward()
""", "refused", "--batch xx"),
    Step("no_batch", """
def step(): model(torch.ones(2, 8)).mean().backward()
""", "refused", "--batch x"),
    Step("truncates", """
open("{folder}/keep.bin", "wb").write(b"keep"); import torch.serialization
def step():
    F.cross_entropy(model(x), y).backward(); torch._C.PyTorchFileWriter("{folder}/keep.bin")
""", "refused", "Permission denied"),
    Step("fixed_slices", """
def step():
    for i in range(2): (F.cross_entropy(model(x[3 * i : 3 * i + 3]), y[3 * i : 3 * i + 3]) / 2).backward()
""", "not known", "depends on the order of the samples", always=True),
    Step("first_sample", """
def step(): (F.cross_entropy(model(x), y) * x[0, 0]).backward()
""", "not known", "depends on the order of the samples"),
    Step("rank_without_a_loss", """
def step(): F.cross_entropy(model.module(x) if rank == 0 else model.module(x.detach()) * 2, y).backward()
""", "differs", "were not averaged"),
    Step("other_lengths", """
ids = torch.ones(6, 4 + rank)
def step(): F.cross_entropy(model(F.pad(ids, (0, 4 - rank))), y).backward()
""", "refused", "ids has the shapes (6, 4) and (6, 5) on ranks 0 and 1; pad", batch=("ids", "y")),
    Step("edited_on_a_rank", """
def step():
    F.cross_entropy(model(x), y).backward()
    if rank == 1: model.module[0].weight.grad *= 2
""", "differs", "an edit after backward by a rank's own numbers", always=True, batch=("x", "y")),
    Step("lr_of_a_rank", """
o2 = torch.optim.SGD(model.parameters(), .1 * (1 + rank))
def step(): o2.zero_grad(); F.cross_entropy(model(x), y).backward(); o2.step()
""", "differs", "differs between the ranks by 50 %", always=True),
    Step("lr_zero_on_rank_0", """
o2 = torch.optim.SGD(model.parameters(), .1 if rank else 0.0)
def step(): o2.zero_grad(); F.cross_entropy(model(x), y).backward(); o2.step()
""", "differs", "moved on some ranks, and not on others", always=True),
    Step("lr_of_a_rank_in_float32", """
o2 = torch.optim.SGD(model.parameters(), .1 * (1 + rank))
def step(): o2.zero_grad(); F.cross_entropy(model(x.to(torch.float32)), y).backward(); o2.step()
""", "differs", "differs between the ranks by 50 %"),
    Step("state_of_a_rank", """
o2 = torch.optim.SGD(model.parameters(), .1, momentum=.9)
F.cross_entropy(model.module(x), y).backward(); o2.step()
for p in model.parameters(): dist.broadcast(p.data, 0)
def step(): o2.zero_grad(); F.cross_entropy(model(x), y).backward(); o2.step()
""", "differs", "a state of the optimizer"),
    Step("clipped_by_a_rank", """
def step():
    opt.zero_grad(); l = F.cross_entropy(model(x), y); l.backward(); nn.utils.clip_grad_norm_(model.parameters(), .01 * (1 + l.item())); opt.step()
""", "differs", "as clipping by its own loss"),
    Step("closure_of_the_optimizer", """
def step():
    opt.zero_grad(); h = len(x) // 2
    with model.no_sync(): (F.cross_entropy(model(x[:h]), y[:h]) / 2).backward()
    def closure(): l = F.cross_entropy(model(x[h:]), y[h:]) / 2; l.backward(); return l
    opt.step(closure)
""", "proven", always=True),
    Step("lbfgs", """
o2 = torch.optim.LBFGS(model.parameters(), max_iter=2)
def step():
    def closure(): o2.zero_grad(); l = F.cross_entropy(model(x), y); l.backward(); return l
    o2.step(closure)
""", "proven"),
    Step("keyword_and_nested_batch", """
class K(nn.Module):
    def __init__(s): super().__init__(); s.n = net()
    def forward(s, *, inputs, scale=None): return s.n(inputs["x"]) * scale
torch.manual_seed(0); m2 = DDP(K()); batch = {"inputs": {"x": x}, "scale": torch.ones(6, 1) * 2, "y": y}
def step(batch): F.cross_entropy(m2(inputs=batch["inputs"], scale=batch["scale"]), batch["y"]).backward()
""", "proven", line="step batch"),
    Step("own_function", """
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t): return t * 2
    @staticmethod
    def backward(ctx, g): return g * 2
def step(): F.cross_entropy(Double.apply(model(x)), y).backward()
""", "proven"),
    Step("own_function_of_the_world", """
class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t): return t.clone()
    @staticmethod
    def backward(ctx, g): return g * dist.get_world_size()
def step(): F.cross_entropy(Scaled.apply(model(x)), y).backward()
""", "differs", "Known meaning of N:"),
    Step("hook_on_a_parameter", """
m2 = DDP(net()); m2.module[0].weight.register_hook(lambda g: g * 3)
def step(): F.cross_entropy(m2(x), y).backward()
""", "proven"),
    Step("buffer_in_the_forward", """
class B(nn.Module):
    def __init__(s): super().__init__(); s.n = net(); s.register_buffer("mean", torch.full((8,), .5)); s.register_buffer("count", torch.tensor(0))
    def forward(s, x): s.count += 1; return s.n(x - s.mean)
torch.manual_seed(0); m2 = DDP(B())
def step(): F.cross_entropy(m2(x), y).backward()
""", "proven"),
    Step("half_precision_model", """
m2 = DDP(net().to(torch.bfloat16))
def step(): F.cross_entropy(m2(x.to(torch.bfloat16)).float(), y).backward()
""", "proven"),
    Step("two_backwards", """
def step():
    z = model(x); F.cross_entropy(z, y).backward(retain_graph=True); z.square().mean().backward()
""", "differs", "were not averaged"),
    Step("clipped_before_the_exchange", """
def step():
    opt.zero_grad(); h = len(x) // 2
    with model.no_sync(): (F.cross_entropy(model(x[:h]), y[:h]) / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), .05)
    (F.cross_entropy(model(x[h:]), y[h:]) / 2).backward()
""", "not known", "depends on the order of the samples"),
    Step("dropout_in_eval_mode", """
m2 = DDP(nn.Sequential(net(), nn.Dropout(.3))).eval()
def step(): F.cross_entropy(m2(x), y).backward()
""", "proven"),
    Step("class_weights_of_a_rank", """
cw = torch.tensor([1., 2., 1., 1.]) if rank else torch.ones(4)
def step(): F.cross_entropy(model(x), y, weight=cw).backward()
""", "refused", "cw", batch=()),
    Step("gathered_and_put_back", """
def step():
    z = F.normalize(model(x)); zs = [torch.zeros_like(z) for _ in range(dist.get_world_size())]
    dist.all_gather(zs, z.detach()); zs[dist.get_rank()] = z; s = torch.cat(zs)
    (F.cross_entropy(s @ s.T / .1, torch.arange(len(s))) * dist.get_world_size()).backward()
""", "proven"),
    Step("tokens_of_micro_batches", """
yy = y.clone(); yy[: (0 if rank == 0 else 2)] = -100
def step():
    n = (yy != -100).sum(); dist.all_reduce(n)
    for i, (a, b) in enumerate(zip(x.chunk(2), yy.chunk(2))):
        (F.cross_entropy(model(a), b, reduction="sum") * dist.get_world_size() / n).backward()
""", "proven"),
    Step("centred_by_batch", """
def step(): F.cross_entropy(model(x - x.mean(0)), y).backward()
""", "differs", "a batch's own statistics"),
)
# fmt: on
