"""`%ddp draw_bench`: collectives timed as nccl-tests does, on real ranks, every result checked."""

from __future__ import annotations

import textwrap

import pytest

import nbddp
from nbddp.analysis.wait_time import BUS_FACTOR
from nbddp.capabilities.bench.command import sizes_between
from nbddp.capabilities.bench.figure import draw_bench
from nbddp.notebook.commands import parse_command
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests import warm
from tests.kernels import Kernel

NPROC = 3  # of the module's pool


def test_every_collective_is_measured_and_right(pool: WorkerPool) -> None:
    said: list[str] = []
    found = pool.bench(list(BUS_FACTOR), [1, 5000, 1 << 16], repeat=2, progress=said.append)
    assert [m.collective for m in found] == [c for c in BUS_FACTOR for _ in range(3)]
    assert len(said) == len(found)
    for m in found:
        assert (m.wrong, m.ranks, len(m.seconds)) == (0, 3, 2)
        assert all(t > 0 for t in m.seconds)
        assert m.bytes % (4 if m.collective == "send_recv" else 12) == 0
        assert m.spread[0] <= m.median <= m.spread[1]
    assert sorted({m.bytes for m in found if m.collective == "all_reduce"}) == [12, 4992, 65532]
    assert pool.measured[-len(found) :] == found


def test_measured_again_takes_the_place_of_what_was(pool: WorkerPool) -> None:
    before = [m for m in pool.measured if m.collective != "reduce"]
    pool.bench("reduce", [5000], repeat=1)
    pool.bench("reduce", [5000], repeat=1)
    assert len([m for m in pool.measured if (m.collective, m.bytes) == ("reduce", 4992)]) == 1
    assert [m for m in pool.measured if m.collective != "reduce"] == before


def test_wrong_results_are_counted(pool: WorkerPool) -> None:
    spoil = """
        import torch.distributed as dist
        import os
        right = dist.ProcessGroupGloo.broadcast
        def broadcast(group, tensors, options):
            work = right(group, tensors, options)
            work.wait()
            if os.environ["RANK"] == "2":
                tensors[0][1:4] += 1
            return work
        dist.ProcessGroupGloo.broadcast = broadcast
    """
    pool.run_cell(textwrap.dedent(spoil), screen=NullScreen())
    try:
        found = pool.bench(["broadcast", "reduce"], [1200], repeat=1)
    finally:
        pool.run_cell("dist.ProcessGroupGloo.broadcast = right", screen=NullScreen())
    assert [m.wrong for m in found] == [6, 0], "three elements, before and after it was timed"
    assert "WRONG results: broadcast of 1.2 KiB (6 elements)" in repr(draw_bench(found))


@pytest.mark.more
def test_the_programs_own_group_counts_on_as_if_nothing_had_been_measured(pool: WorkerPool) -> None:
    """Lesson 09 matches collectives by their numbers, and a deadlock is proved by them. A measurement calls more
    collectives than torch's recorder holds."""
    begin = "import torch, torch.distributed as dist\ndist.init_process_group()\nmine = dist.group.WORLD\n"
    pool.run_cell(begin + "for _ in range(5): dist.barrier()\ntwo = dist.new_group([0, 1])", screen=NullScreen())
    before = pool.collectives()
    pool.bench(["all_reduce", "send_recv"], [1000, 2000], repeat=50)
    pool.bench("all_gather", [1000], repeat=50)
    assert [(k.op, k.count) for k in pool.collectives().kinds] == [(k.op, k.count) for k in before.kinds]
    assert pool.collectives().notes == before.notes, "all that the program called is known"
    with pytest.raises(nbddp.RunFailed) as failed:
        pool.run_cell("if dist.get_rank() == 0: dist.barrier()", screen=NullScreen(), hang_after=0.3)
    assert "waits in barrier #6 (line 1)" in str(failed.value)
    assert "deadlock: " in str(failed.value)


def test_a_measurement_leaves_the_programs_group_and_no_other(pool: WorkerPool) -> None:
    count = "len([t for t in __import__('os').listdir('/proc/self/task')])"
    pool.bench("all_reduce", [1000], repeat=1)
    assert list(pool.run(lambda: __import__("torch").distributed.is_initialized())) == [False] * 3
    code = "import torch, torch.distributed as dist\ndist.init_process_group()\nmine = dist.group.WORLD\n"
    threads = pool.run_cell(f"{code}dist.barrier()\n{count}", want_value=True, screen=NullScreen())
    pool.bench("all_reduce", [1000], repeat=1)
    code = f"t = torch.ones(1); dist.all_reduce(t); dist.group.WORLD is mine, t.item(), {count}"
    for (same, total, now), before in zip(
        pool.run_cell(code, want_value=True, screen=NullScreen()), threads, strict=True
    ):
        assert (same, total) == (True, 3)
        assert now <= before, "threads"
    pool.run_cell("dist.destroy_process_group()", screen=NullScreen())


def test_what_cannot_be_measured_is_said(pool: WorkerPool) -> None:
    with pytest.raises(nbddp.BadInput, match="there is no collective 'allreduce'; use all_reduce, "):
        pool.bench("allreduce")
    with pytest.raises(nbddp.BadInput, match=r"there are no sizes from 10 to 5 bytes; give the smaller one first"):
        sizes_between(10, 5)
    with pytest.raises(nbddp.BadInput, match="--factor 1 does not increase the size"):
        sizes_between(1, 5, 1)
    with pytest.raises(nbddp.BadInput, match=r"there is no collective 'allreduce'; did you mean all_reduce\?"):
        parse_command("bench allreduce")
    with pytest.raises(nbddp.BadInput, match="'1 parsec' is not a size that can be measured; type one such as 64MiB"):
        parse_command(["bench", "--max", "1 parsec"])
    with warm.pool(1) as one, pytest.raises(nbddp.BadInput, match="a collective needs at least two ranks"):
        one.bench()


def test_bench_in_a_notebook(four: Kernel) -> None:
    shown = four.run("found = %ddp bench all_reduce broadcast --max 16KiB --repeat 2\nfound")
    assert shown.ok, shown.error
    (bundle,) = shown.displays
    assert bundle["text/plain"].startswith("all_reduce, broadcast on 4 ranks\nall_reduce: ")
    assert "image/png" in bundle
    live = [c["data"]["text/plain"] for _, kind, c in shown.messages if kind == "update_display_data"]
    assert any("░ 1/6  all_reduce of 4.0 KiB on 4 ranks" in text for text in live), live
    assert four.run("len(found.table), found.table['wrong']").displays[0]["text/plain"] == "(6, [0, 0, 0, 0, 0, 0])"
