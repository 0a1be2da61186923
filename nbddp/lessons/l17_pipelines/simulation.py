"""Lesson 17 on paper: a pipeline of stages, the order of each stage's work, and the time and memory that follow.

A step is ("F", i) or ("B", i): the forward or backward pass of micro-batch i through one stage. A forward needs the
same forward of the stage before, a backward that of the stage after. Every stage works its list off in order and
waits where something is not there yet. The schedules are those of Huang et al., "GPipe" (2019), and Narayanan et al.,
"PipeDream" (2019; its variant with a flush after every batch). Sending takes no time here. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from nbddp.launch.topology import counted

FORWARD, BACKWARD = "F", "B"
TICKS = {FORWARD: 1, BACKWARD: 2}  # a backward pass computes two products per layer, a forward pass one
GPIPE, ONE_F_ONE_B = "GPipe", "1F1B"

Step = tuple[str, int]
Order = Sequence[Step]


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Step]:
    """All forwards, then all backwards."""
    every = range(micro_batches)
    return [*((FORWARD, i) for i in every), *((BACKWARD, i) for i in every)]


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Step]:
    """Some forwards to fill the pipeline, then a forward and a backward in turn, then the backwards that are left."""
    ahead = min(stages - 1 - stage, micro_batches)
    steps = [(FORWARD, i) for i in range(ahead)]
    for i in range(ahead, micro_batches):
        steps += [(FORWARD, i), (BACKWARD, i - ahead)]
    return steps + [(BACKWARD, i) for i in range(micro_batches - ahead, micro_batches)]


SCHEDULES: Mapping[str, Callable[[int, int, int], list[Step]]] = {GPIPE: gpipe, ONE_F_ONE_B: one_f_one_b}


def bubble(stages: int, micro_batches: int) -> float:
    """The share of the time in which a stage is idle, under GPipe and 1F1B: (p - 1) / (m + p - 1)."""
    return (stages - 1) / (micro_batches + stages - 1)


@dataclass(frozen=True)
class Done:
    """A step, and from when to when a stage works on it, in ticks."""

    step: Step
    start: int
    stop: int


@dataclass(frozen=True)
class PipelineRun:
    """What comes of one order per stage: `done[stage]`, and the step that each stuck stage cannot begin."""

    done: tuple[tuple[Done, ...], ...]
    stuck: Mapping[int, Step]

    @property
    def ticks(self) -> int:
        """How long it takes, as far as it comes."""
        return max((d.stop for row in self.done for d in row), default=0)

    def held(self, stage: int, time: int) -> int:
        """Micro-batches whose activations a stage holds at a time: forward begun, backward not ended."""
        began = sum(d.step[0] == FORWARD and d.start < time for d in self.done[stage])
        return began - sum(d.step[0] == BACKWARD and d.stop <= time for d in self.done[stage])

    def idle(self, until: int | None = None) -> float:
        """The share of all stages' time in which nothing is computed."""
        end = self.ticks if until is None else until
        busy = sum(max(0, min(d.stop, end) - d.start) for row in self.done for d in row)
        return 1 - busy / (end * len(self.done)) if end else 0.0


def run(orders: Sequence[Order], ticks: Mapping[str, int] = TICKS) -> PipelineRun:
    """Work the orders off, `orders[stage]`; what never can begin is stuck."""
    ended: list[dict[Step, int]] = [{} for _ in orders]
    done: list[list[Done]] = [[] for _ in orders]
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while len(done[stage]) < len(order):
                step = (order[len(done[stage])][0], order[len(done[stage])][1])
                ready = _ready(step, stage, ended)
                if ready is None:
                    break
                start = max(ready, done[stage][-1].stop if done[stage] else 0)
                done[stage].append(Done(step, start, start + ticks[step[0]]))
                ended[stage][step] = start + ticks[step[0]]
                moved = True
    stuck = {s: (o[len(done[s])][0], o[len(done[s])][1]) for s, o in enumerate(orders) if len(done[s]) < len(o)}
    return PipelineRun(tuple(map(tuple, done)), stuck)


def most_held(order: Order) -> int:
    """The largest number of micro-batches that are begun and not ended, if this order is worked off."""
    return max(accumulate((1 if kind == FORWARD else -1 for kind, _ in order), initial=0))


def listed(order: Order) -> str:
    """`F0–F3 B0 F4`."""
    spans: list[list[Step]] = []
    for step in order:
        if spans and spans[-1][-1] == (step[0], step[1] - 1):
            spans[-1].append(step)
        else:
            spans.append([step])
    return " ".join("–".join(f"{k}{i}" for k, i in dict.fromkeys((span[0], span[-1]))) for span in spans)


def needs(step: Step, stage: int, stages: int) -> list[tuple[int, Step]]:
    """What must have ended before a stage can begin a step: (stage, step) pairs."""
    kind, i = step
    if kind == FORWARD:
        return [(stage - 1, step)] if stage else []
    return [(stage, (FORWARD, i)), *([(stage + 1, step)] if stage + 1 < stages else [])]


def _ready(step: Step, stage: int, ended: Sequence[Mapping[Step, int]]) -> int | None:
    """When all that a step needs has ended; None if that is not known."""
    times = [ended[s].get(need) for s, need in needs(step, stage, len(ended))]
    known = [t for t in times if t is not None]
    return max(known, default=0) if len(known) == len(times) else None


@dataclass(frozen=True)
class PipelineState:
    """A schedule, looked at after `time` ticks."""

    schedule: str
    stages: int
    micro_batches: int
    time: int
    run: PipelineRun

    def most(self, stage: int) -> int:
        """The most micro-batches that a stage has held so far."""
        return max(self.run.held(stage, t) for t in range(self.time + 1))

    @property
    def over(self) -> bool:
        return self.time == self.run.ticks

    def doing(self, stage: int) -> str:
        """What a stage does in the tick before `time`: `F3`, `B0`, `idle`, or `not begun`."""
        now = [d.step for d in self.run.done[stage] if d.start < self.time <= d.stop]
        return f"{now[0][0]}{now[0][1]}" if now else "idle" if self.time else "not begun"

    def heading(self) -> str:
        return f"{self.schedule}: {counted(self.stages, 'stage')}, {counted(self.micro_batches, 'micro-batch')}"

    def verdict(self) -> str:
        """How much of the time was idle so far, or in all."""
        if not self.time:
            return "before the first tick"
        if not self.over:
            idle = f"{self.run.idle(self.time):.0%}"
            return f"after {counted(self.time, 'tick')}: stages were idle {idle} of the time so far"
        most = ", ".join(str(self.most(s)) for s in range(self.stages))
        return (
            f"done after {counted(self.time, 'tick')}: bubble {self.run.idle():.1%} of the time; "
            f"most micro-batches held, stage by stage: {most}"
        )

    def describe(self) -> str:
        lines = [self.heading()]
        for s in range(self.stages):
            steps = listed([d.step for d in self.run.done[s] if d.start < self.time])
            held = f"holds {self.run.held(s, self.time)}"
            lines.append(f"stage {s}: {self.doing(s)}, {held}{' · ' * bool(steps)}{steps}")
        return "\n".join([*lines, self.verdict()])


def simulate_pipeline(stages: int = 2, micro_batches: int = 2, schedule: str = GPIPE, time: int = 3) -> PipelineState:
    """The explorer's picture. Past the end nothing changes any more."""
    made = run([SCHEDULES[schedule](s, stages, micro_batches) for s in range(stages)])
    return PipelineState(schedule, stages, micro_batches, min(time, made.ticks), made)
