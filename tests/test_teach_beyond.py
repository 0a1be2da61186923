"""Lesson 12: the what-if and the memory of ZeRO against closed forms, and the check of its exercise on real ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nbddp
from nbddp.base.units import speed
from nbddp.lessons.beyond.figure import zero as drawn_bars
from nbddp.lessons.beyond.simulation import PRECISIONS, share, stages
from nbddp.lessons.what_if.figure import what_if as drawn_step
from nbddp.lessons.what_if.simulation import DELAYS, GPUS, MODELS, SPEEDS, TOKENS, what_if
from nbddp.teach import check
from nbddp.trace.cost import Link
from tests.lessons import Mutant, defined, exercise, solution

# -- what if ---------------------------------------------------------------------------------

settings = {
    "nodes": st.integers(1, 64), "link": st.sampled_from(SPEEDS), "latency": st.sampled_from(DELAYS),
    "model": st.sampled_from([m for m in MODELS if m != "10 B"]), "micro_batches": st.integers(1, 16),
}  # fmt: skip


@given(**settings)
def test_a_step_ends_with_its_computation_or_with_its_last_bucket(**chosen: object) -> None:
    made = what_if(**chosen)  # type: ignore[arg-type]
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
    one, many = (what_if(**{**chosen, "micro_batches": n}) for n in (1, chosen["micro_batches"]))  # type: ignore[arg-type]
    assert many.chosen.exposed == pytest.approx(one.chosen.exposed, rel=1e-6, abs=1e-9)
    assert many.chosen.compute == pytest.approx(one.chosen.compute * many.micro_batches)
    assert many.chosen.efficiency >= one.chosen.efficiency - 1e-12


@given(link=st.sampled_from(SPEEDS), nodes=st.integers(2, 64))
def test_without_latency_the_exchange_is_the_rings_closed_form(link: str, nodes: int) -> None:
    made = what_if(nodes=nodes, link=link, model="1 B")
    moved = made.gradients * 2 * ((nodes - 1) / nodes / speed(link) + (GPUS - 1) / GPUS / 300e9)
    assert made.chosen.communication - made.waits == pytest.approx(moved)


def test_the_size_of_a_model_matters_only_by_latency() -> None:
    """Bytes and operations grow together; a small model waits for messages."""
    small, large = (what_if(model=m, link="400Gb/s", latency="250us", nodes=64) for m in ("10 M", "10 B"))
    assert small.waits / small.chosen.communication > large.waits / large.chosen.communication - 1e-9
    shares = [
        (w.chosen.communication - w.waits) / w.chosen.compute
        for w in (what_if(model=m, nodes=8) for m in ("10 M", "1 B"))
    ]
    assert shares[0] == pytest.approx(shares[1])


def test_what_holds_a_step_up_is_said() -> None:
    assert "a faster network would not be noticed" in what_if(nodes=1).words()
    assert "most of the step is waiting" in what_if(nodes=8, link="10Gb/s").words()
    assert "bandwidth holds the step up" in what_if(nodes=8, link="100Gb/s", micro_batches=4).words()
    slow = what_if(nodes=64, link="1600Gb/s", latency="250us", model="100 M")
    assert slow.between == Link(250e-6, 200e9)
    assert "latency holds the step up" in slow.words()
    assert f"({TOKENS * 8 * 8 / 1e3:.0f} thousand tokens" in what_if(nodes=8).words()


def test_the_step_is_drawn_to_scale() -> None:
    made = what_if(nodes=8, micro_batches=3, link="10Gb/s")
    shown = drawn_step(made)
    left, right = shown.figure.axes
    widths = sorted(p.get_width() for p in left.patches)
    assert len(widths) == 2 * 3 + 1 + len(made.exchange)
    assert widths[-1] == pytest.approx(max(e - s for s, e in made.exchange))
    (curve, mark) = right.lines
    assert list(curve.get_ydata()) == [100 * p.efficiency for p in made.curve]
    assert list(mark.get_ydata()) == [100 * made.chosen.efficiency]
    assert shown.words == made.words()
    assert all(t.get_fontsize() >= 6.5 for t in [*left.texts, *right.texts, *left.get_legend().get_texts()])


# -- ZeRO ------------------------------------------------------------------------------------

sharing = {
    "parameters": st.integers(1, 10**12), "ranks": st.integers(1, 4096),
    "precision": st.sampled_from(sorted(PRECISIONS)),
}  # fmt: skip


def test_the_papers_own_numbers() -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5 billion parameters on 64 ranks."""
    per_rank = [of.total / 1e9 for of in stages(7.5, 64).shares]
    assert per_rank == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


@given(**sharing)
def test_stages_shard_one_part_after_another(parameters: int, ranks: int, precision: str) -> None:
    none, one, two, three = (share(s, parameters, ranks, precision) for s in (0, 1, 2, 3))
    assert none.total == 16 * parameters
    assert three.total == pytest.approx(16 * parameters / ranks)
    assert one.parts == pytest.approx((none.parameters, none.gradients, none.optimizer / ranks))
    assert two.parts == pytest.approx((none.parameters, none.gradients / ranks, none.optimizer / ranks))


