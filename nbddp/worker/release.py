"""Freeing a rank whose main thread is blocked in a collective, without ending its process.

gloo and the store offer no way to cancel a call: an interrupt waits until the call returns. What ends the call is the
loss of its connection. So a thread of ours shuts the connected TCP sockets that torch opened. It does so again and
again until the run is over, since a program that catches the error may call again. Which sockets are torch's is known
by watching what appears while torch makes a group or a store (`Sockets.watch`); sockets of Python objects are never
among them. Listening sockets are left alone (shutting one aborts the process). The loss of a connection does not end
every call of gloo's. A receive from any source waits for no connection in particular, and a message that was cut in its
midst is forgotten. So a message that is moving is let through first. Sends and receives that outlast their connections
are aborted one by one. NCCL has an abort of its own, used instead.

Where sockets cannot be distinguished (no /proc, so not on Linux) nothing is shut, and a blocked rank is replaced.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import itertools
import mmap
import os
import select
import socket
import stat
import struct
import sys
import termios
import threading
from collections.abc import Iterable, Iterator

from nbddp.compat import system, torch
from nbddp.compat.clock import clock
from nbddp.compat.thread import OwnThread
from nbddp.deadlock.on_rank import call_log, own_stores, store_client, threads
from nbddp.protocol.run_spec import RunSpec

KEPT = 8  # descriptors in reserve: two new pipes, and some files in /proc
ROOM = 32 << 20  # bytes of addresses in reserve: a thread's stack, and what messages and reports take
AGAIN = 0.05  # seconds between two shuts
LET_THROUGH = 5.0  # seconds that a message on its way has to come to its end
STALL = 1.0  # seconds of these in which its bytes may wait to be read: a peer may be short of memory, or stopped
LITTLE = 0.1  # share of a core that threads at rest may use
ABORTS = 2  # round from which on transfers are aborted that have outlasted their connections
RDHUP = getattr(select, "POLLRDHUP", 0)  # Linux alone
CUT = RDHUP | select.POLLHUP  # what poll says of a connection that a peer has shut
QUEUES = (termios.FIONREAD, termios.TIOCOUTQ)  # bytes that came and are unread; that were sent and have not arrived


class Reserve:
    """Descriptors and memory kept for what a worker does at the end of a run, and to free it. A program may have used
    up all. `begin` takes them, as far as there are any, and `free` gives them back; both may be called in any thread.
    Of the memory only the addresses are taken, which a limit (RLIMIT_AS) counts."""

    def __init__(self) -> None:
        self._held: list[int] = []
        self._room: list[mmap.mmap] = []

    def begin(self) -> None:
        with contextlib.suppress(OSError, MemoryError):  # a run before has left none
            if not self._room:
                self._room.append(mmap.mmap(-1, ROOM, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0))
        while len(self._held) < KEPT:
            try:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            except OSError:  # a run before has left none
                return

    def free(self) -> None:
        while self._room:
            self._room.pop().close()
        while self._held:
            os.close(self._held.pop())


class BorrowedSocket(socket.socket):
    """Another descriptor of a socket that is somebody else's, for as long as it is looked at."""

    def __init__(self, fd: int):
        super().__init__(fileno=os.dup(fd))


