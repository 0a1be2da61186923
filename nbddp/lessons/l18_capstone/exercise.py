"""Lesson 18: a complete training, marked by a rubric.

The learner's function trains a small network on the ranks of the pool: undisturbed; again until a rank fails in the
middle; once more from the checkpoint; and on one rank fewer. What it did is compared with one process that sees every
whole batch. In bfloat16 other numbers of ranks round other sums. So weights are compared by their distance, as a share
of the way that training has moved them.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nbddp.errors import WorkerFailed
from nbddp.launch.topology import counted, rank_words
from nbddp.lessons.framework.answer import Wrong, mismatch, not_written
from nbddp.lessons.framework.on_rank import seeded
from nbddp.lessons.framework.rubric import Rubric, RubricItem
from nbddp.lessons.framework.run_check import Reference, grouped, on_ranks, world_sizes
from nbddp.lessons.framework.worlds import make_world
from nbddp.lessons.l10_restarts.on_rank import RankDeath
from nbddp.lessons.l18_capstone import on_rank
from nbddp.lessons.l18_capstone.on_rank import EVERY, FAIL_AT, LIMIT, ROWS, STEPS, WARMUP, alone, rate, trained
from nbddp.output.screens import NullScreen

Run = Mapping[int, on_rank.Training]  # by rank
LAST_SAVE = FAIL_AT // EVERY * EVERY
NEAR, NEARER = 0.03, 0.01  # right is 0.002 where bfloat16 rounds other sums, and nearly 0 for the same ones
EXPECTED = Reference(alone)
TOTALS = "sum losses × rows and rows over the ranks, then divide"
LOGGED = re.compile(r"step\D{0,3}(\d+)\D+loss\D{0,3}(\d+\.\d+)")

ASKS = (
    RubricItem("the same weights on all ranks", 2),
    RubricItem("trains as one process with the whole batch does", 3),
    RubricItem("forward passes in bfloat16", 1),
    RubricItem("gradients clipped", 1),
    RubricItem("the learning rate warms up", 1),
    RubricItem("only rank 0 logs, and logs the loss of the whole batch", 1),
    RubricItem("unbiased evaluation", 2),
    RubricItem("continues from its checkpoint", 3),
    RubricItem("runs on any number of ranks, as torchrun may start it", 2),
)


def marks(whole: Run, resumed: Run | str, fewer: Run | str, right: on_rank.Alone) -> list[RubricItem]:
    """The rubric, filled in. resumed, fewer: what came, or why nothing came."""
    whys = (
        same_weights(whole),
        as_one_process(whole, right),
        in_bfloat16(whole),
        clipped(whole, right),
        warmed_up(whole),
        logged(whole, right),
        unbiased(whole),
        resumed if isinstance(resumed, str) else went_on(whole, resumed),
        fewer if isinstance(fewer, str) else elsewhere(fewer, right),
    )
    return [RubricItem(m.asks, m.points, why) for m, why in zip(ASKS, whys, strict=True)]


def away(some: Sequence[float], other: Sequence[float], began: Sequence[float]) -> float:
    """How far two sets of weights are apart, as a share of how far the other one is from the beginning."""
    return math.dist(some, other) / max(math.dist(other, began), 1e-9)


def same_weights(run: Run) -> str:
    other = [r for r in run if run[r]["weights"] != run[0]["weights"]]
    if other:
        return f"{rank_words(other)} and rank 0 end with different weights; train DDP(model), called as a function"
    return ""


def as_one_process(run: Run, right: on_rank.Alone) -> str:
    for rank, of in run.items():
        if of["steps"] != list(range(STEPS)) or len(of["rates"]) != STEPS:
            return f"rank {rank} took {counted(len(of['rates']), 'optimizer step')} for {STEPS}"
    for step in range(STEPS):
        rows = sum(_rows(of, step) for of in run.values())
        if rows != ROWS:
            return f"step {step}: the ranks' forward passes had {rows} rows in all, the batch has {ROWS}"
    if away(run[0]["weights"], right["weights"], right["began"]) > NEAR:
        return (
            "the weights are not those of one process; each rank takes its share, batch[rank::world_size], and AdamW "
            "does one step for each batch"
        )
    return ""


def _rows(of: on_rank.Training, step: int) -> int:
    training = [rows for grad, rows, _ in of["forwards"] if grad]
    each = len(training) // STEPS or 1
    return sum(training[step * each : (step + 1) * each])


def in_bfloat16(run: Run) -> str:
    found = {dtype for of in run.values() for grad, _, dtype in of["forwards"] if grad}
    if found == {"bfloat16"}:
        return ""
    if "" in found or not found:
        return "the model is called outside torch.autocast(device.type, dtype=torch.bfloat16)"
    return f"autocast's dtype is {', '.join(sorted(found))}"


def clipped(run: Run, right: on_rank.Alone) -> str:
    over = [n for of in run.values() for n in of["norms"] if n > 1.01 * LIMIT]
    if over:
        return f"a step was taken with gradients of norm {max(over):.1f}; clip_grad_norm_ to {LIMIT:g} before step()"
    for step, (norm, whole) in enumerate(zip(run[0]["norms"], right["norms"], strict=False)):
        if step < 5 and abs(norm - min(LIMIT, whole)) > 0.1 * LIMIT:
            why = "clip once, after backward() has averaged the gradients"
            return f"step {step}: {mismatch(f'a norm of {min(LIMIT, whole):.2f}', f'{norm:.2f}', why)}"
    return ""


def warmed_up(run: Run) -> str:
    for rank, of in run.items():
        for step, found in enumerate(of["rates"]):
            if step < STEPS and abs(found - rate(step)) > 1e-6:
                return f"rank {rank}, step {step}, learning rate: {mismatch(f'{rate(step):g}', f'{found:g}')}"
        if len(of["rates"]) < WARMUP:
            return f"rank {rank} took {counted(len(of['rates']), 'step')}"
    return ""


def logged(run: Run, right: on_rank.Alone) -> str:
    talks = [r for r in run if r and run[r]["printed"]]
    if talks:
        return f"{rank_words(talks)} printed too; print only if rank == 0"
    lines = [match for line in run[0]["printed"] for match in LOGGED.findall(line)]
    found = [float(loss) for _, loss in lines]
    wanted = [right["losses"][s] for s in range(STEPS) if (s + 1) % EVERY == 0]
    if len(found) != len(wanted):
        return f"losses that rank 0 printed: {mismatch(f'{len(wanted)}, one every {EVERY} steps', len(found))}"
    named, due = [int(step) for step, _ in lines], [s + 1 for s in range(STEPS) if (s + 1) % EVERY == 0]
    if named != due:
        steps, named_steps = (", ".join(map(str, which)) for which in (due, named))
        return f"steps that rank 0 named: {mismatch(steps, named_steps)}"
    off = next((f"{a:.3f}, {b:.3f}" for a, b in zip(found, wanted, strict=True) if abs(a - b) > 0.05 * b + 5e-3), "")
    return f"loss printed, loss of the whole batch: {off}; average it over the ranks first" if off else ""


def unbiased(run: Run) -> str:
    for rank, of in run.items():
        loss = of["loss"]
        if type(loss) not in (int, float):
            return f"rank {rank} returned {loss!r}; return the mean loss over the test, a number, on every rank"
        if abs(loss - of["test"]) > 5e-3 * of["test"] + 1e-4:
            told = mismatch(f"{of['test']:.4f}", f"{loss:.4f}", TOTALS)
            return f"rank {rank}, returned loss: {told}"
    tests = [sum(rows for grad, rows, _ in of["forwards"] if not grad) for of in run.values()]
    if not all(tests):
        return "the test ran with gradients, or not on every rank; each rank takes test[rank::world_size] in no_grad()"
    return ""


def went_on(whole: Run, resumed: Run) -> str:
    for rank, of in resumed.items():
        if not of["steps"] or of["steps"][0] != LAST_SAVE:
            at = of["steps"][0] if of["steps"] else "none"
            return f"rank {rank} continued at step {at}; the last checkpoint was written after {LAST_SAVE} steps"
    if any(of["in_place"] for of in resumed.values()):
        return "the checkpoint is written over the last good one; write to another name, then os.replace"
    writers = [r for r in resumed if resumed[r]["wrote"]]
    if len(writers) > 1:
        return f"{rank_words(writers)} wrote files; let only rank 0 write"
    gap = away(resumed[0]["weights"], whole[0]["weights"], [0.0] * len(whole[0]["weights"]))
    if gap > NEARER:
        return "the final weights differ from the undisturbed run; save model, optimizer and step"
    return same_weights(resumed)


def elsewhere(run: Run, right: on_rank.Alone) -> str:
    size = counted(len(run), "rank")
    line = same_weights(run) or as_one_process(run, right) or unbiased(run)
    return f"on {size}: {line}" if line else ""


def mark(function: Callable[..., Any]) -> list[RubricItem]:
    """Train, fail, continue, train on one rank fewer. Raises Wrong if the first training does not finish."""
    with tempfile.TemporaryDirectory() as folder:
        right, (size, less) = EXPECTED.by_rank()[0], world_sizes()
        whole = _run(function, f"{folder}/whole", size)
        if all(not of["steps"] and of["loss"] is None for of in whole.values()):
            raise Wrong(not_written("capstone"))
        resumed = _resumed(function, f"{folder}/failing", size)
        fewer = _or_why(function, f"{folder}/less", less, f"on {counted(less, 'rank')}: ")
    return marks(whole, resumed, fewer, right)


def _resumed(function: Callable[..., Any], folder: str, size: int) -> Run | str:
    try:
        _run(function, folder, size, fail=True)
    except Wrong as wrong:
        failed = wrong.__cause__
        if not (isinstance(failed, WorkerFailed) and failed.exception_type.endswith(RankDeath.__name__)):
            return str(wrong)
    if not list(Path(folder).iterdir()):
        return f"no file in folder after {FAIL_AT} steps; write a checkpoint after every {EVERY}"
    return _or_why(function, folder, size, "restarted: ", again=1)


def _or_why(function: Callable[..., Any], folder: str, size: int, who: str, again: int = 0) -> Run | str:
    try:
        return _run(function, folder, size, again)
    except Wrong as wrong:
        return f"{who}{wrong}"


def _run(function: Callable[..., Any], folder: str, size: int, again: int = 0, fail: bool = False) -> Run:
    Path(folder).mkdir(exist_ok=True)
    with grouped():  # of each run its own: one that fails ends its group
        on_ranks(make_world, size, screen=NullScreen())
        try:
            found = on_ranks(seeded, trained, function, folder, size, again, fail, screen=NullScreen())
        except Wrong as wrong:
            text = str(wrong).replace(f"{folder}/", "")  # a folder of another name each time
            raise Wrong(text) from wrong.__cause__
    return {rank: found[rank] for rank in range(size)}


capstone = Rubric(
    "capstone",
    mark,
    ASKS,
    verifies="on real ranks: undisturbed, after a failure, and on one rank fewer",
)
