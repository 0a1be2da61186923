"""The grader's end of the processes in which learners' files are read and run: text goes there, plain data comes back.

`Server` is the warm process that forks them (`grading.sandbox.forkserver`), `ForkedProcess` one of them. An answer is
one line of JSON, bounded in size and waited for no longer than it is given; a process that ends, or says anything else,
is `Gone`. Nothing a learner wrote is ever run, imported or unpickled here.
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import nbddp
from nbddp.agent import orphans
from nbddp.agent.child_logs import cause
from nbddp.agent.client import without_stop
from nbddp.agent.hardware import own_threads
from nbddp.compat import system
from nbddp.errors import NbddpError
from nbddp.grading.sandbox.forkserver import remove
from nbddp.grading.sandbox.rlimits import Limits
from nbddp.protocol.codec import Message, encode, parsed

KEPT = (
    "PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "PYTHONPATH", "PYTHONHOME", "PYTHONWARNINGS", "VIRTUAL_ENV",
    "CONDA_PREFIX", "LD_LIBRARY_PATH", "MALLOC_ARENA_MAX", "NBDDP_START_METHOD",
)  # fmt: skip  # variables that learners' code may see, LC_… as well
LONGEST = 8 << 20  # bytes of a line
ACCOUNT = 1000  # processes and threads that the account may have beyond those it has


class Gone(NbddpError):
    """A process ended, took too long, or sent something it may not send. The message says which, as a clause."""


def environment(names: Sequence[str] = ()) -> dict[str, str]:
    """This process's variables, restricted to KEPT and `names`."""
    kept = {n: v for n, v in os.environ.items() if n in KEPT or n in names or n.startswith("LC_")}
    root = str(Path(nbddp.__file__).parents[1])
    path = [root, *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]
    ours = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(path)), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**kept, **ours}


def bounds(memory: int, cpu: int) -> dict[str, int]:
    """`Limits` of a process that runs or reads what a learner wrote."""
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    account = 0 if os.geteuid() == 0 or not system.is_linux() else own_threads() + ACCOUNT
    if hard != resource.RLIM_INFINITY:
        account = min(account, hard)
    return Limits(memory=memory, cpu=cpu, account=account).request()


class Channel:
    """A socket on which the other side answers each line with a line."""

    def __init__(self, end: socket.socket):
        self.end, self._rest = end, b""

    def say(self, message: Mapping[str, object], fds: Sequence[int] = ()) -> None:
        """Raises Gone."""
        try:
            self.end.settimeout(60)
            data = encode(dict(message))
            sent = socket.send_fds(self.end, [data], list(fds)) if fds else 0
            self.end.sendall(data[sent:])
        except OSError:
            raise Gone("has ended") from None

    def hear(self, seconds: float) -> Message:
        """The next line, which must be an object. Raises Gone."""
        until = time.monotonic() + seconds
        while b"\n" not in self._rest:
            self._rest += self._more(until, seconds)
            if len(self._rest) > LONGEST:
                raise Gone("sent too much")
        line, _, self._rest = self._rest.partition(b"\n")
        found = parsed(line)
        if found is None:
            raise Gone("sent an invalid answer")
        return found

    def _more(self, until: float, seconds: float) -> bytes:
        try:
            self.end.settimeout(max(0.001, until - time.monotonic()))
            chunk = self.end.recv(1 << 16)
        except TimeoutError:
            raise Gone(f"has not answered for {seconds:.0f} s") from None
        except OSError:
            chunk = b""
        if not chunk:
            raise Gone("has ended")
        return chunk

    def close(self) -> None:
        self.end.close()


class Server:
    """The warm process. sandbox: a command before its own (`bwrap …`), which all that it starts is in, too; names:
    variables that learners' code may see besides; adopts: this process adopts orphans (`children.adopt_orphans`) and
    has no other children."""

    def __init__(self, sandbox: Sequence[str] = (), names: Sequence[str] = (), adopts: bool = False):
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        command = [*sandbox, sys.executable, "-m", "nbddp.grading.sandbox.forkserver", str(theirs.fileno())]
        try:
            with without_stop():
                self.process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], env=environment(names), stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL, stderr=self._log, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            ours.close()
            self._log.close()
            raise Gone(f"could not be started: {error}") from None
        finally:
            theirs.close()
        self.channel, self._lock, self._lost = Channel(ours), threading.Lock(), False
        self._folders: set[str] = set()  # where what it has started keeps its files
        self._sandboxed, self._adopts = bool(sandbox), adopts

    @property
    def lost(self) -> bool:
        """Whether it has ended, or does not answer any more."""
        return self._lost or self.process.poll() is not None

    def ask(self, message: Mapping[str, object], seconds: float, fds: Sequence[int] = ()) -> Message:
        """The answer to an order. Raises Gone, also if it could not be carried out."""
        with self._lock:
            try:
                self.channel.say(message, fds)
                answer = self.channel.hear(seconds)
            except Gone as gone:
                self._lost = True
                raise Gone(f"is lost, because the warm process {gone}{self._last_words()}") from None
            except BaseException:  # Stop: the next one who asks would hear this answer
                self._lost = True
                raise
        if "folder" in answer:
            self._folders.add(str(answer["folder"]))
        if "error" in answer:
            raise Gone(f"is lost: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 2000))
        said = cause(self._log.read().decode(errors="replace"))
        return f": {said}" if said else ""

    def start(self, target: str, request: Mapping[str, object]) -> ForkedProcess:
        """A process of its own, forked; see `grading.sandbox.forkserver`. Raises Gone."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                answer = self.ask({"op": "start", "target": target, "request": request}, 60, [theirs.fileno()])
            except Gone:
                ours.close()
                raise
        return ForkedProcess(self, Channel(ours), int(answer["pid"]))

    def close(self) -> None:
        """End it, with all that it has started."""
        self.channel.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self._adopts:  # where it was killed: what it has left would write into a folder that is gone
            orphans.end()
        for folder in () if self._sandboxed else self._folders:  # it may have been ended before it could remove that
            remove(folder)
        self._log.close()


class ForkedProcess:
    """A process that a `Server` has forked, with a socket to it."""

    def __init__(self, server: Server, channel: Channel, pid: int):
        self.server, self.channel, self.pid = server, channel, pid

    def ask(self, message: Mapping[str, object], seconds: float) -> Message:
        """Its answer. Raises Gone."""
        self.channel.say(message)
        return self.channel.hear(seconds)

    def end(self) -> str:
        """End it and all that it has started; what its log says last. Raises Gone if that cannot be done."""
        self.channel.close()
        answer = self.server.ask({"op": "end", "pid": self.pid}, 60)
        if answer["left"]:
            raise Gone(f"processes {answer['left']} could not be ended")
        return str(answer["log"])

    def dismiss(self) -> None:
        """As `end`, where nothing more can be done if that fails: its server has gone, and it with that."""
        with suppress(Gone):
            self.end()
