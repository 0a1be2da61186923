"""Two ranks over NCCL, on two GPUs or on one, and over gloo on one: hangs are named and freed, times are NCCL's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

import nbddp
from nbddp.analysis.wait_time import transfers
from nbddp.capabilities.trace.merge import RankTrace
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from nbddp.protocol import pickling

Row = Callable[[str], None]
INIT = """
import os, time, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
if not dist.is_initialized(): dist.init_process_group("nccl")
t = torch.ones(4, device="cuda")
"""
WARM = f"{INIT}dist.all_reduce(t); torch.cuda.synchronize()\n"
AGAIN = f"{INIT}dist.all_reduce(t); found = t.sum().item(); dist.destroy_process_group()\n(found, kept)"
LEAVES = {"finishes": "pass", "raises": "raise ValueError('bad batch')"}
ROUNDS = 5


def ended(pool: WorkerPool, code: str, **options: Any) -> tuple[nbddp.RunFailed, float]:
    began = time.monotonic()
    with pytest.raises(nbddp.RunFailed) as caught:
        pool.run_cell(code, screen=NullScreen(), **options)
    return caught.value, time.monotonic() - began


@pytest.mark.parametrize("leaves", LEAVES)
def test_a_rank_that_waits_in_nccl_for_one_that_has_left_is_freed(pair: WorkerPool, leaves: str, row: Row) -> None:
    code = f"{WARM}if rank == 1:\n    {LEAVES[leaves]}\nelse:\n    dist.all_reduce(t); t.sum().item()"
    took = []
    for _ in range(ROUNDS):
        pids = [w.pid for _, w in sorted(pair.workers.items())]
        error, seconds = ended(pair, code, hang_after=1.0)
        took.append(seconds)
        if leaves == "raises":
            assert str(error).startswith("rank 1 raised ValueError: bad batch")
        else:
            assert isinstance(error, nbddp.RunHung)
            assert "all_reduce #" in str(error)
            assert "rank 1 has finished the cell without calling it" in str(error)
        assert "variables are kept" in error.report
        assert list(pair.run_cell(AGAIN, want_value=True, screen=NullScreen())) == [(8.0, 0), (8.0, 1)]
        assert [w.pid for _, w in sorted(pair.workers.items())] == pids
    limit = 1.4 + 0.4 + (1.0 + 1.5 if leaves == "finishes" else 0.0)
    assert max(took) < limit
    row(f"{ROUNDS} of {ROUNDS} named, freed with names kept and the next group works; at most {max(took):.1f} s")


def test_the_first_collective_of_a_communicator_is_named_or_its_rank_is_replaced(pair: WorkerPool, row: Row) -> None:
    error, seconds = ended(pair, f"{INIT}if rank == 0:\n    dist.all_reduce(t); t.sum().item()", timeout=8)
    fate = "replaced" if "replaced" in error.report else "freed"
    pair.run_cell("kept = int(__import__('os').environ['RANK'])", screen=NullScreen())
    assert list(pair.run_cell(AGAIN, want_value=True, screen=NullScreen())) == [(8.0, 0), (8.0, 1)]
    row(f"{type(error).__name__} after {seconds:.1f} s, rank 0 {fate}: {str(error).splitlines()[0]}")


SLOW = {
    "send and recv": "if rank == 0:\n    torch.cuda._sleep(int(1e10)); dist.send(t, 1)\nelse: dist.recv(t, 0)",
    "batch_isend_irecv": "torch.cuda._sleep(int(1e10) if rank == 0 else 1)\nother = torch.zeros(4, device='cuda')\n"
    "both = [dist.P2POp(dist.isend, t, 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)]\n"
    "for w in dist.batch_isend_irecv(both): w.wait()",
    "all_reduce": "if rank == 0: torch.cuda._sleep(int(1e10))\ndist.all_reduce(t)",
}


@pytest.mark.parametrize("call", SLOW)
def test_what_is_slow_is_no_deadlock(pair: WorkerPool, call: str, row: Row) -> None:
    began = time.monotonic()
    pair.run_cell(f"{WARM}{SLOW[call]}\ntorch.cuda.synchronize()\ndist.destroy_process_group()", hang_after=1.0,
                  screen=NullScreen())  # fmt: skip
    row(f"{time.monotonic() - began:.1f} s at --hang-after 1, no deadlock")


def test_stop_frees_a_rank_in_a_collective_and_names_stay(pair: WorkerPool, row: Row) -> None:
    code = f"{WARM}if rank == 1: time.sleep(600)\ndist.all_reduce(t); t.sum().item()"
    error, seconds = ended(pair, code, timeout=3, hang_after=None)
    assert isinstance(error, nbddp.RunTimedOut)
    assert "replaced" not in error.report
    assert list(pair.run_cell(AGAIN, want_value=True, screen=NullScreen())) == [(8.0, 0), (8.0, 1)]
    row(f"freed {seconds - 3:.1f} s after the time limit")


TRAIN = f"""{INIT}
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
net = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(12)]).cuda()
model, x = DDP(net, bucket_cap_mb=8), torch.randn(1024, 1024, device="cuda")
for _ in range({{steps}}): model(x).square().mean().backward()
torch.cuda.synchronize()
dist.destroy_process_group()
"""


def kernels_of(trace: RankTrace) -> list[tuple[float, float]]:
    """Begin and end of NCCL's all-reduce kernels, nanoseconds of the recorder's clock."""
    rows = [e for e in trace.events if e.get("cat") == "kernel" and "nccl" in e["name"] and "AllReduce" in e["name"]]
    at = [trace.base + e["ts"] * 1000 - trace.shift for e in rows]
    return sorted((t, t + e["dur"] * 1000) for t, e in zip(at, rows, strict=True))


def test_a_buckets_end_is_that_of_nccls_kernel(pair: WorkerPool, cards: list[dict[str, Any]], row: Row) -> None:
    """On a card that two ranks share, a rank's event may wait for its turn on the card: 0.154 ms on an H100."""
    most_apart = 0.1 if len(cards) > 1 else 0.25
    pair.run_cell(TRAIN.format(steps=100), trace=True, screen=NullScreen())
    traces: dict[int, RankTrace] = {r: pickling.unpack(b[0]) for r, b in pair.answers("trace").items()}
    recording, apart = pair.timings(), []
    for rank, steps in recording.steps.items():
        ends = [end for _, end in kernels_of(traces[rank])]
        for bucket in (b for s in steps[2:] for b in s.buckets):
            apart.append(min(abs(bucket.done - end) for end in ends) / 1e6)
    apart.sort()
    assert apart[int(0.95 * len(apart))] < most_apart, "95 % within so many milliseconds"
    moved = [t for n in recording.numbers()[2:] for t in transfers(recording.step(n))]
    assert all(t.moving >= 0 for t in moved)
    most = apart[int(0.95 * len(apart))] * 1000
    row(f"{len(apart)} buckets: 95 % within {most:.0f} µs, all within {apart[-1]:.2f} ms")


