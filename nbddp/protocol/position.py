"""Where a rank is, as its worker says."""

from __future__ import annotations

from dataclasses import dataclass

Place = tuple[str, int, str]  # file, line, function


@dataclass(frozen=True)
class CalledFrom:
    """The call of torch's that an exception came out of; group, sequence: of a collective, if they are known."""

    op: str
    kind: str
    peer: int | None = None
    group: str = ""
    sequence: int = 0
