"""Stop (the notebook kernel's interrupt) at moments that are good for it.

While a command runs (`heard_at_checks`) Stop is noted, and becomes a KeyboardInterrupt where the command says
`check()`: in what waits, and between two steps. So no step is left half done, and no import. Pressed once more, a
second later, it comes at once.
Outside commands, as when a program uses `nbddp.Pool`, KeyboardInterrupt comes anywhere but in `uninterrupted` steps.
While a cell runs on the ranks, Stop is an event of the run.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

AGAIN = 1.0  # seconds after which Stop pressed once more is no accident
_noted: list[float] = []  # when Stop was pressed
_before: list[Any] = []  # the handler that was there before the command; empty where no command runs
_held: list[None] = []  # one for each `uninterrupted` that the main thread is in


def begin(pressed: bool = False) -> None:
    """From here on Stop is noted. Nothing happens in another thread than the main one, or if it is so already.

    pressed: it has been, just before.
    """
    if threading.current_thread() is threading.main_thread() and not _before:
        _noted[:] = [time.monotonic()] * pressed
        _before.append(signal.signal(signal.SIGINT, _note))


def end() -> None:
    """As it was before `begin`."""
    if threading.current_thread() is threading.main_thread() and _before:
        with suppress(TypeError):  # a handler that was not set from Python cannot be set again
            signal.signal(signal.SIGINT, _before[0])
        _before.clear()


def _note(number: int, frame: Any) -> None:
    _noted.append(time.monotonic())
    if _noted[-1] - _noted[0] > AGAIN:
        raise KeyboardInterrupt


def check() -> None:
    """Raise KeyboardInterrupt if Stop has been pressed in this command; not in `uninterrupted` steps, where it may have
    been pressed just before them."""
    if _noted and _before and not _held and threading.current_thread() is threading.main_thread():
        _noted.clear()
        raise KeyboardInterrupt


@contextmanager
def heard_at_checks() -> Iterator[None]:
    """For a whole command, also one whose cell has begun so already."""
    ours = not _before
    begin()
    try:
        check()
        yield
        check()
    finally:
        if ours:
            end()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back the notebook kernel's interrupt for steps that must not be left half done, such as the start of a
    process and its record; KeyboardInterrupt comes right after them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    _held.append(None)
    try:
        yield
    finally:
        _held.pop()
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
