"""Frames of other threads, read without holding them.

Who holds a frame holds all its names. If its thread returns from it meanwhile, what only that frame knew lives on, and
dies later in the thread that looked. So a look would change a program. A DDP model that was about to go keeps its
hooks, and its rank calls an all-reduce that the others do not; and the model's C++ part then needs a lock of the
running step, while that step's thread needs the interpreter. (Seen on four busy ranks, torch 2.13.)

CPython hands the interpreter to another thread between two instructions only. So all that is read of a frame is read
within one call of `tuple`, by iterators written in C. Up to Python 3.11 the collector may run in that call, and with it
Python code (finalizers, `gc.callbacks`), so it is off meanwhile. What comes out is a frame's code, line and
instruction. Names are asked for one by one, only by who knows that they are plain values. This module knows neither
torch nor nbddp.
"""

from __future__ import annotations

import functools
import gc
import operator
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, chain, compress, islice, repeat, starmap, takewhile
from pathlib import Path
from types import CodeType, CoroutineType, FrameType
from typing import Any

ROOT = str(Path(__file__).parents[2])  # the package
PACKAGES = ("site-packages", "dist-packages")
NO_ARGUMENTS: tuple[tuple[()]] = ((),)
FACTS = operator.attrgetter("f_code", "f_lineno", "f_lasti")
PLACE, NAMES = operator.attrgetter("f_code", "f_lasti"), operator.attrgetter("f_locals")
SUSPENDED = operator.attrgetter("cr_code", "cr_frame.f_lineno", "cr_frame.f_lasti")


class Moved(RuntimeError):
    """A thread has left the place where it was seen."""


@dataclass(frozen=True)
class SeenFrame:
    """A frame as it was seen: `depth` frames outside the innermost one of the thread `ident`. Of the thread that asks
    it may be the frame itself."""

    code: CodeType
    line: int
    lasti: int
    ident: int = 0
    depth: int = 0
    own: FrameType | None = field(default=None, repr=False, compare=False)

    @property
    def file(self) -> str:
        return self.code.co_filename

    @property
    def name(self) -> str:
        return self.code.co_name

    def get(self, *names: str) -> tuple[Any, ...]:
        """What these local names are now, None for one that is not there. What is asked for lives on as long as the
        answer. Raises Moved if the thread is elsewhere by now."""
        if self.own is not None:
            held = self.own.f_locals
            return tuple(held.get(name) for name in names)
        asked = [map(operator.methodcaller("get", name), map(NAMES, self._now())) for name in names]
        try:
            ((place, *values),) = _at_once(zip(map(PLACE, self._now()), *asked, strict=True))
        except (KeyError, ValueError):  # no such thread, or not as many frames
            raise Moved from None
        if place != (self.code, self.lasti):
            raise Moved
        return tuple(values)

    def _now(self) -> Iterator[FrameType]:
        return islice(_living(self.ident), self.depth, self.depth + 1)


def of(ident: int) -> list[SeenFrame]:
    """A thread's frames, innermost first; none of a thread that has ended."""
    try:
        facts = _at_once(map(FACTS, _living(ident)))
    except KeyError:
        return []
    return [SeenFrame(code, line, lasti, ident, depth) for depth, (code, line, lasti) in enumerate(facts)]


def of_all() -> dict[int, list[SeenFrame]]:
    """Thread → its frames, innermost first; without the thread that asks."""
    idents = _at_once(chain.from_iterable(starmap(sys._current_frames, NO_ARGUMENTS)))
    return {ident: of(ident) for ident in idents if ident != threading.get_ident()}


def awaiting(coroutine: CoroutineType[Any, Any, Any]) -> list[SeenFrame]:
    """Where a coroutine is that no thread runs, and those that it awaits: innermost first."""
    inwards: Iterator[Any] = chain((coroutine,), repeat("cr_await"))
    try:
        facts = _at_once(map(SUSPENDED, takewhile(CoroutineType.__instancecheck__, accumulate(inwards, getattr))))
    except AttributeError:  # it has ended
        return []
    return [SeenFrame(*each) for each in reversed(facts)]


def own(frame: FrameType) -> SeenFrame:
    """A frame of the thread that asks, or of an exception."""
    return SeenFrame(frame.f_code, frame.f_lineno, frame.f_lasti, own=frame)


def outwards(frame: FrameType | None) -> Iterator[SeenFrame]:
    """A frame of the thread that asks, and those outside it."""
    while frame is not None:
        yield own(frame)
        frame = frame.f_back


def _at_once(read: Iterable[Any]) -> tuple[Any, ...]:
    """All that comes of iterators written in C, while no other thread runs."""
    if sys.version_info >= (3, 12):  # there the collector waits for the end of the call
        return tuple(read)
    on: list[bool] = []
    off = chain(map(on.append, starmap(gc.isenabled, NO_ARGUMENTS)), starmap(gc.disable, NO_ARGUMENTS))
    back = starmap(gc.enable, compress(NO_ARGUMENTS, on))
    try:
        found = tuple(chain(off, read, back))
    except BaseException:
        if on == [True]:
            gc.enable()
        raise
    return found[2 : len(found) - sum(on)]


def _living(ident: int) -> Iterator[FrameType]:
    """The frames themselves. To be consumed by one call into C, at whose end none is left."""
    innermost = map(operator.getitem, starmap(sys._current_frames, NO_ARGUMENTS), (ident,))
    outwards: Iterator[Any] = chain(innermost, repeat("f_back"))
    return takewhile(operator.truth, accumulate(outwards, getattr))


def is_user(filename: str, names: dict[str, str]) -> bool:
    """True for cells and the user's own modules: not the standard library, not installed packages."""
    if filename in names:
        return True
    if filename.startswith("<") or any(name in filename for name in PACKAGES):
        return False
    return not filename.startswith(_library())


@functools.cache
def _library() -> tuple[str, ...]:
    """Folders, and files, of the standard library, of nbddp, and of packages that stand elsewhere on the path."""
    roots = {f"{folder}/" for folder in (os.path.dirname(os.__file__), sys.prefix + "/lib", ROOT)}
    return tuple(sorted(roots | _elsewhere()))


def package(filename: str) -> str:
    """The installed package that a file is of, wherever that stands; empty for any other file."""
    parts = filename.split("/")
    at = next((n for n, part in enumerate(parts) if part in PACKAGES), None)
    found = parts[at + 1] if at is not None else next(filter(filename.startswith, _elsewhere()), "")
    return os.path.basename(found.rstrip("/")).removesuffix(".py")


@functools.cache
def _elsewhere() -> frozenset[str]:
    """Folders, and files, of packages that stand elsewhere on the path than in a folder for packages."""
    folders = [p for p in map(os.path.abspath, sys.path) if os.path.isdir(p) and not p.endswith(PACKAGES)]
    return frozenset().union(*map(_installed, folders))


def _installed(folder: str) -> set[str]:
    """What pip has installed in a folder (`pip install --target`): it may hold the user's own modules as well."""
    found = set()
    for record in Path(folder).glob("*.dist-info/RECORD"):
        try:
            lines = record.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:  # somebody else's: what cannot be known as installed is taken for the user's
            continue
        tops = {line.partition(",")[0].partition("/")[::2] for line in lines}
        found |= {f"{folder}/{top}{'/' if below else ''}" for top, below in tops if below or top.endswith(".py")}
    return found
