"""The messages that a rank's debugger publishes."""

from __future__ import annotations

from dataclasses import dataclass

from nbddp.protocol.position import Place

STOPPED = "nbddp_stopped"  # the rank waits in its debugger, or goes on


@dataclass(frozen=True)
class Stopped:
    """`STOPPED`. stopped: whether the debugger waits for a line, at `place`; said: what it printed. source: numbers and
    texts of the lines around; variables: names and values of the frame that the prompt is in."""

    stopped: bool
    said: str
    place: Place | None = None
    source: tuple[tuple[int, str], ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
