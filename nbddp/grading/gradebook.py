"""Marks as they are stored and distributed: rows, their files, and summaries of all of them.

What learners wrote comes in here as text alone. It is made harmless for its reader. Control characters of terminals go,
and a cell that a spreadsheet would take for a formula gets an apostrophe in front. `Book` is a CSV file that is written
row by row through one open file; what another process makes of the file meanwhile is seen, and undone. Pure but for the
files: imports only the standard library, `nbddp.errors`, `nbddp.figures.table` and `nbddp.lessons.framework.rubric`.
"""

from __future__ import annotations

import csv
import errno
import io
import os
import re
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from dataclasses import replace as replaced
from pathlib import Path

from nbddp.errors import BadInput
from nbddp.figures.table import Table
from nbddp.lessons.framework.rubric import lines_of

LONGEST = 2400  # characters of what is said of an answer; a rubric has several lines
NAME = 200  # bytes of a file's name; systems have 255, and some is put behind it
FORMULA = "=+-@"
YES, NO, ERROR = "yes", "no", "error"


@dataclass(frozen=True)
class GradeRow:
    """A learner's answer to an exercise; digest: of all files of that learner."""

    learner: str
    exercise: str
    ok: str
    file: str
    says: str
    digest: str = ""

    @property
    def lines(self) -> list[str]:
        """The line of an answer; of a rubric, all lines."""
        return lines_of(self.says) or [self.says]

    @property
    def key(self) -> tuple[str, str, str]:
        return self.learner, self.exercise, self.file


COLUMNS = tuple(f.name for f in fields(GradeRow))
SHOWN = COLUMNS[:-1]


# -- text that does no harm ------------------------------------------------------------------------


def clean(text: str, longest: int = LONGEST) -> str:
    """One line without control characters (ANSI's escape sequences, directions of writing), short, and in UTF-8: what
    it does not have, lone surrogates, as escapes."""
    whole = text.encode("utf-8", "backslashreplace").decode()
    spaced = re.sub(r"\s+", " ", re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]", "", whole))
    kept = "".join(c for c in spaced if unicodedata.category(c) not in ("Cc", "Cf", "Co", "Cn", "Zl", "Zp"))
    return kept if len(kept) <= longest else f"{kept[:longest]}…"


def named(text: str) -> str:
    """A name of a file, with what `clean` would drop as escapes, so that two names stay two."""
    return "".join(
        c if clean(c) == c else f"\\x{ord(c):02x}" for c in os.fsencode(text).decode("utf-8", "backslashreplace")
    )


def defused(cell: str) -> str:
    """A cell that no spreadsheet takes for a formula: an apostrophe goes in front of one that would be."""
    return f"'{cell}" if _dangerous(cell) else cell


def fused(cell: str) -> str:
    """The cell before `defused`."""
    return cell[1:] if cell.startswith("'") and _dangerous(cell) else cell


def _dangerous(cell: str) -> bool:
    bare = cell.lstrip("'")
    first = unicodedata.normalize("NFKC", bare.lstrip()[:1])
    return (first != "" and first in FORMULA) or bare[:1] in ("\t", "\r", "\n")


def as_csv(rows: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerows([defused(str(cell)) for cell in row] for row in rows)
    return text.getvalue().encode("utf-8", "backslashreplace")


def replace(path: Path, data: bytes) -> None:
    """Put a file in its place as a whole: a reader sees the old one or the new one, a link is not followed. Raises
    OSError, and leaves the old one then."""
    made, fresh = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:50]}.")
    try:
        with os.fdopen(made, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), 0o644 & ~_umask())
        os.replace(fresh, path)
    except BaseException:
        os.unlink(fresh)
        raise


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


# -- the file ----------------------------------------------------------------------------------------


