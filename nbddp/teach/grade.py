"""Grading a folder of submissions, by the checks that the learners had: on real ranks, each under its deadline.

    python -m nbddp.teach.grade FOLDER                    a table: who, which exercise, ok or what is wrong
    python -m nbddp.teach.grade FOLDER --csv marks.csv    the same as a file

FOLDER holds a file for each learner (`ada.ipynb`) or a folder with notebooks (`ada/12-….ipynb`); Python files will do
as well. From pytest each answer is a test of its own; this is the whole of the file:

    import pytest
    from nbddp.teach import grade

    @pytest.fixture(scope="session", autouse=True)
    def ranks():
        with grade.ranks(4):
            yield

    @pytest.mark.parametrize("work", grade.found("submissions"), ids=str)
    def test_work(work):
        answer = work.check()
        assert answer.ok, answer.line

What is handed in is run with the rights of who grades. Do it where it can do no harm: in a container, or under an
account that has nothing to lose.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nbddp.draw.table import Table
from nbddp.errors import BadInput
from nbddp.pool.pool import Pool
from nbddp.teach import check as checks
from nbddp.teach.answer import Answer, Exercise, Wrong
from nbddp.teach.submissions import Submission, read

COLUMNS = ("learner", "exercise", "ok", "says")
NPROC = 4


def exercises() -> dict[str, Exercise]:
    """All exercises of all lessons, by name."""
    found = {name: getattr(checks, name) for name in checks.__all__}
    return {name: e for name, e in found.items() if isinstance(e, Exercise)}


@dataclass(frozen=True)
class Work:
    """One learner's answer to one exercise. lesson: the file's name, empty where a learner has one file only."""

    learner: str
    lesson: str
    exercise: str
    submission: Submission

    def __str__(self) -> str:
        return f"{self.learner}-{self.exercise}"

    def check(self) -> Answer:
        """What the exercise's check says, on the ranks of `ranks` or else on two of its own. It never raises for
        what was handed in; what that prints is dropped."""
        try:
            answer = self.submission.get(self.exercise)
        except Wrong as wrong:
            return Answer(False, str(wrong))
        with contextlib.redirect_stdout(io.StringIO()):
            return exercises()[self.exercise](answer)


@contextlib.contextmanager
def ranks(nproc: int = NPROC) -> Iterator[Pool]:
    """Inside the block checks run on a pool of `nproc` ranks on CPU."""
    with Pool(nproc=nproc, device="cpu") as pool, checks.on(pool):
        yield pool


def found(folder: str | Path, expected: Sequence[str] = ()) -> list[Work]:
    """The answers in a folder, by learner. An exercise that is in one learner's file is looked for in all others' files
    of the same lesson, and `expected` in all files. Raises BadInput if there is nothing to grade."""
    known = exercises()
    unknown = [name for name in expected if name not in known]
    if unknown:
        raise BadInput(f"there is no exercise {unknown[0]}; there are {', '.join(known)}")
    files = sorted(p for p in Path(folder).rglob("*") if p.suffix in (".ipynb", ".py") and not _hidden(p, folder))
    if not files:
        raise BadInput(f"no notebook (.ipynb) or Python file (.py) in {folder}; give the folder of the submissions")
    read_in = [(*_whose(path, Path(folder)), read(path)) for path in files]
    wanted: dict[str, set[str]] = {}
    for _, lesson, submission in read_in:
        wanted.setdefault(lesson, set(expected)).update(submission.defines(list(known)))
    return [
        Work(learner, lesson, name, submission)
        for learner, lesson, submission in read_in
        for name in known
        if name in wanted[lesson]
    ]


def _hidden(path: Path, folder: str | Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _whose(path: Path, folder: Path) -> tuple[str, str]:
    """(learner, lesson) of a file."""
    parts = path.relative_to(folder).parts
    return (path.stem, "") if len(parts) == 1 else (parts[0], path.stem)


def graded(works: Sequence[Work]) -> Table:
    """Check them one after another: a row for each answer."""
    answers = [(w, w.check()) for w in works]
    rows = [(w.learner, w.exercise, "yes" if a.ok else "no", a.line) for w, a in answers]
    return Table(COLUMNS, rows)


def main(words: Sequence[str]) -> int:
    """The command line; 2 for a folder in which there is nothing to grade."""
    parser = argparse.ArgumentParser(prog="python -m nbddp.teach.grade", description="Grade a folder of submissions.")
    parser.add_argument("folder", help="a file for each learner, or a folder with notebooks")
    parser.add_argument("--csv", metavar="FILE", help="write the table there as well")
    parser.add_argument("--nproc", type=int, default=NPROC, help=f"ranks that checks run on (default {NPROC})")
    parser.add_argument("--expect", nargs="+", default=[], metavar="EXERCISE", help="that every file must have")
    asked = parser.parse_args(words)
    try:
        works = found(asked.folder, asked.expect)
    except BadInput as wrong:
        print(wrong, file=sys.stderr)
        return 2
    with ranks(asked.nproc):
        table = graded(works)
    print(table)
    if asked.csv:
        with open(asked.csv, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([table.columns, *table.rows])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
