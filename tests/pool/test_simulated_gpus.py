"""CUDA programs on simulated GPUs: real ranks, nccl's programs, and what a pool says of itself."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import nbddp
from nbddp.capabilities.memory.history import BEFORE, CUDA
from nbddp.capabilities.simulated_gpus import probe
from nbddp.errors import BadInput, RunFailed, RunHung, RunStopped
from nbddp.launch.options import parse_cell

SAID = "computed on the CPU; times are not a GPU's)"
INIT = """
import os, time, torch, torch.distributed as dist
if not dist.is_initialized(): dist.init_process_group("nccl")
rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
t = torch.ones(2, device="cuda")
dist.all_reduce(t)
"""
TRAIN = """
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
model = DDP(torch.nn.Linear(8, 4).cuda(), device_ids=[local])
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    loss = model(torch.ones(2, 8, device=local) * rank).sum()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[nbddp.Pool]:
    with nbddp.Pool(2, simulate_gpus=4) as made:
        yield made


def failed(pool: nbddp.Pool, code: str, kind: type[RunFailed] = RunFailed, **how: float) -> str:
    with pytest.raises(kind) as error:
        pool.run_cell(INIT + code, show=(), **how)  # type: ignore[arg-type]
    return str(error.value.report)


def values(pool: nbddp.Pool, code: str, last: str) -> list[object]:
    found = pool.run_cell(f"{code}\n{last}", want_value=True)
    return [found[rank] for rank in range(pool.world_size)]


def test_a_ddp_program_for_gpus_runs_as_it_is(pool: nbddp.Pool) -> None:
    last = "(torch.cuda.get_device_name(), torch.cuda.device_count(), str(loss.device), dist.get_backend())"
    found = values(pool, INIT + TRAIN, last)
    assert found == [("Tesla T4", 4, f"cuda:{r}", "nccl") for r in range(2)]
    weights = values(pool, "", "model.module.weight.sum().item()")
    assert weights[0] == weights[1]


def test_ranks_that_seed_nothing_draw_different_numbers(pool: nbddp.Pool) -> None:
    anew = "torch.cuda.default_generators._made.clear()  # as in a new process"
    assert len({*values(pool, INIT + anew, "torch.rand(1, device='cuda').item()")}) == 2


