"""The text of a proof: a verdict with its evidence, the cause if one is known, and the limits of the proof. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import Literal

from nbddp.capabilities.prove.judge import GROWS, Comparison, Deviation, compared, known_factor, narrowest
from nbddp.capabilities.prove.plan import LATE, UNFIT, CopyAnswer, OneProcess, Plan, StepFacts
from nbddp.launch.topology import counted
from nbddp.protocol.codec import Json

Verdict = Literal["proven", "differs", "not known"]
CLOSED = ("Connection closed", "Connection reset", "closed by peer", "Broken pipe", "Socket closed")
HOOKS = {"float16": ("fp16",), "bfloat16": ("bf16",)}  # words in names of hooks that compress to these
NO_ANSWER = CopyAnswer()
UNSEEN = "a mistake that one process makes as well, and anything outside this step: loaders, schedulers, later steps"


@dataclass(frozen=True)
class Attempt:
    """What the copies of all ranks have found by one plan. no_double: why float64 was not possible."""

    plan: Plan
    answers: Mapping[int, CopyAnswer]
    no_double: str = ""

    @property
    def error(self) -> str:
        """The error of the rank that failed by itself, or of the one process; empty if none failed."""
        found = {r: a.error for r, a in sorted(self.answers.items()) if a.error}
        own = [text for text in found.values() if not any(words in text for words in CLOSED)]
        if found:
            return (own or list(found.values()))[0].removeprefix("ranks: ")
        return self._one.error

    @property
    def in_one(self) -> bool:
        return not any(a.error for a in self.answers.values())

    @property
    def kind(self) -> str:
        """LATE or UNFIT, if a copy reports that."""
        return next((a.kind for a in self.answers.values() if a.kind in (LATE, UNFIT)), "")

    @property
    def _one(self) -> OneProcess:
        return (self.answers.get(0, NO_ANSWER).one) or OneProcess()

    @cached_property
    def comparison(self) -> Comparison:
        hooks = [kind for kind, words in HOOKS.items() if any(w in h.lower() for h in self.hooks for w in words)]
        dtype = narrowest([*self._seen("dtypes"), *hooks], self.plan.double)
        return compared(self.answers[0].pairs, dtype)

    def _seen(self, what: str) -> list[str]:
        return list(getattr(self._one.seen, what))

    def _seen_on_ranks(self, what: str) -> list[str]:
        return sorted({w for a in self.answers.values() for w in getattr(a.seen, what)})

    @property
    def sizes(self) -> list[int]:
        return list(self._one.sizes)

    @property
    def statistics(self) -> bool:
        return bool(self._seen("statistics"))

    @property
    def random(self) -> list[str]:
        return sorted({*self._seen("random"), *self._seen_on_ranks("random")})

    @property
    def dropout(self) -> list[str]:
        return sorted({*self._seen("dropout"), *self._seen_on_ranks("dropout")})

    @property
    def precision(self) -> list[str]:
        return self._seen_on_ranks("precision")

    @property
    def hooks(self) -> list[str]:
        return self._seen_on_ranks("hooks")

    @property
    def backwards(self) -> tuple[int, int]:
        """Calls of backward on rank 0 and in one process."""
        return self.answers[0].seen.backwards, self._one.seen.backwards

    @property
    def cuts(self) -> list[str]:
        return self._seen_on_ranks("cuts")

    @property
    def before(self) -> list[str]:
        """Parameters that differed between the ranks before the step."""
        return list(self.answers[0].before)

    @property
    def moved_alone(self) -> list[str]:
        return sorted({n for a in self.answers.values() for n in a.alone if not n.startswith("gradient ")})

    @property
    def alone(self) -> list[str]:
        """Gradients that some ranks have and others have not."""
        return sorted({n for a in self.answers.values() for n in a.alone if n.startswith("gradient ")})


def is_as_before(first: Attempt, turned: Attempt) -> bool:
    """Whether one process has made the same of the samples in another order. Both were compared with the same ranks."""
    limit = 10 * first.comparison.allowed
    pairs = list(zip(first.answers[0].pairs, turned.answers[0].pairs, strict=False))
    size = max((max(a.square, a.own) for a, _ in pairs), default=0.0)
    return all(abs(a.dot - b.dot) + abs(a.square - b.square) <= limit * size for a, b in pairs)


@dataclass(frozen=True)
class Proof:
    """The answer of `%ddp prove`; `str()` is what it says.

    - verdict: `proven`, `differs` or `not known`. ranks, samples: what was compared with one process.
    - largest, allowed: the largest relative difference of a gradient, and what rounding in `dtype` explains.
    - first: the first parameter that differs. factor, off: N ranks to one process, of all gradients together; None if
      they are equal. parameter_factor, parameter_off: the same of the first parameter's kind.
    - cause: what the difference is known to mean; empty: not known. told: how the copies differ from the program.
    """

    verdict: Verdict
    headline: str
    step: str
    ranks: int
    samples: int
    dtype: str
    largest: float
    allowed: float
    first: str = ""
    factor: float | None = None
    off: float | None = None
    cause: str = ""
    told: tuple[str, ...] = ()
    unseen: str = UNSEEN
    data: Json = field(default_factory=dict, repr=False)

    @property
    def proven(self) -> bool:
        return self.verdict == "proven"

    def _lines(self) -> list[str]:
        return [self.headline, *([self.cause] if self.cause else []), *self.told, f"Not seen: {self.unseen}."]

    def __str__(self) -> str:
        first, *rest = self._lines()
        return "\n".join([first, *(f"  {line}" for line in rest)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        first, *rest = self._lines()
        words = "".join(f"<li>{escape(line)}</li>" for line in rest)
        return f"<div><b>{escape(first)}</b><ul style='margin:0'>{words}</ul></div>"

    def to_dict(self) -> Json:
        """Everything as plain data, for JSON."""
        names = ("verdict", "headline", "step", "ranks", "samples", "dtype", "largest", "allowed", "first", "factor",
                 "off", "cause", "unseen")  # fmt: skip
        return {**{name: getattr(self, name) for name in names}, "told": list(self.told), **self.data}


def proof_of(
    attempt: Attempt,
    tried: Sequence[tuple[str, Attempt]],
    facts: Mapping[int, StepFacts],
    *,
    batch_facts: Mapping[str, Sequence[int]],
    ranks: int,
) -> Proof:
    """The words for what was found. tried: what was changed, one thing at a time, and what came of it."""
    found = attempt.comparison
    verdict, headline, cause = _judged(attempt, tried, facts, ranks)
    whole = found.whole
    return Proof(
        verdict=verdict, headline=headline, step=attempt.plan.step, ranks=ranks, samples=sum(attempt.sizes),
        dtype=found.dtype, largest=found.largest, allowed=found.allowed,
        first=found.deviation.first if found.deviation else "",
        factor=whole.factor if whole else None, off=whole.off if whole else None,
        cause=cause, told=tuple(_told(attempt, batch_facts)),
        data={"batches": {n: list(s) for n, s in batch_facts.items()}},
    )  # fmt: skip


def _judged(
    attempt: Attempt, tried: Sequence[tuple[str, Attempt]], facts: Mapping[int, StepFacts], ranks: int
) -> tuple[Verdict, str, str]:
    found = attempt.comparison
    named = counted(ranks, "rank")
    if attempt.before:
        cure = "The replicas have drifted, so no step of theirs can equal one process; %ddp compare shows by how much."
        many = f"{counted(len(attempt.before), 'parameter')} of the ranks differ before the step"
        return "not known", f"not known: {many}, first {attempt.before[0]}", cure
    if not found.norm > 0 and not found.missing:
        why = "The step has left no gradient in the parameters that it reaches, and has moved none; or all are zero."
        return "not known", f"not known: {named} and one process show no gradient to compare", why
    if found.equal and not attempt.alone and attempt.moved_alone:
        text = f"{attempt.moved_alone[0].partition(' ')[2]} is moved on some ranks, and not on others"
        return "differs", f"differs: gradients are equal, but {text}", "Cause not known."
    if found.equal and not attempt.alone:
        return "proven", _proven(attempt, named), ""
    if attempt.alone or found.missing:
        return _unpaired(attempt, found, named)
    if found.updates is not None and found.updates.spread > found.updates.off:
        many = f"what the optimizer makes of {found.updates.first} differs between the ranks by"
        text = f"gradients are equal, but {many} {_percent(found.updates.spread)}"
        known = (
            "Known causes: a learning rate, or a state of the optimizer, that is a rank's own; an earlier update "
            "in the step whose gradients were not averaged."
        )
        return "differs", f"differs: {text}", known
    if found.updates is not None:
        off = f"{_percent(found.updates.off)} off"
        text = f"gradients are equal, but what the optimizer makes of {found.updates.first} is {off}"
        return "differs", f"differs: {text}", "Cause not known: something after backward differs between the ranks."
    assert found.deviation is not None
    return _deviating(attempt, tried, facts, ranks, found.deviation)


def _proven(attempt: Attempt, named: str) -> str:
    found = attempt.comparison
    sizes = f"largest difference {found.largest:.1g}, expected from rounding at most {found.allowed:.0e}"
    return f"proven: {named} equal one process with {counted(sum(attempt.sizes), 'sample')} ({sizes} in {found.dtype})"


def _unpaired(attempt: Attempt, found: Comparison, named: str) -> tuple[Verdict, str, str]:
    if attempt.alone:
        first = attempt.alone[0].partition(" ")[2]
        return (
            "differs", f"differs: {first} has a gradient on some ranks, and none on others",
            "Its gradients cannot have been averaged: the ranks did not run the same step.",
        )  # fmt: skip
    name, where = found.missing[0]
    kind, _, first = name.partition(" ")
    has = "a gradient" if kind == "gradient" else "an update"
    lacks = {"ranks": f"none on {named}", "one": "none in one process"}.get(where, "another shape in one process")
    words = f"{has} in one process" if where == "ranks" else f"{has} on {named}"
    return "differs", f"differs: {first} has {words}, and {lacks}", "Cause not known."


def _apart(headline: str, attempt: Attempt, deviation: Deviation) -> tuple[Verdict, str, str]:
    """The ranks' own gradients differ."""
    apart = f"{deviation.first}'s gradients differ between the ranks by {_percent(deviation.spread)}"
    if not deviation.constant:
        return "differs", headline, (
            f"{apart}. They were not averaged, or changed afterwards. Known causes: a forward or loss that bypasses "
            "DDP (ddp.module), no_sync, or a parameter that DDP did not know when it was created."
        )  # fmt: skip
    return "differs", headline if deviation.off > attempt.comparison.allowed else f"differs: {apart}", (
        f"On rank 0 they are {deviation.factor:.3g} × those of one process. Known causes: an edit after backward "
        "by a rank's own numbers, as clipping by its own loss."
    )  # fmt: skip


