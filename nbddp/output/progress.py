"""Progress as text that carries its values: the stage of a pool's start, and how much is done. A terminal gets a bar in
words, on its last rows (`Region`), and a page a real one. Pure."""

from __future__ import annotations

import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

CELLS = 24  # characters of a bar in words
Stage = Literal["agent", "controller", "engines", "devices", "ready"]
STAGES: tuple[Stage, ...] = get_args(Stage)  # of a pool's start, in their order


class StageText(str):
    """A sentence of progress, and the stage of a start that it belongs to; None: of none."""

    stage: Stage | None

    def __new__(cls, words: str, stage: Stage | None) -> StageText:
        made = super().__new__(cls, words)
        made.stage = stage
        return made

    def __getnewargs__(self) -> Any:
        return str(self), self.stage


class StillText(StageText):
    """The sentence of progress that was said before, with its seconds so far. Who prints a line for each sentence
    leaves it out."""


def counting(progress: Callable[[str], None], words: str, stage: Stage) -> Callable[[float], None]:
    """Say what is being waited for. Returns a function of the seconds of waiting, which shows each whole one."""
    said = 0

    def wait(seconds: float) -> None:
        nonlocal said
        if seconds >= said + 1:
            said = int(seconds)
            progress(StillText(f"{words} · {said} s", stage))

    progress(StageText(words, stage))
    return wait


class Progress(StageText):
    """`████░░░░ 3/9  all_reduce of 64 KiB`; `words` is what is done, `done` and `of` how much of it."""

    words: str
    done: int
    of: int

    def __new__(cls, words: str, done: int, of: int, stage: Stage | None = None) -> Progress:
        full = CELLS * done // of
        made = str.__new__(cls, f"{'█' * full}{'░' * (CELLS - full)} {done}/{of}  {words}")
        made.words, made.done, made.of, made.stage = words, done, of, stage
        return made

    def __getnewargs__(self) -> Any:
        return self.words, self.done, self.of, self.stage


# -- the last rows of a terminal --------------------------------------------------------------------

# The last rows of a terminal, which are drawn again and again while lines go by above them.

MOST = 20  # rows
UP, TO_END = "\x1b[{}A", "\x1b[J"
Size = tuple[int, int]  # columns, lines


class Region:
    """Rows that can be taken back. Whoever prints anything else calls `clear` first."""

    def __init__(self, out: Callable[[], Any] | None = None, size: Callable[[], Size] | None = None):
        """out: the stream to draw on, by default stdout as it is then."""
        self._out = out or (lambda: sys.stdout)
        self._size = size or _size_here
        self._rows: list[str] = []
        self._width = 0

    @property
    def shown(self) -> bool:
        return bool(self._rows)

    def clear(self) -> None:
        """Nothing is left of the rows, and the cursor is where they began."""
        if self._rows:
            self._write(self._back())
            self._rows = []

    def draw(self, rows: Sequence[str]) -> None:
        """Show these rows in place of those before; as many as there is room for."""
        columns, lines = self._size()
        most = max(1, min(MOST, lines - 2))
        fitting = list(rows) if len(rows) <= most else [*rows[: most - 1], f"… {len(rows) - most + 1} more lines"]
        cut = [fit(row, columns - 1) for row in fitting]
        if not cut:
            self.clear()
        elif (cut, columns) != (self._rows, self._width):
            back, self._rows, self._width = self._back(), cut, columns
            self._write(back + "\n".join(cut))

    def wrapped(self, text: str) -> list[str]:
        """A text as rows of the terminal's width."""
        columns, _ = self._size()
        return textwrap.wrap(text, max(20, columns - 1))

    def _back(self) -> str:
        """To the beginning of the rows, and nothing behind it."""
        up = UP.format(len(self._rows) - 1) if len(self._rows) > 1 else ""
        return f"\r{up}{TO_END}" if self._rows else ""

    def _write(self, text: str) -> None:
        out = self._out()
        out.write(text)
        out.flush()


def _size_here() -> Size:
    columns, lines = shutil.get_terminal_size()
    return columns, lines


def fit(row: str, columns: int) -> str:
    """The row without what a terminal would take for a command, cut to so many columns."""
    row = "".join(c for c in row if c.isprintable())
    if sum(map(_columns, row)) <= columns:
        return row
    kept, used = [], 1
    for c in row:
        used += _columns(c)
        if used > columns:
            break
        kept.append(c)
    return "".join(kept) + "…"


def _columns(c: str) -> int:
    """How many columns a character takes."""
    if unicodedata.combining(c):
        return 0
    return 2 if unicodedata.east_asian_width(c) in "WF" else 1
