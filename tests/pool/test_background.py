"""What is printed when no cell runs is shown under the next one, with the cell that has started who printed it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from nbddp.execution.execution import Execution
from nbddp.notebook import commands, pool_commands
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests.waiting import until


def whole(pool: WorkerPool, run: Execution, rank: int) -> str:
    """As `%ddp log --rank` prints it."""
    log = run.outputs[rank].log
    text: str = pool.parts.of("background").log_text(run, rank, log.read_text() if log.exists() else "")
    return text


# A file for each rank: what a process of rank 1's prints before rank 1 has begun the next cell came between cells.
GO = """go = {go!r} + os.environ["RANK"]
done = go + ".done"
def speak(end=None):
    while not os.path.exists(go): time.sleep(0.01)
    print("late")
    if end: sys.stdout.flush()
    open(done, "w").close()
    if end: end(0)
waits = f"while [ ! -e {{go}} ]; do sleep 0.01; done"
shell = f"{{waits}}; echo late; touch {{done}}"
"""
LATE = {
    "thread": "import threading\nthreading.Thread(target=speak).start()",
    "fork": "if os.fork() == 0: speak(os._exit)",
    "multiprocessing": "import multiprocessing as mp\nmp.get_context('fork').Process(target=speak).start()",
    "data loader": "from torch.utils.data import DataLoader\nclass Late:\n    def __len__(self): return 1\n"
    "    def __getitem__(self, i): speak(); return i\nbatches = iter(DataLoader(Late(), num_workers=1))",
    "subprocess": "import subprocess\nsubprocess.Popen(['sh', '-c', shell])",
    "shell in the background": "os.system(f'({shell}) &')",
}


# Once in some hundred tries on a busy machine a rank does not know whose text it was, and says so; why is not known.
PARTLY = [[f"rank {1 - rank} │ late", "printed between cells:", f"rank {rank} │ late"] for rank in (0, 1)]


@pytest.mark.parametrize("who", LATE)
@pytest.mark.parametrize("when", ["between cells", "in the next cell"])
def test_what_a_cell_has_started_is_heard_when_it_has_ended(
    pool: WorkerPool, shows: Callable[..., list[str]], tmp_path: Path, who: str, when: str
) -> None:
    assert shows(GO.format(go=str(tmp_path / "go")) + LATE[who] + "\nprint('started')", cell=7) == [
        "ranks 0–1 │ started"
    ]
    run = pool.last_run
    assert run is not None
    if when == "in the next cell":
        code = "open(go, 'w').close()\nwhile not os.path.exists(done): time.sleep(0.01)\nprint('next')"
        rows = shows(code, cell=8)
        assert rows == ["ranks 0–1 │ late", "          │ next"]
        return
    for rank in (0, 1):
        (tmp_path / f"go{rank}").touch()
    until(lambda: all(whole(pool, run, rank).endswith("late\n") for rank in run.outputs))
    first, named, *rows = shows("print('next')", cell=8)
    assert (first, named) == ("ranks 0–1 │ next", "printed between cells by threads or processes of Cell In[7]:")
    assert rows == ["ranks 0–1 │ late"] or rows in PARTLY, "no other cell is named, and none is lost"
    assert pool.last_run is not None
    assert whole(pool, pool.last_run, 1) == ("-- printed before this cell --\nlate\n-- printed in this cell --\nnext\n")
    assert shows("print('next')", cell=9) == ["ranks 0–1 │ next"], "it is shown once"


def test_processes_of_several_cells_are_told_apart(
    pool: WorkerPool, shows: Callable[..., list[str]], tmp_path: Path
) -> None:
    speaks = """import subprocess
if os.environ["RANK"] == "0": subprocess.Popen(["sh", "-c", f"{waits}; echo out @; echo err @ >&2"])"""
    for cell in (3, 4):
        code = GO.format(go=str(tmp_path / "go")) + speaks.replace("@", str(cell))
        assert shows(code, cell=cell) == []
    shows("pass", cell=5)
    run = pool.last_run
    assert run is not None
    (tmp_path / "go0").touch()
    until(lambda: whole(pool, run, 0).count("\n") == 5)
    rows = shows("pass", cell=6)
    assert [row for row in rows if "between" in row] == [
        f"printed between cells by threads or processes of Cell In[{cell}]:" for cell in (3, 4)
    ]
    assert sorted(rows[1:3]) == ["rank 0        │ out 3", "rank 0 stderr │ err 3"]
    assert sorted(rows[4:6]) == ["rank 0        │ out 4", "rank 0 stderr │ err 4"]


def test_pipes_are_new_only_after_a_cell_that_leaves_a_process_and_old_ones_are_closed(pool: WorkerPool) -> None:
    def value(code: str) -> list[object]:
        return list(pool.run_cell(f"import os, subprocess, time\n{code}", want_value=True, screen=NullScreen()))

    pipes, count = "os.fstat(1).st_ino", "len(os.listdir('/proc/self/fd'))"
    value("forked = os.fork()\nif not forked: time.sleep(600); os._exit(0)")
    before, held = value(pipes), value(count)
    for _ in range(3):
        value("subprocess.run(['true']); os.system('true')")
        assert value(pipes) == before
        value("left = subprocess.Popen(['sleep', '600'])")
        new = value(pipes)
        assert all(one != other for one, other in zip(before, new, strict=True))
        value("left.kill(); left.wait()")
        before = new
    assert all(now <= then for now, then in zip(value(count), held, strict=True)), "those of earlier tests may close"
    value("os.kill(forked, 9); os.waitpid(forked, 0)")


def test_what_is_printed_while_names_are_fetched_is_heard(
    pool: WorkerPool, shows: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    shows("class Slow:\n    def __reduce__(self): print('fetched'); return int, (3,)\nslow = Slow()", cell=2)
    assert list(pool.pull(["slow"])["slow"]) == [3, 3]
    command = next(command for command in commands.OWN if command.name == "log")
    pool_commands.log(SimpleNamespace(pool=pool), commands.CommandLine(command, {"rank": None}))  # type: ignore[arg-type]
    assert re.findall(r"rank (\d): \S+/rank\1\.later\.log; process", capsys.readouterr().out) == ["0", "1"]
    assert shows("pass", cell=3) == ["printed between cells:", "ranks 0–1 │ fetched"]
