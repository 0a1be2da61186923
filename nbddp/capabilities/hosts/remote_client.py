"""This side of an agent on another host: the process that connects to it, and whether it still lives.

Neither side of a cut cable hears of it. So both say every few seconds that they live; an agent that has been silent for
SILENT seconds counts as gone, with all that runs there, and what connects to it is ended.
"""

from __future__ import annotations

import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nbddp.agent.child_logs import last_line
from nbddp.agent.client import START_TIMEOUT, AgentClient, without_stop
from nbddp.capabilities.hosts.backlog import Backlog
from nbddp.capabilities.hosts.names import Host
from nbddp.capabilities.hosts.rejoin import GONE
from nbddp.capabilities.hosts.transports import Transport
from nbddp.compat.extra.versions import otherwise
from nbddp.compat.system import existing_working_dir
from nbddp.errors import AgentFailed
from nbddp.launch.units import lasts
from nbddp.protocol.agent import PROTOCOL, Warm
from nbddp.protocol.codec import MARK, PING_EVERY, LineBuffer, Message, encode

SILENT = 8.0  # seconds
AGAIN = 2.0  # seconds between two attempts to connect anew
REJOINING = 15.0  # seconds for one of them
HEARING = 1.0  # seconds for a last word to get there


class RemoteAgentClient(AgentClient):
    """An agent on `host`, which `way` starts and connects to. `log` is a file here: what the way's program and the
    agent have written. command: another than the way's."""

    def __init__(
        self,
        host: Host,
        way: Transport,
        log: Path,
        env: Mapping[str, str],
        command: Sequence[str] = (),
        keep_alive: float = 0.0,
    ):
        """keep_alive: seconds for which the agent lives on where the connection to it is lost, and is tried again.
        Returns at once, while the agent warms up. Raises AgentFailed where there is no such program here."""
        self.host, self.way, self._log = host, way, log
        self._heard = time.monotonic()
        self._silent = False
        self.keep_alive = keep_alive
        self._backlog, self._order = Backlog(), threading.Lock()
        self._away: float | None = None  # since when the connection is lost
        self._next = 0.0  # when it is tried again
        self._why = ""
        process = self._launch([*command] or way.command(host))
        assert process.stdin is not None
        assert process.stdout is not None
        lines = LineBuffer(MARK, self.note_unknown)
        super().__init__(log.parent, process.stdout, process.stdin, env, lines)  # type: ignore[arg-type]
        self.process = process
        here, there = existing_working_dir(), way.address(host)
        with suppress(OSError):  # it has ended already; who waits for it learns why
            process.stdin.write(encode({"env": dict(env), "cwd": here, "reached": there, "keep_alive": keep_alive}))
            process.stdin.flush()
        threading.Thread(target=self._look_after, name="nbddp-ping", daemon=True).start()

    def _launch(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start what connects to the host. Raises AgentFailed where there is no such program here."""
        try:
            with open(self._log, "ab") as log, without_stop():
                return subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0,
                    env=self.way.environment(), start_new_session=True,
                )  # fmt: skip
        except OSError as e:
            raise AgentFailed(
                f"{self.host} cannot be reached: {command[0]} could not be started here ({e.strerror})"
            ) from None

    @property
    def name(self) -> str:
        return f"the agent on {self.host}"

    @property
    def log(self) -> Path:
        return self._log

    @property
    def far_home(self) -> Path:
        """The agent's folder, there."""
        return Path(self.hello.home)

    @property
    def far_bulk(self) -> Path:
        return Path(self.hello.bulk)

    def differences(self, versions: Mapping[str, str], folder: bool = True) -> list[str]:
        """What is otherwise there than here, a line each. Raises AgentFailed where nbddp is another version: the two
        would not understand each other. folder: whether that counts too."""
        other = otherwise(self.hello.versions, versions)
        if "nbddp" in other:
            raise AgentFailed(
                f"{self.host} has nbddp {other['nbddp']}, but this machine has {versions['nbddp']}; install the "
                "same version on both"
            )
        if self.hello.protocol != PROTOCOL:
            raise AgentFailed(
                f"nbddp on {self.host} has protocol {self.hello.protocol}, but nbddp on this machine has protocol "
                f"{PROTOCOL}; install the same build of nbddp {versions['nbddp']} on both"
            )
        lines = [f"{self.host} has {name} {there}; this machine has {versions[name]}" for name, there in other.items()]
        if folder and self.hello.moved:
            lines.append(f"{self.host} has no folder {self.hello.moved}; its workers start in {self.hello.cwd}")
        return lines

    def route_to(self) -> str:
        """The address at which the host is reached, for code that asks the routing table for the way to it."""
        return self.hello.reached

    def wait_warm(self, timeout: float = START_TIMEOUT, waits: Callable[[float], None] = lambda seconds: None) -> Warm:
        """As an agent's here; AgentFailed says what connects to it says, and what to do."""
        self.wait_until(lambda: self.warm is not None or self.closed, timeout, waits)
        if self.warm is None:
            raise AgentFailed(self.way.failure(self.host, self._ended(), self._said()), str(self.log))
        return super().wait_warm(timeout)

    def _ended(self) -> int | None:
        assert self.process is not None
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(1.0 if self.closed else 0.0)
        return None

    def _said(self) -> str:
        return self.lines.before.decode(errors="replace") + self._logged()

    def _logged(self) -> str:
        with suppress(FileNotFoundError):  # it goes with the pool
            return self.log.read_text(errors="replace")
        return ""

    def last_words(self) -> str:
        if self._why:
            return f"gave up on {self.host}: {self._why}"
        if self._silent:
            return f"{self.host} has been silent for {SILENT:.0f} s"
        why = self.way.ended(self.host, self._said())
        return why or f"the connection to {self.host} was lost: {last_line(self._logged())}"

    def ended(self) -> str:
        return self.last_words()

    def taken_away(self) -> str:
        """What took the host away, such as the end of its Slurm job; empty if nothing did, or nobody tells."""
        return self.way.ended(self.host, self._said())

    # -- does it live? ------------------------------------------------------------------------------

    def _take_in(self, message: Message) -> None:
        self._heard = time.monotonic()
        if message.get("ev") == "ping":
            self._backlog.read(message.get("got", 0))
        elif self._backlog.is_new(message):
            super()._take_in(message)

    def tell(self, op: str, **fields: Any) -> None:
        if not self.keep_alive:
            super().tell(op, **fields)
            return
        with self._order:
            message = self._backlog.number({"op": op, **fields})
            if self._away is None:
                with suppress(OSError, ValueError):  # it is sent again when the connection stands
                    self.send(message)

    def _look_after(self) -> None:
        while not self.closed:
            time.sleep(PING_EVERY / 2)
            if self._away is not None:
                self._try_again()
                continue
            with suppress(OSError, ValueError):  # `_listen` reports its end
                self.send_at_once({"op": "ping", "got": self._backlog.got})
            if self.warm is not None and time.monotonic() - self._heard > SILENT:
                self._silent = True
                if self.keep_alive:
                    self._lost(f"it has been silent for {SILENT:.0f} s")
                else:
                    self.gone()
                self.cut()

    def close(self, timeout: float = 10.0) -> None:
        """As an agent's here. One that is not warm yet has started nothing, and ends with its connection. Nobody waits
        for one that is still connecting, or that waits for an answer."""
        self.begin_close()
        assert self.process is not None
        if self.warm is None:
            if self.keep_alive:  # it could survive the connection, unless it has heard that it is to end
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(min(timeout, HEARING))
            self.process.terminate()
        super().close(timeout)

    def kill(self) -> None:
        """End what connects to it; the other side ends by itself when it notices."""
        assert self.process is not None
        self.process.kill()

    def cut(self) -> None:
        """As `kill`, and wait."""
        self.kill()
        assert self.process is not None
        self.process.wait()

    # -- a connection that is lost, where the agent survives it ------------------------------------------

    @property
    def away(self) -> float | None:
        """For how many seconds it has not been reached; None while it is."""
        return None if self._away is None else time.monotonic() - self._away

    def _connection_ended(self) -> None:
        if not self.keep_alive or self.warm is None or self.closed:
            super()._connection_ended()
        else:
            self._lost("the connection was lost")

    def _lost(self, why: str) -> None:
        if self._away is None:
            self._away, self._next = time.monotonic(), 0.0
            self.announce({"ev": "away", "why": why})

    def _try_again(self) -> None:
        """One attempt to connect anew; after `keep_alive` seconds the agent has exited by itself."""
        assert self._away is not None
        now = time.monotonic()
        if now - self._away > self.keep_alive:
            self._why = self._why or f"it could not be reached for {lasts(self.keep_alive)}"
            self.gone()
        elif now >= self._next:
            self._next = now + AGAIN
            code = self._rejoin()
            if code == GONE:
                self._why = "its agent has exited meanwhile"
                self.gone()

    def _rejoin(self) -> int | None:
        """Connect to the agent that lives there; the exit code of what does, if that has ended."""
        self.cut()
        if not self.log.parent.exists():  # the pool has just ended
            return None
        try:
            process = self._launch(self.way.command(self.host, ("nbddp.capabilities.hosts.rejoin", str(self.far_home))))
        except AgentFailed as e:  # this machine may have room for it later
            self._why = str(e)
            return None
        assert process.stdin is not None
        assert process.stdout is not None
        lines, end, came = LineBuffer(MARK, self.note_unknown), time.monotonic() + REJOINING, list[Message]()
        with suppress(OSError):
            process.stdin.write(encode({"op": "own", "got": self._backlog.got}))
        while not came and time.monotonic() < end and not self.closed:
            if select.select([process.stdout], [], [], PING_EVERY)[0]:
                chunk = os.read(process.stdout.fileno(), 65536)
                if not chunk:
                    break
                came += lines.feed(chunk)
        if not came or came[0].get("ev") != "owned":
            with suppress(subprocess.TimeoutExpired):  # it has ended, or is about to
                process.wait(1.0)
            process.kill()
            for stream in (process.stdin, process.stdout):
                with suppress(OSError):
                    stream.close()
            return process.wait()
        self._back(process, lines, came)
        return None

    def _back(self, process: subprocess.Popen[bytes], lines: LineBuffer, came: list[Message]) -> None:
        """The connection stands again. came: what it has brought already."""
        assert process.stdin is not None
        assert process.stdout is not None
        with self._order:
            self.process = process
            self.connect_to(process.stdout, process.stdin, lines)  # type: ignore[arg-type]
            self._backlog.read(came[0]["got"])
            self._away, self._silent, self._why, self._heard = None, False, "", time.monotonic()
            with suppress(OSError, ValueError):  # it has ended again
                for rest in self._backlog.rest():
                    self.send(rest)
        for message in came[1:]:
            self.understand(message)
        self.announce({"ev": "back"})
