"""Lesson 06: the sampler's arithmetic against torch's own, and the checks of its two exercises on real ranks."""

from __future__ import annotations

import pytest

from nbddp.lessons.l06_samples.exercise import EPOCHS, judge_epochs
from nbddp.lessons.l06_samples.simulation import (
    DROPPED,
    PADDED,
    STRAIGHT,
    TOLD,
    UNTOLD,
    dealt,
    pooled,
    repeated,
    shares,
)


def test_words_say_what_is_read_twice_never_and_again() -> None:
    padded, dropped = dealt(10, 4, TOLD, PADDED), dealt(10, 4, UNTOLD, DROPPED)
    assert padded.summary() == "10 samples on 4 ranks, padded: 3 each, 12 in all; 2 of them a second time"
    assert padded.verdict() == "set_epoch(epoch) gives every epoch a new order, the same on all ranks"
    assert dropped.summary().endswith("2 each, 8 in all; 2 samples of every epoch are read by no rank")
    assert dropped.verdict().endswith("same order; samples 2, 6 are never read")
    assert "epoch 1: the same as epoch 0" in dropped.describe()
    assert dealt(8, 4).summary().endswith("every sample once")
    assert dealt(1, 4).summary().endswith("1 each, 4 in all, though there is 1")
    assert dealt(1, 4, STRAIGHT, DROPPED).verdict().endswith("sample 0 is never read")
    assert repeated(padded.epochs[0]) == [1, 4]
    assert padded.readers(0, 1) == [1, 3]


def test_padding_biases_an_accuracy() -> None:
    right = [i not in (0, 1) for i in range(10)]
    assert pooled(right, shares(10, 4, shuffle=False)) == 8 / 12
    assert pooled(right, [range(10)]) == 8 / 10
    assert str(pooled(right, [[], []])) == "nan"


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_samplers_own_epochs_pass_on_any_number_of_ranks(ranks: int, drop_last: bool) -> None:
    n = 6 * ranks + 1
    epochs = [shares(n, ranks, epoch=e, drop_last=drop_last) for e in range(EPOCHS)]
    assert judge_epochs(n, {r: [e[r] for e in epochs] for r in range(ranks)}) == "ok"
