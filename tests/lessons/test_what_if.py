"""Lesson 12: the what-if against closed forms, and the check of its exercise on real ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.capabilities.forecast.cost import COSTS, Link
from nbddp.launch.units import speed
from nbddp.lessons.l12_what_if.figure import draw_what_if
from nbddp.lessons.l12_what_if.simulation import DELAYS, GPUS, MODELS, SPEEDS, TOKENS, simulate_what_if
from nbddp.teach import predict

# -- what if ---------------------------------------------------------------------------------

settings = {
    "nodes": st.integers(1, 64), "link": st.sampled_from(SPEEDS), "latency": st.sampled_from(DELAYS),
    "model": st.sampled_from([m for m in MODELS if m != "10 B"]), "micro_batches": st.integers(1, 16),
}  # fmt: skip


@given(**settings)
def test_a_step_ends_with_its_computation_or_with_its_last_bucket(**chosen: object) -> None:
    made = simulate_what_if(**chosen)  # type: ignore[arg-type]
    computed = made.passes()[-1][2]
    assert made.chosen.compute == pytest.approx(computed)
    assert made.chosen.step == pytest.approx(max(computed, made.exchange[-1][1]))
    assert sum(end - start for start, end in made.exchange) == pytest.approx(made.chosen.communication)
    assert made.exchange[0][0] > made.passes()[-1][1], "nothing is exchanged before the last backward"
    assert made.chosen.efficiency == pytest.approx(computed / made.chosen.step)
    assert 0 <= made.waits <= made.chosen.communication
    assert sum(count for _, count in made.what.buckets) == made.gradients == 2 * MODELS[str(chosen["model"])]


@given(**settings)
def test_accumulation_pays_one_exchange_for_more_computation(**chosen: object) -> None:
    one, many = (simulate_what_if(**{**chosen, "micro_batches": n}) for n in (1, chosen["micro_batches"]))  # type: ignore[arg-type]
    assert many.chosen.exposed == pytest.approx(one.chosen.exposed, rel=1e-6, abs=1e-9)
    assert many.chosen.compute == pytest.approx(one.chosen.compute * many.micro_batches)
    assert many.chosen.efficiency >= one.chosen.efficiency - 1e-12


@given(link=st.sampled_from(SPEEDS), nodes=st.integers(2, 64))
def test_without_latency_the_exchange_is_the_rings_closed_form(link: str, nodes: int) -> None:
    made = simulate_what_if(nodes=nodes, link=link, model="1 B")
    moved = made.gradients * 2 * ((nodes - 1) / nodes / speed(link) + (GPUS - 1) / GPUS / 300e9)
    assert made.chosen.communication - made.waits == pytest.approx(moved)


def test_the_size_of_a_model_matters_only_by_latency() -> None:
    """Bytes and operations grow together; a small model waits for messages."""
    small, large = (simulate_what_if(model=m, link="400Gb/s", latency="250us", nodes=64) for m in ("10 M", "10 B"))
    assert small.waits / small.chosen.communication > large.waits / large.chosen.communication - 1e-9
    shares = [
        (w.chosen.communication - w.waits) / w.chosen.compute
        for w in (simulate_what_if(model=m, nodes=8) for m in ("10 M", "1 B"))
    ]
    assert shares[0] == pytest.approx(shares[1])


def test_what_limits_a_step_is_said() -> None:
    assert "a faster network would make no difference" in simulate_what_if(nodes=1).describe()
    assert "most of the step is waiting" in simulate_what_if(nodes=8, link="10Gb/s").describe()
    assert "bandwidth limits the step" in simulate_what_if(nodes=8, link="100Gb/s", micro_batches=4).describe()
    slow = simulate_what_if(nodes=64, link="1600Gb/s", latency="250us", model="100 M")
    assert slow.between == Link(250e-6, 200e9)
    assert "latency limits the step" in slow.describe()
    assert f"({TOKENS * 8 * 8 / 1e3:.0f} thousand tokens" in simulate_what_if(nodes=8).describe()


def test_micro_batches_raise_the_efficiency_more_than_latency_or_parameters() -> None:
    asked = {"nodes": 8, "link": "100Gb/s", "latency": "10us", "model": "1 B"}
    found = {
        name: simulate_what_if(**{**asked, **change}).chosen.efficiency  # type: ignore[arg-type]
        for name, change in {
            "half the latency": {"latency": "5us"},
            "ten times the parameters": {"model": "10 B"},
            "eight micro-batches per exchange": {"micro_batches": 8},
        }.items()
    }
    question = predict.helps_most.question
    assert set(question.options) == set(found)
    assert max(found, key=lambda name: found[name]) == question.came
    assert f"{found[question.came]:.0%}" == "87%"


def test_only_the_latencies_of_a_ring_grow_without_limit() -> None:
    few, many = (COSTS["ring"]["all_reduce"](ranks) for ranks in (8, 8000))
    assert many[0] > 900 * few[0]
    assert few[1] < many[1] < 2


def test_the_step_is_drawn_to_scale() -> None:
    made = simulate_what_if(nodes=8, micro_batches=3, link="10Gb/s")
    shown = draw_what_if(made)
    left, right = shown.figure.axes
    widths = sorted(p.get_width() for p in left.patches)
    assert len(widths) == 2 * 3 + 1 + len(made.exchange)
    assert widths[-1] == pytest.approx(max(e - s for s, e in made.exchange))
    (curve, mark) = right.lines
    assert list(curve.get_ydata()) == [100 * p.efficiency for p in made.curve]
    assert list(mark.get_ydata()) == [100 * made.chosen.efficiency]
    assert shown.words == made.describe()
