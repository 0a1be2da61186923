"""As on macOS: what only Linux has is refused to nbddp's own files (`refused.py`), and the pool works with less.

`.ci/versions darwin` runs the tests of cells, failures, Stop and pools so; these few are always run.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from nbddp.agent import hardware, runtime_dir
from nbddp.agent.process_id import ProcessId
from nbddp.capabilities.status import table
from nbddp.compat import system
from nbddp.deadlock.positions import Position, position_of
from tests.kernels import Kernel, loaded
from tests.notebook.test_orphans import AGENT, until
from tests.processes import still_running
from tests.unit.test_deadlock import FACTS
from tests.versions import elsewhere, refused

MEET = "%%ddp\nimport torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
LOST = (
    "on macOS a rank that is blocked in a collective cannot be unblocked; nbddp replaces it, and its variables are "
    "lost; each worker imports torch itself, which takes seconds\n"
)


# -- what is refused ------------------------------------------------------------------------------


def after(code: str, folder: Path) -> tuple[str, list[str]]:
    """What a process prints in which macOS is played, and what nbddp was refused in it."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=refused.environment(folder, os.environ), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, [use["what"] for use in refused.uses(folder)]


USES = {
    "fork": ("from nbddp.agent import children\nchildren._fork('', {}, ())", "os.fork"),
    "prctl": ("from nbddp.compat import system\nfrom nbddp.agent import children\nsystem.is_linux = lambda: True\n"
              "children.die_with_parent(0)", "ctypes.dlsym"),
    "reading": ("from nbddp.compat import system\nfrom nbddp.deadlock.on_rank import threads\n"
                "system.has_proc = lambda: True\n"
                "threads._io('/proc/self/io')", "open /proc/self/io"),
    "listing": ("from nbddp.compat import system\nfrom nbddp.deadlock.on_rank import threads\n"
                "system.has_proc = lambda: True\n"
                "threads.tasks()", "os.listdir /proc/self/task"),
}  # fmt: skip


@pytest.mark.parametrize("name", USES)
def test_a_use_of_what_macos_lacks_raises_and_is_written_down(tmp_path: Path, name: str) -> None:
    code, what = USES[name]
    body = "".join(f"    {line}\n" for line in code.splitlines())
    said, uses = after(f"try:\n{body}except OSError as e:\n    print(type(e).__name__)\n", tmp_path)
    assert said == "Refused\n"
    assert len(uses) == 1
    assert uses[0].startswith(what)


def test_a_use_that_is_caught_is_written_down_and_libraries_keep_what_they_need(tmp_path: Path) -> None:
    code = (
        "import os, sys, psutil\nfrom nbddp.compat import system\nfrom nbddp.deadlock.on_rank import threads\n"
        "system.has_proc = lambda: True\nassert threads.waits(1) == ''\n"
        "assert os.listdir('/proc/self/task') and psutil.Process().num_threads() and sys.platform == 'linux'\n"
        "assert threads.system.sys.platform == 'darwin' and not hasattr(threads.os, 'pidfd_open')"
    )
    assert after(code, tmp_path) == ("", ["open /proc/self/task/1/syscall None"])


def test_tests_that_are_left_out_on_macos_are_there() -> None:
    for name in elsewhere.LOST:
        file, _, test = name.partition("::")
        found = [path.read_text() for path in Path(__file__).parents[1].glob(f"*/{file}")]
        assert found, name
        assert not test or any(f"def {test.partition('[')[0]}(" in text for text in found), name


# -- one by one -----------------------------------------------------------------------------------


@pytest.fixture
def darwin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "sys", types.SimpleNamespace(platform="darwin"))
    system.has_proc.cache_clear()
    yield
    system.has_proc.cache_clear()


def test_the_loopback_is_found_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def address(family: int, text: str) -> Any:
        return types.SimpleNamespace(family=family, address=text)

    macs = {
        "en0": [address(socket.AF_INET, "192.168.1.7")],
        "lo0": [address(socket.AF_INET6, "::1"), address(socket.AF_INET, "127.0.0.1")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: macs)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"lo0": types.SimpleNamespace(isup=True, speed=0)})
    assert hardware.loopback_name() == "lo0"
    assert hardware.interfaces() == [{"name": "lo0", "speed": 0, "loopback": True, "addresses": ["::1", "127.0.0.1"]}]


def test_where_no_bytes_are_counted_computing_counts_as_moving() -> None:
    before = Position(0, "running", cpu=1.0, bytes=None)
    facts = replace(FACTS, bytes=None)
    assert not position_of(0, replace(facts, cpu=1.1), before, 1.0).moved
    assert position_of(0, replace(facts, cpu=1.3), before, 1.0).moved
    assert position_of(0, facts, None, 1.0).moved, "nothing is known of it yet"


def test_peaks_come_in_bytes(darwin: None) -> None:
    assert system.peak_bytes(5 << 20) == 5 << 20


def test_memory_of_others_is_what_is_resident(darwin: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "memory_full_info", refuse)
    me = ProcessId.of(os.getpid())
    assert table.megabytes({"pid": me.pid, "started": me.started}).endswith(" MiB")


def test_a_pid_of_somebody_else_who_may_not_be_asked_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    me = ProcessId.of(os.getpid())
    monkeypatch.setattr(psutil.Process, "status", refuse)
    assert not me.alive()


