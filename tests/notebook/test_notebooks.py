"""The notebooks that are shipped with outputs run and compare strictly; so does every kind of output."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests import places, warm
from tests.kernels import of_kernels

FOLDER = places.ROOT / "notebooks"
AT_A_TIME = 2 if "PYTEST_XDIST_WORKER" not in os.environ else 1  # as many as the smallest machine has cores, in all
TOGETHER = 3  # notebooks in a process: a test may take as long as all of them
QUICKSTART = FOLDER / "00-quickstart.ipynb"
Compared = dict[
    tuple[Path, str], tuple[Future[str], Sequence[Path]]
]  # notebook, instructions → what nbval said of some
NOTEBOOKS = [QUICKSTART, *sorted(FOLDER.glob("solutions/*.ipynb"))]


def nbval(paths: Sequence[Path], instructions: str = "") -> str:
    """Run notebooks under strict nbval in one process, which takes 3 s to start; what it says if one fails.
    instructions: those of torch's kernels, where they are not to be the best that the processor has."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    if instructions:
        env["ATEN_CPU_CAPABILITY"] = instructions
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    if len(paths) == 1:
        warm.ready(env | {"PYTEST_VERSION": pytest.__version__}, **of_kernels(), folder=str(paths[0].parent))
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "-p", "nbval.plugin"]
    command += ["-o", "addopts=", "-W", "ignore", "--nbval", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=FOLDER, timeout=380, check=False)
    return "" if done.returncode == 0 else done.stdout or done.stderr


def failed_in(said: str, path: Path, others: Sequence[Path]) -> bool:
    """Whether what nbval said of several notebooks is of this one, or of none that can be told."""
    lines = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    named = {p for p in others if any(p.name in line for line in lines)}
    return bool(said) and (path in named or not named)


@pytest.fixture(scope="module")
def compared(request: pytest.FixtureRequest) -> Iterator[Compared]:
    """The chosen notebooks, a few in a process, and two processes at a time."""
    chosen = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    asked = [(c.params["path"], c.params["instructions"]) for c in chosen if c and "path" in c.params]
    with ThreadPoolExecutor(AT_A_TIME) as runners:
        begun = {}
        for kind in dict.fromkeys(kind for _, kind in asked):
            paths = [path for path, k in asked if k == kind]
            for some in (paths[i : i + TOGETHER] for i in range(0, len(paths), TOGETHER)):
                future = runners.submit(nbval, some, kind)
                begun |= {(path, kind): (future, some) for path in some}
        yield begun
        for future, _ in begun.values():
            future.cancel()


# saved lines must not depend on rounding: every second lesson runs with torch's plainest kernels, the others with those
# for AVX2, and the quickstart also with the best that this processor has
RUNS = [
    pytest.param(path, "avx2" if i % 2 else "default", marks=pytest.mark.lessons) for i, path in enumerate(NOTEBOOKS)
]
RUNS += [pytest.param(QUICKSTART, "")]


def named(value: object) -> str:
    return str(value.relative_to(FOLDER).with_suffix("")) if isinstance(value, Path) else str(value or "best")


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("path", "instructions"), RUNS, ids=named)
def test_shipped_notebook_compares_strictly(compared: Compared, path: Path, instructions: str) -> None:
    saved = nbformat.read(path, 4)
    assert all(c.execution_count for c in saved.cells if c.cell_type == "code"), "outputs are committed"
    future, together = compared[path, instructions]
    said = future.result()
    assert not failed_in(said, path, together), said[-3000:]


CELLS = [
    "%load_ext nbddp",
    "%%ddp --nproc 3\nimport os, sys\nrank = int(os.environ['RANK'])\nprint('same')\nprint('mine', rank)",
    "%%ddp\nprint('out'); print('err', file=sys.stderr)\nrank",
    "%%ddp\nfrom IPython.display import HTML, display\ndisplay(HTML(f'<b>{rank}</b>'))",
    "%%ddp\nfor i in range(30): print(rank, i)",
    "%%ddp\nfrom IPython.display import HTML, display\ndisplay(HTML(f'<table><tr><td>{rank}</table>'))",
    "%%ddp -o x\nrank * 2",
    "x",
    "%%ddp --nproc 2\nprint(rank)",
    "%%ddp\nimport time\nfor i in range(3): print(i, flush=True); time.sleep(0.2)",
    "%%ddp\nassert rank != 1, 'rank 1 fails'",
    "%%ddp --bogus\npass",
    "%ddp topology",
    "%ddp stop",
]


@pytest.mark.lessons
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
    said = nbval([path])
    assert not said, said[-3000:]
