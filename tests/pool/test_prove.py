"""`%ddp prove`: N ranks against one process, on real ranks; and nothing of theirs changes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nbddp
from nbddp.notebook.commands import parse_command
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests import warm
from tests.pool.steps import STEPS, Step
from tests.waiting import until

# what a proof may change nothing of
STATE = """
import hashlib, gc, random, numpy
def shard(t): return t.to_local() if hasattr(t, "to_local") else t
def tensor_state(t):
    if t is None: return None
    own = shard(t)
    bits = own.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes()  # FSDP2 resizes what is not shared
    return id(t), own.data_ptr(), t.dtype, t.requires_grad, bits
def plain(t):
    return t is None or (t.layout is torch.strided and type(shard(t.data)) is torch.Tensor)
def state():
    gc.collect()  # of models of earlier cells
    found = {}
    def put(key, value): found[key] = hashlib.md5(repr(value).encode()).hexdigest()
    for m in (m for m in gc.get_objects() if issubclass(type(m), nn.Module)):
        for n, p in (*m.named_parameters(), *m.named_buffers()):
            if plain(p) and plain(p.grad): put((id(m), n), (tensor_state(p), tensor_state(p.grad)))
        put((id(m), "mode"), (m.training, list(m._forward_hooks), list(m._backward_hooks), *(
            id(m.__dict__.get(k)) for k in ("reducer", "process_group", "require_backward_grad_sync"))))
    for n, v in list(globals().items()):
        if isinstance(v, torch.Tensor) and plain(v): put(n, tensor_state(v))
    put("optimizer", optimizer.state_dict())
    put("random", (torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy.random.get_state()))
    world = dist.group.WORLD
    put("group", (id(world), dist.get_world_size(), world._get_sequence_number_for_group()))
    put("process", (torch.get_default_dtype(), torch.get_num_threads(), id(F.dropout), id(torch.save), id(DDP.forward)))
    put("files", sorted(os.listdir(folder)))
    put("variables", [os.environ.get(k) for k in ("RANK", "WORLD_SIZE")])
    return found
"""
BASE = """
import os, random, time, weakref, numpy as np
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
if not dist.is_initialized(): dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
gone = [weakref.proxy(type("Gone", (), {})())]  # whoever asks it for its class gets a ReferenceError
def net(): torch.manual_seed(0); return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
def data(n=6):
    g = torch.Generator().manual_seed(10 + rank)
    return torch.randn(n, 8, generator=g), torch.randint(0, 4, (n,), generator=g)
def train():
    optimizer.zero_grad(); F.cross_entropy(model(x), y).backward(); optimizer.step()
model = DDP(net()); x, y = data()
opt = optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
train()
"""
FACTORS = """
def mean(): F.cross_entropy(model(x), y).backward()
def summed(): F.cross_entropy(model(x), y, reduction="sum").backward()
def by_hand():
    F.cross_entropy(model(x), y).backward()
    for p in model.parameters(): dist.all_reduce(p.grad)
def twice(): (F.cross_entropy(model(x), y) / world_size).backward()
def past_ddp(): F.cross_entropy(model.module(x), y).backward()
def batch_norm(): F.cross_entropy(model(F.batch_norm(x, None, None, training=True)), y).backward()
def contrastive():
    z = F.normalize(model(x)); world = dist.get_world_size()
    zs = [torch.zeros_like(z) for _ in range(world)]
    dist.all_gather(zs, z.detach()); zs[dist.get_rank()] = z
    labels = torch.arange(len(z)) + dist.get_rank() * len(z)
    F.cross_entropy(z @ torch.cat(zs).T / 0.1, labels).backward()
