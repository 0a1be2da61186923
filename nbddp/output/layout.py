"""The rank-ordered block that a cell leaves behind: outputs of all ranks → a list of pieces.

Ranks whose whole output is equal are folded into one section (`ranks 0–3`). Every line of text carries its rank in a
column of its own. So the block reads the same in every front end, in a saved notebook and in a plain terminal. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from nbddp.launch.topology import rank_words
from nbddp.output.buffer import Display, Elision, Ended, Item, RankOutput, Text
from nbddp.protocol.messages import Metadata, MimeBundle

BAR = " │ "
SEEN = ("image/", "text/html", "text/markdown", "text/latex")


@dataclass(frozen=True)
class Print:
    """Text for `stream` ("stdout" or "stderr")."""

    stream: str
    text: str


@dataclass(frozen=True)
class Show:
    """A mimebundle to display."""

    data: MimeBundle
    metadata: Metadata


Piece = Print | Show


def block(outputs: Sequence[RankOutput]) -> list[Piece]:
    """Pieces in rank order; empty if no rank has shown anything."""
    sections = [(rank_words(o.rank for o in group), group) for group in fold(outputs)]
    width = max((len(label) + _mark_width(group[0]) for label, group in sections), default=0)
    pieces: list[Piece] = []
    for label, group in sections:
        for item in group[0].items:
            pieces += _pieces(label, width, item, group[0])
        pieces += _one_of(label, width, group)
    return list(_joined(pieces))


def flat(outputs: Sequence[RankOutput], shown: Callable[[Display], bool]) -> tuple[str, list[Piece]]:
    """The block as one text, where a page shows it; and the displays that it does not show, each under its label."""
    sections = [(rank_words(o.rank for o in group), group) for group in fold(outputs)]
    width = max((len(label) + _mark_width(group[0]) for label, group in sections), default=0)
    lines, more = list[Piece](), list[Piece]()
    for label, group in sections:
        for item in group[0].items:
            if isinstance(item, Display):
                lines += _words(label + _marks(item)[0], width, item)
                more += _display(label + _marks(item)[0], width, item) if is_rich(item.data) and not shown(item) else []
            else:
                lines += _pieces(label, width, item, group[0])
        lines += _one_of(label, width, group)
    return "".join(piece.text for piece in lines if isinstance(piece, Print)), list(_joined(more))


def fold(outputs: Sequence[RankOutput]) -> list[list[RankOutput]]:
    """Groups of ranks with equal output, silent ranks left out."""
    groups: dict[object, list[RankOutput]] = {}
    for out in sorted(outputs, key=lambda o: o.rank):
        if out.items:
            groups.setdefault(out.print_of(), []).append(out)
    return list(groups.values())


def _one_of(label: str, width: int, group: Sequence[RankOutput]) -> list[Piece]:
    """Says that lines which differ among these ranks in their time, process and rank are shown once."""
    words = stamped_words(group)
    return [Print("stdout", labelled(label, width, [words]))] if words else []


def stamped_words(group: Sequence[RankOutput]) -> str:
    """Whose time and process log lines have that are shown once for these ranks; empty if none differs."""
    first, *others = group
    stamped = sum(item.stamped for item in first.items if isinstance(item, Text))
    if not stamped or not others:
        return ""
    lines = "1 log line has" if stamped == 1 else f"{stamped:,} log lines have"
    rest = rank_words(o.rank for o in others)
    return f"… {lines} the time and process of rank {first.rank}; those of {rest}: %ddp log"


def labelled(label: str, width: int, lines: Iterable[str]) -> str:
    """Lines with the label in a column before the first, and an empty column before the rest."""
    rows = []
    for i, line in enumerate(lines):
        rows.append(f"{label if i == 0 else '':<{width}}{BAR}{line}\n")
    return "".join(rows)


def _mark_width(out: RankOutput) -> int:
    return max(len(mark) for item in out.items for mark in _marks(item))


def _marks(item: Item) -> list[str]:
    if isinstance(item, Text):
        return [_mark(name) for name in item.streams]
    return [" Out" if isinstance(item, Display) and item.kind == "result" else ""]


def _mark(stream: str) -> str:
    return " stderr" if stream == "stderr" else ""


def _pieces(label: str, width: int, item: Item, out: RankOutput) -> list[Piece]:
    if isinstance(item, Text):
        return _text(label, width, item, out)
    if isinstance(item, Elision):
        return [Print("stdout", labelled(label, width, [item.describe()]))]
    return _display(label + _marks(item)[0], width, item)


def _text(label: str, width: int, item: Text, out: RankOutput) -> list[Piece]:
    head, left_out, tail = item.lines()
    rows: list[Ended] = list(head)
    if left_out:
        rows.append((head[-1][0], f"… {left_out:,} lines omitted; full output: {out.log}"))
    rows += tail
    return [
        Print(stream, labelled(label + _mark(stream), width, (line for _, line in lines)))
        for stream, lines in groupby(rows, key=lambda row: row[0])
    ]


def _display(label: str, width: int, item: Display) -> list[Piece]:
    """A label, and what is shown; text, which every bundle has for those who see nothing else, where there is no more
    than that."""
    show = Show(item.data, item.metadata)
    if is_seen(item.data):
        return [Print("stdout", f"{label:<{width}}{BAR.rstrip()}\n"), show]
    words = _words(label, width, item)
    return [*words, show] if is_rich(item.data) else words


def _words(label: str, width: int, item: Display) -> list[Piece]:
    """What of a display is text."""
    text = str(item.data.get("text/plain", ""))
    return [Print("stdout", labelled(label, width, text.splitlines() or [""]))]


def is_seen(data: MimeBundle) -> bool:
    """True if every notebook shows more than text: what is for an application, such as a widget, may not be shown."""
    return any(kind.startswith(SEEN) for kind in data)


def is_rich(data: MimeBundle) -> bool:
    """True if there is more to show than text."""
    return any(kind.startswith((*SEEN, "application/")) for kind in data)


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
