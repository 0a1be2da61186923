"""The inputs of lint: files, notebooks, cells → programs, each with the place of its lines. Pure.

The `%%ddp` cells of a notebook run in one namespace, so they are one program. Its other cells are another, and a
`%%writefile` cell is a script. Rows of IPython's own syntax become `pass`.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tokenize
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nbddp.errors import BadInput
from nbddp.execution.cell_text import parted
from nbddp.protocol.codec import Json

SOME = re.compile(r"(^|\s)--ranks\b")
WRITES = re.compile(r"%%(writefile|file)\s+(?:-a\s+)?(\S+\.py)")
SKIPPED = {"__pycache__", ".git", ".venv", "venv", "node_modules", ".ipynb_checkpoints", "site-packages"}
IPYTHON = re.compile(r"(\s*)(?:[%!].*|\?.*|.*\?\s*)$")
ASSIGNED = re.compile(r"(\s*[\w.,\s]+=\s*)[%!].*$")


@dataclass(frozen=True)
class SourceLine:
    """A line of a file, or of a cell, which is named `cell 3` or `In[3]`. text: the line."""

    file: str
    cell: str
    line: int
    text: str


@dataclass
class ProgramText:
    """A program. kind: `script`, `ranks` for `%%ddp` cells, `kernel` for other cells. starts: the first row of each
    cell; some_ranks: the rows of cells that some ranks run."""

    kind: str
    rows: list[str] = field(default_factory=list)
    places: list[SourceLine] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    some_ranks: set[int] = field(default_factory=set)

    def add(self, file: str, cell: str, text: str, first: int = 1, some_ranks: bool = False) -> None:
        """first: the line of the cell, or of the file, at which the text begins."""
        own = text.split("\n")
        rows = own if self.kind == "script" else python_rows(own)
        self.starts.append(len(self.rows) + 1)
        for i, row in enumerate(rows):
            self.rows.append(row)
            self.places.append(SourceLine(file, cell, first + i, own[i]))
            if some_ranks:
                self.some_ranks.add(len(self.rows))

    def tree(self) -> ast.Module:
        """Raises BadInput where this is not Python."""
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        try:
            return ast.parse("\n".join(self.rows) + "\n")
        except SyntaxError as e:
            at = min(max((e.lineno or 1) - 1, 0), len(self.places) - 1) if self.places else -1
            where = described(self.places[at]) if at >= 0 else "it"
            raise BadInput(f"{where}: Python {version} cannot read it ({e.msg})") from None
        except (ValueError, RecursionError, MemoryError) as e:
            where = self.places[0].file if self.places else "it"
            raise BadInput(f"{where}: Python {version} cannot read it ({e})") from None


@dataclass(frozen=True)
class Cell:
    """label: `cell 3` or `In[3]`; empty for one of a script. first: its first line there."""

    label: str
    text: str
    first: int = 1


def described(place: SourceLine) -> str:
    return ", ".join([*(part for part in (place.file, place.cell) if part), f"line {place.line}"])


def of_script(text: str, name: str) -> list[ProgramText]:
    """One program; or the cells of a notebook as text, whose `# %%ddp` rows are magics."""
    text = text.replace("\r\n", "\n").replace("\f", " ")
    if re.search(r"^# %%ddp\b", text, re.MULTILINE):
        return of_cells(_marked_cells(text), name)
    source = ProgramText("script")
    source.add(name, "", text)
    return [source]


def _marked_cells(text: str) -> Iterable[Cell]:
    """The code between `# %%` rows, with magics that are no comments any more."""
    rows = text.split("\n")
    starts = [i for i, row in enumerate(rows) if re.match(r"# %%($|\s)", row)]
    for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
        if "[markdown]" not in rows[start] and "[raw]" not in rows[start]:
            own = [re.sub(r"^# (%|!)", r"\1", row) for row in rows[start + 1 : end]]
            yield Cell("", "\n".join(own), start + 2)


def of_cells(cells: Iterable[Cell], name: str = "") -> list[ProgramText]:
    """The `%%ddp` cells as one program, the others as another, and each script that a cell writes."""
    ranks, kernel, scripts = ProgramText("ranks"), ProgramText("kernel"), []
    for cell in cells:
        own = parted(cell.text)
        written = WRITES.match(cell.text.lstrip())
        if own is not None:
            ranks.add(name, cell.label, own.body, cell.first + own.top + 1, bool(SOME.search(own.line)))
        elif written:
            scripts.append(ProgramText("script"))
            scripts[-1].add(
                f"{name}:{written[2]}" if name else written[2], cell.label, cell.text.partition("\n")[2], cell.first + 1
            )
        elif not _is_other_language(cell.text):
            kernel.add(name, cell.label, cell.text, cell.first)
    return [source for source in (ranks, kernel, *scripts) if source.rows]


def _is_other_language(text: str) -> bool:
    first = next((row for row in text.split("\n") if row.strip()), "")
    return first.startswith("%%") and not first.startswith(("%%time", "%%capture", "%%prun"))


def python_rows(rows: Sequence[str]) -> list[str]:
    """The rows of a cell as Python. A cell that cannot be parsed is left out: its rows become comments."""
    for change in (lambda row: row, _plain_row):
        changed = _dedented([change(row) for row in rows])
        try:
            ast.parse("\n".join(changed) + "\n")
            return changed
        except (SyntaxError, ValueError):
            continue
    return [f"# {row}" for row in rows]


def _plain_row(row: str) -> str:
    assigned = ASSIGNED.match(row)
    if assigned:
        return f"{assigned[1]}None"
    magic = IPYTHON.match(row)
    return f"{magic[1]}pass" if magic and not row.lstrip().startswith("#") else row


def _dedented(rows: list[str]) -> list[str]:
    """As IPython has a cell whose first line is indented."""
    first = next((row for row in rows if row.strip()), "")
    indent = first[: len(first) - len(first.lstrip())]
    return [row.removeprefix(indent) for row in rows] if indent else rows


def of_notebook(text: str, name: str) -> list[ProgramText]:
    try:
        notebook: Json = json.loads(text)
    except ValueError:
        raise BadInput(f"{name!r} is not a notebook; name a file such as training.ipynb") from None
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list) or not all(isinstance(one, dict) for one in cells):
        raise BadInput(f"{name!r} is not in notebook format 4; open it in Jupyter and save it")
    code = [
        Cell(f"cell {i}", "".join(cell.get("source", ())))
        for i, cell in enumerate(cells, 1) if cell.get("cell_type") == "code"
    ]  # fmt: skip
    return of_cells(code, name)


def files_of(name: str) -> list[Path]:
    """A file, or the scripts and notebooks of a folder. Raises BadInput if it is neither."""
    path = Path(name).expanduser()
    if path.is_dir():
        found = [one for ending in ("*.py", "*.ipynb") for one in path.rglob(ending)]
        found = sorted(one for one in found if not SKIPPED & {*one.relative_to(path).parts})
        if not found:
            raise BadInput(f"{name!r} has no .py and no .ipynb file; name a script or a notebook")
        return found
    if not path.exists():
        raise BadInput(f"there is no file {name!r}; name a script, a notebook or a folder")
    return [path]


def of_file(path: Path, name: str) -> list[ProgramText]:
    """Raises BadInput if it cannot be read."""
    try:
        if path.suffix == ".ipynb":
            return of_notebook(path.read_text(encoding="utf-8-sig"), name)
        with tokenize.open(path) as file:
            return of_script(file.read(), name)
    except (OSError, UnicodeDecodeError, SyntaxError) as e:
        raise BadInput(f"{name} cannot be read: {getattr(e, 'strerror', None) or 'it is not UTF-8'}") from None
