"""Nodes that Slurm has allocated to a pool, by Slurm's own commands: asked for, looked at, given back.

An allocation lives as long as its holder (`capabilities.slurm.holder`). So it survives cells, new workers and agents
that end. It ends with the notebook kernel unless it is kept.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from nbddp.agent import runtime_dir, stop
from nbddp.agent.client import without_stop
from nbddp.agent.process_id import ProcessId
from nbddp.capabilities.hosts.names import Host
from nbddp.capabilities.slurm import commands, holder
from nbddp.capabilities.slurm.commands import Slurm
from nbddp.errors import AgentFailed, BadInput, SlurmRefused
from nbddp.launch.units import lasts
from nbddp.protocol.codec import MARK, Json, LineBuffer, Message, encode

LOOK_EVERY = 2.0  # seconds between two looks at the queue
SLICE = 0.1  # seconds between two looks whether Stop was pressed
PATIENCE = 10.0  # seconds for a command of Slurm's
ENDING = 5.0  # seconds for salloc to end
UNKNOWN_JOB = "Invalid job id"  # says scontrol of one that has ended some minutes ago

_left: list[subprocess.Popen[bytes]] = []  # sallocs that are to go on


class Allocation:
    """A Slurm job whose nodes are used here. `hosts`: its nodes, by Slurm's names."""

    def __init__(self, job: int, nodes: str, write: BinaryIO | None, process: subprocess.Popen[bytes] | None = None):
        """write: where its holder listens; None for a job that somebody else ends."""
        self.job, self.nodes = job, nodes
        self._write, self._process = write, process
        self.hosts = tuple(Host(name) for name in ask("scontrol", "show", "hostnames", nodes).split())

    @property
    def ours(self) -> bool:
        """Whether we end it."""
        return self._write is not None

    @classmethod
    def new(cls, asked: Slurm, nproc: int | None, log: Path, progress: Callable[[str], None]) -> Allocation:
        """Ask for nodes, and wait for them; Stop takes the job out of the queue. log: a file for salloc's words.
        progress: called with the state of the queue. Raises BadInput, AgentFailed with Slurm's words."""
        needs("salloc")
        own = ProcessId.of(os.getpid())
        held = [sys.executable, "-m", "nbddp.capabilities.slurm.holder", str(own.pid), str(own.started)]
        comment = f"nbddp {secrets.token_hex(8)}"  # by which the job is found where salloc is killed
        command = ["salloc", "--job-name=nbddp", f"--comment={comment}", *commands.arguments(asked, nproc), *held]
        with open(log, "wb") as file, without_stop():
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, bufsize=0,
                env=commands.outside(os.environ), start_new_session=True,
            )  # fmt: skip
        try:
            found = _granted(process, log, progress)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdout.close()
            return cls(found["job"], found["nodes"], process.stdin, process)  # type: ignore[arg-type]
        except BaseException:
            with stop.uninterrupted():  # else the job would stay in the queue
                _end(process, granted=False)
                if process.returncode == -signal.SIGKILL:  # it has told Slurm nothing
                    _cancel(comment)
            raise

    @classmethod
    def standing(cls, job: int) -> Allocation:
        """A job that runs already, such as the one this process is in. Raises BadInput where it does not."""
        needs("srun")
        row = _row(job, "%T|%N")
        state, _, nodes = row.partition("|")
        if state != "RUNNING" or not nodes:
            raise BadInput(
                f"Slurm job {job} {'does not run (' + state.lower() + ')' if state else 'is not there'}; squeue --me "
                "lists your jobs, and --slurm without a number requests a new one"
            )
        return cls(job, nodes, None)

    def addresses(self) -> dict[str, str]:
        """Of each node, the address under which Slurm reaches it."""
        records = ask("scontrol", "show", "node", self.nodes, "--oneliner").splitlines()
        rows = [commands.fields(record) for record in records]
        return {row["NodeName"]: row["NodeAddr"] for row in rows if "NodeAddr" in row}

    def state(self) -> str:
        """The job's state, such as RUNNING; empty if Slurm does not tell."""
        return state_of(self.job)

    @property
    def over(self) -> bool:
        """Whether nothing can be started in it any more. Raises AgentFailed if Slurm does not tell."""
        try:
            record = _record(self.job)
        except SlurmRefused as e:
            if UNKNOWN_JOB in e.said:
                return True
            raise
        return record.get("JobState") != "RUNNING"

    def left(self) -> float | None:
        """Seconds until its time limit; None without one, or if Slurm does not tell."""
        return commands.seconds_left(_row(self.job, "%L"))

    def describe(self) -> str:
        return commands.left_words(self.job, self.nodes, self.left())

    def keep(self, seconds: float, what: Message) -> None:
        """Let it survive its owner by so long; 0: not at all. what: of the pool, for who takes it then."""
        if self._write is not None:
            with suppress(OSError):  # it has ended; who looks at its state sees it
                self._write.write(encode({"op": "keep", "seconds": seconds, "what": what}))

    def release(self) -> None:
        """Give the nodes back, if they are ours to give."""
        if self._write is None:
            return
        with suppress(OSError):
            self._write.write(encode({"op": "end"}))
        with suppress(OSError):
            self._write.close()
        self._write = None
        if self._process is not None:
            _end(self._process)

    def leave(self) -> None:
        """Let go of it: its holder gives it back, or keeps it for a while."""
        if self._write is not None:
            with suppress(OSError):
                self._write.close()
            self._write = None
        if self._process is not None:
            _left.append(self._process)


