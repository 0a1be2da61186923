"""The guard of a rank. Stores of its programs listen where the pool alone can connect. The peers of a new group are
checked before it is used.

While all ranks are on this machine, stores that a program makes itself listen on the loopback alone. Else they listen
on the address that joins this node to the others (`listen`). torch's `TCPStore(host, port, is_master=True)` listens on
all interfaces, whatever the host. Here it gets a listening socket on 127.0.0.1, or on a given address 127.x.y.z or ::1.
Clients of a host that is this machine go there, under any of its names. `localhost` is looked up as ::1 first, where
anybody could listen.

Forked processes have it as they are. One that is started by spawn or forkserver gets it when it imports torch
(`capabilities.subprocesses.on_rank`); a program that a cell runs as a subprocess does not.
"""

from __future__ import annotations

import array
import errno
import fcntl
import functools
import hashlib
import os
import socket
import termios
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from nbddp.capabilities.private import sock_owner
from nbddp.capabilities.private.sock_owner import Address
from nbddp.compat import system
from nbddp.compat.clock import clock
from nbddp.deadlock.on_rank.store_client import PARAMETERS, is_local
from nbddp.protocol.run_spec import Rendezvous
from nbddp.worker.rank_guard import Making, RankGuard
from nbddp.worker.release import BorrowedSocket

HOST = "127.0.0.1"
BACKLOG = 1024
Place = tuple[str, int]

_address: str | None = HOST  # where a server for all ranks listens
_store: tuple[Place, Place] | None = None  # MASTER_ADDR and MASTER_PORT, and where this node reaches that store


def listen(address: str | None, store: tuple[Place, Place] | None = None) -> None:
    """From here on a program's own server is to listen at this address of the node; empty: on the loopback; None: where
    torch has it. store: the address of the pool's store as programs know it, and as this node reaches it."""
    global _address, _store
    _address = None if address is None else address or HOST
    _store = store


def on_loopback(original: Callable[..., None]) -> Callable[..., None]:
    """What `TCPStore.__init__` becomes, once in a process."""

    @functools.wraps(original)
    def __init__(store: Any, *args: Any, **kwargs: Any) -> None:
        given = {**dict(zip(PARAMETERS, args, strict=False)), **kwargs}
        host, port = given.get("host_name"), given.get("port")
        if not given.get("is_master") and _store is not None and (host, port) == _store[0]:
            original(store, **{**given, "host_name": _store[1][0], "port": _store[1][1]})
            return
        address = None if len(args) > len(PARAMETERS) else _address
        if address is None or not isinstance(host, str) or not isinstance(port, int) or not is_local(host):
            original(store, *args, **kwargs)
            return
        given["host_name"] = host = host if host.startswith("127.") or host == "::1" else address
        own = given.get("is_master") and given.get("master_listen_fd") is None
        listening = _listening(host, port) if own else None
        if listening is None:
            original(store, **given)
        else:
            _serve(original, store, listening, given)

    return __init__


def _listening(host: str, port: int) -> socket.socket | None:
    """None if the port is taken: by a server of this process's that torch shares, or torch raises an error."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(BACKLOG)
    except OSError as e:
        made.close()
        if e.errno == errno.EADDRINUSE:
            return None
        raise
    return made


def _serve(original: Callable[..., None], store: Any, listening: socket.socket, given: dict[str, object]) -> None:
    """Make the store its socket's server. A server that was refused has not taken the descriptor."""
    given |= {"port": listening.getsockname()[1], "master_listen_fd": (number := listening.detach())}
    try:
        try:
            original(store, **given)
        except NotImplementedError:  # libuv's, up to torch 2.7
            original(store, **{**given, "use_libuv": False})
    except NotImplementedError:
        os.close(number)
        raise


class PrivateGuard:
    def begin(self, here: Rendezvous) -> None:
        listen(here.listen, (here.master, here.store))

    def belong_to(self, roots: Sequence[int]) -> None:
        belong_to(roots)

    def store_made(self, original: Making) -> Making:
        return on_loopback(original)

    def group_made(self, descriptors: Sequence[int], store: Any, rank: int, size: int) -> bool:
        return check(descriptors, store, rank, size)

    def rest(self) -> None:
        listen(None)
        belong_to([])


def guard() -> RankGuard:
    return PrivateGuard()


# -- who is at the other end ------------------------------------------------------------------------

# Whether a new group's connections lead to the group's ranks, and to nobody else.
# gloo listens while a group is made, and accepts anybody who sends the right number for a rank. So any process of the
# machine may come between. Before the group is used, the ranks compare their connections through the pool's store,
# which only they reach. A connection that came in at one rank, and that no other rank reports, is a stranger's. Linux
# then names the owner (`capabilities.private.sock_owner`). A stranger who only knocks does no harm, and is somebody's
# mistake more often than not. One who may have taken a rank's place ends the making of the group. After that nobody new
# is answered at the group's ports.
# What travels are digests of pairs of addresses, so ranks on other machines can be compared as well. No rank is through
# before all are connected; so a rank that ends its group at once cuts off nobody.

