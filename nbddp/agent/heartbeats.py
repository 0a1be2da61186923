"""Beats that come quickly while engines register, so that a new worker can be reached at once.

ipyparallel's hub takes an engine in when the heart monitor has heard it answer a beat and the next beat has come: two
periods, 0.4 s of a worker's start. Here the hub says that one is coming, over a pipe; the monitor beats quickly until
each that was announced has answered, and reports it with its first answer. Of later answers it only notes that they
came, since missed beats mean nothing here: the agent knows of every exit. So beats are slow where many answer. Where
the monitor is spawned, not forked (macOS), it beats as ever.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from ipyparallel.controller import app as controller_app
from ipyparallel.controller import heartmonitor

QUICK_MS, MS_PER_HEART = 10, 1  # a beat is answered by all
CALM_MS_PER_HEART = 5  # while none registers: at most 200 answers per second, however many they are
MOST_SECONDS = 10.0  # that one announcement keeps the beat quick: the engine may have died


NEEDED = ("beat", "handle_new_hearts", "handle_pong", "hearts", "responses", "start")  # of a heart monitor


def install() -> None:
    """Have the controller of this process, which is still to be made, and its heart monitor do so. An ipyparallel that
    goes by other names keeps its own beat."""
    hub = getattr(controller_app, "Hub", None)
    if not hasattr(hub, "register_engine") or not all(hasattr(heartmonitor.HeartMonitor, name) for name in NEEDED):
        return
    heard, told = os.pipe()
    os.set_blocking(heard, False)
    os.set_blocking(told, False)
    controller_app.Hub, heartmonitor.HeartMonitor = _hub(told), _heart_monitor(heard)


def _hub(told: int) -> type[Any]:
    class Hub(controller_app.Hub):  # type: ignore[misc]
        """A hub that announces each engine that begins to register."""

        def register_engine(self, *args: Any) -> Any:
            os.write(told, b"1")
            return super().register_engine(*args)

    return Hub


def _heart_monitor(heard: int) -> type[Any]:
    class HeartMonitor(heartmonitor.HeartMonitor):  # type: ignore[misc]
        """A heart monitor that hears of them."""

        awaited, until = 0, 0.0  # engines; by time.monotonic()

        def start(self) -> None:
            super().start()
            asyncio.get_running_loop().add_reader(heard, self.expect)

        def expect(self) -> None:
            self.awaited += len(os.read(heard, 4096))
            self.until = time.monotonic() + MOST_SECONDS
            self.caller.stop()
            self.caller.callback_time = QUICK_MS + MS_PER_HEART * len(self.hearts)
            self.caller.start()

        def beat(self) -> None:
            super().beat()
            if self.awaited <= 0 or time.monotonic() > self.until:
                self.awaited = 0
                self.caller.callback_time = max(self.period, CALM_MS_PER_HEART * len(self.hearts))

        def handle_pong(self, message: list[bytes]) -> None:
            heart = message[0]
            self.responses.add(heart)
            if heart not in self.hearts:
                self.awaited -= 1
                self.handle_new_hearts({heart})

    return HeartMonitor
