"""What ranks allocate over a step: hand-made snapshots of torch's CUDA allocator, samples of real ranks, the figure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nbddp
from nbddp.capabilities.memory.command import asked_for
from nbddp.capabilities.memory.figure_timeline import PHASES
from nbddp.capabilities.memory.history import BEFORE, HEAP, Place, from_samples, thinned, window
from nbddp.notebook import commands

# -- samples and steps ---------------------------------------------------------------------------------------------

levels = st.lists(st.tuples(st.integers(0, 2**33), st.sampled_from([None, ("cell", 1), ("cell", 2)])), min_size=1)


@given(levels)
def test_what_lines_changed_and_what_was_before_make_the_peak(some: list[tuple[int, Place | None]]) -> None:
    history = from_samples(HEAP, [(10 * i, level, place) for i, (level, place) in enumerate(some)], start=0)
    found = window(history, 0, 10 * len(some))
    assert found.peak == max(level for level, _ in some)
    assert sum(size for _, size in found.lines) == found.peak
    assert found.samples == len(some)


def test_over_many_steps_lines_count_from_the_step_with_the_peak() -> None:
    one = [(1, ("cell", 1)), (9, ("cell", 2)), (1, ("cell", 3))]
    some = [(100 * i + j, level, place) for i in range(50) for j, (level, place) in enumerate(one)]
    some[-2] = (*some[-2][:1], 12, ("cell", 2))
    found = window(from_samples(HEAP, some, 0), 0, 10_000, [100 * i for i in range(50)])
    assert dict(found.lines) == {("cell", 2): 11, BEFORE: 1}
    assert (found.samples, found.counted) == (150, 2), "of which lines are told"


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=3000), st.integers(10, 100))
def test_a_thinned_curve_keeps_its_ends_and_extremes_in_order(some: list[int], most: int) -> None:
    points = [(7 * i, level) for i, level in enumerate(some)]
    found = thinned(points, most)
    assert len(found) <= most + 2
    assert (found[0], found[-1]) == (points[0], points[-1])
    assert {max(some), min(some)} <= {level for _, level in found}
    assert [at for at, _ in found] == sorted(at for at, _ in found)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("memory --timeline model", "takes no variables; remove model or --timeline"),
        ("memory --step 3", "%ddp memory --step 3 needs --timeline; type %ddp memory --timeline --step 3"),
        ("memory --ranks 0", "needs variables, such as %ddp memory model --ranks 0"),
        ("memory --timeline --step last", "'last' is not a step; use one number, such as 0, or all"),
        ("memory 3x", "'3x' is not a valid Python name"),
    ],
)
def test_words_that_do_not_go_together_are_refused(line: str, what: str) -> None:
    with pytest.raises(nbddp.BadInput) as refused:
        asked_for(commands.parse_command(line))
    assert what in str(refused.value)


def test_phases_differ_without_colour() -> None:
    assert len({hatch for _, hatch, _ in PHASES.values()}) == len(PHASES)
