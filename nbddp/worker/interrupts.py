"""Interrupts of the program that runs on this rank: as in a plain kernel, one Stop is one SIGINT.

What a program does from then on, it does on its way out, and nobody may end it for that. So the client gets a message
once Python has handed the interrupt to its handler, the program's own included: `signal.signal` is wrapped. It gets
this before the handler is called, which may go on in native code that holds the interpreter.

Python prints and forgets an interrupt that hits a destructor or another callback of its own (`sys.unraisablehook`):
that one alone is sent again.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from nbddp.compat.clock import clock

FILE = __file__
AGAIN = 0.05  # seconds until an interrupt that Python has ignored is sent again
SAY = 0.005  # seconds in which the thread that sends may have the interpreter

Handler = Callable[[int, FrameType | None], Any]


class Noting:
    """A handler of SIGINT that is called after its interrupt has been noted."""

    def __init__(self, handler: Handler, note: Callable[[], None]):
        self.handler, self._note = handler, note

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        self._note()
        return self.handler(number, frame)


class WorkerInterrupts:
    """`is_on`: whether a program runs; `taken`: whether it has had an interrupt. say: tells the client; called in a
    signal's handler."""

    def __init__(self, say: Callable[[], None]) -> None:
        self._say = say
        self._process = os.getpid()
        self._run = 0
        self.is_on = self.taken = False
        self._signal, self._unraisable = signal.signal, sys.unraisablehook

    def install(self) -> None:
        """Have handlers noted from here on; once, when the worker starts."""
        set_handler, handler_of = signal.signal, signal.getsignal

        @functools.wraps(set_handler)
        def signal_(signalnum: Any, handler: Any) -> Any:
            noted = signalnum == signal.SIGINT and callable(handler)
            before = set_handler(signalnum, Noting(handler, self._note) if noted else handler)
            return before.handler if isinstance(before, Noting) else before

        @functools.wraps(handler_of)
        def getsignal(signalnum: Any) -> Any:  # asyncio asks whether it is default_int_handler
            handler = handler_of(signalnum)
            return handler.handler if isinstance(handler, Noting) else handler

        signal.signal, signal.getsignal = signal_, getsignal
        self._signal, self._unraisable = signal_, sys.unraisablehook
        sys.unraisablehook = self._ignored

    def begin(self) -> None:
        """A program begins; in the main thread."""
        self.taken, self.is_on, self._run = False, True, self._run + 1
        self._signal(signal.SIGINT, signal.default_int_handler)

    def end(self) -> None:
        """It has ended: an interrupt comes too late."""
        self._signal(signal.SIGINT, signal.SIG_IGN)
        self.is_on = False

    def _note(self) -> None:
        if self.taken or not self.is_on or os.getpid() != self._process:
            return
        self.taken = True
        self._say()
        clock.sleep(SAY)

    def _ignored(self, unraisable: Any) -> None:
        """What Python cannot raise, since nobody has called what raised it."""
        ours = self.taken and self.is_on and os.getpid() == self._process
        if ours and unraisable.exc_type is KeyboardInterrupt and threading.current_thread() is threading.main_thread():
            threading.Thread(target=self._send_again, args=(self._run,), name="nbddp-interrupt", daemon=True).start()
        else:
            self._unraisable(unraisable)

    def _send_again(self, run: int) -> None:
        clock.sleep(AGAIN)
        if self.is_on and self._run == run:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]
