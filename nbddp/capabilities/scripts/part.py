"""Launches as torchrun has them: a script's own variables on each rank, the log directory, and how ranks failed.

The log directory of a launch, as torchrun lays it out: `FOLDER/RUN_x7f3/attempt_0/LOCAL_RANK/` with stdout.log,
stderr.log and error.json, and `filtered_stdout.log` beside the ranks. Every node has a directory of its own, as every
torchrun has. The files hold all that was printed.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from nbddp.capabilities.scripts import failures
from nbddp.capabilities.scripts.failures import Failure, Seat
from nbddp.capabilities.scripts.logs import STREAMS, LogOptions, of
from nbddp.capabilities.scripts.program import ScriptProgram
from nbddp.errors import BadInput
from nbddp.protocol.request import Request

if TYPE_CHECKING:
    from nbddp.execution.execution import Execution
    from nbddp.execution.result import RankSeats
    from nbddp.pool.state import PoolState
    from nbddp.pool.worker_group import WorkerGroup

NAME = "scripts"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
ERROR = "error.json"
PREFIX = "torchelastic_"  # of a folder that nobody has named, as torchrun names it


class ScriptsPart:
    def __init__(self, pool: PoolState):
        self._pool = pool
        self._folder: LogDir | None = None  # of the launch that goes on
        self._files: AttemptLogs | None = None  # of its attempt

    def launched(self, request: Request, run_id: str) -> None:
        self._folder = log_dir(request, run_id)

    def run_begins(self, run: Execution) -> None:
        group = self._pool.group
        program, logs = run.request.program, run.request.logs
        if isinstance(program, ScriptProgram):
            _add_script(run, program, group)
        if logs is not None and logs.only is not None:
            run.display.hide([r for r in run.specs if group.placed().workers[r].local_rank not in logs.only])
        if self._folder is not None and logs is self._folder.logs:
            self._files = _written_to(self._folder, run, group)

    def run_failed(self, run: Execution) -> None:
        """What a process that has ended wrote is read while it is there."""
        if run.request.is_program:
            run.kept[NAME] = _failures(run, self._files)

    def run_ended(self, run: Execution) -> None:
        files, self._files = self._files, None
        if files is not None:
            files.close()


def failures_of(run: Execution) -> Mapping[int, Failure]:
    """Of a run that has ended: its ranks that failed by themselves."""
    if NAME not in run.kept:
        run.kept[NAME] = _failures(run)
    found: Mapping[int, Failure] = run.kept[NAME]
    return found


def _failures(run: Execution, files: AttemptLogs | None = None) -> Mapping[int, Failure]:
    """files: the open ones of its attempt, which get the error files of ranks elsewhere."""
    seats, wrote = run.seats, dict[int, tuple[str, dict[str, Any]]]()
    failed = {rank: ended for rank, ended in run.ended.items() if not ended.well}
    if seats is None:
        return {}
    for rank, ended in failed.items():
        path = run.env_of(rank)[ERROR_FILE]
        said = ended.outcome.error_file if ended.outcome is not None else ""
        text = said or (read_text(path) if seats.sees_files else "")
        if files is not None:
            files.keep_error(rank, text)
        wrote[rank] = path, readable(text)
    places = {rank: _seat(seats, rank) for rank in failed}
    return failures.found_in(failed, places, {r: found for r, found in wrote.items() if found[1]})


def _add_script(run: Execution, program: ScriptProgram, group: WorkerGroup) -> None:
    """What is a script's own: its words, and an environment without what keeps a process for the next cell."""
    given = [dict(node.given) for node in group.hosts]
    for rank, spec in run.specs.items():
        place = group.placed().workers[rank]
        changes = program.env(given[group.node_index(place)])
        env, without = run.env_of(rank), [name for name, value in changes.items() if value is None]
        env.update({name: value for name, value in changes.items() if value is not None})
        for name in without:
            env.pop(name, None)
        argv = (program.target, *program.argv(run.request.argv, place.local_rank))
        run.specs[rank] = replace(spec, argv=argv, fields={**spec.fields, "without": without})


def _written_to(folder: LogDir, run: Execution, group: WorkerGroup) -> AttemptLogs:
    """Have what the ranks of a run print, and their error files, written to the log directory."""
    workers = group.placed().workers
    folder.place({w.rank: (w.node, w.local_rank) for w in workers}, run.attempt)
    files = AttemptLogs(folder, run.attempt)
    for rank, out in run.outputs.items():
        out.unseen = folder.logs.unseen(folder.local_rank(rank))
        out.copies.append(files.writer(rank))
        if group.hosts[group.node_index(workers[rank])].sees_files:
            run.env_of(rank)[ERROR_FILE] = str(folder.error_file(rank, run.attempt))
    return files


def _seat(seats: RankSeats, rank: int) -> Seat:
    """Where a rank was, for what is said of its failure."""
    place = seats.topology.workers[rank]
    name = failures.host_name(seats.topology.nodes[place.node].host, seats.sees_files)
    return Seat(place.local_rank, name, seats.pids[rank])


