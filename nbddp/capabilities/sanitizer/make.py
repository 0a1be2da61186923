"""Findings from what a rule has seen. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nbddp.capabilities.sanitizer.findings import Finding
from nbddp.capabilities.sanitizer.recording import NOWHERE, Place
from nbddp.capabilities.sanitizer.table import KINDS


@dataclass(frozen=True)
class Seen:
    """A finding and what it is about: findings about one thing explain each other."""

    finding: Finding
    about: object = None


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
