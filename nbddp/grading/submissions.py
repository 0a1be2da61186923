"""A learner's submission: a notebook or a Python file → the text of the cells that may define answers.

Nothing is run. Cells under `%%ddp` belong to the ranks and are left out; of the others `grading.definitions` takes the
functions, on a rank. Parsing itself can take a process down (deep nesting), so `grade` has it done in one of its
own (`grading.reader`). Pure: imports only the standard library.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

TIMING = ("%%time", "%%capture")  # magics whose cells run in the notebook
KEPT = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
LINE = re.compile(r"(?m)^([ \t]*)(?:[%!?].*|[\w.]+\?{1,2}\s*)$")
LARGEST = 1 << 20  # characters of code in a file
UNPARSED = (SyntaxError, RecursionError, MemoryError, ValueError)  # ValueError: null bytes, lone surrogates

Cell = tuple[str, str]  # (where, source); where: `cell 7`, or empty for the whole of a Python file


@dataclass(frozen=True)
class SubmittedStatement:
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
class Broken:
    """A cell that is no Python, and why."""

    where: str
    why: str
    text: str


def cells_of(suffix: str, text: str) -> list[Cell]:
    """The cells of a file that run in the notebook; a Python file is one. Raises ValueError for a file that is not a
    notebook."""
    if suffix == ".py":
        return [("", text)]
    try:
        return list(_notebooks_cells(json.loads(text)))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("no notebook") from error


def _notebooks_cells(book: dict[str, list[dict[str, str]]]) -> Iterator[Cell]:
    for number, cell in enumerate(book["cells"], 1):
        source = "".join(cell["source"])
        if cell["cell_type"] != "code" or (source.startswith("%%") and not source.startswith(TIMING)):
            continue
        yield f"cell {number}", source


def parsed(cells: Sequence[Cell]) -> tuple[list[SubmittedStatement], list[Broken]]:
    """The statements of cells that may be taken, and what in them is no Python."""
    parts: list[SubmittedStatement] = []
    broken: list[Broken] = []
    for where, text in cells:
        try:
            tree = _tree(text)
        except UNPARSED as error:
            broken.append(Broken(where, _why(error), text))
            continue
        for statement in tree.body:
            if isinstance(statement, KEPT):
                parts.append(SubmittedStatement(where or f"line {statement.lineno}", statement))
    return parts, broken


def _tree(text: str) -> ast.Module:
    """A cell's statements, magics among its lines left out. Raises what ast.parse does."""
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.parse(LINE.sub(r"\1pass", text))


def _why(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg}{f' (line {error.lineno})' if error.lineno else ''}"
    if isinstance(error, RecursionError | MemoryError):
        return "it is nested too deeply to be read"
    return f"it cannot be read as Python: {error}"


def mentioned(broken: Broken, name: str) -> bool:
    """Whether a cell that cannot be read tries to give `name` a value."""
    return re.search(rf"\bdef {name}\b|^{name} *=", broken.text, re.MULTILINE) is not None


def defined(cells: Sequence[Cell], names: Sequence[str]) -> list[str]:
    """Those of `names` that the cells give a value, or try to in a cell that cannot be read."""
    parts, broken = parsed(cells)
    bound = {n for p in parts for n in p.binds}
    return [n for n in names if n in bound or any(mentioned(b, n) for b in broken)]


def outline(name: str, suffix: str, text: str, names: Sequence[str]) -> dict[str, object]:
    """`cells` of the file `name`, those of `names` that it `defines`, and why nothing in it can be read (`unread`)."""
    nothing: dict[str, object] = {"cells": [], "defines": []}
    try:
        cells = cells_of(suffix, text)
    except ValueError:
        return {**nothing, "unread": f"{name} is not a notebook: it does not contain notebook JSON"}
    if sum(len(source) for _, source in cells) > LARGEST:
        return {**nothing, "unread": f"{name} has more than {LARGEST} characters of code; no lesson has that many"}
    return {"cells": cells, "defines": defined(cells, names), "unread": ""}
