"""What a script leaves: processes, names, reports, log files; in a notebook, in a program and in a terminal."""

from __future__ import annotations

import ast
import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nbddp.capabilities.scripts.logs import LogOptions
from nbddp.errors import BadInput, WorkerFailed
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests import warm
from tests.kernels import Kernel, loaded
from tests.processes import still_running

LAUNCHED = """
import argparse, os, sys
import torch, torch.distributed as dist
import torch.nn as nn, torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP

class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(10, 5)
    def forward(self, x):
        return self.net(x)

def demo_basic(local_world_size, local_rank):
    n = torch.cuda.device_count() // local_world_size
    device_ids = list(range(local_rank * n, (local_rank + 1) * n))
    print(f"rank = {dist.get_rank()}, world_size = {dist.get_world_size()}, n = {n}, device_ids = {device_ids}")
    model = DDP(ToyModel())
    optim.SGD(model.parameters(), lr=0.001)
    model(torch.randn(20, 10)).sum().backward()

def spmd_main(local_world_size, local_rank):
    env_dict = {key: os.environ[key] for key in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")}
    assert env_dict["RANK"] == str(local_rank)
    dist.init_process_group(backend="gloo")
    demo_basic(local_world_size, local_rank)
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.cuda.device_count = lambda: 8
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--local_world_size", type=int, default=1)
    args = parser.parse_args()
    spmd_main(args.local_world_size, args.local_rank)
"""
FAILS = """\
import torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("bad batch")
    dist.all_reduce(torch.ones(1))

main()
"""
HANGS = (
    "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
    "if dist.get_rank() == 0:\n    dist.all_reduce(torch.ones(1))\n"
)
SLEEPS = """
import os, signal, sys, time
if "saves" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(0)))
print(os.getppid(), "up", flush=True)
time.sleep(100)
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel with a pool of two, whose folder has the scripts."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "names.py").write_text(
        "import helper\nvalue = 41 + helper.one\ndef f():\n    return value\nprint('ran')\n"
    )
    (folder / "helper.py").write_text("one = 1\n")
    (folder / "fails.py").write_text(FAILS)
    (folder / "hangs.py").write_text(HANGS)
    (folder / "example.py").write_text(LAUNCHED)
    with loaded(str(folder)) as made:
        assert made.run("%ddp start --nproc 2").ok
        yield made


def test_a_script_leaves_nothing_and_the_next_cell_has_new_processes(shared: Kernel) -> None:
    shared.run("%%ddp -o before\nmine = 1; import os; os.getpid()")
    assert shared.run("%ddp run names.py").text() == "ranks 0–1 │ ran\n"
    shown = shared.run("%%ddp -o after\nimport sys; ('mine' in dir(), 'value' in dir(), 'helper' in sys.modules)")
    assert shown.ok, shown.error
    assert shared.run("print(set(after))").text() == "{(False, False, False)}\n"


def test_keep_leaves_the_scripts_names_beside_those_that_were_there(shared: Kernel) -> None:
    shared.run("%%ddp\nmine = 7")
    assert shared.run("%ddp run --keep names.py").text() == "ranks 0–1 │ ran\n"
    shown = shared.run("%%ddp\nvalue = 0\nprint(mine, f(), __name__, helper.one)")
    assert shown.text() == "ranks 0–1 │ 7 42 __main__ 1\n"


def test_between_a_script_and_the_next_cell_its_ranks_can_still_be_asked(shared: Kernel) -> None:
    (Path(str(shared.run("import os; print(os.getcwd())").text().strip())) / "trains.py").write_text(
        "import torch, torch.distributed as dist\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n"
        "dist.init_process_group('gloo')\nmodel = DDP(torch.nn.Linear(4, 1))\n"
        "for _ in range(3):\n    model(torch.ones(2, 4)).sum().backward()\ndist.destroy_process_group()\n"
    )
    assert shared.run("%ddp run trains.py").ok
    shown = shared.run("%ddp timings")
    assert shown.ok, shown.error
    assert "buckets" in str(shown.displays)


def test_a_failure_names_the_rank_and_the_others_are_ended_in_its_collective(shared: Kernel) -> None:
    shown = shared.run("%ddp run fails.py")
    lines = shown.error.splitlines()
    assert lines[0] == "rank 1 raised ValueError: bad batch (fails.py line 8, in main)"
    assert lines[1] == "  rank 0: fails.py line 9, in main, waiting in all_reduce #1 for rank 1; stopped"
    assert shown.took < 10
    assert "variables are kept" not in shown.error
    assert shared.run("%%ddp\nprint('well')").text() == "ranks 0–1 │ well\n"


def test_a_deadlock_of_a_script_is_reported(shared: Kernel) -> None:
    shown = shared.run("%ddp run --hang-after 0.5 hangs.py")
    words = "rank 0 waits in all_reduce #1 (hangs.py line 4); rank 1 has finished the script without calling it"
    assert f"deadlock: {words}" in shown.error


def test_errors_are_what_torchrun_tells(shared: Kernel) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    shared.run("%ddp run --log-dir logs fails.py")
    found: dict[int, dict[str, Any]] = ast.literal_eval(shared.run("found = %ddp errors\nprint(found)").text())
    assert list(found) == [1]
    assert found[1]["exitcode"] == 1
    assert found[1]["message"]["message"] == "ValueError: bad batch"
    folder = shared.run("import os; print(os.getcwd())").text().strip()
    assert re.fullmatch(re.escape(folder) + r"/logs/\S+/attempt_0/1/error\.json", found[1]["error_file"])
    failure = ProcessFailure(local_rank=1, pid=found[1]["pid"], exitcode=1, error_file=found[1]["error_file"])
    theirs = ChildFailedError("fails.py", {1: failure}).format_msg()
    ours = shared.run("%ddp errors --torchrun").text()
    assert ours.strip() == theirs.strip()


def test_errors_of_ranks_that_exit_die_or_are_well(shared: Kernel) -> None:
    shared.run(
        "%%ddp\nimport os, signal, sys\nif os.environ['RANK'] == '0': os.kill(os.getpid(), signal.SIGKILL)\nsys.exit(3)"
    )
    shown = shared.run("%ddp errors").displays[0]
    title, head, first, second = shown["text/plain"].splitlines()
    assert (title[:10], " ".join(head.split())) == ("ranks that", "rank host pid error exit code error file")
    assert "  killed by SIGKILL  " in first
    assert second.split()[3:] == ["exited", "with", "3", "3", "none"]
    assert "<td" in shown["text/html"]
    text = shared.run("%ddp errors --torchrun").text()
    assert "exitcode  : -9 (pid:" in text
    assert "traceback : Signal 9 (SIGKILL) received by PID" in text
    shared.run("%%ddp\n1")
    assert shared.run("%ddp errors --torchrun").text().startswith("no rank failed in Cell In[")
    assert shared.run("found = %ddp errors\nprint(found)").text() == "{}\n"
    assert re.match(r"no rank failed in Cell In\[\d+\]$", shared.run("found").displays[0]["text/plain"])


def test_a_cells_output_goes_where_torchrun_would_put_it(shared: Kernel, tmp_path: Path) -> None:
    body = "import sys, os; print('out', os.environ['RANK']); print('err', file=sys.stderr)"
    shown = shared.run(f"%%ddp --log-dir {tmp_path} --redirects 0:1 --tee 1:3\n{body}")
    assert shown.text() == "rank 1        │ out 1\n"
    assert shown.text("stderr") == "rank 0 stderr │ err\nrank 1 stderr │ err\n"
    (root,) = tmp_path.iterdir()
    files = {str(p.relative_to(root)): p.read_text() for p in root.rglob("*") if p.is_file()}
    assert files == {
        "attempt_0/0/stdout.log": "out 0\n", "attempt_0/1/stdout.log": "out 1\n", "attempt_0/1/stderr.log": "err\n",
    }  # fmt: skip


def test_restarted_cells_have_a_folder_for_each_attempt_and_nodes_have_their_own(tmp_path: Path) -> None:
    logs = LogOptions(folder=str(tmp_path), redirects={None: frozenset({"stdout"})})
    (tmp_path / "again.py").write_text(
        "import os, sys\nprint(os.environ['GROUP_RANK'], os.environ['LOCAL_RANK'])\n"
        "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n"
    )
    with WorkerPool(nproc=1, nnodes=2) as pool:
        pool.run_script(str(tmp_path / "again.py"), logs=logs, max_restarts=1, screen=NullScreen())
    roots = sorted(p for p in tmp_path.iterdir() if p.is_dir())
    assert len(roots) == 2
    texts = sorted((p.relative_to(root).as_posix(), p.read_text()) for root in roots for p in root.rglob("stdout.log"))
    both = ["0 0\n", "1 0\n"]
    assert texts == [(f"attempt_{i}/0/stdout.log", text) for i in range(2) for text in both]


def test_the_local_ranks_filter_shows_some_ranks(shared: Kernel) -> None:
    shown = shared.run("%%ddp --local-ranks-filter 1\nimport os; print(os.environ['RANK'])\nos.environ['RANK']")
    assert shown.text() == "rank 1     │ 1\nrank 1 Out │ '1'\n"


def test_lines_with_a_word_are_duplicated_as_torchrun_does(shared: Kernel, tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text("print('a red apple')\nprint('a pear')\n")
    options = (
        f"--nproc-per-node 2 --role trainer --log-dir {tmp_path / 'logs'} --tee 1 --duplicate-stdout-filters apple"
    )
    assert shared.run(f"%ddp torchrun {options} {tmp_path / 'words.py'}").ok
    (found,) = (tmp_path / "logs").rglob("filtered_stdout.log")
    assert sorted(found.read_text().splitlines()) == [f"[trainer{r}]:a red apple" for r in range(2)]


def test_what_a_launch_is_named_reaches_its_ranks_alone(shared: Kernel, tmp_path: Path) -> None:
    names = "TORCHELASTIC_RUN_ID", "ROLE_NAME", "TORCHELASTIC_SIGNALS_TO_HANDLE"
    shows = f"import os; print(*(os.environ[name] for name in {names}))\n"
    (tmp_path / "names.py").write_text(shows)
    options = "--nproc-per-node 2 --rdzv-id job7 --role trainer --signals-to-handle SIGTERM"
    assert shared.run(f"%ddp torchrun {options} {tmp_path / 'names.py'}").text() == "ranks 0–1 │ job7 trainer SIGTERM\n"
    after = shared.run(f"%%ddp\n{shows}").text()
    assert re.fullmatch(r"ranks 0–1 │ [0-9a-f-]{36} default SIGTERM,SIGINT,SIGHUP,SIGQUIT\n", after)


def test_a_program_for_launch_py_runs_unchanged(shared: Kernel) -> None:
    line = "%ddp python /path/to/launch.py --nnode=1 --node_rank=0 --nproc_per_node=2 example.py --local_world_size=2"
    shown = shared.run(line)
    assert shown.ok, shown.error
    said = "example.py accepts --local_rank, as before torch 2.0, so nbddp passes --local_rank\n"
    wanted = [f"rank = {r}, world_size = 2, n = 4, device_ids = {[*range(4 * r, 4 * r + 4)]}" for r in range(2)]
    assert shown.text() == f"{said}rank 0 │ {wanted[0]}\nrank 1 │ {wanted[1]}\n"


@pytest.mark.more
def test_todays_torch_takes_one_device_of_a_process(tmp_path: Path) -> None:
    """What docs/scripts.md says of the old program's list of GPUs."""
    code = (
        "import torch, torch.distributed as dist\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "try: DDP(torch.nn.Linear(1, 1), [0, 1])\nexcept ValueError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert "device_ids can only be None or contain a single element." in done.stdout


def test_what_is_not_there_is_said_before_anything_starts(shared: Kernel) -> None:
    shown = shared.run("%ddp run nosuch.py")
    assert "there is no file 'nosuch.py' in " in shown.evalue
    assert "its .py files: example.py, fails.py, " in shown.evalue
    assert (
        "quote a path with spaces"
        in shared.run(
            "open('two words.py', 'w').close()\nget_ipython().run_line_magic('ddp', 'run two words.py')"
        ).evalue
    )
    assert "a module is run with -m pack" in shared.run("%ddp run pack").evalue
    assert "No module named nosuch" in shared.run("%ddp run -m nosuch").error


def test_a_pool_runs_scripts(tmp_path: Path) -> None:
    script = tmp_path / "args.py"
    script.write_text("import sys\nassert sys.argv[1:] == ['a'], sys.argv\n")
    with WorkerPool(nproc=2) as pool:
        pool.run_script(str(script), "a", screen=NullScreen())
        with pytest.raises(WorkerFailed, match=r"rank 0 raised AssertionError.*args.py line 2"):
            pool.run_script(str(script), "b", screen=NullScreen())
        with pytest.raises(BadInput, match="there is no file"):
            pool.run_script("nosuch.py")


# -- in a terminal ---------------------------------------------------------------------------------------------


def launch(folder: Path, *words: str, cold: bool = False) -> subprocess.Popen[str]:
    """cold: all processes of the launch are under it."""
    command = [sys.executable, "-m", "nbddp", *words]
    if not cold:
        warm.ready(folder=str(folder))
    return subprocess.Popen(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def until_up(process: subprocess.Popen[str], ranks: int) -> list[str]:
    """The lines in which so many processes said that they run."""
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(ranks)]
    assert all(line.endswith("up\n") for line in lines)
    return lines


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("number", "word", "line"),
    [(signal.SIGINT, "", "KeyboardInterrupt"), (signal.SIGTERM, "saves", "saved"), (signal.SIGTERM, "", "")],
)
def test_a_signal_to_the_launcher_reaches_the_ranks_and_nothing_is_left(
    tmp_path: Path, number: int, word: str, line: str
) -> None:
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    process = launch(tmp_path, "run", "-n", "2", "sleeps.py", word)
    agent = psutil.Process(int(until_up(process, 2)[0].split()[-2]))
    children = [agent, *agent.children(recursive=True)]
    assert len(children) >= 3
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1, "as torchrun"
    assert sum(text.endswith(line) for text in (out + err).splitlines() if text.startswith("rank ")) >= 2 * bool(line)
    assert ("stopped by the user" if number == signal.SIGINT else "SIGTERM stopped the run") in err
    assert not still_running(children)