# -- the log directory -----------------------------------------------------------------------------


class LogDir:
    """The directories of one launch. `roots`: node → its directory; `places`: rank → its node and local rank in the
    present attempt, which may have others than the one before."""

    def __init__(self, logs: LogOptions, run_id: str, role: str = "default"):
        """Raises BadInput for a folder that cannot be made."""
        self.logs, self.role, self._run_id = logs, role, run_id
        self.places: Mapping[int, tuple[int, int]] = {}
        self.roots: dict[int, Path] = {}
        with self._told():
            if logs.folder is not None:
                os.makedirs(logs.folder, exist_ok=True)
            self._base = Path(logs.folder or tempfile.mkdtemp(prefix=PREFIX)).absolute()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            folder = self.logs.folder
            raise BadInput(f"--log-dir {folder}: {e.strerror}; name a folder that can be written to") from None

    def folder(self, rank: int, attempt: int) -> Path:
        node, local_rank = self.places[rank]
        return self.roots[node] / f"attempt_{attempt}" / str(local_rank)

    def error_file(self, rank: int, attempt: int) -> Path:
        return self.folder(rank, attempt) / ERROR

    def place(self, places: Mapping[int, tuple[int, int]], attempt: int) -> None:
        """Make the folders of an attempt. What one with this number has left, which nodes that came or went have cut
        short, goes, as under torchrun. Raises BadInput where that cannot be."""
        self.places = places
        with self._told():
            for node in sorted({node for node, _ in places.values()}):
                if node not in self.roots:
                    self.roots[node] = Path(tempfile.mkdtemp(prefix=f"{self._run_id}_", dir=self._base))
                shutil.rmtree(self.roots[node] / f"attempt_{attempt}", ignore_errors=True)
            for rank in places:
                self.folder(rank, attempt).mkdir(parents=True)

    def local_rank(self, rank: int) -> int:
        return self.places[rank][1]

    def streams(self, rank: int) -> frozenset[str]:
        """Those of a rank that have a file."""
        return self.logs.written(self.local_rank(rank))


class AttemptLogs:
    """The open files of one attempt."""

    def __init__(self, of: LogDir, attempt: int):
        self._of, self._attempt = of, attempt
        self._files: dict[Path, IO[str]] = {}
        self._begun: dict[tuple[int, str], str] = {}  # lines that are not ended, for the filters
        self.why = ""  # nothing more can be written, since

    def writer(self, rank: int) -> Callable[[str, str], None]:
        """What takes a stream and its text, for one rank."""
        streams, folder = self._of.streams(rank), self._of.folder(rank, self._attempt)

        def write(stream: str, text: str) -> None:
            if stream in streams:
                self._write(folder / f"{stream}.log", text)
                self._filter(rank, stream, text)

        for stream in streams:
            self._write(folder / f"{stream}.log", "")
        return write

    def _filter(self, rank: int, stream: str, text: str) -> None:
        """Lines that have one of the words, to the file of all ranks; of what is written and shown, as torchrun."""
        wanted, local_rank = self._of.logs.filters[STREAMS.index(stream)], self._of.local_rank(rank)
        if not wanted or stream not in of(self._of.logs.tee, local_rank) - self._of.logs.unseen(local_rank):
            return
        *lines, self._begun[rank, stream] = (self._begun.get((rank, stream), "") + text).split("\n")
        path = self._of.folder(rank, self._attempt).parent / f"filtered_{stream}.log"
        for line in lines:
            if any(word in line for word in wanted):
                self._write(path, f"[{self._of.role}{local_rank}]:{line}\n")

    def _write(self, path: Path, text: str) -> None:
        if self.why:
            return
        try:
            if path not in self._files:
                self._files[path] = path.open("a", encoding="utf-8", errors="backslashreplace", newline="")
            self._files[path].write(text)
            self._files[path].flush()
        except OSError as e:  # a full disk ends the file, and not the run
            self.why = f"{path} could not be written: {e.strerror}"

    def keep_error(self, rank: int, text: str) -> None:
        """Have a rank's error file here, where it wrote it on another host."""
        path = self._of.error_file(rank, self._attempt)
        if text and not path.exists():
            self._write(path, text)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


def log_dir(request: Request, run_id: str) -> LogDir | None:
    """The log directory of a launch, if one was asked for, or what a launch by torchrun's line has."""
    if request.logs is None or not request.logs.writes:
        return None
    program = request.program
    named, role = (program.run_id, program.role) if isinstance(program, ScriptProgram) else ("", "")
    return LogDir(request.logs, named or run_id, role or "default")


def read_text(path: str) -> str:
    """A file's text; empty where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace") if path else ""
    except OSError:
        return ""


def readable(text: str) -> dict[str, object]:
    """An error file's content; empty if it is none."""
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
