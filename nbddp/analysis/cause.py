"""Why a rank is late: in which part of a step it takes longer than the others.

`analysis.significance` has shown that it is late. The input is a table of times, rank → part → nanoseconds, of what
each rank does by itself, without waiting for others. The late rank's time in each part is compared with the median of
the others':

- forward and backward take longer, and the rank's inputs have more elements: more work. Up to the square of the inputs'
  ratio is explained so, which is what attention takes for longer sequences;
- all parts take longer by about the same factor, with inputs that are alike: the machine;
- without known inputs the optimizer decides, whose work does not depend on the batch. If it is as slow as the rest, the
  cause is the machine; if it is no slower than the others', more work; in between, or where it is too short to tell,
  one of the two;
- one part has most of the extra time, and the others are not slower alike: that part;
- anything else: the cause is not known, and the largest parts are named.

Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from nbddp.analysis.quantities import digits, duration, percent

# parts of a step
INPUT, COPY, FORWARD, BACKWARD, OPTIMIZER, CODE = (
    "input (data loader)", "host-to-device copy", "forward", "backward", "optimizer", "Python outside of operations",
)  # fmt: skip
MACHINE, BATCH, EITHER, UNKNOWN = "the machine", "more work", "more work or the machine", "not known"
MOST = 0.6  # of the extra time: what has more of it is the cause
SLOWER, ALIKE = 1.04, 3.0  # times as long, at least; and what is more than once differs by this at most
COUNTS = 0.03  # of the others' time: a part that takes less says nothing about a factor
COVER = 0.5  # of the others' time that the parts with a factor must make up
AS_SLOW = 0.5  # of a factor above 1: an optimizer with so much of forward's and backward's speaks for the machine
WITHIN = 1.25  # times the square of the inputs' ratio: what is slower than that has another cause too
WORK = (FORWARD, "loss", BACKWARD, OPTIMIZER)  # what a slow machine slows, whatever the data are


@dataclass(frozen=True)
class SlowRankCause:
    """what: a part's name, MACHINE, BATCH, EITHER or UNKNOWN. extra: nanoseconds that the rank takes longer than the
    median of the others; by_part: part → its share of that, largest first. factor: how many times as long its work
    takes, of MACHINE, BATCH and EITHER; inputs: how many times as many elements its inputs have; optimizer: how many
    times as long its optimizer takes; both 0 if not known. queued: nanoseconds of a step that it waits for a core,
    more than the others do, where that is the cause."""

    rank: int
    what: str
    extra: int
    by_part: Mapping[str, float] = field(default_factory=dict)
    factor: float = 1.0
    queued: int = 0
    inputs: float = 0.0
    optimizer: float = 0.0

    def describe(self) -> str:
        """One sentence, or two."""
        if self.what == MACHINE and self.queued:
            return (
                f"cause: the machine. Rank {self.rank} waits {duration(self.queued / 1e9)} longer per step than the "
                f"others for a free core; other processes use its cores"
            )
        if self.what in (MACHINE, BATCH, EITHER):
            return f"cause: {self._of_factor()}"
        if self.what == UNKNOWN:
            parts = ", ".join(f"{name} {percent(share)}" for name, share in list(self.by_part.items())[:3])
            if not parts:
                return "cause: not known"
            return f"cause: not known; rank {self.rank}'s extra time is spread over several parts ({parts})"
        share = self.by_part.get(self.what)
        has = "" if share is None else f", which has {percent(share)} of rank {self.rank}'s extra time"
        return f"cause: {self.what}{has}"

    def _of_factor(self) -> str:
        times, slower = digits(self.factor), f"forward and backward take rank {self.rank} about {digits(self.factor)}"
        if self.what == MACHINE:
            return f"the machine. Everything takes rank {self.rank} about {times} times as long{self._with_inputs()}"
        if self.what == EITHER:
            return f"{slower} times as long. {self._either()}"
        if self.inputs:
            return (
                f"more work. Rank {self.rank}'s inputs have {digits(self.inputs)} times as many elements as the "
                f"others', and forward and backward take about {times} times as long"
            )
        return f"more work, such as a larger batch or longer inputs; {slower} times as long, but the optimizer does not"

    def _with_inputs(self) -> str:
        if self.inputs >= SLOWER:
            return (
                f"; its inputs have {digits(self.inputs)} times as many elements as the others', which alone does not "
                "explain it"
            )
        return ", with inputs no larger than the others'" if self.inputs else ""

    def _either(self) -> str:
        if self.inputs >= SLOWER:
            return (
                f"Its inputs have {digits(self.inputs)} times as many elements as the others', which explains only a "
                "part of it"
            )
        if self.inputs and self.optimizer:
            return (
                "Its inputs are no larger than the others', and its optimizer is as fast. Possible causes are other "
                "code on this rank, or work that depends on the values of the inputs"
            )
        if self.inputs:
            return (
                "Its inputs are no larger than the others'. Possible causes are a slower machine, other code on this "
                "rank, or work that depends on the values of the inputs; the optimizer is too short to show which"
            )
        if self.optimizer:
            return (
                "Possible causes are a larger batch, longer inputs or a slower machine. The optimizer, whose work does "
                f"not depend on the batch, takes {digits(self.optimizer)} times as long, which does not decide it"
            )
        return (
            "Possible causes are a larger batch, longer inputs or a slower machine; the optimizer is too short to show "
            "which"
        )


def cause(
    times: Mapping[int, Mapping[str, int]],
    rank: int,
    inputs: Mapping[int, int] | None = None,
) -> SlowRankCause | None:
    """Why `rank` is late; None if it takes no longer than the others, or is alone. inputs: rank → elements of the
    tensors that its forwards got."""
    others = [r for r in times if r != rank]
    if not others:
        return None
    usual = {part: statistics.median(times[r][part] for r in others) for part in times[rank]}
    extra = {part: times[rank][part] - usual[part] for part in usual}
    longer = {part: more for part, more in extra.items() if more > 0}
    total = int(sum(longer.values()))
    if total <= 0 or sum(extra.values()) <= 0:
        return None
    shares = {part: more / total for part, more in sorted(longer.items(), key=lambda pair: -pair[1])}
    found = SlowRankCause(rank, UNKNOWN, total, shares, inputs=_ratio(inputs, rank, others))
    return _of_factor(found, times[rank], usual) or _of_part(found, usual)


def steady(stretches: Sequence[Mapping[int, Mapping[str, int]]], rank: int) -> SlowRankCause | None:
    """Why `rank` is late over all these stretches of time; not known if it is so for one of them alone: a disturbance
    there would pass for the cause. stretches: a table as `cause` has it for each."""
    found = cause(_together(stretches), rank)
    rest = [cause(_together([*stretches[:i], *stretches[i + 1 :]]), rank) for i in range(len(stretches))]
    if found is not None and len(rest) > 1 and any(one is None or one.what != found.what for one in rest):
        return SlowRankCause(rank, UNKNOWN, found.extra)
    return found


def _together(tables: Sequence[Mapping[int, Mapping[str, int]]]) -> dict[int, dict[str, int]]:
    return {r: {part: sum(of[r][part] for of in tables) for part in parts} for r, parts in (tables or [{}])[0].items()}


def _ratio(inputs: Mapping[int, int] | None, rank: int, others: list[int]) -> float:
    """How many times as many elements the rank's inputs have; 0 if that is not known."""
    if not inputs or not all(inputs.get(r) for r in (rank, *others)):
        return 0.0
    return inputs[rank] / statistics.median(inputs[r] for r in others)