def _deviating(
    attempt: Attempt,
    tried: Sequence[tuple[str, Attempt]],
    facts: Mapping[int, StepFacts],
    ranks: int,
    deviation: Deviation,
) -> tuple[Verdict, str, str]:
    headline = f"differs: {_by_how_much(deviation, ranks)}"
    if deviation.spread > attempt.comparison.allowed:
        return _apart(headline, attempt, deviation)
    why, cure = _untold(attempt, tried, ranks, deviation)
    if why:
        return "not known", f"not known: {why}", cure
    row = known_factor(deviation, len(attempt.sizes))
    if row is not None:
        grows = row.name == "1/N" and any(n == "once" and not a.error and a.comparison.equal for n, a in tried)
        return "differs", headline, f"Known meaning of {row.name}: {GROWS if grows else row.meaning}."
    return "differs", headline, _cause(attempt, tried, facts, deviation)


def _untold(
    attempt: Attempt, tried: Sequence[tuple[str, Attempt]], ranks: int, deviation: Deviation
) -> tuple[str, str]:
    """Why a difference tells nothing of this step, and what to change; empty if it does."""
    if attempt.random and known_factor(deviation, len(attempt.sizes)) is None:
        drawn = ", ".join(attempt.random)
        return (
            f"the step draws random numbers ({drawn}), on each rank and in one process others",
            "Draw none in the step, or pass them as part of the batch. Only dropout is switched off here.",
        )
    ours, theirs = attempt.backwards
    if ours != theirs:
        return (
            f"the step calls backward {ours} times on a rank and {theirs} times in one process",
            f"{_by_how_much(deviation, ranks).capitalize()}, which proves nothing here. Choose a number of "
            "micro-batches that does not depend on the batch: x.chunk(4), and not x.split(8).",
        )
    turned = next((other for name, other in tried if name == "turned"), None)
    if turned is not None and (turned.error or not is_as_before(attempt, turned)):
        return (
            "in one process, the gradient depends on the order of the samples",
            "The step may use a fixed number of them (x[:8] of a batch that has more there), or what is in the first "
            "ones. Use all samples of its batch in the same way.",
        )
    return "", ""


