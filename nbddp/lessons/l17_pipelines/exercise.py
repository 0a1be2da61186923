"""Lesson 17: the order of a stage's work under 1F1B (on paper), and a pipeline's training step (on real ranks).

A schedule is judged by rules and not by a list. It is right if it finishes, holds no more micro-batches than 1F1B may,
and takes as long as 1F1B. A training step runs under both schedules on four and three ranks. One process with all
stages and the whole batch has the right gradients, and those of every stage must equal them. The work must follow the
list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nbddp.errors import RankStatus, RunHung, RunTimedOut, WorkerFailed
from nbddp.launch.topology import counted, rank_words
from nbddp.lessons.framework import run_check
from nbddp.lessons.framework.answer import OK, Exercise, Wrong, not_written
from nbddp.lessons.framework.async_work import Misused
from nbddp.lessons.framework.on_rank import seeded
from nbddp.lessons.framework.run_check import Reference, grouped, on_ranks, tabulated
from nbddp.lessons.framework.tables import Outcome, nothing, raised, unwritten
from nbddp.lessons.framework.worlds import make_world
from nbddp.lessons.l17_pipelines.on_rank import ROWS, WIDTH, Alone, StageStep, step_taken, worked_out
from nbddp.lessons.l17_pipelines.simulation import (
    BACKWARD,
    FORWARD,
    GPIPE,
    ONE_F_ONE_B,
    SCHEDULES,
    TICKS,
    Step,
    listed,
    most_held,
    needs,
    run,
)
from nbddp.output.screens import NullScreen

# -- the schedule, on paper --------------------------------------------------------------------

PIPELINES = ((4, 8), (3, 5), (2, 6), (4, 2), (5, 5), (1, 3))  # stages, micro-batches
CASES = tuple((stage, p, m) for p, m in PIPELINES for stage in range(p))


def judge_schedule(outcomes: Sequence[Outcome]) -> str:
    """The line for the outcome of each of CASES."""
    early = unwritten("schedule_1f1b", outcomes)
    if early:
        return early
    table: dict[tuple[int, int, int], list[Step]] = {}
    for case, (kind, value) in zip(CASES, outcomes, strict=True):
        call = f"schedule_1f1b{case}"
        if kind != "value":
            return f"{call} {raised(value)}"
        line = _no_list_of_steps(value) or _not_each_once(value, case[2])
        if line:
            return f"{call} {line}"
        table[case] = [(step[0], step[1]) for step in value]
    lines = (_fails([table[s, p, m] for s in range(p)], p, m) for p, m in PIPELINES)
    return next(filter(None, lines), OK)


def _no_list_of_steps(value: Any) -> str:
    if value is None:
        return f"is None; {nothing(value)}"
    if not isinstance(value, list):
        return f'is {value!r}; return a list of steps such as [("F", 0), ("B", 0)]'
    for step in value:
        right = isinstance(step, list) and len(step) == 2 and step[0] in (FORWARD, BACKWARD) and type(step[1]) is int
        if not right:
            return f'has the step {step!r}; a step is a pair ("F", i) or ("B", i) with the number of a micro-batch'
    return ""


def _not_each_once(value: Sequence[Sequence[Any]], micro_batches: int) -> str:
    for kind, name in ((FORWARD, "forward"), (BACKWARD, "backward")):
        found = [i for k, i in value if k == kind]
        strange = [i for i in found if not 0 <= i < micro_batches]
        if strange:
            last = micro_batches - 1
            return f"has {kind}{strange[0]}; {counted(micro_batches, 'micro-batch')} are numbered from 0 to {last}"
        lacking = [i for i in range(micro_batches) if i not in found]
        if lacking:
            return f"lacks {kind}{lacking[0]}: every micro-batch needs its {name} pass on every stage"
        again = next((i for i in found if found.count(i) > 1), None)
        if again is not None:
            return f"has {kind}{again} {counted(found.count(again), 'time')}; each {name} pass is done once"
    return ""


def _fails(orders: Sequence[Sequence[Step]], stages: int, micro_batches: int) -> str:
    """What is wrong with the stages' lists together; empty if they are a 1F1B schedule."""
    who = f"{counted(stages, 'stage')}, {counted(micro_batches, 'micro-batch')}"
    made = run(orders)
    if made.stuck:
        return f"{who}: {_stuck(made.stuck, stages, made.done)}"
    for stage, order in enumerate(orders):
        limit, most = min(stages - stage, micro_batches), most_held(order)
        if most > limit:
            gpipe = ": that is GPipe" if most == micro_batches > limit and order[0] == (FORWARD, 0) else ""
            return (
                f"{who}: stage {stage} holds {most} micro-batches at a time, {limit} under 1F1B{gpipe}; after its "
                "first forwards a stage does one backward for each further forward, which frees memory"
            )
    right = (micro_batches + stages - 1) * sum(TICKS.values())
    if made.ticks > right:
        short = next((s for s, o in enumerate(orders) if most_held(o) < min(stages - s, micro_batches)), None)
        why = (
            "" if short is None else
            f": stage {short} has at most {counted(most_held(orders[short]), 'micro-batch')} in progress, and waits; "
            f"it can begin {min(stages - short, micro_batches)} before the first gradient arrives"
        )  # fmt: skip
        return f"{who}: takes {made.ticks} ticks (a forward 1, a backward 2), and 1F1B takes {right}{why}"
    return ""


