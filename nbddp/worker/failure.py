"""An exception on a worker → values: the chain, its frames, which of them are the user's.

What travels is JSON; the words are made on the client (`execution.report`). An exception's class is the program's own
code: its `__str__`, `__notes__` or any attribute may raise. Then its type still travels, with a sentence in place of
what could not be read.
"""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any

from nbddp.deadlock.on_rank.frames import is_user
from nbddp.errors import Frame, Raised
from nbddp.protocol import position
from nbddp.protocol.codec import FILE, name_of, plain
from nbddp.worker import program

CONTEXT = 2  # lines of source on each side of the failing one
WIDEST = 500  # characters of a line of source
MOST_LINKS = 20  # exceptions of a chain
GROUP_WIDTH, GROUP_DEPTH = 15, 10  # of groups of exceptions, as Python shows them
MOST_WORDED = 100  # exceptions in all
MOST_NOTES = 50
Values = Sequence[Callable[[FrameType, str], Iterable[tuple[str, str]]]] | None
Notes = Sequence[Callable[[Raised], str]]
SLOTS = vars(BaseException)  # what Python itself keeps of an exception, whatever its class has under these names


def chain(
    error: BaseException, names: dict[str, str], hide: tuple[str, ...], values: Values = (), notes: Notes = ()
) -> tuple[Raised, ...]:
    """The exceptions that led to `error`, oldest first; of many the newest.

    names: real file name of a cell → how to show it (`Cell In[3]`).
    hide: path prefixes of the machinery that runs cells; frames before the first frame
        outside them are left out.
    values: get a frame and its line of source, and give its variables and their values as text; None: without
        these and without lines of source.
    notes: say more of an exception, or nothing.
    """
    return Chains(names, hide, values, notes).of(error)


class Chains:
    """Words chains of exceptions, of groups those of each exception in them too."""

    def __init__(self, names: dict[str, str], hide: tuple[str, ...], values: Values, notes: Notes):
        self._names, self._hide, self._values, self._notes = names, hide, values, notes
        self._seen: set[int] = set()
        self._left = MOST_WORDED

    def of(self, error: BaseException, depth: int = 0) -> tuple[Raised, ...]:
        links: list[Raised] = []
        current: BaseException | None = error
        older = 0
        while current is not None and (current is error or id(current) not in self._seen):
            self._seen.add(id(current))
            earlier, relation = before(current)
            if earlier is None or earlier is error:
                earlier, relation = None, ""
            if len(links) < MOST_LINKS:
                self._left -= 1
                found = self._one(current)
                group, more = self._group(current, depth)
                links.insert(0, replace(found, group=group, more=more, relation=relation))
            else:
                older += 1
            current = earlier
        if older or current is not None:  # none is reported that came before the first
            links[0] = replace(links[0], relation="", older=older)
        return tuple(links)

    def _one(self, error: BaseException) -> Raised:
        found = Raised(type_name(error), message(error), notes=_readable(lambda: _notes(error), "notes", ("",)))
        try:
            found = replace(found, frames=frames(traceback_of(error), self._names, self._hide, self._values))
            more = [said for note in self._notes if (said := note(found))]
            return replace(found, notes=(*found.notes, *more))
        except Exception as e:
            unread = f"({'more about it' if found.frames else 'its frames'} cannot be shown: "
            return replace(found, notes=(*found.notes, f"{unread}{type_name(e)} was raised)"))

    def _group(self, error: BaseException, depth: int) -> tuple[tuple[tuple[Raised, ...], ...], int]:
        """Of an ExceptionGroup: the chain of each exception in it, and how many there is no room for."""
        parts = parts_of(error)
        most = GROUP_WIDTH if depth < GROUP_DEPTH else 0
        chains = tuple([self.of(part, depth + 1) for part in parts[:most] if self._left > 0])
        return chains, len(parts) - len(chains)


def parts_of(error: BaseException) -> tuple[BaseException, ...]:
    """The exceptions in an ExceptionGroup, Python's or that of the package for 3.10; of any other none."""
    for module in ("builtins", "exceptiongroup"):
        kind = getattr(sys.modules.get(module), "BaseExceptionGroup", None)
        if kind is not None and issubclass(type(error), kind):
            return tuple(kind.exceptions.__get__(error))
    return ()


