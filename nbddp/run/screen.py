"""Where a run is seen: a notebook, a terminal, or nowhere.

In a notebook one display is updated in place while the cell runs and is empty again when
it ends; what stays is the rank-ordered block, sent as ordinary outputs. So a saved
notebook holds the block alone, and a deterministic cell compares equal. A terminal cannot take
lines back: there the labelled lines are printed as they come, and stay.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol
from uuid import uuid4

from nbddp.run.block import BAR, Piece, Print, block
from nbddp.run.collect import Display, RankOutput, Text

LIVE_LINES = 20
LIVE_EVERY = 0.04  # seconds between two updates of the live view
QUIET = 2.0  # seconds without a line before the live view says that ranks are running


class Screen(Protocol):
    """What a run needs of a place to be seen."""

    def start(self) -> None: ...
    def progress(self, text: str) -> None: ...
    def say(self, text: str) -> None: ...
    def line(self, rank: int, stream: str, text: str) -> None: ...
    def refresh(self, outputs: Sequence[RankOutput], status: str) -> float | None: ...
    def finish(self, outputs: Sequence[RankOutput]) -> None: ...


class Silent:
    """Shows nothing."""

    def start(self) -> None:
        pass

    def progress(self, text: str) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def line(self, rank: int, stream: str, text: str) -> None:
        pass

    def refresh(self, outputs: Sequence[RankOutput], status: str) -> float | None:
        return None

    def finish(self, outputs: Sequence[RankOutput]) -> None:
        pass


class Late(Silent):
    """A screen that is there from the first line of output on, and never where there is none."""

    def __init__(self, screen: Screen):
        self._screen, self._open = screen, False

    def line(self, rank: int, stream: str, text: str) -> None:
        if not self._open:
            self._open = True
            self._screen.start()
        self._screen.line(rank, stream, text)

    def refresh(self, outputs: Sequence[RankOutput], status: str) -> float | None:
        return self._screen.refresh(outputs, status) if self._open else None

    def finish(self, outputs: Sequence[RankOutput]) -> None:
        if self._open or any(out.items for out in outputs):
            self._screen.finish(outputs)


class Terminal:
    """Prints labelled lines as they come; results and figures at the end."""

    def start(self) -> None:
        pass

    def progress(self, text: str) -> None:
        pass

    def say(self, text: str) -> None:
        print(text, flush=True)

    def line(self, rank: int, stream: str, text: str) -> None:
        print(f"rank {rank}{BAR}{text}", file=sys.stderr if stream == "stderr" else sys.stdout, flush=True)

    def refresh(self, outputs: Sequence[RankOutput], status: str) -> float | None:
        return None

    def finish(self, outputs: Sequence[RankOutput]) -> None:
        for out in outputs:
            for item in out.items:
                if isinstance(item, Display):
                    mark = " Out" if item.kind == "result" else ""
                    for text in str(item.data.get("text/plain", "")).splitlines():
                        print(f"rank {out.rank}{mark}{BAR}{text}")
                elif isinstance(item, Text) and item.open_line:
                    self.line(out.rank, item.stream, item.open_line)


class Notebook:
    """A live view while the run lasts, then the block."""

    def __init__(self, shell: Any):
        self._publisher = shell.display_pub
        self._id = uuid4().hex
        self._lines: list[str] = []
        self._shown = ""
        self._open = False
        self._next = 0.0
        self._began = time.monotonic()
        self._last_line = self._began

    def start(self) -> None:
        self._began = self._last_line = time.monotonic()
        if not self._open:
            self._open = True
            self._publish("")

    def progress(self, text: str) -> None:
        """What is being waited for before the run starts."""
        self.start()
        self._publish(f"nbddp: {text} …", update=True)

    def say(self, text: str) -> None:
        """A line that stays."""
        print(text, flush=True)

    def line(self, rank: int, stream: str, text: str) -> None:
        self._lines.append(f"rank {rank}{' stderr' * (stream == 'stderr')}{BAR}{text}")
        del self._lines[:-LIVE_LINES]
        self._last_line = time.monotonic()

    def refresh(self, outputs: Sequence[RankOutput], status: str) -> float | None:
        """Show what is new if it is time; seconds until the next look, or None."""
        now = time.monotonic()
        if now < self._next:
            return self._next - now
        text = self._text(outputs, status if now - self._last_line > QUIET else "", now)
        if text != self._shown:
            self._publish(text, update=True)
            self._next = now + LIVE_EVERY
            return LIVE_EVERY
        return 1.0 if now - self._began > QUIET else QUIET - (now - self._began)

    def finish(self, outputs: Sequence[RankOutput]) -> None:
        if self._shown:
            self._publish("", update=True)
        for piece in block(outputs):
            self._emit(piece)

    def _text(self, outputs: Sequence[RankOutput], status: str, now: float) -> str:
        bars = [f"rank {o.rank}{BAR}{line}" for o in outputs for line in o.open_lines()]
        rows = [*self._lines, *bars]
        if status:
            rows.append(f"{status} · {now - self._began:.0f} s")
        return "\n".join(rows)

    def _publish(self, text: str, update: bool = False) -> None:
        self._shown = text
        self._publisher.publish({"text/plain": text}, transient={"display_id": self._id}, update=update)

    def _emit(self, piece: Piece) -> None:
        if isinstance(piece, Print):
            stream = getattr(sys, piece.stream)
            stream.write(piece.text)
            stream.flush()
            return
        sys.stdout.flush()
        sys.stderr.flush()
        self._publisher.publish(piece.data, piece.metadata)


def for_shell(shell: Any | None) -> Screen:
    """The screen that fits: a notebook's kernel, IPython in a terminal, or plain Python."""
    if shell is not None and getattr(shell, "kernel", None) is not None:
        return Notebook(shell)
    return Terminal()
