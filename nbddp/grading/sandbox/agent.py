"""A node agent for workers that run strangers' code: they are bounded, watched, and all they started ends with them.

It is forked from a process that is warm already, and serves that process. Beyond an ordinary agent it gives each worker
its limits before any code runs there; it inherits what workers leave behind and ends that with itself; several times
a second it counts its descendants and their memory, and ends all workers when they are too many or hold too much; and
it takes orders from its owner alone, since a stranger's code can reach its socket.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbddp.agent import children, orphans, runtime_dir, server, warning_filters
from nbddp.agent.server import CONTROLLER, STORE, WORKER
from nbddp.compat import system
from nbddp.grading.sandbox import rlimits
from nbddp.protocol.codec import Json, Message, encode, from_json, to_json

EVERY = 0.1  # seconds between two counts


@dataclass(frozen=True)
class Guard:
    """What workers may use: each (`limits`), and all together with what they start."""

    limits: dict[str, int]
    processes: int
    memory: int


class GuardedAgent(server.NodeAgent):
    """An agent under a `Guard`."""

    patience = 0.0

    def __init__(self, folder: Path, channel: int, guard: Guard):
        super().__init__(folder, channel, channel)
        self.guard = guard
        self.overrun: dict[int, str] = {}  # workers that were ended for it → why
        self._inherited, self._stack = orphans.memory(os.getpid()), orphans.stack(os.getpid())

    def _watch_children(self) -> None:
        children.adopt_orphans()
        super()._watch_children()
        if system.is_linux():  # elsewhere neither descendants nor their memory are known
            signal.signal(signal.SIGALRM, lambda *_: None)  # wakes the loop
            signal.setitimer(signal.ITIMER_REAL, EVERY, EVERY)

    def _read_signals(self) -> None:
        if system.is_linux():
            self._count()
        super()._read_signals()

    def _start(self, kind: str, request: Message, keep: tuple[int, ...] = ()) -> server.Child:
        if kind == WORKER:
            request = {**request, **rlimits.bounded(self.guard.limits)}
        return super()._start(kind, request, keep)

    def tell_all(self, **message: Any) -> None:
        if message["ev"] == "exit" and message["pid"] in self.overrun:
            message["overrun"] = self.overrun.pop(message["pid"])
        super().tell_all(**message)

    def _handle_all(self, peer: server.Peer, chunk: bytes) -> None:
        """A peer that is not the owner may be a worker's own code: nothing it sends is read, and it is not waited for.
        (Workers ask that their pipes be held; what strangers print is dropped.)"""
        if peer.owner:
            super()._handle_all(peer, chunk)
        else:
            with suppress(OSError):  # it has gone, or does not read
                peer.send(encode({"error": "this agent takes orders only from its owner"}))

    # -- the watch -----------------------------------------------------------------------

    def _count(self) -> None:
        """End all workers, and what they have started, if that is too much; this agent too, if what carries their
        messages holds too much."""
        ours = {pid for pid, c in self.children.items() if c.kind in (CONTROLLER, STORE)}
        found = list(orphans.tree(ours))
        if len(found) > self.guard.processes:
            self._end_workers(ours, f"its ranks had more than {self.guard.processes} processes")
        elif self._held(found) > self.guard.memory:
            self._end_workers(ours, f"its ranks held more than {self.guard.memory >> 20} MiB of memory")
        if self._held(list(ours)) > self.guard.memory:
            self.running = False

    def _held(self, pids: Collection[int]) -> int:
        """Bytes of memory of these processes, less what those that were forked had from this one to begin with. (Linux
        can count the memory that they really share too, but takes 200 times as long, and more with every page.)"""
        return sum(orphans.memory(p) - self._inherited * (orphans.stack(p) == self._stack) for p in pids)

    def _end_workers(self, ours: Collection[int], why: str) -> None:
        workers = {pid for pid, c in self.children.items() if c.kind == WORKER}
        self.overrun |= dict.fromkeys(workers, why)
        for pid in workers:
            orphans.kill(pid)
        for pid in workers:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # its children are ours then
        orphans.end({*ours, *workers})

    def _end(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        super()._end()


def launch(env: Mapping[str, str], guard: Guard, close: Collection[int] = ()) -> tuple[Path, int, socket.socket]:
    """Start a guarded agent, forked from this process if that may be forked; its folder, its pid, and the connection to
    it.

    close: descriptors that are not for it.
    """
    home = runtime_dir.new_home()
    ours, theirs = socket.socketpair()
    with theirs:
        if children.why_not_fork():
            with open(home / "agent.log", "ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(home), str(os.getpid()), str(theirs.fileno()),
                     json.dumps(to_json(guard))],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[theirs.fileno()], env=dict(env),
                    start_new_session=True,
                )  # fmt: skip
            process.returncode = 0  # reaped with all others
            pid = process.pid
        else:
            request = {
                "log": str(home / "agent.log"), "env": dict(env), "cwd": os.getcwd(), "path": list(sys.path),
                "home": str(home), "guard": to_json(guard), "channel": theirs.fileno(),
            }  # fmt: skip
            pid = children.start(f"{__name__}:forked", request, close=[*close, ours.fileno()])
    return home, pid, ours


def forked(request: Json) -> int:
    """Be the agent, in a forked process."""
    _serve(Path(request["home"]), request["channel"], request["guard"])
    return 0


def _serve(home: Path, channel: int, guard: Json) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(channel, False)
    rlimits.hide()
    GuardedAgent(home, channel, from_json(Guard, guard)).serve()


if __name__ == "__main__":
    warning_filters.put_off()
    children.die_with_parent(int(sys.argv[2]), signal.SIGTERM)
    _serve(Path(sys.argv[1]), int(sys.argv[3]), json.loads(sys.argv[4]))
    os._exit(0)
