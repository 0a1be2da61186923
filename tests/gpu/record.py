"""Records what a real GPU answers, for the tests of simulated GPUs: `python tests/gpu/record.py OUT.json`.

Messages of wrong programs, answers of `torch.cuda`, counters of memory, peaks of training, whole programs.
`--simulate` asks simulated GPUs the same. Each child process has a time limit; what it answered before its end is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests.gpu import answers, asked, models

PROGRAMS = Path(__file__).with_name("programs")
CHANGES_ALL = (
    "sdpa_kernel(", "location_tag", "environ", "__enter__", "precision(", "_limit", "preferred_", "_fraction",
    "change_current", "destroy_process_group", "DDP", "FSDP", "_sleep", "check_error", "svd", "eigh", "lstsq",
)  # fmt: skip
BESIDE = ("two_devices", "devices", "host", "numbers", "types", "shapes", "streams", "alone", "ranks", "two_ranks")
TOGETHER = ("questions", "operators", "sequences", "memory", "limited")
Said = dict[str, Any]


@dataclass
class Job:
    """Cases one child runs, one after another."""

    group: str
    cases: dict[str, str]
    rank: int = 0
    world: int = 1
    port: int = 0
    pid: int = 0
    looked: float = 0.0
    size: int = -1
    parts: Path = field(default_factory=Path)

    @property
    def words(self) -> Path:
        """Where the child's printed words go."""
        return self.parts.with_suffix(".out")


