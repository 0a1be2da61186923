"""A step on more nodes: closed forms, a simulated ring, fits of what is known, and the way of `%ddp forecast` from
training on real ranks to the figure."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nbddp
from nbddp.capabilities.bench.result import Measured
from nbddp.capabilities.forecast.cost import Link, seconds, together
from nbddp.capabilities.forecast.figure import draw_forecast
from nbddp.capabilities.forecast.scale import forecast, profile
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests import warm
from tests.benchmarks.forecast import table, validate
from tests.kernels import Kernel
from tests.ring import simulate
from tests.unit.test_forecast import LINKS, foretell, made, recording


@given(st.lists(LINKS, min_size=1, max_size=9), st.data())
def test_every_rank_ends_with_every_ranks_numbers_in_every_chunk(links: list[Link], data: Any) -> None:
    n = len(links)
    starts = data.draw(st.lists(st.floats(0, 1), min_size=n, max_size=n))
    ring = simulate(1 << 20, links, starts)
    assert all(parts == frozenset(range(n)) for chunks in ring.held for parts in chunks)
    assert len(ring.messages) == 2 * (n - 1) * n
    for rank in range(n):
        sent = sorted((m.start, m.end) for m in ring.messages if m.rank == rank)
        assert all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(sent)), "a link carries one message at a time"


def test_world_sizes_that_no_link_joins_are_not_mixed() -> None:
    quick, slow = made("ring", 2, Link(5e-5, 2e9), 0.05), made("ring", 4, Link(8e-4, 7e8), 0.05)
    agreeing = made("ring", 4, Link(5e-5, 2e9), 0.05)
    assert together([*quick, *slow], 4) == slow
    assert together([*quick, *slow], 2) == quick
    assert together([*quick, *agreeing], 4) == [*quick, *agreeing]
    with pytest.raises(ValueError, match="at least two sizes"):
        together(quick, 8)
    found = forecast(recording(4), [*quick, *slow], nodes=2)
    assert found.chosen.ranks == (4,)
    assert found.extrapolated_from == 4
    assert "on 4 ranks; those on 2 ranks do not fit them and are ignored:" in draw_forecast(found).words


def test_profile_is_the_slowest_ranks_and_leaves_the_wait_out() -> None:
    plain = profile(recording(), 1)
    assert (plain.before, plain.backward, plain.after) == pytest.approx((0.035, 0.07, 0.006))
    assert plain.measured == pytest.approx(0.113)
    assert [round(ready, 4) for ready, _ in plain.buckets] == [round(0.01 * (i + 1), 4) for i in range(7)]
    slow = profile(recording(late=35), 1)
    assert (slow.before, slow.backward) == pytest.approx((0.07, 0.14))
    assert slow.buckets[-1][0] == pytest.approx(0.14)
    with pytest.raises(KeyError):
        profile(recording(), 7)


def test_typed_links_are_taken() -> None:
    base = foretell()
    assert base.inter == Link(10e-6, 25e9)
    assert base.intra.bandwidth == pytest.approx(220e9)
    assert foretell(intra_node=100e9).intra.bandwidth == 100e9
    alike = foretell(inter_node=None, latency=None)
    assert alike.inter == alike.intra
    assert any("--inter-node 25GB/s --latency 10us sets other values" in line for line in alike.assumed)
    assert not any("sets other values" in line for line in base.assumed)
    assert foretell(ranks_per_node=4, nodes=3).weak[-1].ranks == 12
    assert foretell(algorithm="tree").weak[-1].step < base.weak[-1].step, "a thousand latencies against ten"


def test_knee_is_the_last_good_number_of_nodes() -> None:
    for strong in (False, True):
        found = foretell(strong=strong, latency=30e-6)
        nodes = found.whole_nodes(found.told)
        bad = [p.nodes for p in nodes if p.exposed > p.step / 2]
        kind = "strong" if strong else "weak"
        expected = f"beyond {bad[0] // 2} nodes more than half of the step is exposed communication ({kind} scaling)"
        assert expected in draw_forecast(found).words
    never = foretell(nodes=2)
    assert "up to 2 nodes no more than half of the step is exposed communication" in draw_forecast(never).words
    always = draw_forecast(foretell(intra_node=1e8)).words
    assert "already on 1 node more than half of the step is exposed communication" in always


def test_words_say_the_fit_the_table_and_what_is_extrapolated() -> None:
    words = draw_forecast(foretell()).words
    assert words == draw_forecast(foretell()).words
    assert words.startswith("forecast from step 1 of Net\nrecorded on 8 ranks: 113 ms; the model predicts 111 ms, 2 %")
    assert "fitted to 51 measured all-reduces on 2, 4 and 8 ranks:" in words
    assert "ring: latency 6.00 µs, bandwidth 220 GB/s (error <0.1 %" in words or "(error 0 %, at most 0 %)" in words
    assert "forecast with ring, which fits better" in words
    assert "everything beyond 8 ranks is extrapolated" in words
    lines = words.splitlines()
    rows = [line.split() for line in lines[next(i for i, x in enumerate(lines) if x.startswith("nodes")) + 1 :]]
    assert [int(r[0]) for r in rows] == [1 << k for k in range(11)]
    assert [r[-1] for r in rows] == ["fitted"] + ["extrapolated"] * 10
    undecided = forecast(recording(), made("ring", 8, Link(6e-6, 220e9)))
    assert "fit several algorithms" in draw_forecast(undecided).words
    assert "forecast with tree, as requested" in draw_forecast(foretell(algorithm="tree")).words


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("per_node", "nodes", "strong"), [(1, 1, False), (1, 1024, True), (6, 5, True), (8, 1024, False)]
)
def test_figure_of_any_shape_is_drawn(per_node: int, nodes: int, strong: bool) -> None:
    shown = draw_forecast(foretell(ranks_per_node=per_node, nodes=nodes, strong=strong))
    assert shown.png().startswith(b"\x89PNG")
    left, right = shown.figure.axes
    texts = [t.get_text() for t in left.texts]
    assert ("extrapolated →" in texts) == (per_node * nodes > 8)
    assert any(t.get_text().startswith("measured ") for t in left.get_legend().get_texts())
    styles = {line.get_linestyle() for line in right.lines}
    assert ("--" in styles) == (per_node * nodes > 8), "dashed beyond what was measured, and only there"
    assert left.get_xscale() == right.get_xscale() == "log"


def test_names_at_the_ends_of_lines_do_not_cover_each_other() -> None:
    right = draw_forecast(foretell(nodes=1, ranks_per_node=8)).figure.axes[1]
    heights = sorted(t.xy[1] for t in right.texts)
    assert heights[1] - heights[0] >= 8


# -- on real ranks ------------------------------------------------------------------------------

TRAIN = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
model = DDP(torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(6)]), bucket_cap_mb=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(6):
    optimizer.zero_grad()
    model(torch.randn(8, 128)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_forecast_of_a_pool_measures_once_and_needs_a_step(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def bench(
        self: WorkerPool, collective: str = "all_reduce", sizes: Sequence[int] | None = None, **more: Any
    ) -> list[Measured]:
        assert sizes
        asked.append((collective, max(sizes)))
        return real(self, collective, sizes, **more, repeat=2)

    real = WorkerPool.bench
    monkeypatch.setattr(WorkerPool, "bench", bench)
    with pytest.raises(nbddp.BadInput, match="train a DistributedDataParallel model in a %%ddp cell first"):
        pool.forecast()
    assert asked == [], "nothing is measured for a forecast that cannot be"
    pool.run_cell(TRAIN, screen=NullScreen())
    notes: list[str] = []
    found = pool.forecast(inter_node="25GB/s", progress=notes.append)
    assert notes[0] == "measuring all-reduces on 2 ranks, once"
    assert len(notes) == 1 + 11, "and a line for each size, from 1 KiB to 1 MiB"
    again = pool.forecast(inter_node="25GB/s", nodes=4)
    assert asked == [("all_reduce", 1 << 20)]
    assert (found.profile.ranks, found.ranks_per_node, found.extrapolated_from) == (2, 2, 2)
    assert again.weak[-1].ranks == 8
    assert [p.ranks for p in found.weak] == [1, *(2 << k for k in range(11))]
    assert all(math.isfinite(p.step) and p.step > 0 and 0 < p.efficiency <= 1 for p in (*found.weak, *found.strong))
    assert found.here.compute == pytest.approx(found.profile.compute)
    assert 0 < found.chosen.link.latency < 1
    assert len(found.profile.buckets) >= 3
    pool.run_cell(TRAIN.replace("128, 128", "1024, 1024").replace("8, 128", "8, 1024"), screen=NullScreen())
    pool.forecast()
    assert asked[1:] == [("all_reduce", 1 << 23)], "larger buckets than were measured: measured again, up to them"
    with pytest.raises(nbddp.BadInput, match="'25' has no unit; type 25GB/s"):
        pool.forecast(inter_node="25")
    with pytest.raises(nbddp.BadInput, match="there is no algorithm 'butterfly'; use ring, tree, binomial"):
        pool.forecast(algorithm="butterfly")
    with pytest.raises(nbddp.BadInput, match="at least one node"):
        pool.forecast(nodes=0)


def test_forecast_in_a_notebook(four: Kernel) -> None:
    assert (
        "train a DistributedDataParallel model in a %%ddp cell first" in four.run("%ddp restart\n%ddp forecast").evalue
    )
    assert "'25' has no unit; type 25GB/s" in four.run("%ddp forecast --inter-node 25").evalue
    assert four.run(f"%%ddp\n{TRAIN}").ok
    given = """
        from nbddp.notebook.magics import _loaded
        from nbddp.capabilities.bench.result import Measured
        next(iter(_loaded.values())).pool.measured = [
            Measured("all_reduce", 1 << k, 4, (6e-5 + 1.5 * 2**k / 1e9,)) for k in range(10, 24)
        ]
    """
    assert four.run(textwrap.dedent(given)).ok
    shown = four.run("%ddp forecast --inter-node 25GB/s --latency 10us --nodes 64")
    assert shown.ok, shown.error
    bundle = shown.displays[-1]
    assert "image/png" in bundle
    words = bundle["text/plain"]
    assert "of Sequential\nrecorded on 4 ranks: " in words
    assert "  ring: latency 10.0 µs, bandwidth 1.00 GB/s (error " in words
    assert "between nodes: latency 10.0 µs, bandwidth 25.0 GB/s" in words
    assert "everything beyond 4 ranks is extrapolated" in words
    strong = four.run("%ddp forecast --strong --nodes 4").displays[-1]["text/plain"]
    assert "(strong scaling)" in strong


def test_validation_runs_and_says_what_it_found() -> None:
    """The benchmark of the forecast, without its verdict on times: those are for a quiet machine."""
    with warm.pool(4) as pool:
        found = validate(pool, width=256, layers=3, rounds=2, largest=18)
    assert all(math.isfinite(x) and x > 0 for x in (found.compute, found.step, found.communication, found.ratio))
    assert [m.ranks for m in (*found.two, *found.four)] == [2] * 5 + [4] * 5
    assert found.predicted.step == pytest.approx(found.compute + found.predicted.communication)
    assert found.predicted.communication > sum(
        seconds(found.chosen.algorithm, "all_reduce", 2, b, found.chosen.link) for b in found.buckets
    ), "four ranks take longer than two"
    assert "predicted from 2" in repr(table(found))