def _stuck(stuck: Mapping[int, Step], stages: int, done: Sequence[Any]) -> str:
    """`deadlock: stage 0 waits with B0 for stage 1, ...`."""
    for stage, step in stuck.items():
        if step[0] == BACKWARD and (FORWARD, step[1]) not in [d.step for d in done[stage]]:
            return f"stage {stage} does B{step[1]} before its own F{step[1]}; a backward pass needs its forward pass"
    words = []
    for stage, step in stuck.items():
        other = next(s for s, need in needs(step, stage, stages) if need not in [d.step for d in done[s]])
        words.append(f"stage {stage} waits for stage {other} before {step[0]}{step[1]}")
    return (
        f"deadlock: {', '.join(words)}; the first stage waits longest for its first backward pass, so it starts with "
        "the most forward passes; the last stage starts with one"
    )


schedule_1f1b = Exercise(
    "schedule_1f1b",
    tabulated(CASES, lambda found: judge_schedule(found[0]), ranks=[0]),
    verifies="the lists of 1 to 5 stages, run together, keep 1F1B's time and memory",
)

# -- the training step, on ranks ---------------------------------------------------------------

WORLDS = (4, 3)
STEPS = ((GPIPE, 4, 3), (ONE_F_ONE_B, 4, 6), (ONE_F_ONE_B, 3, 5), (GPIPE, 3, 2))  # schedule, ranks, micro-batches
LIMIT = 10.0  # seconds for a step, which takes a tenth of one; not every wait for a send is a proven deadlock
CLOSE = 1e-4  # relative, of float32
EXPECTED = Reference(worked_out, STEPS)
TWICE = "Trying to backward through the graph a second time"
Gradients = Mapping[str, Sequence[float]]


def judge_step(schedule: str, micro_batches: int, found: Mapping[int, StageStep], right: Alone) -> str:
    """The line for what the ranks brought."""
    if all(not f["did"] and not f["sent"] and f["loss"] is None for f in found.values()):
        return not_written("run_stage")
    return (
        _other_work(schedule, micro_batches, found)
        or _wrong_gradients(micro_batches, found, right)
        or _wrong_loss(micro_batches, found, right)
        or _other_messages(micro_batches, found)
        or OK
    )


def _other_work(schedule: str, micro_batches: int, found: Mapping[int, StageStep]) -> str:
    """Whether each rank did what its list says, in that order."""
    for rank, f in sorted(found.items()):
        steps, did = SCHEDULES[schedule](rank, len(found), micro_batches), [(k, i) for k, i in f["did"]]
        if did == steps:
            continue
        if not any(k == BACKWARD for k, _ in did) and any(k == FORWARD for k, _ in did):
            return f"rank {rank} did {listed(did)} and no backward pass: call backward() on what the forward pass made"
        forwards = [i for k, i in did if k == FORWARD]
        if len(forwards) != micro_batches:
            times = counted(len(forwards), "time")
            return f"rank {rank} called its stage {times} for {counted(micro_batches, 'micro-batch')}"
        return f"rank {rank} did {listed(did)}, its steps were {listed(steps)}: follow steps, one after another"
    return ""


