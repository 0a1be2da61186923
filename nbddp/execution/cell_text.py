"""A cell's text before any rank sees it: is it there, does it compile, which line is which.

The magic line is kept as a comment, as are the rows above it. So line numbers are those of the cell as it stands in the
notebook. Pure: how IPython's own syntax becomes Python is handed in.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import NamedTuple

from nbddp.errors import BadInput, CellSyntaxError
from nbddp.protocol.codec import first_word, program_rows

AROUND = {"%%capture", "%%prun", "%%time", "%%timeit"}  # cell magics that run what is below them as a cell


class Parted(NamedTuple):
    """A `%%ddp` cell as it is written. top: which row its magic line is; line: what follows `%%ddp` there."""

    top: int
    line: str
    body: str


def parted(cell: str) -> Parted | None:
    """None if it is no `%%ddp` cell. Above the magic line may be empty rows, comments, and magics of AROUND."""
    rows = cell.split("\n")
    for top, row in enumerate(rows):
        magic, _, line = row.strip().partition(" ")
        if magic == "%%ddp":
            return Parted(top, line.strip(), "\n".join(rows[top + 1 :]))
        if magic and not magic.startswith("#") and magic not in AROUND:
            break
    return None


def has_program(body: str) -> bool:
    """Whether anything but comments is below the magic line."""
    return bool(program_rows(body))


def prepare(line: str, body: str, above: Sequence[str] = ()) -> str:
    """What the ranks run: the body under a comment line, or bare if it starts with a cell magic of its own. above: as
    `rows_above` gives it."""
    if body.lstrip().startswith("%%"):
        return body.lstrip()
    rows = [row if row.lstrip().startswith("#") else f"# {row}".rstrip() for row in (*above, f"%%ddp {line}")]
    return "\n".join([*rows, dedented(body)])


def rows_above(raw: str, body: str) -> list[str]:
    """Rows above the `%%ddp` line of a cell that runs, whatever they are; none if `body` is not that of `raw`."""
    return _head(raw, body)[:-1]


def headed(raw: str, line: str, body: str, text: str) -> str:
    """`text` in the place of the body of a cell that runs, below its `%%ddp` line and the rows above. Where `body` is
    not that of `raw`, its line is the one that IPython has handed on."""
    return "\n".join([*(_head(raw, body) or [f"%%ddp {line}".rstrip()]), text])


def _head(raw: str, body: str) -> list[str]:
    """Rows of a cell that runs, to its `%%ddp` line; none if `body` is not that of `raw`."""
    rows, own = raw.rstrip().splitlines(), body.rstrip().splitlines()
    at = len(rows) - len(own) - 1
    return rows[: at + 1] if at >= 0 and rows[at].startswith("%%ddp") and rows[at + 1 :] == own else []


def dedented(body: str) -> str:
    """As IPython has a cell whose first line is indented; below the comment it would not see that it is."""
    rows = body.splitlines(keepends=True)
    first = next((i for i, row in enumerate(rows) if row.strip()), 0)
    if not rows or not rows[first][0].isspace():
        return body
    from IPython.core.inputtransformer2 import leading_indent

    return "".join([*rows[:first], *leading_indent(rows[first:])])


def check(code: str, name: str, transform: Callable[[str], str], is_magic: Callable[[str], bool]) -> None:
    """Raise CellSyntaxError for a cell that no rank could compile.

    name: how the cell is shown, `Cell In[3]`.
    transform: IPython's syntax → Python's.
    is_magic: whether IPython takes a word for a magic's name where it is the first in a cell of one row, without its %.
    """
    try:
        compile(transform(code), name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as e:
        rows = program_rows(code)
        if len(rows) == 1 and is_magic(first_word(code.splitlines()[rows[0]])):
            return  # `cd ..`: what names the ranks have, they know
        raise _worded(e, name, code) from None


def refusal(line: str, instead: str = "") -> BadInput:
    """For a `%%ddp` line without a program that is not about the pool alone. instead: a command for what it asks."""
    return BadInput(
        f"the cell under {f'%%ddp {line}'.rstrip()} is empty; write the program below the line, or run "
        f"{instead or '%ddp start'}"
    )


def as_python(code: str) -> tuple[str, str] | None:
    """What IPython's syntax in a cell becomes, for all ranks at once: IPython's version and the text; None where that
    cannot be said. What a shell's own transformations make of it is not in it."""
    import IPython  # here: a script's launcher needs none
    from IPython.core.inputtransformer2 import TransformerManager

    try:
        return IPython.__version__, TransformerManager().transform_cell(code)
    except Exception:  # whatever it is, each rank meets it too, and reports it
        return None


def _worded(error: SyntaxError, name: str, code: str) -> CellSyntaxError:
    rows = code.splitlines()
    text = rows[error.lineno - 1] if error.lineno and error.lineno <= len(rows) else error.text or ""
    indent = len(text) - len(text.lstrip())
    pointer = " " * max(0, (error.offset or 1) - 1 - indent) + "^"
    return CellSyntaxError(
        f"{type(error).__name__}: {error.msg}", cell=name, line=error.lineno, text=text.strip(), pointer=pointer
    )
