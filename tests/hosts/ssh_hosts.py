"""Hosts that are reached by a real ssh: an sshd for each on its address of the loopback, with the test's own keys."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.ports import quiet_port

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
MISSING = "there is no sshd (apt-get install openssh-server), or no ssh"
HERE = bool(SSHD) and shutil.which("ssh") is not None
UP = 20.0  # seconds for an sshd to listen
SETTINGS = (
    "StrictModes no", "PermitRootLogin prohibit-password", "PasswordAuthentication no", "UsePAM no", "PidFile none",
    "KbdInteractiveAuthentication no", "MaxStartups 100:30:200", "PrintMotd no",
)  # fmt: skip


@dataclass(frozen=True)
class Hosts:
    """names: what `ssh -F config` knows; addresses: host and port of each."""

    folder: Path
    names: tuple[str, ...]
    addresses: tuple[tuple[str, int], ...]

    @property
    def config(self) -> Path:
        return self.folder / "config"


@contextmanager
def ssh_hosts(folder: Path, names: Sequence[str] = ("nodea", "nodeb")) -> Iterator[Hosts]:
    """Hosts of these names, until the block ends."""
    make_keys(folder)
    with ExitStack() as stack:
        addresses = tuple(stack.enter_context(_listening(folder, name, i + 2)) for i, name in enumerate(names))
        configure(folder, names, addresses)
        yield Hosts(folder, tuple(names), addresses)


def make_keys(folder: Path) -> None:
    """The keys of all hosts, and of who reaches them."""
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where sshd's unprivileged part looks for nothing
    for key in ("hostkey", "id"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    (folder / "authorized_keys").write_bytes((folder / "id.pub").read_bytes())


def configure_sshd(folder: Path, name: str, address: str, port: int) -> Path:
    """The configuration of the sshd of a host."""
    own = [
        f"ListenAddress {address}:{port}",
        f"HostKey {folder}/hostkey",
        f"AuthorizedKeysFile {folder}/authorized_keys",
    ]
    path = folder / f"{name}.conf"
    path.write_text("\n".join([*own, *SETTINGS, ""]))
    return path


@contextmanager
def _listening(folder: Path, name: str, number: int) -> Iterator[tuple[str, int]]:
    assert SSHD is not None
    address = f"127.0.1.{number}"
    port = quiet_port(address)
    path = configure_sshd(folder, name, address, port)
    with open(folder / f"{name}.log", "wb") as log:
        process = subprocess.Popen([SSHD, "-D", "-e", "-f", str(path)], stderr=log)
    try:
        wait_for(process, address, port, folder / f"{name}.log")
        yield address, port
    finally:
        process.terminate()
        process.wait()


def wait_for(process: subprocess.Popen[bytes], address: str, port: int, log: Path) -> None:
    """Until an sshd answers."""
    end = time.monotonic() + UP
    while True:
        try:
            socket.create_connection((address, port), 1).close()
            return
        except OSError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.02)


def configure(folder: Path, names: Sequence[str], addresses: Sequence[tuple[str, int]]) -> None:
    """What `ssh -F` needs to reach these hosts."""
    key = (folder / "hostkey.pub").read_text().split()[:2]
    known = [f"[{address}]:{port} {' '.join(key)}" for address, port in addresses]
    (folder / "known_hosts").write_text("\n".join([*known, ""]))
    blocks = [f"Host {n}\n  HostName {a}\n  Port {p}" for n, (a, p) in zip(names, addresses, strict=True)]
    rest = [
        f"IdentityFile {folder}/id",
        "IdentitiesOnly yes",
        f"UserKnownHostsFile {folder}/known_hosts",
        "LogLevel ERROR",
    ]
    (folder / "config").write_text("\n".join([*blocks, "Host *", *(f"  {line}" for line in rest), ""]))