def _by_how_much(deviation: Deviation, ranks: int) -> str:
    """Of which parameters, and by how much."""
    more = f" and {deviation.count - 1} more of {deviation.of}" if deviation.count > 1 else ""
    side = f"on {counted(ranks, 'rank')}"
    if deviation.constant:
        return f"the gradient of {deviation.first}{more} is {deviation.factor:.3g} × that of one process {side}"
    return (
        f"the gradient of {deviation.first}{more} is {_percent(deviation.off)} off that of one process {side} "
        f"({deviation.factor:.3g} × along it)"
    )


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %" if part >= 0.1 else f"{100 * part:.2g} %"


def _cause(
    attempt: Attempt, tried: Sequence[tuple[str, Attempt]], facts: Mapping[int, StepFacts], deviation: Deviation
) -> str:
    """By what made N ranks and one process equal, or by what was seen."""
    cures = [name for name, other in tried if not other.error and other.comparison.equal]
    sizes = " and ".join(map(str, attempt.sizes))
    if "sizes" in cures:
        return (
            f"Cause: the ranks have {sizes} samples, and the mean of their means weighs samples unequally; with "
            "batches of one size N ranks equal one process. Weigh each rank's loss by its samples × ranks / all "
            "samples, or drop the rest (drop_last)."
        )
    if "statistics" in cures:
        return (
            "Cause: BatchNorm normalizes by each rank's own samples; with running statistics N ranks equal one "
            "process. torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before DDP shares them on GPUs."
        )
    counts = _counts(facts)
    if "batches" in cures and not attempt.statistics:
        if not counts:
            return (
                "With the same batch on all ranks, the ranks equal one process, so the step is not a plain mean over "
                "samples. Usual causes: a mean weighted within each batch (class weights, masks), a batch's own "
                "statistics, clipping before the average."
            )
        return (
            "Cause: a mean of means. With the same batch on all ranks, the ranks equal one process, so their own "
            f"batches have unequal weights ({counts}). Divide the sum of each rank's loss by the mean number that "
            "counts per rank (all_reduce it)."
        )
    return _seen_cause(attempt, "batches" in cures, counts, deviation)