def main() -> None:
    """Asks everything, within the time given."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("out", type=Path)
    p.add_argument("--simulate", nargs="?", const="1xH100", default="", help="the simulated GPUs to ask")
    p.add_argument("--only", nargs="*", default=[], help="groups: " + ", ".join(name for name, _, _ in phases()))
    p.add_argument("--cases", nargs="*", default=[], help="words of the names of cases")
    p.add_argument("--every", type=int, default=1, help="asks each nth case only")
    p.add_argument("--seconds", type=float, default=125.0, help="no child begins later")
    p.add_argument("--each", type=float, default=12.0, help="seconds a case may take")
    p.add_argument("--width", type=int, default=10, help="children at a time, where they do not disturb each other")
    p.add_argument(
        "--together", type=int, default=14, help="cases that one child runs, where they do not disturb each other"
    )
    p.add_argument("--steps", type=int, default=3, help="steps of training")
    a = p.parse_args()
    faulthandler.enable()
    Recorder(a).run()


def phases() -> list[tuple[str, dict[str, str], bool]]:
    """Group, its cases and whether each case needs the machine alone, the most wanted first."""
    rows = [("questions", asked.table("questions"), True)]
    rows += [(name, asked.table(name), False) for name in ("operators", *BESIDE)]
    programs = {path.name: str(path) for path in sorted(PROGRAMS.glob("*.py"))}
    programs["nanogpt_float32.py"] = f"HALF=0|{programs['nanogpt.py']}"
    rows.append(("programs", programs, False))
    memory = asked.table("memory")
    limited = {n: c for n, c in memory.items() if "_fraction" in c}  # the error's words differ once a limit was set
    rows.append(("memory", {n: c for n, c in memory.items() if n not in limited}, True))
    rows += [("limited", limited, True), ("sequences", asked.table("sequences"), True)]
    rows.append(("trainings", {name: name for name in models.TRAININGS}, True))
    return rows


def jobs(group: str, cases: dict[str, str], together: int) -> Iterator[Job]:
    """The children a group needs, of so many cases: single ones for what would change later cases."""
    single = group in ("alone", "two_ranks", "programs", "trainings")
    own = {n: c for n, c in cases.items() if single or (group not in TOGETHER and any(w in n + c for w in CHANGES_ALL))}
    rest = [(n, c) for n, c in cases.items() if n not in own]
    size = len(rest) if group in TOGETHER else min(5, together) if group == "ranks" else together
    for i in range(0, len(rest), size or 1):
        yield Job(group, dict(rest[i : i + size]))
    for n, c in own.items():
        if group == "two_ranks":
            port = free_port()
            yield Job(group, {f"{n}, rank 0": c}, 0, 2, port)
            yield Job(group, {f"{n}, rank 1": c}, 1, 2, port)
        else:
            yield Job(group, {n: c})


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Recorder:
    """Starts the children, reads what they answered and keeps OUT.json up to date."""

    def __init__(self, asked_for: argparse.Namespace):
        self.a = asked_for
        self.began = time.monotonic()
        self.folder = Path(tempfile.mkdtemp(prefix="record-"))
        self.said: dict[str, dict[str, Said]] = {}
        self.late: list[str] = []
        self.count = 0

    def run(self) -> None:
        """All phases: the ones that may run side by side together, the others one child at a time."""
        chosen = [(g, self.wanted(c), alone) for g, c, alone in phases() if not self.a.only or g in self.a.only]
        self.write()
        beside = [job for g, c, alone in chosen if not alone for job in jobs(g, c, self.a.together)]
        first = [job for g, c, alone in chosen if alone and g == "questions" for job in jobs(g, c, self.a.together)]
        last = [job for g, c, alone in chosen if alone and g != "questions" for job in jobs(g, c, self.a.together)]
        for some, width in ((first, 1), (beside, self.a.width), (last, 1)):
            self.work(some, width)
        self.write()
        print(f"{sum(map(len, self.said.values()))} answers in {self.elapsed():.0f} s; not asked: {len(self.late)}")

    def wanted(self, cases: dict[str, str]) -> dict[str, str]:
        """The cases that `--cases` and `--every` leave."""
        found = {n: c for n, c in cases.items() if not self.a.cases or any(w in n for w in self.a.cases)}
        return dict(list(found.items())[:: self.a.every])

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def work(self, waiting: list[Job], width: int) -> None:
        """Runs these jobs, so many at a time."""
        running: list[Job] = []
        waiting = list(waiting)
        while waiting or running:
            while waiting and (len(running) < width or waiting[0].rank):
                job = waiting.pop(0)
                if self.elapsed() > self.a.seconds:
                    self.late += [f"{job.group}: {n}" for n in job.cases]
                    continue
                self.start(job)
                running.append(job)
            for job in [j for j in running if self.ended(j)]:
                running.remove(job)
                waiting[:0] = self.take(job)
            time.sleep(0.02)

    def start(self, job: Job) -> None:
        """Forks the child of a job."""
        self.count += 1
        job.parts, job.looked, job.size = self.folder / f"{self.count}.json", time.monotonic(), -1
        job.port = job.port or free_port()
        sys.stdout.flush()
        job.pid = os.fork()
        if job.pid == 0:
            answers.child(job, self.a)

    def ended(self, job: Job) -> bool:
        """Whether the child is gone; one that is silent for too long is killed."""
        if os.waitpid(job.pid, os.WNOHANG)[0]:
            end(job.pid, os.killpg)
            return True
        size = job.parts.stat().st_size if job.parts.exists() else 0
        now = time.monotonic()
        if size != job.size:
            job.size, job.looked = size, now
        limit = self.a.each * (3 if job.group == "trainings" else 1)
        if now - job.looked > limit or self.elapsed() > self.a.seconds + 2 * self.a.each:
            end(job.pid, os.killpg, os.kill)
            os.waitpid(job.pid, 0)
            return True
        return False

    def take(self, job: Job) -> list[Job]:
        """Reads what a child answered; what it had not come to is left for another child."""
        lines = job.parts.read_text().splitlines() if job.parts.exists() else []
        read = [json.loads(line) for line in lines if line.endswith("}")]
        group = self.said.setdefault(job.group, {})
        begun = ""
        for row in read:
            begun = row.pop("begin", "") or begun
            if "name" in row:
                group[row.pop("name")] = row
                begun = ""
        words = job.words.read_text(errors="replace") if job.words.exists() else ""
        left = {n: c for n, c in job.cases.items() if n not in group}
        if begun or (left and not read):
            begun = begun or next(iter(left))
            group[begun] = {
                "program": left.pop(begun, ""),
                "ended": "the process ended or was silent",
                "printed": words[-3000:],
            }
        self.write()
        return [Job(job.group, left, job.rank, job.world)] if left and job.world == 1 else []

    def write(self) -> None:
        """Writes OUT.json whole, so that a reader never sees half of it."""
        whole = {
            "machine": machine(self.a),
            "seconds": round(self.elapsed(), 1),
            "not asked": self.late,
            "answers": self.said,
        }
        part = self.a.out.with_suffix(".part")
        part.write_text(json.dumps(whole, indent=1, sort_keys=False))
        part.replace(self.a.out)


def end(child: int, *calls: Callable[[int, int], None]) -> None:
    """Ends a child and what it started: each child leads a session of its own."""
    for call in calls:
        with contextlib.suppress(ProcessLookupError):
            call(child, signal.SIGKILL)


def machine(a: argparse.Namespace) -> Said:
    """What was asked: versions and the driver's words."""
    facts = {"torch": torch.__version__, "python": platform.python_version(), "simulated by": a.simulate}
    try:
        facts["nvidia-smi"] = (
            subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=20).stdout if not a.simulate else ""
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        facts["nvidia-smi"] = f"{type(e).__name__}: {e}"
    return facts


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        sys.exit(1)
