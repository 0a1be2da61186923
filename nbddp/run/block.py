"""The rank-ordered block that a cell leaves behind: outputs of all ranks → a list of pieces.

Ranks whose whole output is equal are folded into one section (`ranks 0–3`). Every line of
text carries its rank in a column of its own, so that the block reads the same in every
front end, in a saved notebook and in a plain terminal. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nbddp.plan.topology import rank_words
from nbddp.run.collect import Display, RankOutput, Text

BAR = " │ "
RICH = ("text/html", "text/markdown", "text/latex", "application/")


@dataclass(frozen=True)
class Print:
    """Text for `stream` ("stdout" or "stderr")."""

    stream: str
    text: str


@dataclass(frozen=True)
class Show:
    """A mimebundle to display."""

    data: dict[str, Any]
    metadata: dict[str, Any]


Piece = Print | Show


def block(outputs: Sequence[RankOutput]) -> list[Piece]:
    """Pieces in rank order; empty if no rank has shown anything."""
    sections = fold(outputs)
    width = max((len(label) + _mark_width(out) for label, out in sections), default=0)
    pieces: list[Piece] = []
    for label, out in sections:
        for item in out.items:
            pieces += _text(label, width, item, out) if isinstance(item, Text) else _display(label, width, item)
    return list(_joined(pieces))


def fold(outputs: Sequence[RankOutput]) -> list[tuple[str, RankOutput]]:
    """(label, one output of the group) for groups of ranks with equal output, silent ranks left out."""
    groups: dict[object, list[RankOutput]] = {}
    for out in sorted(outputs, key=lambda o: o.rank):
        if out.items:
            groups.setdefault(out.print_of(), []).append(out)
    return [(rank_words(o.rank for o in group), group[0]) for group in groups.values()]


def labelled(label: str, width: int, lines: Iterable[str]) -> str:
    """Lines with the label in a column before the first, and an empty column before the rest."""
    rows = []
    for i, line in enumerate(lines):
        rows.append(f"{label if i == 0 else '':<{width}}{BAR}{line}\n")
    return "".join(rows)


def _mark_width(out: RankOutput) -> int:
    return max(len(_mark(item)) for item in out.items)


def _mark(item: Text | Display) -> str:
    if isinstance(item, Text):
        return " stderr" if item.stream == "stderr" else ""
    return " Out" if item.kind == "result" else ""


def _text(label: str, width: int, item: Text, out: RankOutput) -> list[Piece]:
    head, left_out, tail = item.lines()
    lines = list(head)
    if left_out:
        lines.append(f"… {left_out:,} lines left out; all of it: {out.log}")
    lines += tail
    return [Print(item.stream, labelled(label + _mark(item), width, lines))] if lines else []


def _display(label: str, width: int, item: Display) -> list[Piece]:
    text = str(item.data.get("text/plain", ""))
    piece = Print("stdout", labelled(label + _mark(item), width, text.splitlines() or [""]))
    return [piece, Show(item.data, item.metadata)] if is_rich(item.data) else [piece]


def is_rich(data: dict[str, Any]) -> bool:
    """True if there is more to show than text."""
    return any(kind.startswith(("image/", *RICH)) for kind in data)


def _joined(pieces: list[Piece]) -> Iterable[Piece]:
    """Neighbouring prints of one stream as one."""
    held: Print | None = None
    for piece in pieces:
        if held is not None and isinstance(piece, Print) and piece.stream == held.stream:
            held = Print(held.stream, held.text + piece.text)
            continue
        if held is not None:
            yield held
        held = piece if isinstance(piece, Print) else None
        if held is None:
            yield piece
    if held is not None:
        yield held
