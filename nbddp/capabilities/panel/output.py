"""The output of the ranks, rank by rank: which lines match a search, and which of them differ. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from nbddp.output.buffer import Display, Elision, Item, RankOutput, model_id

MOST = 600  # lines of all ranks together
LEAST = 20  # of each
WIDEST = 400  # characters of a line
ALL = -1  # for the rank: all of them, side by side


@dataclass(frozen=True)
class Output:
    """One rank's: lines as (stream, text), the newest last, and what still moves: progress bars, unfinished lines."""

    rank: int
    lines: tuple[tuple[str, str], ...] = ()
    moving: tuple[str, ...] = ()


@dataclass(frozen=True)
class Showing:
    """What of it is to be seen. rank: one alone, or ALL. search: lines with this text, in any case; differences:
    without the lines that all ranks have."""

    rank: int = ALL
    search: str = ""
    differences: bool = False


def outputs(found: Sequence[RankOutput]) -> tuple[Output, ...]:
    """What the ranks of a run have shown so far."""
    most = max(LEAST, MOST // max(1, len(found)))
    return tuple(Output(out.rank, tuple(_lines(out)[-most:]), tuple(map(_short, out.moving()))) for out in found)


def _lines(out: RankOutput) -> list[tuple[str, str]]:
    moves = [id(view) for view in out.views]
    return [(stream, _short(line)) for item in out.items if id(item) not in moves for stream, line in _of(item, out)]


def _of(item: Item, out: RankOutput) -> list[tuple[str, str]]:
    if isinstance(item, Elision):
        return [("stdout", item.describe())]
    if isinstance(item, Display):
        said = out.said(item.data) if model_id(item.data) else None
        text = str(item.data.get("text/plain", "")) if said is None else said
        return [("stdout", line) for line in text.splitlines()]
    head, left_out, tail = item.lines()
    gap = [("stdout", f"… {left_out:,} lines omitted; %ddp log has them")] if left_out else []
    return [*head, *gap, *tail]


def _short(line: str) -> str:
    return line if len(line) <= WIDEST else f"{line[:WIDEST]} …"


def chosen(found: Sequence[Output], showing: Showing) -> list[tuple[Output, int]]:
    """The outputs to be seen, with the lines to be seen, and how many of each are hidden."""
    common = _common(found) if showing.differences else Counter[tuple[str, str]]()
    wanted = [out for out in found if showing.rank in (ALL, out.rank)]
    return [_seen(out, showing.search.casefold(), common) for out in wanted]


def _common(found: Sequence[Output]) -> Counter[tuple[str, str]]:
    """Lines that all ranks have, as often as all have them."""
    counts = [Counter(out.lines) for out in found]
    if len(counts) < 2:
        return Counter()
    shared = counts[0]
    for count in counts[1:]:
        shared = shared & count
    return shared


def _seen(out: Output, search: str, common: Counter[tuple[str, str]]) -> tuple[Output, int]:
    left, lines = Counter(common), []
    for line in out.lines:
        if left[line] > 0:
            left[line] -= 1
        elif search in line[1].casefold():
            lines.append(line)
    return Output(out.rank, tuple(lines), out.moving), len(out.lines) - len(lines)
