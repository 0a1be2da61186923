"""The client's end of an agent: requests with answers, and events, over a socket, or the pipes of what connects to it.

One reader thread takes the lines in; whoever asked waits on a condition. A line that is no message, and a message that
nobody understands, are noted in the log, and the next one is read. Nothing here knows what the messages mean, except
that the agent says `warm` once it is ready. A capability may have agents that need not be started (`AgentSource`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from nbddp.agent import runtime_dir, stop
from nbddp.agent.child_logs import cause
from nbddp.agent.process_id import ProcessId
from nbddp.compat import system
from nbddp.errors import AgentFailed
from nbddp.protocol.agent import CONTROLS_ONLY, Hello, Warm
from nbddp.protocol.capability import load, rows
from nbddp.protocol.codec import LineBuffer, Message, encode, from_json, unknown_words

ROOM = 4096  # bytes that a log needs
NO_SOURCE = "nothing here keeps a process"
SLICE = 0.1  # seconds between two looks whether Stop was pressed
START_TIMEOUT = 120.0  # a cold import of torch from a slow disk


class Offer(Protocol):
    """A process that has been asked to be the agent of a new pool."""

    def take(self, env: Mapping[str, str]) -> AgentClient | None:
        """The agent that it has become, as one launched with `env`; None if it is no good, or somebody else's."""


class AgentSource(Protocol):
    """What has agents that need not be started, and keeps those that have been."""

    def ask(self, env: Mapping[str, str]) -> Offer | None:
        """Ask a process to be the agent that `env` would launch; returns at once. None if there is none."""

    def facts(self, env: Mapping[str, str]) -> Message:
        """What is to be known of an agent that is about to be launched, for `keep`."""

    def keep(self, agent: AgentClient, seconds: float) -> None:
        """Have the agent's process go on for so long after its owner; 0: not at all."""

    def why_not(self, agent: AgentClient) -> str:
        """Why a warm agent's process cannot be kept; empty if it can."""


def source() -> AgentSource | None:
    """The one of the table."""
    return next((load(row.agents)() for row in rows() if row.agents), None)


def ask(env: Mapping[str, str]) -> Offer | None:
    """Ask a process that waits to be this process's agent, for `AgentClient.launch`; returns at once. None if there is
    none."""
    found = source()
    return found.ask(env) if found is not None else None


