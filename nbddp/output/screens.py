"""Where a run is seen: a notebook, a terminal, or nowhere.

In a notebook one display is updated in place while the cell runs and is empty again when
it ends; what stays is the rank-ordered block, sent as ordinary outputs. If a capability draws a page of
the output, the block is the text of that. So a saved
notebook holds the block alone, and a deterministic cell compares equal. A terminal cannot take
lines back: there the labelled lines are printed as they come, and stay.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import psutil

from nbddp.compat import ipykernel
from nbddp.output import page
from nbddp.output.buffer import LIVE_WIDTH, Display, RankOutput, Text
from nbddp.output.layout import BAR, Piece, Print, block, flat
from nbddp.output.progress import Progress, Region

LIVE_LINES = 20
LIVE_EVERY = 0.25  # seconds between two updates of the live view, of which each is a new page
DRAW_EVERY = 0.1  # seconds between two drawings of a terminal's last rows
TELL_AFTER = 10.0  # seconds
BAR_LOOK = "flex: none; width: 10em; accent-color: var(--jp-brand-color1, var(--vscode-progressBar-background, auto))"
LABEL = "display: flex; align-items: center; gap: 0.8em; margin: 0"
DrawPage = Callable[[bool, Sequence[str]], page.OutputPage | None]  # as `RunOutput.page`
QUIET = 2.0  # seconds without a line before the live view says that ranks are running


class Screen(Protocol):
    """What a run needs of a place to be seen."""

    def start(self) -> None: ...
    def shown_by(self, draw: DrawPage) -> None:
        """Have a page, where there is one, show the output as `draw` has it."""

    def progress(self, text: str) -> None: ...
    def ends(self, text: str) -> None:
        """What ends the run, and what is done about it: below all that is shown until the run is over."""

    def say(self, text: str) -> None: ...
    def line(self, rank: int, stream: str, text: str) -> None: ...
    def refresh(self, outputs: Sequence[RankOutput], status: Callable[[], str]) -> float | None:
        """Show what is new. status: words where the ranks are, which take time where they are many."""

    def finish(self, outputs: Sequence[RankOutput]) -> None: ...
    def ready(self) -> None:
        """Nothing is waited for any more, and others may print."""

    @property
    def rich(self) -> bool:
        """Whether more than words can be seen here."""

    def shows_reports(self) -> bool:
        """Whether the report of a run that fails is shown beside its output, with the traceback of its cause."""


class NullScreen:
    """Shows nothing."""

    rich = False

    def shown_by(self, draw: DrawPage) -> None:
        pass

    def start(self) -> None:
        pass

    def progress(self, text: str) -> None:
        pass

    def ends(self, text: str) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def ready(self) -> None:
        pass

    def line(self, rank: int, stream: str, text: str) -> None:
        pass

    def refresh(self, outputs: Sequence[RankOutput], status: Callable[[], str]) -> float | None:
        return None

    def shows_reports(self) -> bool:
        return True

    def finish(self, outputs: Sequence[RankOutput]) -> None:
        pass


class LazyScreen(NullScreen):
    """A screen that is there from the first line of output on, and never where there is none."""

    def __init__(self, screen: Screen):
        self._screen, self._open, self.rich = screen, False, screen.rich

    def shown_by(self, draw: DrawPage) -> None:
        self._screen.shown_by(draw)

    def ends(self, text: str) -> None:
        if self._open:
            self._screen.ends(text)

    def line(self, rank: int, stream: str, text: str) -> None:
        if not self._open:
            self._open = True
            self._screen.start()
        self._screen.line(rank, stream, text)

    def refresh(self, outputs: Sequence[RankOutput], status: Callable[[], str]) -> float | None:
        if not self._open and any(out.views for out in outputs):
            self._open = True
            self._screen.start()
        return self._screen.refresh(outputs, status) if self._open else None

    def shows_reports(self) -> bool:
        return self._screen.shows_reports()

    def finish(self, outputs: Sequence[RankOutput]) -> None:
        if self._open or any(out.items for out in outputs):
            self._screen.finish(outputs)


class Terminal:
    """Prints labelled lines as they come; results and figures at the end. Below them, where rows can be drawn again:
    what is waited for, lines that change, and where silent ranks are."""

    rich = False

    def __init__(self, region: Region | None = None, reports: bool = False):
        """region: where rows can be drawn again; None: nowhere, as in a file. reports: whether a shell shows them."""
        self._region, self._reports = region, reports
        self._next = 0.0
        self._began = self._last_line = time.monotonic()
        self._told_after = TELL_AFTER  # seconds without a line after which a file gets the ranks' positions
        self._waiting = False  # whether the last rows are of progress
        self._ends = ""

    def shown_by(self, draw: DrawPage) -> None:
        pass

    def start(self) -> None:
        self._began = self._last_line = time.monotonic()
        self._told_after, self._ends = TELL_AFTER, ""

    def progress(self, text: str) -> None:
        if self._region is not None:
            self._region.draw(self._region.wrapped(f"nbddp: {text} …"))
            self._next, self._waiting = 0.0, True

    def ends(self, text: str) -> None:
        self._ends = text
        self.progress(text)

    def ready(self) -> None:
        self._waiting = False
        if self._region is not None:
            self._region.clear()

    def say(self, text: str) -> None:
        self.ready()
        print(text, flush=True)

    def line(self, rank: int, stream: str, text: str) -> None:
        self.ready()
        print(f"rank {rank}{BAR}{text}", file=sys.stderr if stream == "stderr" else sys.stdout, flush=True)
        self._last_line = time.monotonic()

    def refresh(self, outputs: Sequence[RankOutput], status: Callable[[], str]) -> float | None:
        now = time.monotonic()
        silent = now - self._last_line
        if self._region is None:
            if silent >= self._told_after:
                self._told_after *= 2
                print(f"{status()} · {now - self._began:.0f} s", file=sys.stderr, flush=True)
            return self._told_after - silent
        if now < self._next:
            return self._next - now
        rows = [f"rank {o.rank}{BAR}{line}" for o in outputs for line in o.moving()]
        if silent > QUIET:
            rows += self._region.wrapped(f"{status()} · {now - self._began:.0f} s")
        if self._ends:
            rows += self._region.wrapped(f"nbddp: {self._ends} …")
        if rows or not self._waiting:
            self._region.draw(rows)
            self._waiting = False
        self._next = now + DRAW_EVERY
        return DRAW_EVERY if rows else max(DRAW_EVERY, QUIET - silent)

    def shows_reports(self) -> bool:
        return self._reports

    def finish(self, outputs: Sequence[RankOutput]) -> None:
        self.ready()
        for out in outputs:
            for item in out.items:
                if isinstance(item, Display):
                    if item.told:
                        continue
                    mark = " Out" if item.kind == "result" else ""
                    for text in str(item.data.get("text/plain", "")).splitlines():
                        print(f"rank {out.rank}{mark}{BAR}{text}")
                elif isinstance(item, Text):
                    for stream, line in item.open_lines():
                        self.line(out.rank, stream, line)


class Notebook:
    """A live view while the run lasts, then the block."""

    rich = True

    def __init__(self, shell: Any):
        self._publisher = shell.display_pub
        self._draw: DrawPage | None = None
        self._id = uuid4().hex
        self._lines: list[str] = []
        self._shown = ""
        self._open = False
        self._waiting = False  # whether progress is shown
        self._ends = ""
        self._next = 0.0
        self._began = time.monotonic()
        self._last_line = self._began

    def shown_by(self, draw: DrawPage) -> None:
        if not ipykernel.is_captured(self._publisher):  # `%%capture` has the text as stdout
            self._draw = draw

    def start(self) -> None:
        self._began = self._last_line = time.monotonic()
        self._ends = ""
        if not self._open:
            self._open = True
            self._publish("")

    def progress(self, text: str) -> None:
        """What is being waited for before the run starts."""
        self.start()
        self._publish(f"nbddp: {text} …", update=True, html=page.live(bar_of(text), time.time()))
        self._waiting = True

    def ends(self, text: str) -> None:
        self._ends = text
        shown = "\n".join([*self._lines, f"nbddp: {text} …"])
        self._publish(shown, update=True, html=self._live(shown, [f"nbddp: {text} …"], "" if self._lines else text))

    def ready(self) -> None:
        if self._shown:
            self._publish("", update=True)

    def shows_reports(self) -> bool:
        return True

    def say(self, text: str) -> None:
        """A line that stays."""
        print(text, flush=True)

    def line(self, rank: int, stream: str, text: str) -> None:
        self._lines.append(f"rank {rank}{' stderr' * (stream == 'stderr')}{BAR}{text[:LIVE_WIDTH]}")
        del self._lines[:-LIVE_LINES]
        self._last_line = time.monotonic()

    def refresh(self, outputs: Sequence[RankOutput], status: Callable[[], str]) -> float | None:
        """Show what is new if it is time; seconds until the next look, or None."""
        now = time.monotonic()
        if now < self._next:
            return self._next - now
        below = self._below(status() if now - self._last_line > QUIET else "", now)
        text = self._text(outputs, below)
        if text != self._shown and (text or not self._waiting):
            self._publish(text, update=True, html=self._live(text, below))
            self._next = now + LIVE_EVERY
            return LIVE_EVERY
        return 1.0 if now - self._began > QUIET else QUIET - (now - self._began)

    def finish(self, outputs: Sequence[RankOutput]) -> None:
        drawn = self._draw(False, ()) if self._draw is not None else None
        if drawn is None:
            self.ready()
            pieces = block(outputs)
        else:
            text, pieces = flat(outputs, drawn.shows)
            # a display of its own, before the live one is emptied: nbval hears of no update, and the page does not jump
            ipykernel.publish(self._publisher, {"text/plain": text, "text/html": drawn.html})
            self.ready()
        for piece in pieces:
            self._emit(piece)

    def _text(self, outputs: Sequence[RankOutput], below: Sequence[str]) -> str:
        bars = [f"rank {o.rank}{BAR}{line}" for o in outputs if not o.silent for line in o.moving()]
        return "\n".join([*self._lines, *bars, *below])

    def _below(self, status: str, now: float) -> list[str]:
        """The line about the run."""
        rows = [f"{status} · {now - self._began:.0f} s"] if status else []
        return [*rows, f"nbddp: {self._ends} …"] if self._ends else rows

    def _live(self, text: str, below: Sequence[str], waits: str = "") -> str:
        """The page of what is shown meanwhile. waits: what a bar says, if there is nothing else."""
        if not text:
            return ""
        drawn = self._draw(True, below) if self._draw is not None else None
        shown = drawn.html if drawn is not None else bar_of(waits) if waits else page.plain(text)
        return page.live(shown, time.time())

    def _publish(self, text: str, update: bool = False, html: str = "") -> None:
        """html: for a page, in the place of the text."""
        self._shown, self._waiting = text, False
        data = {"text/plain": text} | ({"text/html": html} if html else {})
        ipykernel.publish(self._publisher, data, transient={"display_id": self._id}, update=update)

    def _emit(self, piece: Piece) -> None:
        if isinstance(piece, Print):
            stream = getattr(sys, piece.stream)
            stream.write(piece.text)
            stream.flush()
            return
        sys.stdout.flush()
        sys.stderr.flush()
        self._publisher.publish(piece.data, piece.metadata)


def bar_of(text: str) -> str:
    """Progress as HTML: a bar that says what it is of, full to its share, or moving where that is not known."""
    share = f' max="{text.of}" value="{text.done}"' if isinstance(text, Progress) else ""
    words = escape(
        f"nbddp: {text.words} ({text.done} of {text.of}) …" if isinstance(text, Progress) else f"nbddp: {text} …"
    )
    return f'<label style="{LABEL}"><progress{share} style="{BAR_LOOK}"></progress><span>{words}</span></label>'


def for_shell(shell: Any | None) -> Screen:
    """The screen that fits: a notebook's kernel, IPython in a terminal, or plain Python."""
    if shell is not None and getattr(shell, "kernel", None) is not None:
        console = of_console()
        return Notebook(shell) if console is None else Terminal(Region(size=console), reports=True)
    return Terminal(Region() if can_draw(sys.stdout) else None, reports=shell is not None)


