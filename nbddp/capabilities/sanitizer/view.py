"""The records of all ranks, laid side by side: models by their groups, steps by their numbers. Pure.

Two ranks' models are the same one if they are of the same group, and the n-th of that group on each. What is compared
are samples: two of them differ if they do so by more than rounding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from nbddp.capabilities.sanitizer.recording import (
    BESIDE,
    NO_TENSOR,
    Backward,
    CalledFunction,
    CountedLoss,
    DrawnTensor,
    Forward,
    ModelFacts,
    OptimizerStep,
    Part,
    Pass,
    Past,
    Place,
    RankRecord,
    Sample,
)
from nbddp.launch.machine import counted

Recorded = TypeVar("Recorded", CountedLoss, DrawnTensor, Forward)

BY_DESIGN = ("post_localSGD_hook", "noop_hook")  # hooks that leave gradients different on purpose
ROUNDING = 1e-6  # of a norm; equal ranks have equal bits


@dataclass(frozen=True)
class SampleDifference:
    """The first tensor that differs. number: of those sampled. norms: rank → its norm. share: how far apart, as a share
    of the largest norm; at least."""

    name: str
    number: int
    of: int
    norms: Mapping[int, float]
    share: float

    @property
    def words(self) -> str:
        shown = ", ".join(_norm(n) for n in list(self.norms.values())[:4]) + ", …" * (len(self.norms) > 4)
        return f"first in {self.name} (norms of its sample {shown}; at least {percent(self.share)} apart)"


def _norm(value: float) -> str:
    return "no gradient" if value == NO_TENSOR else f"{value:.5g}"


def percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.095 else f"{share:.1g}" if share < 0.001 else f"{share:.1%}"


def difference(samples: Mapping[int, Sample], names: Sequence[str]) -> SampleDifference | None:
    """Where samples of ranks differ; None if they do not, or cannot be compared."""
    lengths = {len(each) for each in samples.values()}
    if len(samples) < 2 or len(lengths) != 1 or not (length := lengths.pop()):
        return None
    apart = [(i, share) for i in range(length // 2) if (share := _share(samples, i)) > ROUNDING]
    if not apart:
        return None
    first, share = apart[0]
    name = names[first] if first < len(names) else f"tensor {first}"
    norms = {rank: each[2 * first + 1] for rank, each in samples.items()}
    return SampleDifference(name, len(apart), length // 2, norms, share)


def _share(samples: Mapping[int, Sample], number: int) -> float:
    """How far a tensor's dot products or norms are apart, as a share of the largest norm."""
    dots, norms = ([each[2 * number + i] for each in samples.values()] for i in (0, 1))
    return max(max(dots) - min(dots), max(norms) - min(norms)) / max(*norms, 1e-30)


def picked(sample: Sample, names: Sequence[str], wanted: Sequence[str]) -> Sample:
    """The part of a sample that is of some of its names, in their order; empty if one is not there."""
    at = {name: i for i, name in enumerate(names)}
    if any(name not in at or 2 * at[name] + 1 >= len(sample) for name in wanted):
        return []
    return [number for name in wanted for number in sample[2 * at[name] : 2 * at[name] + 2]]


def norms(sample: Sample, names: Sequence[str], wanted: Sequence[str]) -> Sample:
    """As `picked`, with norms alone: dot products depend on where a tensor stood among those sampled at once."""
    of = picked(sample, names, wanted)
    return [number for norm in of[1::2] for number in (norm, norm)]