def before(error: BaseException) -> tuple[BaseException | None, str]:
    """The exception that led to this one, and how."""
    cause: BaseException | None = SLOTS["__cause__"].__get__(error)
    if cause is not None:
        return cause, "direct cause"
    if SLOTS["__suppress_context__"].__get__(error):
        return None, ""
    return SLOTS["__context__"].__get__(error), "while handling"


def traceback_of(error: BaseException) -> TracebackType | None:
    found: TracebackType | None = SLOTS["__traceback__"].__get__(error)
    return found


def type_name(error: BaseException) -> str:
    return name_of(vars(type)["__qualname__"].__get__(type(error)))


def message(error: BaseException) -> str:
    return readable(error)


def readable(value: object) -> str:
    """`value` as `print` words it, or a sentence where that raises."""
    return str(_readable(lambda: plain(str(value)), "message", ""))


def _notes(error: BaseException) -> tuple[str, ...]:
    notes = getattr(error, "__notes__", ())
    found = tuple([plain(str(note)) for note in ([notes] if isinstance(notes, str) else notes)])
    return found if len(found) <= MOST_NOTES else (*found[:MOST_NOTES], f"… {len(found) - MOST_NOTES:,} notes omitted")


def _readable(read: Callable[[], Any], what: str, empty: Any) -> Any:
    """What `read` gives, or a sentence in its place (in a tuple where `empty` is one): it is the program's code."""
    try:
        return read()
    except BaseException as e:
        said = f"(its {what} cannot be shown: reading {'it' if what == 'message' else 'them'} raises {type_name(e)})"
        return (said,) if isinstance(empty, tuple) else said


def frames(
    tb: TracebackType | None, names: dict[str, str], hide: tuple[str, ...], values: Values = ()
) -> tuple[Frame, ...]:
    """Frames from the cell inwards; a frame is the user's if it is not from an installed package."""
    walked = list(traceback.walk_tb(tb))
    while walked and (file := walked[0][0].f_code.co_filename) not in names and file.startswith(hide):
        walked.pop(0)
    while walked and walked[-1][0].f_code.co_filename == program.FILE:  # Python's own handler has no frame
        walked.pop()
    found = []
    for i, end in position.kept_frames([(frame.f_code, line) for frame, line in walked]):
        told = _frame(walked[i][0], walked[i][1] or 0, names, values)
        left_out = [name_of(frame.f_code.co_name) for frame, _ in walked[i + 1 : end]]
        found.append(replace(told, left_out=len(left_out), of=tuple(dict.fromkeys(left_out))) if left_out else told)
    return tuple(found)


def _frame(frame: FrameType, line: int, names: dict[str, str], values: Values) -> Frame:
    """Source is looked up for the user's frames alone: torch's files are long."""
    file = frame.f_code.co_filename
    user = is_user(file, names)
    try:
        if told := user and values is not None:
            linecache.checkcache(file)
            linecache.lazycache(file, frame.f_globals)
        rows, text = context(file, line) if told else (), linecache.getline(file, line).strip() if values else ""
    except Exception:  # a module's __loader__ is asked for it, and `open` may be the program's
        rows, text = (), ""
    return Frame(
        names.get(file, file)[:FILE].encode("utf-8", "replace").decode(),  # an escape would look like a folder
        line,
        name_of(frame.f_code.co_name),
        user,
        rows,
        tuple([each for of in values or () if told for each in of(frame, text)]),
    )


def context(filename: str, line: int) -> tuple[tuple[int, str], ...]:
    first = max(1, line - CONTEXT)
    rows = [(n, _cut(plain(linecache.getline(filename, n)).rstrip("\n"))) for n in range(first, line + CONTEXT + 1)]
    while rows and not rows[-1][1].strip() and rows[-1][0] != line:
        rows.pop()
    return tuple(rows)


def _cut(line: str) -> str:
    return line if len(line) <= WIDEST else f"{line[:WIDEST]}…"
