"""Submissions and their examination: files become text, each learner gets fresh ranks, and answers become lines.

Nothing that was handed in is run, imported or unpickled in this process. Files are parsed in processes of their own
(`grading.reader`): opened once, never through a link, and never waited for. Each learner's submissions run on fresh
ranks of that learner alone, within limits. An examiner judges their answers (`grading.examiner`). All of it has ended
before the next learner's begin.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import os
import stat
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbddp.errors import BadInput
from nbddp.figures.table import Table
from nbddp.grading import examiner, gradebook
from nbddp.grading.definitions import missing
from nbddp.grading.examiner import exercises
from nbddp.grading.sandbox.agent import Sandbox
from nbddp.grading.sandbox.client import ForkedProcess, Gone, Server, bounds
from nbddp.grading.sandbox.rlimits import bounded
from nbddp.grading.submissions import Cell
from nbddp.lessons.framework.answer import OK, Answer
from nbddp.lessons.framework.run_check import DEADLINE
from nbddp.protocol.codec import to_json

COLUMNS = gradebook.SHOWN
NPROC = 4
MEMORY = 1 << 30  # bytes that each process of a learner's may take
PROCESSES = 48  # that a learner's answers may start, beyond their ranks
MINUTES = 15.0  # that one learner's answers may take
STARTING = 120.0  # seconds
RUNS, SLACK = 8, 15.0  # the most runs of a check; seconds that each may take beyond the deadline


@dataclass(frozen=True)
class NoVerdict(Answer):
    """An answer that could not be judged. `line` says why; it says nothing about the answer itself."""


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
        """Run the exercise's check, on the ranks of `ranks` or else on two new ones. Returns its answer, or a NoVerdict
        if the check could not run. A submission never makes it raise."""
        return (_active[-1] if _active else _of_two()).check(self)

    def row(self, answer: Answer) -> gradebook.GradeRow:
        """The result as a row of the table."""
        ok = gradebook.ERROR if isinstance(answer, NoVerdict) else gradebook.YES if answer.ok else gradebook.NO
        return gradebook.GradeRow(self.learner, self.exercise, ok, self.file, answer.line, self.submission.digest)


# -- what was handed in --------------------------------------------------------------------------------


def found(folder: str | Path, expected: Sequence[str] = ()) -> list[Work]:
    """The answers in a folder, by learner. What any learner has handed in, and what is `expected`, is looked for in
    all files of every learner; who has it in two files has two answers. Raises BadInput if nothing is there."""
    _refuse_imports(Path(folder).resolve())
    known = exercises()
    unknown = [name for name in expected if name not in known]
    if unknown:
        raise BadInput(f"there is no exercise {unknown[0]!r}; there are {', '.join(known)}")
    folder = Path(folder)
    paths = by_learner(folder)
    if not any(paths.values()):
        raise BadInput(
            f"there is no notebook (.ipynb) or Python file (.py) in {folder}; give the folder of the submissions"
        )
    with _a_server() as server:
        handed_in = {learner: read(server, sorted(own), folder, list(known)) for learner, own in paths.items()}
    defined = {n for sent in handed_in.values() for s in sent for n in s.names}
    return [
        Work(gradebook.named(learner), name, gradebook.named(str(one.path.relative_to(folder))), one)
        for learner, sent in handed_in.items()
        for name in known
        if name in defined or name in expected
        for one in those_with(name, sent, Path(folder, learner))
    ]


def _refuse_imports(folder: Path) -> None:
    """Raises BadInput where Python takes modules from the submissions: any of them could be run in this process."""
    for entry in map(Path, sys.path):
        if entry.resolve().is_relative_to(folder):
            raise BadInput(
                f"Python imports modules from {entry.resolve()}, where submissions are: a submission with a module's "
                "name would run in the grader; start from another folder and give the path of this one"
            )


# -- the grader ------------------------------------------------------------------------------------------


class Grader:
    """Reads and runs learners' files. It starts a warm process and computes the reference answers once.

    sandbox: a command that the warm process, and so all that learners wrote, runs in. names: variables of the
    environment that learners' code may see. deadline: seconds of each run; minutes: of one learner in all. adopts: this
    process adopts orphans (`children.adopt_orphans`) and has no other children. Raises BadInput if the warm process
    cannot be started.
    """

    def __init__(
        self,
        nproc: int = NPROC,
        *,
        deadline: float = DEADLINE,
        minutes: float = MINUTES,
        memory: int = MEMORY,
        sandbox: Sequence[str] = (),
        names: Sequence[str] = (),
        adopts: bool = False,
    ):
        self.adopts = adopts
        self.nproc, self.deadline, self.minutes, self.memory = nproc, deadline, minutes, memory
        self.sandbox, self.names = list(sandbox), list(names)
        self._starting = ThreadPoolExecutor(1)  # one thread for good: what dies with its parent dies with a thread
        self.server = self._first_server()
        self.stopped = False
        self._references: str | None = None
        self._warming = threading.Lock()
        self._sitting: GradingSession | None = None

    def _server(self) -> Server:
        return self._starting.submit(Server, self.sandbox, self.names, self.adopts).result()

    def _first_server(self) -> Server:
        try:
            return self._server()
        except Gone as gone:
            raise BadInput(f"{self.sandbox[0] if self.sandbox else 'what runs submissions'} {gone}") from None

    def warm(self) -> None:
        """Import what ranks need, and work out what is right, on ranks that run no learner's code. Raises Gone."""
        with self._warming:
            if self._references is None:
                self._warm_up()
                first = self._examiner()
                try:
                    told = first.ask({"op": "references"}, STARTING)
                finally:
                    first.dismiss()
                if "references" not in told:
                    raise Gone(f"could not compute the right answers: {told.get('failed')}")
                self._references = told["references"]

    def _warm_up(self) -> None:
        order = {"op": "warm", "modules": examiner.WARM, "spared": examiner.SPARED}
        lacking = self.server.ask(order, STARTING)["missing"]
        if lacking:
            raise Gone(f"lacks {lacking}; install it where you grade")

    def revive(self) -> None:
        """Another warm process in place of one that has ended, with which all that it had started ends. Raises Gone."""
        with self._warming:
            if self.server.lost and not self.stopped:
                self.server.close()
                self.server = self._server()
                if self.stopped:  # meanwhile, so that `close` has missed it
                    self.server.close()
                elif self._references is not None:
                    self._warm_up()

    def start(self) -> ForkedProcess:
        """A fresh examiner. Raises Gone."""
        self.revive()
        self.warm()
        return self._examiner()

    def _examiner(self) -> ForkedProcess:
        limits = bounds(self.memory, int(60 * self.minutes))
        guard = Sandbox(limits, self.nproc + PROCESSES, (self.nproc + 1) * self.memory)
        request = {"nproc": self.nproc, "deadline": self.deadline, "guard": to_json(guard)}
        process = self.server.start("nbddp.grading.examiner:main", request)
        try:
            told = process.channel.hear(STARTING)
            if "ready" not in told:
                raise Gone(f"could not start its ranks: {told.get('failed', told)}")
            process.channel.say({"references": self._references})
        except Gone as gone:
            words = process.end()
            raise Gone(f"{gone} ({words})" if words else str(gone)) from None
        return process

    def check(self, work: Work) -> Answer:
        """As `Work.check`. The ranks are the learner's: they stay until another learner's work comes."""
        if self._sitting is None or self._sitting.learner != work.learner:
            self.end_sitting()
            self._sitting = GradingSession(self, work.learner)
        return self._sitting.check(work)

    def end_sitting(self) -> None:
        """End the processes of the learner whose work was checked last."""
        sitting, self._sitting = self._sitting, None
        trouble = sitting.end() if sitting is not None else ""
        if trouble:
            warnings.warn(trouble, stacklevel=2)

    def close(self) -> None:
        """End all that was started."""
        self.stopped = True
        if self._sitting is not None:
            self._sitting.leave()
        self.server.close()
        self._starting.shutdown(wait=False)


