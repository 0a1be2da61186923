"""The node agent: one small process per node that starts and watches the workers there.

It imports what a worker needs once (torch, torch._dynamo, the ipyparallel engine), stays single-threaded, never touches
CUDA, and forks. It serves one owner on descriptors that nothing else writes to, in lines of JSON (`protocol.codec`). It
serves others of the same user on a unix socket (the terminal's `python -m nbddp`). What is printed here, by whatever
module is imported, goes to its log. It ends with its owner, taking all its children along. It holds no rule about runs:
it starts, signals, reports. Capabilities add to what it may be asked for, what it starts, and what becomes of its
process in the end (`protocol.capability.OnAgent`).
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import psutil

from nbddp.agent import child_logs, children, hardware, keeper, runtime_dir, warning_filters
from nbddp.agent.process_id import ProcessId, is_zombie
from nbddp.compat import system
from nbddp.compat import torch as torch_compat
from nbddp.errors import NbddpError, RankStatus
from nbddp.protocol.agent import CONTROLS_ONLY, PROTOCOL, Hello, OpenStore, Warm
from nbddp.protocol.capability import OnAgent, load, rows
from nbddp.protocol.codec import LineBuffer, Message, encode, from_json, log_unknown, to_json

WORKER, CONTROLLER, STORE = "worker", "controller", "store"
TARGETS = {
    WORKER: "nbddp.worker.engine:main",
    CONTROLLER: "nbddp.agent.controller:main",
    STORE: "nbddp.agent.store_host:main",
}
WARM = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.distributed.optim",
    torch_compat.COMPILER,
    "ipyparallel.engine.app",
    "ipyparallel.controller.app",
    "ipykernel.zmqshell",
    "cloudpickle",
    "IPython.core.completerlib",
    "IPython.core.logger",
    "IPython.core.oinspect",
    "IPython.extensions.storemagic",
    "IPython.utils.wildcard",
    "encodings.idna",
    "tornado.platform.asyncio",
    "tornado.queues",
    "bdb",
    "nbddp.worker.engine",
    "nbddp.worker.ahead",
)
CONTROLS = ("ipyparallel.controller.app", "tornado.platform.asyncio", "tornado.queues")  # of a pool on other hosts
LOOK_EVERY = 1.0  # seconds
MOST_SENT = 8  # descriptors that a client of the socket sends at once
SPARED = (torch_compat.COMPILER,)  # without it a worker starts all the same
Part = TypeVar("Part")


@dataclass
class Child:
    """One process started here. `status` is a worker's, as the owner says, and `doing` is that in words where the owner
    has some. `spawned`: whether it imports torch itself."""

    kind: str
    pid: int
    started: float
    rank: int = -1
    uuid: str = ""
    status: RankStatus = RankStatus.STARTING
    doing: str = ""
    log: str = ""
    spawned: bool = False


@dataclass
class Peer:
    """Somebody who talks to the agent: its owner, or a client of the socket. `came`: descriptors that it has sent."""

    send: Callable[[bytes], Any]
    connection: socket.socket | None = None
    owner: bool = False
    lines: LineBuffer = field(default_factory=LineBuffer)
    came: list[int] = field(default_factory=list)


class NodeAgent:
    """The loop and its few tables. `serve` returns when the owner is gone or says stop."""

    patience = 5.0  # seconds that a client of the socket may take to read what it is sent

    def __init__(
        self,
        folder: Path,
        hears: int,
        says: int,
        owner: int | None = None,
        modules: tuple[str, ...] = WARM,
    ):
        """hears, says: the descriptors, or the one, by which it talks with its owner. owner: whose agent it is; that of
        its parent if None. modules: those to import before anything is started."""
        self.home, self.hears, self.says = folder, hears, says
        self.owner_pid = os.getppid() if owner is None else owner
        self.keep = 0.0  # seconds for which its process goes on after the owner's end
        self.modules = modules
        self.parts: dict[Callable[[NodeAgent], Any], Any] = {}
        self.looks: list[Callable[[], None]] = []  # what is called each second besides
        self.ended: list[Callable[[Child], None]] = []  # called with a child that has ended, before others hear of it
        self.held: set[int] = set()  # descriptors besides that no child is to hold
        self.children: dict[int, Child] = {}
        self.peers: list[Peer] = []
        self.info: dict[str, Any] = {}
        self.files: list[str] = []
        self.stores: dict[int, tuple[Peer, Any]] = {}
        self.next_store = 0
        self.running = True
        self.is_warm = False
        self.selector = selectors.DefaultSelector()
        self.owner = Peer(self._write_owner, owner=True)
        self.identity = ProcessId.of(os.getpid())
        self.store_channel: socket.socket | None = None
        self._looked = 0.0  # by time.monotonic()

    def serve(self) -> None:
        runtime_dir.record(self.home, self.identity, [])
        self._watch_children()
        self._watch_owner()
        self._listen()
        self.tell(self.owner, ev=Hello.ev, **to_json(self.hello()))
        self._warm_up()
        try:
            while self.running:
                for key, _ in self.selector.select(LOOK_EVERY):
                    key.data()
                if time.monotonic() - self._looked >= LOOK_EVERY:
                    self._looked = time.monotonic()
                    self.each_second()
        finally:
            self._end()

    def hello(self) -> Hello:
        """What the owner gets to know at once."""
        return Hello(self.identity.pid, self.identity.started, PROTOCOL)

    def each_second(self) -> None:
        for path in {child.log for child in self.children.values()}:
            child_logs.cut_log(path)
        for look in self.looks:
            look()

    def part(self, make: Callable[[NodeAgent], Part]) -> Part:
        """What a capability keeps here: `make(self)`, from when it is first asked for."""
        if make not in self.parts:
            self.parts[make] = make(self)
        found: Part = self.parts[make]
        return found

    # -- starting up ---------------------------------------------------------------

    def _warm_up(self) -> None:
        began = time.monotonic()
        gc.disable()  # what it would free leaves holes that every child fills, and so copies, page by page
        missing = import_all(self.modules) if not children.why_not_fork() else ""
        reason = children.why_not_fork()
        found: Message = next((load(row.gpus)(os.environ) for row in added() if row.gpus), {})
        cores = hardware.allowed_cores()
        more = {name: value for row in added() if row.warm for name, value in load(row.warm)(self).items()}
        self.is_warm = True
        warm = Warm(
            host=socket.gethostname(),
            cores=len(cores),
            **found,  # devices, links, untold
            numa=tuple(hardware.numa(cores)),
            interfaces=tuple(hardware.interfaces()),
            missing=missing,
            spawn=reason,
            seconds=time.monotonic() - began,
            more=more,
        )
        self.tell(self.owner, ev=Warm.ev, **to_json(warm))

    def _watch_owner(self) -> None:
        self.peers.append(self.owner)
        self.selector.register(self.hears, selectors.EVENT_READ, self._read_owner)
        with suppress(AttributeError, OSError):  # not Linux, or an old one: `children.die_with_parent` alone tells
            owner = os.pidfd_open(self.owner_pid)  # the pipe may be held open by a fork of the owner's
            self.selector.register(owner, selectors.EVENT_READ, self.stop)

    def _watch_children(self) -> None:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: self._told_to_end())
        signal.signal(keeper.OWNER_DIED, lambda *_: self._owner_died())
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        self._wakeup = (ours, theirs)
        self._signalled = ours
        self.selector.register(ours, selectors.EVENT_READ, self._read_signals)

    def _listen(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(runtime_dir.socket_of(self.home)))
        self._listener.listen()
        self.selector.register(self._listener, selectors.EVENT_READ, self._accept)

    # -- talking -------------------------------------------------------------------

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(self.patience)
        peer = Peer(connection.sendall, connection)
        self.peers.append(peer)
        self.selector.register(connection, selectors.EVENT_READ, lambda: self._read_peer(peer, connection))

    def _read_peer(self, peer: Peer, connection: socket.socket) -> None:
        try:
            chunk, came, *_ = socket.recv_fds(connection, 65536, MOST_SENT)
        except ConnectionError:
            chunk, came = b"", []
        for fd in came:
            os.set_inheritable(fd, False)
        peer.came += came
        for fd in peer.came[MOST_SENT:]:
            os.close(fd)
        del peer.came[MOST_SENT:]
        if chunk:
            self._handle_all(peer, chunk)
            return
        self.leave_peer(peer)
        self.peer_gone(peer)

    def leave_peer(self, peer: Peer) -> None:
        """Hear nothing more of a client of the socket."""
        assert peer.connection is not None
        for fd in peer.came:
            os.close(fd)
        self.selector.unregister(peer.connection)
        peer.connection.close()

    def peer_gone(self, peer: Peer) -> None:
        """A client of the socket has gone."""
        self.peers.remove(peer)

    def _read_owner(self) -> None:
        chunk = b""
        with suppress(ConnectionError):  # a socket's other end has gone without reading all
            chunk = os.read(self.hears, 65536)
        if chunk:
            self._handle_all(self.owner, chunk)
        else:
            self.owner_gone()

    def owner_gone(self) -> None:
        """Nobody is at the other end."""
        self.stop()

    def _write_owner(self, data: bytes) -> None:
        while data:
            data = data[os.write(self.says, data) :]

    def tell(self, peer: Peer, **message: Any) -> None:
        try:
            peer.send(encode(message))
        except OSError:  # it has gone; its own end of file shows that too
            if peer.owner:
                self.owner_gone()

    def tell_all(self, **message: Any) -> None:
        for peer in list(self.peers):
            self.tell(peer, **message)

    def _handle_all(self, peer: Peer, chunk: bytes) -> None:
        for message in peer.lines.feed(chunk):
            self._handle(peer, message)

    def _handle(self, peer: Peer, message: Message) -> None:
        try:
            answer = self._handler(message["op"])(self, peer, message)
        except NbddpError as e:  # in a text of nbddp's
            answer = {"error": str(e)}
        except Exception as e:
            answer = {"error": f"{type(e).__name__}: {e}"}
        if answer is not None and "id" in message:
            self.tell(peer, id=message["id"], **answer)

    def _handler(self, op: str) -> Callable[[Any, Peer, Message], Message | None]:
        """What carries a request out; no row replaces an agent's own."""
        if op in self.REQUESTS:
            return self.REQUESTS[op]
        found: Callable[[Any, Peer, Message], Message | None] = load(
            {name: target for row in added() for name, target in row.ops.items()}[op]
        )
        return found

    # -- requests ------------------------------------------------------------------

    def _do_start(self, peer: Peer, message: Message) -> Message:
        """Start a worker, the controller or what a row has; answers with a `Started`."""
        kind = message["kind"]
        request = {k: v for k, v in message.items() if k not in ("op", "id")}
        child = self._start(kind, request)
        child.rank, child.uuid = message.get("rank", -1), message.get("uuid", "")
        return {"pid": child.pid, "started": child.started, "spawned": child.spawned}

    def _do_signal(self, peer: Peer, message: Message) -> Message:
        """Signal the children named by pid; one that has ended is passed over. group: also what they have started."""
        for pid in message["pids"]:
            if pid in self.children:  # not yet reaped, so the pid is still its own
                with suppress(ProcessLookupError, PermissionError):  # macOS: a group in which all have ended
                    (os.killpg if message.get("group") else os.kill)(pid, message["signal"])
        return {}

    def _do_store(self, peer: Peer, message: Message) -> None:
        """Open a fresh store, or a gate that leads to another node's; the answer comes when the store host has it."""
        if self.store_channel is None:
            self._start_store_host()
        assert self.store_channel is not None
        self.next_store += 1
        self.stores[self.next_store] = (peer, message.get("id"))
        asked = replace(from_json(OpenStore, message), store=self.next_store)
        self.store_channel.sendall(encode({"op": "open", **to_json(asked)}))

    def _do_close_stores(self, peer: Peer, message: Message) -> Message:
        if self.store_channel is not None:
            self.store_channel.sendall(encode({"op": "close", "stores": message["stores"]}))
        return {}

    def _do_describe(self, peer: Peer, message: Message) -> Message:
        """Keep what the owner says of the pool, for `status`, and the files to remove in the end."""
        self.info = message["info"]
        self.files = message["files"]
        runtime_dir.record(self.home, self.identity, self.files)
        return {}

    def _do_note(self, peer: Peer, message: Message) -> Message:
        """Keep what the owner says the workers are doing."""
        for child in self.children.values():
            if child.kind == WORKER and child.rank in message["ranks"]:
                child.status, child.doing = RankStatus(message["status"]), message["doing"]
        return {}

    def _do_status(self, peer: Peer, message: Message) -> Message:
        children = [asdict(c) for c in self.children.values()]
        return {"info": self.info, "files": self.files, "children": children, "keep": self.keep}

    def _do_stop(self, peer: Peer, message: Message) -> Message:
        self.keep = 0.0
        self.stop()
        return {}

    REQUESTS: ClassVar[dict[str, Callable[[NodeAgent, Peer, Message], Message | None]]] = {
        "start": _do_start,
        "signal": _do_signal,
        "store": _do_store,
        "close_stores": _do_close_stores,
        "describe": _do_describe,
        "note": _do_note,
        "status": _do_status,
        "stop": _do_stop,
    }

    # -- children ------------------------------------------------------------------

    def _start(self, kind: str, request: dict[str, Any], keep: tuple[int, ...] = ()) -> Child:
        targets = {**{kind: target for row in added() for kind, target in row.starts.items()}, **TARGETS}
        spawn = bool(children.why_not_fork()) or any(load(row.spawns)(request) for row in added() if row.spawns)
        pid = children.start(targets[kind], request, close=self.own_descriptors() - set(keep), keep=keep, spawn=spawn)
        child = Child(kind, pid, ProcessId.of(pid).started, log=request["log"], spawned=spawn)
        self.children[pid] = child
        return child

    def own_descriptors(self) -> set[int]:
        """Those that no child is to hold."""
        held = {key.fd for key in self.selector.get_map().values()}
        held |= {self.hears, self.says, self._wakeup[1].fileno(), self.selector.fileno()}
        return held | self.held

    def _start_store_host(self) -> None:
        ours, theirs = socket.socketpair()
        theirs.set_inheritable(True)
        request = {
            "channel": theirs.fileno(),
            "owner": self.owner_pid,
            "log": str(self.home / "store.log"),
            "env": {**os.environ, "OMP_NUM_THREADS": "1"},
            "cwd": str(self.home),
            "path": sys.path,
        }
        self._start(STORE, request, keep=(theirs.fileno(),))
        theirs.close()
        self.store_channel = ours
        lines = LineBuffer()
        self.selector.register(ours, selectors.EVENT_READ, lambda: self._read_store_host(ours, lines))

    def _read_store_host(self, channel: socket.socket, lines: LineBuffer) -> None:
        chunk = channel.recv(65536)
        if not chunk:
            self._lose_store_host(channel)
        for message in lines.feed(chunk):
            peer, request = self.stores.pop(message.get("store", 0), (None, None))
            if peer is None:
                log_unknown(encode(message))
            else:
                self.tell(peer, id=request, **message)

    def _lose_store_host(self, channel: socket.socket) -> None:
        """The store host ended: its stores are gone, the next request starts another."""
        self.selector.unregister(channel)
        channel.close()
        self.store_channel = None
        for peer, request in self.stores.values():
            self.tell(peer, id=request, error="the process that holds the stores has exited")
        self.stores.clear()

    def _read_signals(self) -> None:
        self._signalled.recv(4096)
        self._reap()

    def _reap(self) -> None:
        while (pid := self._ended()) is not None:
            self._end_group(pid)
            _, status, usage = os.wait4(pid, 0)
            child = self.children.pop(pid, None)
            if child is not None:
                for hear in self.ended:
                    try:
                        hear(child)
                    except Exception:  # a capability's; the agent lives on, and tells of the child's end
                        traceback.print_exc()
                self.tell_all(
                    ev="exit", kind=child.kind, rank=child.rank, uuid=child.uuid, pid=child.pid,
                    code=os.waitstatus_to_exitcode(status), peak_kib=system.peak_bytes(usage.ru_maxrss) >> 10,
                    **self.exit_facts(child),
                )  # fmt: skip

    def exit_facts(self, child: Child) -> Message:
        """What else to tell of a child that has ended; of the controller, with which the pool's logs go, its last
        output."""
        return {"last_words": child_logs.last_words(child.log)} if child.kind == CONTROLLER else {}

    def _ended(self) -> int | None:
        """A child that has ended, and whose pid is held until it is waited for; None if there is none."""
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return next(filter(is_zombie, {*self.children, *_orphans()}), None)
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return None
        return None if found is None else found.si_pid

    def _end_group(self, pid: int) -> None:
        """Kill what a child left behind in its session; its pid is still held, so the group is its own."""
        if pid in self.children:
            try:
                os.killpg(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                return  # nothing left, or only the ended leader itself

    def stop(self) -> None:
        self.running = False

    def _told_to_end(self) -> None:
        """By SIGTERM, or since its owner died: at once while still importing, else after the loop's turn."""
        self.keep = 0.0
        self.stop()
        if not self.is_warm:
            runtime_dir.remove(self.home, self.files)
            os._exit(0)

    def _owner_died(self) -> None:
        if not self.keep:
            self._told_to_end()

    def _end(self) -> None:
        self.tell_all(ev="ended")
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)
        while self.children or _orphans():
            for pid in _orphans() - set(self.children):  # not yet reaped, so the pids are their own
                os.kill(pid, signal.SIGKILL)
            self._reap()
            time.sleep(0.002)
        runtime_dir.remove(self.home, self.files)

    def release(self) -> None:
        """Once it has ended: close what it has heard and spoken with."""
        for key in [*self.selector.get_map().values()]:
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        self._wakeup[1].close()
        self.selector.close()

    def successor(self) -> NodeAgent | None:
        """Once it has ended: the agent that its process becomes for another owner; None if it is to end as well."""
        found = (load(row.succeeds)(self) for row in added() if self.keep and row.succeeds)
        return next(filter(None, found), None)


