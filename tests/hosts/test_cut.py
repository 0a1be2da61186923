"""Hosts that fall silent: a cable is cut or stalls, an agent stops, ssh or the notebook's kernel is killed.

Each host has namespaces and a cable of its own (`netns_hosts.py`). Those tests that need a pool for themselves
are run by `-m cuts`.
"""

from __future__ import annotations

import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import nbddp
from nbddp.errors import PoolNotRunning
from nbddp.launch.options import LaunchSpec
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests.hosts.netns_hosts import Network, network, why_not
from tests.kernels import loaded
from tests.pool.faults import needs_recorder
from tests.waiting import until

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
TOLD = 10.0  # seconds until a silent host is reported
LEFT = 30.0  # until nothing is left beyond the cut
INIT = (
    "import os, time, torch, torch.distributed as dist\nif not dist.is_initialized(): dist.init_process_group('gloo')\n"
)
READY = "print('ready', flush=True)\n"
LOOP = f"{INIT}t = torch.ones(4)\ndist.barrier()\n{READY}while True: dist.all_reduce(t)"
ADDED = f"{INIT}t = torch.ones(1)\ndist.all_reduce(t)\nt.item(), globals().get('kept')"


class Then(NullScreen):
    """A screen that does something some time after the first rank has said `ready`. `began`: when it did it."""

    def __init__(self, act: Callable[[], object], after: float = 0.3):
        self.began, self._act, self._after, self._left = 0.0, act, after, True

    def line(self, rank: int, stream: str, text: str) -> None:
        if text == "ready" and self._left:
            self._left = False
            threading.Timer(self._after, self._do).start()

    def _do(self) -> None:
        self.began = time.monotonic()
        self._act()

    @property
    def took(self) -> float:
        return time.monotonic() - self.began


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with network(tmp_path_factory.mktemp("net")) as made:
        yield made


def pool_on(net: Network) -> WorkerPool:
    return WorkerPool(hosts="nodea,nodeb", nproc=1, ssh_config=str(net.config), setup=net.setup())


@pytest.fixture(scope="module")
def lasting(net: Network) -> Iterator[WorkerPool]:
    """For tests in their order; the last one cuts its cable."""
    with pool_on(net) as pool:
        yield pool
    net.mend()


@pytest.fixture
def pool(net: Network) -> Iterator[WorkerPool]:
    net.mend()
    with pool_on(net) as made:
        made.run_cell("kept = 7", screen=NullScreen())
        yield made
    net.mend()


def nothing_left(net: Network, *names: str) -> Callable[[], bool]:
    return lambda: not any(net.hosts[name].processes() for name in names)


def check_lost(
    pool: WorkerPool, error: nbddp.RunFailed, took: float, rank_0: tuple[str, ...] = ("interrupted",)
) -> None:
    """Rank 1's host is named in time, and rank 0 is free and has its names, or is otherwise as `rank_0` has it."""
    assert took < TOLD
    assert str(error) == "rank 1 died: its host is gone"
    assert "The next cell reports the state of the pool." in error.report
    assert [s.rank for s in error.states if s.status == "died"] == [1]
    assert error.states[0].status in rank_0, error.report
    with pytest.raises(PoolNotRunning, match=r"nodeb is gone \(.*\); variables on its workers are lost"):
        pool.ensure(LaunchSpec())


@pytest.mark.cuts
def test_a_stall_of_two_seconds_harms_nothing(net: Network, lasting: WorkerPool) -> None:
    lasting.run_cell(f"{INIT}kept = 7", screen=NullScreen())
    code = (
        f"t, slowest = torch.ones(1), 0.0\n{READY}for _ in range(150):\n"
        "    began = time.time(); dist.all_reduce(t, dist.ReduceOp.MAX); slowest = max(slowest, time.time() - began)\n"
        "    time.sleep(0.01)\nkept, t.item(), slowest"
    )
    found = lasting.run_cell(code, want_value=True, screen=Then(lambda: net.set("nodeb", stall=2)), timeout=30)
    assert [(kept, value) for kept, value, _ in found] == [(7, 1.0)] * 2
    assert all(1.5 < slowest < 4 for _, _, slowest in found), "the cable has stalled"
    assert lasting.running


@pytest.mark.cuts
def test_ranks_whose_hosts_do_not_reach_each_other_any_more_are_freed(net: Network, lasting: WorkerPool) -> None:
    """The notebook reaches both: each rank has to see for itself that the other is silent, long before any timeout."""
    screen = Then(lambda: net.set("nodeb", apart=["nodea"]))
    lasting.run_cell(f"{INIT}kept = 7", screen=NullScreen())
    with pytest.raises(nbddp.WorkerFailed, match="raised RuntimeError") as caught:
        lasting.run_cell(LOOP, hang_after=None, screen=screen, timeout=30)
    assert 4 < screen.took < TOLD
    assert {s.status for s in caught.value.states} <= {"failed", "interrupted"}, caught.value.report
    net.mend()
    assert list(lasting.run_cell(ADDED, want_value=True, screen=NullScreen())) == [(2.0, 7)] * 2


@pytest.mark.cuts
@needs_recorder
def test_a_cut_cable_is_told_and_nothing_is_left_beyond_it(net: Network, lasting: WorkerPool) -> None:
    screen = Then(lambda: net.cut("nodeb"))
    with pytest.raises(nbddp.WorkerFailed) as caught:
        lasting.run_cell(LOOP, hang_after=None, screen=screen, timeout=30)
    check_lost(lasting, caught.value, screen.took)
    until(nothing_left(net, "nodea"), 5)
    until(nothing_left(net, "nodeb"), LEFT - screen.took)


