"""Who is at the other end of a TCP connection on this machine, as Linux reports it.

Linux says over netlink whose a socket is (sock_diag(7), `linux/inet_diag.h`). For the two addresses of a connection it
gives the user's id and the socket's inode. That takes some 4 µs with any number of sockets. Which process holds that
inode stands in /proc/<pid>/fd, for processes of the same user alone. That the process belongs to a pool follows from
its descent, so the agent adopts those whose parents end (`children.adopt_orphans`).

Linux also keeps strangers from a listening socket altogether. Once it has a key for its peers (TCP-MD5, RFC 2385), it
answers no connection that is not signed by that key (`sign`). Neither needs any rights.

`unavailable` says what of this cannot be had here. Imports no torch: agent, store host and workers use it.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from nbddp.agent import orphans
from nbddp.compat import system
from nbddp.protocol.agent import KEY_BYTES
from nbddp.protocol.codec import Message

if TYPE_CHECKING:
    from nbddp.agent.server import NodeAgent

Address = tuple[str, int]

# linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST = 4, 20, 1
HEADER, UNKNOWN_COOKIE, ALL_STATES = struct.Struct("=IHHII"), (0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF
OWNER_AT, STATE_AT = HEADER.size + 64, HEADER.size + 1  # in an answer: uid and inode; the connection's state
ESTABLISHED = 1
# linux/tcp.h
TCP_MD5SIG_EXT, FLAG_PREFIX = 32, 1
MAPPED = "::ffff:"  # an IPv4 address as an IPv6 socket has it
UNTOLD = "Linux does not report who owns a connection"


@dataclass(frozen=True)
class SocketOwner:
    """Whose a socket is. Of one that nobody has accepted yet, and of one whose process has closed it, Linux reports uid
    0 and inode 0."""

    uid: int
    inode: int
    state: int

    @property
    def holds(self) -> bool:
        """Whether a process holds it, and the connection stands."""
        return self.inode != 0 and self.state == ESTABLISHED


class SockDiag:
    """Asks Linux. Raises OSError where it does not answer at all. For one thread."""

    def __init__(self) -> None:
        if not system.is_linux() or not hasattr(socket, "AF_NETLINK"):
            raise OSError(f"{system.name()} has no netlink")
        self._netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG)
        self._netlink.settimeout(1)
        self._netlink.connect((0, 0))
        self._asked = 0

    def __enter__(self) -> SockDiag:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._netlink.close()

    def owner(self, near: Address, far: Address) -> SocketOwner | None:
        """Whose the socket at `near` is that is connected to `far`; None if there is none on this machine."""
        family, ends = _packed(near, far)
        socket_id = struct.pack("!HH", near[1], far[1]) + ends + struct.pack("=III", 0, *UNKNOWN_COOKIE)
        request = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, ALL_STATES) + socket_id
        self._asked = number = (self._asked + 1) & 0xFFFFFFFF
        head = HEADER.pack(HEADER.size + len(request), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, number, 0)
        self._netlink.send(head + request)
        while True:
            answer = self._netlink.recv(4096)
            _, kind, _, answers, _ = HEADER.unpack_from(answer)
            if answers == number:  # and not a question that was given up
                break
        if kind != SOCK_DIAG_BY_FAMILY:
            return None
        uid, inode = struct.unpack_from("=II", answer, OWNER_AT)
        return SocketOwner(uid, inode, answer[STATE_AT])


def ends(connection: socket.socket) -> tuple[Address, Address]:
    """A connection's own address and its peer's. Raises OSError if it has none."""
    return address(connection.getsockname()), address(connection.getpeername())


def address(told: tuple[Any, ...]) -> Address:
    """Host and port of what a socket gives as its address; an IPv4 one as such."""
    return str(told[0]).removeprefix(MAPPED), int(told[1])


def _packed(near: Address, far: Address) -> tuple[int, bytes]:
    family = socket.AF_INET6 if ":" in near[0] else socket.AF_INET
    return family, b"".join(socket.inet_pton(family, host).ljust(16, b"\0") for host, _ in (near, far))


# -- which process ------------------------------------------------------------------------------


class ProcessTree:
    """The processes of a pool: `root` with all that descend from it, likewise the `roots` that live, and some others
    alone."""

    def __init__(self, root: int, others: Iterable[int] = (), roots: Iterable[int] = ()):
        self._roots = {root}
        self._known = {pid: _stat(pid).started for pid in (root, *others)}  # when they began
        for pid in roots:
            with suppress(ProcessLookupError):  # it has ended
                self._known[pid] = _stat(pid).started
                self._roots.add(pid)

    def holders(self, inodes: Iterable[int]) -> tuple[dict[int, int], bool]:
        """Inodes of these that a process of the family holds → its pid; and whether one cannot be looked into, so that
        nobody can say of the others that none does."""
        wanted, found, hidden = set(inodes), dict[int, int](), False
        for pid in self._members():
            try:
                held = wanted & held_by(pid, wanted)
            except PermissionError:
                hidden = hidden or _is_mine(pid)
                continue
            if held and self.has(pid):  # the number may be another's by now
                found |= dict.fromkeys(held, pid)
                wanted -= held
            if not wanted:  # and no look at grandchildren
                break
        return found, hidden

    def has(self, pid: int) -> bool:
        """Whether a living process is one of the family: Linux's list of its parents, up to the root."""
        with suppress(ProcessLookupError):
            own = _stat(pid)
            if own.started == self._known.get(pid):
                return True
            while pid not in self._roots:
                parent = _stat(own.parent)
                if parent.started > own.started:  # the number is another's by now
                    return False
                pid, own = own.parent, parent
            return own.started == self._known[pid]
        return False

    def _members(self) -> Iterator[int]:
        """Their numbers, the workers first: a look at grandchildren reads the tables of the whole machine."""
        started = [
            pid for root in self._roots for pid in reversed(orphans.children(root))
        ]  # the oldest: the controller
        first = [os.getpid(), *self._known, *started]
        yield from dict.fromkeys(first)
        for root in self._roots:
            with suppress(psutil.NoSuchProcess):
                yield from (p.pid for p in psutil.Process(root).children(recursive=True) if p.pid not in first)


