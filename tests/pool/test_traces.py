"""`%%ddp --trace`: torch.profiler on every rank, merged into one file on one clock, collectives joined across ranks."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

import nbddp
from nbddp.analysis.answers import ClockOffset
from nbddp.capabilities.trace.merge import Collective, Merged, RankTrace, merge
from nbddp.capabilities.trace.written import describe, written
from nbddp.launch import options
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests import warm
from tests.kernels import Kernel
from tests.pool.faults import needs_recorder

DDP = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
other = dist.new_group([0, 1])
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Sequential(*[torch.nn.Linear(200, 200) for _ in range(4)]), bucket_cap_mb=0.2)
time.sleep(0.2 * rank)
for step in range(4):
    model(torch.randn(8, 200)).sum().backward()
    dist.all_reduce(torch.ones(3), group=other)
dist.all_reduce(torch.ones(8), async_op=True).wait()
dist.barrier()
"""
SHARDED = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
make = lambda: torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
net = fully_shard(make(), mesh=mesh)
net(torch.randn(4, 64)).sum().backward()
split = parallelize_module(make(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
split(torch.ones(4, 64)).sum().backward()
dist.destroy_process_group()
"""


def spans(merged: Merged, start: str, rank: int) -> list[dict[str, Any]]:
    found = [e for e in merged.data["traceEvents"] if e["ph"] == "X" and e["pid"] == rank * 1000]
    return sorted((e for e in found if e["name"].startswith(start)), key=lambda e: e["ts"])


def check_format(merged: Merged, ranks: int) -> None:
    events = merged.data["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {r * 1000: f"rank {r} (node 0)" for r in range(ranks)}
    assert min(e["ts"] for e in events if "ts" in e) == 0
    begins = {(e["pid"], e["tid"], e["ts"]) for e in events if e["ph"] == "X"}
    arrows = [e for e in events if e["ph"] in ("s", "t", "f") and e["cat"] == "collective"]
    assert all((e["pid"], e["tid"], e["ts"]) in begins for e in arrows), "an arrow is bound to a span"
    for n in {e["id"] for e in arrows}:
        own = [e for e in arrows if e["id"] == n]
        assert [e["ph"] for e in own] == ["s", *["t"] * (ranks - 2), "f"]
        assert len({e["pid"] for e in own}) == ranks
        assert own == sorted(own, key=lambda e: e["ts"]), "in the order in which the ranks came"
    assert len({e["id"] for e in arrows}) == merged.joined


@needs_recorder
@pytest.mark.parametrize(("code", "least"), [(DDP, 15), (SHARDED, 6)], ids=["DDP and manual", "FSDP2 and TP"])
def test_every_collective_is_joined_with_its_like(pool: WorkerPool, code: str, least: int) -> None:
    pool.run_cell(code, trace=True, screen=NullScreen())
    assert pool.last_run is not None
    assert not any(o.log.exists() for o in pool.last_run.outputs.values()), "the profiler says nothing in the cell"
    merged = pool.trace()
    assert (merged.ranks, merged.missing, merged.residual) == ([0, 1], [], 0)
    assert merged.joined >= least
    check_format(merged, 2)
    calls = [spans(merged, "c10d::", r) for r in (0, 1)]
    assert all("sequence" in e["args"] for own in calls for e in own), "all calls are known"
    assert len(calls[0]) == len(calls[1]) == merged.joined
    for one, two in zip(*calls, strict=True):
        assert one["name"] == two["name"]
        assert [one["args"][k] for k in ("group", "sequence")] == [two["args"][k] for k in ("group", "sequence")]
    for rank in (0, 1):
        moved = spans(merged, "gloo:", rank)
        assert len(moved) == len(calls[rank])
        where = {(e["args"]["group"], e["args"]["sequence"]): e for e in calls[rank]}
        assert len(where) == len(moved)
        for e in moved:
            assert e["ts"] >= where[e["args"]["group"], e["args"]["sequence"]]["ts"], "it moves after it is called"


def test_ranks_are_on_one_clock(pool: WorkerPool) -> None:
    """Rank 1 comes 0.2 s late to the first all-reduce of backward, and no transfer ends before it has come."""
    pool.run_cell(DDP, trace=True, screen=NullScreen())
    merged = pool.trace()
    first, late = (next(e for e in spans(merged, "gloo:all_reduce", r)) for r in (0, 1))
    assert late["ts"] - first["ts"] > 150_000
    assert first["ts"] + first["dur"] > late["ts"]
    calls, waits = spans(merged, "c10d::allreduce_", 0), spans(merged, "wait for all_reduce", 0)
    assert len(waits) == 5, "four at once, one on its Work; DDP waits in C++"
    assert all(any(c["ts"] < w["ts"] and c["tid"] == w["tid"] for c in calls) for w in waits)


def test_cell_without_trace_leaves_none_and_a_failing_one_leaves_its_own(pool: WorkerPool) -> None:
    pool.restart()
    pool.run_cell("x = 1", screen=NullScreen())
    with pytest.raises(nbddp.BadInput, match=r"no cell has been traced on these workers; %%ddp --trace traces one"):
        pool.trace()
    with pytest.raises(nbddp.WorkerFailed):
        pool.run_cell("import torch\ntorch.ones(3) + 1\nraise ValueError('no')", trace=True, screen=NullScreen())
    merged = pool.trace()
    assert spans(merged, "aten::add", 0)
    assert spans(merged, "aten::add", 1)
    pool.restart([1])
    after = pool.trace()
    assert (after.ranks, after.missing) == ([0], [1])
    assert "no trace from rank 1" in describe(after, Path("x.json"), 10)


PROFILES = """import os, torch
from torch import profiler
from torch.autograd import profiler as autograds
def work(): torch.ones(9, 9) @ torch.ones(9, 9)
def context():
    with profiler.profile() as theirs: work()
    return len(theirs.events()) > 5
def schedule():
    theirs = profiler.profile(schedule=profiler.schedule(wait=1, warmup=1, active=1, repeat=1)); theirs.start()
    for _ in range(4): work(); theirs.step()
    theirs.stop()
    return len(theirs.events()) > 5
def autograd():
    with autograds.profile() as theirs: work()
    return len(theirs.function_events) > 5
def stays():
    global left
    left = profiler.profile(); left.start(); work()
    return True
def earlier():
    work(); left.stop()
    return len(left.events()) > 5"""


needs_profiles_in_threads = pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 7),
    reason="torch 2.6 itself refuses a profile in a thread while the main thread has one",
)


def test_a_programs_own_profile_is_kept_and_the_trace_steps_back(pool: WorkerPool) -> None:
    pool.run_cell(PROFILES, screen=NullScreen())
    for how in ("context", "schedule", "autograd", "stays", "earlier"):
        pool.run_cell(f"kept = {how}(); work()", trace=True, screen=NullScreen())
        assert list(pool.pull(["kept"])["kept"]) == [True, True], how
        why = "has had torch.profiler on since an earlier cell" if how == "earlier" else "has started torch.profiler"
        with pytest.raises(nbddp.BadInput, match=f"no rank has a trace; rank 0: the program {why}"):
            pool.trace()
    pool.run_cell("kept = os.environ['RANK'] == '0' or context(); work()", trace=True, screen=NullScreen())
    merged = pool.trace()
    assert (merged.ranks, merged.missing) == ([0], [1])
    assert merged.why[1].startswith("the program has started torch.profiler itself")
    pool.run_cell("work()", trace=True, screen=NullScreen())
    assert spans(pool.trace(), "aten::mm", 1), "the next cell is traced"


@needs_profiles_in_threads
def test_a_profile_in_a_thread_ends_no_rank(pool: WorkerPool) -> None:
    code = """import threading, torch
from torch import profiler
def other():
    global events
    with profiler.profile() as theirs: torch.ones(9, 9) @ torch.ones(9, 9)
    events = len(theirs.events())
thread = threading.Thread(target=other); thread.start(); thread.join()"""
    pool.run_cell(code, trace=True, screen=NullScreen())
    assert min(pool.pull(["events"])["events"]) > 5
    pool.run_cell("torch.ones(3) + 1", trace=True, screen=NullScreen())
    with pytest.raises(nbddp.BadInput, match=r"in a thread under an earlier --trace; %ddp restart"):
        pool.trace()
    pool.restart()


@pytest.mark.parametrize("in_thread", [False, pytest.param(True, marks=needs_profiles_in_threads)])
def test_a_script_with_a_profiler_of_its_own_succeeds_and_says_why_there_is_no_trace(
    tmp_path: Path, in_thread: bool
) -> None:
    runs = "thread = threading.Thread(target=main); thread.start(); thread.join()" if in_thread else "main()"
    (tmp_path / "profiles.py").write_text(f"""import threading, torch
from torch import profiler
def main():
    with profiler.profile() as theirs: torch.ones(9, 9) @ torch.ones(9, 9)
    print(len(theirs.events()) > 5)
{runs}
""")
    warm.ready(folder=str(tmp_path))
    command = [sys.executable, "-m", "nbddp", "run", "-n", "2", "--trace", "x.json", "profiles.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (ran.returncode, sorted(ran.stdout.splitlines())) == (0, ["rank 0 │ True", "rank 1 │ True"]), ran.stderr
    assert "no rank has a trace; rank 0: the program has started torch.profiler itself" in ran.stderr
    assert not (tmp_path / "x.json").exists()


def test_a_notebooks_cell_with_a_profiler_of_its_own_says_why_there_is_no_trace(four: Kernel) -> None:
    code = "from torch import profiler\nwith profiler.profile(): 1\nprint('done')"
    shown = four.run(f"%%ddp --trace none.json\n{code}")
    assert shown.ok, shown.error
    said, why = shown.text().splitlines()
    assert said == "ranks 0–3 │ done"
    assert why.startswith("no rank has a trace; rank 0: the program has started torch.profiler itself; ")
    assert four.run("%%ddp\nprint('next')").text() == "ranks 0–3 │ next\n"


@needs_recorder
def test_trace_in_a_notebook(four: Kernel) -> None:
    shown = four.run("%%ddp --trace\nimport torch, torch.distributed as dist\ndist.init_process_group()\n"
                     "dist.all_reduce(torch.ones(4))\ndist.destroy_process_group()")  # fmt: skip
    assert shown.ok, shown.error
    bundle, answer = shown.displays
    assert bundle["text/plain"].startswith("trace of 4 ranks: ")
    assert ", 1 collective joined across ranks by arrows\nddp-trace.json.gz, " in bundle["text/plain"]
    assert '<a href="ddp-trace.json.gz" download>' in bundle["text/html"]
    assert "image/png" in answer
    assert answer["text/html"].count("<table>") == 3
    assert re.match(r"4 ranks, \S+ \S+: the ranks compute for ", answer["text/plain"])
    assert re.search(r"\nall_reduce +ranks 0–3 +1 +rank \d: 1 of 1 ", answer["text/plain"])
    found = four.run("import gzip, json\njson.load(gzip.open('ddp-trace.json.gz'))['displayTimeUnit']")
    assert found.displays[0]["text/plain"] == "'ms'"
    failed = four.run("%%ddp --trace why.json\nimport torch\ntorch.ones(3)\n1 / 0")
    assert not failed.ok
    assert "why.json" in failed.displays[-2]["text/plain"]
    assert "of the time" in failed.displays[-1]["text/plain"]
    refused = four.run("%%ddp --trace why.txt\npass")
    assert refused.evalue == (
        "%%ddp --trace: why.txt: Perfetto reads only .json and .json.gz; use such a name, as in ddp-trace.json.gz"
    )
    assert options.parse_cell("--trace --fresh").trace == "ddp-trace.json.gz"


def span(name: str, ts: float, dur: float = 10, tid: int = 1, pid: int = 77) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": tid, "cat": "cpu_op"}


def trace_of(events: list[dict[str, Any]], collectives: list[Collective], **more: Any) -> RankTrace:
    return RankTrace(events, **{"base": 0, "shift": 0, "pid": 77, "collectives": collectives, **more})


def reduce(group: str, sequence: int, at_us: float) -> Collective:
    return Collective("gloo:all_reduce", group, (0, 1), sequence, int(at_us * 1000))


def test_two_groups_transfers_are_told_apart_by_their_threads() -> None:
    """Group a's second all-reduce waits behind its first, so group b's overtakes it."""
    calls = [span("c10d::allreduce_", t) for t in (0, 100, 200)]
    moves = [
        span("gloo:all_reduce", 20, 500, tid=5), span("gloo:all_reduce", 220, 30, tid=6),
        span("gloo:all_reduce", 530, 30, tid=5),
    ]  # fmt: skip
    known = [reduce("a", 1, 5), reduce("a", 2, 105), reduce("b", 1, 205)]
    first = trace_of([span("gloo:all_reduce", -90, 5, tid=6), span("c10d::allreduce_", -100), *calls, *moves],
                     [reduce("b", 0, -95), *known])  # fmt: skip
    merged = merge({0: first}, {})
    found = {e["ts"]: (e["args"]["group"], e["args"]["sequence"]) for e in spans(merged, "gloo:", 0)}
    assert list(found.values()) == [("b", 0), ("a", 1), ("b", 1), ("a", 2)]
    assert merged.joined == 0, "alone, nothing is joined"


def test_clocks_and_shifts_bring_ranks_together() -> None:
    one = trace_of([span("c10d::allreduce_", 1000)], [reduce("a", 1, 1002)])
    called = [reduce("a", 1, 1_000_052)]
    two = trace_of([span("c10d::allreduce_", 50, pid=3)], called, base=10**9, shift=10**9 - 500_000, pid=3, node=1)
    merged = merge({0: one, 1: two}, {0: ClockOffset(), 1: ClockOffset(600_000, 7)})
    (a,), (b,) = spans(merged, "c10d", 0), spans(merged, "c10d", 1)
    assert (a["ts"], b["ts"]) == (0, 150)
    assert (merged.joined, merged.residual) == (1, 7)


def test_gpus_of_a_rank_are_processes_of_their_own() -> None:
    merged = merge({1: trace_of([span("a", 0), span("kernel", 5, pid=0), span("kernel", 5, pid=1)], [])}, {})
    names = [e["args"]["name"] for e in merged.data["traceEvents"] if e["name"] == "process_name"]
    assert names == ["rank 1 (node 0)", "rank 1 (node 0) GPU 0", "rank 1 (node 0) GPU 1"]


def test_file_is_packed_if_its_name_says_so(tmp_path: Path) -> None:
    merged = merge({0: trace_of([span("a", 0)], [])}, {})
    packed, plain = written(merged, tmp_path / "t.json.gz"), written(merged, tmp_path / "t.json")
    assert json.loads(gzip.decompress(packed.path.read_bytes())) == json.loads(plain.path.read_text()) == merged.data
    assert repr(plain).startswith("trace of 1 rank: 1 span, 0 collectives joined across ranks by arrows\n")
