"""Which ranks get a row in a figure or table with limited space: those that the text names, then the lowest."""

from __future__ import annotations

from collections.abc import Iterable

MOST = 16  # ranks


def drawn(ranks: Iterable[int], named: Iterable[int] = ()) -> list[int]:
    """At most MOST of these ranks, in order; `named` ones first of all, but no rank that is not there."""
    every = sorted(ranks)
    wanted = [r for r in dict.fromkeys(named) if r in every]
    return sorted([*wanted, *(r for r in every if r not in wanted)][:MOST])


def note(ranks: int, shown: int) -> str:
    """What is said where not all are drawn; empty where all are."""
    return f"{shown} of {ranks} ranks are drawn" if shown < ranks else ""
