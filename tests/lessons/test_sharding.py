"""Lesson 15: the memory of ZeRO against closed forms, FSDP's schedule, and its exercises' checks on real ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.lessons.l15_sharding.figure import draw_gathers, draw_zero
from nbddp.lessons.l15_sharding.schedule import schedule_gathers
from nbddp.lessons.l15_sharding.simulation import PRECISIONS, share, stages

# -- ZeRO ------------------------------------------------------------------------------------

sharing = {
    "parameters": st.integers(1, 10**12), "ranks": st.integers(1, 4096),
    "precision": st.sampled_from(sorted(PRECISIONS)),
}  # fmt: skip


@given(**sharing)
def test_stages_shard_one_part_after_another(parameters: int, ranks: int, precision: str) -> None:
    none, one, two, three = (share(s, parameters, ranks, precision) for s in (0, 1, 2, 3))
    assert none.total == 16 * parameters
    assert three.total == pytest.approx(16 * parameters / ranks)
    assert one.parts == pytest.approx((none.parameters, none.gradients, none.optimizer / ranks))
    assert two.parts == pytest.approx((none.parameters, none.gradients / ranks, none.optimizer / ranks))


def test_the_bars_are_as_long_as_the_bytes() -> None:
    made = stages(7.5, 64)
    shown = draw_zero(made)
    (axes,) = shown.figure.axes
    widths = [p.get_width() for p in axes.patches[::2]]  # each part is a fill and an edge
    assert widths == pytest.approx([b / 1e9 for of in made.shares for b in of.parts])
    texts = [t.get_text() for t in axes.texts]
    assert {"120 GB", "31.4 GB", "16.6 GB", "1.88 GB", "a GPU of 80 GB"} <= set(texts)
    assert shown.words == made.describe()


def test_the_timeline_has_a_bar_for_each_span_on_one_scale() -> None:
    made = schedule_gathers(ahead=1)
    shown = draw_gathers(made)
    (axes,) = shown.figure.axes
    bars = [p.get_width() for p in axes.patches if p.get_height() == pytest.approx(0.24)][::2]
    spans = [s for row in made.spans for s in row]
    assert len(bars) == len(spans)
    assert bars == pytest.approx([(s.end - s.start) * max(bars) / 2 for s in spans])
    assert shown.words == made.describe()