class Sockets:
    """The sockets that torch opened for its groups and stores, by inode."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._before: list[set[int]] = []
        self._to_peers: dict[int, int] = {}  # of these the ones of gloo's groups: inode → descriptor
        self._there: set[int] = set()  # of these the descriptors that were open when it was noted last
        self._shut: set[int] = set()
        self._looked_at, self._pythons = set[int](), set[int]()  # of these inodes it is known which are Python objects'

    @contextlib.contextmanager
    def watch(self, to_peers: bool = False) -> Iterator[list[int]]:
        """What appears meanwhile is torch's: a group or a store is being made. Its descriptors, once it has been.
        to_peers: it is a group of gloo's, whose connections lead to other ranks."""
        self._before.append(set(sockets()))
        appeared: list[int] = []
        try:
            yield appeared
        finally:
            before = self._before.pop()
            now = sockets()
            new = set(now) - before
            self._known = (self._known & set(now)) | new
            appeared += [now[inode] for inode in new]
            if to_peers:
                self._to_peers = {inode: fd for inode, fd in now.items() if inode in self._to_peers or inode in new}

    def leave_in_child(self) -> None:
        """In a process that was forked from here: give up torch's listening sockets, which it would hold open when this
        process has ended. Their descriptors stay taken, since objects in C++ will close them."""
        listening = [fd for inode, fd in sockets().items() if inode in self._known and _listens(fd)]
        if listening:
            null = os.open(os.devnull, os.O_RDWR)
            for fd in listening:
                os.dup2(null, fd)
            os.close(null)

    def candidates(self) -> dict[int, int]:
        """Inode → descriptor of torch's sockets, also of those that a call in progress has opened so far; and of those
        that objects in Python have opened meanwhile."""
        now = sockets()
        known = set(self._known)
        for before in list(self._before):
            known |= set(now) - before
        return {inode: fd for inode, fd in now.items() if inode in known}

    def torchs(self) -> list[int]:
        """Descriptors of torch's sockets, also of those that a call in progress has opened so far."""
        return list(self._torchs().values())

    def _torchs(self) -> dict[int, int]:
        ours = self.candidates()
        if not ours.keys() <= self._looked_at:  # to look takes milliseconds of each rank, again and again
            pythons = python_sockets()
            self._looked_at, self._pythons = {*ours}, {inode for inode, fd in ours.items() if fd in pythons}
        return {inode: fd for inode, fd in ours.items() if inode not in self._pythons}

    def shut(self, *, first: bool = False) -> int:
        """Shut torch's connected TCP sockets, those that are not shut yet; how many there were. first: those that a
        peer has shut are left for the next time, since gloo notices that by itself. Of many ranks each is released by
        those before it."""
        ours = {inode: fd for inode, fd in self._torchs().items() if inode not in self._shut}
        cut = self._poll(CUT, self._to_peers.values()) if first else set()
        done = {inode for inode, fd in ours.items() if fd not in cut and shut(fd)}
        self._shut |= done
        return len(done)

    def note(self) -> None:
        """What is cut from here on is of interest: a group that a program has ended has closed its connections too."""
        self._there = set(self._to_peers.values()) - self._poll(select.POLLNVAL, self._to_peers.values())

    def cut(self) -> bool:
        """Whether since `note` a peer has shut one of gloo's connections; gloo closes those that it has found shut."""
        return bool(self._poll(CUT | select.POLLNVAL, self._there))

    def _poll(self, wanted: int, fds: Iterable[int]) -> set[int]:
        """Descriptors for which Linux reports one of these."""
        ends = select.poll()
        for fd in fds:
            ends.register(fd, RDHUP)
        return {fd for fd, event in ends.poll(0) if event & wanted}

    def queued(self) -> bool:
        """Whether bytes wait in one of gloo's connections, to be read by this rank or by its peer. False where the
        system does not say."""
        for fd in self._to_peers.values():
            with contextlib.suppress(OSError):  # closed meanwhile
                if any(struct.unpack("i", fcntl.ioctl(fd, asked, bytes(4)))[0] for asked in QUEUES):
                    return True
        return False

    @contextlib.contextmanager
    def shutting(self, after: float) -> Iterator[threading.Event]:
        """If the block has not ended after so many seconds, shut torch's sockets until it has; after=0: before it, too.
        The event is set once they have been shut."""
        began, done, shuts = threading.Event(), threading.Event(), threading.Lock()

        def shut() -> None:
            pause = after or AGAIN
            while not done.wait(pause):
                with shuts:
                    if not done.is_set():
                        began.set()
                        self.shut()
                pause = AGAIN

        if not after:
            began.set()
            self.shut(first=True)  # here, since a quick block would leave the thread no time for it

        OwnThread("nbddp-shutting", shut).begin()
        try:
            yield began
        finally:
            done.set()
            with shuts:  # sockets that are opened from here on are the next group's
                pass


