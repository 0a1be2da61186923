"""Slurm jobs that a pool holds: requested, kept for another kernel, released; and the message about their end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nbddp.capabilities.slurm import allocation, commands
from nbddp.capabilities.slurm.allocation import Allocation, KeptAllocation
from nbddp.capabilities.slurm.commands import Slurm
from nbddp.errors import BadInput
from nbddp.launch.options import LaunchSpec
from nbddp.launch.units import lasts
from nbddp.protocol.codec import Json

if TYPE_CHECKING:
    from nbddp.execution.execution import Execution
    from nbddp.pool.state import PoolState

NPROC = 2  # workers of a node without GPUs where nobody says how many


class HeldJobs:
    """The part of one pool. `allocations`: as long as they are held; they survive agents and workers."""

    def __init__(self, pool: PoolState | None = None) -> None:
        self.allocations: list[Allocation] = []
        self._ends: dict[Allocation, float] = {}  # by time.monotonic()
        self._timer: threading.Timer | None = None

    def have(self, spec: LaunchSpec, asked: Slurm, home: Path, progress: Callable[[str], None]) -> list[Allocation]:
        """Those of `spec`. home: a folder for logs. Raises BadInput, AgentFailed."""
        for held in [held for held in self.allocations if held.over]:
            self._let_go(held)
            held.release()
        if not self.allocations:
            inside = commands.job_of(os.environ)
            job = asked.job or (None if commands.asks(asked) else inside)
            if job:
                self.hold(Allocation.standing(job))
            else:
                self._ask(spec, asked, home, progress)
        return self.allocations

    def more(
        self, spec: LaunchSpec, asked: Slurm, nodes: int, home: Path, progress: Callable[[str], None]
    ) -> Allocation:
        """A second job, of `nodes` nodes that are not ours yet. Raises as `have`."""
        have = ",".join(host.name for held in self.allocations for host in held.hosts)
        others = f"{asked.more} --exclude={have}".strip()
        return self._ask(spec, replace(asked, nodes=nodes, job=None, more=others), home, progress)

    def _ask(self, spec: LaunchSpec, asked: Slurm, home: Path, progress: Callable[[str], None]) -> Allocation:
        count = spec.nproc if isinstance(spec.nproc, int) else None if spec.nproc else NPROC
        held = Allocation.new(asked, count, home / f"salloc-{len(self.allocations)}.log", progress)
        self.hold(held)
        return held

    def hold(self, held: Allocation) -> None:
        self.allocations.append(held)
        left = held.left()
        if left is not None:
            self._ends[held] = time.monotonic() + left

    def _let_go(self, held: Allocation) -> None:
        self.allocations.remove(held)
        self._ends.pop(held, None)

    def keep(self, spec: LaunchSpec) -> None:
        """Let the allocations survive the notebook kernel, if `spec` asks for it."""
        for held in self.allocations:
            if held.ours and spec.keep_alive is not None:
                held.keep(spec.keep_alive, stored(spec))

    def released(self) -> None:
        """Give the nodes back, if they are ours to give."""
        for held in [*self.allocations]:
            self._let_go(held)
            held.release()

    def left(self) -> None:
        """Give them back, or leave them for another kernel."""
        for held in [*self.allocations]:
            self._let_go(held)
            held.leave()

    def still_held(self) -> str:
        """That nodes wait for another try; empty where there are none."""
        jobs = " and ".join(str(held.job) for held in self.allocations if held.ours)
        return (
            f"Slurm job {jobs} is still allocated: the next %ddp start --slurm uses it, %ddp stop releases it"
            * bool(jobs)
        )

    def given_back(self) -> list[str]:
        """What `released` will give back."""
        return [f"Slurm job {held.job}" for held in self.allocations if held.ours]

    def holds(self) -> list[str]:
        """The line of `status` about them."""
        return [held.describe() for held in self.allocations]

    # -- the end that comes ------------------------------------------------------------------------

    def notes(self) -> list[str]:
        """That a job ends soon, once."""
        told = []
        for held in [h for h, ends in self._ends.items() if ends - time.monotonic() <= commands.LONG_BEFORE]:
            left = held.left()  # somebody may have given it more time
            del self._ends[held]
            if left is not None and left > commands.LONG_BEFORE:
                self._ends[held] = time.monotonic() + left
            elif left is not None:
                told.append(
                    f"Slurm job {held.job} ends in {lasts(left)}, and its workers end with it; save what you need"
                )
        return told

    def run_begins(self, run: Execution) -> None:
        if run.request.is_numbered:
            self.remind(run.tell)

    def remind(self, say: Callable[[str], None]) -> None:
        """While a run goes on: have `say` called when a job ends soon, until `run_ended`."""
        if not self._ends:
            return

        def due() -> None:
            if self._timer is None:  # the run has ended
                return
            if words := self.notes():
                say("\n".join(words))
            self.remind(say)

        wait = max(0.0, min(self._ends.values()) - commands.LONG_BEFORE - time.monotonic())
        self._timer = threading.Timer(min(wait, threading.TIMEOUT_MAX), due)
        self._timer.daemon = True
        self._timer.start()

    def run_ended(self, run: Execution | None = None) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()


def offers() -> list[str]:
    """That this process is in a job of several nodes, which a pool could use, if it is."""
    job, nodes = commands.job_of(os.environ), os.environ.get("SLURM_JOB_NUM_NODES", os.environ.get("SLURM_NNODES", ""))
    if job is None or not nodes.isdigit() or int(nodes) < 2:
        return []
    return [
        f"this notebook kernel is in Slurm job {job} on {nodes} nodes; %ddp start --slurm starts workers on all of them"
    ]


KEPT = ("nproc", "gpus_per_proc", "visible", "oversubscribe", "device", "python", "setup", "keep_alive")


def stored(spec: LaunchSpec) -> Json:
    """What another kernel needs to start such a pool."""
    return {name: getattr(spec, name) for name in KEPT} | {"slurm": asdict(spec.slurm or Slurm())}


def restored(kept: KeptAllocation) -> LaunchSpec:
    what = kept.what
    return LaunchSpec(**{name: what[name] for name in KEPT}, slurm=Slurm(**what["slurm"]))


def to_attach(job: int | None) -> KeptAllocation:
    """The allocation that waits for a kernel. Raises BadInput where there is none, or more than one."""
    found = [one for one in allocation.kept() if job in (None, one.job)]
    if not found:
        which = f"Slurm job {job}" if job else "no Slurm job"
        raise BadInput(
            f"{which} {'is not' if job else 'is'} kept for a kernel of this machine; %ddp start --slurm requests one"
        )
    if len(found) > 1:
        raise BadInput(f"{len(found)} Slurm jobs are kept; name one: {' or '.join(str(one.job) for one in found)}")
    return found[0]
