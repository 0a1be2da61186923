"""Text that is still being written, as a terminal has it. Carriage returns, backspaces and erasures are carried out in
one line (`TerminalLine`), and the cursor's way up in several (`Rows`).

Text left and right of the cursor is kept in two stacks of slices, so nothing is copied when the cursor moves. The work
grows with the text, not with the text times the length of the line. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

# carriage return, backspace, erase in line (EL), cursor to the first column (CHA)
_CONTROL = re.compile(r"[\r\b]|\x1b\[[012]?K|\x1b\[[01]?G")
_CUT = re.compile(r"\x1b(?:\[\d{0,3})?\Z")  # the beginning of an escape sequence whose rest has not come
_ROWS = re.compile(r"(\n|\x1b\[\d*[AB])")  # to the next row; cursor up and down (CUU, CUD)
MOST_ROWS = 64  # to which the cursor can go back
CONTROLS = ("\r", "\b", "\x1b")

Slice = tuple[str | None, int, int]  # text[start:end]; None: cells that were erased


def has_controls(text: str) -> bool:
    return any(control in text for control in CONTROLS)


def cut_sequence(text: str) -> int:
    """Where an escape sequence begins that `text` ends in the middle of; its length if there is none."""
    found = _CUT.search(text, max(0, len(text) - 5))
    return found.start() if found else len(text)


class TerminalLine:
    """`column`: the cursor's; `touched`: slices that were made or moved so far, which is what the work is."""

    __slots__ = ("_after", "_before", "column", "touched")

    def __init__(self) -> None:
        self._before: list[Slice] = []  # left of the cursor, the nearest last
        self._after: list[Slice] = []  # right of it, the nearest last
        self.column = 0
        self.touched = 0

    def write(self, text: str) -> None:
        """Take in text without line ends."""
        at = 0
        for control in _CONTROL.finditer(text) if has_controls(text) else ():
            self._put(text[at : control.start()])
            self._move(control[0])
            at = control.end()
        self._put(text[at:] if at else text)

    def _move(self, control: str) -> None:
        if control == "\r" or control.endswith("G"):
            self._to_start()
        elif control == "\b":
            self._back()
        else:
            self._erase(control[2:-1] or "0")

    def _put(self, text: str) -> None:
        """Write over what is at the cursor."""
        left = len(text)
        if not left:
            return
        self._before.append((text, 0, left))
        self.column += left
        self.touched += 1
        while left and self._after:
            below, start, end = self._after.pop()
            self.touched += 1
            if end - start > left:
                self._after.append((below, start + left, end))
            left -= min(left, end - start)

    def _to_start(self) -> None:
        self.touched += len(self._before)
        while self._before:
            self._after.append(self._before.pop())
        self.column = 0

    def _back(self) -> None:
        if not self._before:
            return
        text, start, end = self._before.pop()
        if end - start > 1:
            self._before.append((text, start, end - 1))
        after = end
        if self._after and self._after[-1][0] is text and self._after[-1][1] == end:
            after = self._after.pop()[2]
        self._after.append((text, end - 1, after))
        self.column -= 1
        self.touched += 1

    def _erase(self, part: str) -> None:
        """0: from the cursor on, 1: up to the cursor, 2: all."""
        if part in "02":
            self._after.clear()
        if part in "12":
            self._before[:] = [(None, 0, self.column)] if self.column else []
        self.touched += 1

    def _slices(self) -> Iterator[Slice]:
        yield from self._before
        yield from reversed(self._after)

    def text(self) -> str:
        """The line as it stands; cells that were erased at its end are not there."""
        found = list(self._slices())
        while found and found[-1][0] is None:
            found.pop()
        return "".join(" " * (end - start) if text is None else text[start:end] for text, start, end in found)

    def beginning(self, most: int) -> str:
        """Its first `most` characters."""
        found, left = [], most
        for text, start, end in self._slices():
            end = min(end, start + left)
            found.append(" " * (end - start) if text is None else text[start:end])
            left -= end - start
            if not left:
                break
        return "".join(found)


def moves_rows(text: str) -> bool:
    """Whether the cursor goes to another row by other than line ends."""
    return "\x1b[" in text and any(found[0] != "\n" for found in _ROWS.finditer(text))


def rows_up(text: str) -> int:
    """How many rows the cursor goes up in a text, at most so many as it can."""
    found = (part[0] for part in _ROWS.finditer(text) if part[0].endswith("A"))
    return min(MOST_ROWS, sum(_number(part) for part in found))


def _number(part: str) -> int:
    return int(part[2:-1] or "1")


class Rows:
    """Rows to which the cursor may go back. Where it has never gone up it is one."""

    def __init__(self) -> None:
        self.all = [TerminalLine()]
        self._at = self._reach = 0  # the cursor's row; how far it has gone up from the last one

    @property
    def line(self) -> TerminalLine:
        """That of the cursor."""
        return self.all[self._at]

    @property
    def one(self) -> bool:
        return not self._reach

    @property
    def above(self) -> int:
        """Rows above the cursor."""
        return self._at

    def take_back(self, lines: Sequence[str]) -> None:
        """Rows that had ended are above the others again."""
        self._at += len(lines)
        for text in reversed(lines):
            self.all.insert(0, TerminalLine())
            self.all[0].write(text)

    def end(self) -> str:
        """The only row is ended; its text."""
        text, self.all = self.all[0].text(), [TerminalLine()]
        return text

    def write(self, text: str, longest: int) -> list[str]:
        """Take text in; the rows that are ended now. longest: characters of a row, of which the rest is on the next."""
        for part in _ROWS.split(text):
            if part == "\n":
                self._down()
            elif part.startswith("\x1b[") and part[-1] in "AB":
                self._go(_number(part) * (1 if part[-1] == "B" else -1))
            else:
                while part:
                    room = longest - self.line.column
                    self.line.write(part[:room])
                    part = part[room:]
                    if part:
                        self._down()
        done = self.all[: max(0, len(self.all) - 1 - self._reach)]
        del self.all[: len(done)]
        self._at = max(0, self._at - len(done))
        return [line.text().rstrip(" ") for line in done]

    def _down(self) -> None:
        self._at += 1
        if self._at == len(self.all):
            self.all.append(TerminalLine())
        else:
            self.line.write("\r")

    def _go(self, rows: int) -> None:
        column, last = self.line.column, len(self.all) - 1
        self._reach = min(MOST_ROWS, max(self._reach, last - self._at - rows))
        self._at = min(max(0, self._at + rows), last)
        if not column:
            self.line.write("\r")


# -- stamps of log lines ----------------------------------------------------------------------------

# The stamps of log lines: time, process and rank, in which the same warning differs from rank to rank.
# torch's C++ code writes `[rank3]:[W1123 06:05:58.123456789 ProcessGroupNCCL.cpp:1250] Warning: …`, and glog and
# torch's Python logs `W1123 06:05:58.123456 4711 torch/distributed/run.py:792] …`. Pure.

_STAMP = re.compile(
    r"^(?:\[rank\d+\]: ?)?"  # the rank
    r"(\[?[VDIWEF])\d{4} \d\d:\d\d:\d\d\.\d+ +"  # severity, month and day, time
    r"(?:\d+ +)?"  # process or thread
    r"(?=[\w./\\-]+:\d+\])",  # the place in the source
    re.MULTILINE,
)


def unstamped(text: str) -> tuple[str, int]:
    """The text without what comes before the place in the source, save for the severity; and in how many lines."""
    return _STAMP.subn(r"\1 ", text)
