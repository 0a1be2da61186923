"""Lesson 06: the sampler's arithmetic against torch's own, and the checks of its two exercises on real ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from nbddp.lessons.l06_samples.exercise import judge_accuracy, near, sets_for
from nbddp.lessons.l06_samples.figure import draw_samples
from nbddp.lessons.l06_samples.simulation import DROPPED, UNTOLD, dealt, pooled, randperm, shares
from nbddp.teach import explore

# -- the explorer ----------------------------------------------------------------------------


@given(n=st.integers(1, 700), seed=st.integers(0, 2**40))
def test_permutations_are_torchs(n: int, seed: int) -> None:
    generator = torch.Generator()
    generator.manual_seed(seed)
    assert randperm(n, seed) == torch.randperm(n, generator=generator).tolist()


@settings(max_examples=300)
@given(
    n=st.integers(1, 60), ranks=st.integers(1, 9), shuffle=st.booleans(), drop_last=st.booleans(),
    seed=st.integers(0, 99), epoch=st.integers(0, 99),
)  # fmt: skip
def test_shares_are_those_of_the_distributed_sampler(
    n: int, ranks: int, shuffle: bool, drop_last: bool, seed: int, epoch: int
) -> None:
    mine = shares(n, ranks, shuffle=shuffle, seed=seed, epoch=epoch, drop_last=drop_last)
    for rank, share in enumerate(mine):
        real: DistributedSampler[int] = DistributedSampler(range(n), ranks, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        real.set_epoch(epoch)
        assert share == list(real)


def test_the_figure_has_every_reader() -> None:
    chosen = dealt(10, 4, UNTOLD, DROPPED)
    shown = draw_samples(chosen)
    texts = [t.get_text() for t in shown.figure.axes[0].texts]
    assert texts.count("none") == 2 * len(chosen.epochs)
    assert texts.count("= epoch 0") == 1
    assert shown.words == chosen.describe()
    reads = sum(len(share) for epoch in dealt(10, 4).epochs for share in epoch)
    assert len(draw_samples(dealt(10, 4)).figure.axes[0].patches) == reads


def test_what_the_lessons_questions_about_the_explorer_say() -> None:
    untold = dealt(10, 4, UNTOLD, DROPPED)
    assert all(untold.as_before(epoch) for epoch in range(1, 4))
    assert len(untold.never()) == 2
    assert dealt(10, 4).epochs[1][2] == (1, 9, 5)
    first, second = (dealt(**setting) for setting in explore.samples().settings)
    assert first.summary().endswith("every sample once"), "the plain case answers no question"
    assert second == untold


@pytest.mark.parametrize("ranks", range(2, 9))
def test_no_wrong_way_of_counting_is_right_in_all_sets(ranks: int) -> None:
    def wrong(right: tuple[bool, ...]) -> dict[str, float]:
        n = len(right)
        plain = [list(range(n))[r::ranks] for r in range(ranks)]
        padded, dropped = (shares(n, ranks, shuffle=False, drop_last=d) for d in (False, True))
        return {
            "padded": pooled(right, padded),
            "dropped": pooled(right, dropped),
            "mean of means": sum(pooled(right, [p]) for p in plain) / ranks,
            "padded hits": sum(right[s] for p in padded for s in p) / n,
        }

    sets = sets_for(ranks)
    for way in wrong(sets[0]):
        assert any(not near(wrong(s)[way], pooled(s, [range(len(s))])) for s in sets), way
    for right in sets:
        n, reads = len(right), [list(range(len(right)))[r::ranks] for r in range(ranks)]
        assert judge_accuracy(right, {r: (sum(right) / n, reads[r]) for r in range(ranks)}) == "ok"
