"""A copy of the package from which capabilities are deleted, each with its folder and its row, runs `%%ddp`."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.places import ROOT

DELETED = (  # one that can be deleted stays so
    "attached", "export", "forecast", "hosts", "panel", "slurm", "stacks", "topology", "warm",
)  # fmt: skip
PROGRAM = '''
from IPython.core.interactiveshell import InteractiveShell
import nbddp
shell = InteractiveShell.instance()
def run(cell):
    shell.run_cell(cell, store_history=True).raise_error()
run("%load_ext nbddp")
run("""%%ddp --nproc 2
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
sizes = torch.ones(1)
dist.all_reduce(sizes)
print(f"rank {os.environ['RANK']} sees {sizes.item()}")
""")
run("%ddp status")
for options in ("--keep-warm 10m", "--nnodes 1:2"):
    try:
        run(f"%ddp start {options}")
    except nbddp.BadInput as e:
        print(e)
run("%ddp stop")
print(nbddp.__file__)
'''


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the copy."""
    found = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "nbddp", found / "nbddp", ignore=shutil.ignore_patterns("__pycache__"))
    for name in DELETED:
        shutil.rmtree(found / "nbddp" / "capabilities" / name)
    table = found / "nbddp" / "capabilities" / "__init__.py"
    text = table.read_text(encoding="utf-8")
    for row in rows(text):
        text = text.replace(row, "")
    table.write_text(text, encoding="utf-8")
    return found


def rows(table: str) -> list[str]:
    """The text of each row that is deleted."""
    calls = [n for n in ast.walk(ast.parse(table)) if isinstance(n, ast.Call) and ast.unparse(n.func) == "Capability"]
    named = {ast.literal_eval(k.value): call for call in calls for k in call.keywords if k.arg == "name"}
    return [f"{ast.get_source_segment(table, named[name])}," for name in DELETED]


def test_a_cell_runs_without_them(copy: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=copy, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[-1] == str(copy / "nbddp" / "__init__.py")
    assert sorted(line for line in said if "sees" in line) == [f"rank {r} │ rank {r} sees 2.0" for r in range(2)]
    assert "--keep-warm 10m: nothing here keeps a process; leave it out" in said
    assert "--nnodes 1:2: here no nodes come and go; set one number" in said


@pytest.mark.parametrize("words", ["status", "--help"])
def test_a_terminal_works_without_them(words: str, copy: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run([sys.executable, "-m", "nbddp", words], cwd=copy, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "topology" not in done.stdout