def test_the_verdict_says_from_which_stage_on_it_fits() -> None:
    assert "fits in 80 GB from stage 1 on" in stages(7.5, 64).words()
    assert "fits in 80 GB from stage 3 on" in stages(175, 1024).words()
    assert "all stages fit in 80 GB" in stages(1, 8).words()
    assert "no stage fits in 80 GB" in stages(175, 8).words()
    assert "nobody to share with" in stages(1, 1).words()


def test_the_bars_are_as_long_as_the_bytes() -> None:
    made = stages(7.5, 64)
    shown = drawn_bars(made)
    (axes,) = shown.figure.axes
    widths = [p.get_width() for p in axes.patches[::2]]  # each part is a fill and an edge
    assert widths == pytest.approx([b / 1e9 for of in made.shares for b in of.parts])
    texts = [t.get_text() for t in axes.texts]
    assert {"120 GB", "31.4 GB", "16.6 GB", "1.88 GB", "a GPU of 80 GB"} <= set(texts)
    assert all(t.get_fontsize() >= 6.5 for t in axes.texts)
    assert shown.words == made.words()


# -- bytes_per_rank --------------------------------------------------------------------------

BYTES = "def bytes_per_rank(stage, parameters, ranks):\n    p, n = parameters, ranks\n    return "
SUM = " + ".join(f"{{{i}}} * p // (n if stage >= {{{i + 3}}} else 1)" for i in range(3))
WRONG_BYTES = [
    Mutant("no copy", BYTES + SUM.format(2, 2, 8, 3, 2, 1), "keeps a float32 copy"),
    Mutant("float32", BYTES + SUM.format(4, 4, 8, 3, 2, 1), "that is float32 throughout"),
    Mutant("always", BYTES + "16 * p // n", "stage 0 shards nothing"),
    Mutant("all or nothing", BYTES + "16 * p // (n if stage else 1)", "that shards everything from stage 1 on"),
    Mutant("too far", BYTES + SUM.format(2, 2, 12, 2, 1, 0), "one stage too far"),
    Mutant("behind", BYTES + SUM.format(2, 2, 12, 4, 3, 2), "one stage behind"),
    Mutant("whole parameters", BYTES + SUM.format(2, 2, 12, 4, 2, 1), "stage 3 shards the parameters too"),
    Mutant("another order", BYTES + SUM.format(2, 2, 12, 1, 2, 3), "the order is another"),
    Mutant("nothing", BYTES + "16 * p", "that shards nothing"),
    Mutant("parameters", BYTES + "2 * p", "the parameters alone"),
    Mutant("together", BYTES + "n * (" + SUM.format(2, 2, 12, 3, 2, 1) + ")", "what all ranks hold together"),
    Mutant("words", BYTES + "'16 GB'", "a number of bytes is wanted"),
    Mutant("one stage for another", BYTES + "(4 + 12 / n) * p if stage == 2 else "
           + SUM.format(2, 2, 12, 3, 2, 1), "those are stage 1's"),
    Mutant("unwritten", BYTES + "None", "still to be written"),
    Mutant("gigabytes", BYTES + "(" + SUM.format(2, 2, 12, 3, 2, 1) + ") / 1e9", "that is in GB; bytes are asked for"),
    Mutant("GiB", BYTES + "(" + SUM.format(2, 2, 12, 3, 2, 1) + ") / 2**30", "that is in GiB"),
    Mutant("three parts", BYTES + "12 * p, 2 * p, 2 * p", "the sum of the parts"),
    Mutant("one stage each", BYTES + SUM.replace(">=", "==").format(2, 2, 12, 3, 2, 1), "one part at each stage"),
    Mutant("64", BYTES.replace("n = parameters, ranks", "n = parameters, 64") + SUM.format(2, 2, 12, 3, 2, 1),
           "that is always 64"),
    Mutant("copy twice", BYTES + SUM.format(4, 4, 12, 3, 2, 1), "among the optimizer's 12 bytes already"),
    Mutant("optimizer alone", BYTES + "12 * p // (n if stage else 1)", "the optimizer's state alone; parameters"),
    Mutant("no stage 0", "def bytes_per_rank(stage, p, n):\n    if stage: return 16 * p // n", "ends without a value"),
    Mutant("the pool's size", "import torch.distributed as d\n" + BYTES + "16 * p // d.get_world_size()",
           "the arguments say it all"),
]  # fmt: skip
RIGHT_BYTES = [
    BYTES + "2 * p / n ** (stage > 2) + 2 * p / n ** (stage > 1) + 12 * p / n ** (stage > 0)",
    BYTES + "{0: 16 * p, 1: 4 * p + 12 * p // n, 2: 2 * p + 14 * p // n, 3: 16 * p // n}[stage]",
]


@pytest.mark.parametrize("mutant", WRONG_BYTES, ids=str)
def test_wrong_bytes_are_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    mutant.meets(check.bytes_per_rank)


def test_right_bytes_pass(pool: nbddp.Pool) -> None:
    assert check.bytes_per_rank(solution("12", "bytes_per_rank"))
    for source in RIGHT_BYTES:
        assert check.bytes_per_rank(defined(source, "bytes_per_rank")), source
    assert "still to be written" in check.bytes_per_rank(exercise("12", "bytes_per_rank")).line