@dataclass
class AlignedStep:
    """One optimizer step on all ranks of a model. number: counted over all optimizers that move the model."""

    number: int
    steps: dict[int, OptimizerStep]
    parts: dict[int, Part]
    backs: dict[int, list[Backward]] = field(default_factory=dict)
    pasts: dict[int, list[Past]] = field(default_factory=dict)
    since: dict[int, int] = field(default_factory=dict)  # rank → `at` of the step before
    again: dict[int, list[CalledFunction]] = field(default_factory=dict)  # backwards after the last that DDP exchanged

    def between(self, rank: int, facts: Iterable[Recorded]) -> list[Recorded]:
        """Those of a rank that came after the step before and ahead of this one."""
        return [fact for fact in facts if self.since[rank] < fact.at < self.steps[rank].at]

    @cached_property
    def before(self) -> SampleDifference | None:
        return self._of("before")

    @cached_property
    def grads(self) -> SampleDifference | None:
        return self._of("grads")

    @cached_property
    def after(self) -> SampleDifference | None:
        return self._of("after")

    def _of(self, what: str) -> SampleDifference | None:
        first = next(iter(self.parts.values()))
        names = first.earlier if what == "before" else first.names
        own = {r: part.earlier if what == "before" else part.names for r, part in self.parts.items()}
        samples = {r: getattr(part, what) for r, part in self.parts.items()}
        if any(each != names for each in own.values()):
            samples = {r: norms(sample, own[r], names) for r, sample in samples.items()}
        return difference(samples, names)

    @property
    def names(self) -> list[str]:
        return next(iter(self.parts.values())).names

    @property
    def earlier(self) -> list[str]:
        return next(iter(self.parts.values())).earlier

    @cached_property
    def exchanged(self) -> SampleDifference | None:
        """As `grads`, when the last backward had ended."""
        last = {rank: backs[-1].grads for rank, backs in self.backs.items() if backs}
        if any(part.names != self.names for part in self.parts.values()):
            return None
        return difference(last, self.names) if len(last) == len(self.steps) else None

    def arrived(self) -> bool:
        """Whether the last backward left gradients in the sampled parameters of any rank, as far as is known."""
        ends = [backs[-1].grads for backs in self.backs.values() if backs]
        return not all(ends) or any(norm not in (0.0, NO_TENSOR) for each in ends for norm in each[1::2])

    def is_known_after_backward(self) -> bool:
        if any(part.names != self.names for part in self.parts.values()):
            return False
        wanted = {len(part.grads) for part in self.parts.values()}
        have = {len(backs[-1].grads) if backs else 0 for backs in self.backs.values()}
        return len(wanted) == 1 and have == wanted

    def armed_last(self) -> bool:
        """Whether the last backward before the step exchanged, on each rank."""
        return all(backs and backs[-1].armed for backs in self.backs.values())

    def hyper(self) -> list[tuple[str, dict[int, object]]]:
        """Numbers of the optimizer that differ: name, rank → value."""
        of = {rank: dict(step.hyper) for rank, step in self.steps.items()}
        names = dict.fromkeys(name for each in of.values() for name in each)
        return [
            (name, {rank: each.get(name) for rank, each in of.items()})
            for name in names
            if len({repr(each.get(name)) for each in of.values()}) > 1
        ]


@dataclass
class Replica:
    """One model on the ranks of its group."""

    kind: str
    group: tuple[int, ...]
    facts: dict[int, ModelFacts]
    records: dict[int, RankRecord]

    @property
    def title(self) -> str:
        return next(iter(self.facts.values())).title

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.facts)

    def is_whole(self) -> bool:
        """Whether every rank of the group has left a record."""
        return set(self.group) == set(self.facts)

    def place(self, rank: int, number: int) -> Place:
        return self.records[rank].at(number)

    def any_place(self, numbers: Mapping[int, int]) -> Place:
        rank = min(numbers)
        return self.place(rank, numbers[rank])

    @cached_property
    def training(self) -> dict[int, list[Forward]]:
        """Its forwards with gradients."""
        return {
            rank: [f for f in record.forwards if f.model == self.facts[rank].number and f.training]
            for rank, record in self.records.items()
        }

    def side_by_side(self) -> list[dict[int, Forward]]:
        """The n-th forward with gradients of each rank; none if their numbers differ, as where one evaluates so."""
        counts = {len(each) for each in self.training.values()}
        if max(counts) - min(counts) > 2 * any(record.ended for record in self.records.values()):
            return []
        return [dict(zip(self.training, row, strict=True)) for row in zip(*self.training.values(), strict=False)]

    def calls(self, what: str, rank: int) -> list[CalledFunction]:
        return [each for each in self.records[rank].calls if each.what == what]

    @cached_property
    def optimizers(self) -> dict[int, list[int]]:
        """Rank → numbers of the optimizers that have moved the model, in order."""
        return {
            rank: list(dict.fromkeys(
                s.optimizer for s in record.steps if any(p.model == self.facts[rank].number for p in s.parts)
            ))
            for rank, record in self.records.items()
        }  # fmt: skip

    @cached_property
    def counts(self) -> dict[int, int]:
        """Rank → how many steps have moved the model."""
        return {
            rank: sum(self.records[rank].step_counts.get(o, 0) - self._first(rank, o) for o in some)
            for rank, some in self.optimizers.items()
        }

    def _first(self, rank: int, optimizer: int) -> int:
        """The number of an optimizer's first step that moved the model: steps before DDP was made are a rank's own."""
        return next((s.number for s in self.records[rank].steps if s.optimizer == optimizer), 0)

    @cached_property
    def steps(self) -> list[AlignedStep]:
        """Steps that all ranks have made, of which all parts are known."""
        by: dict[int, dict[tuple[int, int], OptimizerStep]] = {}
        for rank, record in self.records.items():
            order = {number: (i, self._first(rank, number)) for i, number in enumerate(self.optimizers[rank])}
            numbered = [(*order[s.optimizer], s) for s in record.steps if s.optimizer in order]
            by[rank] = {(i, s.number - first): s for i, first, s in numbered}
        common = [key for key in by[min(by)] if all(key in each for each in by.values())]
        found: list[AlignedStep] = []
        since = dict.fromkeys(by, 0)
        for key in common:
            steps = {rank: each[key] for rank, each in by.items()}
            parts = {rank: self._part(rank, step) for rank, step in steps.items()}
            some = {rank: part for rank, part in parts.items() if part is not None}
            if len(some) == len(steps):
                found.append(self._aligned(len(found), steps, some, since))
                since = {rank: step.at for rank, step in steps.items()}
        if any(facts.joins for facts in self.facts.values()):  # a rank without batches steps by others' gradients
            found = [step for step in found if all(step.backs.values())]
        return found

    def _part(self, rank: int, step: OptimizerStep, model: int | None = None) -> Part | None:
        number = self.facts[rank].number if model is None else model
        return next((part for part in step.parts if part.model == number), None)

    def _aligned(
        self, number: int, steps: dict[int, OptimizerStep], parts: dict[int, Part], since: dict[int, int]
    ) -> AlignedStep:
        def between(rank: int, facts: Sequence[Backward] | Sequence[Past]) -> list[Backward | Past]:
            own = self.facts[rank].number
            return [f for f in facts if f.model == own and since[rank] < f.at < steps[rank].at]

        backs = {rank: between(rank, self.records[rank].backwards) for rank in steps}
        pasts = {rank: between(rank, [p for p in self.records[rank].past if p.used]) for rank in steps}
        made = AlignedStep(number, steps, parts, backs, pasts, since)  # type: ignore[arg-type]
        for rank, step in steps.items():
            ended = made.backs[rank][-1].ended if made.backs[rank] else 0
            if ended:
                made.again[rank] = [c for c in self.calls("backward", rank) if ended < c.at < step.at]
        return made

    def beside(self, step: AlignedStep) -> dict[int, Part]:
        """The part of a step that no model knows."""
        found = {rank: self._part(rank, s, BESIDE) for rank, s in step.steps.items()}
        return {rank: part for rank, part in found.items() if part is not None}


