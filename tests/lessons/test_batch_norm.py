"""Lesson 07: merged moments and the listed ways to normalise against closed forms and PyTorch, and the checks of its
two exercises on real ranks with unequal shards."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import batch_norm

from nbddp.lessons.l07_batch_norm import norms
from nbddp.lessons.l07_batch_norm.figure import draw_moments
from nbddp.lessons.l07_batch_norm.simulation import UNEQUAL, sharded, two
from nbddp.teach import explore, predict
from tests.kernels import Kernel
from tests.lessons.answers import builder, cells


def test_words_say_what_averaging_variances_lacks() -> None:
    made = sharded(8, 2, 20, UNEQUAL)
    assert made.head() == "2 ranks with 8 and 4 samples"
    assert sharded(4, 4).head() == "4 ranks with 4 samples each"
    assert sharded(4, 1).head() == "1 rank with 4 samples"
    assert made.verdict().startswith("mean of the variances: 0.96, 47 % less than the variance of the whole\n")
    assert made.verdict().endswith("with the ranks' own: +0.78, -1.27")
    assert sharded(4, 1).verdict() == "one rank has the whole batch: nothing to merge"
    assert two(-0.001) == "0.00"


def test_two_samples_per_rank_are_further_off_than_thirty_two() -> None:
    few, many = (max(abs(made.becomes(r)) for r in range(4)) for made in (sharded(2, 4), sharded(32, 4)))
    assert few > 2 * many
    assert predict.worse_number_of_samples.question.came == "2"
    alone, apart = (explore.statistics().show(**s).words for s in explore.statistics().settings)
    assert "nothing to merge" in alone
    assert "47 % less than the variance of the whole" in apart


def test_the_figure_has_a_row_for_each_rank_and_two_for_the_whole() -> None:
    made = sharded(4, 4)
    shown = draw_moments(made)
    texts = [t.get_text() for t in shown.figure.axes[0].texts]
    assert [t for t in texts if t.startswith("rank ")] == [f"rank {r}" for r in range(4)]
    assert "variance 0.76" in texts
    assert "mean −0.69 · variance 0.20" in texts
    assert shown.words == made.describe()


# -- the reference, and that no two ways look alike -------------------------------------------


@pytest.mark.parametrize("ranks", range(2, 9))
def test_the_reference_is_pytorchs_batch_norm_of_the_whole_batch(ranks: int) -> None:
    shards, weights = norms.shards_for(ranks), norms.shards_for(ranks, seed=1)
    assert len({len(s) for s in shards}) > 1
    whole = torch.tensor([row for s in shards for row in s], dtype=torch.float64, requires_grad=True)
    w = torch.tensor([row for s in weights for row in s], dtype=torch.float64)
    y = batch_norm(whole, None, None, training=True, eps=norms.EPS)
    (y * w).sum().backward()  # type: ignore[no-untyped-call]
    assert whole.grad is not None
    for f in range(norms.FEATURES):
        columns = norms.feature(shards, f)
        mine = norms.forward(columns, norms.MEANS[0], norms.VARIANCES[0], norms.SCALES[0][1])
        slopes = norms.gradients(columns, norms.feature(weights, f), norms.GRADIENTS[0])
        assert [v for rank in mine for v in rank] == pytest.approx(y[:, f].tolist(), abs=1e-9)
        assert [v for rank in slopes for v in rank] == pytest.approx(whole.grad[:, f].tolist(), abs=1e-9)


# -- the lesson ------------------------------------------------------------------------------

HANGS = """
def hangs(*args):
    import torch.distributed as dist
    dist.get_rank() and dist.barrier()
check.{}(hangs)
"""


@pytest.mark.more
def test_after_an_answer_that_hangs_the_rest_of_the_lesson_works(four: Kernel) -> None:
    for cell in builder().solved(cells("07")):
        if cell.kind == "markdown" or cell.text.startswith(("%load_ext", "%ddp stop")):
            continue
        shown = four.run(cell.text)
        assert shown.ok != ("raises-exception" in cell.tags), f"{cell.text}\n{shown.error or shown.text()}"
        if cell.text.startswith("check.") or "\ncheck." in cell.text:
            name = cell.text.split("check.")[1].partition("(")[0]
            assert "deadlock: " in four.run(HANGS.format(name)).text()
