"""A panel's buttons while a cell runs: the cell's own wait hears the notebook kernel's shell channel.

A running cell blocks the channel on which a front end says that a button was pressed. So a run that waits for its ranks
also waits for that channel. It handles messages for widgets at once, and those of a tab that has just been opened. All
else is left to ipykernel, in its order, for when the cell has ended. What was read together with the cell's own message
is not on the channel any more: ipykernel 6 has it in a queue. With ipykernel 7.0 to 7.3 JupyterLab sends clicks to a
thread, past this; with a kernel that cannot be heard so, they come after the cell.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import threading
import time
from typing import Any

import zmq

from nbddp.compat.extra import ipykernel as ipykernel_extra

NOW = ("comm_open", "comm_msg", "comm_close", "kernel_info_request", "comm_info_request")


class Pump:
    """The shell channel of the running kernel, during one run. Made and used in the main thread."""

    def __init__(self, kernel: Any):
        self.shell, self.kernel = ipykernel_extra.Shell(kernel), kernel
        self.loop = asyncio.get_event_loop_policy().get_event_loop() if self.shell.threaded else None
        self._poller = zmq.Poller()
        self._poller.register(self.shell.socket, zmq.POLLIN)
        self._heard: int | None = None
        self._early = self.shell.taken()

    def wait(self, descriptor: int, seconds: float | None) -> None:
        """Handle messages until the descriptor can be read, or the time is over."""
        if self._heard != descriptor:
            self._poller.register(descriptor, zmq.POLLIN)
            self._heard = descriptor
        early, self._early = self._early, []
        for raw in early:
            self._handle(raw)
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            ready = dict(self._poller.poll(None if left is None else round(left * 1000 + 0.5)))
            if self.shell.socket in ready:
                self._take()
            if descriptor in ready or not ready:
                return

    def close(self) -> None:
        """Have ipykernel hear the channel again."""
        for raw in self._early:  # of a run that has waited for nothing
            self.shell.later(self.loop, raw)
        self.shell.stream.flush(zmq.POLLIN)

    def _take(self) -> None:
        while True:
            try:
                raw = self.shell.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._handle(raw)

    def _handle(self, raw: list[Any]) -> None:
        try:
            idents, message = self._read(raw)
        except Exception:  # malformed, or signed wrongly: ipykernel reports it, and the waiting cell continues
            idents, message = [], None
        if message is None:
            self.shell.later(self.loop, raw)
            return
        self.shell.say("busy", message)
        try:
            answer = self.kernel.shell_handlers[message["msg_type"]](self.shell.reply, idents, message)
            if inspect.iscoroutine(answer):
                _run_now(answer)
        finally:
            self.shell.say("idle", message)
            self.shell.say("busy", self.shell.cell)

    def _read(self, raw: list[Any]) -> tuple[list[Any], Any]:
        """Who sent a message, and the message; None for one that is for later."""
        session = self.kernel.session
        idents, frames = session.feed_identities(raw, copy=False)
        kind = json.loads(bytes(frames[1].buffer))["msg_type"]
        return idents, session.deserialize(frames, content=True, copy=False) if kind in NOW else None


def _run_now(answer: Any) -> None:
    """Carry out a coroutine that waits for nothing."""
    try:
        answer.send(None)
    except StopIteration:
        return
    answer.close()


def can_hear() -> bool:
    """Whether the cell that runs now can hear the front end: in the main thread of a kernel that allows it."""
    kernel = _kernel()
    here = threading.current_thread() is threading.main_thread()
    return here and kernel is not None and not ipykernel_extra.lacks_of_shell(type(kernel))


def pump() -> Pump | None:
    """A pump for the cell that runs now; None where it cannot be heard."""
    return Pump(_kernel()) if can_hear() else None


def _kernel() -> Any:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None)
