"""What another user of the machine finds at the ports of a pool: attacks by a process that has not the keys."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests.ports import connections

NOBODY = 65534
GREETING = b"\xff" + bytes(8) + b"\x7f\x03"  # of ZMTP 3: what the other side says next is what it insists on
BECOME = f"""
import os, sys, time, zmq, zmq.utils
if os.getuid() == 0:
    os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
"""
LISTEN = """
ports, seconds = sys.argv[2:], float(sys.argv[1])
context, poller = zmq.Context(), zmq.Poller()
for port in ports:
    s = context.socket(zmq.SUB); s.subscribe(b""); s.connect(f"tcp://127.0.0.1:{port}"); poller.register(s, zmq.POLLIN)
print("listening", flush=True)
end, heard = time.monotonic() + seconds, 0
while time.monotonic() < end:
    for s, _ in poller.poll(100):
        s.recv_multipart(); heard += 1
print(heard, flush=True)
"""
SPEAK = """
context, kinds = zmq.Context(), (zmq.PUB, zmq.DEALER, zmq.PUSH, zmq.REQ)
sockets = []
for port in sys.argv[2:]:
    for kind in kinds:
        s = context.socket(kind); s.linger = 0; s.sndtimeo = 0; s.connect(f"tcp://127.0.0.1:{port}"); sockets.append(s)
end = time.monotonic() + float(sys.argv[1])
print("speaking", flush=True)
while time.monotonic() < end:
    for s in sockets:
        for junk in ([b"x"], [b"", b"<IDS|MSG>", b"", b"{}", b"{}", b"{}", b"{}"]):
            try: s.send_multipart(junk)
            except zmq.ZMQError: pass
print("done", flush=True)
"""


def processes(pool: WorkerPool) -> list[psutil.Process]:
    """The agent and all that it has started."""
    assert pool.agent is not None
    agent = psutil.Process(pool.agent.hello.pid)  # this process has started it, or taken one that waited
    return [agent, *agent.children(recursive=True)]


def listeners(pool: WorkerPool) -> dict[int, tuple[str, str]]:
    """Port → address and kind of the process, of all that listens in the pool."""
    found = {}
    for process in processes(pool):
        kind = next((c["kind"] for c in pool.status()["children"] if c["pid"] == process.pid), "below")
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            for c in connections(process, "tcp"):
                if c.status == psutil.CONN_LISTEN:
                    found[c.laddr.port] = (c.laddr.ip, kind)
    return found


def cluster(pool: WorkerPool) -> list[int]:
    return [port for port, (_, kind) in listeners(pool).items() if kind in ("controller", "below")]


def stranger(code: str, seconds: float, ports: list[int]) -> subprocess.Popen[str]:
    """A process of another user, where the tests may make one; it has begun."""
    command = [sys.executable, "-c", BECOME + code, str(seconds), *map(str, ports)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() in ("listening", "speaking"), "the stranger could not begin"
    return process


def test_every_socket_of_the_cluster_speaks_curve_alone(pool: WorkerPool) -> None:
    ports = cluster(pool)
    assert len(ports) >= 10
    for port in ports:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as s:
            s.sendall(GREETING)
            told = b""
            while len(told) < 32 and (more := s.recv(64 - len(told))):
                told += more
        assert told[12:32].rstrip(b"\0") == b"CURVE", f"port {port} takes {told[12:32]!r}"


def test_everything_listens_on_loopback_alone(pool: WorkerPool) -> None:
    assert all(ipaddress.ip_address(ip).is_loopback for ip, _ in listeners(pool).values())


def test_the_keys_are_their_owners_alone(pool: WorkerPool) -> None:
    for path in map(Path, pool.group.files):
        facts = path.stat()
        secret = any(json.loads(path.read_text()).get(k) for k in ("curve_serverkey", "curve_secretkey", "key"))
        if secret:
            assert stat.S_IMODE(facts.st_mode) & 0o077 == 0, f"{path.name} is open to others"
    assert any("curve_serverkey" in Path(p).read_text() for p in pool.group.files)
    lines = []
    for process in processes(pool):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            lines.append(" ".join(process.cmdline()))
    key = next(json.loads(Path(p).read_text())["curve_serverkey"] for p in pool.group.files if "client" in p)
    assert not any(key in line for line in lines)


def test_a_stranger_hears_nothing(pool: WorkerPool) -> None:
    process = stranger(LISTEN, 2.0, cluster(pool))
    while process.poll() is None:
        pool.run_cell("print('a secret')\n{'key': 'a secret'}", want_value=True, screen=NullScreen())
    assert process.communicate()[0].strip() == "0"


@pytest.fixture
def loud(pool: WorkerPool) -> Iterator[None]:
    """A stranger who sends junk to every port of the pool, all the while."""
    with stranger(SPEAK, 3.0, cluster(pool)) as process:
        yield
        process.wait()


@pytest.mark.more
def test_junk_of_a_stranger_reaches_nobody(pool: WorkerPool, loud: None) -> None:
    for n in range(20):
        assert list(pool.run_cell(f"{n}", want_value=True, screen=NullScreen())) == [n] * pool.world_size
    assert pool.troubles() == ""
    assert pool.agent is not None
    assert sum(f.stat().st_size for f in pool.agent.home.rglob("*.log")) < 1 << 20
    assert not any(t.name.startswith("ipyparallel") and not t.is_alive() for t in threading.enumerate())