def _seen_cause(attempt: Attempt, equal_batches: bool, counts: str, deviation: Deviation) -> str:
    """Without an attempt that removes the difference alone."""
    if equal_batches and attempt.statistics and not counts and len(set(attempt.sizes)) == 1:
        return (
            "Known causes: batch statistics (batch_norm) are those of each rank's own samples. With one batch on "
            "all ranks they equal one process, and batches are of one size."
        )
    if attempt.cuts:
        called = ", ".join(attempt.cuts)
        return (
            f"Known causes: the step calls {called}, whose result has no gradient, so what others do with a "
            "rank's values gives none. Gather by torch.distributed.nn.functional.all_gather, which has one."
        )
    seen = [f"the ranks have {' and '.join(map(str, attempt.sizes))} samples"] if len(set(attempt.sizes)) > 1 else []
    seen += ["batch statistics are those of each rank"] if attempt.statistics else []
    seen += [counts] if counts else []
    seen += [f"the hook {attempt.hooks[0]} works on the gradients, and some approximate them"] if attempt.hooks else []
    factor = f"no known meaning fits the factor {deviation.factor:.3g}" if deviation.constant else ""
    words = "; ".join([*([factor] if factor else []), *seen])
    return f"Cause not known{f' ({words})' if words else ''}."


def _counts(facts: Mapping[int, StepFacts]) -> str:
    """Of targets and masks: how many entries count on each rank, where these are not as many."""
    held = [facts[rank].batches for rank in sorted(facts)]
    for name, batch in held[0].items():
        for path in batch.counted:
            numbers = [h[name].counted.get(path) if name in h else None for h in held]
            if len(set(numbers)) > 1 and None not in numbers:
                return f"of {name}{path} {' and '.join(map(str, numbers))} entries count"
    return ""


def _told(attempt: Attempt, batch_facts: Mapping[str, Sequence[int]]) -> list[str]:
    """How the copies and the union were made, where that matters."""
    joined = ", ".join(f"{name} {'+'.join(map(str, sizes))}" for name, sizes in batch_facts.items())
    lines = [f"One process got {joined}, joined along dimension 0, on a copy of rank 0; gradients began as None."]
    if attempt.plan.ones:
        numbers = ", ".join(f"{name} = {value}" for name, value in attempt.plan.ones.items())
        lines.append(f"There {numbers}.")
    if attempt.no_double:
        lines.append(f"In the step's own types, since float64 was not possible: {attempt.no_double}")
    together = attempt.plan.leaders
    if len(set(together)) < len(together):
        lines.append("Ranks that hold parts of one model have one batch, which counts once; N is the number of models.")
    if attempt.precision:
        lines.append(f"The {attempt.precision[0]} was off on the ranks.")
    if attempt.dropout:
        lines.append(f"Dropout was off on all sides ({'; '.join(attempt.dropout)}).")
    if attempt.random and attempt.comparison.equal:
        lines.append(f"The step draws random numbers ({', '.join(attempt.random)}), which made no difference.")
    return lines