x2, y2 = data(6 if rank == 0 else 2)
def unequal(): F.cross_entropy(model(x2), y2).backward()
y3 = y2.clone(); y3[y3 < (2 if x2[0, 0] > 0 else 1)] = -100
def masked(): F.cross_entropy(model(x2), y3).backward()
"""
# step → ratio to one process and relative difference, of all gradients; words of the cause
KNOWN = {
    "summed": (0.5, 0.5, "Known meaning of 1/N: the loss grows with the number of samples"),
    "by_hand": (2.0, 1.0, "Known meaning of N: gradients are summed"),
    "twice": (0.5, 0.5, "Known meaning of 1/N: the loss or the gradient is divided by the number of ranks"),
    "past_ddp": (1.2009, 0.785, "0.weight's gradients differ between the ranks"),
    "batch_norm": (0.9952, 0.243, "Known causes: batch statistics"),
    "contrastive": (0.7848, 0.278, "Known causes: the step calls all_gather"),
    "unequal": (1.1408, 0.393, "Cause: the ranks have 6 and 2 samples"),
    "masked": (1.4333, 0.721, "of y3 5 and 1 entries count"),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with warm.pool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def factors(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> WorkerPool:
    run(pool, BASE.replace("train()\n", "") + FACTORS, tmp_path_factory.mktemp("factors"))
    return pool


def run(pool: WorkerPool, code: str, folder: Path) -> None:
    """Run a cell beside which `state()` can be called."""
    pool.run_cell(f"folder = {str(folder)!r}\n{code}{STATE}", screen=NullScreen())


def states(pool: WorkerPool) -> list[Any]:
    return list(pool.run_cell("state()", want_value=True, screen=NullScreen()))


@contextlib.contextmanager
def nothing_changes(pool: WorkerPool) -> Iterator[None]:
    before = states(pool)
    yield
    after = states(pool)
    changed = [{k for k in b if b[k] != a.get(k)} for b, a in zip(before, after, strict=True)]
    assert changed == [set()] * len(before)


@pytest.mark.parametrize("step", KNOWN)
def test_each_factor_is_that_of_the_study_and_has_its_known_meaning(factors: WorkerPool, step: str) -> None:
    factor, off, cause = KNOWN[step]
    proof = factors.prove(step)
    assert proof.verdict == "differs"
    assert proof.factor == pytest.approx(factor, rel=0.01)
    assert proof.off == pytest.approx(off, rel=0.01)
    assert (proof.first, proof.dtype) == ("0.weight", "float64")
    assert cause in proof.cause


def test_a_healthy_step_is_proven_and_shows_itself(factors: WorkerPool) -> None:
    with nothing_changes(factors):
        proof = factors.prove("mean")
    assert (proof.verdict, proof.ranks, proof.samples) == ("proven", 2, 12)
    assert proof.largest < 1e-12 < proof.allowed
    assert str(proof).startswith("proven: 2 ranks equal one process with 12 samples (largest difference ")
    assert "Not seen: a mistake that one process makes as well" in str(proof)
    assert "<b>proven: 2 ranks" in proof._repr_html_()
    assert json.loads(json.dumps(proof.to_dict()))["batches"] == {"x": [6, 6], "y": [6, 6]}


@pytest.mark.more
def test_no_descriptor_and_no_process_is_left(pool: WorkerPool, tmp_path: Path) -> None:
    """Of a proof, a failure, and one that is refused."""
    run(pool, BASE + "def step(): F.cross_entropy(model(x), y).backward()\ndef fails(): x; 1 / 0", tmp_path)
    opened = "len(os.listdir('/proc/self/fd'))"
    before, counts = children(pool), []
    for _ in range(4):
        assert pool.prove("step").proven
        with pytest.raises(nbddp.BadInput, match="ZeroDivisionError"):
            pool.prove("fails")
        counts.append(sum(pool.run_cell(opened, want_value=True, screen=NullScreen())))
    assert counts[0] >= counts[-1]
    assert children(pool) == before


def check(pool: WorkerPool, step: Step, folder: Path) -> None:
    """A proof of this step says what it should, and the next real step is the one that would have been."""
    run(pool, BASE + step.code.replace("{folder}", str(folder)), folder)
    with nothing_changes(pool):
        try:
            proof = pool.prove(*step.line.split(), timeout=step.timeout, batch=step.batch)
            verdict, words = proof.verdict, str(proof)
        except nbddp.BadInput as e:
            verdict, words = "refused", str(e)
    assert (verdict, words) == (step.verdict, words), words
    assert step.words in words
    # the next real step, and its twin in a model of its own
    lines = "twin = DDP(net()); twin.load_state_dict(model.state_dict()); model.zero_grad(); after = [" \
        "[p.grad for p in m.parameters()] for m in (model, twin) if F.cross_entropy(m(x), y).backward() is None]\n" \
        "all(map(torch.equal, *after))"  # fmt: skip
    assert pool.run_cell(lines, want_value=True, screen=NullScreen()) == [True, True]


@pytest.mark.parametrize("step", [s for s in STEPS if s.always], ids=lambda s: s.name)
def test_steps_of_other_shapes(pool: WorkerPool, step: Step, tmp_path: Path) -> None:
    check(pool, step, tmp_path)


@pytest.mark.more
@pytest.mark.parametrize("step", [s for s in STEPS if not s.always], ids=lambda s: s.name)
def test_more_steps_of_other_shapes(pool: WorkerPool, step: Step, tmp_path: Path) -> None:
    check(pool, step, tmp_path)


@pytest.mark.more
@pytest.mark.parametrize("ranks", [3, 4])
def test_the_same_on_more_ranks(ranks: int, tmp_path: Path) -> None:
    with warm.pool(ranks) as pool:
        run(pool, BASE + FACTORS, tmp_path)
        with nothing_changes(pool):
            found = {name: pool.prove(name) for name in ("mean", "summed", "by_hand", "twice", "unequal")}
    assert (found["mean"].verdict, found["mean"].samples) == ("proven", 6 * ranks)
    for name, factor in {"summed": 1 / ranks, "by_hand": ranks, "twice": 1 / ranks}.items():
        assert found[name].factor == pytest.approx(factor, rel=1e-9)
        assert found[name].cause.startswith(f"Known meaning of {'N' if name == 'by_hand' else '1/N'}:")
    assert found["unequal"].cause.startswith(f"Cause: the ranks have 6 and 2{' and 2' * (ranks - 2)} samples")


HANGS = """
def hangs(): F.cross_entropy(model(x), y).backward(); time.sleep(1000)
"""


def children(pool: WorkerPool) -> list[int]:
    """Processes that the ranks' processes have started."""
    parents = pool.run_cell("os.getpid()", want_value=True, screen=NullScreen())
    return [int(pid) for p in parents for pid in Path(f"/proc/{p}/task/{p}/children").read_text().split()]