class Book:
    """Rows, and the CSV file that has them if there is one. Rows that come for the same answer replace one another.

    `lacks` says why the file has not all rows (the disk is full), or is empty; `check` and `finish` try again.
    """

    def __init__(self, path: Path | None = None, resume: bool = False):
        self.rows: dict[tuple[str, str, str], GradeRow] = {}
        self.path = path = path if path is None else Path(os.path.realpath(path))
        self.altered = 0  # how often the file was not as it was written
        self.lacks = ""
        self._file = -1
        if path is None:
            return
        if resume and path.exists():
            self.rows = {row.key: row for row in _read(path)}
        if path.exists() and not path.is_file():
            raise BadInput(f"{path} is not a file that can hold rows; give --csv the name of a file")
        self._begin()
        if self.lacks:
            raise BadInput(f"{path} cannot be written: {self.lacks}")

    def _begin(self) -> None:
        """Write the file anew."""
        assert self.path is not None
        self._close()
        self._written = as_csv([COLUMNS, *map(astuple, self.rows.values())])
        try:
            replace(self.path, self._written)
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            self.lacks = str(error.strerror)
        else:
            self.lacks = ""

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def add(self, row: GradeRow) -> None:
        """Take a row in; it is in the file when this returns, or `lacks` says why not."""
        self.rows[row.key] = row
        if self.path is None or self.lacks:
            return
        line = as_csv([astuple(row)])
        try:
            done = os.write(self._file, line)
        except OSError as error:
            self.lacks = str(error.strerror)
        else:
            self.lacks = "" if done == len(line) else os.strerror(errno.ENOSPC)
            self._written += line

    def drop(self, learner: str) -> None:
        """Forget what is known of a learner, who has gone or whose files are others now."""
        self.rows = {key: row for key, row in self.rows.items() if row.learner != learner}

    def check(self) -> bool:
        """Whether the file is as it was written, as far as it could be. If it is not, it is written anew."""
        if self.path is None:
            return True
        if self.lacks:
            self._begin()
            return True
        if self._as_written():
            return True
        self.altered += 1
        self._begin()
        return False

    def _as_written(self) -> bool:
        assert self.path is not None
        try:
            there, ours = os.lstat(self.path), os.fstat(self._file)
        except OSError:
            return False
        if (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino) or ours.st_size != len(self._written):
            return False
        return os.pread(self._file, len(self._written) + 1, 0) == self._written

    def finish(self) -> None:
        """The last look at the file, and its rows in order."""
        if self.path is not None:
            self.check()
            self.rows = {row.key: row for row in self.sorted()}
            self._begin()
            self._close()

    def sorted(self) -> list[GradeRow]:
        return [self.rows[key] for key in sorted(self.rows)]

    def table(self) -> Table:
        return Table(SHOWN, [astuple(replaced(row, says=row.lines[-1]))[:-1] for row in self.sorted()])


def _read(path: Path) -> Iterator[GradeRow]:
    try:
        with open(path, newline="", encoding="utf-8", errors="replace") as file:
            whole, _, _ = file.read().rpartition("\n")  # a row that was cut through by what ended its writer is none
        head, *found = csv.reader(io.StringIO(whole, newline=""))
    except (ValueError, csv.Error):  # it is empty, or no table at all
        head, found = [], []
    if tuple(head) != COLUMNS or any(len(cells) != len(COLUMNS) for cells in found):
        raise BadInput(f"{path} was not written by this command, so it cannot be resumed; give --csv another name")
    for cells in found:
        yield GradeRow(*map(fused, cells))


# -- what is said of all of them -----------------------------------------------------------------------


def wide(rows: Sequence[GradeRow]) -> Table:
    """A row for each learner, a column for each exercise, and the total. 1 is a right answer (in any file), 0 a wrong
    one, `error` no verdict; empty: nothing was asked."""
    exercises = sorted({row.exercise for row in rows})
    marks: dict[str, dict[str, str]] = {}
    for row in rows:
        own = marks.setdefault(row.learner, {})
        own[row.exercise] = max(own.get(row.exercise, ""), row.ok, key=("", NO, ERROR, YES).index)
    shown = {YES: 1, NO: 0, ERROR: ERROR, "": ""}
    return Table(
        ("learner", *exercises, "total"),
        [
            (learner, *(shown[own.get(e, "")] for e in exercises), sum(ok == YES for ok in own.values()))
            for learner, own in sorted(marks.items())
        ],
    )


def frequent(rows: Sequence[GradeRow]) -> Table:
    """For each exercise how many answers there are, how many are right, and the most frequent answer to the others."""
    table = []
    for exercise in sorted({row.exercise for row in rows}):
        own = [row for row in rows if row.exercise == exercise]
        (says, times), *_ = Counter(row.lines[-1] for row in own if row.ok != YES).most_common(1) or [("", 0)]
        table.append((exercise, len(own), sum(row.ok == YES for row in own), times, says))
    return Table(("exercise", "answers", "ok", "times", "most frequent message"), table)


def feedback(learner: str, rows: Sequence[GradeRow]) -> str:
    """What one learner gets to read."""
    right = len({row.exercise for row in rows if row.ok == YES})
    head = f"{learner}: {right} of {len({row.exercise for row in rows})} exercises are right"
    said = (f"{row.exercise} ({row.file})\n" + "\n".join(f"    {line}" for line in row.lines) for row in rows)
    return "\n".join([head, "", *said, ""])


def rubrics(rows: Sequence[GradeRow]) -> str:
    """The marks of each answer that has several, one below the other; empty if there is none."""
    some = [row for row in rows if len(row.lines) > 1]
    heads = (f"{row.learner}, {row.exercise}: {row.lines[-1]}" for row in some)
    return "\n\n".join(
        "\n".join([head, *(f"    {line}" for line in row.lines[:-1])]) for head, row in zip(heads, some, strict=True)
    )


def feedback_name(learner: str, taken: Iterable[str] = ()) -> str:
    """The file name for a learner's feedback, one that is not among those `taken`."""
    base = re.sub(r"[^\w .@+-]", "_", learner).lstrip(".") or "learner"
    base = base.encode()[:NAME].decode(errors="ignore")
    names = (f"{base}{f' ({n})' * (n > 1)}.txt" for n in range(1, 10**6))
    used = set(taken)
    return next(name for name in names if name not in used)