SPAWNS = """
import os, time, torch.multiprocessing as mp
def say(words): os.write(1, f"{words}\\n".encode())  # at once: print would write the parts of a line by themselves
def child(i):
    say("up")
    try:
        time.sleep(600)
    finally:
        say(f"child {i} saved")
if __name__ == "__main__":
    mp.start_processes(child, nprocs=2, start_method="fork")  # mp.spawn, without two more imports of torch
"""


def test_a_signal_reaches_what_a_script_has_started_as_under_torchrun(tmp_path: Path) -> None:
    """mp.spawn waits for its children, which would hear of nothing before they are killed, 30 s later."""
    (tmp_path / "spawns.py").write_text(SPAWNS)
    process = launch(tmp_path, "torchrun", "--nproc-per-node", "1", "spawns.py")
    until_up(process, 2)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 20, out + err
    assert process.returncode == 1
    assert [f"child {i} saved" in out for i in (0, 1)] == [True, True], out + err


def test_a_launcher_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    process = launch(tmp_path, "torchrun", "--nproc-per-node", "2", "sleeps.py", cold=True)
    until_up(process, 2)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 3
    process.kill()
    process.communicate(timeout=60)
    end = time.monotonic() + 20
    while still_running(children) and time.monotonic() < end:
        time.sleep(0.05)
    assert not still_running(children)


