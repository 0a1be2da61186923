"""Two hosts in network namespaces, each with a link of its own to this machine, over which ssh reaches it, and with a
cable between the two, by which alone they meet: what comes over one link does not leave over the other.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.hosts.ssh_hosts import HERE, SETTINGS, SSHD, Hosts, configure, make_keys, wait_for

NAMES = ("nodea", "nodeb")
PORT = 2222
CABLE = "cable0"
NET = f"10.{130 + os.getpid() % 120}"  # others may have such hosts at the same time


def why_not() -> str:
    """Why there cannot be such hosts here, or empty."""
    if os.geteuid() or not HERE or not shutil.which("ip"):
        return "hosts in network namespaces need root, sshd, ssh and ip"
    name = f"nbddp-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    made = made and subprocess.run(
        ["ip", "-n", name, "link", "add", "x0", "type", "veth", "peer", "name", "x1"], capture_output=True
    ).returncode == 0  # fmt: skip
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return "" if made else "there are no network namespaces here"


def ip(*words: str, inside: str = "") -> None:
    subprocess.run(["ip", *(["-n", inside] if inside else []), *words], check=True, capture_output=True)


@contextmanager
def cabled_hosts(folder: Path, cable: bool = True) -> Iterator[Hosts]:
    """Until the block ends. cable: whether it is there."""
    make_keys(folder)
    with ExitStack() as stack:
        spaces = []
        names = "".join(f"{NET}.9.{i + 1} {name}\n{NET}.{i}.1 {name}\n" for i, name in enumerate(NAMES))
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        (folder / "hosts.only").write_text("hosts: files\npasswd: files\n")
        for i, name in enumerate(NAMES):
            space, link = f"nbddp-{os.getpid()}-{i}", f"nbd{os.getpid() % 10**6}{i}"
            ip("netns", "add", space)
            stack.callback(ip, "netns", "del", space)
            ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("addr", "add", f"{NET}.{i}.254/24", "dev", link)
            ip("link", "set", link, "up")
            ip("addr", "add", f"{NET}.{i}.1/24", "dev", "eth0", inside=space)
            for device in ("lo", "eth0"):
                ip("link", "set", device, "up", inside=space)
            ip("route", "add", "default", "via", f"{NET}.{i}.254", inside=space)
            spaces.append(space)
            stack.enter_context(_sshd(folder, name, space, f"{NET}.{i}.1"))
        if cable:
            ip("link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", spaces[1], inside=spaces[0])
            for i, space in enumerate(spaces):
                ip("addr", "add", f"{NET}.9.{i + 1}/24", "dev", CABLE, inside=space)
                ip("link", "set", CABLE, "up", inside=space)
        addresses = tuple((f"{NET}.{i}.1", PORT) for i in range(len(NAMES)))
        configure(folder, NAMES, addresses)
        yield Hosts(folder, NAMES, addresses)


@contextmanager
def _sshd(folder: Path, name: str, space: str, address: str) -> Iterator[None]:
    assert SSHD is not None
    own = [
        f"ListenAddress {address}:{PORT}",
        f"HostKey {folder}/hostkey",
        f"AuthorizedKeysFile {folder}/authorized_keys",
    ]
    (folder / f"{name}.conf").write_text("\n".join([*own, *SETTINGS, ""]))
    with open(folder / f"{name}.log", "wb") as log:
        # torch asks for the names of addresses, and the name server is out of reach
        named = f'hostname {name}; mount --bind "$0" /etc/hosts; mount --bind "$0.only" /etc/nsswitch.conf; exec "$@"'
        process = subprocess.Popen(
            ["ip", "netns", "exec", space, "unshare", "--uts", "--mount", "sh", "-c", named, str(folder / "hosts"),
             SSHD, "-D", "-e", "-f", str(folder / f"{name}.conf")], stderr=log,
        )  # fmt: skip
    try:
        wait_for(process, address, PORT, folder / f"{name}.log")
        yield
    finally:
        process.terminate()
        process.wait()
