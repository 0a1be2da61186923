"""Lesson 13: what tokens count against DDP itself, and the checks of its exercises on real ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.lessons.l13_mean_of_means.figure import draw_weights
from nbddp.lessons.l13_mean_of_means.simulation import ALL, MEANS, RANK, RULES, Weighed, weighed
from nbddp.pool.pool import WorkerPool
from nbddp.teach import predict

# -- what a token counts ---------------------------------------------------------------------

sizes = st.integers(1, 16)
settings = {"first": sizes, "second": sizes, "other_first": sizes, "other_second": sizes}


@given(**settings, rule=st.sampled_from(RULES))
def test_weights_add_up_to_one_and_only_one_divisor_is_always_right(rule: str, **tokens: int) -> None:
    made = weighed(rule=rule, **tokens)
    total = sum(b.tokens * b.weight for b in made.blocks)
    assert total == pytest.approx(1)
    assert made.even or rule != ALL
    assert made.effective <= made.total + 1e-9
    assert 0 <= made.moved < 1
    assert made.even == (made.moved < 1e-9) == (made.effective > made.total - 1e-9)


@given(**settings)
def test_a_ranks_own_tokens_are_the_right_divisor_only_if_ranks_have_as_many(**tokens: int) -> None:
    """What `predict.own_tokens` says."""
    made = weighed(rule=RANK, **tokens)
    assert made.even == (sum(made.tokens[0]) == sum(made.tokens[1]))
    assert predict.own_tokens.question.came == "if all ranks have the same number of tokens"


def on_ddp(tokens: tuple[tuple[int, ...], ...], rule: str) -> list[float]:
    """The weight of a token of each micro-batch, as DDP on real ranks has it."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    class Ruler(torch.nn.Module):
        def __init__(self, entries: int):
            super().__init__()
            self.entries = torch.nn.Parameter(torch.zeros(entries))

        def forward(self, place: torch.Tensor) -> torch.Tensor:
            return self.entries[place]

    dist.init_process_group()
    counts = [n for own in tokens for n in own]
    model, mine, before = DDP(Ruler(len(counts))), tokens[dist.get_rank()], dist.get_rank() * len(tokens[0])
    divisors = {"tokens of the micro-batch × micro-batches": lambda n: n * len(mine),
                "tokens of the rank": lambda n: sum(mine),
                "tokens of all ranks / world size": lambda n: sum(counts) / len(tokens)}  # fmt: skip
    with model.no_sync():
        for i, n in enumerate(mine):
            place = torch.full((n,), before + i)
            if i + 1 < len(mine):
                (model(place).sum() / divisors[rule](n)).backward()
    (model(place).sum() / divisors[rule](n)).backward()
    grown = model.module.entries.grad
    dist.destroy_process_group()
    return [float(g) / n for g, n in zip(grown, counts, strict=True)]


@pytest.mark.parametrize("rule", RULES)
def test_weights_are_those_of_ddp(pool: WorkerPool, rule: str) -> None:
    made = Weighed(((12, 4), (2, 6)), rule)
    for found in pool.run(on_ddp, made.tokens, rule):
        assert found == pytest.approx([b.weight for b in made.blocks])


@pytest.mark.parametrize("tokens", [(8, 8, 8, 8), (12, 4, 2, 6), (16, 1, 16, 16), (1, 1, 1, 1)])
def test_a_square_has_the_area_of_its_tokens_weight(tokens: tuple[int, ...]) -> None:
    made = weighed(*tokens, MEANS)
    shown = draw_weights(made)
    (axes,) = shown.figure.axes
    areas = [p.get_width() * p.get_height() for p in axes.patches]
    right = areas[1]
    assert areas[::2] == pytest.approx([right * b.relative for b in made.blocks for _ in range(b.tokens)])
    assert areas[1::2] == pytest.approx([right] * made.total)
    low, high = axes.get_ylim()[::-1]
    assert all(low <= p.get_y() and p.get_y() + p.get_height() <= high for p in axes.patches)
    assert shown.words == made.describe()