def test_a_terminal_names_the_first_failure_and_has_torchruns_exit_status(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1': raise ValueError('bad')\ntime.sleep(60)\n"
    )
    process = launch(tmp_path, "run", "-n", "2", "fails.py")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 1 │ ValueError: bad\n" in err
    assert err.endswith(
        "rank 1 raised ValueError: bad (fails.py line 2)\n  rank 0: fails.py line 3, still running; stopped\n"
    )
    for words in (["run", "nosuch.py"], ["run"], ["torchrun", "--nprok", "2", "fails.py"]):
        refused = launch(tmp_path, *words)
        _, err = refused.communicate(timeout=60)
        assert refused.returncode == 2
        assert len(err.splitlines()) == 1, err


class Terminal:
    """A folder with a script, and launches of it whose stdin and stderr are a terminal."""

    def __init__(self, folder: Path):
        self.folder, self.env = folder, {**os.environ, "NBDDP_RUNTIME_DIR": str(folder)}
        (folder / "well.py").write_text("print('well')\n")

    def run(self, *options: str, typed: bool = True) -> str:
        """What it says on the terminal."""
        ours, theirs = pty.openpty() if typed else os.pipe()
        command = [sys.executable, "-m", "nbddp", "run", "-n", "1", *options, "well.py"]
        process = subprocess.Popen(command, cwd=self.folder, env=self.env, stdout=subprocess.DEVNULL, stderr=theirs,
                                   stdin=theirs if typed else subprocess.DEVNULL)  # fmt: skip
        os.close(theirs)
        said = b""
        with contextlib.suppress(OSError):  # a terminal that nobody has open any more
            while part := os.read(ours, 65536):
                said += part
        os.close(ours)
        assert process.wait(100) == 0
        return said.decode()

    def waiting(self) -> int:
        done = subprocess.run([sys.executable, "-m", "nbddp", "status"], env=self.env, capture_output=True, text=True)
        return done.stdout.count("waits for a kernel in")


