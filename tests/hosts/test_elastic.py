"""Nodes that come and go while a cell runs: the cell begins again from its top on those that there are."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import nbddp
from nbddp.launch.options import LaunchSpec, parse_cell
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests import places, warm
from tests.hosts import slurm_hosts, ssh_hosts
from tests.hosts.ssh_hosts import Hosts
from tests.waiting import until

ROOT = places.ROOT
ssh = pytest.mark.skipif(not ssh_hosts.HERE, reason=ssh_hosts.MISSING)
real_slurm = pytest.mark.skipif(not slurm_hosts.HERE, reason=slurm_hosts.MISSING)
# sums over all steps are exact in floats of this size, so they do not depend on how the batch is shared
TRAINING = """
import os, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
state = torch.load(path) if os.path.exists(path) else {"step": 0, "worlds": [], "weight": torch.zeros(1, 12)}
model = DDP(torch.nn.Linear(12, 1, bias=False))
model.module.weight.data.copy_(state["weight"])
data = torch.eye(12) * torch.arange(1.0, 13.0)  # 12 rows, which 1, 2 and 3 nodes share evenly
for step in range(state["step"], STEPS):
    while step >= HOLD.get(world, STEPS):  # till the nodes change
        time.sleep(0.05)
    model.zero_grad()
    model(data[rank::world]).sum().backward()
    with torch.no_grad():
        model.module.weight += model.module.weight.grad * world / 16
    state = {"step": step + 1, "worlds": [*state["worlds"], world], "weight": model.module.weight.detach().clone()}
    if rank == 0:
        torch.save(state, path + ".new"); os.replace(path + ".new", path)
        with open(path + ".log", "a") as log: print(step, world, file=log)
    dist.barrier()
dist.destroy_process_group()
state["step"], state["worlds"], state["weight"].tolist()
"""


class Told(NullScreen):
    """Keeps the lines that stay."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with ssh_hosts.ssh_hosts(tmp_path_factory.mktemp("ssh"), ("nodea", "nodeb", "nodec")) as made:
        yield made


def on(hosts: Hosts, names: str, nnodes: tuple[int, int], **more: object) -> WorkerPool:
    setup = f"export PYTHONPATH={shlex.quote(str(ROOT))} NBDDP_RUNTIME_DIR={shlex.quote(str(hosts.folder))}"
    asked: dict[str, object] = {"nproc": 1, "ssh_config": str(hosts.config), "setup": setup, "nnodes": nnodes, **more}
    return WorkerPool(hosts=names, **asked)  # type: ignore[arg-type]


def training(path: Path, steps: int, hold: dict[int, int]) -> str:
    """hold: world size → the step at which it waits for other nodes."""
    return f"path, STEPS, HOLD = {str(path)!r}, {steps}, {hold}\n{TRAINING}"


def worlds_seen(path: Path) -> list[int]:
    log = Path(f"{path}.log")
    return [int(line.split()[1]) for line in log.read_text().splitlines()] if log.exists() else []


def test_a_line_names_the_fewest_and_the_most_nodes() -> None:
    spec = parse_cell("--nnodes 1:4 --max-restarts 3")
    assert spec.elastic == (1, 4)
    assert spec.nnodes is None
    assert parse_cell("--slurm --nnodes 1:4").slurm.nodes == "1-4"  # type: ignore[union-attr]
    with pytest.raises(nbddp.BadInput, match="'4:1' counts backwards; write it as 1:4"):
        parse_cell("--nnodes 4:1")


@ssh
@pytest.mark.cuts
def test_training_goes_through_two_one_and_three_nodes_to_the_same_end(hosts: Hosts, tmp_path: Path) -> None:
    """A killed agent, a host that comes back, and one more: with checkpoints the end is that of an undisturbed run."""
    path, steps = tmp_path / "state", 20
    told = Told()
    with on(hosts, "nodea,nodeb,nodec", (1, 3)) as pool:
        assert pool.scale(2)[0].startswith("the pool has 2 nodes (nodea, nodeb), world size 2")

        def disturb() -> None:
            until(lambda: worlds_seen(path).count(2) >= 3)
            os.kill(pool.group.added[1].agent.hello.pid, signal.SIGKILL)
            until(lambda: 1 in worlds_seen(path))
            assert pool.agent is not None
            terminal = [sys.executable, "-m", "nbddp", "scale", "3", pool.agent.pool_id]
            subprocess.run(terminal, check=True, capture_output=True)

        thread = threading.Thread(target=disturb)
        thread.start()
        found = pool.run_cell(training(path, steps, {2: 5, 1: 9}), want_value=True, max_restarts=3, screen=told)
        thread.join()
    step, worlds, weight = found[0]
    assert step == steps
    assert [w for w, before in zip(worlds, [0, *worlds], strict=False) if w != before][:2] == [2, 1]
    assert worlds[-1] == 3
    undisturbed = tmp_path / "undisturbed"
    with warm.pool(1) as alone:
        (same,) = alone.run_cell(training(undisturbed, steps, {}), want_value=True, screen=NullScreen())
    assert weight == same[2]
    assert any(line.startswith("attempt 1 of 4: rank ") for line in told.said), told.said
    assert any("the pool has 1 node (nodea), world size 1" in line for line in told.said), told.said
    assert any("can join; restarting all workers and the cell" in line for line in told.said), told.said


