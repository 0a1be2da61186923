"""A copy of the package from which capabilities are deleted, each with its folder and its row, runs `%%ddp`, and so
does the core alone."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.house.check import OTHERS, SHARED, TABLE
from tests.places import ROOT

DELETED = (  # one that can be deleted stays so
    "attached", "calls", "capacity", "env", "export", "forecast", "hosts", "panel", "scripts", "simulated_gpus",
    "slurm", "stacks", "topology", "warm",
)  # fmt: skip
OBSERVING = (  # what records, draws, checks or guards: without them a rank has no part, and torch's own stores
    "background", "bench", "check", "collectives", "compare", "completion", "debugger", "doctor", "export", "forecast",
    "lint", "libraries", "memory", "panel", "private", "prove", "sanitizer", "spool", "stacks", "stale_modules",
    "subprocesses", "terminal",
    "timings", "topology", "trace", "widgets",
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
for line in ("status", *(f"start {o}" for o in ("--keep-warm 10m", "--nnodes 1:2", "--env A=1", "--simulate-gpus 4"))):
    try:
        run(f"%ddp {line}")
    except nbddp.BadInput as e:
        print(e)
run("%ddp stop")
print(nbddp.__file__)
'''

OF_RANKS = '''
from IPython.core.interactiveshell import InteractiveShell
import nbddp
shell = InteractiveShell.instance()
run = lambda cell: shell.run_cell(cell, store_history=True).raise_error()
run("%load_ext nbddp")
run("""%%ddp --nproc 2
import os, time, torch, torch.distributed as dist, psutil
dist.init_process_group("gloo")
dist.new_group([0, 1]).barrier()
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
doors = {c.laddr.ip for c in psutil.net_connections("tcp") if (c.laddr.port, c.status) == (store.port, "LISTEN")}
print("listens on all interfaces:", doors <= {"::", "0.0.0.0"})
dist.destroy_process_group()
""")
try:
    run("%%ddp\\nif os.environ['RANK'] == '1': 1 / 0\\ntime.sleep(60)")
except nbddp.RunFailed as e:
    print(e.report.splitlines()[0])
try:
    run("%%ddp\\nprint('said', flush=True)\\ntime.sleep(0.1)\\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)")
except nbddp.RunFailed as e:
    print(e.report.splitlines()[0])
run("%ddp status")
try:
    run("%ddp timings")
except nbddp.BadInput as e:
    print(e)
run("%ddp stop")
'''


@pytest.fixture(scope="module", params=["some", "all"])
def copy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a copy without some capabilities, or of the core alone."""
    if request.param == "some":
        return copied(tmp_path_factory, DELETED)
    found: Path = tmp_path_factory.mktemp("core")
    rest = {TABLE, *SHARED, *OTHERS, "export.py"}
    shutil.copytree(ROOT / "nbddp", found / "nbddp", ignore=shutil.ignore_patterns("__pycache__", *rest))
    return found


def copied(tmp_path_factory: pytest.TempPathFactory, deleted: Sequence[str]) -> Path:
    """The folder of a copy."""
    found = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "nbddp", found / "nbddp", ignore=shutil.ignore_patterns("__pycache__"))
    for name in deleted:
        shutil.rmtree(found / "nbddp" / "capabilities" / name)
    table = found / "nbddp" / "capabilities" / "__init__.py"
    text = table.read_text(encoding="utf-8")
    for row in rows(text, deleted):
        text = text.replace(row, "")
    table.write_text(text, encoding="utf-8")
    return found


def rows(table: str, deleted: Sequence[str]) -> list[str]:
    """The text of each row that is deleted."""
    calls = [n for n in ast.walk(ast.parse(table)) if isinstance(n, ast.Call) and ast.unparse(n.func) == "Capability"]
    named = {ast.literal_eval(k.value): call for call in calls for k in call.keywords if k.arg == "name"}
    return [f"{ast.get_source_segment(table, named[name])}," for name in deleted]


def test_a_cell_runs_without_them(copy: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=copy, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[-1] == str(copy / "nbddp" / "__init__.py")
    assert sorted(line for line in said if "sees" in line) == [f"rank {r} │ rank {r} sees 2.0" for r in range(2)]
    assert "--keep-warm 10m: nothing here keeps a process; remove --keep-warm" in said
    assert "--nnodes 1:2: nodes cannot join or leave here; set one number" in said
    is_core = not (copy / "nbddp" / "capabilities").exists()
    assert any("%ddp has no subcommand 'status'" in line for line in said) == is_core
    for option in ("--env", "--simulate-gpus"):
        assert any(line.startswith(f"%ddp start has no option {option}") for line in said)


@pytest.mark.parametrize("words", ["status", "--help"])
def test_a_terminal_works_without_them(words: str, copy: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run([sys.executable, "-m", "nbddp", words], cwd=copy, env=env, capture_output=True, text=True)
    if not (copy / "nbddp" / "capabilities").exists():  # the terminal is one
        assert (done.returncode, done.stderr.split(",")[0]) == (1, "python -m nbddp needs the capability `terminal`")
        return
    assert done.returncode == 0, done.stderr
    assert not {"topology", "run", "torchrun"} & set(done.stdout.split())


def test_ranks_without_parts_and_guard_are_as_under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A program's store listens where torch has it, and `%ddp status` says who reaches that of the pool."""
    copy = copied(tmp_path_factory, OBSERVING)
    env = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run(
        [sys.executable, "-c", OF_RANKS], cwd=copy, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0] == "any process on this machine can reach the ranks' store"
    assert sorted(line for line in said if "listens" in line) == [
        f"rank {r} │ listens on all interfaces: True" for r in range(2)
    ]
    assert "rank 1 raised ZeroDivisionError: division by zero (cell line 2)" in said
    assert {"rank 0 │ said", "rank 1 │ said"} <= {*said}
    assert any(line.startswith("rank 1 died: killed by SIGKILL") for line in said)
    assert "%ddp has no subcommand 'timings'; %ddp lists them" in said
    done = subprocess.run([sys.executable, "-m", "nbddp", "status"], cwd=copy, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("python -m nbddp needs the capability `terminal`")