@pytest.mark.more
def test_at_a_terminal_the_warm_process_stays_for_the_next_launch_and_that_is_said_once(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    terminal.run(typed=False)
    assert terminal.waiting() == 0, "a job's launch leaves nothing"
    try:
        assert "process that has imported torch stays for 10m; --keep-warm 0 ends it" in terminal.run()
        assert terminal.waiting() == 1
        assert "stays for 10m" not in terminal.run()
        assert terminal.waiting() == 1
        assert "stays for 10m" not in terminal.run("--keep-warm", "0")
        assert terminal.waiting() == 0
    finally:
        subprocess.run([sys.executable, "-m", "nbddp", "stop"], env=terminal.env, capture_output=True, timeout=60)


def test_a_deadlock_in_a_terminal_is_named_and_ends(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    process = launch(tmp_path, "run", "-n", "2", "--hang-after", "0.5", "hangs.py")
    _, err = process.communicate(timeout=100)
    assert process.returncode == 1
    words = "rank 0 waits in all_reduce #1 (hangs.py line 4); rank 1 has finished the script without calling it"
    assert f"deadlock: {words}" in err


@pytest.mark.more
def test_an_interface_of_the_environment_that_is_not_there_is_noted(tmp_path: Path) -> None:
    (tmp_path / "well.py").write_text("print('well')\n")
    env = {**os.environ, "NCCL_SOCKET_IFNAME": "nosuch"}
    command = [sys.executable, "-m", "nbddp", "run", "-n", "1", "well.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=True)
    assert "well" in done.stdout
    assert "NCCL_SOCKET_IFNAME=nosuch: this machine has no interface nosuch* that is up; it has " in done.stderr


@pytest.mark.more
def test_a_warm_process_serves_one_launch_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text("import os\nprint(os.getppid())\n")
    env = {**os.environ, "NBDDP_RUNTIME_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "nbddp", "run", "-n", "1", "--keep-warm", "2m", "parent.py"]
    spent = []
    for _ in range(2):
        before = os.times()
        subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, timeout=100)
        after = os.times()
        spent.append(after.children_user - before.children_user)
    waiting = subprocess.run([sys.executable, "-m", "nbddp", "status"], env=env, capture_output=True, text=True)
    assert "waits for a kernel in" in waiting.stdout
    subprocess.run([sys.executable, "-m", "nbddp", "stop"], env=env, check=True, capture_output=True, timeout=60)
    assert spent[1] < 0.8 * spent[0], "torch was imported again"
