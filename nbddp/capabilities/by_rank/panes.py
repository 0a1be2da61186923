"""What a tab shows of ranks: their lines and pictures in order, and how they left the run. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nbddp.analysis.quantities import size
from nbddp.capabilities.by_rank.embedded import applied, embedded
from nbddp.errors import RankStatus
from nbddp.execution.report import raised_words
from nbddp.launch.topology import rank_words
from nbddp.output.buffer import Display, Elision, Item, RankOutput, Text, model_id
from nbddp.output.layout import fold, is_rich, stamped_words
from nbddp.output.page import OutputState
from nbddp.protocol.outcome import RankExit

NOTE, MOVING = "note", "moving"  # beside the streams, kinds of a line: said by nbddp; it may still change
LIVE_LINES, LEAST, MOST = 2000, 5, 200  # lines of all ranks in a live view, and of each at least and at most
WIDEST = 2000  # characters of a line in a live view
BELOW, BELOW_FIGURE = "(displayed below the tabs)", "(a figure, displayed below the tabs)"
LARGE = re.compile("<(img|svg|table|canvas|video|iframe|object)\\b", re.IGNORECASE)
BAD = (RankStatus.FAILED, RankStatus.DIED)


@dataclass(frozen=True)
class Line:
    """kind: a stream, NOTE or MOVING. file: which a note names."""

    kind: str
    text: str
    file: Path | None = None


@dataclass(frozen=True)
class Rich:
    html: str

    @property
    def is_large(self) -> bool:
        """Whether it is more than words."""
        return LARGE.search(self.html) is not None


@dataclass(frozen=True)
class Pane:
    """Of ranks whose output is equal. mark: how they failed; lines: how many they have printed."""

    ranks: tuple[int, ...]
    parts: tuple[Line | Rich, ...]
    lines: int
    mark: str = ""

    @property
    def name(self) -> str:
        return rank_words(self.ranks)

    def has_large(self) -> bool:
        return any(isinstance(part, Rich) and part.is_large for part in self.parts)

    def is_cut(self) -> bool:
        """Whether the rank has printed more lines than are here."""
        return self.lines > sum(isinstance(part, Line) and part.kind in ("stdout", "stderr") for part in self.parts)

    def has_below(self) -> bool:
        """Whether a figure that an application shows follows the tabs, which show or hide it."""
        return any(isinstance(part, Line) and (part.kind, part.text) == (NOTE, BELOW_FIGURE) for part in self.parts)


def kept(state: OutputState) -> list[Pane]:
    """The panes of a run that has ended: equal ranks share one, and silent ranks have one if they failed."""
    found = []
    silent = [[out] for out in state.outputs if not out.items and _mark(state.ended, out.rank)]
    for group in [*fold(state.outputs), *silent]:
        marks: dict[str, list[RankOutput]] = {}
        for out in group:
            marks.setdefault(_mark(state.ended, out.rank), []).append(out)
        for mark, outs in marks.items():
            stamped = stamped_words(outs)
            parts = [part for item in outs[0].items for part in _parts(item, outs[0])]
            parts += [Line(NOTE, stamped)] * bool(stamped)
            found.append(Pane(tuple(o.rank for o in outs), tuple(parts), printed(outs[0]), mark))
    return sorted(found, key=lambda pane: pane.ranks)


def live(state: OutputState) -> list[Pane]:
    """The panes while a run goes on: one for each rank that has shown something, with its newest lines."""
    shown = [out for out in state.outputs if not out.silent]
    most = max(LEAST, min(MOST, LIVE_LINES // max(1, len(shown))))
    return [Pane((out.rank,), _newest(out, most), printed(out), _mark(state.ended, out.rank)) for out in shown]


def printed(out: RankOutput) -> int:
    """Complete lines of text that a rank has printed; those between displays that are not kept are not among them."""
    return sum(item.count for item in out.items if isinstance(item, Text))


def _mark(ended: Mapping[int, RankExit], rank: int) -> str:
    left = ended.get(rank)
    if left is None or left.status not in BAD:
        return ""
    return f"raised {raised_words(left.chain[-1])}" if left.chain else left.status.value


def _parts(item: Item, out: RankOutput) -> list[Line | Rich]:
    if isinstance(item, Elision):
        return [Line(NOTE, item.describe())]
    if isinstance(item, Text):
        return [*_lines(item, out)]
    html = embedded(item)
    if html is not None:
        return [Rich(html)]
    return [*(Line("stdout", text) for text in _words(item)), *[Line(NOTE, _below(item))] * is_rich(item.data)]


def _below(display: Display) -> str:
    """Where the display is. A widget may be a bar of a line, and Markdown words: neither is large by itself."""
    return BELOW_FIGURE if applied(display.data) and not model_id(display.data) else BELOW


def _words(display: Display) -> list[str]:
    return str(display.data.get("text/plain", "")).splitlines()


def _lines(item: Text, out: RankOutput) -> list[Line]:
    head, left_out, tail = item.lines()
    rows = [Line(stream, text) for stream, text in head]
    if left_out:
        held = size(min(out.file.written, out.file.most))
        rows.append(Line(NOTE, f"… {left_out:,} lines omitted; full output ({held}): ", out.log))
    return rows + [Line(stream, text) for stream, text in tail]


def _newest(out: RankOutput, most: int) -> tuple[Line, ...]:
    """The last lines, and those that still change. Pictures come when the run has ended."""
    moves, rows = [id(view) for view in out.views], list[Line]()
    for item in reversed([item for item in out.items if id(item) not in moves]):
        if len(rows) >= most:
            break
        rows = [*_short(item)][-most:] + rows
    moving = [Line(MOVING, text[:WIDEST]) for text in out.moving()]
    return (*rows[-most:], *moving)


def _short(item: Item) -> Sequence[Line]:
    if isinstance(item, Elision):
        return [Line(NOTE, item.describe())]
    if isinstance(item, Display):
        return [] if model_id(item.data) else [Line(NOTE, text[:WIDEST]) for text in _words(item)]
    through = item.count > len(item.head) + len(item.tail)  # lines are left out between these
    return [Line(stream, text[:WIDEST]) for stream, text in ([] if through else item.head) + [*item.tail]]


# -- lines that not every pane has -----------------------------------------------------------------

LISTED = 200  # lines that are listed


def differences(panes: Sequence[Pane]) -> list[tuple[str, list[Line]]]:
    """Of each pane its name and the lines that not all panes have, as often as it has them more often than all have."""
    counts = [Counter((line.kind, line.text) for line in _texts(pane)) for pane in panes]
    common = counts[0].copy()
    for count in counts[1:]:
        common &= count
    found, room = list[tuple[str, list[Line]]](), LISTED
    for pane in panes:
        rows = _uncommon(pane, common)
        if len(rows) > room:
            rows = [*rows[:room], Line("note", f"… {len(rows) - room:,} more lines differ")]
        room = max(0, room - len(rows))
        found.append((pane.name, rows))
    return [(name, rows) for name, rows in found if rows]


def _texts(pane: Pane) -> list[Line]:
    return [part for part in pane.parts if isinstance(part, Line) and part.file is None]


def _uncommon(pane: Pane, common: Counter[tuple[str, str]]) -> list[Line]:
    left, rows = common.copy(), list[Line]()
    for line in _texts(pane):
        if left[line.kind, line.text] > 0:
            left[line.kind, line.text] -= 1
        else:
            rows.append(line)
    return rows