class GradingSession:
    """The examination of one learner: an examiner, and another in its place if the answers bring it down."""

    def __init__(self, grader: Grader, learner: str):
        self.grader, self.learner = grader, learner
        self._examiner: ForkedProcess | None = None
        self._until = time.monotonic() + 60 * grader.minutes

    def check(self, work: Work) -> Answer:
        submission, name = work.submission, work.exercise
        if submission.unread or name not in submission.names:
            return Answer(False, submission.unread or missing(name))
        if time.monotonic() > self._until:
            return NoVerdict(False, f"no verdict: this learner's answers have taken {self.grader.minutes:g} minutes")
        try:
            if self._examiner is None:
                self._examiner = self.grader.start()
            asked = {"op": "examine", "exercise": name, "cells": submission.cells}
            return self._answer(self._examiner.ask(asked, RUNS * (self.grader.deadline + SLACK)))
        except Gone as gone:
            said = self._lose()
            return NoVerdict(False, gradebook.clean(f"no verdict: the process that judges it {gone}{said}"))
        except BaseException:  # Stop: its answer would be taken for the next one's
            self._lose()
            raise

    def _answer(self, told: Mapping[str, object]) -> Answer:
        """What an examiner says, if it is an answer. Raises Gone if it has lost its ranks for good."""
        if "failed" in told:
            if told.get("lost"):
                raise Gone(f"cannot go on: {told['failed']}")
            return NoVerdict(
                False, gradebook.clean(f"no verdict: the check failed on the ranks' answers ({told['failed']})")
            )
        ok, line = told.get("ok"), told.get("line")
        if type(ok) is not bool or not isinstance(line, str) or ok != (line == OK):
            raise Gone("sent an invalid answer")
        return Answer(ok, gradebook.clean(line))

    def _lose(self) -> str:
        """End what is left of the examiner, and have what starts another; the last output of the one, in brackets."""
        lost, self._examiner = self._examiner, None
        words = ""
        with contextlib.suppress(Gone):  # if nothing can be started any more, the next answer reports it
            words = lost.end() if lost is not None else ""
        with contextlib.suppress(Gone):
            self.grader.revive()
        return f" ({words})" if words else ""

    def leave(self) -> None:
        """Have nothing more to do with the learner's processes: what started them ends them."""
        if self._examiner is not None:
            self._examiner.channel.close()

    def end(self) -> str:
        """End the learner's processes, all of them; what went wrong with that, or empty."""
        examiner, self._examiner = self._examiner, None
        try:
            if examiner is not None:
                examiner.end()
        except Gone as gone:
            with contextlib.suppress(Gone):
                self.grader.revive()
            return "" if self.grader.stopped else f"at the end of {self.learner}'s answers: it {gone}"
        return ""


