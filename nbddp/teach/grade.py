"""Grading a folder of submissions, by the checks that the learners had: on real ranks, each under its deadline.

    python -m nbddp.teach.grade FOLDER --csv marks.csv    a table, and the same as a file, row by row as they come
    python -m nbddp.teach.grade --help                    more files: marks per learner, feedback, frequent messages

FOLDER holds a file for each learner (`ada.ipynb`) or a folder with notebooks (`ada/12-….ipynb`); Python files work
too, and files can have any name. If anyone has submitted an exercise, the grader searches for it in all files of every
learner. From pytest each answer is a test of its own; this is the whole of the file:

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

No submitted code runs in this process (`grading.grader`). It still runs under your account, and has
all rights of your account. notebooks/INSTRUCTORS.md lists the remaining attacks, and a sandbox against most of them.

Learners are examined side by side by `--jobs` threads, which only wait; the main thread alone writes. Each row is in
its file before the next answer is taken. If this process ends early, the file has all rows so far, and `--resume`
continues.

Example:

    from nbddp.teach import grade
    with grade.ranks(4):
        marks = {str(work): work.check().ok for work in grade.found("submissions")}
"""

from __future__ import annotations

import argparse
import os
import queue
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from nbddp.agent import children
from nbddp.agent.stop import uninterrupted
from nbddp.errors import BadInput
from nbddp.grading import gradebook
from nbddp.grading.examiner import exercises
from nbddp.grading.grader import (
    COLUMNS,
    MEMORY,
    MINUTES,
    NPROC,
    Grader,
    GradingSession,
    NoVerdict,
    Work,
    found,
    graded,
    ranks,
)
from nbddp.grading.sandbox import rlimits
from nbddp.grading.sandbox.client import Gone
from nbddp.launch.options import HelpAsked, Parser, positive
from nbddp.lessons.framework.answer import Answer
from nbddp.lessons.framework.run_check import DEADLINE

__all__ = ["COLUMNS", "Grader", "NoVerdict", "Work", "exercises", "found", "graded", "main", "ranks"]

DESCRIPTION = "Grade a folder of submissions by the lessons' own checks, each learner on fresh ranks of their own."
EPILOG = """\
what it writes
  --csv has the columns learner, exercise, ok (yes, no, or error if there is no verdict), file, says, digest. Cells
  that a spreadsheet would read as formulas begin with an apostrophe; control characters are removed.

exit status
  0 every answer has a verdict; 1 some have none, a file could not be written, or another process changed the
  table; 2 nothing to grade, or the request is invalid; 130 after Ctrl-C, with all known verdicts written.

Submissions run under your account, within limits. For the remaining risks and examples of --sandbox, see
notebooks/INSTRUCTORS.md. Example:

  python -m nbddp.teach.grade submissions --csv marks.csv --wide totals.csv --feedback feedback --resume
"""
END = None  # of a learner, in the queue of answers
ROOT = "you are root, so limits and file permissions do not apply; grade under an ordinary account, or in a container"


def parser() -> Parser:
    """The command's options."""
    made = Parser(prog="python -m nbddp.teach.grade", description=DESCRIPTION)
    made.epilog = EPILOG
    made.add_argument(
        "folder", metavar="FOLDER", help="a file for each learner (ada.ipynb), or a folder for each with notebooks"
    )
    files = made.add_argument_group("files")
    files.add_argument("--csv", metavar="FILE", type=Path, help="a row per learner and exercise, written as they come")
    files.add_argument("--resume", action="store_true", help="keep the verdicts in --csv for learners whose files "
                       "have not changed; grade the others")  # fmt: skip
    files.add_argument("--wide", metavar="FILE", type=Path, help="CSV: a row per learner, a column per exercise (1, 0 "
                       "or error), and the total")  # fmt: skip
    files.add_argument("--summary", metavar="FILE", type=Path, help="CSV: for each exercise, how many answers are "
                       "right and the most frequent message")  # fmt: skip
    files.add_argument("--feedback", metavar="FOLDER", type=Path, help="a text file for each learner")
    how = made.add_argument_group("how")
    how.add_argument(
        "--expect", nargs="+", default=[], metavar="EXERCISE", help="exercises that every learner must hand in"
    )
    how.add_argument(
        "--jobs", type=positive, default=1, metavar="N", help="learners graded at the same time (default 1)"
    )
    how.add_argument("--nproc", type=positive, default=NPROC, metavar="N", help=f"ranks per learner (default {NPROC})")
    within = made.add_argument_group("limits")
    within.add_argument("--deadline", type=_above_zero, default=DEADLINE, metavar="SECONDS",
                        help=f"limit for each run of an answer (default {DEADLINE:g})")  # fmt: skip
    within.add_argument("--minutes", type=_above_zero, default=MINUTES, metavar="MINUTES",
                        help=f"limit for all answers of one learner (default {MINUTES:g})")  # fmt: skip
    within.add_argument("--memory", type=positive, default=MEMORY >> 20, metavar="MIB", help="limit for each "
                        "process, and NPROC + 1 times that for all processes of a learner (default "
                        f"{MEMORY >> 20})")  # fmt: skip
    within.add_argument("--sandbox", type=shlex.split, default=[], metavar="COMMAND", help="command to run learners' "
                        "code in, such as 'bwrap --unshare-all …'; the grader and its files stay outside")  # fmt: skip
    within.add_argument("--env", nargs="+", default=[], metavar="NAME", help="environment variables that learners' "
                        "code may see, besides PATH and the like")  # fmt: skip
    return made


