"""The node agent of another host: as `agent.server`, with an owner at the far end of a connection.

`python -m nbddp.capabilities.hosts.remote_agent` speaks on what its stdin and stdout were, through ssh or whatever has
started it. The shell's start-up files may have printed there before, so it begins with MARK on a line of its own; what
they have left running may print later, so each message does too. Then its owner says in a line of JSON in which
environment and folder it is to warm up. It makes its own folder here, and tells where that is. Both sides say every
PING_EVERY seconds that they live, since a cut cable closes nothing. An agent that has not heard of its owner for
PATIENCE seconds ends, with all that it has started.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from nbddp.agent import child_logs, children, hardware, keeper, runtime_dir, warning_filters
from nbddp.agent.process_id import ProcessId
from nbddp.agent.server import WORKER, Child, NodeAgent, Peer
from nbddp.capabilities.hosts.backlog import Backlog
from nbddp.capabilities.hosts.reachability import offers
from nbddp.capabilities.hosts.sync_remote import FolderCopy
from nbddp.compat import system
from nbddp.compat.extra.versions import versions
from nbddp.launch.torchrun_env import INTERFACES
from nbddp.protocol.agent import Hello
from nbddp.protocol.codec import MARK, PING_EVERY, Message, encode, parsed

FACTS = "facts"  # the kind of a process
PATIENCE = 20.0  # seconds without a word from the owner; a kernel that a debugger stops is silent, too
FILES = 0o600
TASK_OF = (  # beginnings of variables that tell a process its place among those of srun or mpiexec
    "OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDRA_", "MPI_LOCAL", "SLURM_STEP", "SLURM_SRUN_", "SLURM_PROCID",
    "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_TASK", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_LAUNCH_",
)  # fmt: skip


class RemoteAgent(NodeAgent):
    """An agent of an owner elsewhere. `said`: what the owner said first."""

    def __init__(self, folder: Path, hears: int, says: int, said: Message):
        # nobody here is its owner; what started it is ssh's, and none of the pool's
        super().__init__(folder, hears, says, owner=os.getpid())
        self._wanted_cwd, self._reached = str(said["cwd"]), str(said.get("reached", ""))
        self._heard = self._pinged = time.monotonic()
        self._keep_alive = float(said.get("keep_alive", 0.0))  # seconds that it lives without its owner
        self._away: float | None = None  # since when the owner is
        self._speaks: Peer | None = None  # the client of the socket that is the owner's new connection
        self._backlog = Backlog()
        self._copy: FolderCopy | None = None
        self._asked_facts: dict[int, tuple[Peer, int]] = {}  # pid → who asked
        self._log_from: dict[int, int] = {}  # pid → the byte of its log at which its last run began

    def hello(self) -> Hello:
        """What the owner needs to know of this host before anything is warm."""
        return replace(
            super().hello(),
            home=str(self.home), bulk=str(runtime_dir.bulk(self.home)), cwd=system.working_dir(),
            host=socket.gethostname(), reached=self._reached or reached_at(), versions=versions(),
            joining={name: os.environ[name] for name in INTERFACES if name in os.environ},
            moved="" if self._wanted_cwd in ("", system.working_dir()) else self._wanted_cwd,
        )  # fmt: skip

    def _write_owner(self, data: bytes) -> None:
        """Raises TimeoutError where the owner does not read, as beyond a cut cable, and is given up."""
        data = b"\n" + data
        while data:
            left = self._heard + PATIENCE - time.monotonic()
            if not select.select([], [self.says], [], max(0.0, left))[1]:
                raise TimeoutError("the owner does not read")
            data = data[os.write(self.says, data[: select.PIPE_BUF]) :]

    def _read_owner(self) -> None:
        self._heard = time.monotonic()
        super()._read_owner()

    def _warm_up(self) -> None:
        super()._warm_up()
        self._heard = time.monotonic()  # what came meanwhile is still to be read
        if self._keep_alive:  # what it says goes to a file from here on, which survives the connection
            log = os.open(self.home / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, FILES)
            for standard in (1, 2):
                os.dup2(log, standard)
            os.close(log)

    def each_second(self) -> None:
        super().each_second()
        now = time.monotonic()
        if now - self._heard > PATIENCE + self._keep_alive or (self._away and now - self._away > self._keep_alive):
            self.stop()
        if now - self._pinged >= PING_EVERY:
            self._pinged = now
            self.tell(self.owner, ev="ping", got=self._backlog.got)

    # -- an owner whose connection is lost ------------------------------------------------------------

    def owner_gone(self) -> None:
        """It may come back, by `capabilities.hosts.rejoin`."""
        if not self._keep_alive or not self.is_warm:
            self.stop()
        elif self._away is None:
            self._away = time.monotonic()
            self._leave_first()

    def _leave_first(self) -> None:
        """The connection that it was started with is over."""
        with suppress(KeyError):
            self.selector.unregister(self.hears)

    def peer_gone(self, peer: Peer) -> None:
        if peer is self._speaks:
            self._speaks = None
            self.owner_gone()
        else:
            super().peer_gone(peer)

    def tell(self, peer: Peer, **message: Any) -> None:
        if peer is self.owner and self._keep_alive and message.get("ev") != "ping":
            message = self._backlog.number(message)
        if peer is not self.owner or self._away is None:
            super().tell(peer, **message)

    def _handle_all(self, peer: Peer, chunk: bytes) -> None:
        if peer is self._speaks:
            self._heard = time.monotonic()
            peer = self.owner
        super()._handle_all(peer, chunk)

    def _handle(self, peer: Peer, message: Message) -> None:
        if peer is not self.owner or self._backlog.is_new(message):
            super()._handle(peer, message)

    def _do_own(self, peer: Peer, message: Message) -> Message:
        """The owner is back. `got`: what it has read."""
        if not self._keep_alive:
            raise ValueError("this agent ends with its owner's connection")
        self._leave_first()
        if self._speaks is not None:  # beyond a cut cable it lives on, and what it still brings has come again by now
            self.leave_peer(self._speaks)
        self.peers.remove(peer)
        self._speaks, self._away, self._heard = peer, None, time.monotonic()
        self.owner.send, self.owner.lines = peer.send, peer.lines
        self._backlog.read(message["got"])
        peer.send(encode({"ev": "owned", "got": self._backlog.got}))
        for rest in self._backlog.rest():
            peer.send(encode(rest))
        return {}

    # -- requests ----------------------------------------------------------------------------------

    def _do_ping(self, peer: Peer, message: Message) -> None:
        """The owner lives: `_read_owner` has noted it. `got`: what it has read."""
        self._backlog.read(message.get("got", 0))

    def _do_put(self, peer: Peer, message: Message) -> Message:
        """Have a file of the pool here, which only its user may read; where it is."""
        path = self.home / Path(message["name"]).name
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILES), "w") as file:
            file.write(message["text"])
        return {"path": str(path)}

    def _do_begin_logs(self, peer: Peer, message: Message) -> Message:
        """A run begins on these ranks."""
        workers = [c for c in self.children.values() if c.kind == WORKER and c.rank in message["ranks"]]
        self._log_from |= {c.pid: os.path.getsize(c.log) if os.path.exists(c.log) else 0 for c in workers}
        return {}

    def _do_clock(self, peer: Peer, message: Message) -> Message:
        return {"now": time.time()}

    def _do_facts(self, peer: Peer, message: Message) -> None:
        """What `%ddp doctor` asks; a process of its own finds it out, and the answer comes when that has ended."""
        log = self.home / f"facts-{message['id']}.log"
        here = {
            "kind": FACTS,
            "log": str(log),
            "env": dict(os.environ),
            "cwd": system.existing_working_dir(),
            "path": list(sys.path),
        }
        self._asked_facts[super()._do_start(peer, here)["pid"]] = (peer, message["id"])

    def _tell_facts(self, child: Child) -> None:
        peer, key = self._asked_facts.pop(child.pid)
        lines = list[bytes]()
        with suppress(OSError):
            lines = Path(child.log).read_bytes().splitlines()
            Path(child.log).unlink()
        found = next(filter(None, map(parsed, reversed(lines))), None)
        if found is not None:
            self.tell(peer, id=key, facts=found)
        else:
            last = lines[-1].decode(errors="replace") if lines else "is its disk full?"
            self.tell(peer, id=key, error=f"it could not determine its own facts: {last}")

    def _do_folder(self, peer: Peer, message: Message) -> Message:
        """A copy of the notebook's folder begins, or begins anew."""
        self._end_copy()
        self._copy = FolderCopy(message["path"], message["of"], message["host"], system.working_dir())
        return {}

    def _end(self) -> None:
        self._end_copy()
        super()._end()

    def _end_copy(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.close()

    def _do_folder_files(self, peer: Peer, message: Message) -> Message:
        """Some of the files that there are; which have to be sent."""
        return {"needed": self._copying().compare(message["files"])}

    def _do_folder_same(self, peer: Peer, message: Message) -> Message:
        """Whether the same path has the same files here, so that nothing is to be copied."""
        return {"same": self._copying().is_same}

    def _do_folder_piece(self, peer: Peer, message: Message) -> Message:
        piece = {name: message[name] for name in ("path", "row", "data", "first", "last")}
        return {"trouble": self._copying().write(**piece)}

    def _do_folder_done(self, peer: Peer, message: Message) -> Message:
        """All has been sent: workers that are started from now on begin in the copy."""
        used, answer = system.working_dir(), self._copying().finish()
        answer["moved"] = answer["folder"] != used
        os.chdir(answer["folder"])
        self._end_copy()
        return answer

    def _copying(self) -> FolderCopy:
        if self._copy is None:
            raise ValueError("no copy has begun")
        return self._copy

    def _do_status(self, peer: Peer, message: Message) -> Message:
        """As an agent beside its owner, with the memory of each process, in bytes."""
        answer = super()._do_status(peer, message)
        for child in answer["children"]:
            process = ProcessId(child["pid"], child["started"]).process()
            child["memory"] = hardware.memory_of(process) if process is not None else 0
        return answer

    def _do_start(self, peer: Peer, message: Message) -> Message:
        """As an agent beside its owner, in this host's environment with what the owner adds."""
        here = {"env": {**os.environ, **message["env"]}, "cwd": system.existing_working_dir(), "path": list(sys.path)}
        if "profile_dir" in message:
            os.makedirs(message["profile_dir"], mode=0o700, exist_ok=True)
        return super()._do_start(peer, {**message, **here})

    def exit_facts(self, child: Child) -> Message:
        """What the process said last; its owner cannot read its files."""
        if child.kind == FACTS:
            self._tell_facts(child)
            return {}
        return {"last_words": child_logs.last_words(child.log, self._log_from.pop(child.pid, 0))}

    REQUESTS: ClassVar[dict[str, Callable[[Any, Peer, Message], Message | None]]] = {
        **NodeAgent.REQUESTS,
        "ping": _do_ping,
        "own": _do_own,
        "status": _do_status,
        "put": _do_put,
        "begin_logs": _do_begin_logs,
        "clock": _do_clock,
        "facts": _do_facts,
        "folder": _do_folder,
        "folder_files": _do_folder_files,
        "folder_same": _do_folder_same,
        "folder_piece": _do_folder_piece,
        "folder_done": _do_folder_done,
        "start": _do_start,
    }


def reached_at() -> str:
    """This host's address, as ssh's client has reached it; else that of its name, or of an interface where the name
    leads nowhere."""
    there = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    if there:
        return there[0]
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return next((offer.address for offer in offers(hardware.interfaces())), "127.0.0.1")


def first_line(hears: int) -> Message:
    """What the owner says first; no byte beyond it is read."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(hears, 1)
        if not byte:
            sys.exit("no environment was given to start in")
        line += byte
    message: Message = json.loads(line)
    return message


def _drop_launchers_words() -> None:
    """What says which task of a job step this process is: libraries would take workers for that task."""
    for name in [name for name in os.environ if name.startswith(TASK_OF)]:
        del os.environ[name]


def main() -> None:
    warning_filters.put_off()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # a command that runs here has it from the owner, kept
    hears, says = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # what libraries read is not what the owner says
    os.close(null)
    os.dup2(2, 1)  # what they print goes to the log
    children.die_with_parent(os.getppid(), signal.SIGTERM)
    os.write(says, b"\n" + MARK + b"\n")
    said = first_line(hears)
    if said.get("keep_alive"):  # its parent is the connection's
        children.outlive_parent()
    _drop_launchers_words()
    os.environ.update({**runtime_dir.private_caches(), **said["env"], "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"})
    with suppress(OSError):  # the folder is reported, and that it is another
        os.chdir(said["cwd"])
    runtime_dir.running()  # sweeps what a killed agent left
    home = runtime_dir.new_home()
    keeper.keep(home)
    RemoteAgent(home, hears, says, said).serve()
    os._exit(0)  # torch's own clean-up at exit takes longer than everything else


if __name__ == "__main__":
    main()
