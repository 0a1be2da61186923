"""Every text that a user may read, on one page, to be read as a copy editor would: `python -m tests.looks.words`.

For each file of the package: the docstrings of what `nbddp` exports, then, by line, every string that is more than one
word and is neither another docstring nor made for a machine. Fields of an f-string are shown as {name}.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import nbddp

PACKAGE = Path(nbddp.__file__).parent
CODE = ("\n    ", "import ", "def ", "lambda ", "__import__")  # what a string of Python has
PUBLIC = ("__init__.py", "errors.py", "pool/pool.py", "export/", "teach/", "front/")


def text_of(node: ast.expr) -> str:
    """The string of a constant or an f-string; empty for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (v.value if isinstance(v, ast.Constant) else f"{{{_name(v)}}}" for v in node.values)
        return "".join(map(str, parts))
    return ""


def _name(value: ast.expr) -> str:
    inner = value.value if isinstance(value, ast.FormattedValue) else value
    said = ast.unparse(inner)
    return said if len(said) <= 24 else "…"


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each string that is no docstring; an f-string's parts are not told again."""
    docs = {id(n.body[0].value) for n in ast.walk(tree)
            if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            and n.body and isinstance(n.body[0], ast.Expr)}  # fmt: skip
    inside = {id(part) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for part in ast.walk(n) if part is not n}
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and id(node) not in docs | inside:
            text = text_of(node)
            if " " in text.strip() and not any(mark in text for mark in CODE):
                yield node.lineno, text


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Those of public classes and functions."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            said = ast.get_docstring(node)
            if said:
                yield node.lineno, f"{node.name}: {said}"


def page() -> Iterator[str]:
    """The page, line by line."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found = sorted(strings(tree))
        if name.startswith(PUBLIC):
            found = [*sorted(docstrings(tree)), *found]
        if found:
            yield f"\n== {name}"
            yield from (f"{line:>5}  {text}" for line, text in found)


if __name__ == "__main__":
    sys.stdout.write("\n".join([*page(), ""]))