def _above_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number; use one such as 30")
    return number


def main(words: Sequence[str]) -> int:
    """Run the command line and return its exit status."""
    try:
        asked = parser().parse_strictly(words)
        if asked.resume and asked.csv is None:
            raise BadInput("--resume continues from the rows in --csv; add --csv FILE")
    except HelpAsked as answer:
        print(answer.text, end="")
        return 0
    except BadInput as wrong:
        _say(str(wrong))
        return 2
    rlimits.hide()
    children.adopt_orphans()
    if os.geteuid() == 0 and not asked.sandbox:
        _say(ROOT)
    try:
        _check_files(asked)
        options = {name: getattr(asked, name) for name in ("deadline", "minutes", "sandbox")}
        with ranks(asked.nproc, memory=asked.memory << 20, names=asked.env, adopts=True, **options) as grader:
            return _Marking(asked, grader).run()
    except BadInput as wrong:
        _say(str(wrong))
        return 2
    except Gone as gone:
        _say(f"grading is not possible: the process that reads and runs submissions {gone}")
        return 2
    except KeyboardInterrupt:  # before there was anything to keep
        _say("stopped by the user")
        return 130


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Marking:
    """One run of the command: what is asked for, what is to be done, and what has been."""

    def __init__(self, asked: argparse.Namespace, grader: Grader):
        self.asked, self.grader = asked, grader
        self.works = found(asked.folder, asked.expect)
        self.book = gradebook.Book(asked.csv, asked.resume)
        self.learners = {w.learner: [v for v in self.works if v.learner == w.learner] for w in self.works}
        self.feedback: dict[str, str] = {}  # learner → file name
        for learner in self.learners:
            self.feedback[learner] = gradebook.feedback_name(learner, self.feedback.values())
        self.troubles: list[str] = []
        self.began, self.finished = time.monotonic(), 0

    def run(self) -> int:
        stopped = False
        try:
            todo = self._todo()
            if todo:
                self.grader.warm()
                self._examine(todo, self.asked.jobs)
                self._once_more()
        except KeyboardInterrupt:
            stopped = True
            self.grader.stopped = True
        with uninterrupted():
            if not stopped:
                self._fill_in()
            self._write()
        self._show()
        return self._status(stopped)

    # -- examining ---------------------------------------------------------------------------

    def _todo(self) -> dict[str, list[Work]]:
        """What has no verdict yet, by learner; all of a learner whose files have changed."""
        now = {learner: works[0].submission.digest for learner, works in self.learners.items()}
        for learner in {row.learner for row in self.book.rows.values() if row.digest != now.get(row.learner)}:
            self.book.drop(learner)
        todo = self._without_verdict()
        kept = len(self.learners) - len(todo)
        if self.asked.resume:
            _say(f"{kept} of {len(self.learners)} learners already have all their verdicts, and unchanged files")
        return todo

    def _has_verdict(self, work: Work) -> bool:
        row = self.book.rows.get((work.learner, work.exercise, work.file))
        return row is not None and row.ok != gradebook.ERROR

    def _once_more(self) -> None:
        """Who was examined beside others may have lost an answer to them: such answers are tried again, alone."""
        lost = self._without_verdict() if self.asked.jobs > 1 else {}
        if lost:
            _say(f"{sum(map(len, lost.values()))} answers have no verdict; trying again, one learner at a time")
            self._examine(lost, 1)

    def _without_verdict(self) -> dict[str, list[Work]]:
        found = {learner: [w for w in works if not self._has_verdict(w)] for learner, works in self.learners.items()}
        return {learner: works for learner, works in found.items() if works}

    def _examine(self, todo: dict[str, list[Work]], jobs: int) -> None:
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        for learner in todo:
            waiting.put(learner)
        self.began, self.finished = time.monotonic(), 0
        answers: queue.SimpleQueue[tuple[str, Work | None, Answer | None, str]] = queue.SimpleQueue()
        for _ in range(min(jobs, len(todo))):
            threading.Thread(target=self._sit, args=(todo, waiting, answers), daemon=True).start()
        while self.finished < len(todo):
            learner, work, answer, trouble = answers.get()
            if work is not None and answer is not None:
                self._keep(work, answer)
            else:
                self._learner_done(learner, len(todo), trouble)

    def _keep(self, work: Work, answer: Answer) -> None:
        lacked = self.book.lacks
        with uninterrupted():
            self.book.add(work.row(answer))
        if self.book.lacks and not lacked:
            _say(
                f"{self.asked.csv} cannot be written: {self.book.lacks}; rows are kept and written as soon as possible"
            )

    def _sit(
        self,
        todo: dict[str, list[Work]],
        waiting: queue.SimpleQueue[str],
        answers: queue.SimpleQueue[tuple[str, Work | None, Answer | None, str]],
    ) -> None:
        """Examine one learner after another, in a thread."""
        while not self.grader.stopped:
            try:
                learner = waiting.get_nowait()
            except queue.Empty:
                return
            sitting = GradingSession(self.grader, learner)
            try:
                for work in sorted(todo[learner], key=lambda w: w.file):  # a file's cells are parsed once
                    answer = sitting.check(work)
                    if not self.grader.stopped:  # else it was taken away amid the answer
                        answers.put((learner, work, answer, ""))
                trouble = sitting.end()
            except Exception as error:  # of the grader's own; the main thread waits for every learner
                trouble = f"at {learner}'s answers: {type(error).__name__}: {error}"
            answers.put((learner, END, END, trouble))

    def _learner_done(self, learner: str, of: int, trouble: str) -> None:
        self.finished += 1
        if trouble:
            self._trouble(trouble)
        with uninterrupted():
            as_written = self.book.check()
        if not as_written:
            self._trouble(f"{self.asked.csv} was changed by another process while {learner} was examined; rewriting "
                          "it")  # fmt: skip
        rows = self._rows_of(learner)
        right = sum(row.ok == gradebook.YES for row in rows)
        spent = time.monotonic() - self.began
        left = spent / self.finished * (of - self.finished)
        ahead = f"; about {_time(left)} left" if self.finished < of else f"; {_time(spent)} in all"
        _say(f"{self.finished} of {of}: {learner}, {right} of {len(rows)} ok{ahead}")
        self._give_feedback(learner, rows)

    def _rows_of(self, learner: str) -> list[gradebook.GradeRow]:
        return [row for row in self.book.sorted() if row.learner == learner]

    def _trouble(self, text: str) -> None:
        self.troubles.append(text)
        _say(text)

    # -- writing -----------------------------------------------------------------------------

    def _fill_in(self) -> None:
        """Every answer has a row, whatever happened."""
        for work in self.works:
            if (work.learner, work.exercise, work.file) not in self.book.rows:
                self._keep(work, NoVerdict(False, "no verdict: the grader got no answer from its examiner"))

    def _give_feedback(self, learner: str, rows: Sequence[gradebook.GradeRow]) -> None:
        if self.asked.feedback is not None:
            text = gradebook.feedback(learner, rows)
            self._put(self.asked.feedback / self.feedback[learner], text.encode("utf-8", "backslashreplace"))

    def _put(self, path: Path, data: bytes) -> None:
        try:
            gradebook.replace(path, data)
        except OSError as error:
            self._trouble(f"{path} cannot be written: {error.strerror}")

    def _write(self) -> None:
        """All files, each as a whole."""
        before = self.book.altered
        self.book.finish()
        if self.book.altered > before:
            self._trouble(f"{self.asked.csv} was changed by another process; rewriting it")
        if self.book.lacks:
            self._trouble(f"{self.asked.csv} cannot be written: {self.book.lacks}; the table below has all rows")
        rows = self.book.sorted()
        for learner in self.learners:
            own = [row for row in rows if row.learner == learner]
            if own:
                self._give_feedback(learner, own)
        for path, table in ((self.asked.wide, gradebook.wide(rows)), (self.asked.summary, gradebook.frequent(rows))):
            if path is not None:
                self._put(path, gradebook.as_csv([table.columns, *table.rows]))

    def _show(self) -> None:
        rows = self.book.sorted()
        parts = [str(self.book.table()), str(gradebook.frequent(rows)), gradebook.rubrics(rows)]
        text = "\n\n".join(filter(None, parts)) + "\n"
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()

    def _status(self, stopped: bool) -> int:
        without = sum(row.ok == gradebook.ERROR for row in self.book.rows.values())
        if stopped:
            known = sum(self._has_verdict(work) for work in self.works)
            more = " --resume continues" if self.asked.csv else ""
            _say(f"stopped; {known} of {len(self.works)} answers have their verdicts{';' * bool(more)}{more}")
            return 130
        if without:
            again = "; --resume tries them again" if self.asked.csv else ""
            _say(f"{without} of {len(self.book.rows)} answers have no verdict (error){again}")
        return 1 if without or self.troubles else 0


def _check_files(asked: argparse.Namespace) -> None:
    """Find out now, and not after the class has been graded, what cannot be written. Raises BadInput."""
    wrong = next((p for p in (asked.wide, asked.summary) if p and (p.is_dir() or not p.absolute().parent.is_dir())), "")
    if wrong:
        raise BadInput(
            f"{wrong} cannot be written: it is a folder, or its folder does not exist; give the name of a file"
        )
    if asked.feedback is not None:
        try:
            asked.feedback.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"--feedback {asked.feedback} cannot be created: {error.strerror}") from None


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
