"""This side of an agent on another host: the process that connects to it, and whether it still lives.

Neither side of a cut cable hears of it. So both say every few seconds that they live; an agent that has been silent for
SILENT seconds counts as gone, with all that runs there, and what connects to it is ended.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from nbddp.agent.handle import START_TIMEOUT, Agent, without_stop
from nbddp.agent.lines import MARK, LineBuffer, Message, encode
from nbddp.agent.reach import Ssh, failure
from nbddp.agent.reached import PING_EVERY
from nbddp.errors import AgentFailed
from nbddp.plan.hosts import Host

SILENT = 8.0  # seconds


class FarAgent(Agent):
    """An agent on `host`, which `command` connects to. `log` is a file here: what ssh and the agent have written."""

    def __init__(self, host: Host, command: Sequence[str], log: Path, env: Mapping[str, str], cwd: str, ssh: Ssh):
        self.host, self.ssh, self._log = host, ssh, log
        self._heard = time.monotonic()
        self._silent = False
        with open(log, "ab") as file, without_stop():
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                bufsize=0,
                start_new_session=True,
            )
        assert process.stdin is not None
        assert process.stdout is not None
        super().__init__(log.parent, process.stdout, process.stdin, env, LineBuffer(MARK))  # type: ignore[arg-type]
        self.process = process
        with suppress(OSError):  # it has ended already; who waits for it is told why
            process.stdin.write(encode({"env": dict(env), "cwd": cwd}))
            process.stdin.flush()
        threading.Thread(target=self._keep_alive, name="nbddp-ping", daemon=True).start()

    @classmethod
    def by_ssh(cls, host: Host, ssh: Ssh, log: Path, env: Mapping[str, str]) -> FarAgent:
        """Connect to a host; returns at once, while its agent warms up."""
        return cls(host, ssh.command(host), log, env, os.getcwd(), ssh)

    @property
    def log(self) -> Path:
        return self._log

    @property
    def far_home(self) -> Path:
        """The agent's folder, there."""
        return Path(self.hello["home"])

    @property
    def far_bulk(self) -> Path:
        return Path(self.hello["bulk"])

    def differences(self, versions: Mapping[str, str]) -> list[str]:
        """What is otherwise there than here, a line each. Raises AgentFailed where nbddp is another version: the two
        would not understand each other."""
        theirs = self.hello["versions"]
        other = {name: theirs.get(name, "none") for name, here in versions.items() if theirs.get(name) != here}
        if "nbddp" in other:
            raise AgentFailed(
                f"{self.host} has nbddp {other['nbddp']}, and here is {versions['nbddp']}; install the same on both"
            )
        lines = [f"{self.host} has {name} {there}, and here is {versions[name]}" for name, there in other.items()]
        if self.hello["moved"]:
            lines.append(f"{self.host} has no folder {self.hello['moved']}; its workers begin in {self.hello['cwd']}")
        return lines

    def route_to(self) -> str:
        """The address at which the host is reached, for those who ask the kernel for the way to it."""
        return str(self.hello["reached"])

    def wait_warm(self, timeout: float = START_TIMEOUT) -> Message:
        """As an agent's here; AgentFailed says what ssh says, and what to do."""
        self.wait_until(lambda: self.warm is not None or self.closed, timeout)
        if self.warm is None:
            raise AgentFailed(failure(self.host, self.ssh, self._ended(), self._said()), str(self.log))
        return super().wait_warm(timeout)

    def _ended(self) -> int | None:
        assert self.process is not None
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(1.0 if self.closed else 0.0)
        return None

    def _said(self) -> str:
        printed = self.lines.before.decode(errors="replace")
        return printed + self.log.read_text(errors="replace")

    def last_words(self) -> str:
        if self._silent:
            return f"{self.host} has been silent for {SILENT:.0f} s"
        return f"the connection to {self.host} has ended: {super().last_words()}"

    # -- does it live? ------------------------------------------------------------------------------

    def _take_in(self, message: Message) -> None:
        self._heard = time.monotonic()
        if message.get("ev") != "ping":
            super()._take_in(message)

    def _keep_alive(self) -> None:
        while not self.closed:
            time.sleep(PING_EVERY / 2)
            try:
                self.tell("ping")
            except AgentFailed:  # its end is told by `_listen`
                return
            if self.warm is not None and time.monotonic() - self._heard > SILENT:
                self._silent = True
                self.gone()
                self.cut()

    def cut(self) -> None:
        """End what connects to it; the other side ends by itself when it notices."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