TOY = """
import os, torch, torch.distributed as dist, torch.nn as nn, torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP
class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1, self.relu, self.net2 = nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)
    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))
def step(ddp_model, device):
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)
    optimizer.zero_grad()
    outputs = ddp_model(torch.randn(20, 10))
    nn.MSELoss()(outputs, torch.randn(20, 5).to(device)).backward()
    optimizer.step()
    dist.destroy_process_group()
    return str(outputs.device)
rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
if dist.is_initialized(): dist.destroy_process_group()
"""
DOCUMENTS = {  # what tutorials of torch's own and of others write, line by line
    "the accelerator's API": """
acc = torch.accelerator.current_accelerator()
vendor_backend = torch.distributed.get_default_backend_for_device(acc)
torch.accelerator.set_device_index(rank)
torch.distributed.init_process_group(backend=vendor_backend)
model = ToyModel().to(rank)
found = step(DDP(model, device_ids=[rank]), rank)
""",
    "GPUs shared out among ranks": """
dist.init_process_group(backend="nccl")
local_world_size = 4  # the pool has four GPUs and two ranks
n = torch.cuda.device_count() // local_world_size
device_ids = list(range(local_rank * n, (local_rank + 1) * n))
model = ToyModel().cuda(device_ids[0])
found = step(DDP(model, device_ids), device_ids[0])
""",
    "synchronised batch norm": """
dist.init_process_group(backend="nccl", init_method="env://", world_size=int(os.environ["WORLD_SIZE"]), rank=rank)
model = nn.Sequential(ToyModel(), nn.BatchNorm1d(5)).cuda(local_rank)
model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
model = nn.parallel.DistributedDataParallel(model, device_ids=[local_rank])
found = step(model, local_rank)
""",
    "a checkpoint of rank 0": """
torch.cuda.set_device(rank)
dist.init_process_group("nccl", rank=rank, world_size=2)
ddp_model = DDP(ToyModel().to(rank), device_ids=[rank])
if rank == 0: torch.save(ddp_model.state_dict(), CHECKPOINT)
dist.barrier()
map_location = {"cuda:%d" % 0: "cuda:%d" % rank}
ddp_model.load_state_dict(torch.load(CHECKPOINT, map_location=map_location))
dist.barrier()
if rank == 0: os.remove(CHECKPOINT)
found = step(ddp_model, rank)
""",
    "a model on two GPUs": """
class ToyMpModel(nn.Module):
    def __init__(self, dev0, dev1):
        super().__init__()
        self.dev0, self.dev1 = dev0, dev1
        self.net1, self.relu, self.net2 = nn.Linear(10, 10).to(dev0), nn.ReLU(), nn.Linear(10, 5).to(dev1)
    def forward(self, x):
        return self.net2(self.relu(self.net1(x.to(self.dev0))).to(self.dev1))
dist.init_process_group("nccl")
dev0, dev1 = (rank + 2) % 4, rank
found = step(DDP(ToyMpModel(dev0, dev1)), dev1)
""",
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_program_of_a_tutorial_runs_as_it_is(name: str, pool: nbddp.Pool, tmp_path: Path) -> None:
    code = f"CHECKPOINT = {str(tmp_path / 'toy')!r}{TOY}{DOCUMENTS[name]}"
    assert values(pool, code, "found") == ["cuda:0", "cuda:1"]


def test_the_pool_says_what_they_are(pool: nbddp.Pool) -> None:
    assert pool.parts.of("simulated_gpus").holds() == [f"4 simulated GPUs (T4, 16 GB; {SAID}"]
    placed = pool.placed()
    assert "each owns 1 simulated GPU" in placed.equation()
    assert "the GPUs are simulated" in placed.describe()
    assert [w["device"] for w in pool.status()["info"]["workers"]] == ["simulated GPU 0", "simulated GPU 1"]
    assert pool.start() == []  # it is said once
    with pytest.raises(BadInput, match="timed on simulated GPUs"):
        pool.forecast()


def test_timings_and_memory_are_measured(pool: nbddp.Pool) -> None:
    pool.run_cell(INIT + TRAIN, show=())
    assert len(pool.timings().numbers()) == 3
    held = pool.memory()
    assert [m.rank for m in held] == [0, 1]
    assert held[0].total > 0


def test_the_history_of_allocations_names_lines(pool: nbddp.Pool) -> None:
    code = f"{INIT}{TRAIN}kept = torch.ones(1 << 20, device=local)\nkept = kept * 2\n"
    pool.run_cell(code, memory=True, show=())
    found = pool.allocations(whole=True)
    assert [r.kind for r in found.ranks] == [CUDA] * 2
    lines = {place[1]: held for place, held in found.ranks[0].window.lines if place and place != BEFORE}
    first = code.splitlines().index("kept = kept * 2")
    assert lines[first] == lines[first + 1] == 4 << 20  # the old one is there while the new one is made


MISTAKES = {
    "differs between ranks: all_gather on rank 0": "dist.all_reduce(t) if rank else dist.all_gather([t, t.clone()], t)",
    "rank 1 waits in all_reduce #": "for _ in range(1 + rank): dist.all_reduce(t); dist.all_reduce(t)",
    "waits in recv from rank 1": "dist.recv(t, 1 - rank)",
}


@pytest.mark.parametrize("said", MISTAKES)
def test_a_deadlock_is_proved(said: str, pool: nbddp.Pool) -> None:
    assert said in failed(pool, MISTAKES[said], RunHung, hang_after=0.5, timeout=20.0)
    assert values(pool, INIT, "t.tolist()") == [[2.0, 2.0]] * 2


def test_stop_and_timeout_free_the_ranks(pool: nbddp.Pool) -> None:
    threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    failed(pool, "while True: t = t * 1.0", RunStopped)
    assert "waiting in all_reduce #2 for rank 0" in failed(
        pool, "dist.all_reduce(t) if rank else time.sleep(60)", timeout=1.5
    )
    assert values(pool, INIT, "t.tolist()") == [[2.0, 2.0]] * 2


def test_a_crash_says_that_they_were_in_use(pool: nbddp.Pool) -> None:
    report = failed(pool, "if rank: os.kill(os.getpid(), 11)\ndist.all_reduce(t)")
    assert "rank 1 died: killed by SIGSEGV" in report
    assert "It ran on simulated GPU 1" in report
    assert values(pool, INIT, "t.tolist()") == [[2.0, 2.0]] * 2  # the new process has them too


EXPLAINED = {
    "net = torch.nn.Linear(2, 2).cuda()\nx = torch.ones(3, 2)\nnet(x)": (
        "the parameters of net (made in line 8) are on cuda:{rank} and x (made in line 9) is on cpu"
    ),
    "x = torch.ones(3)\ndist.all_reduce(x)": "x (made in line 8) is on cpu, and nccl takes tensors on GPUs only",
    "torch.ones(1, device='cuda:7')": "this process sees 4 GPUs, cuda:0 to cuda:3",
}


@pytest.mark.parametrize("code", EXPLAINED)
def test_a_mistake_with_devices_is_explained(code: str, pool: nbddp.Pool) -> None:
    report = failed(pool, code)
    rank = report[5]  # "rank 0 raised …"
    assert f"    {EXPLAINED[code].format(rank=rank)}\n" in report


def test_other_errors_are_told_as_ever(pool: nbddp.Pool) -> None:
    report = failed(pool, "x = torch.ones(1)\nraise ValueError('no device')")
    assert "x " not in report.split("\n\n")[0]


def test_a_line_may_change_them(pool: nbddp.Pool) -> None:
    see = "import os, torch\n"
    last = "(torch.cuda.device_count(), os.environ['CUDA_VISIBLE_DEVICES'], os.environ['LOCAL_RANK'])"
    said = pool.ensure(parse_cell("--simulate-gpus 2xA100-80GB"))
    assert said[0] == f"2 simulated GPUs (A100, 80 GB; {SAID}"
    assert "ranks 0–1 restarted on other devices; names on them are gone" in said
    assert values(pool, see, last) == [(2, "0,1", "0"), (2, "0,1", "1")]
    pool.ensure(parse_cell("--visible own"))
    assert values(pool, see, last) == [(1, "0", "0"), (1, "1", "0")]
    pool.ensure(parse_cell("--nproc 1 --nnodes 2 --gpus-per-proc 2 --visible all"))
    assert values(pool, see, last) == [(2, "0,1", "0")] * 2
    assert values(pool, INIT, "t.tolist()") == [[2.0, 2.0]] * 2  # cuda:0 of two nodes is not one GPU
    with pytest.raises(BadInput, match="need 4 GPUs, but each node has 2"):
        pool.ensure(parse_cell("--nproc 2 --nnodes 2 --gpus-per-proc 2"))
    assert pool.running
    pool.ensure(parse_cell("--simulate-gpus 4 --nproc 2 --nnodes 1 --gpus-per-proc 1"))
    assert pool.placed().simulates_gpus


def test_where_torch_is_unknown_the_pool_is_refused(monkeypatch: pytest.MonkeyPatch, pool: nbddp.Pool) -> None:
    monkeypatch.setattr(probe, "unusable", lambda: "torch 9.9 cannot simulate GPUs here (a slot); known: 2.13")
    with pytest.raises(BadInput, match=r"--simulate-gpus 4xL4: torch 9\.9 cannot simulate GPUs here"):
        pool.ensure(parse_cell("--simulate-gpus 4xL4"))
    assert pool.placed().nodes[0].devices[0].name == "Tesla T4"
    assert values(pool, INIT, "t.tolist()") == [[2.0, 2.0]] * 2


# -- without the option ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> Iterator[nbddp.Pool]:
    with nbddp.Pool(2) as made:
        yield made


LOADED = "import sys; sorted(m for m in sys.modules if 'simulated_gpus' in m)"


def test_nothing_of_it_is_loaded(plain: nbddp.Pool) -> None:
    assert values(plain, "", LOADED) == [[], []]
    assert "simulated_gpus" not in vars(plain.parts)["_made"]  # other pools of this process have it


def test_a_program_for_gpus_fails_as_ever_and_is_told_the_option(plain: nbddp.Pool) -> None:
    with pytest.raises(RunFailed) as error:
        plain.run_cell("import torch\ntorch.zeros(1).cuda()", show=())
    if plain.placed().nodes[0].devices:
        pytest.skip("this machine has a GPU")
    last = error.value.report.splitlines()[-1]
    assert last == (
        "No CUDA GPU is visible here; with --simulate-gpus 2 the program runs on simulated GPUs, computed on the CPU."
    )
    with pytest.raises(RunFailed) as other:
        plain.run_cell("raise RuntimeError('of my own')", show=())
    assert "--simulate-gpus" not in other.value.report


def test_ranks_that_share_a_gpu_use_gloo_as_on_hardware(plain: nbddp.Pool) -> None:
    plain.ensure(parse_cell("--simulate-gpus 1 --oversubscribe --visible own"))
    assert "simulated GPUs are shared" in plain.placed().equation()
    code = INIT.replace('"nccl"', "")
    assert values(plain, code, "t.tolist(), str(t.device)") == [([2.0, 2.0], "cuda:0")] * 2
    with pytest.raises(RunFailed, match="ranks share a GPU here"):
        plain.run_cell(f"dist.destroy_process_group()\n{INIT}", show=())