def exempt(replica: Replica) -> bool:
    """Whether gradients differ by design: by a hook, or as the program makes parameters equal again itself."""
    pairs = zip(replica.steps, replica.steps[1:], strict=False)
    averages = any(a.after is not None and a.names == b.earlier and b.before is None for a, b in pairs)
    return averages or any(facts.hook.endswith(BY_DESIGN) for facts in replica.facts.values())


def shown_steps(some: list[AlignedStep], replica: Replica) -> str:
    first = some[0]
    return (
        f"gradients differed at {len(some)} of {counted(len(replica.steps), 'optimizer step')}, first at step "
        f"{first.number}, {first.grads.words}"  # type: ignore[union-attr]
    )


@dataclass
class RanksView:
    """All ranks. same_input: the program's ranks are to see the same input."""

    records: dict[int, RankRecord]
    same_input: bool = False

    @cached_property
    def replicas(self) -> list[Replica]:
        """Models of groups with several ranks, whose ranks have all left a record."""
        found: dict[tuple[str, tuple[int, ...], int], dict[int, ModelFacts]] = defaultdict(dict)
        for rank, record in sorted(self.records.items()):
            seen: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
            for facts in record.models:
                key = facts.kind, facts.group
                found[(*key, seen[key])][rank] = facts
                seen[key] += 1
        made = [
            Replica(kind, group, facts, {rank: self.records[rank] for rank in facts})
            for (kind, group, _), facts in found.items()
        ]
        return [each for each in made if len(each.group) > 1 and each.is_whole()]

    @property
    def ended_well(self) -> bool:
        return not any(record.ended for record in self.records.values())

    @property
    def trains(self) -> bool:
        """Whether any optimizer made a step: a program that only measures may repeat its data."""
        return any(any(record.step_counts.values()) for record in self.records.values())

    def passes(self, replica: Replica) -> list[dict[int, Pass]]:
        """Iterations over loaders that trained a model, side by side: the n-th of each rank."""
        own = {
            rank: [p for p in record.passes if replica.facts[rank].number in p.models and p.batches]
            for rank, record in replica.records.items()
        }
        return [dict(zip(own, some, strict=True)) for some in zip(*own.values(), strict=False)]

    def evaluations(self) -> list[dict[int, Pass]]:
        """Iterations over loaders that never trained anything, side by side."""
        trained = {rank: {p.loader for p in record.passes if p.models} for rank, record in self.records.items()}
        own = {r: [p for p in record.passes if p.loader not in trained[r]] for r, record in self.records.items()}
        if len({tuple(p.loader for p in some) for some in own.values()}) != 1:
            return []
        return [dict(zip(own, some, strict=True)) for some in zip(*own.values(), strict=False)]


def place_of(view: RanksView, some: Mapping[int, Pass]) -> Place:
    """The line that iterates over a loader."""
    rank = min(some)
    return view.records[rank].at(some[rank].place)