def multiple(some: Gradients, of: Gradients) -> float | None:
    """c, if every gradient of a stage is c × that of `of`; else None."""
    pairs = [(x, y) for n in of for x, y in zip(some[n], of[n], strict=True)]
    square = sum(y * y for _, y in pairs)
    c = sum(x * y for x, y in pairs) / square
    scale = max(abs(y) for _, y in pairs)
    return c if max(abs(x - c * y) for x, y in pairs) <= CLOSE * scale * max(1, abs(c)) else None


def _wrong_gradients(micro_batches: int, found: Mapping[int, StageStep], right: Alone) -> str:
    """From the last rank on, since its mistakes reach all ranks before it."""
    last = max(found)
    for rank in sorted(found, reverse=True):
        gradients, reference = dict[str, list[float]](), right["gradients"][rank]
        for name, values in found[rank]["gradients"].items():
            if values is None:
                return f"rank {rank}: {name} has no gradient after {counted(micro_batches, 'micro-batch')}"
            gradients[name] = values
        c = multiple(gradients, reference)
        if c is not None and abs(c - 1) <= CLOSE:
            continue
        who = f"rank {rank}, {next(iter(reference))}"
        if c is not None:
            return f"{who}: yours is {c:.2f} × the gradient of one process{_why(c, micro_batches)}"
        of_last = multiple(gradients, right["last"][rank])
        if of_last is not None and abs(of_last) > CLOSE:
            return (
                f"{who}: yours is of the last micro-batch alone; gradients add up only if they are not set to zero "
                "between micro-batches"
            )
        off = max(abs(x - y) for n in reference for x, y in zip(gradients[n], reference[n], strict=True))
        why = "loss_of receives the wrong arguments or the wrong targets" if rank == last else (
            f"rank {last}'s are right, so a wrong tensor came back from rank {rank + 1}, or went into backward(). Pass "
            f"on the gradient of the loss with respect to the stage's input, x.grad of the same micro-batch"
        )  # fmt: skip
        return f"{who}: yours differs from the gradient of one process by up to {off:.2g}; {why}"
    return ""


def _why(c: float, count: int) -> str:
    def near(value: float) -> bool:
        return abs(c - value) <= CLOSE * max(1, abs(value))

    if near(0):
        return ": they were set to zero after the last backward pass"
    if near(count):
        return (
            f": you added up {counted(count, 'micro-batch')} but did not divide by their number; divide each loss by "
            "it before backward()"
        )
    if near(1 / count):
        return ": you divided by the number of micro-batches twice"
    return f"; each micro-batch's loss counts 1/{count} of the whole"


def _wrong_loss(micro_batches: int, found: Mapping[int, StageStep], right: Alone) -> str:
    last = max(found)
    loss, reference = found[last]["loss"], right["loss"]
    who = f"rank {last}: the gradients are right, but run_stage returned"
    while isinstance(loss, list) and len(loss) == 1:
        loss = loss[0]
    if type(loss) not in (int, float):
        return f"{who} {loss!r} on the last stage; return the mean loss of the whole batch"
    if abs(loss - reference) <= CLOSE * abs(reference):
        return ""
    if abs(loss - micro_batches * reference) <= CLOSE * micro_batches * abs(reference):
        return f"{who} the sum of the micro-batches' losses; return their mean"
    return f"{who} {loss:.3g} and the mean loss of the whole batch is {reference:.3g}"