def _of_factor(found: SlowRankCause, own: Mapping[str, int], usual: Mapping[str, float]) -> SlowRankCause | None:
    part, share = next(iter(found.by_part.items()))
    if part not in WORK and share >= MOST:  # a sleep between steps: that forward is slower as well explains little
        return None
    whole = sum(usual.values())
    factors = {part: own[part] / usual[part] for part in WORK if usual.get(part, 0) > COUNTS * whole}
    slower = {part: f for part, f in factors.items() if f >= SLOWER}
    if not set(slower) - {"optimizer"} or sum(usual[part] for part in slower) < COVER * whole:
        return None
    factor = sum(own[part] for part in slower) / sum(usual[part] for part in slower)
    seen = replace(found, factor=factor, optimizer=factors.get("optimizer", 0.0))
    if found.inputs >= SLOWER and factor <= WITHIN * found.inputs**2:
        return replace(seen, what=BATCH)
    if len(slower) < 2 or max(slower.values()) - 1 > ALIKE * (min(slower.values()) - 1):
        return None
    if set(factors) - set(slower) - {"optimizer"}:
        return None
    return replace(seen, what=_which(seen, factors))


def _which(seen: SlowRankCause, factors: Mapping[str, float]) -> str:
    """MACHINE, BATCH or EITHER of a rank whose forward and backward take longer by about the same factor."""
    if "optimizer" not in factors:
        return EITHER
    if seen.optimizer < SLOWER:
        return EITHER if seen.inputs else BATCH
    rest = max(f for part, f in factors.items() if part != "optimizer")
    enough = seen.inputs > 0 or seen.optimizer - 1 >= AS_SLOW * (rest - 1)
    return MACHINE if enough else EITHER


def _of_part(found: SlowRankCause, usual: Mapping[str, float]) -> SlowRankCause:
    """A part that has most of all time has most of the extra time too where all parts are slower alike."""
    part, share = next(iter(found.by_part.items()))
    rest = sum(usual.values()) - usual[part]
    alike = rest > 0 and (1 - share) / rest >= AS_SLOW * share / max(1.0, usual[part])
    return replace(found, what=part if share >= MOST and not alike else UNKNOWN)