_active: list[Grader] = []
_own: list[Grader] = []


@contextlib.contextmanager
def ranks(
    nproc: int = NPROC,
    *,
    deadline: float = DEADLINE,
    minutes: float = MINUTES,
    memory: int = MEMORY,
    sandbox: Sequence[str] = (),
    names: Sequence[str] = (),
    adopts: bool = False,
) -> Iterator[Grader]:
    """Context manager: inside the block, answers are checked on `nproc` CPU ranks, with new processes for each learner.

    - nproc: how many ranks.
    - deadline: seconds of each run; minutes: of all runs of one learner together.
    - memory: bytes that each process of a learner may have.
    - sandbox: a command, as a list of words, in which learners' code runs.
    - names: variables of the environment that learners' code may see.
    - adopts: whether this process ends processes that learners' code leaves behind. Such a process has no other
      children.

    Raises BadInput if the process that runs submissions cannot be started.
    """
    grader = Grader(
        nproc, deadline=deadline, minutes=minutes, memory=memory, sandbox=sandbox, names=names, adopts=adopts
    )
    _active.append(grader)
    try:
        yield grader
    finally:
        _active.remove(grader)
        grader.close()


def _of_two() -> Grader:
    if not _own:
        _own.append(Grader(2))
        atexit.register(_own[0].close)
    return _own[0]


@contextlib.contextmanager
def _a_server() -> Iterator[Server]:
    """The grader's, or one that need not get warm."""
    if _active:
        yield _active[-1].server
        return
    server = Server()
    try:
        yield server
    finally:
        server.close()


def graded(works: Sequence[Work]) -> Table:
    """Check them one after another: a row for each answer."""
    rows = [w.row(w.check()) for w in works]
    return Table(COLUMNS, [(r.learner, r.exercise, r.ok, r.file, r.says) for r in rows])


# -- submissions and their files ---------------------------------------------------------------------

