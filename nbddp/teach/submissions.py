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
        return {n.id for n in ast.walk(self.statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


@dataclass(frozen=True)
class Submission:
    """One file. broken: what in it cannot be read: (where, why, the text)."""

    path: Path
    parts: tuple[Part, ...]
    broken: tuple[tuple[str, str, str], ...]

    def defines(self, names: Sequence[str]) -> list[str]:
        """Those of `names` that the file gives a value, or tries to in a cell that cannot be read."""
        bound = {n for p in self.parts for n in p.binds}
        tried = "\n".join(text for _, _, text in self.broken)
        return [n for n in names if n in bound or _mentions(tried, n)]

    def get(self, name: str) -> Any:
        """What `name` is when all cells have been run. Raises Wrong with the line for a learner if it is nothing."""
        space: dict[str, Any] = {"__name__": "__main__"}  # so that functions travel by value, as a notebook's do
        failed = ""
        for part in self.parts:
            if not (_plain(part.statement) or name in part.binds):
                continue
            try:
                exec(compile(ast.Module([part.statement], []), f"<{part.where}>", "exec"), space)
            except Exception as error:  # told below if it is why the name is not there
                failed = f"{part.where} raised {type(error).__name__}: {error}" if name in part.binds else failed
        if name in space:
            return space[name]
        reasons = [f"{where}: {why}" for where, why, text in self.broken if _mentions(text, name)]
        raise Wrong(failed or next(iter(reasons), f"not handed in: no cell outside %%ddp defines {name}"))


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
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        return Submission(path, (), (("the file", f"cannot be read: {type(error).__name__}", ""),))
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
