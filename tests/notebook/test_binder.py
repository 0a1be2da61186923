"""`binder/` holds what repo2docker needs: its rules, all that the lessons import, one torch everywhere, 2 GB."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from urllib.parse import urlsplit

import nbformat
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests import places

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = places.ROOT
BINDER = ROOT / "binder"
LINES = [
    line.split(" #", 1)[0].strip()
    for line in (BINDER / "requirements.txt").read_text().splitlines()
    if line.strip() and not line.startswith("#")
]
NAMED = [line for line in LINES if not line.startswith("-")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = {"pandas"}  # imported where it is asked for, and told if it is missing
MOST_MIB = 1400  # of a session's 2 GB; the rest is for the Jupyter server


def extras() -> list[str]:
    """Of the package, those that the requirements ask for."""
    (own,) = [line for line in NAMED if line.startswith(".")]
    found = re.fullmatch(r"\.\[([\w,]+)\]", own)
    assert found is not None, own
    return found[1].split(",")


def named() -> list[Requirement]:
    """What the requirements name, the package by what it needs itself."""
    texts = [line for line in NAMED if not line.startswith(".")]
    texts += PROJECT["dependencies"]
    for extra in extras():
        texts += PROJECT["optional-dependencies"][extra]
    return [Requirement(t) for t in texts]


def with_dependencies(some: list[Requirement]) -> set[str]:
    """Distributions that come with these, by what is installed here."""
    found: set[str] = set()
    waiting = [canonicalize_name(r.name) for r in some]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        try:
            needs = [Requirement(r) for r in requires(name) or ()]
        except PackageNotFoundError:
            continue
        waiting += [canonicalize_name(r.name) for r in needs if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


def imported(source: str) -> Iterator[str]:
    """Top-level modules that Python source imports; lines of magics are left out."""
    for node in ast.walk(ast.parse(re.sub(r"(?m)^%.*$", "", source))):
        if isinstance(node, ast.Import):
            yield from (a.name.split(".")[0] for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def sources() -> Iterator[tuple[str, str]]:
    """(where, source) of the package, the lessons' sources, and the cells of all notebooks."""
    for path in [*ROOT.glob("nbddp/**/*.py"), *ROOT.glob("notebooks/source/*.py")]:
        yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    for path in [*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("notebooks/solutions/*.ipynb")]:
        for cell in nbformat.read(path, 4).cells:
            if cell.cell_type == "code":
                yield str(path.relative_to(ROOT)), cell.source


def test_all_that_is_imported_is_required() -> None:
    there = with_dependencies(named())
    made_by = packages_distributions()
    own = {"nbddp"} | set(sys.stdlib_module_names) | OPTIONAL
    for where, source in sources():
        for module in set(imported(source)) - own:
            distributions = {canonicalize_name(d) for d in made_by.get(module, [])}
            assert distributions & there, f"{where} imports {module}, which binder/ does not install"


def test_a_missing_package_would_be_seen() -> None:
    without = [r for r in named() if r.name not in ("scikit-learn", "ipyparallel")]
    assert not {"scikit-learn", "ipyparallel"} & with_dependencies(without)
    assert {"sklearn", "torch"} <= {m for where, s in sources() if "notebooks" in where for m in imported(s)}


