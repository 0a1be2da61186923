"""A lesson's source → the notebook that a learner opens, and the solved one.

    python notebooks/build.py            all lessons
    python notebooks/build.py 02 03      these
    python notebooks/build.py --source   without running them
    python notebooks/build.py --text     without running them; outputs stay where no code has changed

`source/NN-name.py` is a notebook in jupytext's percent format, which JupyterLab and VS Code open as a notebook too.
Magics are comments in it: `# %load_ext nbddp`, `# %%ddp --nproc 4`. Tags of its cells:

    # %% tags=["exercise"]           a function to be written; the solved notebook does not have this cell
    # %% tags=["solution"]           in the solved notebook it takes the place of the exercise; the learner's has it as
                                     text that is folded away, so that running all cells does not run it
    # %% tags=["prediction"]         a question that the learner answers before the next cell shows the answer
    # %% tags=["hidden"]             its code is folded away in both notebooks
    # %% tags=["raises-exception"]   tags of nbval and nbclient

The first code cell of both loads nbddp, and installs it first where it is missing; that is no part of the source.

The learner's notebook has no outputs, so that nothing is given away. The solved one is run and keeps them, for
readers; below each question it has the answer and its reason, folded, in place of the advice how to answer. They hold
no times, no versions and no ids of widgets, so that the same source gives the same file.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from nbddp.figures.html import words_of
from nbddp.lessons.framework import folders, prompt
from nbddp.lessons.framework.question import Question, questions

HERE = Path(__file__).parent
SOURCE, SOLUTIONS = HERE / "source", HERE / "solutions"
CELL_TIMEOUT = 90  # seconds
EXERCISE, SOLUTION, PREDICTION, HIDDEN = "exercise", "solution", "prediction", "hidden"
ANSWER = "answer"  # of the cells below questions, which are made here
THEIRS = ("nbval-ignore-output", "nbval-skip", "raises-exception")  # tags that nbval and nbclient read
TAGS = (EXERCISE, SOLUTION, PREDICTION, HIDDEN, *THEIRS)
WIDGET = "application/vnd.jupyter.widget-view+json"
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
}
# Colab and Kaggle have no nbddp. %pip would advise to restart the kernel
INSTALL = """\
from importlib import invalidate_caches, util

if util.find_spec("nbddp") is None:  # on Colab and Kaggle
    import subprocess
    import sys

    where = "git+https://github.com/nbddp/nbddp"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", where], check=True)
    invalidate_caches()
"""
FOLDED = "<details>\n<summary><b>Solution</b> (when you have tried)</summary>\n\n```python\n{}\n```\n\n</details>"
ASKED = re.compile(r"predict\.(\w+)\(\)")
ANSWERED = "<details>\n<summary><b>Answer</b>: {asks}</summary>\n\n<b>{came}</b>. {because}\n\n</details>"
BELOW = "The next output shows it."  # where a question has no reason of its own


@dataclass(frozen=True)
class Cell:
    """One cell of a source: `kind` is "markdown", "code", "exercise", "solution" or "prediction"."""

    kind: str
    text: str
    tags: tuple[str, ...] = ()


class BadSource(ValueError):
    """A source that gives no lesson, and why."""


def parse(text: str) -> list[Cell]:
    """The cells of a source. Raises BadSource for what is no cell."""
    first = text.partition("\n")[0]
    if text and not first.startswith("# %%"):
        raise BadSource(f"the first line must begin a cell, # %% or # %% [markdown], not {first!r}")
    cells = [_cell(cell) for cell in jupytext.reads(text, fmt="py:percent").cells]
    _check_pairs(cells)
    return cells


def _cell(made: Any) -> Cell:
    """A cell as jupytext has read it. Words in its header that are no tags are its title there."""
    tags = tuple(made.metadata.get("tags", ()))
    if "title" in made.metadata:
        raise BadSource(f'# %% {made.metadata["title"]}: a header has [markdown] and tags=["..."] and no more')
    for tag in tags:
        if tag not in TAGS:
            raise BadSource(f"tag {tag!r} is none of {', '.join(TAGS)}")
    kinds = [tag for tag in (EXERCISE, SOLUTION, PREDICTION) if tag in tags]
    if len(kinds) > 1:
        raise BadSource(f"a cell has one of the tags {', '.join(kinds)}")
    return Cell(kinds[0] if kinds else made.cell_type, made.source, tags)


def _check_pairs(cells: Iterable[Cell]) -> None:
    """Every exercise is followed by its solution before the next exercise comes."""
    waiting = False
    for cell in cells:
        if cell.kind in (EXERCISE, SOLUTION):
            if waiting == (cell.kind == EXERCISE):
                raise BadSource("exercises and solutions come in pairs: an exercise, later its solution")
            waiting = not waiting
    if waiting:
        raise BadSource("the last exercise has no solution")


def html(text: str) -> str:
    """Text with `code` for a summary, in which Markdown is not read."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))


def learners(cells: Sequence[Cell]) -> list[Cell]:
    """The cells a learner gets: the unfinished functions, the solutions as folded text."""
    return [Cell("markdown", FOLDED.format(c.text), c.tags) if c.kind == SOLUTION else c for c in cells]