# -- each with a pool of its own -----------------------------------------------------------------


@pytest.mark.cuts
@pytest.mark.parametrize("after", [0.0, 0.1, 0.2, 0.4, 0.8])
def test_cut_during_init(net: Network, pool: WorkerPool, after: float) -> None:
    """Over a slow cable, so that each step of it is met. In one of them rank 0 waits for a connection that never comes
    (gloo's `waitUntilConnected`), which nothing ends: there it is replaced."""
    net.set("nodeb", delay=0.02)
    screen = Then(lambda: net.cut("nodeb"), after)
    code = f"import torch.distributed as dist\n{READY}dist.init_process_group('gloo')\nwhile True: dist.barrier()"
    with pytest.raises(nbddp.WorkerFailed) as caught:
        pool.run_cell(code, hang_after=None, screen=screen, timeout=40)
    check_lost(pool, caught.value, screen.took, ("interrupted", "replaced"))


@pytest.mark.cuts
def test_cut_between_cells(net: Network, pool: WorkerPool) -> None:
    began = time.monotonic()
    net.cut("nodeb")
    until(lambda: not pool.running, TOLD)
    with pytest.raises(PoolNotRunning, match="nodeb is gone"):
        pool.ensure(LaunchSpec())
    until(nothing_left(net, "nodeb"), LEFT - (time.monotonic() - began))


@pytest.mark.cuts
def test_a_cell_that_begins_after_the_cut_is_told_so(net: Network, pool: WorkerPool) -> None:
    pool.run_cell(INIT, screen=NullScreen())
    began = time.monotonic()
    net.cut("nodeb")
    with pytest.raises(nbddp.WorkerFailed, match="rank 1 died: its host is gone"):
        pool.run_cell("t = torch.ones(1); dist.all_reduce(t)", hang_after=None, screen=NullScreen())
    assert time.monotonic() - began < TOLD + 2


@pytest.mark.cuts
def test_a_cut_that_heals_late_leaves_nothing(net: Network, pool: WorkerPool) -> None:
    screen = Then(lambda: net.cut("nodeb"))
    with pytest.raises(nbddp.WorkerFailed):
        pool.run_cell(LOOP, hang_after=None, screen=screen)
    net.mend()
    until(nothing_left(net, "nodeb"), LEFT)


@pytest.mark.cuts
@pytest.mark.parametrize("seconds", [8.0])
def test_a_rank_that_is_stopped_for_a_while_amid_a_large_message_goes_on(
    net: Network, pool: WorkerPool, seconds: float
) -> None:
    """Its kernel answers that there is no room: it is not silent."""
    net.set("nodeb", rate=50e6)

    def stop() -> None:
        rank = net.hosts["nodeb"].here(pool.workers[1].pid)
        rank.suspend()
        time.sleep(seconds)
        rank.resume()

    code = f"{INIT}t = torch.ones(40_000_000)\n{READY}dist.all_reduce(t)\nt[0].item(), t[-1].item()"
    screen = Then(stop, 0.5)
    found = pool.run_cell(code, want_value=True, hang_after=None, screen=screen, timeout=60)
    assert list(found) == [(2.0, 2.0)] * 2
    assert screen.took > seconds


@pytest.mark.cuts
def test_an_agent_that_is_stopped_counts_as_gone_and_ends_when_it_goes_on(net: Network, pool: WorkerPool) -> None:
    agent = net.hosts["nodeb"].here(pool.group.added[1].agent.hello.pid)
    screen = Then(agent.suspend)
    try:
        with pytest.raises(nbddp.WorkerFailed) as caught:
            pool.run_cell(LOOP, hang_after=None, screen=screen)
        check_lost(pool, caught.value, screen.took)
        assert "nodeb has been silent for 8 s" in caught.value.report
    finally:
        agent.resume()
    until(nothing_left(net, "nodea", "nodeb"), 5)


@pytest.mark.cuts
def test_ssh_is_killed(net: Network, pool: WorkerPool) -> None:
    ssh = pool.group.added[1].agent.process
    assert ssh is not None
    screen = Then(ssh.kill)
    with pytest.raises(nbddp.WorkerFailed) as caught:
        pool.run_cell(LOOP, hang_after=None, screen=screen)
    check_lost(pool, caught.value, screen.took)
    until(nothing_left(net, "nodea", "nodeb"), 5)


@pytest.mark.cuts
@pytest.mark.parametrize("cut", [False, True])
def test_the_kernel_is_killed(net: Network, tmp_path: Path, cut: bool) -> None:
    """Also while a cable is cut: then nobody tells the agent that its owner has gone."""
    net.mend()
    line = f"%ddp start --hosts nodea,nodeb --nproc 1 --ssh-config {net.config} --setup {shlex.quote(net.setup())}"
    with loaded(str(tmp_path)) as kernel:
        assert (shown := kernel.run(line)).ok, shown.error
        kernel.send(f"%%ddp\n{LOOP}")
        until(lambda: any(p.cpu_times().user > 0.5 for p in net.hosts["nodeb"].processes()), 20)
        if cut:
            net.cut("nodeb")
        psutil.Process(kernel.pid).send_signal(signal.SIGKILL)
        until(nothing_left(net, "nodea"), 5)
        until(nothing_left(net, "nodeb"), LEFT if cut else 5)
    net.mend()