class AgentClient:
    """A running node agent, seen from a client.

    `home` is its folder; `env` the environment it was started with. Callbacks given to
    `on_event` are called in the reader thread with every event.
    """

    def __init__(
        self, home: Path, read: BinaryIO, write: BinaryIO, env: Mapping[str, str], lines: LineBuffer | None = None
    ):
        self.home, self.env = home, dict(env)
        self._hello: Hello | None = None
        self.warm: Warm | None = None
        self.controls_only = False
        self.process: subprocess.Popen[bytes] | None = None
        self._read, self._write = read, write
        self.facts: Message = {}  # of its source, where it was launched here
        self._connection: socket.socket | None = None
        self._owned = True  # whether it serves us alone
        self._over = threading.Event()
        self._last_words = ""  # where its log is gone
        self.outlives = False  # whether its process may go on without us
        self._ids = itertools.count(1)
        self._answers: dict[int, Message] = {}
        self._callbacks: list[Callable[[Message], None]] = []
        self._changed = threading.Condition()
        self.closed = False
        self.lines = lines or LineBuffer(unknown=self.note_unknown)
        self._sending = threading.Lock()
        threading.Thread(target=self._listen, name="nbddp-agent", daemon=True).start()

    @classmethod
    def launch(cls, env: Mapping[str, str], asked: Offer | None = None, controls_only: bool = False) -> AgentClient:
        """Start an agent on this machine; returns at once, while it warms up.

        asked: what becomes the agent instead, if it is still good for it. controls_only: the workers will be on other
        hosts, so torch is not imported here.
        """
        kept_by = source()
        facts = kept_by.facts(env) if kept_by is not None else {}
        agent = (asked.take(env) if asked is not None else None) or cls._start(env, controls_only)
        agent.facts = facts
        return agent

    @classmethod
    def _start(cls, env: Mapping[str, str], controls_only: bool) -> AgentClient:
        runtime_dir.running()  # sweeps what a killed agent left
        home = runtime_dir.new_home()
        what = [CONTROLS_ONLY] if controls_only else []
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "nbddp.agent", str(home), str(os.getpid()), str(theirs.fileno()), *what]
        try:
            with theirs, open(home / "agent.log", "ab") as log, without_stop():
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[theirs.fileno()],
                    env=own_env(env), start_new_session=True,
                )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        agent = cls.at(ours, home, env)
        agent.process, agent.controls_only = process, controls_only
        return agent

    @classmethod
    def connect(cls, home: Path) -> AgentClient:
        """Join a running agent by its socket. Raises AgentFailed."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(runtime_dir.socket_of(home)))
        except OSError as e:
            raise AgentFailed(f"the pool {home.name} does not answer: {e.strerror}") from None
        return cls.at(connection, home, {}, owned=False)

    @classmethod
    def at(cls, connection: socket.socket, home: Path, env: Mapping[str, str], owned: bool = True) -> AgentClient:
        """The agent at the other end. owned: whether it serves us alone."""
        stream = connection.makefile("rwb", buffering=0)
        agent = cls(home, stream, stream, env)  # type: ignore[arg-type]
        agent._connection, agent._owned = connection, owned
        return agent

    @property
    def log(self) -> Path:
        """What the agent has written."""
        return self.home / "agent.log"

    @functools.cached_property
    def bulk(self) -> Path:
        """The folder of the pool's output."""
        return runtime_dir.bulk(self.home)

    @property
    def hello(self) -> Hello:
        """Its first message about itself. Raises AgentFailed if there was none."""
        if self._hello is None:
            raise AgentFailed(self.ended())
        return self._hello

    @property
    def pool_id(self) -> str:
        return self.home.name

    @property
    def name(self) -> str:
        """As errors call it."""
        return "the node agent"

    @property
    def alive(self) -> bool:
        return not self.closed

    def on_event(self, callback: Callable[[Message], None]) -> None:
        self._callbacks.append(callback)

    def wait_warm(self, timeout: float = START_TIMEOUT, waits: Callable[[float], None] = lambda seconds: None) -> Warm:
        """Wait until workers can be started; what the agent said then (devices, cores, host). waits: gets the
        seconds of waiting, several times in each."""
        self.wait_until(lambda: self.warm is not None or self.closed, timeout, waits)
        if self.warm is None:
            why = "exited while starting" if self.closed else f"was not ready after {timeout:.0f} s"
            raise AgentFailed(f"the node agent {why}: {self.last_words()}", str(self.log))
        if self.warm.missing:
            raise AgentFailed(
                f"a worker needs {self.warm.missing}; install it in the environment of the notebook kernel"
            )
        return self.warm

    def request(self, op: str, *, timeout: float = 30.0, **fields: Any) -> Message:
        """Ask and wait for the answer. Raises AgentFailed if it is an error, or does not come."""
        return self.take(self.post(op, **fields), timeout)

    def post(self, op: str, **fields: Any) -> int:
        """Send a request without waiting; its id, for `take`."""
        key = next(self._ids)
        self.tell(op, id=key, **fields)
        return key

    def tell(self, op: str, **fields: Any) -> None:
        """Send a request that wants no answer."""
        try:
            self.send({"op": op, **fields})
        except TimeoutError:  # an OSError, and of the caller's own: no pipe raises it
            raise
        except (OSError, ValueError):
            raise AgentFailed(self.ended()) from None

    def send(self, message: Message) -> None:
        """Raises OSError, or ValueError where the connection was lost."""
        with self._sending:
            self._put(message)

    def send_at_once(self, message: Message) -> None:
        """`send` for a short message, which is dropped if it would have to wait. Then the other side does not read, and
        another message may be stuck."""
        if self._sending.acquire(blocking=False):
            try:
                ready = select.poll()
                ready.register(self._write, select.POLLOUT)
                if ready.poll(0):
                    self._put(message)
            finally:
                self._sending.release()

    def _put(self, message: Message) -> None:
        """`send`, for who has the connection."""
        data = encode(message)
        while data:  # unbuffered, so a signal may cut it
            data = data[self._write.write(data) or 0 :]
        self._write.flush()

    def connect_to(self, read: BinaryIO, write: BinaryIO, lines: LineBuffer) -> None:
        """Go on by another connection to the same agent."""
        with self._sending:
            with contextlib.suppress(OSError):
                self._write.close()
            self._read, self._write, self.lines = read, write, lines
        threading.Thread(target=self._listen, name="nbddp-agent", daemon=True).start()

    def take(self, key: int, timeout: float = 30.0) -> Message:
        """Wait for the answer to a posted request."""
        self.wait_until(lambda: key in self._answers or self.closed, timeout)
        answer = self._answers.pop(key, None)
        if answer is None:
            raise AgentFailed(self.ended() if self.closed else f"{self.name} did not answer for {timeout:.0f} s")
        if "error" in answer:
            raise AgentFailed(f"{self.name} failed: {answer['error']}")
        return answer

    def wait_until(
        self, done: Callable[[], bool], timeout: float, waits: Callable[[float], None] = lambda seconds: None
    ) -> None:
        began = time.monotonic()
        end = began + timeout
        while not self._changed_to(done, min(SLICE, max(0.0, end - time.monotonic()))):
            stop.check()
            if time.monotonic() >= end:
                return
            waits(time.monotonic() - began)

    def _changed_to(self, done: Callable[[], bool], timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(done, timeout)

    def keep(self, seconds: float) -> None:
        """Let the warm process survive its owner for so long, where it can (`why_not_kept`); 0: not at all."""
        kept_by = source()
        if kept_by is not None:
            kept_by.keep(self, seconds)

    def why_not_kept(self) -> str:
        """Why its process, which is warm, ends with its owner; empty if it can go on."""
        kept_by = source()
        return NO_SOURCE if kept_by is None else kept_by.why_not(self)

    def stop(self) -> None:
        """As `close`, and nothing of it is kept."""
        self.begin_stop()
        self.close()

    def begin_stop(self) -> None:
        """Say that it is to end, and nothing of it is kept; `close` waits for it."""
        with contextlib.suppress(AgentFailed):  # it has ended already
            self.tell("stop")
        self.begin_close()

    def begin_close(self) -> None:
        """Say that we leave; `close` waits for what comes of it."""
        self.closed = True
        with contextlib.suppress(OSError):  # the other end may be gone
            if self._connection is not None:
                self._connection.shutdown(socket.SHUT_WR if self._owned else socket.SHUT_RDWR)
            elif self.process is not None:
                self.process.stdin.close()  # type: ignore[union-attr]

    def close(self, timeout: float = 10.0) -> None:
        """End an agent that was launched here, with all its children; leave one that was joined. What is not through in
        time is killed, unless it is to go on as a warm process: it knows that we have gone."""
        self.begin_close()
        if self.process is not None:
            self._end_process(self.process, timeout)
        elif self._owned and not self._over.wait(timeout) and not self.outlives:
            self.kill()
        if self._connection is not None:
            self._connection.close()
        self._callbacks.clear()

    def _end_process(self, process: subprocess.Popen[bytes], timeout: float) -> None:
        """As `close`, where it is a child of this process."""
        is_importing = self._hello is not None and self.warm is None  # it would not listen before it has imported all
        if is_importing and not self.outlives:
            process.terminate()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            if not self.outlives:
                self.kill()
                process.wait()

    def kill(self) -> None:
        """Kill the agent; its keeper clears up."""
        agent = ProcessId(self.hello.pid, self.hello.started).process() if self._hello is not None else None
        if agent is not None:
            agent.kill()
        elif self.process is not None:
            self.process.kill()

    def sweep(self) -> None:
        """It has ended, perhaps without removing its folder; what it said last is kept here."""
        self._last_words = self.last_words()
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
        runtime_dir.sweep(self.home)

    def last_words(self) -> str:
        """Why the agent has exited, by its log; else how, and whether it had room for a log."""
        if self._last_words:
            return self._last_words
        try:
            log = self.log.read_text(errors="replace")
        except OSError:
            return "its log is gone"
        here = system.working_dir()
        entries = []
        with contextlib.suppress(OSError):
            entries = os.listdir(here) if here else []
        return cause(log, here, entries) or self._how_it_ended()

    def _how_it_ended(self) -> str:
        with contextlib.suppress(OSError):
            if shutil.disk_usage(self.home).free < ROOM:
                return (
                    f"the disk of {self.home.parent} is full; free some space, or set NBDDP_RUNTIME_DIR to a folder on "
                    "another disk"
                )
        code = self.process.poll() if self.process is not None else None
        if code is None:
            return "it left no message"
        return f"it left no message ({f'exit code {code}' if code >= 0 else f'signal {-code}'})"

    def ended(self) -> str:
        """That it has, and what it said last."""
        return f"the node agent has exited: {self.last_words()}"

    def _listen(self) -> None:
        lines, read = self.lines, self._read
        while True:
            try:
                chunk = os.read(read.fileno(), 65536)
            except (OSError, ValueError):
                chunk = b""
            if not chunk:
                break
            for message in lines.feed(chunk):
                self.understand(message)
        read.close()
        if read is self._read:  # else it was left for another
            self._connection_ended()

    def understand(self, message: Message) -> None:
        """Take a message in. One that makes no sense to who hears it ends no listening: its error is reported."""
        try:
            if message.get("ev") == "ended":
                self.gone()
            self._take_in(message)
        except Exception as e:
            self.note_unknown(encode(message))
            threading.excepthook(threading.ExceptHookArgs((type(e), e, e.__traceback__, threading.current_thread())))

    def note_unknown(self, line: bytes) -> None:
        """Note in the log what is no message of the agent's. The log goes with the pool."""
        with contextlib.suppress(OSError), open(self.log, "a", encoding="utf-8") as log:
            log.write(f"{unknown_words(line)}\n")

    def _connection_ended(self) -> None:
        """There is nothing more to read there."""
        self._over.set()
        self.gone()

    def gone(self) -> None:
        """The agent has ended, or says that it ends now."""
        with self._changed:
            closed_by_us, self.closed = self.closed, True
            self._changed.notify_all()
        if not closed_by_us:
            self.announce({"ev": "gone"})

    def _take_in(self, message: Message) -> None:
        with self._changed:
            if message.get("ev") == Hello.ev:
                self._hello = from_json(Hello, message)
            elif message.get("ev") == Warm.ev:
                self.warm = from_json(Warm, message)
            elif "id" in message:
                self._answers[message["id"]] = message
            self._changed.notify_all()
        if "ev" in message:
            self.announce(message)

    def announce(self, message: Message) -> None:
        """Tell everybody who has asked for events."""
        for callback in list(self._callbacks):
            callback(message)


def own_env(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of an agent."""
    own = {**runtime_dir.private_caches(), **env, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if os.environ.get("NBDDP_START_METHOD"):
        own["NBDDP_START_METHOD"] = os.environ["NBDDP_START_METHOD"]
    return own


@contextlib.contextmanager
def without_stop() -> Iterator[None]:
    """A process that is started here gets no SIGINT until it takes it. A front end's Stop may go to every process under
    the notebook kernel, and Python's start must not be interrupted."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