class Release:
    """Frees the main thread of the current run, and of no other.

    log: descriptor to which C++ is to write meanwhile: torch complains at length of lost connections. `aborted`:
    whether NCCL's groups were ended in the last release. `is_draining`: whether a message is on its way that is let
    through before anything is shut. `then`: what the rank is to do once it has been freed and has ended the run.
    """

    def __init__(self, torchs: Sockets, log: int | None = None, reserve: Reserve | None = None) -> None:
        """reserve: of descriptors, which are given back when the main thread is to be freed."""
        self.sockets = torchs
        self._reserve = reserve or Reserve()
        self.aborted = self.is_draining = False
        self.then: RunSpec | None = None
        self._thread: OwnThread | None = None
        self._log = log
        self._stderr: int | None = None
        self._lock = threading.Lock()
        self._epoch = 0
        self._over = threading.Event()
        self._run_is_on = self._started = self._is_through = False
        self._seen: tuple[float, tuple[int, int, int]] | None = None  # when gloo was looked at, and what it had done

    def begin(self, goes_on: bool = False) -> None:
        """A run begins: it may be released from here on. goes_on: it ends the group of the one before, and what moves
        is still compared with what moved then."""
        with self._lock:
            self._epoch += 1
            self._run_is_on, self._started, self.aborted, self.then = True, False, False, None
            self._seen, self._is_through = self._seen if goes_on else None, False
            own_stores.FREED.clear()

    @property
    def started(self) -> bool:
        """Whether the main thread was to be freed in this run."""
        return self._started

    def note(self) -> None:
        """The run may be ended soon: what moves now is compared with what moves then."""
        self._seen = clock.monotonic(), threads.native_work()
        self.sockets.note()

    def end(self) -> bool:
        """The run is over: nothing is shut or aborted from here on. True if it was released.

        Waits for an abort that has not returned, which would otherwise end the next run's group. How long is up to
        the client: it replaces a rank that has not ended the run some time after it was to be freed.
        """
        with self._lock:
            self._epoch += 1
            self._run_is_on = False
            self._over.set()
            own_stores.FREED.clear()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with self._lock:
            if self._stderr is not None:
                os.dup2(self._stderr, 2)
                os.close(self._stderr)
                self._stderr = None
            return self._started

    def start(self, then: RunSpec | None = None) -> bool:
        """Begin to free the main thread, and go on until the run ends; returns at once. False if no run is on."""
        with self._lock:
            if self._run_is_on and not self._started:
                self._started, self.then = True, then
                self._over = threading.Event()
                self._reserve.free()
                own_stores.FREED.set()
                if self._log is not None:
                    self._stderr = os.dup(2)
                    os.dup2(self._log, 2)
                self._thread = OwnThread("nbddp-release", self._free, self._epoch, self._over)
                self._thread.begin()
            return self._run_is_on

    def _free(self, epoch: int, over: threading.Event) -> None:
        with self._lock:
            if self._epoch != epoch:  # the run had ended before this thread began, and `end` has not waited for it
                return
        self.aborted = abort_nccl()
        self._let_through(over)
        self._is_through = not over.is_set()
        for turn in itertools.count():
            with self._lock:  # the next run's sockets are not touched: its begin waits for this lock
                if self._epoch != epoch:
                    return
                self.sockets.shut(first=not turn)
                if turn >= ABORTS:
                    abort_transfers()
            over.wait(AGAIN)

    def let_through(self) -> None:
        """Wait, after a run that was released, for what is on its way to a peer, unless it was waited for already."""
        if not self._is_through:
            self._let_through(threading.Event(), main=False)

    def _let_through(self, over: threading.Event, main: bool = True) -> None:
        """Return once gloo moves no bytes and computes nothing: a message that both sides work at comes to its end.
        What it computes once a peer has cut its connections is of no use: it takes notice of that. main: the main
        thread's bytes count too; not where it is the one that asks."""
        if main and store_client.SERVING:  # what moves is its own question whether all have come
            return
        moved_at = clock.monotonic()
        until = moved_at + LET_THROUGH
        if self._seen is None:
            self.note()
        assert self._seen is not None
        at, before = self._seen
        while clock.monotonic() < until and not over.wait(max(0.0, at + AGAIN - clock.monotonic())):
            now = threads.native_work()
            works = now[1] - before[1] > LITTLE * AGAIN * 1e9 and not self.sockets.cut()
            moved = now[0] != before[0] or (main and now[2] != before[2])
            at, before = self._seen = clock.monotonic(), now  # whoever asks after this thread goes on from here
            moved_at = at if moved or works else moved_at
            self.is_draining = at == moved_at or (at - moved_at < STALL and self.sockets.queued())
            if not self.is_draining:
                return
        self.is_draining = False


def abort_transfers() -> None:
    """End the waits in sends and receives of gloo's whose work is alive."""
    for work in call_log.CALLS.transfers():
        torch.abort_transfer(work)


def sockets() -> dict[int, int]:
    """Inode of each open socket of this process → its first descriptor. Empty where /proc is missing."""
    found: dict[int, int] = {}
    for fd in sorted(map(int, os.listdir("/proc/self/fd") if system.has_proc() else ())):
        try:
            seen = os.fstat(fd)  # to read the links in /proc takes several times as long
        except OSError:  # closed meanwhile
            continue
        if stat.S_ISSOCK(seen.st_mode):
            found.setdefault(seen.st_ino, fd)
    return found


def python_sockets() -> set[int]:
    """Descriptors of living `socket.socket` objects: never torch's, whose sockets are made in C++."""
    kinds = _with_subclasses(socket.socket) - {BorrowedSocket}
    return {o.fileno() for o in gc.get_objects() if type(o) in kinds}


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def _listens(fd: int) -> bool:
    try:
        with BorrowedSocket(fd) as copy:
            return bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False


def shut(fd: int) -> bool:
    """Shut a TCP connection, or one that is being made; False if it is neither. A listening socket is left alone."""
    try:
        copy = BorrowedSocket(fd)
    except OSError:
        return False  # closed meanwhile
    with copy:
        if copy.type != socket.SOCK_STREAM or copy.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        try:
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            copy.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
    return True


def has_nccl() -> bool:
    """Whether there is a default group, and one of its backends is NCCL itself."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return False
    return "nccl" in dist.get_backend_config() and "nccl" not in call_log.STANDS_FOR


def abort_nccl() -> bool:
    """Abort the communicators of NCCL groups: blocked kernels and waits end with an error. True if there were any."""
    if not has_nccl():
        return False
    try:
        torch.abort_groups()
    except Exception as e:
        print(f"aborting NCCL: {type(e).__name__}: {e}", file=sys.__stderr__)
    return True
