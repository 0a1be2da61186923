"""However a pool ends, nothing of it is left, and nothing that is left stops the next one."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from nbddp.agent import runtime_dir
from tests.kernels import Kernel
from tests.processes import still_running
from tests.waiting import until

BUSY = (
    "%%ddp\nimport torch, torch.distributed as dist, os, time\ndist.init_process_group('gloo')\nkept = 5\n"
    "print('busy', flush=True)\nif os.environ['RANK'] == '0': dist.barrier()\ntime.sleep(600)"
)
STARTED = r'''%%ddp
import os, pathlib, subprocess, sys, torch
def told(what):
    pathlib.Path("pids", f"{what}-{os.environ['RANK']}").write_text(str(os.getpid()))
    import time
    time.sleep(600)
os.makedirs("pids", exist_ok=True)
def forked(what, *ways):
    if not os.fork():
        for way in ways:
            if way == "setsid": os.setsid()
            elif os.fork(): os._exit(0)
        told(what)
        os._exit(0)
forked("child")
forked("session", "setsid")
forked("daemon", "setsid", "fork", "setsid")
says = """import os, pathlib, time
pathlib.Path('pids', 'program-%s' % os.environ['RANK']).write_text(str(os.getpid()))
time.sleep(600)"""
subprocess.Popen([sys.executable, "-c", says], start_new_session=True)
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): told(f"loader{i}")
kept = iter(torch.utils.data.DataLoader(Slow(), num_workers=2))'''
AGENT = "from nbddp.notebook.magics import _loaded\nagent = [m.pool.agent for m in _loaded.values()][0]\n"


class Pool:
    """A kernel with a pool of two: the agent, all its processes, and its folder."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        assert kernel.run("%ddp start --nproc 2").ok
        told = kernel.run(AGENT + "print(agent.hello.pid, agent.process.pid, agent.home, sep='|')").text()
        agent, keeper, home = told.strip().split("|")
        self.agent, self.keeper, self.home = psutil.Process(int(agent)), psutil.Process(int(keeper)), Path(home)
        assert self.agent.parent() == self.keeper
        self.family = [self.keeper, *self.keeper.children(recursive=True)]

    def controller(self) -> psutil.Process:
        answer = "print([c['pid'] for c in agent.request('status')['children'] if c['kind'] == 'controller'][0])"
        return psutil.Process(int(self.kernel.run(answer).text()))

    def busy(self) -> str:
        """Start a cell that never ends, and wait until a rank is in it."""
        cell = self.kernel.send(BUSY)
        until(lambda: "running" in self.states())
        return cell

    def started(self, pids: Path) -> list[psutil.Process]:
        """What ranks have started, in each of the ways of `STARTED`."""
        assert self.kernel.run(STARTED).ok
        until(lambda: len([p for p in pids.glob("*") if p.read_text()]) == 2 * 6)
        return [psutil.Process(int(path.read_text())) for path in pids.iterdir()]

    def states(self) -> str:
        from nbddp.agent.client import AgentClient

        agent = AgentClient.connect(self.home)
        try:
            return str(agent.request("status"))
        finally:
            agent.close()


@pytest.fixture
def pool(cold_kernel: Kernel) -> Pool:
    return Pool(cold_kernel)


@pytest.mark.every(3)
@pytest.mark.parametrize("whom", [["keeper"], ["agent", "kernel"], ["keeper", "kernel"]], ids="-".join)
def test_what_ranks_have_started_ends_with_the_pool_whoever_is_killed(
    pool: Pool, tmp_path: Path, whom: list[str]
) -> None:
    """Also what made a session of its own, and what forked twice."""
    started = pool.started(tmp_path / "pids")
    victims = {"agent": pool.agent, "keeper": pool.keeper, "kernel": psutil.Process(pool.kernel.pid)}
    for name in whom:
        victims[name].suspend()  # none sees another's end
    for name in whom:
        victims[name].kill()
    until(lambda: not still_running([*started, *pool.family]), 5)
    until(lambda: not pool.home.exists(), 5)


