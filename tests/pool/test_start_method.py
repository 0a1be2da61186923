"""`--start-method`: workers that import torch themselves, beside those that are forked from a process which has."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from nbddp.capabilities.completion.lines import complete_cell, complete_command
from nbddp.capabilities.start_method.part import StartMethodPart
from nbddp.capabilities.status.public import status
from nbddp.errors import BadInput, WorkerFailed
from nbddp.launch.options import LaunchSpec, parse_cell
from nbddp.notebook.commands import parse_command
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests import warm

LOST = "all workers were replaced, and their variables are lost"


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with warm.pool(1) as made:
        yield made


def spawned(pool: WorkerPool) -> list[int]:
    """The ranks whose processes have a command line of their own, not that of the agent they were forked from."""
    processes = {rank: psutil.Process(worker.pid) for rank, worker in sorted(pool.workers.items())}
    return [rank for rank, process in processes.items() if process.cmdline() != process.parent().cmdline()]


def hashes(pool: WorkerPool) -> list[int]:
    return list(pool.run_cell("hash('a string')", want_value=True, screen=NullScreen()))


def test_another_method_replaces_the_workers_and_the_same_keeps_them(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pool.ensure(parse_cell("--start-method fork")) == []
    assert spawned(pool) == []
    before = hashes(pool)
    monkeypatch.setattr("nbddp.pool.worker_group.REGISTER_TIMEOUT", 0.001)  # of one that is forked
    assert pool.ensure(parse_cell("--start-method spawn")) == [f"--start-method spawn: {LOST}"]
    monkeypatch.undo()
    assert spawned(pool) == [0]
    assert hashes(pool) != before, "an interpreter of its own"
    pids = [worker.pid for worker in pool.workers.values()]
    for line in ("", "--start-method spawn"):
        assert pool.ensure(parse_cell(line)) == []
    assert [worker.pid for worker in pool.workers.values()] == pids
    assert "workers start by spawn (--start-method)" in str(status(pool))
    with pytest.raises(WorkerFailed):
        pool.run_cell("import os\nos._exit(3)", screen=NullScreen())
    pool.ensure(LaunchSpec())
    assert spawned(pool) == [0], "a rank that is replaced starts by the pool's method"
    assert pool.ensure(parse_cell("--start-method fork")) == [f"--start-method fork: {LOST}"]
    assert spawned(pool) == []
    assert "workers start by fork (--start-method)" in str(status(pool))


def test_where_nothing_can_be_forked_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBDDP_START_METHOD", "spawn")
    pool = WorkerPool(nproc=1, start_method="fork")
    with pytest.raises(BadInput, match="--start-method fork: NBDDP_START_METHOD=spawn; remove --start-method fork"):
        pool.start()
    pool.close()


@pytest.mark.more
def test_a_script_and_a_terminal_take_it(tmp_path: Any) -> None:
    script = tmp_path / "hashed.py"
    script.write_text("print(hash('a string'))\n")
    command = [sys.executable, "-m", "nbddp", "run", "--nproc", "2", "--start-method", "spawn", str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    assert len({*re.findall(r"-?\d{9,}", ran.stdout)}) == 2, ran.stdout


def part(*spawn: str, cluster: bool = False, far: bool = False, running: str = "--nproc 2") -> StartMethodPart:
    """Of a pool that runs on nodes of which each says why it does not fork."""
    hosts = [SimpleNamespace(name=f"node{i}", facts=SimpleNamespace(spawn=why)) for i, why in enumerate(spawn)]
    group = SimpleNamespace(
        hosts=hosts, added=hosts * far, can_respawn=not cluster, topology="there is one", workers={0: ""}
    )
    return StartMethodPart(SimpleNamespace(group=group, spec=parse_cell(running)))  # type: ignore[arg-type]


def test_engines_and_hosts_that_cannot_are_named() -> None:
    topology: Any = None
    asks = LaunchSpec(start_method="fork")
    with pytest.raises(BadInput, match="spawn needs processes that nbddp starts, and a cluster has its own; remove"):
        part("", cluster=True).planned(LaunchSpec(start_method="spawn"), topology)
    assert part("", cluster=True).planned(LaunchSpec(), topology) == []
    with pytest.raises(BadInput, match="--start-method fork: node1: fork is not safe on macOS; remove --start-method"):
        part("", "fork is not safe on macOS", far=True).planned(asks, topology)
    assert not part("a reason").renews(LaunchSpec(start_method="spawn"))  # they are spawned already
    assert part("a reason", "", far=True).renews(LaunchSpec(start_method="spawn"))


def test_it_is_an_option_of_all_lines() -> None:
    assert parse_cell("--start-method spawn").start_method == "spawn"
    assert parse_command("start --start-method fork").launch.start_method == "fork"
    assert parse_command("run --start-method spawn t.py").launch.start_method == "spawn"
    assert parse_command(["run", "--start-method", "spawn", "t.py"], "python -m nbddp").launch.start_method == "spawn"
    assert complete_cell("--start-method s") == ["spawn"]
    assert complete_command("start --start-m") == ["--start-method"]
    with pytest.raises(BadInput, match="--start-method"):
        parse_cell("--start-method forkserver")
    with pytest.raises(BadInput, match="start_method='forkserver' is not one of fork, spawn"):
        WorkerPool(start_method="forkserver")