@pytest.mark.cuts
@ssh
def test_a_host_that_does_not_come_up_is_told_and_joins_later(hosts: Hosts, tmp_path: Path) -> None:
    late = tmp_path / "python"
    late.write_text(f'#!/bin/sh\n[ "$NODE" = nodea ] || [ -e {tmp_path}/up ] || exit 3\nexec {sys.executable} "$@"\n')
    late.chmod(0o755)
    # each sshd tells its own port
    setup = (
        f"export PYTHONPATH={shlex.quote(str(ROOT))} NBDDP_RUNTIME_DIR={shlex.quote(str(hosts.folder))}\n"
        f'case "$SSH_CONNECTION" in *" {hosts.addresses[0][1]}") export NODE=nodea;; esac'
    )
    with on(hosts, "nodea,nodeb", (1, 2), setup=setup, python=str(late)) as pool:
        assert pool.world_size == 1
        (tmp_path / "up").touch()
        told = Told()
        code = "import os, time\nwhile os.environ['WORLD_SIZE'] == '1': time.sleep(0.05)\nos.environ['WORLD_SIZE']"
        assert list(pool.run_cell(code, want_value=True, screen=told)) == ["2", "2"]
    assert told.said[0] == "nodeb can join; restarting all workers and the cell"
    assert told.said[1] == "the pool has 2 nodes (nodea, nodeb), world size 2"


@pytest.mark.more
@ssh
def test_between_cells_a_lost_host_is_told_and_the_pool_goes_on(hosts: Hosts) -> None:
    with on(hosts, "nodea,nodeb", (1, 2)) as pool:
        first = pool.group.added[0].agent
        os.kill(first.hello.pid, signal.SIGKILL)
        until(lambda: not first.alive)
        (note,) = [line for line in pool.ensure(LaunchSpec()) if "nodea" in line]
        assert note.startswith("nodea is gone (")
        assert note.endswith("the pool has 1 node (nodeb), world size 1; variables on all workers are lost")
        code = "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.get_world_size()"
        assert list(pool.run_cell(code, want_value=True, screen=NullScreen())) == [1]


def test_simulated_nodes_come_and_go_too(tmp_path: Path) -> None:
    """From a terminal, while a cell runs; what does not fit is refused."""
    with WorkerPool(nproc=1, nnodes=(1, 3)) as pool:
        assert pool.world_size == 1
        assert pool.scale(2) == ["the pool has 2 nodes, world size 2; variables on all workers are lost"]
        with pytest.raises(nbddp.BadInput, match="the pool cannot have 4 nodes: it was started with --nnodes 1:3"):
            pool.scale(4)
        started = tmp_path / "started"
        code = (
            f"import os, time\nopen({str(started)!r}, 'w').close()\n"
            "while os.environ['WORLD_SIZE'] == '2': time.sleep(0.05)\nos.environ['TORCHELASTIC_RESTART_COUNT']"
        )
        answers: list[subprocess.CompletedProcess[str]] = []

        def ask() -> None:
            until(started.exists)
            for nodes in ("4", "3"):
                assert pool.agent is not None
                command = [sys.executable, "-m", "nbddp", "scale", nodes, pool.agent.pool_id]
                answers.append(subprocess.run(command, capture_output=True, text=True))

        thread = threading.Thread(target=ask)
        thread.start()
        assert list(pool.run_cell(code, want_value=True, screen=NullScreen())) == ["0"] * 3, "it is no failure"
        thread.join()
        assert "was started with --nnodes 1:3 and cannot have 4" in answers[0].stderr
        assert "will have 3 nodes" in answers[1].stdout
    other = "this pool has a fixed number of nodes; start it with --nnodes 1:2"
    with warm.pool(1) as pool, pytest.raises(nbddp.BadInput, match=other):
        pool.scale(2)


@real_slurm
@pytest.mark.more
def test_slurm_is_asked_for_a_second_job(tmp_path_factory: pytest.TempPathFactory) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        slurm_hosts.slurm(tmp_path_factory.mktemp("slurm")) as conf,
    ):
        patch.setenv("SLURM_CONF", str(conf))
        with WorkerPool(nproc=1, nnodes=(1, 2), slurm=nbddp.Slurm(nodes=1)) as pool:
            assert pool.world_size == 1
            assert pool.scale(2)[0].startswith("the pool has 2 nodes (n")
            assert len(pool.parts.of("slurm").allocations) == 2
            code = "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.get_world_size()"
            assert list(pool.run_cell(code, want_value=True, screen=NullScreen())) == [2, 2]
