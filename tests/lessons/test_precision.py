"""Lesson 14: loss scales against GradScaler itself, what torch does with DTensors, and the checks on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nbddp.lessons.l14_precision.figure import draw_loss_scale
from nbddp.lessons.l14_precision.plan import SHARDED, groups, shard
from nbddp.lessons.l14_precision.simulation import ALONE, AVERAGED, RANKS, STEPS, WHERE, gradient, scaled
from nbddp.pool.pool import WorkerPool

NPROC = 4


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("first", [12, 18])
def test_scales_are_those_of_gradscaler(where: str, first: int) -> None:
    """Four of them, on gradients in float16 that each rank has multiplied by its own scale."""
    made = scaled(where, first, 3)
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(RANKS)]
    optimizers = [torch.optim.SGD([w], lr=2.0**-20) for w in weights]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**first, growth_interval=3) for _ in range(RANKS)]
    for number, step in enumerate(made.steps, start=1):
        scales = [scaler.scale(torch.ones(1)) for scaler in scalers]
        assert [s.item() for s in scales] == [2.0**e for e in step.scales]
        mean = sum(s.item() for s in scales) / RANKS
        parts = [torch.tensor(2.0 ** gradient(r, number) * (scales[r].item() if where == AVERAGED else mean)).half()
                 for r in range(RANKS)]  # fmt: skip
        before = [w.item() for w in weights]
        for r in range(RANKS):
            seen = parts[r].float() if where == ALONE else torch.stack(parts).float().max()
            weights[r].grad = seen.reshape(1)
            scalers[r].step(optimizers[r])
            scalers[r].update()
        assert tuple(b == w.item() for b, w in zip(before, weights, strict=True)) == step.skipped


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("step", [0, 3, STEPS])
def test_every_step_of_every_rank_is_a_cell(where: str, step: int) -> None:
    made = scaled(where, 18, 4, step)
    shown = draw_loss_scale(made)
    (axes,) = shown.figure.axes
    assert len(axes.patches) == RANKS * STEPS
    infs = [t for t in axes.texts if t.get_text() == "inf"]
    dashes = [t for t in axes.texts if t.get_text() == "–"]
    assert len(infs) == sum(sum(s.overflowed) for s in made.steps)
    assert len(infs) + len(dashes) == sum(sum(s.skipped) for s in made.steps)
    assert shown.words == made.describe()


# -- what torch does -------------------------------------------------------------------------


def on_dtensors() -> dict[str, Any]:
    """A GradScaler's decision when only rank 1's shard has an inf, and torch's norm on a mesh of 2 × 2."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group()
    rank, net = dist.get_rank(), torch.nn.Linear(2, 4)
    fully_shard(net, mesh=init_device_mesh("cpu", (4,)))
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024)
    scaler.scale(net(torch.ones(1, 2)).sum()).backward()
    if rank == 1:
        net.weight.grad.to_local().fill_(torch.inf)
    before = net.weight.to_local().detach().clone()
    scaler.step(optimizer)
    scaler.update()
    skipped = torch.equal(before, net.weight.to_local())
    dist.destroy_process_group()
    return {"skipped": skipped, "scale": scaler.get_scale()}


@pytest.mark.more
def test_a_gradscaler_that_meets_dtensors_asks_all_ranks(pool: WorkerPool) -> None:
    assert list(pool.run(on_dtensors)) == [{"skipped": True, "scale": 512.0}] * 4


@given(st.integers(1, 9))
def test_shards_are_those_of_tensor_split(shards: int) -> None:
    for values in SHARDED:
        theirs = [part.tolist() for part in torch.tensor(values).tensor_split(shards)]
        assert [shard(values, shards, i) for i in range(shards)] == theirs
    assert groups(4, 2) == [[0, 1], [2, 3]]
