"""Hosts with networks of their own: each is a set of namespaces (network, processes, mounts, host name) with an
address, an sshd, and a cable to this machine that can be slowed, stalled, made lossy or cut (`tests/hosts/cables.py`).

A host is the child of `unshare`, and waits for the end of its stdin: with it ends all that runs there, also where the
test's process is killed. So does the switch, and the devices with it. No namespace has a name that could stay behind.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests import places
from tests.hosts.ssh_hosts import HERE, MISSING, SSHD, configure, configure_sshd, make_keys

TUN = Path("/dev/net/tun")
SPACES = ["--net", "--pid", "--mount", "--uts"]
UP = 20.0  # seconds for a host to listen
PORT, MTU = 2222, 9000
NETWORKS = [f"198.18.{n}" for n in range(256)]  # for tests of networks (RFC 2544)


@functools.cache
def why_not() -> str:
    """Why there can be no such hosts here; empty if there can."""
    if not HERE:
        return MISSING
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "hosts in network namespaces need Linux and root"
    lacking = [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]
    if lacking:
        return f"hosts in network namespaces need {', '.join(lacking)}"
    try:
        os.close(os.open(TUN, os.O_RDWR))
    except OSError as e:
        return f"there are no TAP devices here: {TUN}: {e.strerror}"
    tried = subprocess.run(["unshare", *SPACES, "--fork", "true"], capture_output=True, text=True, check=False)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass(frozen=True)
class Host:
    """`init`: the pid, here, of the first process there."""

    name: str
    address: str
    init: int

    def processes(self, word: str = "nbddp") -> list[psutil.Process]:
        """Those that run there and whose command line has a word."""
        space = os.readlink(f"/proc/{self.init}/ns/pid")
        found = []
        for process in psutil.process_iter(["pid"]):
            with suppress(psutil.Error, OSError):
                ours = os.readlink(f"/proc/{process.pid}/ns/pid") == space
                if ours and process.status() != psutil.STATUS_ZOMBIE and word in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def agents(self) -> list[psutil.Process]:
        """Processes of pools there that no other of that pool has started."""
        known = {p.pid for p in self.processes()}
        return [p for p in self.processes() if p.ppid() not in known]

    def here(self, pid: int) -> psutil.Process:
        """A process by the number that it has there."""
        for process in self.processes(""):
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                if line.startswith("NSpid:") and line.split()[-1] == str(pid):
                    return process
        raise ProcessLookupError(pid)


class Network:
    """The hosts, and what becomes of their cables."""

    def __init__(self, folder: Path, hosts: Sequence[Host], switch: subprocess.Popen[str]):
        self.folder, self.hosts, self._switch = folder, {host.name: host for host in hosts}, switch

    @property
    def config(self) -> Path:
        """For `ssh -F`."""
        return self.folder / "config"

    def set(self, name: str, **how: Any) -> None:
        """Change a host's cable: delay (seconds each way), rate (bytes per second), loss (of 1), stall (seconds from
        now on that everything is held back), apart (names of hosts with which it exchanges nothing)."""
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        self._switch.stdin.write(json.dumps({"cable": name, **how}) + "\n")
        self._switch.stdin.flush()
        assert self._switch.stdout.readline(), "the switch has ended"

    def cut(self, name: str) -> None:
        self.set(name, loss=1)

    def mend(self) -> None:
        """All cables as they were at first."""
        for name in self.hosts:
            self.set(name, loss=0, delay=0, rate=0, apart=[])

    def setup(self) -> str:
        """What a shell there does before it starts an agent: hosts share a file system, and no folder of pools."""
        root, folder = (shlex.quote(str(path)) for path in (places.ROOT, self.folder))
        return f"export PYTHONPATH={root} NBDDP_RUNTIME_DIR={folder}/$(hostname) NBDDP_CACHE_DIR={folder}/$(hostname)"


@contextmanager
def network(folder: Path, names: Sequence[str] = ("nodea", "nodeb")) -> Iterator[Network]:
    """Hosts of these names, until the block ends."""
    make_keys(folder)
    net = _free_network()
    addresses = {name: f"{net}.{i}" for i, name in enumerate(names, 1)}
    (folder / "hosts").write_text("".join(f"{a} {n}\n" for n, a in [("localhost", "127.0.0.1"), *addresses.items()]))
    with ExitStack() as stack:
        hosts = [stack.enter_context(_host(folder, name, addresses[name])) for name in names]
        own = f"nbt{os.getpid()}"[:15]
        wires = [f"notebook:{own}=", *(f"{h.name}:eth0=/proc/{h.init}/ns/net" for h in hosts)]
        switch = stack.enter_context(_running([sys.executable, str(Path(__file__).with_name("cables.py")), *wires]))
        assert switch.stdout is not None
        assert switch.stdout.readline(), "no TAP devices"
        _ip("addr", "add", f"{net}.254/24", "dev", own)
        _ip("link", "set", own, "mtu", str(MTU), "up")
        for host in hosts:
            _ip("link", "set", "lo", "up", at=host)
            _ip("addr", "add", f"{host.address}/24", "dev", "eth0", at=host)
            _ip("link", "set", "eth0", "mtu", str(MTU), "up", at=host)
            (folder / host.name / "go").touch()
        configure(folder, names, [(addresses[name], PORT) for name in names])
        for host in hosts:
            _wait_for(folder, host)
        yield Network(folder, hosts, switch)


def _free_network() -> str:
    """One that nothing on this machine has a way to yet. Two that choose at once differ by their pid."""
    routes = subprocess.run(["ip", "route"], capture_output=True, text=True, check=True).stdout
    first = os.getpid() % len(NETWORKS)
    return next(net for net in NETWORKS[first:] + NETWORKS[:first] if f"{net}." not in routes)


@contextmanager
def _running(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with its stdin."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def _host(folder: Path, name: str, address: str) -> Iterator[Host]:
    own = folder / name
    own.mkdir()
    sshd = configure_sshd(folder, name, address, PORT)
    script = (
        f"hostname {name}; mount --bind {shlex.quote(str(folder / 'hosts'))} /etc/hosts; mount -t tmpfs shm /dev/shm\n"
        f"echo up; until [ -e {shlex.quote(str(own / 'go'))} ]; do sleep 0.02; done\n"
        f"{SSHD} -D -e -f {shlex.quote(str(sshd))} </dev/null >{shlex.quote(str(folder / name))}.log 2>&1 &\n"
        "read end"
    )
    with _running(["unshare", *SPACES, "--fork", "--kill-child", "--mount-proc", "sh", "-c", script]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield Host(name, address, psutil.Process(process.pid).children()[0].pid)


def _ip(*words: str, at: Host | None = None) -> None:
    there = ["nsenter", "-t", str(at.init), "-n"] if at else []
    subprocess.run([*there, "ip", *words], check=True)


def _wait_for(folder: Path, host: Host) -> None:
    """Until ssh gets through."""
    command = ["ssh", "-F", str(folder / "config"), "-o", "BatchMode=yes", host.name, "true"]
    end = time.monotonic() + UP
    while (tried := subprocess.run(command, capture_output=True, text=True, check=False)).returncode:
        assert time.monotonic() < end, tried.stderr
        time.sleep(0.02)
