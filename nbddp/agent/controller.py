"""The ipyparallel controller as a child of the agent: one process that dies with it.

Schedulers run in threads (ipyparallel's `use_threads`); its heart monitor is a process
of its own, which here is tied to the controller's life. The beat is 5 per second, slower for more
than 40 workers and quicker while workers register (`install_beats`); missed beats mean nothing,
because the agent knows of every exit in milliseconds and a suspended machine must not lose its engines.

ipyparallel would choose ports that are free, let them go and bind them later; on a busy machine
another program's connection takes one in between, and then no engine ever registers. It is given
ports that the system hands to nobody by itself.

Loopback is shared by all users of a machine. So every socket of the cluster's is encrypted (CurveZMQ). Without the key
from the connection files a process hears nothing, and its messages reach nobody.

The hub would get a copy of every message, read it, and keep it for clients that ask for the results of others. That
took as long as the two messages themselves. It hears of beats alone; the schedulers' sockets drop the rest unsent.

ipyparallel's hub admits an engine after it has answered a beat of the heart monitor, and the next beat has come. That
is two periods, 0.4 s of a worker's start. Here the hub says that one is coming, over a pipe; the monitor beats quickly
until each that was announced has answered, and reports it with its first answer. Of later answers it only notes that
they came, since missed beats mean nothing here: the agent knows of every exit. So beats are slow where many answer.
Where the monitor is spawned, not forked (macOS), it beats as ever.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import resource
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import connection, get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ipyparallel.controller import app as controller_app
from ipyparallel.controller import heartmonitor

from nbddp.agent.children import die_with_parent
from nbddp.compat import system
from nbddp.compat.system import LOOPBACK

BEAT_MS = 200
BEATS = b"heartmonitor"  # topic
MOST_FILES = 10240  # macOS's OPEN_MAX
PORTS = 40  # more than a controller of ipyparallel 9 binds; beyond them it chooses its own
LOWEST_PORT = 10_000
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
QUICK_MS, MS_PER_HEART = 10, 1  # a beat is answered by all
CALM_MS_PER_HEART = 5  # while none registers: at most 200 answers per second, however many they are
MOST_SECONDS = 10.0  # that one announcement keeps the beat quick: the engine may have died
NEEDED = ("beat", "handle_new_hearts", "handle_pong", "hearts", "responses", "start")  # of a heart monitor


def ephemeral_ports() -> range:
    """The ports that the system chooses from for those who do not say which; IANA's where it does not tell."""
    low, high = 49152, 65535
    with suppress(OSError, ValueError):
        if EPHEMERAL.exists():
            low, high = map(int, EPHEMERAL.read_text().split())
    return range(low, high + 1)


def quiet_ports(count: int, *hosts: str) -> tuple[ExitStack, list[int]]:
    """Ports outside `ephemeral_ports` that are free at all these addresses of this machine (by default the loopback);
    and the sockets to close to give up the claim to them.

    Ports come in blocks. The first port of a block serves for nothing else; its holder owns the rest of the block. So
    two pools that start at the same moment do not choose the same. Raises OSError if every block is somebody's, or an
    address is not this machine's.
    """
    at = [*dict.fromkeys(hosts)] or [LOOPBACK]
    system = ephemeral_ports()
    blocks = [first for first in range(LOWEST_PORT, 65536 - count, count + 1)
              if not any(p in system for p in (first, first + count))]  # fmt: skip
    random.SystemRandom().shuffle(blocks)
    for first in blocks:
        with ExitStack() as claim:
            own = [claim.enter_context(one) for one in (_bound(first, host) for host in at) if one is not None]
            block = range(first + 1, first + count + 1)
            if len(own) == len(at) and all(_is_free(port, host) for port in block for host in at):
                return claim.pop_all(), [*block]
    raise OSError("no free block of ports for the pool's controller")


