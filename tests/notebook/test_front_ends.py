"""Lessons where no front end is: `jupyter execute` runs them all, and a kernel without ipywidgets shows all explorers.

Here the solved notebooks run: they have all cells of the learner's but the unfinished functions, and their checks go
all the way. Their saved outputs are compared word for word in test_notebooks.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.kernels import Kernel
from tests.lessons.answers import NOTEBOOKS, SOURCES, builder, cells, is_ok

LESSONS = [Path("00-quickstart.ipynb"), *(Path("solutions", f"{s.stem}.ipynb") for s in SOURCES)]
AT_A_TIME = 2 if "PYTEST_XDIST_WORKER" not in os.environ else 1  # as many as the smallest machine has cores, in all


def by_itself(path: Path) -> subprocess.CompletedProcess[str]:
    """`jupyter execute` on a notebook, which is written anew with its outputs."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    jupyter = Path(sys.executable).with_name("jupyter")
    command = [str(jupyter), "execute", "--inplace", "--timeout=120", path.name]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=path.parent, check=False)


@pytest.fixture(scope="module")
def executed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Path, Future[Any]]]:
    """The chosen lessons in a copy of the folder, without their outputs, begun two at a time."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    chosen = [c.params["lesson"] for c in calls if c and "lesson" in c.params]
    folder = tmp_path_factory.mktemp("a copy") / "notebooks"
    shutil.copytree(NOTEBOOKS, folder, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    with ThreadPoolExecutor(AT_A_TIME) as runners:
        begun = {}
        for lesson in chosen:
            book = nbformat.read(folder / lesson, 4)
            for cell in book.cells:
                if cell.cell_type == "code":
                    cell.outputs, cell.execution_count = [], None
            nbformat.write(book, folder / lesson)
            begun[lesson] = runners.submit(lambda path: (by_itself(path), path), folder / lesson)
        yield begun
        for future in begun.values():
            future.cancel()


@pytest.mark.lessons
@pytest.mark.parametrize("lesson", LESSONS, ids=lambda p: p.stem)
def test_lesson_passes_under_jupyter_execute(executed: dict[Path, Future[Any]], lesson: Path) -> None:
    done, path = executed[lesson].result()
    assert done.returncode == 0, done.stderr[-3000:]
    book = nbformat.read(path, 4)
    code = [c for c in book.cells if c.cell_type == "code"]
    assert all(c.execution_count for c in code)
    for cell in code:
        failed = any(o.output_type == "error" for o in cell.outputs)
        # simulated GPUs may be refused on other systems, and the notebook goes on
        fails = "raises-exception" in cell.metadata.get("tags", ()) and "--simulate-gpus" not in cell.source
        assert failed == fails, cell.source
        if "\ncheck." in f"\n{cell.source}":
            assert is_ok(cell.outputs), cell.outputs
        if "explore." in cell.source:
            assert any({"image/png", "text/plain"} <= set(o.get("data", ())) for o in cell.outputs)


# -- no ipywidgets ---------------------------------------------------------------------------

BROKEN = "raise ImportError('there are no widgets here')\n"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel in which ipywidgets cannot be imported, with nbddp loaded."""
    folder = tmp_path_factory.mktemp("no widgets")
    Path(folder, "ipywidgets.py").write_text(BROKEN, encoding="utf-8")
    here = str(NOTEBOOKS.parent)
    path = os.pathsep.join([str(folder), here, *filter(None, [os.environ.get("PYTHONPATH")])])
    kernel = Kernel(cwd=str(folder), env={**os.environ, "PYTHONPATH": path})
    shown = kernel.run("import ipywidgets")
    assert "there are no widgets here" in shown.evalue
    assert kernel.run("%load_ext nbddp").ok
    yield kernel
    kernel.close()


def explored(source: Path) -> list[str]:
    """The code up to the last explorer, if one draws what was measured before; else the explorers' cells alone."""
    code = [c.text for c in cells(source.stem) if c.kind == "code"]
    shows = [text for text in code if "explore." in text]
    if any("explore.measured" in text for text in shows):
        last = max(i for i, text in enumerate(code) if "explore." in text)
        return [c for c in code[: last + 1] if "check." not in c and "load_ext" not in c]
    return shows


@pytest.mark.parametrize(
    "source",
    [s if s.name[:2] == "12" else pytest.param(s, marks=pytest.mark.lessons) for s in SOURCES],
    ids=lambda p: p.stem,
)
def test_explorers_are_pictures_and_words_without_widgets(plain: Kernel, source: Path) -> None:
    assert plain.run("from nbddp.teach import explore").ok, "a lesson may import it in an earlier cell"
    saved = nbformat.read(builder().places(source)[1], 4)
    found = 0
    for code in explored(source):
        shown = plain.run(code)
        assert shown.ok, shown.error
        assert not shown.text("stderr")
        if "explore." not in code:
            continue
        (bundle,) = shown.displays
        found += 1
        assert set(bundle) - {"text/html"} == {"text/plain", "image/png"}
        if "explore.measured" not in code:
            (cell,) = [c for c in saved.cells if c.source == code]
            assert bundle["text/plain"] == cell.outputs[0].data["text/plain"], "the words are those of the saved lesson"
        assert len(bundle["text/plain"].splitlines()) > 2
    assert found
