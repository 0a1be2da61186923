"""Scripts under `%ddp run`, `%ddp torchrun` and `python -m nbddp run` against real torchrun, case by case: output of
each rank, exit status, error files, log directory and environment."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import places, warm
from tests.contract import scripts
from tests.contract.scripts import CASES, Result
from tests.kernels import Kernel, loaded

LIGHT = [name for name, case in CASES.items() if not case.heavy]
HEAVY = [name for name, case in CASES.items() if case.heavy]
# torchrun lets a rank that has to end print on; what it prints when depends on the moment
IN_A_TERMINAL = ("exit 0", "exit 3", "raises", "module")


def theirs(folder: Path, names: list[str]) -> dict[str, Result]:
    """The cases under torchrun."""
    command = [sys.executable, "-m", "tests.contract.scripts", str(folder), *names]
    subprocess.run(command, check=True, timeout=170, stderr=subprocess.DEVNULL, cwd=places.ROOT)
    return {name: scripts.read(folder / name, int((folder / name / "status").read_text())) for name in names}


@pytest.fixture(scope="module")
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    cases = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    asked = {item.callspec.params["name"] for item in cases if "real" in item.fixturenames}
    return theirs(tmp_path_factory.mktemp("real"), sorted(asked))


@pytest.fixture(scope="module")
def real_heavy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return theirs(tmp_path_factory.mktemp("heavy"), HEAVY)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel whose pool the scripts of this file share."""
    with loaded(str(tmp_path_factory.mktemp("notebook"))) as made:
        yield made


def in_notebook(kernel: Kernel, folder: Path, name: str) -> Result:
    case = CASES[name]
    scripts.write(folder, case)
    kernel.run(f"import os; os.chdir({str(folder)!r}); os.environ.pop('OMP_NUM_THREADS', None)")
    options = [
        f"--nproc-per-node={case.nproc}",
        "--log-dir",
        "logs",
        "--redirects",
        "3",
        "--rdzv-id",
        "launch",
        *case.options,
    ]
    shown = kernel.run(f"%ddp torchrun {shlex.join([*options, *case.words])}")
    return scripts.read(folder, 0 if shown.ok else 1)


def in_terminal(folder: Path, name: str) -> Result:
    case = CASES[name]
    scripts.write(folder, case)
    options = ["-n", str(case.nproc), "--log-dir", "logs", "--tee", "3", *case.options]
    command = [sys.executable, "-m", "nbddp", "run", *options, *case.words]
    warm.ready(folder=str(folder))
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    found = scripts.read(folder, done.returncode)
    for place, text in found.streams.items():
        rank = place.split("/")[1]
        shown = done.stdout if place.endswith("stdout.log") else done.stderr
        lines = [
            line.removeprefix(f"rank {rank} │ ") for line in shown.splitlines() if line.startswith(f"rank {rank} │")
        ]
        assert scripts.tidy("\n".join(lines), folder).split() == text.split(), place
    return found


def compare(ours: Result, wanted: Result) -> None:
    assert ours.status == wanted.status
    assert ours.layout == wanted.layout
    assert ours.streams == wanted.streams
    assert ours.errors == wanted.errors


@pytest.mark.every(3, "torchrun")
@pytest.mark.parametrize("name", LIGHT)
def test_a_script_in_the_notebook_is_what_it_is_under_torchrun(
    notebook: Kernel, real: dict[str, Result], tmp_path: Path, name: str
) -> None:
    compare(in_notebook(notebook, tmp_path, name), real[name])


@pytest.mark.parametrize("name", IN_A_TERMINAL)
def test_a_script_in_a_terminal_is_what_it_is_under_torchrun(
    real: dict[str, Result], tmp_path: Path, name: str
) -> None:
    compare(in_terminal(tmp_path, name), real[name])


def test_a_rank_that_does_not_hear_sigterm_is_killed(notebook: Kernel, tmp_path: Path) -> None:
    found = in_notebook(notebook, tmp_path, "deaf to SIGTERM")
    assert (found.status, [text for text in found.streams.values() if text]) == (1, ["waits\n"])


@pytest.mark.torchrun
@pytest.mark.parametrize("name", HEAVY)
def test_a_script_that_takes_torchrun_longer_is_what_it_is_under_torchrun(
    notebook: Kernel, real_heavy: dict[str, Result], tmp_path: Path, name: str
) -> None:
    compare(in_notebook(notebook, tmp_path, name), real_heavy[name])
