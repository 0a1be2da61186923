"""From the ranks' records to findings: every rule is tried, effects of a cause that was found are left out. Pure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from nbddp.capabilities.sanitizer.findings import Finding, SanitizerFindings, silence
from nbddp.capabilities.sanitizer.recording import NOWHERE, Place, RankRecord
from nbddp.capabilities.sanitizer.table import KINDS
from nbddp.capabilities.sanitizer.view import RanksView
from nbddp.launch.machine import counted
from nbddp.launch.topology import rank_words
from nbddp.protocol.capability import load

RULES = tuple(
    f"nbddp.capabilities.sanitizer.kinds_{group}:found"
    for group in ("gradients", "drift", "data", "means", "losses", "noise", "modes", "micro_steps", "settings", "mesh")
)


@dataclass(frozen=True)
class Seen:
    """A finding and what it is about: findings about one thing explain each other. failed: of a rule that fails, which
    has no finding."""

    finding: Finding
    about: object = None
    failed: str = ""


Rule = TypeVar("Rule", bound=Callable[..., Iterator[Seen]])


def alone(rule: Rule) -> Rule:
    """A rule whose errors end it, and neither the other rules nor the report."""

    @functools.wraps(rule)
    def tried(*args: Any) -> Iterator[Seen]:
        try:
            yield from rule(*args)
        except Exception as e:
            said = f"the rule {rule.__name__.strip('_')} could not be applied: {type(e).__name__}"
            yield Seen(Finding("", "", (), ""), failed=said)

    return tried  # type: ignore[return-value]


def make(
    kind: str,
    what: str,
    evidence: Sequence[str],
    matters: str,
    place: Place = NOWHERE,
    *,
    about: object = None,
    ranks: Sequence[int] = (),
    cure: str = "",
    ruled_out: Sequence[str] = (),
    known: bool = True,
) -> Seen:
    """A finding of a kind; weight and cure are the table's."""
    row = KINDS[kind]
    return Seen(
        Finding(
            kind, what, tuple(evidence), matters, place, cure or row.cure, known, tuple(ruled_out), tuple(ranks),
            row.weight,
        ),
        about,
    )  # fmt: skip


def judge(
    records: Mapping[int, RankRecord], allow: Sequence[str] = (), same_input: bool = False, missing: Sequence[int] = ()
) -> SanitizerFindings:
    """The findings of one run. missing: ranks that have left no record."""
    tried, failed = applied(RanksView(dict(records), same_input))
    seen = unexplained(tried)
    order = sorted((each.finding for each in seen), key=lambda each: -each.weight)
    shown, quiet = silence(order, allow)
    steps = max((sum(record.step_counts.values()) for record in records.values()), default=0)
    return SanitizerFindings(
        tuple(shown), tuple(quiet), len(records), steps, (*notes(records, missing, same_input), *failed)
    )


def applied(view: RanksView) -> tuple[list[Seen], list[str]]:
    """What the rules see, and a note on each that failed."""
    every = [each for rule in RULES for each in alone(load(rule))(view)]
    failed = [each.failed for each in every if each.failed]
    seen = [each for each in every if not each.failed]
    if failed:  # a cause may be among what was not looked for
        seen = [replace(each, finding=replace(each.finding, ruled_out=())) for each in seen]
    return seen, list(dict.fromkeys(failed))


def unexplained(seen: Sequence[Seen]) -> list[Seen]:
    """Without effects whose cause is among them, about the same model; and each kind once for a model."""
    found: dict[tuple[str, object, object], Seen] = {}
    for each in seen:
        name = each.finding.kind
        if not any(name in KINDS[o.finding.kind].explains and _is_of(o, each) for o in seen if o is not each):
            found.setdefault((name, each.about, each.finding.place), each)
    return list(found.values())


def _is_of(cause: Seen, effect: Seen) -> bool:
    return cause.about == effect.about or cause.about is None or effect.about is None


def notes(records: Mapping[int, RankRecord], missing: Sequence[int], same_input: bool) -> list[str]:
    """What was not seen."""
    found = []
    if missing:
        whose = "its" if len(missing) == 1 else "their"
        found.append(f"{rank_words(list(missing))} left no record, so models of {whose} groups are not compared")
    ended = [rank for rank, record in records.items() if record.ended]
    if ended:
        found.append(f"the program failed on {rank_words(ended)}; findings cover the steps before")
    found += [f"rank {rank}: {record.lost}" for rank, record in records.items() if record.lost]
    dropped = sum(sum(record.dropped.values()) for record in records.values())
    if dropped:
        found.append(f"{counted(dropped, 'later fact')} of a long run were counted, and not compared")
    if same_input:
        found.append("--same-input: inputs are not compared")
    return found
