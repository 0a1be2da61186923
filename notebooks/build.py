"""A lesson's source → the notebook that a learner opens, and the solved one.

    python notebooks/build.py            all lessons
    python notebooks/build.py 02 03      these
    python notebooks/build.py --source   without running them (outputs are left out)

`source/NN-name.py` is a Python file in the percent format. A line `# %%` begins a cell of code, `# %% [markdown]` one
of text (its lines begin with `# `). Lines that are magics in a notebook are comments here: `# %load_ext nbddp`,
`# %%ddp --nproc 4`. Also:

    # %% exercise                   a function to be written; the solved notebook does not have this cell
    # %% solution                   in the solved notebook it stands where the exercise was; the learner's has it as
                                    text that is folded away, so that running all cells does not run it
    # %% tags=raises-exception,x    tags of nbval and nbclient

Both notebooks are run and keep their outputs. They hold no times, no versions and no ids of widgets, so that the same
source gives the same file.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

HERE = Path(__file__).parent
SOURCE, SOLUTIONS = HERE / "source", HERE / "solutions"
CELL_TIMEOUT = 90  # seconds
HEADER = re.compile(r"# %%(?:\s+(?P<words>.*))?$")
MAGIC = re.compile(r"^# (%{1,2}[a-z].*)$")
WIDGET = "application/vnd.jupyter.widget-view+json"
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
}
FOLDED = "<details>\n<summary><b>Solution</b> (when you have tried)</summary>\n\n```python\n{}\n```\n\n</details>"


@dataclass(frozen=True)
class Cell:
    """One cell of a source: `kind` is "markdown", "code", "exercise" or "solution"."""

    kind: str
    text: str
    tags: tuple[str, ...] = ()


class BadSource(ValueError):
    """A source that gives no lesson, and why."""


def parse(text: str) -> list[Cell]:
    """The cells of a source. Raises BadSource for what is no cell."""
    lines = text.splitlines()
    if lines and not HEADER.match(lines[0]):
        raise BadSource(f"the first line must begin a cell, # %% or # %% [markdown], not {lines[0]!r}")
    parts: list[tuple[str, list[str]]] = []
    for line in lines:
        header = HEADER.match(line)
        if header:
            parts.append((header["words"] or "", []))
        else:
            parts[-1][1].append(line)
    cells = [_cell(words, body) for words, body in parts]
    _check_pairs(cells)
    return cells


def _cell(words: str, body: Sequence[str]) -> Cell:
    kind, tags = "code", ()
    for word in words.split():
        if word.startswith("tags="):
            tags = tuple(word.removeprefix("tags=").split(","))
        elif word in ("[markdown]", "exercise", "solution"):
            kind = word.strip("[]")
        else:
            raise BadSource(f"# %% {words}: {word!r} is none of [markdown], exercise, solution, tags=...")
    lines = [_text_line(line) for line in body] if kind == "markdown" else [MAGIC.sub(r"\1", line) for line in body]
    return Cell(kind, "\n".join(lines).strip("\n"), tags)


def _text_line(line: str) -> str:
    if line and not line.startswith("#"):
        raise BadSource(f"a line of a markdown cell begins with '# ', not {line!r}")
    return line.removeprefix("#").removeprefix(" ")


def _check_pairs(cells: Iterable[Cell]) -> None:
    """Every exercise is followed by its solution before the next exercise comes."""
    waiting = False
    for cell in cells:
        if cell.kind in ("exercise", "solution"):
            if waiting == (cell.kind == "exercise"):
                raise BadSource("exercises and solutions come in pairs: # %% exercise, later its # %% solution")
            waiting = not waiting
    if waiting:
        raise BadSource("the last exercise has no # %% solution")


def learners(cells: Sequence[Cell]) -> list[Cell]:
    """The cells a learner gets: the unfinished functions, the solutions as folded text."""
    return [Cell("markdown", FOLDED.format(c.text), c.tags) if c.kind == "solution" else c for c in cells]


def solved(cells: Sequence[Cell]) -> list[Cell]:
    """The cells with each solution in its exercise's place."""
    answers = iter([c for c in cells if c.kind == "solution"])
    return [next(answers) if c.kind == "exercise" else c for c in cells if c.kind != "solution"]


def solutions(cells: Sequence[Cell]) -> list[str]:
    """The source of each solution, in order; for tests of the checks."""
    return [c.text for c in cells if c.kind == "solution"]


def exercises(cells: Sequence[Cell]) -> list[str]:
    """The source of each unfinished function, in order."""
    return [c.text for c in cells if c.kind == "exercise"]


def notebook(cells: Sequence[Cell]) -> nbformat.NotebookNode:
    """A notebook of these cells, without outputs."""
    book = new_notebook(metadata=METADATA)
    for i, cell in enumerate(cells):
        make = new_markdown_cell if cell.kind == "markdown" else new_code_cell
        metadata = {"tags": list(cell.tags)} if cell.tags else {}
        book.cells.append(make(cell.text, id=f"c{i:02d}", metadata=metadata))
    return book


def run(book: nbformat.NotebookNode, folder: Path) -> None:
    """Run all cells in `folder`, and keep of the outputs what is the same in every run."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}  # as a notebook has it
    client = NotebookClient(
        book, timeout=CELL_TIMEOUT, kernel_name="python3", resources={"metadata": {"path": str(folder)}},
        record_timing=False, store_widget_state=False,
    )  # fmt: skip
    client.execute(env=environ)
    tidy(book)


def tidy(book: nbformat.NotebookNode) -> None:
    """Take out what changes from run to run: widgets' ids, versions. Their still pictures stay."""
    book.metadata = nbformat.from_dict(METADATA)
    for cell in book.cells:
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop(WIDGET, None)
            output.get("metadata", {}).pop(WIDGET, None)


def named(words: Sequence[str]) -> list[Path]:
    """The sources that are meant by numbers or names; all for none. Raises BadSource for one that is not there."""
    found = sorted(SOURCE.glob("*.py"))
    for word in words:
        if not any(path.name.startswith(word) for path in found):
            raise BadSource(f"no lesson begins with {word}; there are {', '.join(p.stem for p in found)}")
    return [p for p in found if not words or any(p.name.startswith(w) for w in words)]


def places(source: Path) -> tuple[Path, Path]:
    """Where the learner's and the solved notebook of a source are."""
    return HERE / f"{source.stem}.ipynb", SOLUTIONS / f"{source.stem}.ipynb"


def build(source: Path, execute: bool = True) -> None:
    """Write both notebooks of a lesson."""
    cells = parse(source.read_text(encoding="utf-8"))
    for made, place in zip((learners(cells), solved(cells)), places(source), strict=True):
        book = notebook(made)
        if execute:
            run(book, place.parent)
        nbformat.validate(book)
        nbformat.write(book, place)
        print(place.relative_to(HERE))


def main(words: Sequence[str]) -> None:
    for source in named([w for w in words if w != "--source"]):
        build(source, execute="--source" not in words)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BadSource as error:
        sys.exit(str(error))