KEY, DIGEST = "nbddp/ends", 8  # bytes
LAZY = "TORCH_GLOO_LAZY_INIT"
INTERFACES = "GLOO_SOCKET_IFNAME"
SLICE = timedelta(seconds=1)  # between two looks for strangers while other ranks are waited for
IN, ONCE = 1, 1 << 30  # EPOLLIN, EPOLLONESHOT of linux/eventpoll.h
PATIENCE, BETWEEN = 5.0, 0.02  # seconds for gloo to have read what has come; between two looks that must agree

Pair = tuple[Address, Address]  # this rank's end, and the other

_roots: list[int] = []  # the pool's processes are these and what they have started


class Intruder(RuntimeError):
    """Somebody else than a rank is connected to a new group. `uid` and `pid` are None where Linux does not report
    them."""

    def __init__(self, uid: int | None, pid: int | None):
        who = "Linux does not report who" if uid is None else f"uid {uid}, pid {'unknown' if pid is None else pid}"
        super().__init__(
            f"a process outside the pool may have taken a rank's place while a process group was created ({who}). "
            "None of the program's data was sent, and the group is not used; run the cell again, and if that "
            "fails too, ask this machine's administrator"
        )
        self.uid, self.pid = uid, pid


def belong_to(roots: Iterable[int]) -> None:
    """Which processes of this machine the pool has, with what they start; none: the worker's parent, the agent."""
    _roots[:] = roots


@dataclass(frozen=True)
class Endpoints:
    """Where a group listens, and what it is connected to by which descriptor, on this rank."""

    doors: frozenset[Address]
    pairs: Mapping[Pair, int]

    def said(self) -> bytes:
        """What the other ranks need to know of it."""
        return b"".join([*map(_of_door, self.doors), *(_of_pair(*pair) for pair in self.pairs)])

    def came_in(self) -> list[Pair]:
        return [pair for pair in self.pairs if pair[0] in self.doors]

    def compared(self, others: Iterable[bytes]) -> tuple[list[Pair], list[Pair]]:
        """Pairs of which another rank says that it has the other end; and those through one of the group's doors of
        which none does."""
        known = {said[i : i + DIGEST] for said in others for i in range(0, len(said), DIGEST)}
        matched = [(near, far) for near, far in self.pairs if _of_pair(far, near) in known]
        left = set(self.pairs) - set(matched)
        return matched, [(near, far) for near, far in left if near in self.doors or _of_door(far) in known]


def _of_door(door: Address) -> bytes:
    return _digest(f"{door[0]} {door[1]}")


def _of_pair(near: Address, far: Address) -> bytes:
    return _digest(f"{near[0]} {near[1]} {far[0]} {far[1]}")


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=DIGEST).digest()


def ends(descriptors: Iterable[int]) -> Endpoints:
    """Of the TCP sockets among these descriptors."""
    doors, pairs = set[Address](), dict[Pair, int]()
    for number, copy in _copies(descriptors):
        with suppress(OSError):  # neither, or closed meanwhile
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                doors.add(sock_owner.address(copy.getsockname()))
            else:
                pairs[sock_owner.ends(copy)] = number
    return Endpoints(frozenset(doors), pairs)


def _copies(descriptors: Iterable[int]) -> Iterator[tuple[int, socket.socket]]:
    for number in descriptors:
        with suppress(OSError), BorrowedSocket(number) as copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                yield number, copy


# -- the check -----------------------------------------------------------------------------------


def check(descriptors: Sequence[int], store: Any, rank: int, size: int) -> bool:
    """Raises Intruder if somebody may have taken a rank's place, by what sockets this rank got while it made a group.

    store: where the ranks met, under the group's own prefix, if that is the pool's; None if others reach it, who could
    say there what they like: then only other users are looked for. Returns whether the ranks have compared what they
    have, when all have come so far; False if none is connected yet. Raises DistStoreError if some have not within the
    store's timeout.
    """
    mine = ends(descriptors)
    with _Kernel() as kernel:
        if store is None or not mine.pairs or is_lazy():
            kernel.refuse(mine, kernel.of_other_users(mine.came_in()), None, size)
            return False
        store.set(f"{KEY}/{rank}", mine.said())
        others = [f"{KEY}/{r}" for r in range(size) if r != rank]
        until = clock.monotonic() + store.timeout.total_seconds()
        while not _there(store, others, until):  # who is late may never come
            kernel.refuse(mine, kernel.not_ours(mine.came_in()), None, size)
        matched, unmatched = mine.compared(store.multi_get(others))
        gone = [pair for pair in unmatched if pair[0] in mine.doors and kernel.owner(pair) is None]
        kernel.refuse(mine, [*kernel.not_ours(unmatched), *gone], matched, size)
    if len(mine.doors) == _interfaces():
        _shut_doors(descriptors)
    return True


def is_lazy() -> bool:
    """Whether gloo connects ranks only when they first send each other something."""
    return os.environ.get(LAZY, "").lower() in ("1", "y", "yes", "t", "true")