def test_stop_ends_the_copies_and_changes_nothing(pool: WorkerPool, tmp_path: Path) -> None:
    run(pool, BASE + HANGS, tmp_path)
    before = children(pool)
    with nothing_changes(pool):
        timer = threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            pool.prove("hangs", progress=lambda text: timer.start())
        assert children(pool) == before
    assert pool.prove("train").proven


def test_a_rank_that_is_stopped_for_seconds_answers_later(pool: WorkerPool, tmp_path: Path) -> None:
    """Its answer to a question that nobody waits for any more was lost, and the proof with it."""
    run(pool, BASE + "def slow(): time.sleep(0.6); train()", tmp_path)
    before, pid = children(pool), pool.workers[1].pid
    stopped = threading.Thread(target=lambda: stop_once_copied(pid, len(before) // 2))
    stopped.start()
    assert pool.prove("slow").proven
    stopped.join()


def stop_once_copied(pid: int, before: int) -> None:
    until(lambda: len(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()) > before)
    time.sleep(0.3)  # it has been asked, and the copy is not done
    os.kill(pid, signal.SIGSTOP)
    time.sleep(2.5)  # longer than two questions wait
    os.kill(pid, signal.SIGCONT)


@pytest.mark.more
def test_a_rank_that_is_killed_ends_the_proof_and_all_copies(tmp_path: Path) -> None:
    with warm.pool(2) as pool:
        run(pool, BASE + HANGS, tmp_path)
        pids = pool.run_cell("os.getpid()", want_value=True, screen=NullScreen())
        seen: list[int] = []

        def kill(text: str) -> None:
            def later() -> None:
                seen.extend(int(p) for p in Path(f"/proc/{pids[1]}/task/{pids[1]}/children").read_text().split())
                os.kill(pids[1], signal.SIGKILL)

            threading.Timer(0.6, later).start()

        with pytest.raises(nbddp.NbddpError):
            pool.prove("hangs", progress=kill)
        assert seen
        until = time.monotonic() + 10
        while any(Path(f"/proc/{pid}").exists() for pid in seen) and time.monotonic() < until:
            time.sleep(0.02)
        assert not any(Path(f"/proc/{pid}").exists() for pid in seen)
        assert pool.run_cell("os.getpid()", ranks=[0], want_value=True, screen=NullScreen())[0] == pids[0]


def test_what_cannot_be_proven_is_said_with_what_to_type(factors: WorkerPool) -> None:
    factors.run_cell("number = 3\ndef needs(model, x): model(x).mean().backward()\ny4 = torch.zeros(6)\n"
                     "def both(): (model(x).mean(1) - y4).square().mean().backward()", screen=NullScreen())  # fmt: skip
    for asked, words in {
        ("nowhere",): "'nowhere' is not defined on ranks 0–1; assign it in a %%ddp cell",
        ("number",): "'number' is of type int and not a function",
        ("needs",): "Write %ddp prove needs MODEL X",
        ("mean", "1+1"): "'1+1' is not a variable on the ranks",
        ("both",): "'y4' is as long as the batch, and may or may not belong to it; write --batch x,y4 if it does",
    }.items():
        with pytest.raises(nbddp.BadInput) as raised:
            factors.prove(*asked)
        assert words in str(raised.value).replace("belong to the batch", "belong to it")
    assert factors.prove("both", batch=("x", "y4")).proven


def test_its_line() -> None:
    assert parse_command("prove step").args["arguments"] == []
    line = parse_command("prove step model batch --batch x,y --timeout 1m")
    assert {**line.args} == {
        "step": "step", "arguments": ["model", "batch"], "batch": ("x", "y"), "timeout": 60.0,
    }  # fmt: skip


MESHES = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
two, one = net(), net()
parallelize_module(two, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
for part in (two[0], two[2], two): fully_shard(part, mesh=mesh["dp"])
for part in (one[0], one): fully_shard(part, mesh=mesh)
g = torch.Generator().manual_seed(rank // 2); bs = 6
xs, ys = torch.randn(bs, 8, generator=g), torch.randint(0, 4, (bs,), generator=g)
def both(): (F.cross_entropy(two(xs), ys, reduction="sum") / bs).backward()
def summed_both(): F.cross_entropy(two(xs), ys, reduction="sum").backward()
def hybrid(): F.cross_entropy(one(x), y).backward()
both(); hybrid()
"""


@pytest.mark.more
def test_meshes_of_two_dimensions(tmp_path: Path) -> None:
    """FSDP2 over tensor parallelism, and hybrid sharding: ranks of one model have one batch."""
    with warm.pool(4) as pool:
        run(pool, BASE + MESHES, tmp_path)
        with nothing_changes(pool):
            found = {name: pool.prove(name) for name in ("both", "summed_both", "hybrid")}
    assert [(p.verdict, p.samples) for p in found.values()] == [("proven", 12), ("differs", 12), ("proven", 24)]
    assert found["summed_both"].factor == pytest.approx(0.5)
    assert "There bs = 12." in str(found["both"])
    assert "Ranks that hold parts of one model have one batch, which counts once" in str(found["both"])


ON_GPUS = """
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
def cuda(n=6): return tuple(t.cuda() for t in data(n))
model = DDP(net().cuda(), device_ids=[torch.cuda.current_device()]); x, y = cuda()
opt = optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
train()
def normed(): torch.manual_seed(0); return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).cuda()
plain, shared = DDP(normed()), DDP(nn.SyncBatchNorm.convert_sync_batchnorm(normed()))
def separate(): F.cross_entropy(plain(x), y).backward()
def together(): F.cross_entropy(shared(x), y).backward()
from torch.distributed.fsdp import fully_shard
parts = net().cuda(); fully_shard(parts[0]); fully_shard(parts); sharded = torch.optim.Adam(parts.parameters(), lr=.1)
def in_parts(): F.cross_entropy(parts(x), y).backward(); sharded.step()
in_parts()
def mixed():
    with torch.autocast("cuda", dtype=torch.bfloat16): loss = F.cross_entropy(model(x), y)
    loss.backward()
def where():
    torch.cuda.synchronize(); devices = [str(p.grad.device) for p in model.parameters()]
    return devices, torch.cuda.memory_allocated(), torch.cuda.mem_get_info(), torch.cuda.get_rng_state().tolist()[:9]
"""


@pytest.mark.more
def test_steps_on_simulated_gpus_are_proven_there(tmp_path: Path) -> None:
    """Also after backward has run, for which torch has threads that a fork lacks."""
    with warm.pool(2, simulate_gpus=2) as pool:
        pool.run_cell(f"folder = {str(tmp_path)!r}\n{BASE}{FACTORS}{ON_GPUS}", screen=NullScreen())
        before = pool.run_cell("where()", want_value=True, screen=NullScreen())
        for step, verdict, words in (
            ("train", "proven", "in float64"), ("summed", "differs", "Known meaning of 1/N"),
            ("past_ddp", "differs", "gradients differ between the ranks"), ("mixed", "proven", "in float64"),
            ("separate", "differs", "Cause: BatchNorm normalizes by each rank's own samples"),
            ("together", "proven", "in float64"), ("in_parts", "proven", "in float64"),
        ):  # fmt: skip
            proof = pool.prove(step, batch=("x", "y"))
            assert (proof.verdict, words in str(proof)) == (verdict, True), str(proof)
        assert pool.run_cell("where()", want_value=True, screen=NullScreen()) == before
        pool.run_cell("train()", screen=NullScreen())