def _is_mine(pid: int) -> bool:
    """Whether a process has this user's rights: no other makes sockets that are this user's."""
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).uids().effective == os.geteuid())
    return False


class _Stat(NamedTuple):
    parent: int
    started: int  # ticks of the clock since the machine's start


def _stat(pid: int) -> _Stat:
    """The parent of a process, and when it began. Raises ProcessLookupError."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except FileNotFoundError:
        raise ProcessLookupError(pid) from None
    return _Stat(int(fields[1]), int(fields[19]))


def held_by(pid: int, wanted: set[int]) -> set[int]:
    """Inodes of the sockets that a process holds, and no more once all that are wanted have been met. Raises
    PermissionError if it cannot be looked into."""
    found: set[int] = set()
    try:
        folder = os.open(f"/proc/{pid}/fd", os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, ProcessLookupError):
        return found
    try:
        for name in sorted(os.listdir(folder), key=int, reverse=True):  # the newest are asked for most
            with suppress(FileNotFoundError, ProcessLookupError):  # closed meanwhile
                target = os.readlink(name, dir_fd=folder)
                if target.startswith("socket:["):
                    found.add(int(target[8:-1]))
            if wanted <= found:
                break
    except ProcessLookupError:  # it has ended
        pass
    finally:
        os.close(folder)
    return found


def holder(inode: int) -> int | None:
    """The process that holds a socket, of all that can be looked into; None if it is none of them."""
    for pid in psutil.pids():
        with suppress(PermissionError):
            if inode in held_by(pid, {inode}):
                return pid
    return None


# -- which connections are answered --------------------------------------------------------------


def sign(end: socket.socket, peers: str, prefix: int, key: bytes) -> None:
    """Have this socket sign what it sends to the network `peers`/`prefix`, and take nothing from there that is not
    signed by `key`. Connections that stand stay as they are. Raises OSError where Linux cannot do it."""
    unused = 4 if end.family == socket.AF_INET6 else 0
    where = struct.pack("=HH", end.family, 0) + bytes(unused) + socket.inet_pton(end.family, peers)
    rest = struct.pack("=BBHI", FLAG_PREFIX, prefix, len(key), 0) + key.ljust(KEY_BYTES, b"\0")
    end.setsockopt(socket.IPPROTO_TCP, TCP_MD5SIG_EXT, where.ljust(128, b"\0") + rest)


def shut_door(listening: socket.socket) -> None:
    """Have a listening socket answer nobody from now on. It need not be closed for that, which torch would not bear."""
    sign(listening, "::" if listening.family == socket.AF_INET6 else "0.0.0.0", 0, os.urandom(KEY_BYTES))


# -- what can be had here -------------------------------------------------------------------------


def unavailable() -> str:
    """Why the owner of a connection cannot be found here, or empty."""
    try:
        with (
            SockDiag() as kernel,
            socket.create_server(("127.0.0.1", 0)) as door,
            socket.create_connection(door.getsockname()) as near,
            door.accept()[0],
        ):
            owner = kernel.owner(*ends(near))
            inode = os.fstat(near.fileno()).st_ino
    except OSError as e:
        return f"{UNTOLD} ({e.strerror or e})"
    if owner is None:
        return f"{UNTOLD} (sock_diag finds none)"
    if owner != SocketOwner(os.geteuid(), inode, ESTABLISHED):
        return f"{UNTOLD} (sock_diag reports uid {owner.uid} for a connection of uid {os.geteuid()})"
    return ""


def unguarded(owner: int | None = None) -> str:
    """What a pool of this process and its owner (by default its parent) cannot be guarded from here, in a sentence;
    empty if nothing is missing."""
    why = unavailable()
    if why:
        return exposed("on this machine", why)
    try:
        held_by(os.getppid() if owner is None else owner, set())
    except PermissionError:
        return exposed("of yours", "/proc does not list the sockets of a process")
    return ""


def told(agent: NodeAgent) -> Message:
    """Of a node agent: `unguarded`, for its event `warm`."""
    return {"unguarded": unguarded(agent.owner_pid)}


def exposed(whose: str, why: str) -> str:
    return f"any process {whose} can reach the ranks' store: {why}"