@dataclass(frozen=True)
class KeptAllocation:
    """An allocation that waits for another kernel, as its holder tells of it."""

    place: Path
    facts: Message

    @property
    def job(self) -> int:
        return int(self.facts["job"])

    @property
    def name(self) -> str:
        return str(self.job)

    def describe(self, prog: str) -> str:
        return (
            f"Slurm job {self.job} is kept for the next kernel, {lasts(self.left)} left; {prog} stop {self.job} "
            "releases it"
        )

    @property
    def left(self) -> float:
        """Seconds until it is given back."""
        return max(0.0, float(self.facts["until"]) - time.time())

    @property
    def what(self) -> Json:
        return dict(self.facts["what"])

    def take(self) -> Allocation:
        """Be its owner. Raises AgentFailed if it has gone."""
        connection = self._connect("take")
        with connection:  # the stream holds it open
            try:
                taken = connection.recv(4096)
            except OSError:  # it has just ended
                taken = b""
            if not taken:
                raise AgentFailed(f"Slurm job {self.job} is no longer kept")
            connection.settimeout(None)
            stream = connection.makefile("wb", buffering=0)
        return Allocation(self.job, self.facts["nodes"], stream)  # type: ignore[arg-type]

    def end(self) -> str:
        """Give its nodes back."""
        with self._connect("end") as connection, suppress(OSError):
            connection.recv(1)
        return f"Slurm job {self.job} released"

    def _connect(self, op: str) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(PATIENCE)
        try:
            connection.connect(str(runtime_dir.socket_of(self.place)))
            connection.sendall(encode({"op": op}))
        except OSError as e:
            connection.close()
            raise AgentFailed(f"Slurm job {self.job} is no longer kept: {e.strerror}") from None
        return connection


def kept() -> list[KeptAllocation]:
    """The allocations of this user that wait for a kernel on this machine."""
    if not (runtime_dir.runtime() / holder.FOLDER).exists():
        return []
    found = []
    for place in sorted(holder.folder().iterdir()):
        with suppress(OSError, ValueError):  # it is being made, or has just gone
            facts = json.loads((place / holder.RECORD).read_text())
            if ProcessId(facts["pid"], facts["started"]).alive():
                found.append(KeptAllocation(place, facts))
    return found


def needs(program: str) -> None:
    """Raises BadInput where Slurm's commands are not."""
    if shutil.which(program) is None:
        raise BadInput(f"--slurm needs Slurm's commands, but {program} is not on PATH; --hosts reaches hosts by ssh")


def ask(*command: str) -> str:
    """The output of a command of Slurm. Raises AgentFailed, or SlurmRefused if it answers with an error."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, env=commands.outside(os.environ), check=False
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise AgentFailed(f"{command[0]} does not answer: {e}") from None
    if done.returncode:
        raise SlurmRefused(" ".join(command[:3]), commands.refusal(done.stderr, command[0]))
    return done.stdout


def state_of(job: int) -> str:
    """A job's state; empty if Slurm does not tell."""
    try:
        return _record(job).get("JobState", "")
    except AgentFailed:  # it forgets jobs some minutes after their end
        return ""


def _record(job: int) -> dict[str, str]:
    return commands.fields(ask("scontrol", "show", "job", str(job), "--oneliner"))


def _row(job: int, form: str) -> str:
    """squeue's row of a job; empty where it has none."""
    try:
        return ask("squeue", "--noheader", f"--jobs={job}", f"--format={form}").strip()
    except AgentFailed:  # that is how it says that there is no such job
        return ""


def _granted(process: subprocess.Popen[bytes], log: Path, progress: Callable[[str], None]) -> Message:
    """The holder's message when it has nodes."""
    assert process.stdout is not None
    lines, looked = LineBuffer(MARK), time.monotonic()
    progress("requesting nodes from Slurm")
    while True:
        stop.check()
        if select.select([process.stdout], [], [], SLICE)[0]:
            chunk = os.read(process.stdout.fileno(), 65536)
            for message in lines.feed(chunk):
                return message
            if not chunk:
                process.wait()
                raise AgentFailed(
                    f"Slurm granted no nodes: {commands.refusal(log.read_text(errors='replace'))}", str(log)
                )
        if time.monotonic() - looked > LOOK_EVERY:
            looked = time.monotonic()
            job = commands.pending_job(log.read_text(errors="replace"))
            if job is not None:
                progress(f"{commands.waiting_words(job, _row(job, '%T|%r|%S'))}; Stop cancels it")


def _cancel(comment: str) -> None:
    """End the job with this comment, if there is one."""
    with suppress(AgentFailed):  # Slurm is away; the error has the reason why there are no nodes
        rows = ask("squeue", "--me", "--noheader", "--name=nbddp", "--format=%A %k").splitlines()
        for job in [row.split()[0] for row in rows if row.strip().endswith(comment)]:
            ask("scancel", job)


def _end(process: subprocess.Popen[bytes], granted: bool = True) -> None:
    """Have salloc give nodes back, which it does when its holder has read that it is to end; it removes a job from the
    queue when it ends on a signal."""
    for stream in filter(None, (process.stdin, process.stdout)):
        with suppress(OSError):
            stream.close()
    for number in (0, signal.SIGTERM, signal.SIGKILL)[not granted :]:
        process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING)
            return
