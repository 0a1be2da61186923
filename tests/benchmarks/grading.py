"""How long grading a class takes: learners who have solved all exercises, and what 200 of them would take.

Run by hand: `python tests/benchmarks/grading.py [--learners 8] [--jobs 2]`; `--learners 200` is the whole class. The
last line is the ratio to the 20 minutes that 200 learners with 24 quick answers each may take on two cores.
"""

from __future__ import annotations

import argparse
import csv
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLASS, SECONDS = 200, 20 * 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--learners", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(asked.learners):
            shutil.copytree(ROOT / "notebooks" / "solutions", Path(folder, "submissions", f"learner{number:03d}"))
        one, _ = graded(folder, 1, 1)
        seconds, cpu = graded(folder, asked.learners, asked.jobs)
    each = max(0.0, seconds - one) / max(1, asked.learners - 1)
    start = one - each
    print(f"{asked.learners} learners, {asked.jobs} at a time: {seconds:.0f} s, {cpu:.0f} s of CPU", end="; ")
    print(f"{start:.0f} s to begin with, then {each:.1f} s for each")
    whole = seconds if asked.learners == CLASS else start + CLASS * each
    print(f"{CLASS} learners: {whole / 60:.1f} minutes, {whole / SECONDS:.2f} of what they may take")


def graded(folder: str, learners: int, jobs: int) -> tuple[float, float]:
    """Seconds, and seconds of CPU of all processes, that grading the first learners takes."""
    part = Path(folder, f"part{learners}")
    part.mkdir(exist_ok=True)
    for path in sorted(Path(folder, "submissions").iterdir())[:learners]:
        shutil.copytree(path, part / path.name, dirs_exist_ok=True)
    marks = Path(folder, "marks.csv")
    command = [sys.executable, "-m", "nbddp.teach.grade", str(part), "--csv", str(marks), "--jobs", str(jobs)]
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    rows = list(csv.DictReader(marks.read_text().splitlines()))
    assert len(rows) == 24 * learners
    assert all(row["ok"] == "yes" for row in rows)
    return time.monotonic() - began, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