def _bound(port: int, host: str = LOOPBACK) -> socket.socket | None:
    """A socket that holds the port; None if it cannot be had. Raises OSError if the address is not this machine's."""
    claim = socket.socket()
    try:
        claim.bind((host, port))
    except OSError as e:
        claim.close()
        if e.errno == errno.EADDRNOTAVAIL:
            raise
        return None
    return claim


def _is_free(port: int, host: str = LOOPBACK) -> bool:
    probe = _bound(port, host)
    if probe is not None:
        probe.close()
    return probe is not None


def main(request: dict[str, Any]) -> int:
    """Run the controller of the cluster `cluster_id` under `profile_dir` until a signal ends it."""
    import zmq
    from traitlets.config import Config

    class Controller(controller_app.IPController):  # type: ignore[misc]
        """A controller that continues when the notebook kernel's Stop reaches it too."""

        def init_signal(self) -> None:
            super().init_signal()
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    _take_descriptors()
    if system.is_linux():
        install_beats()
    controller_app.Process = TiedProcess
    if request["ip"] != LOOPBACK:
        system.keep_context_alive(zmq.Context.instance())
    config = Config()
    config.ProfileDir.location = request["profile_dir"]
    config.IPController.cluster_id = request["cluster_id"]
    config.IPController.use_threads = True
    config.IPController.ip = config.IPController.location = request["ip"]
    encrypt(config)
    claim, config.IPController.ports = quiet_ports(PORTS, request["ip"], LOOPBACK)  # its schedulers meet at the latter
    config.IPController.log_level = 30
    config.HeartMonitor.period = BEAT_MS
    config.HeartMonitor.max_heartmonitor_misses = 10**6
    app = Controller.instance(config=config)
    with without_pause(controller_app):
        app.initialize([*request.get("args", ())])
    app.log.setLevel(app.log_level)  # as in `worker.engine`
    app.hub.engine_state_file = request["state"]  # it would stay behind in the profile
    hear_only_beats(app.hub.monitor.socket)
    with claim:
        app.start()
    return 0


@contextmanager
def without_pause(app: Any) -> Iterator[None]:
    """ipyparallel sleeps for 0.25 s between the making of two sockets of the hub's; nothing waits for anything there,
    and messages to a socket that is not connected yet are queued."""
    app.time = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
    try:
        yield
    finally:
        app.time = time


def encrypt(config: Any) -> None:
    """The keys are in the controller's connection files, which only their owner may read. Messages stay signed too, or
    every client would warn."""
    config.IPController.enable_curve = True
    config.Session.key = secrets.token_hex(32).encode()


def hear_only_beats(monitor: Any) -> None:
    """Of what passes the controller, which it publishes to its hub."""
    import zmq

    monitor.setsockopt(zmq.UNSUBSCRIBE, b"")
    monitor.setsockopt(zmq.SUBSCRIBE, BEATS)


def _take_descriptors() -> None:
    """As many as may be: 1024, the usual, are used up by 150 workers; macOS begins with 256."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for wanted in (allowed, MOST_FILES):
        with suppress(ValueError, OSError):  # macOS says that there is no bound, and has one
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, allowed))
            return


class TiedProcess(get_context("fork" if system.is_linux() else "spawn").Process):  # type: ignore[misc]
    """A process of ipyparallel's that ends with the controller, even if that is killed."""

    def start(self) -> None:
        self.controller = os.getpid()
        super().start()
        threading.Thread(target=_end_with, args=(self,), daemon=True).start()

    def run(self) -> None:
        die_with_parent(self.controller)
        super().run()


def _end_with(process: Any) -> None:
    """A controller whose heart monitor has failed accepts no engine any more: it ends, and the agent tells."""
    connection.wait([process.sentinel])
    if process.exitcode not in (0, -signal.SIGTERM, -signal.SIGINT):
        print(f"the heart monitor exited with code {process.exitcode}", flush=True)
        os._exit(1)


# -- beats -----------------------------------------------------------------------------------------


def install_beats() -> None:
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