# -- a pool ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which uses are written down, of which there must be none."""
    folder = tmp_path_factory.mktemp("played")
    yield folder
    assert refused.uses(folder) == []


@pytest.fixture(scope="module")
def first_words() -> list[str]:
    """What the kernel's first cell has shown."""
    return []


@pytest.fixture(scope="module")
def mac(played: Path, first_words: list[str]) -> Iterator[Kernel]:
    """A kernel that plays a Mac, where the path of the pool's socket is too long too."""
    long = played / ("long" * 20)
    env = refused.environment(played, {**os.environ, "NBDDP_RUNTIME_DIR": str(long)})
    with loaded(str(played), env, warm=False) as kernel:
        first = f"{MEET.replace('%%ddp', '%%ddp --nproc 2')}t = torch.ones(1); dist.all_reduce(t); t.item()"
        first_words.append(kernel.run(first).text())
        yield kernel


@pytest.fixture
def two(mac: Kernel) -> Kernel:
    shown = mac.run("%ddp start --nproc 2")
    assert shown.ok, shown.error
    return mac


def test_the_first_cell_says_once_what_is_lost(mac: Kernel, first_words: list[str]) -> None:
    assert first_words == [f"{LOST}ranks 0–1 Out │ 2.0\n"]
    assert mac.run("%%ddp --nproc 2\n2.0").text().endswith("ranks 0–1 Out │ 2.0\n")
    assert LOST not in mac.run("%%ddp\n2.0").text()
    assert LOST in mac.run("%ddp status").text()
    spawned = mac.run(AGENT + "print(agent.warm.spawn)").text()
    assert spawned == "fork is not safe on macOS\n"


def test_a_failing_rank_is_named_and_the_blocked_one_is_replaced(two: Kernel) -> None:
    two.run("%%ddp\nkept = 7")
    shown = two.run(f"{MEET}if dist.get_rank() == 1: raise ValueError('mine')\ndist.barrier()")
    assert shown.evalue == "rank 1 raised ValueError: mine (cell line 4)"
    waits = r"rank 0: cell line 5, (waiting|apparently waiting) in barrier #1 for rank 1"
    found = re.search(f"{waits}; (could not be unblocked, so it is replaced; lost: .*kept|unblocked)", shown.error)
    assert found, shown.error
    after = two.run("%%ddp\n'kept' in globals()")
    if found[2] == "unblocked":  # Linux's gloo wakes when the failed rank's group has ended, before rank 0 is replaced
        assert after.text() == "ranks 0–1 Out │ True\n"
    else:
        assert after.text() == "rank 0 is new and empty\nrank 0 Out │ False\nrank 1 Out │ True\n"


def test_stop_replaces_only_what_is_blocked(two: Kernel) -> None:
    two.run("%%ddp\nkept = 7")
    cell = two.send(
        f"{MEET}import time\nprint('busy', flush=True)\nif dist.get_rank(): time.sleep(600)\ndist.barrier()"
    )
    while "waiting in barrier" not in str(two.client.get_iopub_msg(timeout=30)["content"]):  # as the live view has it
        pass
    two.interrupt()
    shown = two.collect(cell)
    assert shown.reply["ename"] == "RunStopped"
    assert "interrupted, variables are kept" in shown.error
    assert two.run("%%ddp --ranks 1\nkept").text().endswith("rank 1 Out │ 7\n")


def test_what_c_says_arrives_and_last_words_too(two: Kernel) -> None:
    assert two.run("%%ddp\nimport os; done = os.system('echo from C')").text() == "ranks 0–1 │ from C\n"
    dies = "import os, signal\nos.write(2, b'terminate called: no heap\\n')\nos.kill(os.getpid(), signal.SIGKILL)"
    shown = two.run(f"%%ddp --ranks 1\n{dies}")
    assert shown.evalue.startswith("rank 1 died: killed by SIGKILL")
    assert "terminate called: no heap" in shown.error


def family(kernel: Kernel) -> tuple[list[psutil.Process], Path]:
    found = kernel.run(AGENT + "print(agent.hello.pid, agent.home, sep='|')").text()
    pid, folder = found.strip().split("|")
    agent = psutil.Process(int(pid))
    return [agent, *agent.children(recursive=True)], Path(folder)


def test_stopping_the_pool_leaves_no_process(two: Kernel) -> None:
    processes, folder = family(two)
    assert len(str(folder / runtime_dir.SOCKET)) > runtime_dir.LONGEST_SOCKET
    assert runtime_dir.socket_of(folder).is_socket()
    assert two.run("%ddp stop").ok
    until(lambda: not still_running(processes))
    assert not folder.exists()
    assert not runtime_dir.socket_of(folder).exists()


@pytest.mark.more
def test_the_owners_death_leaves_no_process(two: Kernel) -> None:
    """Though a fork of the owner's holds the agent's pipe open."""
    forks = "import os, time\nchild = os.fork()\nif not child:\n    time.sleep(600)\n    os._exit(0)\nprint(child)"
    fork = psutil.Process(int(two.run(forks).text()))
    try:
        processes, folder = family(two)
        psutil.Process(two.pid).kill()
        until(lambda: not still_running(processes))
        until(lambda: not folder.exists())
    finally:
        fork.kill()
