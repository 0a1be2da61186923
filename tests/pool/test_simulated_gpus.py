"""CUDA programs on simulated GPUs: real ranks, nccl's programs, and what a pool says of itself."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbddp.analysis.placement import describe
from nbddp.capabilities.memory.history import BEFORE, CUDA
from nbddp.capabilities.memory.public import memory as public_memory
from nbddp.capabilities.simulated_gpus import probe
from nbddp.capabilities.simulated_gpus.part import COUNTED, TIMED
from nbddp.capabilities.timings.public import timings as public_timings
from nbddp.errors import BadInput, RunFailed, RunHung, RunStopped
from nbddp.launch.options import parse_cell
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests.pool.silent import reads

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
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(2, simulate_gpus=4) as made:
        yield made


def failed(pool: WorkerPool, code: str, kind: type[RunFailed] = RunFailed, **how: float) -> str:
    with pytest.raises(kind) as error:
        pool.run_cell(INIT + code, show=(), **how)  # type: ignore[arg-type]
    return str(error.value.report)


def values(pool: WorkerPool, code: str, last: str) -> list[object]:
    found = pool.run_cell(f"{code}\n{last}", want_value=True)
    return [found[rank] for rank in range(pool.world_size)]


def test_a_ddp_program_for_gpus_runs_as_it_is(pool: WorkerPool) -> None:
    last = "(torch.cuda.get_device_name(), torch.cuda.device_count(), str(loss.device), dist.get_backend())"
    found = values(pool, INIT + TRAIN, last)
    assert found == [("Tesla T4", 4, f"cuda:{r}", "nccl") for r in range(2)]
    weights = values(pool, "", "model.module.weight.sum().item()")
    assert weights[0] == weights[1]


def test_ranks_that_seed_nothing_draw_different_numbers(pool: WorkerPool) -> None:
    anew = "torch.cuda.default_generators._made.clear()  # as in a new process"
    assert len({*values(pool, INIT + anew, "torch.rand(1, device='cuda').item()")}) == 2


SMALL = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
small = lambda: nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 5))
def step(wrapped, device):
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    y = wrapped(torch.randn(20, 10))  # DDP moves it
    (y - torch.zeros(20, 5).to(device)).square().mean().backward()
    optimizer.step()
    dist.destroy_process_group()
    return str(y.device)
rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
if dist.is_initialized(): dist.destroy_process_group()
"""
DOCUMENTS = {  # the calls of tutorials, torch's own and others
    "the accelerator's API": """
here = torch.accelerator.current_accelerator()
torch.accelerator.set_device_index(rank)
dist.init_process_group(backend=dist.get_default_backend_for_device(here))
found = step(DDP(small().to(rank), device_ids=[rank]), rank)
""",
    "GPUs shared out among ranks": """
dist.init_process_group(backend="nccl")
each = torch.cuda.device_count() // 4  # as where four ranks share the node: the pool has four GPUs and two ranks
mine = list(range(local_rank * each, (local_rank + 1) * each))
found = step(DDP(small().cuda(mine[0]), mine), mine[0])
""",
    "synchronised batch norm": """
dist.init_process_group(backend="nccl", init_method="env://", world_size=int(os.environ["WORLD_SIZE"]), rank=rank)
model = nn.Sequential(small(), nn.BatchNorm1d(5)).cuda(local_rank)
found = step(DDP(nn.SyncBatchNorm.convert_sync_batchnorm(model), device_ids=[local_rank]), local_rank)
""",
    "a checkpoint of rank 0": """
torch.cuda.set_device(rank)
dist.init_process_group("nccl", rank=rank, world_size=2)
wrapped = DDP(small().to(rank), device_ids=[rank])
if rank == 0: torch.save(wrapped.state_dict(), CHECKPOINT)
dist.barrier()
wrapped.load_state_dict(torch.load(CHECKPOINT, map_location={"cuda:%d" % 0: "cuda:%d" % rank}))
dist.barrier()
if rank == 0: os.remove(CHECKPOINT)
found = step(wrapped, rank)
""",
    "a model on two GPUs": """
class Split(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = nn.Linear(10, 8).to(first), nn.Linear(8, 5).to(second)
        self.devices = first, second
    def forward(self, x):
        return self.second(self.first(x.to(self.devices[0])).relu().to(self.devices[1]))
dist.init_process_group("nccl")
found = step(DDP(Split((rank + 2) % 4, rank)), rank)
""",
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_program_of_a_tutorial_runs_as_it_is(name: str, pool: WorkerPool, tmp_path: Path) -> None:
    code = f"CHECKPOINT = {str(tmp_path / 'toy')!r}{SMALL}{DOCUMENTS[name]}"
    assert values(pool, code, "found") == ["cuda:0", "cuda:1"]


def test_the_pool_says_what_they_are(pool: WorkerPool) -> None:
    assert pool.parts.of("simulated_gpus").holds() == [f"4 simulated GPUs (T4, 16 GB; {SAID}"]
    placed = pool.placed()
    assert "each owns 1 simulated GPU" in placed.equation()
    assert "the GPUs are simulated" in describe(placed)
    assert [w["device"] for w in pool.status()["info"]["workers"]] == ["simulated GPU 0", "simulated GPU 1"]
    assert pool.start() == []  # it is said once
    with pytest.raises(BadInput, match="timed on simulated GPUs"):
        pool.forecast()


def test_timings_and_memory_are_measured(pool: WorkerPool) -> None:
    pool.run_cell(INIT + TRAIN, cell=3, show=())
    backward = (INIT + TRAIN).splitlines().index("    optimizer.zero_grad(); loss.backward(); optimizer.step()") + 1
    noted = [step.line_of("backward") for step in pool.timings().steps[0]]
    assert noted == [(3, backward)] * 3, "autograd's engine works for GPUs in threads of its own"
    for found, words in ((public_timings(pool), TIMED), (public_memory(pool), COUNTED)):
        assert (found.to_dict()["simulated_gpus"], found.notes) == (True, (words,)), "what nbddp.Pool gives is marked"
    assert len(pool.timings().numbers()) == 3
    held = pool.memory()
    assert [m.rank for m in held] == [0, 1]
    assert held[0].total > 0


def test_the_history_of_allocations_names_lines(pool: WorkerPool) -> None:
    code = f"{INIT}{TRAIN}kept = torch.ones(1 << 20, device=local)\nkept = kept * 2\n"
    pool.run_cell(code, memory=True, show=())
    found = pool.allocations(whole=True)
    assert [r.kind for r in found.ranks] == [CUDA] * 2
    lines = {place[1]: held for place, held in found.ranks[0].window.lines if place and place != BEFORE}
    first = code.splitlines().index("kept = kept * 2")
    assert lines[first] == lines[first + 1] == 4 << 20  # the old one is there while the new one is made


MISTAKES = {
    "differs between ranks, with all_gather": "dist.all_reduce(t) if rank else dist.all_gather([t, t.clone()], t)",
    "rank 1 waits in all_reduce #": "for _ in range(1 + rank): dist.all_reduce(t); dist.all_reduce(t)",
    "waits in recv from rank 1": "dist.recv(t, 1 - rank)",
}


@pytest.mark.parametrize("said", MISTAKES)
def test_a_deadlock_is_proved(said: str, pool: WorkerPool) -> None:
    assert said in failed(pool, MISTAKES[said], RunHung, hang_after=0.5, timeout=20.0)
    assert values(pool, INIT, "t.tolist()") == [[2.0, 2.0]] * 2


def test_stop_and_timeout_free_the_ranks(pool: WorkerPool) -> None:
    threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    failed(pool, "while True: t = t * 1.0", RunStopped)
    assert "waiting in all_reduce #2 for rank 0" in failed(
        pool, "dist.all_reduce(t) if rank else time.sleep(60)", timeout=1.5
    )
    assert values(pool, INIT, "t.tolist()") == [[2.0, 2.0]] * 2


def test_a_crash_says_that_they_were_in_use(pool: WorkerPool) -> None:
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
def test_a_mistake_with_devices_is_explained(code: str, pool: WorkerPool) -> None:
    report = failed(pool, code)
    rank = report[5]  # "rank 0 raised …"
    assert f"    {EXPLAINED[code].format(rank=rank)}\n" in report


def test_other_errors_are_told_as_ever(pool: WorkerPool) -> None:
    report = failed(pool, "x = torch.ones(1)\nraise ValueError('no device')")
    assert "x " not in report.split("\n\n")[0]


def test_a_line_may_change_them(pool: WorkerPool) -> None:
    see = "import os, torch\n"
    last = "(torch.cuda.device_count(), os.environ['CUDA_VISIBLE_DEVICES'], os.environ['LOCAL_RANK'])"
    said = pool.ensure(parse_cell("--simulate-gpus 2xA100-80GB"))
    assert said[0] == f"2 simulated GPUs (A100, 80 GB; {SAID}"
    assert "ranks 0–1 restarted on other devices; their variables are lost" in said
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


ORDINAL = "CUDA error: invalid device ordinal"
BY_RANK = {  # a line that takes the global rank for the number of a GPU → the words of the hardware, or of torch there
    "torch.cuda.set_device(rank)": ORDINAL,
    "torch.nn.Linear(8, 4).to(rank)": ORDINAL,
    # torch takes it, and has a list of streams as long as there are GPUs
    "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 4).to(local), device_ids=[rank])(t)": (
        "IndexError: list index out of range"
    ),
}


@pytest.mark.more
def test_a_global_rank_is_no_gpu_of_the_second_node(pool: WorkerPool) -> None:
    pool.ensure(parse_cell("--simulate-gpus 2 --nproc 2 --nnodes 2 --gpus-per-proc 1"))
    try:
        said = {code: failed(pool, code) for code in BY_RANK}
    finally:
        pool.ensure(parse_cell("--simulate-gpus 4 --nproc 2 --nnodes 1 --gpus-per-proc 1"))
    for code, words in BY_RANK.items():
        assert words in said[code]
        assert "rank 2" in said[code]
        assert "rank 3" in said[code]


def test_where_torch_is_unknown_the_pool_is_refused(monkeypatch: pytest.MonkeyPatch, pool: WorkerPool) -> None:
    monkeypatch.setattr(probe, "unusable", lambda: "torch 9.9 cannot simulate GPUs here (a slot); known: 2.13")
    with pytest.raises(BadInput, match=r"--simulate-gpus 4xL4: torch 9\.9 cannot simulate GPUs here"):
        pool.ensure(parse_cell("--simulate-gpus 4xL4"))
    assert pool.placed().nodes[0].devices[0].name == "Tesla T4"
    assert values(pool, INIT, "t.tolist()") == [[2.0, 2.0]] * 2


@pytest.mark.every(6)
@pytest.mark.parametrize("program", [pytest.param(each, id=name) for name, each in reads().items()])
def test_a_line_that_waits_for_the_gpu_in_each_step_is_named_and_no_other(
    pool: WorkerPool, program: tuple[str, str]
) -> None:
    line, code = program
    pool.ensure(parse_cell("--simulate-gpus 2xA100-80GB"))
    pool.run_cell(code, sanitize=True, screen=NullScreen())
    found = pool.findings()
    assert [each.kind for each in found] == ["host-sync"] * bool(line), str(found)
    for each in found:
        assert line in each.place.text
        assert "of 32 optimizer steps" in each.evidence[0]
        assert "was not measured: the GPU is simulated" in each.evidence[-1]


# -- without the option ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> Iterator[WorkerPool]:
    with WorkerPool(2) as made:
        yield made


LOADED = "import sys; sorted(m for m in sys.modules if 'simulated_gpus' in m)"


def test_nothing_of_it_is_loaded(plain: WorkerPool) -> None:
    assert values(plain, "", LOADED) == [[], []]
    assert "simulated_gpus" not in vars(plain.parts)["_made"]  # other pools of this process have it


def test_a_program_for_gpus_fails_as_ever_and_is_told_the_option(plain: WorkerPool) -> None:
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


def test_ranks_that_share_a_gpu_use_gloo_as_on_hardware(plain: WorkerPool) -> None:
    plain.ensure(parse_cell("--simulate-gpus 1 --oversubscribe --visible own"))
    assert "simulated GPUs are shared" in plain.placed().equation()
    code = INIT.replace('"nccl"', "")
    assert values(plain, code, "t.tolist(), str(t.device)") == [([2.0, 2.0], "cuda:0")] * 2
    with pytest.raises(RunFailed, match="ranks share a GPU here"):
        plain.run_cell(f"dist.destroy_process_group()\n{INIT}", show=())
