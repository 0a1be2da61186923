"""Tries the private APIs of torch, ipykernel, IPython and ipyparallel that nbddp needs, and reports the results.

The trials run in a process of their own (`capabilities.doctor.probe_runner`): this one never imports torch, and a trial
that ends its process ends nothing else. A pool is asked whether its workers have the same names; it need not be there.
"""

from __future__ import annotations

import platform
import signal
import subprocess
import sys
from importlib import metadata
from typing import Any, Protocol

from nbddp.capabilities.doctor.findings import Findings
from nbddp.capabilities.doctor.seams import SEAMS, ProbeResult
from nbddp.compat import system
from nbddp.launch.topology import Topology
from nbddp.protocol.codec import Message, parsed
from nbddp.protocol.run_spec import Question

PACKAGES = ("torch", "IPython", "ipykernel", "ipyparallel")
PATIENCE = 120.0  # seconds for all trials; a first import of torch from a slow disk takes most of it


class RunningWorkers(Protocol):
    """Workers that may be there, and what they have."""

    @property
    def running(self) -> bool: ...
    @property
    def world_size(self) -> int: ...
    @property
    def topology(self) -> Topology | None: ...
    def ask(self, rank: int, question: Question, timeout: float = 1.0) -> Any: ...
    def troubles(self) -> str: ...


def examine(
    pool: RunningWorkers | None = None, command: tuple[str, ...] = ("-m", "nbddp.capabilities.doctor.probe_runner")
) -> Findings:
    """Test all private APIs here. command: what the interpreter runs, in a test something else."""
    lines, ended = _run([sys.executable, *command])
    return findings(lines, ended, "" if pool is None else _of_pool(pool))


def findings(lines: list[Message], ended: str, of_pool: str = "") -> Findings:
    """The results of the trials. ended: why they ended before the last; of_pool: what the pool's workers have."""
    verdicts = {m["seam"]: ProbeResult(m["present"], m["works"], m["why"]) for m in lines if "seam" in m}
    machine = next((m["machine"] for m in lines if "machine" in m), None)
    if ended:
        left = next((s.key for s in SEAMS if s.key not in verdicts), "the machine")
        ended = f"the checks ended at {left}: {ended}"
    return Findings(versions(), machine, verdicts, ended, of_pool, system.parts())


def versions() -> dict[str, str]:
    """Versions of Python and the packages, without importing them."""
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "is not installed"
    return found


def _run(command: list[str]) -> tuple[list[Message], str]:
    """The messages of the trials, and why they ended before the last; empty if they did not."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired as e:
        return messages(e.stdout or b""), f"no answer within {PATIENCE:.0f} s"
    why = ""
    if done.returncode < 0:
        why = f"the process was killed by {signal.Signals(-done.returncode).name}"
    elif done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        why = last or f"the process exited with code {done.returncode}"
    return messages(done.stdout), why


def messages(said: bytes) -> list[Message]:
    """Whole lines that are messages; a library's own print may stand between them."""
    return [message for message in map(parsed, said.split(b"\n")[:-1]) if message is not None]


def _of_pool(pool: RunningWorkers) -> str:
    """Rank 0's report on its private APIs; all workers are copies of one process."""
    if not pool.running:
        return "no pool is running; the checks below need none"
    missing = pool.ask(0, Question.of("seams"), timeout=5.0)
    if missing is None:
        found = "rank 0 did not report which private APIs it has"
    else:
        found = f"its workers lack {', '.join(missing)}" if missing else "its workers have all private APIs"
    on = " on simulated GPUs" * bool(pool.topology and pool.topology.simulates_gpus)
    return "; ".join([f"pool of {pool.world_size}{on}: {found}", *filter(None, [pool.troubles()])])