def test_kernel_killed_and_restarted_while_a_cell_runs(pool: Pool) -> None:
    """And then shut down, as when its notebook is closed."""
    pool.busy()
    pool.kernel.manager.restart_kernel(now=True)
    pool.kernel.client.wait_for_ready(timeout=60)
    until(lambda: not still_running(pool.family), 3)
    until(lambda: not pool.home.exists(), 10)
    assert pool.kernel.run("%load_ext nbddp").ok
    assert pool.kernel.run("%%ddp --nproc 2\nprint('new')").text() == "ranks 0–1 │ new\n"
    again = Pool(pool.kernel)
    again.kernel.manager.shutdown_kernel(now=False)
    until(lambda: not still_running(again.family), 3)
    assert not again.home.exists()


@pytest.mark.every(2)
@pytest.mark.parametrize("whom", ["agent", "controller"])
def test_agent_or_controller_killed_while_a_cell_runs(pool: Pool, tmp_path: Path, whom: str) -> None:
    started = pool.started(tmp_path / "pids") if whom == "agent" else []
    victim = pool.agent if whom == "agent" else pool.controller()
    cell = pool.busy()
    victim.kill()
    shown = pool.kernel.collect(cell)
    assert shown.reply["ename"] == "PoolNotRunning"
    assert "the next %%ddp cell starts a new pool" in shown.evalue
    until(lambda: not still_running([*started, *pool.family]), 5)
    again = pool.kernel.run("%%ddp --nproc 2\nprint('kept' in globals())")
    told = f"the pool has stopped with its {'node agent' if whom == 'agent' else whom}; ranks 0–1 are new and empty"
    assert again.text() == f"{told}\nranks 0–1 │ False\n", again.error
    assert pool.home not in runtime_dir.running()
    assert not pool.home.exists()


@pytest.mark.more
def test_machine_suspended_and_resumed(pool: Pool) -> None:
    """All processes stop and go on later: nothing takes the gap for a death."""
    pool.kernel.run("%%ddp\nkept = 7")
    frozen = [psutil.Process(pool.kernel.pid), *pool.family]
    for process in frozen:
        process.suspend()
    time.sleep(3)  # longer than any patience of ours
    for process in reversed(frozen):
        process.resume()
    shown = pool.kernel.run(
        "%%ddp\nimport torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "t = torch.ones(1); dist.all_reduce(t); dist.destroy_process_group(); print(kept, t.item())"
    )
    assert shown.text() == "ranks 0–1 │ 7 2.0\n", shown.error


def test_stop_while_the_pool_starts(new_kernel: Kernel) -> None:
    """Workers that are half started are found again by the next cell."""
    new_kernel.run("%ddp start --nproc 1")
    cell = new_kernel.send("%ddp start --nproc 6")
    while True:
        message = new_kernel.client.get_iopub_msg(timeout=60)
        if "starting 5 workers" in str(message["content"].get("data", "")):
            break
    new_kernel.interrupt()
    shown = new_kernel.collect(cell)
    assert shown.ok or shown.reply["ename"] == "CommandStopped", shown.error
    after = new_kernel.run("%%ddp --nproc 6\nimport os; print(os.environ['RANK'] in '012345')")
    assert after.text().endswith("ranks 0–5 │ True\n"), after.error
    pids = new_kernel.run("%%ddp -o pids\nimport os; os.getpid()\n")
    assert pids.ok, pids.error
    held = new_kernel.run(AGENT + "print(sum(c['kind'] == 'worker' for c in agent.request('status')['children']))")
    assert held.text().strip() == "6"


@pytest.mark.more
def test_signal_handlers_are_as_before_after_a_run(cold_kernel: Kernel) -> None:
    before = cold_kernel.run("import signal; print(signal.getsignal(signal.SIGINT))").text()
    cold_kernel.run("%%ddp --nproc 1\n1")
    assert cold_kernel.run("print(signal.getsignal(signal.SIGINT))").text() == before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