def can_draw(stream: Any) -> bool:
    """Whether rows on this stream can be drawn again: it is a terminal that knows how."""
    try:
        is_terminal = bool(stream.isatty())
    except (AttributeError, ValueError):  # not a file, or closed
        return False
    return is_terminal and os.environ.get("TERM", "dumb") != "dumb"


@functools.cache
def of_console() -> Callable[[], tuple[int, int]] | None:
    """The size of the terminal of `jupyter console`, where this process is a kernel that it has started; else None.

    A console shows no update of a display, and nothing in its messages says what it is.
    """
    try:
        parent = psutil.Process().parent()
        words = [Path(word).name for word in parent.cmdline()[:4]] if parent is not None else []
        terminal = parent.terminal() if parent is not None else None
    except psutil.Error:  # it has ended, or is another user's
        return None
    return (lambda: size_of(terminal)) if {"jupyter-console", "jupyter_console"} & set(words) else None


def size_of(terminal: str | None) -> tuple[int, int]:
    """Columns and lines of a terminal, by its device; 80 × 24 where that is not known."""
    try:
        descriptor = os.open(terminal or "", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:  # there is none, or it has been closed
        return 80, 24
    try:
        columns, lines = os.get_terminal_size(descriptor)
    finally:
        os.close(descriptor)
    return columns, lines