SUFFIXES = (".ipynb", ".py")
LARGEST = 32 << 20  # bytes of a file
PARSE_MEMORY, PARSE_SECONDS = 1 << 30, 60.0  # that parsing a file may take


@dataclass(frozen=True)
class Submission:
    """One file as text. cells: those that may define answers; names: the exercises that they define; unread: why
    nothing in it can be; digest: of all files of the learner."""

    path: Path
    cells: tuple[Cell, ...] = ()
    names: frozenset[str] = frozenset()
    unread: str = ""
    digest: str = ""

    def defines(self, names: Sequence[str]) -> list[str]:
        return [n for n in names if n in self.names]


def by_learner(folder: Path) -> dict[str, list[Path]]:
    """The files that each learner has handed in, also who has an empty folder."""
    seen = [p for p in sorted(folder.rglob("*")) if not _hidden(p, folder)]
    sent: dict[str, list[Path]] = {p.name: [] for p in seen if p.is_dir() and p.parent == folder}
    for path in seen:
        if path.suffix in SUFFIXES and not path.is_dir():
            parts = path.relative_to(folder).parts
            sent.setdefault(path.stem if len(parts) == 1 else parts[0], []).append(path)
    return sent


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def read(server: Server, paths: Sequence[Path], folder: Path, names: Sequence[str]) -> list[Submission]:
    """A learner's files, and which of `names` each defines; parsed in a process that is the learner's alone."""
    texts = [_text(path) for path in paths]
    digests = [f"{path.relative_to(folder)} {digest}" for path, (_, _, digest) in zip(paths, texts, strict=True)]
    digest = f"sha256:{hashlib.sha256(os.fsencode(chr(10).join(digests))).hexdigest()[:32]}"
    reader: ForkedProcess | None = None
    sent = []
    for path, (text, why, _) in zip(paths, texts, strict=True):
        outline: dict[str, Any] = {"cells": [], "defines": [], "unread": why}
        if not why:
            reader = reader or server.start(
                "nbddp.grading.reader:main", bounded(bounds(PARSE_MEMORY, int(PARSE_SECONDS)))
            )
            try:
                asked = {"name": path.name, "suffix": path.suffix, "text": text, "names": list(names)}
                outline = reader.ask(asked, PARSE_SECONDS)
            except Gone:
                outline["unread"] = f"{path.name} cannot be read: it is nested too deeply, or much too long"
                reader.dismiss()
                reader = None
        cells = tuple((str(where), str(source)) for where, source in outline["cells"])
        defines = frozenset(outline["defines"]) & set(names)
        sent.append(Submission(path, cells, defines, gradebook.clean(outline["unread"]), digest))
    if reader is not None:
        reader.dismiss()
    return sent


def _text(path: Path) -> tuple[str, str, str]:
    """A file's text, or why there is none, and a digest of what it holds."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        link = error.errno == errno.ELOOP
        why = f"{path.name} {'is a link; hand in the file itself' if link else f'cannot be read: {error.strerror}'}"
        return "", why, why
    with os.fdopen(fd, "rb") as file:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > LARGEST:
            why = (
                f"{path.name} is larger than {LARGEST >> 20} MiB"
                if facts.st_size > LARGEST
                else f"{path.name} is not a file"
            )
            return "", why, why
        data = file.read(LARGEST)
    kind = "notebook: it does not contain notebook JSON" if path.suffix == ".ipynb" else "UTF-8 text file"
    digest = hashlib.sha256(data).hexdigest()
    try:
        return data.decode("utf-8"), "", digest
    except UnicodeDecodeError:
        return "", f"{path.name} is not a {kind}", digest


def those_with(name: str, sent: Sequence[Submission], own: Path) -> Sequence[Submission]:
    """Those of a learner's files in which an exercise is; if in none, one that says why."""
    having = [s for s in sent if name in s.names]
    unreadable = [s for s in sent if s.unread]
    if having or unreadable or len(sent) == 1:
        return having or unreadable[:1] or sent
    files = ", ".join(gradebook.named(s.path.name) for s in sent)
    why = missing(name, f" in {files}") if files else "not handed in: there is no notebook in the folder"
    return [Submission(own, unread=why, digest=sent[0].digest if sent else "")]
