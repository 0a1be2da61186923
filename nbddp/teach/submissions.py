"""What a learner has handed in: a notebook or a Python file → the functions in it, without running the rest.

Of a notebook's cells only imports, definitions and plain assignments are taken, as a notebook's own cells would have
them when the functions are called; what a lesson does on ranks, draws or checks is not run. Cells under `%%ddp` belong
to the ranks and are left out. Pure: imports only the standard library and `nbddp.teach.answer`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbddp.teach.answer import Wrong

TIMING = ("%%time", "%%capture")  # magics whose cells run in the notebook
KEPT = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
TAKEN = "only imports, functions, classes and plain values are taken from a file"
LINE = re.compile(r"(?m)^([ \t]*)(?:[%!?].*|[\w.]+\?{1,2}\s*)$")


@dataclass(frozen=True)
class Part:
    """One statement; where: `cell 7` or `line 12`."""

    where: str
    statement: ast.stmt

    @property
    def binds(self) -> set[str]:
        """Names that it gives a value."""
        if isinstance(self.statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return {self.statement.name}
        if isinstance(self.statement, ast.Import | ast.ImportFrom):
            return {(a.asname or a.name).split(".")[0] for a in self.statement.names}
        return {n.id for n in ast.walk(self.statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


@dataclass(frozen=True)
class Submission:
    """One file. broken: what in it cannot be read: (where, why, the text). unread: why nothing in it can be."""

    path: Path
    parts: tuple[Part, ...]
    broken: tuple[tuple[str, str, str], ...]
    unread: str = ""

    def defines(self, names: Sequence[str]) -> list[str]:
        """Those of `names` that the file gives a value, or tries to in a cell that cannot be read."""
        bound = {n for p in self.parts for n in p.binds}
        tried = "\n".join(text for _, _, text in self.broken)
        return [n for n in names if n in bound or _mentions(tried, n)]

    def get(self, name: str) -> Any:
        """What `name` is when all cells have been run. Raises Wrong with the line for a learner if it is nothing."""
        if self.unread:
            raise Wrong(self.unread)
        space, failed = self._run(name)
        if name in space:
            return space[name]
        reasons = [f"{where}: {why}" for where, why, text in self.broken if _mentions(text, name)]
        raise Wrong(failed.get(name) or next(iter(reasons), f"not handed in: no cell outside %%ddp defines {name}"))

    def absent(self, name: str) -> str:
        """Why a name that an answer uses is not there though a cell gives it a value; empty if none does."""
        _, failed = self._run("")
        computed = next((p.where for p in self.parts if name in p.binds and not _plain(p.statement)), "")
        return failed.get(name) or (f"{computed} computes it, and {TAKEN}" if computed else "")

    def _run(self, wanted: str) -> tuple[dict[str, Any], dict[str, str]]:
        """All that may be run, and what binds `wanted`, in the order of the cells: (names, name → why it has none)."""
        space: dict[str, Any] = {"__name__": "__main__"}  # so that functions travel by value, as a notebook's do
        failed: dict[str, str] = {}
        for part in self.parts:
            if not (_plain(part.statement) or wanted in part.binds):
                continue
            try:
                exec(compile(ast.Module([part.statement], []), f"<{part.where}>", "exec"), space)
            except (Exception, SystemExit) as error:  # told if it is why a name that is asked for is not there
                why = f"{part.where} raised {type(error).__name__}: {error}"
                failed |= dict.fromkeys(part.binds, why)
        return space, failed


def unsent(path: Path, why: str) -> Submission:
    """What stands for a file of which nothing can be taken."""
    return Submission(path, (), (), why)


def _mentions(text: str, name: str) -> bool:
    return re.search(rf"\bdef {name}\b|^{name} *=", text, re.MULTILINE) is not None


def _plain(statement: ast.stmt) -> bool:
    """Whether it may be run: it does nothing but give names their values, and calls nothing for that."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        return True
    return not any(isinstance(n, ast.Call | ast.Await) for n in ast.walk(statement))


def read(path: Path) -> Submission:
    """A notebook (.ipynb) or a Python file (.py)."""
    parts: list[Part] = []
    broken: list[tuple[str, str, str]] = []
    try:
        cells = list(_cells(path))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError):
        kind = "notebook: it does not hold the JSON of one" if path.suffix == ".ipynb" else "text in UTF-8"
        return unsent(path, f"{path.name} is no {kind}")
    for where, text in cells:
        try:
            tree = _tree(text)
        except SyntaxError as error:
            broken.append((where, f"SyntaxError: {error.msg} (line {error.lineno})", text))
            continue
        for statement in tree.body:
            if isinstance(statement, KEPT):
                parts.append(Part(where or f"line {statement.lineno}", statement))
    return Submission(path, tuple(parts), tuple(broken))


def _cells(path: Path) -> Iterator[tuple[str, str]]:
    """(where, Python) of each cell that runs in the notebook; a Python file is one, without a name."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield "", text
        return
    for number, cell in enumerate(json.loads(text)["cells"], 1):
        source = "".join(cell["source"])
        if cell["cell_type"] != "code" or (source.startswith("%%") and not source.startswith(TIMING)):
            continue
        yield f"cell {number}", source


def _tree(text: str) -> ast.Module:
    """A cell's statements, magics among its lines left out. Raises SyntaxError."""
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.parse(LINE.sub(r"\1pass", text))
