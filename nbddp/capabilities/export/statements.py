"""The text of a cell → its top-level statements, each with its own text, comments and indentation kept.

Lines of IPython (`%magic`, `!command`, `name?`) are left out with a comment. Pure: text, ast and tokenize.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

from nbddp.errors import BadInput
from nbddp.execution.cell_text import AROUND, dedented

MAGIC = re.compile(r"\s*(%|!|\?)|.*\?\s*$|\s*[\w.,\[\]'\" ]+=\s*[%!]")
TRANSPARENT = AROUND - {"%%timeit"}  # cell magics whose body is the program's
LEFT_OUT = "# left out: "
STRINGS = {"FSTRING_START": 1, "FSTRING_END": -1, "TSTRING_START": 1, "TSTRING_END": -1}


@dataclass(frozen=True)
class Statement:
    """A statement and its text as it stands in the cell, without its first line's indentation; `before`: the comment
    lines above it."""

    node: ast.stmt
    text: str
    before: str = ""


def python(body: str, label: str) -> tuple[str, list[str]]:
    """The cell without IPython's lines, and those. Raises BadInput for what is no Python otherwise."""
    rows = dedented(body).splitlines()
    gone: list[str] = []
    first = next((i for i, row in enumerate(rows) if row.strip() and not row.lstrip().startswith("#")), None)
    if first is not None and rows[first].lstrip().startswith("%%"):
        magic = rows[first].strip()
        if magic.split()[0] not in TRANSPARENT:
            return "".join(f"{LEFT_OUT}{row}\n" for row in rows), [magic]
        rows[first] = f"{LEFT_OUT}{magic}"
        gone.append(magic)
    for _ in range(len(rows) + 1):
        try:
            ast.parse("\n".join(rows))
            break
        except SyntaxError as error:
            number = (error.lineno or 0) - 1
            if not 0 <= number < len(rows) or not MAGIC.match(rows[number]) or LEFT_OUT in rows[number]:
                text = rows[number].strip() if 0 <= number < len(rows) else ""
                raise BadInput(f"cell {label} is not Python that a script can have: {error.msg} at {text!r}") from None
            row = rows[number]
            indent = row[: len(row) - len(row.lstrip())]
            gone.append(row.strip())
            rows[number] = f"{indent}{'pass  ' * bool(indent)}{LEFT_OUT}{row.strip()}"
    return "\n".join(rows) + "\n", gone


def statements(text: str, label: str) -> tuple[list[Statement], str]:
    """The top-level statements of Python text, and the comments behind the last. Raises BadInput for an await that is
    in no function."""
    try:
        compile(text, label, "exec", dont_inherit=True)
    except SyntaxError as error:
        hint = "; put it into an async function, and call asyncio.run" if "await" in (error.msg or "") else ""
        raise BadInput(f"cell {label} cannot be part of a script: {error.msg}{hint}") from None
    rows = text.splitlines()
    found, row = [], 1
    for node in ast.parse(text).body:
        begin = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        own = _between(rows, (begin, 0 if begin < node.lineno else node.col_offset), node)
        found.append(Statement(node, own, _comments(rows[row - 1 : begin - 1])))
        row = max(row, (node.end_lineno or node.lineno) + 1)
    return found, _comments(rows[row - 1 :])


def _between(rows: list[str], begin: tuple[int, int], node: ast.stmt) -> str:
    """The statement's text, with a comment behind it on its last line. Columns count bytes, as ast has them."""
    last, end = node.end_lineno or node.lineno, node.end_col_offset or 0
    lines = [row.encode() for row in rows[begin[0] - 1 : last]]
    tail = lines[-1][end:].decode()
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin[1] :]
    comment = f"  {tail.strip()}" if tail.strip().startswith("#") else ""
    return b"\n".join(lines).decode() + comment


def _comments(rows: list[str]) -> str:
    return "\n".join(row.strip() for row in rows if row.strip().startswith("#"))


def indented(text: str, depth: int) -> str:
    """The text, four columns per `depth` further in; lines that begin within a string stay as they are."""
    kept = set(_in_strings(text))
    pad = " " * 4 * depth
    rows = text.split("\n")
    return "\n".join(pad + row if row.strip() and i not in kept else row for i, row in enumerate(rows, 1))


def _in_strings(text: str) -> Iterator[int]:
    """Numbers of the lines that begin within a string."""
    opened: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        step = STRINGS.get(tokenize.tok_name[token.type], 0)
        if token.type == tokenize.STRING:
            yield from range(token.start[0] + 1, token.end[0] + 1)
        elif step > 0:
            opened.append(token.start[0])
        elif step < 0:
            yield from range(opened.pop() + 1, token.end[0] + 1)