def solved(cells: Sequence[Cell]) -> list[Cell]:
    """The cells with each solution in its exercise's place, and answers below their questions."""
    written = iter([c for c in cells if c.kind == SOLUTION])
    found: list[Cell] = []
    for cell in cells:
        if cell.kind != SOLUTION:
            found.append(next(written) if cell.kind == EXERCISE else cell)
        if cell.kind == PREDICTION and (text := answers(cell.text)):
            found.append(Cell("markdown", text, (ANSWER,)))
    return found


@cache
def known() -> dict[str, Question]:
    """The questions of all lessons by their names."""
    paths = [folder / "predictions.ini" for folder in folders.lessons()]
    return {question.name: question for path in paths if path.exists() for question in questions(path)}


def answers(code: str) -> str:
    """The answers to a cell's questions, each folded. Raises BadSource for a question that is not there."""
    names = ASKED.findall(code)
    if unknown := [name for name in names if name not in known() and name != "summary"]:
        raise BadSource(f"no predictions.ini has the question {unknown[0]}")
    return "\n\n".join(
        ANSWERED.format(asks=html(q.asks), came=html(q.came), because=q.because or BELOW)
        for q in (known()[name] for name in names if name in known())
    )


def solutions(cells: Sequence[Cell]) -> list[str]:
    """The source of each solution, in order; for tests of the checks."""
    return [c.text for c in cells if c.kind == "solution"]


def exercises(cells: Sequence[Cell]) -> list[str]:
    """The source of each unfinished function, in order."""
    return [c.text for c in cells if c.kind == "exercise"]


def notebook(cells: Sequence[Cell]) -> nbformat.NotebookNode:
    """A notebook of these cells, without outputs. Its first code cell installs what is missing."""
    book = new_notebook(metadata=METADATA)
    number = -1
    for cell in cells:
        make = new_markdown_cell if cell.kind == "markdown" else new_code_cell
        number += ANSWER not in cell.tags  # so that all other cells have the same id in both notebooks
        name = f"c{number:02d}{'-answer' if ANSWER in cell.tags else ''}"
        book.cells.append(make(cell.text, id=name, metadata=_metadata(cell.tags)))
    install(book)
    return book


def install(book: nbformat.NotebookNode) -> None:
    """Put INSTALL above the first code cell's lines, which load nbddp; nbval does not compare what that cell shows."""
    cell = next((c for c in book.cells if c.cell_type == "code"), None)
    if cell is not None and "%load_ext nbddp" in cell.source.splitlines():
        cell.source = f"{INSTALL}\n{cell.source}"
        cell.metadata["tags"] = [*cell.metadata.get("tags", ()), "nbval-ignore-output"]


def _metadata(tags: Sequence[str]) -> dict[str, Any]:
    if PREDICTION in tags:
        tags = [*tags, "nbval-ignore-output"]  # a live notebook has a widget there, a saved one its words
    metadata: dict[str, Any] = {"tags": list(tags)} if tags else {}
    if HIDDEN in tags:
        metadata["jupyter"] = {"source_hidden": True}  # JupyterLab, Notebook 7 and Colab fold the cell's code
    return metadata


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
    """Take out what changes from run to run: widgets' ids, versions. Their still pictures stay, and bare questions."""
    book.metadata = nbformat.from_dict(METADATA)
    for cell in book.cells:
        for output in cell.get("outputs", ()):
            if PREDICTION in cell.metadata.get("tags", ()) and "text/html" in output.get("data", {}):
                output.data["text/plain"] = asked(output.data["text/plain"])
                output.data["text/html"] = words_of(output.data["text/plain"])
            output.get("data", {}).pop(WIDGET, None)
            output.get("metadata", {}).pop(WIDGET, None)


def asked(text: str) -> str:
    """A question without the advice for a learner who did not answer it: a reader has the answer below it."""
    return "\n".join(line for line in text.splitlines() if line != prompt.OPEN and not line.startswith("To answer: "))


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


def keep(book: nbformat.NotebookNode, before: nbformat.NotebookNode) -> None:
    """Take the outputs of an earlier notebook with the same code. Raises BadSource if a cell's code has changed."""
    code, earlier = ([c for c in each.cells if c.cell_type == "code"] for each in (book, before))
    if [c.source for c in code] != [c.source for c in earlier]:
        raise BadSource("code has changed, so its outputs would be wrong; run it without --text")
    for cell, old in zip(code, earlier, strict=True):
        cell.outputs, cell.execution_count = old.outputs, old.execution_count


def build(source: Path, execute: bool = True, text_only: bool = False) -> None:
    """Write both notebooks of a lesson."""
    cells = parse(source.read_text(encoding="utf-8"))
    learner, reader = places(source)
    write(notebook(learners(cells)), learner)
    book = notebook(solved(cells))
    if text_only:
        keep(book, nbformat.read(reader, 4))
    elif execute:
        run(book, reader.parent)
    write(book, reader)


def write(book: nbformat.NotebookNode, place: Path) -> None:
    nbformat.validate(book)
    nbformat.write(book, place)
    print(place.relative_to(HERE))


def main(words: Sequence[str]) -> None:
    for source in named([w for w in words if not w.startswith("--")]):
        build(source, execute="--source" not in words, text_only="--text" in words)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BadSource as error:
        sys.exit(str(error))