def _there(store: Any, keys: list[str], until: float) -> bool:
    """Whether all of these are in the store, after SLICE at the latest. Raises DistStoreError if time is up."""
    from torch.distributed import DistStoreError

    try:
        store.wait(keys, SLICE)
    except DistStoreError as e:
        if clock.monotonic() < until:
            return False
        missing = ", ".join(key.removeprefix(f"{KEY}/") for key in keys if not store.check([key]))
        raise DistStoreError(
            f"timed out while a process group was created: its ranks {missing} have not connected to all others "
            f"after {store.timeout.total_seconds():g} s"
        ) from e
    return True


def _interfaces() -> int:
    """On how many gloo listens for a group."""
    return len(os.environ.get(INTERFACES, "").split(","))


def _shut_doors(descriptors: Iterable[int]) -> None:
    """All that will ever be connected is. A kernel that cannot shut a port leaves it as it is."""
    for _, copy in _copies(descriptors):
        with suppress(OSError):
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                sock_owner.shut_door(copy)


class _Kernel:
    """Linux's answers about other ends, as far as it gives any."""

    def __init__(self) -> None:
        try:
            self._asked: sock_owner.SockDiag | None = sock_owner.SockDiag()
        except OSError:
            self._asked = None

    def __enter__(self) -> _Kernel:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._asked is not None:
            self._asked.close()

    def owner(self, pair: Pair) -> sock_owner.SocketOwner | None:
        """Whose the other end is; None if nobody has it, or Linux does not report that."""
        with suppress(OSError):
            owner = None if self._asked is None else self._asked.owner(pair[1], pair[0])
            return owner if owner is not None and owner.holds else None
        return None

    def of_other_users(self, pairs: Iterable[Pair]) -> list[Pair]:
        owners = [(pair, self.owner(pair)) for pair in pairs]
        return [pair for pair, owner in owners if owner is not None and owner.uid != os.geteuid()]

    def not_ours(self, pairs: Iterable[Pair]) -> list[Pair]:
        """Those whose other end somebody has who is no process of the pool."""
        return [pair for pair in pairs if self.owner(pair) is not None and not self.is_ours(pair)]

    def is_ours(self, pair: Pair) -> bool:
        """Whether a process of the pool (`belong_to`) has the other end."""
        owner = self.owner(pair)
        if owner is None or owner.uid != os.geteuid():
            return False
        root, *roots = _roots or [os.getppid()]
        pids, hidden = sock_owner.ProcessTree(root, roots=roots).holders({owner.inode})
        return bool(pids) or hidden

    def _is_waiting(self, pair: Pair) -> bool:
        """Whether the other end is on this machine, and nobody has accepted it yet."""
        with suppress(OSError):
            owner = None if self._asked is None else self._asked.owner(pair[1], pair[0])
            return owner is not None and owner.inode == 0 and owner.state == sock_owner.ESTABLISHED
        return False

    def _ranks(self, ends: Endpoints) -> list[Pair]:
        """The connections that lead to ranks, as far as this end can tell. One that this rank has made counts even if
        nobody holds its other end yet: a busy rank has not accepted it."""
        return [
            pair for pair in ends.pairs if (pair[0] not in ends.doors and self._is_waiting(pair)) or self.is_ours(pair)
        ]

    def refuse(self, ends: Endpoints, strangers: Sequence[Pair], ranks: Sequence[Pair] | None, size: int) -> None:
        """Raises Intruder if there are strangers, unless gloo uses as many connections to ranks as there are other
        ranks. ranks: the connections to them; None if only Linux knows which those are."""
        if not strangers:
            return
        known = self._ranks(ends) if ranks is None else ranks
        if len(known) == size - 1 and _are_used([ends.pairs[pair] for pair in known]):
            return
        owner = self.owner(strangers[0])
        raise Intruder(None, None) if owner is None else Intruder(owner.uid, sock_owner.holder(owner.inode))


# -- which connections gloo uses -------------------------------------------------------------------


def _are_used(descriptors: Sequence[int]) -> bool:
    """Whether gloo reads from all of these. Its loop waits for a descriptor once it has read the number by which the
    other side says its rank. It does not wait for one that it has only accepted."""
    until, before = clock.monotonic() + PATIENCE, False
    while clock.monotonic() < until:
        now = set(descriptors) <= _awaited() and not any(map(_unread, descriptors))
        if now and before:
            return True
        before = now
        clock.sleep(BETWEEN)
    return False


def _awaited() -> set[int]:
    """Descriptors for whose data some epoll of this process waits again and again; empty where Linux does not list
    them. gloo waits once for the number of who comes to its door, and leaves the descriptor listed."""
    found = set[int]()
    for number in os.listdir("/proc/self/fd") if system.has_proc() else ():
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}") == "anon_inode:[eventpoll]":
                lines = Path(f"/proc/self/fdinfo/{number}").read_text().splitlines()
                listed = [line.split() for line in lines if line.startswith("tfd:")]
                found |= {int(at) for _, at, _, events, *_ in listed if int(events, 16) & (IN | ONCE) == IN}
    return found


def _unread(number: int) -> bool:
    """Whether something has come that nobody has read yet."""
    left = array.array("i", [1])
    with suppress(OSError):  # closed meanwhile
        fcntl.ioctl(number, termios.FIONREAD, left)
    return left[0] > 0
