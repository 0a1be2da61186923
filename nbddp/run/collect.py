"""The output of one rank: kept in order, bounded in memory and on disk (`logfile`).

Text goes to a log file as it comes and, as lines, into a head and a tail; carriage
returns are carried out (a progress bar is one line that changes, not a thousand).
Displays keep their place in the order. Two ranks' outputs are equal if their `print_of`
is equal, which covers all text, not only what is kept.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbddp.run.logfile import LIMIT, LogFile

HEAD, TAIL = 60, 40  # lines of one stretch of text that are kept


@dataclass
class Text:
    """A stretch of stdout or stderr without a display in between."""

    stream: str
    head: list[str] = field(default_factory=list)
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL))
    open_line: str = ""
    column: int = 0
    count: int = 0
    digest: Any = field(default_factory=hashlib.sha256)

    def write(self, text: str) -> list[str]:
        """Take text in; the lines it completed."""
        done: list[str] = []
        *whole, rest = text.split("\n")
        for piece in whole:
            self._overwrite(piece)
            done.append(self.open_line)
            self._close_line()
        if rest:
            self._overwrite(rest)
        return done

    def _overwrite(self, piece: str) -> None:
        """Write over the open line as a terminal does: \\r goes to its start."""
        if "\r" not in piece and self.column == len(self.open_line):
            self.open_line += piece
            self.column = len(self.open_line)
            return
        first, *returned = piece.split("\r")
        self._put(first)
        for part in returned:
            self.column = 0
            self._put(part)

    def _put(self, part: str) -> None:
        self.open_line = self.open_line[: self.column] + part + self.open_line[self.column + len(part) :]
        self.column += len(part)

    def _close_line(self) -> None:
        line = self.open_line
        self.count += 1
        self.digest.update(line.encode("utf-8", "replace") + b"\n")
        (self.head if len(self.head) < HEAD else self.tail).append(line)
        self.open_line, self.column = "", 0

    def lines(self) -> tuple[list[str], int, list[str]]:
        """Head, how many lines are left out after it, and tail; the open line is the last."""
        tail = [*self.tail, *([self.open_line] if self.open_line.strip() else [])]
        left_out = self.count - len(self.head) - len(self.tail)
        return (self.head, left_out, tail) if left_out else ([*self.head, *tail], 0, [])

    def print_of(self) -> object:
        return (self.stream, self.count, self.digest.hexdigest(), self.open_line)


@dataclass
class Display:
    """A rich output: `kind` is "display" or "result"; `data` a mimebundle."""

    kind: str
    data: dict[str, Any]
    metadata: dict[str, Any]
    display_id: str | None = None

    def print_of(self) -> object:
        return (self.kind, json.dumps(self.data, sort_keys=True, default=str))


Item = Text | Display


class RankOutput:
    """Everything one rank has shown in one run."""

    def __init__(self, rank: int, log: Path, most: int = LIMIT):
        """most: bytes of text that the log keeps."""
        self.rank = rank
        self.log = log
        self.items: list[Item] = []
        self.received = {"stdout": 0, "stderr": 0}  # characters
        self.file = LogFile(log, most)
        self._clear_next = False

    def take(self, kind: str, content: dict[str, Any]) -> list[tuple[str, str]]:
        """Take one iopub message in; (stream, line) for every line it completed."""
        if kind == "stream":
            return self._take_text(content["name"], content["text"])
        if kind in ("display_data", "execute_result"):
            self._clear_if_due()
            shown = "result" if kind == "execute_result" else "display"
            ident = (content.get("transient") or {}).get("display_id")
            self.items.append(Display(shown, content["data"], content.get("metadata") or {}, ident))
        elif kind == "update_display_data":
            self._update(content)
        elif kind == "clear_output":
            self._clear_next = True
            if not content.get("wait"):
                self._clear_if_due()
        return []

    def open_lines(self) -> Iterator[str]:
        """Unfinished lines, such as progress bars."""
        for item in self.items[-2:]:
            if isinstance(item, Text) and item.open_line.strip():
                yield item.open_line

    def print_of(self) -> tuple[object, ...]:
        return tuple(item.print_of() for item in self.items)

    def close(self) -> None:
        self.file.close()

    def _take_text(self, stream: str, text: str) -> list[tuple[str, str]]:
        self._clear_if_due()
        self.received[stream] += len(text)
        self.file.write(text.encode("utf-8", "replace"))
        return [(stream, line) for line in self._stretch(stream).write(text)]

    def _stretch(self, stream: str) -> Text:
        """The text that `stream` goes on with: since the last display, one of each stream."""
        for item in reversed(self.items):
            if isinstance(item, Display):
                break
            if item.stream == stream:
                return item
        self.items.append(Text(stream))
        return self.items[-1]  # type: ignore[return-value]

    def _update(self, content: dict[str, Any]) -> None:
        ident = (content.get("transient") or {}).get("display_id")
        for item in self.items:
            if isinstance(item, Display) and item.display_id == ident:
                item.data, item.metadata = content["data"], content.get("metadata") or {}

    def _clear_if_due(self) -> None:
        if self._clear_next:
            self.items.clear()
            self._clear_next = False