def test_pins_agree_with_the_project() -> None:
    (torch,) = [r for r in named() if r.name == "torch" and str(r.specifier).startswith("==")]
    version = Version(str(torch.specifier).removeprefix("=="))
    assert version.local == "cpu", "Binder has no GPU, and the build with CUDA is ten times as large"
    asked = {Requirement(t).name: Requirement(t).specifier for t in PROJECT["dependencies"]}
    assert version.public in asked["torch"]
    for command in ((ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()):
        assert f"torch=={version.public} " in command, "one version of torch is tested, and it is Binder's"
    (index,) = [line for line in LINES if line.startswith("-")]
    assert index == "--extra-index-url https://download.pytorch.org/whl/cpu"


def test_the_rules_of_repo2docker_hold() -> None:
    runtime = (BINDER / "runtime.txt").read_text()
    found = re.fullmatch(r"python-(3\.\d+)\n", runtime)
    assert found is not None, "one line, python-x.y"
    assert found[1] in ("3.10", "3.11", "3.12", "3.13", "3.14"), "repo2docker has a locked environment for these"
    assert found[1] in SpecifierSet(PROJECT["requires-python"])
    versions = (ROOT / "docs" / "versions.md").read_text()
    assert f"\nPython {found[1]}, ipyparallel" in versions, "the tests ran on it"
    for line in LINES:
        # an option without a word after it ends repo2docker's own reading of the file with an error
        assert not line.startswith("-") or len(line.split(None, 1)) == 2 or "=" in line, line
        # what is read again while the image is built must not be elsewhere: only the root is there
        assert not line.startswith(("-r", "-c", "../")), line
    # the package is a path that begins with ".", so it is installed after the repository has been copied
    assert any(line.startswith(".[") for line in LINES)
    assert not (ROOT / ".binder").exists(), "two folders for the same end it with an error"
    # these would take precedence over requirements.txt
    for name in ("environment.yml", "Pipfile", "Pipfile.lock", "Dockerfile", "setup.py", "default.nix"):
        assert not (BINDER / name).exists(), name


@pytest.mark.parametrize("name", ["postBuild", "start"])
def test_scripts_can_be_run(name: str) -> None:
    path = BINDER / name
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    assert os.access(path, os.X_OK)
    mode = subprocess.run(["git", "ls-files", "-s", str(path)], capture_output=True, text=True, cwd=ROOT, check=False)
    assert not mode.stdout or mode.stdout.startswith("100755"), "git keeps the bit"
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert any(re.match(r"set -e", line) for line in lines), "without it an error is passed over in silence"
    if name == "start":
        assert lines[-1] == 'exec "$@"'


def test_start_hands_over_to_the_command_it_is_given() -> None:
    code = "import os, sys; print(sys.argv[1:], os.environ['OMP_NUM_THREADS'])"
    done = subprocess.run(
        [str(BINDER / "start"), sys.executable, "-c", code, "a b", ""], capture_output=True, text=True, check=True,
        env={k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"},
    )  # fmt: skip
    assert done.stdout == "['a b', ''] 1\n"


@pytest.mark.lessons
def test_postbuild_checks_what_it_says() -> None:
    """The check in it passes here, and would stop the build for a torch with CUDA."""
    text = (BINDER / "postBuild").read_text()
    code = text.split("<<'CHECK'\n")[1].split("\nCHECK\n")[0]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    if (
        subprocess.run([sys.executable, "-c", "import torch; assert not torch.version.cuda"], check=False).returncode
        == 0
    ):
        subprocess.run([sys.executable, "-c", code], check=True, env=env)
    wrong = code.replace("import torch\n", "import torch\ntorch.version.cuda = '13.0'\n", 1)
    done = subprocess.run([sys.executable, "-c", wrong], capture_output=True, text=True, env=env, check=False)
    assert "this torch has CUDA in it" in done.stderr


MEMORY = """
import threading
import psutil
from tests.kernels import Kernel

TRAIN = '''%%ddp --nproc 8
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group()
model = DDP(torch.nn.Linear(1000, 1000))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    model(torch.randn(8, 1000)).square().mean().backward()
    optimizer.step()
dist.get_world_size()
'''

def held():
    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:  # it has just ended
            pass
    return total

def watch():
    while not done.wait(0.2):
        seen.append(held())

seen, done = [], threading.Event()
kernel = Kernel()
watching = threading.Thread(target=watch)
watching.start()
try:
    for cell in ("%load_ext nbddp", TRAIN, "%ddp timings", "%ddp memory", "%ddp topology"):
        shown = kernel.run(cell)
        assert shown.ok, shown.error
    workers = [p for p in psutil.Process().children(recursive=True)]
    assert len(workers) > 8, "the workers are among them"
finally:
    done.set()
    watching.join()
    kernel.close()
print(round(max(seen) / 2**20))
"""


@pytest.mark.lessons
def test_eight_workers_fit_in_two_gigabytes(tmp_path: Path) -> None:
    """The most that a kernel, its eight workers that train, and their figures hold at any time, set up as by `start`;
    proportional set sizes, looked at five times a second. JupyterLab's server adds 0.1 GB."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [str(BINDER / "start"), sys.executable, "-c", MEMORY]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) < MOST_MIB


def locked(path: Path) -> list[Requirement]:
    text = path.read_text().replace("\\\n", " ")
    return [Requirement(line.partition("--hash")[0]) for line in text.splitlines() if line.strip()]


def test_the_locked_versions_are_those_that_the_package_allows() -> None:
    """torch has a line of its own wherever it is installed."""
    whole, tested = (ROOT / ".ci" / "locked.txt").read_text(), locked(ROOT / ".ci" / "locked.txt")
    here = [Requirement(line) for line in NAMED if "==" in line and not line.startswith("torch==")]
    assert len(here) > len(PROJECT["dependencies"])
    assert whole.count("--hash=sha256:") >= len(tested)
    pinned = {canonicalize_name(r.name) for r in tested}
    wanted = {r.name: r for r in named() if r.name != "torch" and r not in here}
    wanted |= {r.name: r for r in map(Requirement, PROJECT["optional-dependencies"]["test"])}
    assert {canonicalize_name(name) for name in wanted} <= pinned
    for r in tested:
        allowed = wanted.get(canonicalize_name(r.name))
        assert allowed is None or next(iter(r.specifier)).version in allowed.specifier, f"{r} is not {allowed}"
    known = {f"{r.name}{r.specifier}" for r in tested}
    assert {f"{r.name}{r.specifier}" for r in here} <= known, "Binder has the versions that the tests have"


def requirements(folder: Path) -> Path:
    """The file, or where PyTorch's index has no address a copy that does not ask it: pip would do so for each of a
    hundred packages and wait every time. The build without CUDA must then be among the links that pip is given."""
    theirs = BINDER / "requirements.txt"
    try:
        socket.getaddrinfo(urlsplit(LINES[0].split()[-1]).hostname, 443)
    except OSError:
        ours = folder / "requirements.txt"
        ours.write_text("".join(f"{line}\n" for line in LINES if not line.startswith("-")))
        return ours
    return theirs


@pytest.mark.lessons
@pytest.mark.timeout(420)
def test_the_environment_is_built_in_a_fresh_venv_and_runs_a_lesson(tmp_path: Path) -> None:
    """Requirements, postBuild, and a lesson behind start, in a copy. Needs package indexes."""
    venv.create(tmp_path / "venv", with_pip=False)
    report, there = tmp_path / "report.json", tmp_path / "venv" / "bin"
    pip = [
        sys.executable, "-m", "pip", "--python", str(there / "python"), "install", "--quiet", "--no-compile",
        "--retries", "0", "--timeout", "15",
    ]  # fmt: skip
    if subprocess.run([*pip, "--dry-run", "--no-deps", "hatchling"], capture_output=True, check=False).returncode:
        pytest.skip("no package index can be reached")
    command = [*pip, "--report", str(report), "-r", str(requirements(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=400, check=False)
    if "No matching distribution found for torch" in done.stderr:
        pytest.skip("the index of PyTorch's CPU builds cannot be reached")
    assert done.returncode == 0, done.stderr[-2000:]
    found = {canonicalize_name(i["metadata"]["name"]): i["metadata"] for i in json.loads(report.read_text())["install"]}
    assert found["torch"]["version"].endswith("+cpu")
    assert not [name for name in found if name.startswith("nvidia-") and name != "nvidia-ml-py"], "no CUDA comes along"
    assert {canonicalize_name(r.name) for r in named()} | {"nbddp"} <= set(found)
    for r in named():
        assert found[canonicalize_name(r.name)]["version"] in r.specifier, r
    shutil.copytree(BINDER.parent / "notebooks", tmp_path / "notebooks")
    env = {**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, "HOME": str(tmp_path)}
    env["PATH"] = f"{there}:{env['PATH']}"
    listed = subprocess.run(["jupyter", "labextension", "list"], capture_output=True, text=True, env=env, check=True)
    assert re.search(r"nbddp v\S+ .*enabled.* .*OK", listed.stderr), listed.stderr
    lesson = ["jupyter", "execute", "notebooks/solutions/01-one-program-many-processes.ipynb"]
    for line in ([str(BINDER / "postBuild")], [str(BINDER / "start"), *lesson]):
        done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=env, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