def _other_messages(micro_batches: int, found: Mapping[int, StageStep]) -> str:
    """What a right step was made with that is not a pipeline's; empty if nothing."""
    last = max(found)
    used = sorted({name for f in found.values() for name in f["collectives"]})
    if used:
        return (
            f"the gradients are right, but {', '.join(used)} was called; a pipeline stage sends only to its neighbours"
        )
    for rank, f in sorted(found.items()):
        wanted = micro_batches * ((rank < last) + (rank > 0))
        if len(f["sent"]) > wanted or any(n > ROWS * WIDTH for _, n in f["sent"]):
            numbers = sum(n for _, n in f["sent"])
            return (
                f"the gradients are right, but rank {rank} sent {counted(len(f['sent']), 'message')} with {numbers} "
                f"numbers; {wanted} with {wanted * ROWS * WIDTH} are enough: an activation or a gradient each"
            )
    return ""


def step_judge(function: Callable[..., Any]) -> str:
    with grouped(at_least=max(WORLDS)):
        right = EXPECTED.by_rank()[0]
        for case, known in zip(STEPS, right, strict=True):
            line = _step(function, case, known)
            if line != OK:
                return line
    return OK


def _step(function: Callable[..., Any], case: tuple[str, int, int], right: Alone) -> str:
    schedule, stages, micro_batches = case
    who = f"{schedule}, {counted(stages, 'rank')}, {counted(micro_batches, 'micro-batch')}"
    on_ranks(make_world, stages, screen=NullScreen())
    try:
        brought = on_ranks(seeded, step_taken, function, *case, deadline=min(LIMIT, run_check.DEADLINE))
    except Wrong as wrong:
        cause = wrong.__cause__
        last = cause.cause.chain[-1] if isinstance(cause, WorkerFailed) and cause.cause.chain else None
        said = last.message if last is not None and last.type == Misused.__name__ else SECOND.sub(r"\1", str(wrong))
        raise Wrong(f"{who}: {said}{stopped_because(cause, schedule, stages)}") from wrong
    line = judge_step(schedule, micro_batches, {r: brought[r] for r in range(stages)}, right)
    return line if line == OK or line.startswith("run_stage returned None") else f"{who}: {line}"


def stopped_because(cause: BaseException | None, schedule: str, stages: int) -> str:
    """The cause and the advice, after the sentence about the end of the run."""
    if isinstance(cause, RunHung | RunTimedOut):
        ended = [s.rank for s in cause.states if s.rank < stages and s.status == RankStatus.FINISHED]
        if ended:
            return (
                f"; {rank_words(ended)} finished: every send needs its recv on the other side, activations from "
                "rank - 1 to rank, gradients from rank + 1 to rank"
            )
        if schedule == ONE_F_ONE_B:
            return (
                "; under 1F1B a stage sends an activation forward while the next one sends a gradient back. A "
                "send ends only when the other side receives. Start sends with isend, keep what it returns, and wait "
                "for all of them at the end"
            )
        return (
            "; in a forward pass a stage receives from rank - 1, computes, sends to rank + 1; in a backward pass it "
            "receives from rank + 1, computes, sends to rank - 1"
        )
    if isinstance(cause, WorkerFailed):
        text = cause.cause.chain[-1].message if cause.cause.chain else ""
        return next((f"; {words}" for says, words in ERRORS.items() if says in text), "")
    return ""


SECOND = re.compile(f"({TWICE}).*")  # torch says at length what one could do about it
ERRORS = {
    "Expected parameter `tensor`": (
        "x.grad is None unless x.requires_grad_() was called before the forward pass: what recv fills is a plain tensor"
    ),
    "grad can be implicitly created only for scalar": (
        "only the last stage has a loss; the others pass what came from rank + 1: y.backward(gradient)"
    ),
    TWICE: "each micro-batch goes backward once; keep them apart",
    "object is not subscriptable": "inputs are on the first stage only, targets on the last one only; elsewhere None",
    "has no len()": "inputs are on the first stage only, targets on the last one only; elsewhere None",
}  # what is in torch's or Python's error → what to say


run_stage = Exercise(
    "run_stage",
    step_judge,
    verifies="gradients and loss of one process, under GPipe and 1F1B, on 4 and on 3 ranks",
)