GLOO = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
if not dist.is_initialized(): dist.init_process_group()
torch.cuda.set_device(0)
torch.manual_seed(0)
model = DDP(torch.nn.Linear(64, 64).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).cuda()
    model(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
weight = model.module.weight.detach()
dist.get_backend_config()
"""


def test_ranks_that_share_a_gpu_over_gloo_train_alike(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "0")
    with WorkerPool(nproc=2, oversubscribe=True) as pool:
        configs = list(pool.run_cell(GLOO, want_value=True, screen=NullScreen()))
        assert all("nccl" not in config for config in configs)
        assert pool.compare("weight").equal
        assert {m.kind for m in pool.memory()} == {"cuda"}
        steps = pool.timings().steps
        assert all(s.buckets and s.backward[1] <= s.backward[2] for some in steps.values() for s in some)
        measured = pool.bench("all_reduce", [1 << 10, 1 << 20])
        assert [m.wrong for m in measured] == [0, 0]
    row(f"{configs[0]}; equal weights; {len(steps[0])} steps recorded; bench 0 wrong")


def test_an_older_nccl_is_refused_by_name(
    row: Row, cards: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "0")
    with WorkerPool(nproc=len(cards) + 1, oversubscribe=True) as pool:
        error, _ = ended(pool, "import torch.distributed as dist\ndist.init_process_group('nccl')")
    assert "ranks share a GPU here (--oversubscribe)" in str(error)
    row(str(error).splitlines()[0])


def test_nccl_bench_is_right(pair: WorkerPool, cards: list[dict[str, Any]], row: Row) -> None:
    if len(cards) < 2:
        pytest.skip("one GPU: ranks that share it measure on CPU")
    found = pair.bench(["all_reduce", "all_gather", "reduce_scatter", "broadcast"], [1 << 10, 16 << 20])
    assert [m.wrong for m in found] == [0] * len(found)
    row("; ".join(f"{m.collective} {m.bytes >> 10} KiB {min(m.seconds) * 1e6:.0f} µs" for m in found))


def test_each_rank_has_the_gpu_that_the_topology_draws(cards: list[dict[str, Any]], row: Row) -> None:
    if len(cards) < 2:
        pytest.skip("one GPU")
    ask = "import torch; str(torch.cuda.get_device_properties({}).uuid)"
    drawn = [card["uuid"].removeprefix("GPU-") for card in cards]
    with WorkerPool(visible="own") as pool:
        assert list(pool.run_cell(ask.format(0), want_value=True, screen=NullScreen())) == drawn
    with WorkerPool() as pool:
        local = 'int(__import__("os").environ["LOCAL_RANK"])'
        assert list(pool.run_cell(ask.format(local), want_value=True, screen=NullScreen())) == drawn
    row(f"{len(cards)} GPUs, by --visible own and by LOCAL_RANK")
