"""Stop around a notebook's cells: from the notebook kernel's first look at a cell to its answer.

ipykernel answers a cell whose code was interrupted. ipykernel reads a request before, and writes the answer after. An
interrupt in those moments leaves the cell without an answer, and the notebook waits. So Stop is put off until the code
runs, and is too late when it has run. A cell that is one command of ours hears Stop at the command's own checks
(`agent.stop`), until its result is shown.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from typing import Any

from nbddp.agent import stop

PUT_OFF, TIMES = 0.01, 20  # seconds, and how often: a callback of a widget is no cell, and must be stopped too
COMMAND = re.compile(r"\s*(#[^\n]*\n\s*)*(%%ddp\b|%ddp\b[^\n]*\Z)")  # a cell that is one command, under comments


class NotebookInterrupts:
    """Hooks into one shell's events and its kernel's."""

    def __init__(self, shell: Any):
        self.shell = shell
        self._request = 0
        self._depth = 0  # cells whose code runs, each in the one before: %run and others run cells
        self._ended = False
        self._times = 0
        self._hook: Any = None
        self._is_ipykernels = False
        self._events = {
            "pre_run_cell": self._before,
            "post_run_cell": self._after,
            "post_execute": self._end,
        }

    def install(self) -> None:
        for name, call in self._events.items():
            self.shell.events.register(name, call)
        self._depth = 1  # that which loads the extension
        self._run_code = self.shell.run_code
        self.shell.run_code = self._running
        kernel = getattr(self.shell, "kernel", None)
        self._hook = getattr(kernel, "pre_handler_hook", None)
        own = getattr(sys.modules.get("ipykernel.kernelbase"), "Kernel", None)
        self._is_ipykernels = own is not None and getattr(self._hook, "__func__", None) is own.pre_handler_hook
        if kernel is not None and self._hook is not None:
            kernel.pre_handler_hook = self._before_request

    def remove(self) -> None:
        for name, call in self._events.items():
            self.shell.events.unregister(name, call)
        self.shell.run_code = self._run_code
        if self._hook is not None:
            self.shell.kernel.pre_handler_hook = self._hook
            self._hook = None

    def _before_request(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._hook()
            return
        self._request, self._times, self._depth, self._ended = self._request + 1, 0, 0, False
        if not self._is_ipykernels:
            self._hook()
            signal.signal(signal.SIGINT, self._hear)
        else:  # the hook would set Python's handler first, and an interrupt in that moment ends the notebook kernel
            self.shell.kernel.saved_sigint_handler = signal.signal(signal.SIGINT, self._hear)

    def _hear(self, number: int, frame: Any) -> None:
        if self._depth or self._times >= TIMES:
            signal.default_int_handler(number, frame)
        if not self._ended:
            self._times += 1
            threading.Timer(PUT_OFF, self._again, (self._request,)).start()

    def _again(self, request: int) -> None:
        if request == self._request and not self._ended:
            os.kill(os.getpid(), signal.SIGINT)

    async def _running(self, *args: Any, **kwargs: Any) -> Any:
        """IPython's `run_code`: its caller answers an interrupt of it, but not one that comes after."""
        if threading.current_thread() is not threading.main_thread():
            return await self._run_code(*args, **kwargs)
        try:
            self._depth += 1
            self._handle(self._hear, signal.default_int_handler)  # which has no frame that a traceback would show
            return await self._run_code(*args, **kwargs)
        finally:
            self._depth -= 1
            self._put_off()

    def _end(self) -> None:
        self._ended = not self._depth
        self._put_off()

    def _put_off(self) -> None:
        if self._hook is not None and not self._depth:
            self._handle(signal.default_int_handler, self._hear)

    def _handle(self, now: Any, then: Any) -> None:
        """Change the handler, where it is not one of the program's."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) == now:
            signal.signal(signal.SIGINT, then)

    def _before(self, info: Any) -> None:
        if COMMAND.match((info.raw_cell or "").rstrip()):
            stop.begin(pressed=self._times > 0)

    def _after(self, result: Any) -> None:
        stop.end()
        self._put_off()
