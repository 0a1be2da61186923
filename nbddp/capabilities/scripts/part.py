"""Launches as torchrun has them: what is a script's own on each rank, the log directory, and how ranks failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbddp.capabilities.scripts import failures
from nbddp.capabilities.scripts.failures import Failure, Seat
from nbddp.capabilities.scripts.log_dir import AttemptLogs, LogDir, log_dir, read_text, readable
from nbddp.launch import torchrun_env
from nbddp.protocol.program import Program
from nbddp.protocol.request import Request

if TYPE_CHECKING:
    from nbddp.execution.execution import Execution
    from nbddp.pool.state import PoolState
    from nbddp.pool.worker_group import WorkerGroup

NAME = "scripts"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


class ScriptsPart:
    def __init__(self, pool: PoolState):
        self._pool = pool
        self._folder: LogDir | None = None  # of the launch that goes on
        self._files: AttemptLogs | None = None  # of its attempt

    def launched(self, request: Request, run_id: str) -> None:
        self._folder = log_dir(request, run_id)

    def run_begins(self, run: Execution) -> None:
        group = self._pool.group
        if run.request.program is not None:
            _add_script(run, run.request.program, group)
        if self._folder is not None and run.request.logs is self._folder.logs:
            self._files = _written_to(self._folder, run, group)

    def run_failed(self, run: Execution) -> None:
        """What `%ddp errors` tells."""
        if not run.request.is_program:
            return
        group = self._pool.group
        wrote: dict[int, tuple[str, dict[str, Any]]] = {}
        failed = {rank: ended for rank, ended in run.ended.items() if not ended.well}
        for rank, ended in failed.items():
            path = run.env_of(rank)[ERROR_FILE]
            said = ended.outcome.error_file if ended.outcome is not None else ""
            text = said or (read_text(path) if group.sees_files else "")
            if self._files is not None:
                self._files.keep_error(rank, text)
            wrote[rank] = path, readable(text)
        seats = {rank: _seat(group, rank, group.workers[rank].pid) for rank in failed}
        run.kept[NAME] = failures.found_in(failed, seats, {r: found for r, found in wrote.items() if found[1]})

    def run_ended(self, run: Execution) -> None:
        files, self._files = self._files, None
        if files is not None:
            files.close()


def failures_of(run: Execution) -> Mapping[int, Failure]:
    """Of a run that has ended: its ranks that failed by themselves."""
    found: Mapping[int, Failure] = run.kept.get(NAME, {})
    return found


def _add_script(run: Execution, program: Program, group: WorkerGroup) -> None:
    """What is a script's own: its words, and an environment without what keeps a process for the next cell."""
    given = [dict(node.given) for node in group.hosts]
    for rank, spec in run.specs.items():
        place = group.placed().workers[rank]
        changes = torchrun_env.of_script(program.role, program.signals, given[group.seat(place)], keep=program.keep)
        env, without = run.env_of(rank), tuple([name for name, value in changes.items() if value is None])
        env.update({name: value for name, value in changes.items() if value is not None})
        for name in without:
            env.pop(name, None)
        assert spec.script is not None
        argv = (program.target, *program.argv(run.request.argv, place.local_rank))
        run.specs[rank] = replace(spec, argv=argv, script=replace(spec.script, without=without))


def _written_to(folder: LogDir, run: Execution, group: WorkerGroup) -> AttemptLogs:
    """Have what the ranks of a run print, and their error files, written to the log directory."""
    workers = group.placed().workers
    folder.place({w.rank: (w.node, w.local_rank) for w in workers}, run.attempt)
    files = AttemptLogs(folder, run.attempt)
    for rank, out in run.outputs.items():
        out.unseen = folder.logs.unseen(folder.local_rank(rank))
        out.copies.append(files.writer(rank))
        if group.hosts[group.seat(workers[rank])].sees_files:
            run.env_of(rank)[ERROR_FILE] = str(folder.error_file(rank, run.attempt))
    return files


def _seat(group: WorkerGroup, rank: int, pid: int) -> Seat:
    """Where a rank is, for what is said of its failure."""
    placed = group.placed()
    place = placed.workers[rank]
    return Seat(place.local_rank, failures.host_name(placed.nodes[place.node].host, group.sees_files), pid)
