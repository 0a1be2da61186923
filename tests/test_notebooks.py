"""The notebooks that are shipped with outputs run and compare strictly; so does every kind of output."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"
AT_A_TIME = 2 if "PYTEST_XDIST_WORKER" not in os.environ else 1  # as many as the smallest machine has cores, in all
QUICKSTART = FOLDER / "00-quickstart.ipynb"
NOTEBOOKS = [QUICKSTART, *sorted(FOLDER.glob("solutions/*.ipynb"))]


def nbval(path: Path, instructions: str = "") -> None:
    """Run a notebook under strict nbval in a process of its own. instructions: those of torch's kernels, where they are
    not to be the best that the processor has."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    if instructions:
        env["ATEN_CPU_CAPABILITY"] = instructions
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "--nbval", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=path.parent, timeout=170, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.fixture(scope="module")
def compared(request: pytest.FixtureRequest) -> Iterator[dict[tuple[Path, str], Future[None]]]:
    """The chosen notebooks, begun two at a time."""
    chosen = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    with ThreadPoolExecutor(AT_A_TIME) as runners:
        asked = [(c.params["path"], c.params["instructions"]) for c in chosen if c]
        begun = {asks: runners.submit(nbval, *asks) for asks in asked}
        yield begun
        for future in begun.values():
            future.cancel()


# saved lines must not depend on rounding: every second lesson runs with torch's plainest kernels, the others with those
# for AVX2, and the quickstart also with the best that this processor has
RUNS = [(path, "avx2" if i % 2 else "default") for i, path in enumerate(NOTEBOOKS)]
RUNS += [(QUICKSTART, "")]


def named(value: object) -> str:
    return str(value.relative_to(FOLDER).with_suffix("")) if isinstance(value, Path) else str(value or "best")


@pytest.mark.parametrize(("path", "instructions"), RUNS, ids=named)
def test_shipped_notebook_compares_strictly(
    compared: dict[tuple[Path, str], Future[None]], path: Path, instructions: str
) -> None:
    saved = nbformat.read(path, 4)
    assert all(c.execution_count for c in saved.cells if c.cell_type == "code"), "outputs are committed"
    compared[path, instructions].result()


CELLS = [
    "%load_ext nbddp",
    "%%ddp --nproc 3\nimport os, sys\nrank = int(os.environ['RANK'])\nprint('same')\nprint('mine', rank)",
    "%%ddp\nprint('out'); print('err', file=sys.stderr)\nrank",
    "%%ddp\nfrom IPython.display import HTML, display\ndisplay(HTML(f'<b>{rank}</b>'))",
    "%%ddp -o x\nrank * 2",
    "x",
    "%%ddp --nproc 2\nprint(rank)",
    "%%ddp\nimport time\nfor i in range(3): print(i, flush=True); time.sleep(0.2)",
    "%%ddp\nassert rank != 1, 'rank 1 fails'",
    "%%ddp --bogus\npass",
    "%ddp topology",
    "%ddp stop",
]


def test_every_kind_of_output_compares_strictly(tmp_path: Path) -> None:
    book = nbformat.v4.new_notebook()
    for source in CELLS:
        tags = ["raises-exception"] if "assert" in source or "bogus" in source else []
        book.cells.append(nbformat.v4.new_code_cell(source, metadata={"tags": tags}))
    NotebookClient(book, timeout=90, kernel_name="python3").execute()
    path = tmp_path / "every kind.ipynb"
    nbformat.write(book, path)
    for cell in book.cells:
        for output in cell.outputs:
            assert output.get("data") != {"text/plain": "running"}
    nbval(path)
