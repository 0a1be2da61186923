"""The output of one rank: kept in order, bounded in memory and on disk (`output.log_file`).

Text goes to a log file as it comes and, as lines, into a head and a tail; what moves the
cursor within a line is carried out (a progress bar is one line that changes, not a thousand).
Lines of stdout and stderr stand in the order in which they were ended, displays have their
place among them. Two ranks' outputs are equal if their `print_of` is equal, which covers
all that was shown, not only what is kept; of lines of a log it leaves out when and by which
process they were written.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbddp.output.log_file import LIMIT, LogFile, Wholes, sizes
from nbddp.output.terminal_line import (
    MOST_ROWS,
    Rows,
    TerminalLine,
    cut_sequence,
    has_controls,
    moves_rows,
    rows_up,
    unstamped,
)
from nbddp.protocol import messages
from nbddp.protocol.codec import Json, from_json
from nbddp.protocol.messages import Metadata, MimeBundle

HEAD, TAIL = 60, 40  # lines of one stretch of text that are kept
WIDE_HEAD, WIDE_TAIL = 12_288, 4_096  # characters of a long line that are kept
LONGEST = 1 << 20  # characters after which a line without an end is ended
SHOWN_HEAD, SHOWN_TAIL = 500, 500  # displays that are kept
BYTES_HEAD, BYTES_TAIL = 16 << 20, 16 << 20  # characters of displays that are kept
AREA_LINES = 4  # of an Output widget, that a live view has
LIVE_WIDTH = 1000  # characters of an unfinished line that a live view can use
STREAMS = ("stdout", "stderr")
RANK_LOG = "rank{}.log"  # with all that a rank prints in a run
COMMS = ("comm_open", "comm_msg", "comm_close")
VIEW = "application/vnd.jupyter.widget-view+json"
MODEL = "model_name"  # the widget protocol has it with an underscore

_EMPTY = re.compile(r"(<pre\b[^>]*>\s*</pre>)?\s*")

Ended = tuple[str, str]  # a stream, and a line of it
MOVING = 4  # lines of a rank's widgets that the live view has, the newest ones


class Stream:
    """One stream within a stretch of text: its unfinished lines, and a digest of those that are complete.

    `stamped`: how many lines begin with a time, which is not in the digest.
    """

    def __init__(self, name: str):
        self.name = name
        self.rows = Rows()
        self.count = self.taken_back = 0  # complete lines; how many of them the last text has taken back
        self._stamped = 0
        self._digest = hashlib.sha256()
        self._recent: deque[str] = deque()  # the last complete lines, which are not in the digest yet
        self._cut = ""  # the beginning of an escape sequence

    def write(self, text: str) -> list[str]:
        """Take text in; the lines it completed."""
        text, self._cut = self._cut + text, ""
        whole = cut_sequence(text)
        text, self._cut = text[:whole], text[whole:]
        self.taken_back = 0
        if not self.rows.one or moves_rows(text):
            self._take_back(rows_up(text) - self.rows.above)
            done = self.rows.write(text, LONGEST)
            if done:
                self._count(done)
            return done
        first, *others = text.split("\n")
        done = self._go_on(first)
        if not others:
            return done
        *middle, last = others
        done.append(self._end_line())
        if len(text) < LONGEST and not has_controls(text):
            if middle:
                self._count(middle)
                done += middle
        else:
            for piece in middle:
                done += self._go_on(piece)
                done.append(self._end_line())
        return done + self._go_on(last)

    def _go_on(self, piece: str) -> list[str]:
        """Write on the unfinished line; what of it was ended because it is too long."""
        done = []
        while self.rows.line.column + len(piece) > LONGEST:
            room = LONGEST - self.rows.line.column
            self.rows.line.write(piece[:room])
            piece = piece[room:]
            if self.rows.line.column >= LONGEST:
                done.append(self._end_line())
        if piece:
            self.rows.line.write(piece)
        return done

    def _end_line(self) -> str:
        text = self.rows.end()
        self._count([text])
        return text

    def _count(self, lines: list[str]) -> None:
        self.count += len(lines)
        self._recent.extend(lines)
        many = len(self._recent) - MOST_ROWS
        if max(map(len, lines)) > LIVE_WIDTH:  # nobody goes back to such a line
            many = len(self._recent)
        if many > 0:
            text, stamped = unstamped("\n".join(self._recent.popleft() for _ in range(many)) + "\n")
            self._stamped += stamped
            self._digest.update(text.encode("utf-8", "replace"))

    def _take_back(self, rows: int) -> None:
        """Have so many of the last lines be unfinished again: the cursor goes up to them."""
        self.taken_back = max(0, min(rows, len(self._recent)))
        lines = [self._recent.pop() for _ in range(self.taken_back)]
        self.count -= len(lines)
        self.rows.take_back(lines[::-1])

    @property
    def stamped(self) -> int:
        return self._stamped + unstamped("\n".join(self._recent))[1]

    def open_lines(self) -> list[str]:
        """Those that are not ended, or to which the cursor may go back."""
        return [self._as_it_stands(line) for line in self.rows.all]

    def _as_it_stands(self, line: TerminalLine) -> str:
        text, at, cut = line.text(), line.column, self._cut if line is self.rows.line else ""
        return text[:at].ljust(at) + cut + text[at + len(cut) :] if cut else text

    def print_of(self) -> object:
        digest = self._digest.copy()
        digest.update("".join(unstamped(f"{line}\n")[0] for line in self._recent).encode("utf-8", "replace"))
        return (self.name, self.count, digest.hexdigest(), unstamped("\n".join(self.open_lines()))[0])


class Text:
    """A stretch of stdout and stderr without a display in between."""

    def __init__(self) -> None:
        self.streams: dict[str, Stream] = {}  # in the order in which they began
        self.head: list[Ended] = []
        self.tail: deque[Ended] = deque(maxlen=TAIL)

    @property
    def count(self) -> int:
        """Complete lines."""
        return sum(stream.count for stream in self.streams.values())

    @property
    def stamped(self) -> int:
        """Complete lines that begin with a time, a process and a rank."""
        return sum(stream.stamped for stream in self.streams.values())

    def write(self, name: str, text: str) -> list[Ended]:
        """Take text of a stream in; the lines it completed."""
        if not text:
            return []
        if name not in self.streams:
            self.streams[name] = Stream(name)
        stream = self.streams[name]
        done = stream.write(text)
        if stream.taken_back:
            self._take_back(name, stream.taken_back)
        room = HEAD - len(self.head)
        self.head += [(name, kept(line)) for line in done[:room]] if room else []
        self.tail.extend((name, kept(line)) for line in done[room:][-TAIL:])
        return [(name, line) for line in done]

    def _take_back(self, name: str, count: int) -> None:
        """The last lines of a stream are unfinished again."""
        lines: deque[Ended] | list[Ended] = self.tail or self.head
        last = [i for i, (stream, _) in enumerate(lines) if stream == name][-count:]
        for i in reversed(last):
            del lines[i]

    def lines(self) -> tuple[list[Ended], int, list[Ended]]:
        """Head, how many lines are left out after it, and tail; unfinished lines are the last."""
        tail = [*self.tail, *((name, kept(line)) for name, line in self.open_lines())]
        left_out = self.count - len(self.head) - len(self.tail)
        return (self.head, left_out, tail) if left_out else ([*self.head, *tail], 0, [])

    def lines_of(self, name: str) -> list[str]:
        """What is kept of one stream."""
        head, _, tail = self.lines()
        return [line for stream, line in (*head, *tail) if stream == name]

    def open_lines(self) -> list[Ended]:
        """Lines that are not ended, with something in them."""
        return [(s.name, line) for s in self.streams.values() for line in s.open_lines() if line.strip()]

    def print_of(self) -> object:
        """Without the order among the streams, which subprocesses do not have."""
        return tuple(sorted(str(s.print_of()) for s in self.streams.values()))


def kept(line: str) -> str:
    """A line, or the two ends of a long one."""
    left_out = len(line) - WIDE_HEAD - WIDE_TAIL
    if left_out <= 0:
        return line
    return f"{line[:WIDE_HEAD]} … {left_out:,} characters omitted … {line[-WIDE_TAIL:]}"


@dataclass
class Display:
    """A rich output: `kind` is "display" or "result"; `data` a mimebundle."""

    kind: str
    data: MimeBundle
    metadata: Metadata
    display_id: str | None = None
    told: bool = False  # whether a screen has had it as lines
    size: int = field(init=False, default=0)
    late: bool = field(init=False, default=False)  # whether it may be left out
    whole: str = ""  # a digest of all that was shown, where `data` has only a part of it

    def __post_init__(self) -> None:
        self.show(self.data, self.metadata, self.whole)

    def show(self, data: MimeBundle, metadata: Metadata, whole: str = "") -> None:
        """Hold this from now on."""
        self.data, self.metadata, self.whole = data, metadata, whole
        self.size = sizes(data)

    def print_of(self) -> object:
        return (self.kind, self.whole or _sorted(self.data))


def _sorted(data: MimeBundle) -> str:
    return json.dumps(data, sort_keys=True, default=str)


def model_id(data: Mapping[str, object]) -> str:
    """Which widget a mimebundle shows; empty if none."""
    view = data.get(VIEW)
    return str(view.get("model_id", "")) if isinstance(view, dict) else ""


def is_empty(data: MimeBundle) -> bool:
    """Whether there is nothing to see: `rich` shows such bundles when a bar begins and ends."""
    if data.get("text/plain") != "" or not data.keys() <= {"text/plain", "text/html"}:
        return False
    return _EMPTY.fullmatch(str(data.get("text/html", ""))) is not None


@dataclass
class Elision:
    """Displays, and lines between them, that are not kept. path: where the displays are."""

    path: Path
    displays: int = 0
    lines: int = 0
    digest: Any = field(default_factory=hashlib.sha256)

    def take(self, item: Text | Display | Elision) -> None:
        self.digest.update(str(item.print_of()).encode("utf-8", "replace"))
        if isinstance(item, Text):
            self.lines += item.count
        elif isinstance(item, Display):
            self.displays += 1
        else:
            self.displays += item.displays
            self.lines += item.lines

    def describe(self) -> str:
        lines = f" and {self.lines:,} lines between them" if self.lines else ""
        return f"… {self.displays:,} displays{lines} omitted; the displays, one per line as JSON: {self.path}"

    def print_of(self) -> object:
        return ("gap", self.digest.hexdigest())


class OutputArea:
    """The place of an Output widget, which takes in what is shown while the program is in it (`with out:`). Clearing it
    clears nothing else."""

    def __init__(self, items: OutputBuffer):
        self.inside = items
        self.late = self.placed = False
        self.size = 0

    def print_of(self) -> object:
        return tuple(item.print_of() for item in self.inside.all())


Item = Text | Display | Elision
Shown = Text | Display | OutputArea


class OutputBuffer:
    """What was shown in one place, in order: the first and the last, with a gap in between if there is much."""

    def __init__(self, folder: Path, name: str, most: int, gone: Callable[[Display], None]):
        """gone: called with each display that is not kept, or is cleared."""
        self._left = gone
        self._head: list[Shown] = []
        self._tail: deque[Shown] = deque()
        self._gap = Elision(folder / f"{name}.displays.jsonl")
        self._file = LogFile(self._gap.path, most, held=False)
        self._named: dict[str, list[Display]] = {}
        self._shown = [0, 0]  # displays in head and tail
        self._bytes = [0, 0]
        self._clear_next = False

    def all(self) -> list[Item]:
        """With what is inside of areas."""
        gap: list[Shown | Elision] = [self._gap] if self._gap.displays else []
        found: list[Item] = []
        for item in (*self._head, *gap, *self._tail):
            found += item.inside.all() if isinstance(item, OutputArea) else [item]
        return found

    def last(self) -> Shown | None:
        return self._tail[-1] if self._tail else self._head[-1] if self._head else None

    def text(self) -> Text:
        """The text that goes on: since the last display."""
        self.clear_if_due()
        item = self.last()
        if not isinstance(item, Text):
            item = Text()
            self._add(item)
        return item

    def show(self, item: Display | OutputArea) -> None:
        self.clear_if_due()
        self._add(item)

    def _add(self, item: Shown) -> None:
        late = bool(self._tail) or self._shown[0] >= SHOWN_HEAD or self._bytes[0] >= BYTES_HEAD
        (self._tail if late else self._head).append(item)
        if isinstance(item, Display | OutputArea):
            item.late = late
            self._shown[late] += 1
            self._bytes[late] += item.size
        if isinstance(item, Display) and item.display_id is not None:
            self._named.setdefault(item.display_id, []).append(item)
        while len(self._tail) > 1 and (self._shown[1] > SHOWN_TAIL or self._bytes[1] > BYTES_TAIL):
            self._leave_out(self._tail.popleft())

    def _leave_out(self, item: Shown) -> None:
        if isinstance(item, Display | OutputArea):
            self._shown[1] -= 1
            self._bytes[1] -= item.size
        for each in item.inside.all() if isinstance(item, OutputArea) else [item]:
            self._gap.take(each)
            if isinstance(each, Display):
                self._left(each)
                row = {"kind": each.kind, "data": each.data, "metadata": each.metadata}
                self._file.write((json.dumps(row, default=str) + "\n").encode("utf-8", "replace"))
        if isinstance(item, Display) and item.display_id is not None:
            self._named[item.display_id].remove(item)

    def update(self, display_id: str, data: MimeBundle, metadata: Metadata, whole: str = "") -> list[Display]:
        """All displays of this id show something else; which they are."""
        found = self._named.get(display_id, [])
        for item in found:
            before = item.size
            item.show(data, metadata, whole)
            self._bytes[item.late] += item.size - before
        return found

    def settle(self, left: Callable[[MimeBundle], MimeBundle]) -> None:
        """Have displays of widgets hold what stays of them; those of which nothing does go."""
        for part in (self._head, self._tail):
            kept: list[Shown] = []
            for item in part:
                if isinstance(item, OutputArea):
                    item.inside.settle(left)
                elif isinstance(item, Display) and model_id(item.data):
                    item.show(left(item.data), item.metadata)
                    if not item.data:
                        continue
                kept.append(item)
            part.clear()
            part.extend(kept)

    def clear(self, wait: bool = False) -> None:
        """wait: when something else comes."""
        self._clear_next = True
        if not wait:
            self.clear_if_due()

    def clear_if_due(self) -> None:
        if not self._clear_next:
            return
        for item in (*self._head, *self._tail):
            if isinstance(item, Display):
                self._left(item)
        self._head.clear()
        self._tail.clear()
        self._named.clear()
        self._shown, self._bytes = [0, 0], [0, 0]
        self._gap = Elision(self._gap.path)
        self._clear_next = False

    def close(self) -> None:
        self._file.close()


class RankOutput:
    """Everything one rank has shown in one run."""

    def __init__(self, rank: int, folder: Path, name: str = "", most: int = LIMIT, held: bool = True):
        """name: of its log in the folder; default: rankN.log. most: bytes of text that the log keeps. held: whether its
        file stays open."""
        self.rank = rank
        self.silent = True  # it has shown nothing yet
        self._folder, self._name, self._most, self._held = folder, name or RANK_LOG.format(rank), most, held
        self.received = dict.fromkeys(STREAMS, 0)  # characters
        self._areas: dict[str, OutputArea] = {}  # comm of an Output widget → its place
        self._inside: list[str] = []  # those that the program is in, the innermost last
        self.views: list[Display] = []  # of widgets that may still move
        self.said: Callable[[MimeBundle], str | None] = lambda data: None  # what a mimebundle's widget says now
        self.unseen: frozenset[str] = frozenset()  # streams that are written down and not shown
        self.copies: list[Callable[[str, str], None]] = []  # each is given a stream and its text

    # most ranks of a large pool show nothing, and what is not needed is not made

    @functools.cached_property
    def log(self) -> Path:
        return self._folder / self._name

    @functools.cached_property
    def file(self) -> LogFile:
        return LogFile(self.log, self._most, self._held)

    @functools.cached_property
    def wholes(self) -> Wholes:
        return Wholes(self._folder, self.log.stem, self._most)

    @functools.cached_property
    def _items(self) -> OutputBuffer:
        self.silent = False
        return OutputBuffer(self._folder, self.log.stem, self._most, self._gone)

    @property
    def why(self) -> str:
        """Why no more of its text is written down; empty if it is."""
        return self.file.why if "file" in vars(self) else ""

    @property
    def items(self) -> list[Item]:
        return [] if self.silent else self._items.all()

    def take(self, kind: str, content: Json) -> list[Ended]:
        """Take one iopub message in; (stream, line) for every line it completed."""
        if kind == "stream":
            return self._take_text(content["name"], content["text"])
        if kind == messages.STREAMS:
            segments = from_json(messages.Streams, content).segments
            return [line for stream, text in segments for line in self._take_text(stream, text)]
        if kind in ("display_data", "execute_result"):
            self._display("result" if kind == "execute_result" else "display", content)
        elif kind == "update_display_data":
            ident = (content.get("transient") or {}).get("display_id")
            if ident is not None:
                data, whole = self._bounded(content["data"], ident)
                for place in (self._items, *(area.inside for area in self._areas.values())):
                    for shown in place.update(ident, data, content.get("metadata") or {}, whole):
                        self._view(shown)
        elif kind == "clear_output":
            self._place().clear(bool(content.get("wait")))
        elif kind in COMMS:
            self._take_comm(kind, str(content.get("comm_id")), content.get("data") or {})
        return []

    def open_lines(self) -> Iterator[str]:
        """The beginnings of lines that may change: unfinished text, such as progress bars, and what an area says."""
        item = self._items.last()
        if isinstance(item, Text):
            for line in (line for stream in item.streams.values() for line in stream.rows.all):
                begun = line.beginning(LIVE_WIDTH)
                if begun.strip():
                    yield begun
        elif isinstance(item, OutputArea):
            shown = item.inside.last()
            if isinstance(shown, Display) and not model_id(shown.data):
                said = str(shown.data.get("text/plain", "")).splitlines()
                yield from (line[:LIVE_WIDTH] for line in said[-AREA_LINES:])

    def moving(self) -> list[str]:
        """Lines that may still change: unfinished text, and what the newest widgets say."""
        if self.silent:
            return []
        bars = [line for view in self.views[-MOVING:] for line in (self.said(view.data) or "").splitlines()]
        return [*self.open_lines(), *bars[-MOVING:]]

    def settle(self, left: Callable[[MimeBundle], MimeBundle]) -> None:
        """Have displays of widgets hold what stays of them; those of which nothing does go."""
        self._items.settle(left)
        self.views.clear()

    def _gone(self, shown: Display) -> None:
        self.views = [view for view in self.views if view is not shown]

    def _view(self, shown: Display) -> None:
        """Have a widget's words among what moves."""
        if model_id(shown.data) and not any(view is shown for view in self.views):
            self.views.append(shown)

    def print_of(self) -> tuple[object, ...]:
        return tuple(item.print_of() for item in self.items)

    def close(self) -> None:
        if "file" in vars(self):
            self.file.close()
        if not self.silent:
            self._items.close()
        for area in self._areas.values():
            area.inside.close()

    def _take_text(self, stream: str, text: str) -> list[Ended]:
        self.received[stream] += len(text)
        self.keep(stream, text)
        return self._place().text().write(stream, text) if text and stream not in self.unseen else []

    def keep(self, stream: str, text: str) -> None:
        """Write text of a stream down."""
        self.file.write(text.encode("utf-8", "replace"))
        for copy in self.copies:
            copy(stream, text)

    def _display(self, kind: str, content: Json) -> None:
        data = content["data"]
        area = self._areas.get(str((data.get(VIEW) or {}).get("model_id")))
        if area is not None:
            self._put(area)
            return
        ident = (content.get("transient") or {}).get("display_id")
        if ident is None and is_empty(data):
            self._place().clear_if_due()
            return
        data, whole = self._bounded(data, ident or "")
        shown = Display(kind, data, content.get("metadata") or {}, ident, whole=whole)
        self._place().show(shown)
        self._view(shown)

    def _bounded(self, data: MimeBundle, name: str) -> tuple[MimeBundle, str]:
        """What is shown of a mimebundle, and a digest of all of it where that is not all."""
        found = self.wholes.bundle(data, name)
        return found, "" if found is data else hashlib.sha256(_sorted(data).encode("utf-8", "replace")).hexdigest()

    # -- Output widgets --------------------------------------------------------------------------------

    def _place(self) -> OutputBuffer:
        """Where what is shown now goes: an area that is displayed nowhere is put where it is written to first."""
        if not self._inside:
            return self._items
        area = self._areas[self._inside[-1]]
        self._put(area)
        return area.inside

    def _put(self, area: OutputArea) -> None:
        if not area.placed:
            area.placed = True
            self._items.show(area)

    def _take_comm(self, kind: str, ident: str, data: Json) -> None:
        state = data.get("state") or {}
        if kind == "comm_open" and state.get(f"_{MODEL}") == "OutputModel":
            name = f"{self.log.stem}-area{len(self._areas)}"
            self._areas[ident] = OutputArea(OutputBuffer(self._folder, name, self._most, self._gone))
        if ident not in self._areas:
            return
        if kind == "comm_close":
            self._areas[ident].inside.clear()
            self._inside = [inside for inside in self._inside if inside != ident]
        elif "msg_id" in state:  # the message whose output the widget takes; empty: none
            self._inside = [inside for inside in self._inside if inside != ident] + [ident] * bool(state["msg_id"])
