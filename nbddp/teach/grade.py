"""Grading a folder of submissions, by the checks that the learners had: on real ranks, each under its deadline.

    python -m nbddp.teach.grade FOLDER                    a table: who, which exercise, ok or what is wrong
    python -m nbddp.teach.grade FOLDER --csv marks.csv    the same as a file

FOLDER holds a file for each learner (`ada.ipynb`) or a folder with notebooks (`ada/12-….ipynb`); Python files will do
as well, and what files are called does not matter: every exercise that anyone has handed in is looked for in all
files of each learner. From pytest each answer is a test of its own; this is the whole of the file:

    import pytest
    from nbddp.teach import grade

    @pytest.fixture(scope="session", autouse=True)
    def ranks():
        with grade.ranks(4):
            yield

    @pytest.mark.parametrize("work", grade.found("submissions"), ids=str)
    def test_work(work):
        answer = work.check()
        if not answer.ok:
            pytest.fail(answer.line, pytrace=False)

What is handed in is run with the rights of who grades. Do it where it can do no harm: in a container, or under an
account that has nothing to lose.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from nbddp.draw.table import Table
from nbddp.errors import BadInput
from nbddp.pool.pool import Pool
from nbddp.teach import check as checks
from nbddp.teach.answer import Answer, Exercise, Wrong
from nbddp.teach.submissions import Submission, read, unsent

COLUMNS = ("learner", "exercise", "ok", "file", "says")
NPROC = 4
SUFFIXES = (".ipynb", ".py")
NO_NAME = re.compile(r"NameError: name '(\w+)' is not defined")


def exercises() -> dict[str, Exercise]:
    """All exercises of all lessons, by name."""
    found = {name: getattr(checks, name) for name in checks.__all__}
    return {name: e for name, e in found.items() if isinstance(e, Exercise)}


@dataclass(frozen=True)
class Work:
    """One learner's answer to one exercise, and the file it is in; file: its path in the graded folder."""

    learner: str
    exercise: str
    file: str
    submission: Submission = field(repr=False)

    def __str__(self) -> str:
        return f"{self.learner}-{self.exercise}"

    def check(self) -> Answer:
        """What the exercise's check says, on the ranks of `ranks` or else on two of its own. It never raises for
        what was handed in; what that prints is dropped."""
        try:
            handed_in = self.submission.get(self.exercise)
        except Wrong as wrong:
            return Answer(False, str(wrong))
        with contextlib.redirect_stdout(io.StringIO()):
            answer = exercises()[self.exercise](handed_in)
        missing = NO_NAME.search(answer.line)
        why = missing and self.submission.absent(missing[1])
        return replace(answer, line=f"{answer.line} ({why})") if why else answer


@contextlib.contextmanager
def ranks(nproc: int = NPROC) -> Iterator[Pool]:
    """Inside the block checks run on a pool of `nproc` ranks on CPU."""
    with Pool(nproc=nproc, device="cpu") as pool, checks.on(pool):
        yield pool


def found(folder: str | Path, expected: Sequence[str] = ()) -> list[Work]:
    """The answers in a folder, by learner. What any learner has handed in, and what is `expected`, is looked for in
    all files of every learner; who has it in two files has two answers. Raises BadInput if nothing is there."""
    known = exercises()
    unknown = [name for name in expected if name not in known]
    if unknown:
        raise BadInput(f"there is no exercise {unknown[0]}; there are {', '.join(known)}")
    handed_in = _by_learner(Path(folder))
    if not any(handed_in.values()):
        raise BadInput(f"no notebook (.ipynb) or Python file (.py) in {folder}; give the folder of the submissions")
    defined = {n for sent in handed_in.values() for s in sent for n in s.defines(list(known))}
    return [
        Work(learner, name, str(one.path.relative_to(folder)), one)
        for learner, sent in handed_in.items()
        for name in known
        if name in defined or name in expected
        for one in _with(name, sent, Path(folder, learner))
    ]


def _by_learner(folder: Path) -> dict[str, list[Submission]]:
    """What each learner has handed in, also who has an empty folder."""
    seen = [p for p in sorted(folder.rglob("*")) if not _hidden(p, folder)]
    sent: dict[str, list[Submission]] = {p.name: [] for p in seen if p.is_dir() and p.parent == folder}
    for path in seen:
        if path.suffix in SUFFIXES and path.is_file():
            parts = path.relative_to(folder).parts
            sent.setdefault(path.stem if len(parts) == 1 else parts[0], []).append(read(path))
    return sent


def _with(name: str, sent: Sequence[Submission], own: Path) -> Sequence[Submission]:
    """Those of a learner's files in which an exercise is; if in none, one that says why."""
    having = [s for s in sent if s.defines([name])]
    unreadable = [s for s in sent if s.unread]
    if having or unreadable or len(sent) == 1:
        return having or unreadable[:1] or sent
    files = ", ".join(s.path.name for s in sent)
    why = f"no cell outside %%ddp defines {name} in {files}" if files else "there is no notebook in the folder"
    return [unsent(own, f"not handed in: {why}")]


def _hidden(path: Path, folder: str | Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def graded(works: Sequence[Work]) -> Table:
    """Check them one after another: a row for each answer."""
    answers = [(w, w.check()) for w in works]
    rows = [(w.learner, w.exercise, "yes" if a.ok else "no", w.file, a.line) for w, a in answers]
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
