"""A rank's part of lesson 17's check: one training step of a small pipeline, and its results and messages.

The stages are built alike on every rank. So the right gradients are those of all stages in a row, in one process, with
the whole batch. torch is imported in the functions only: a check names this module in the notebook's kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from nbddp.lessons.framework.async_work import waited
from nbddp.lessons.framework.on_rank import all_gradients, gradients
from nbddp.lessons.framework.worlds import world_of
from nbddp.lessons.l04_collectives.on_rank import Heard, left_standing, listening
from nbddp.lessons.l17_pipelines.simulation import SCHEDULES

if TYPE_CHECKING:
    import torch

WIDTH, ROWS = 5, 3  # of a micro-batch
SHAPE = (ROWS, WIDTH)
SEED = 170
NEIGHBOURS = (
    "a stage's neighbours are rank - 1 and rank + 1. The first stage, rank 0, has none before it, and the last one, "
    "dist.get_world_size() - 1, has none after it"
)

Known = dict[str, list[float]]  # gradients of a stage by parameter, flat


class Alone(TypedDict):
    """What one process has that has all stages. last: of the last micro-batch alone."""

    loss: float
    gradients: list[Known]  # by stage
    last: list[Known]


class StageStep(Heard):
    loss: Any  # what was returned
    gradients: Mapping[str, list[float] | None]  # as `Known`; None where there is none
    did: list[tuple[str, int]]  # passes through the stage in their order, forward ("F", i) and backward ("B", i)


def stages_of(count: int) -> list[torch.nn.Module]:
    """All stages, from the first to the last; the same on every rank."""
    import torch
    from torch import nn

    state = torch.random.get_rng_state()
    torch.manual_seed(SEED)
    made: list[nn.Module] = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]
    torch.random.set_rng_state(state)
    return made


def data(micro_batches: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Inputs and targets of every micro-batch, each of SHAPE; no two are alike."""
    import torch

    source = torch.Generator().manual_seed(SEED + micro_batches)
    both = torch.randn(2, micro_batches, *SHAPE, generator=source)
    return list(both[0]), list(both[1])


def weighted(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A mean loss in which outputs and targets cannot change places."""
    return ((outputs - targets).square() * (1 + targets.square())).mean()


def alone(stages: int, micro_batches: int) -> Alone:
    """One step with the whole batch."""
    import torch

    every, (inputs, targets) = stages_of(stages), data(micro_batches)
    value = torch.cat(inputs)
    for stage in every:
        value = stage(value)
    loss = weighted(value, torch.cat(targets))
    loss.backward()
    last = _of_one(stages, inputs[-1], targets[-1])
    return {"loss": loss.item(), "gradients": [all_gradients(s) for s in every], "last": last}


def _of_one(stages: int, inputs: torch.Tensor, targets: torch.Tensor) -> list[Known]:
    """The gradients of every stage for one micro-batch."""
    every, value = stages_of(stages), inputs
    for stage in every:
        value = stage(value)
    weighted(value, targets).backward()
    return [all_gradients(s) for s in every]


def worked_out(cases: Sequence[tuple[str, int, int]]) -> list[Alone]:
    """`alone` for each case (schedule, stages, micro-batches)."""
    return [alone(stages, micro_batches) for _, stages, micro_batches in cases]


def step_taken(function: Callable[..., Any], schedule: str, stages: int, micro_batches: int) -> StageStep | None:
    """One call of the learner's function on the first `stages` ranks; None on the others. Raises Misused."""
    import torch.distributed as dist

    from nbddp.lessons.framework.plain_values import plain

    with world_of(stages) as mine:
        if not mine:
            return None
        rank = dist.get_rank()
        stage, (inputs, targets) = stages_of(stages)[rank], data(micro_batches)
        did: list[tuple[str, int]] = []
        watched(stage, did)
        steps = SCHEDULES[schedule](rank, stages, micro_batches)
        first, last = rank == 0, rank == stages - 1
        with listening(NEIGHBOURS) as heard, left_standing(), waited():
            loss = function(steps, stage, inputs if first else None, targets if last else None, weighted, SHAPE)
        return {"loss": plain(loss), "gradients": gradients(stage), "did": did, **heard}


def watched(stage: torch.nn.Module, did: list[tuple[str, int]]) -> None:
    """Have `did` grow by ("F", i) for the i-th forward pass through `stage`, and by ("B", i) when its backward pass
    comes."""

    def after(module: Any, args: Any, output: torch.Tensor) -> None:
        i = sum(kind == "F" for kind, _ in did)
        did.append(("F", i))
        if output.requires_grad:
            output.register_hook(lambda gradient: did.append(("B", i)))

    stage.register_forward_hook(after)