def added() -> list[OnAgent]:
    """What capabilities add to agents."""
    return [row.on_agent for row in rows()]


def _orphans() -> set[int]:
    """Children of this process: those that it has started, and those of theirs that it has adopted."""
    return {process.pid for process in psutil.Process().children()}


def import_all(names: tuple[str, ...]) -> str:
    """Import what workers need; the name and error of what is missing, or empty."""
    import importlib

    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as e:
            if name not in SPARED:
                return f"{name}: {e}"
    return ""


def main() -> None:
    """`python -m nbddp.agent HOME OWNER_PID DESCRIPTOR [--controls-only]`."""
    warning_filters.put_off()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # its owner has kept it from us until now
    home, owner, channel = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    children.die_with_parent(owner, keeper.OWNER_DIED)
    keeper.keep(home)
    os.set_inheritable(channel, False)
    modules = CONTROLS if CONTROLS_ONLY in sys.argv[4:] else WARM
    agent: NodeAgent | None = NodeAgent(home, channel, channel, owner, modules)
    try:
        for begin in [row.begins for row in added() if row.begins]:
            load(begin)(agent)
        while agent is not None:
            agent.serve()
            agent = agent.successor()
    except BaseException:  # its last output; at exit Python would have more to say, such as of sockets that stand open
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # torch's own clean-up at exit takes longer than everything else
