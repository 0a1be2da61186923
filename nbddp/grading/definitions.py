"""From the text of cells to a learner's definitions in them, on a rank.

Only imports, definitions and plain assignments are run, as a notebook's own cells would have them when the functions
are called; what a lesson does on ranks, draws or checks is not. Class bodies, decorators and default values are code
like any other: they run here, on a rank of that learner, and nowhere else. What judges the answer holds a `Handed`,
which becomes the learner's object where a rank receives it.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from typing import Any

from nbddp.grading.submissions import Broken, Cell, SubmittedStatement, mentioned, parsed
from nbddp.lessons.framework.answer import Wrong

TAKEN = "only imports, functions, classes and plain values are taken from a file"


class Handed:
    """Stands for what a learner's cells give `name`. A pickle of it is the learner's own object, made where it is
    loaded. is_class: whether that is a class."""

    def __init__(self, cells: Sequence[Cell], name: str, is_class: bool = False):
        self.cells = tuple((where, source) for where, source in cells)
        self.__name__, self.is_class = name, is_class

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{self.__name__} is a learner's function; only ranks may call it")

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return take, (self.cells, self.__name__)


def kind(cells: Sequence[Cell], name: str) -> tuple[str, str]:
    """What the cells make of `name` on this rank: ("class" or "function" or "other", ""), or ("", why it is nothing).

    A class is callable as a function is; "function" is anything else that is.
    """
    try:
        found = take(cells, name)
    except Wrong as wrong:
        return "", str(wrong)
    return "class" if isinstance(found, type) else "function" if callable(found) else "other", ""


def take(cells: Sequence[Cell], name: str) -> Any:
    """What `name` is when all cells have been run. Raises Wrong with the line for a learner if it is nothing.

    They are run anew for each call, as a function that travels from a notebook is a new one at every call.
    """
    parts, broken = _parsed(tuple(map(tuple, cells)))
    space, failed = _run(parts, name)
    if name in space:
        return space[name]
    reasons = [f"{b.where or 'the file'}: {b.why}" for b in broken if mentioned(b, name)]
    raise Wrong(failed.get(name) or next(iter(reasons), missing(name)))


def absent(cells: Sequence[Cell], name: str) -> str:
    """Why a name that an answer uses is not there though a cell gives it a value; empty if none does."""
    parts, _ = _parsed(tuple(map(tuple, cells)))
    _, failed = _run(parts, "")
    computed = next((p.where for p in parts if name in p.binds and not _plain(p.statement)), "")
    return failed.get(name) or (f"{computed} computes it, but {TAKEN}" if computed else "")


def missing(name: str, where: str = "") -> str:
    """The line for an answer that is nowhere; where: ` in a.ipynb, b.ipynb`."""
    return f"not handed in: no cell outside %%ddp defines {name}{where}"


@functools.lru_cache(maxsize=4)
def _parsed(cells: tuple[Cell, ...]) -> tuple[list[SubmittedStatement], list[Broken]]:
    return parsed(cells)


def _run(parts: Sequence[SubmittedStatement], wanted: str) -> tuple[dict[str, object], dict[str, str]]:
    """All that may be run, and what binds `wanted`, in the order of the cells: (names, name → why it has none)."""
    space: dict[str, object] = {"__name__": "__main__"}  # as a notebook's cells have it
    failed: dict[str, str] = {}
    for part in parts:
        if not (_plain(part.statement) or wanted in part.binds):
            continue
        try:
            exec(compile(ast.Module([part.statement], []), f"<{part.where}>", "exec"), space)
        except (Exception, SystemExit) as error:  # told if it is why a name that is asked for is not there
            why = f"{part.where} raised {type(error).__name__}: {_words(error)}"
            failed |= dict.fromkeys(part.binds, why)
    return space, failed


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as e:  # its class is the learner's
        return f"(its message cannot be shown: reading it raises {type(e).__name__})"


def _plain(statement: ast.stmt) -> bool:
    """Whether it may be run: it does nothing but give names their values, and calls nothing for that."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        return True
    return not any(isinstance(n, ast.Call | ast.Await) for n in ast.walk(statement))
