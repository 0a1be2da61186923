"""A rank's part of lesson 18's check: a learner's training on a small network that records its use.

The network is small, so that a check takes seconds; each rank begins with other weights, as without a common seed.
What comes back is plain data. torch is imported in the functions only: a check names this module in the notebook's
kernel.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypedDict

from nbddp.lessons.framework.plain_values import plain
from nbddp.lessons.framework.worlds import world_of
from nbddp.lessons.l04_collectives.on_rank import left_standing
from nbddp.lessons.l10_restarts.on_rank import RankDeath, files

if TYPE_CHECKING:
    import torch

STEPS, EVERY, FAIL_AT, WARMUP, PEAK, LIMIT = 20, 10, 13, 10, 0.01, 1.0
ROWS, TEST, LENGTH, LETTERS, WIDTH = 12, 11, 4, 8, 16  # a batch's rows divide by 4, 3 and 2, the test's do not
SEED = 180


class Alone(TypedDict):
    losses: list[float]  # by step
    norms: list[float]  # by step, before clipping
    began: list[float]  # weights, flat
    weights: list[float]
    loss: float  # over the test


class Training(TypedDict):
    loss: Any  # what it returned
    test: float  # the loss of this rank's own weights over the whole test
    weights: list[float]  # flat
    steps: list[int]  # whose batches it asked for
    forwards: list[tuple[bool, int, str]]  # as `network` has them
    rates: list[float]
    norms: list[float]
    printed: list[str]
    wrote: list[str]
    in_place: bool  # whether a file that it read was written


def rate(step: int) -> float:
    """The learning rate of a step."""
    return PEAK * min(1.0, (step + 1) / WARMUP)


def network(seed: int, seen: list[tuple[bool, int, str]]) -> torch.nn.Module:
    """Inputs and targets → the mean loss. `seen` grows by (training, rows, autocast's dtype or "") with each call."""
    import torch
    from torch import nn

    class Network(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.letters = nn.Embedding(LETTERS, WIDTH)
            self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, LETTERS))

        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            on = torch.is_autocast_enabled("cpu")
            dtype = str(torch.get_autocast_dtype("cpu")).removeprefix("torch.") if on else ""
            seen.append((torch.is_grad_enabled(), len(inputs), dtype))
            scores = self.layers(4 * self.letters(inputs))
            loss: torch.Tensor = nn.functional.cross_entropy(scores.flatten(0, 1).float(), targets.flatten())
            return loss

    torch.manual_seed(seed)
    return Network()


def rows_of(seed: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of shape (rows, LENGTH). Targets follow from inputs by a rule that can be learned, but in
    every fourth row from nothing: ranks' losses differ much."""
    import torch

    source = torch.Generator().manual_seed(seed)
    inputs, other = torch.randint(LETTERS, (2, rows, LENGTH), generator=source)
    targets = (3 * inputs + 1) % LETTERS
    targets[::4] = other[::4]
    return inputs, targets


def alone() -> Alone:
    """The training in one process."""
    import torch

    state = torch.random.get_rng_state()
    model = network(SEED, [])
    torch.random.set_rng_state(state)
    optimizer = torch.optim.AdamW(model.parameters())
    began, losses, norms = flat(model), [], []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = rate(step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(*rows_of(step, ROWS))
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)))
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        last = model(*rows_of(SEED, TEST)).item()
    return {"losses": losses, "norms": norms, "began": began, "weights": flat(model), "loss": last}


def flat(model: torch.nn.Module) -> list[float]:
    return [float(x) for p in model.parameters() for x in p.detach().flatten().tolist()]


def trained(function: Callable[..., Any], folder: str, size: int, again: int, fail: bool) -> Training | None:
    """One training by the learner's function on the first `size` ranks; None on the others.

    again: 0 for a first attempt; another number gives other weights to begin with. fail: the last rank raises RankDeath
    when it asks for the batch of step FAIL_AT.
    """
    import torch
    import torch.distributed as dist

    with world_of(size) as mine:
        if not mine:
            return None
        rank, seen, steps = dist.get_rank(), list[tuple[bool, int, str]](), list[int]()
        model = network(SEED + rank + 100 * again, seen)

        def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
            steps.append(step)
            if fail and step == FAIL_AT and rank == size - 1:
                raise RankDeath
            return rows_of(step, ROWS)

        printed = io.StringIO()
        quiet = contextlib.redirect_stdout(printed)
        with stepped() as (rates, norms), files() as touched, left_standing(), quiet:
            loss = function(model, batch, rows_of(SEED, TEST), folder, STEPS)
        forwards = list(seen)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            test = model(*rows_of(SEED, TEST)).item()
        return {
            "loss": plain(loss), "test": test, "weights": flat(model), "steps": steps, "forwards": forwards,
            "rates": rates, "norms": norms, "printed": printed.getvalue().splitlines(),
            "wrote": sorted({os.path.basename(f) for f in (*touched["wrote"], *touched["moved"]) if f.startswith(
                os.path.realpath(folder))}),
            "in_place": any(f in touched["wrote"] for f in touched["read"]),
        }  # fmt: skip


@contextlib.contextmanager
def stepped() -> Iterator[tuple[list[float], list[float]]]:
    """The learning rate and the norm of all gradients at each optimizer step inside the block."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    rates: list[float] = []
    norms: list[float] = []

    def note(optimizer: Any, args: Any, kwargs: Any) -> None:
        rates.append(float(optimizer.param_groups[0]["lr"]))
        grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        norms.append(float(torch.stack([g.norm() for g in grads]).norm()) if grads else 0.0)

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield rates, norms
    finally:
        handle.remove()
