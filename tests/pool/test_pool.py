"""The same from Python, the terminal's commands, and what is left behind."""

from __future__ import annotations

import argparse
import errno
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ipyparallel
import psutil
import pytest

import nbddp
from nbddp.agent import controller
from nbddp.agent.client import AgentClient
from nbddp.agent.controller import ephemeral_ports
from nbddp.capabilities.capacity import part as capacity
from nbddp.errors import AgentFailed, PoolNotRunning, RankStatus
from nbddp.launch.machine import Node
from nbddp.launch.options import LaunchSpec
from nbddp.launch.topology import Topology
from nbddp.output.screens import NullScreen
from nbddp.pool import start_requests
from nbddp.pool.pool import WorkerPool
from nbddp.protocol.agent import StartWorker
from tests import places, warm
from tests.kernels import Kernel
from tests.pool.faults import RECORDS
from tests.ports import connections
from tests.processes import still_running
from tests.versions import hidden
from tests.waiting import until


def rank_times(factor: int) -> int:
    return int(os.environ["RANK"]) * factor


def fail_on(rank: int) -> None:
    if os.environ["RANK"] == str(rank):
        raise LookupError(f"rank {rank} says no")


@pytest.mark.more
@pytest.mark.skipif(sys.platform != "linux", reason="the heart monitor is spawned, and beats as ipyparallel's")
def test_workers_are_there_before_the_heart_beats_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine is told of with its first answer to a beat, and the beats come quickly while one is awaited."""
    hidden.in_agents(tmp_path, hidden.beat)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(places.ROOT)]))
    monkeypatch.setattr("nbddp.pool.worker_group.REGISTER_TIMEOUT", 20.0)
    with WorkerPool(nproc=2) as pool:
        pool.restart([1])
        assert list(pool.run(rank_times, 3)) == [0, 3]


def test_run_returns_every_ranks_value_and_raises_the_first_failure() -> None:
    with WorkerPool(nproc=2) as pool:
        assert list(pool.run(rank_times, 5)) == [0, 5]
        with pytest.raises(LookupError, match="rank 1 says no") as caught:
            pool.run(fail_on, 1)
        failed = caught.value.__cause__
        assert isinstance(failed, nbddp.WorkerFailed)
        assert failed.rank == 1
        assert "in fail_on" in failed.report
        if sys.version_info >= (3, 11):
            line = fail_on.__code__.co_firstlineno + 2
            assert caught.value.__notes__ == [f"raised on rank 1 of 2 (test_pool.py line {line}, in fail_on)"]
        assert "LookupError: rank 1 says no" in failed.report
        assert list(pool.run(rank_times, 2)) == [0, 2]
        home = pool.agent.home
        pids = [w.pid for w in pool.workers.values()]
    assert not home.exists()
    assert not any(psutil.pid_exists(p) for p in pids)


def spin(on: int) -> int:
    rank = int(os.environ["RANK"])
    while rank == on:
        time.sleep(0.01)
    return rank


def leave(rank: int) -> int:
    if os.environ["RANK"] == str(rank):
        sys.exit()
    return 1


def learning_rate() -> float:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    return float(parser.parse_args().lr)


def test_a_call_has_ranks_limits_the_callers_argv_and_its_own_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    with warm.pool(3) as pool:
        pool.push({"kept": 1})
        some = pool.call(rank_times, (5,), ranks=(0, 2))
        assert (some.ranks, list(some)) == ((0, 2), [0, 10])
        with pytest.raises(nbddp.RunTimedOut, match="longer than --timeout 0"):
            pool.call(spin, (1,), timeout=0.5)
        monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.5"])
        assert list(pool.run(learning_rate)) == [0.5] * 3
        with pytest.raises(nbddp.WorkerFailed, match="rank 1 raised LookupError"):
            pool.call(fail_on, kwargs={"rank": 1})
        assert pool.call(leave, (1,)).ranks == (0, 2), "a rank that left has no value"
        with pytest.raises(nbddp.BadInput, match="ranks names rank 3, but the pool has ranks 0–2"):
            pool.call(rank_times, (5,), ranks=(3,))
        assert list(pool.pull("kept")["kept"]) == [1, 1, 1], "one name is a name, not its letters"


def test_controller_listens_where_the_system_puts_nobody() -> None:
    """Between choosing a port and binding it, somebody's connection could take an ephemeral one."""
    with warm.pool(1) as pool:
        serving = next(c for c in pool.status()["children"] if c["kind"] == "controller")
        processes = [psutil.Process(serving["pid"]), *psutil.Process(serving["pid"]).children()]
        ports = {c.laddr.port for p in processes for c in connections(p) if c.status == psutil.CONN_LISTEN}
    assert len(ports) > 10
    assert not ports & set(ephemeral_ports())


def free_ports(count: int) -> int:
    """The first of so many, none of which a pool would choose."""
    hosts = ("127.0.0.1", "127.0.0.2") if sys.platform == "linux" else ("127.0.0.1",)
    firsts = range(2_000, controller.LOWEST_PORT - count, 30)
    return next(b for b in firsts if all(controller._is_free(p, h) for p in range(b, b + count) for h in hosts))


def test_ports_that_are_taken_or_claimed_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    base = free_ports(30)
    monkeypatch.setattr(controller, "LOWEST_PORT", base)
    monkeypatch.setattr(controller, "ephemeral_ports", lambda: range(base + 30, 65536))
    with ExitStack() as held:
        held.enter_context(socket.socket()).bind(("127.0.0.1", base + 1))  # in the first of five blocks of six
        chosen = [controller.quiet_ports(5) for _ in range(4)]
        for claim, ports in chosen:
            held.enter_context(claim)
            assert ports == list(range(ports[0], ports[0] + 5))
        assert sorted(ports[0] - base for _, ports in chosen) == [7, 13, 19, 25]
        with pytest.raises(OSError, match="no free block of ports"):
            controller.quiet_ports(5)
        chosen[2][0].close()
        claim, ports = controller.quiet_ports(5)
        assert ports == chosen[2][1], "what was given back can be had again"
        claim.close()


CHOOSES = """
import json, sys
from nbddp.agent import controller
base, request = json.loads(sys.argv[1])
controller.LOWEST_PORT, controller.ephemeral_ports = base, lambda: range(base + 2 * (controller.PORTS + 1), 65536)
controller.random.SystemRandom.shuffle = lambda self, blocks: None
controller.main(request)
"""  # the first of two blocks, if it can


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback has one address")
@pytest.mark.parametrize("taken", [0, 16])
def test_controller_for_other_hosts_chooses_ports_that_are_free_at_the_loopback_too(tmp_path: Path, taken: int) -> None:
    """There its own schedulers meet; the pool beside it may have claimed or taken these ports there alone."""
    base = free_ports(2 * (controller.PORTS + 1))
    request = {"ip": "127.0.0.2", "profile_dir": str(tmp_path), "cluster_id": "far", "state": str(tmp_path / "state")}
    files = [tmp_path / "security" / f"ipcontroller-far-{whose}.json" for whose in ("client", "engine")]
    command = [sys.executable, "-c", CHOOSES, json.dumps([base, request])]
    with socket.socket() as held:
        held.bind(("127.0.0.1", base + taken))
        with subprocess.Popen(command, cwd=places.ROOT) as running:
            try:
                while not all(file.exists() for file in files):
                    assert running.poll() is None
                    time.sleep(0.02)
                ipyparallel.Client(str(files[0]), timeout=10).close()  # its schedulers start after these are written
                assert json.loads(files[0].read_text())["registration"] > base + controller.PORTS
            finally:
                running.kill()


def test_controller_that_cannot_start_says_why_and_the_next_start_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """198.51.100.1 (RFC 5737) is not an address of this machine's."""
    asked, pool = start_requests.controller, WorkerPool(nproc=1)
    with monkeypatch.context() as patch:
        patch.setattr(start_requests, "controller", lambda **how: asked(**{**how, "ip": "198.51.100.1"}))
        with pytest.raises(nbddp.PoolError) as failed:
            pool.start()
    why = f"exited with code 1 while starting: OSError: [Errno {errno.EADDRNOTAVAIL}] Cannot assign requested address"
    assert str(failed.value) == f"the pool's controller {why}; run the cell again"
    with pool:
        assert list(pool.run(rank_times, 3)) == [0]


def test_after_a_controller_that_did_not_answer_the_next_start_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = WorkerPool(nproc=1)
    with monkeypatch.context() as patch:
        patch.setattr("nbddp.pool.worker_group.REGISTER_TIMEOUT", 0.001)
        with pytest.raises(nbddp.PoolError, match="the pool's controller did not answer for 0 s; run the cell again"):
            pool.start()
    assert not pool.running
    with pool:
        assert list(pool.run(rank_times, 3)) == [0]


def test_thread_that_cannot_be_started_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """ipyparallel starts its controller in one where a loop runs; then there is no controller yet."""
    pool = WorkerPool(nproc=1)

    async def refused(self: ipyparallel.Cluster, **how: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(ipyparallel.Cluster, "start_controller", refused)
        with pytest.raises(nbddp.PoolError, match=r"^the pool's controller did not start: can't start new thread$"):
            pool.start()
    with pool:
        assert list(pool.run(rank_times, 3)) == [0]


PRINTS = """
import os, sys
print("a plug-in says hello")
print('{"ev": "gone"}')
os.write(1, b"and no line end")
"""


@pytest.mark.usefixtures("cold")
def test_what_is_printed_and_warned_of_ahead_of_a_program_stops_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever an agent's modules print goes to its log; warnings are errors in the program alone."""
    (tmp_path / "sitecustomize.py").write_text(PRINTS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(places.ROOT)]))
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    with WorkerPool(nproc=1) as pool:
        assert pool.agent is not None
        assert "a plug-in says hello" in pool.agent.log.read_text()
        with pytest.raises(UserWarning, match="mine"):
            pool.run(warnings.warn, "mine")


def test_a_listener_notes_what_is_no_message_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    raised: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    with theirs:
        agent = AgentClient.at(ours, tmp_path, {}, owned=False)
        agent.on_event(lambda event: event["kind"])
        theirs.sendall(b'hello\n[1]\n\xff\n{"ev": "odd"}\n{"ev": "warm", "kind": "", "missing": ""}\n')
        assert agent.wait_warm(10)
        assert [r.exc_type for r in raised] == [KeyError]
        noted = [line.partition(": ")[2] for line in agent.log.read_text().splitlines()]
        assert noted == ["hello", "[1]", "\ufffd", '{"ev":"odd"}']
        agent.close()


def test_a_pool_that_has_ended_by_itself_is_told_and_the_next_is_of_its_size() -> None:
    """Its controller is killed while nothing runs, then the agent of the next."""
    with warm.pool(3, env={"KEPT": "1"}) as pool:
        (controller,) = (c["pid"] for c in pool.status()["children"] if c["kind"] == "controller")
        _kill(pool, controller)
        with pytest.raises(PoolNotRunning, match="the pool has stopped with its controller; the next %%ddp cell"):
            pool.status()
        told = "the pool has stopped with its controller; ranks 0–2 are new and empty"
        assert pool.ensure(LaunchSpec()) == [told]
        assert list(pool.run(os.getenv, "KEPT")) == ["1"] * 3
        assert pool.ensure(LaunchSpec()) == []
        assert pool.agent is not None
        _kill(pool, pool.agent.hello.pid)
        assert pool.ensure(LaunchSpec(nproc=1)) == ["the pool has stopped with its node agent; rank 0 is new and empty"]
        assert pool.world_size == 1
        pool.stop()
        pool.ensure(LaunchSpec(device="cpu"))
        assert pool.world_size == Topology.plan([Node(0, "h", (), pool.placed().nodes[0].cores)]).world_size


def _kill(pool: WorkerPool, pid: int) -> None:
    psutil.Process(pid).kill()
    until(lambda: not pool.running, 20)


def test_pool_whose_heart_monitor_dies_says_so_and_the_next_start_works() -> None:
    with warm.pool(1) as pool:
        serving = next(c for c in pool.status()["children"] if c["kind"] == "controller")
        started = psutil.Process(serving["pid"]).children()
        (monitor,) = (p for p in started if "resource_tracker" not in " ".join(p.cmdline()))
        monitor.kill()
        end = time.monotonic() + 20
        while pool.running and time.monotonic() < end:
            time.sleep(0.02)
        assert not pool.running
        assert list(pool.run(rank_times, 5)) == [0]


def test_without_its_folder_ranks_go_on_and_a_start_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    with warm.pool(1) as pool:
        pids = list(pool.run(os.getpid))
        pool.run(os.chdir, str(gone))
        monkeypatch.chdir(gone)
        gone.rmdir()
        assert pool.ensure(LaunchSpec()) == []
        pool.run_cell(
            "import torch.distributed as dist\ndist.init_process_group()\ndist.barrier()", screen=NullScreen()
        )
        told = f"^the working directory {gone} no longer exists; %cd FOLDER"
        larger, anew = LaunchSpec(nproc=2), LaunchSpec(fresh=True)
        for start in (pool.restart, partial(pool.ensure, larger), partial(pool.ensure, anew)):
            with pytest.raises(nbddp.BadInput, match=told):
                start()
        assert list(pool.run(os.getpid)) == pids, "nothing has changed"
        with pytest.raises(nbddp.BadInput, match=told):
            WorkerPool(nproc=1).start()


def test_exception_that_cannot_travel_is_raised_as_worker_failed() -> None:
    def train() -> None:
        class Odd(Exception):
            def __reduce__(self) -> str:
                raise TypeError("not me")

        raise Odd("strange")

    with warm.pool(1) as pool, pytest.raises(nbddp.WorkerFailed, match=r"rank 0 raised .*Odd: strange"):
        pool.run(train)


@pytest.mark.skipif(find_spec("torchcomms") is not None, reason="torchcomms is installed, and replaces the groups")
def test_torchcomms_that_is_not_installed_leaves_gloo_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "1")
    with WorkerPool(nproc=2) as pool:
        assert [line for line in pool.shortcomings() if "TORCHCOMMS" in line] == []
        code = (
            "import os, torch, torch.distributed as dist\ndist.init_process_group('gloo')\nt = torch.ones(1)\n"
            "dist.all_reduce(t)\nt.item(), os.environ['TORCH_DISTRIBUTED_USE_TORCHCOMMS']"
        )
        assert list(pool.run_cell(code, want_value=True, screen=NullScreen())) == [(2.0, "1")] * 2
        if RECORDS:
            with pytest.raises(nbddp.RunHung, match="rank 0 waits in all_reduce #2"):
                pool.run_cell(
                    "if dist.get_rank() == 0: dist.all_reduce(t)", hang_after=0.5, timeout=30, screen=NullScreen()
                )


@pytest.mark.more
def test_spawned_workers_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBDDP_START_METHOD", "spawn")
    with WorkerPool(nproc=2) as pool:
        assert pool.agent is not None
        assert pool.agent.wait_warm().spawn == "NBDDP_START_METHOD=spawn"
        assert list(pool.run(rank_times, 3)) == [0, 3]
        values = pool.run_cell(
            "import torch, torch.distributed as dist\ndist.init_process_group()\nt = torch.ones(1)\n"
            "dist.all_reduce(t)\ndist.destroy_process_group()\nt.item()",
            want_value=True,
        )
        assert list(values) == [2.0, 2.0]


def test_status_and_topology_in_the_notebook(four: Kernel) -> None:
    shown = four.run("%ddp status")
    text = shown.displays[0]["text/plain"]
    assert text.splitlines()[0].split() == ["rank", "node", "local", "rank", "device", "pid", "state", "memory"]
    assert len([line for line in text.splitlines() if " idle " in line and "MiB" in line]) == 4
    assert "<table" in shown.displays[0]["text/html"]
    picture = four.run("%ddp topology").displays[0]
    assert picture["text/plain"].startswith("world size 4 = 1 node × 4 processes; on CPU\nnode 0")
    assert "image/png" in picture


def test_a_workers_state_is_one_of_a_ranks_and_has_words_where_a_cell_runs(tmp_path: Path) -> None:
    def states() -> list[tuple[str, str]]:
        children = pool.agent.request("status")["children"] if pool.agent else []
        return [(c["status"], c["doing"]) for c in children if c["kind"] == "worker"]

    def go_on() -> None:
        try:
            until(lambda: states() == [(RankStatus.RUNNING, "running Cell In[3]")])
        finally:
            go.touch()

    go = tmp_path / "go"
    with warm.pool(1) as pool:
        assert states() == [(RankStatus.IDLE, "")]
        with ThreadPoolExecutor() as other:
            seen = other.submit(go_on)
            pool.run_cell(f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)", cell=3)
            seen.result()
        assert states() == [(RankStatus.IDLE, "")]
        assert pool.agent is not None
        with pytest.raises(AgentFailed, match="ValueError: 'at work' is not a valid RankStatus"):
            pool.agent.request("note", ranks=[0], status="at work", doing="")


def test_simulated_nodes_are_called_so(new_kernel: Kernel) -> None:
    started = new_kernel.run("%ddp start --nnodes 2 --nproc 1").text()
    assert "world size 2 = 2 simulated nodes × 1 process; on CPU\n" in started
    assert "0 (simulated)" in new_kernel.run("%ddp status").displays[0]["text/plain"]


def terminal(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nbddp", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_terminal_sees_and_stops_a_pool_while_a_cell_runs(new_kernel: Kernel) -> None:
    new_kernel.run("%ddp start --nproc 2")
    pool = new_kernel.run(
        "from nbddp.notebook.magics import _loaded\nprint(*[m.pool.agent.pool_id for m in _loaded.values()])"
    )
    name = pool.text().strip()
    cell = new_kernel.send("%%ddp\nimport time\ntime.sleep(60)")
    until(lambda: "running Cell" in terminal("status", name).stdout + terminal("status").stdout)
    assert terminal("topology", name).stdout.startswith("world size 2 = 1 node × 2 processes; on CPU")
    restarted = terminal("restart", name)
    assert "2 workers stopped" in restarted.stdout, restarted.stderr
    shown = new_kernel.collect(cell)
    assert "died" in shown.evalue
    assert new_kernel.run("%%ddp\nprint('again')").text().endswith("ranks 0–1 │ again\n")
    assert terminal("stop", name).stdout == f"pool {name} stopped\n"
    assert name not in terminal("status").stdout
    after = new_kernel.run("%%ddp --nproc 2\nprint('new pool')")
    told = "the pool has stopped with its node agent; ranks 0–1 are new and empty"
    assert after.text() == f"{told}\nranks 0–1 │ new pool\n", after.error


@pytest.mark.parametrize("words", [["doctor", "--help"], ["topology", "--nproc", "2"]])
def test_terminal_says_nothing_when_the_reader_of_its_output_has_ended(words: list[str]) -> None:
    """As `| head` does."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "nbddp", *words]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.more
def test_terminal_holds_a_pool_of_its_own() -> None:
    command = [sys.executable, "-m", "nbddp", "start", "--nproc", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().split()[1].rstrip(":")
        assert name in terminal("status").stdout
        process.terminate()
        assert process.wait(20) == 0
    assert name not in terminal("status").stdout


@pytest.mark.more
def test_ctrl_c_in_the_terminal_is_one_line() -> None:
    command = [sys.executable, "-m", "nbddp", "start", "--nproc", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        process.stderr.readline()  # it tells of the start that is under way
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr.read().splitlines()[-1] == "stopped by the user"
        assert process.stdout is not None
        assert process.stdout.read() == ""


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["stauts"], "did you mean python -m nbddp status?"),
        (["stop", "nosuch"], "there is no running pool 'nosuch'"),
        (["start", "--nproc", "0"], "'0' is not a number of workers"),
    ],
)
def test_terminal_answers_bad_input(words: list[str], answer: str) -> None:
    done = terminal(*words)
    assert done.returncode == 2
    assert answer in done.stderr
    assert "Traceback" not in done.stderr


def ipcluster(*words: str) -> str:
    command = [sys.executable, "-m", "ipyparallel.cluster", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_ipcluster_sees_the_pool_and_counts_its_workers() -> None:
    def row() -> list[str]:
        return next(line for line in ipcluster("list").splitlines() if pool.agent.pool_id in line).split()[2:]  # type: ignore[union-attr]

    with warm.pool(1) as pool:
        assert row() == ["True", "1", "Agent"]
        pool.ensure(LaunchSpec(nproc=2))
        assert row() == ["True", "2", "Agent"]
        pool.restart()
        assert row() == ["True", "2", "Agent"]


@pytest.mark.more
def test_ipcluster_starts_and_stops_a_pool_of_its_own() -> None:
    command = [sys.executable, "-m", "ipyparallel.cluster", "start", "--controller", "nbddp", "--engines", "nbddp"]
    with subprocess.Popen([*command, "-n", "2"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until(lambda: " 2 Agent" in " ".join(ipcluster("list").split()))
        client = ipyparallel.Client()
        client.wait_for_engines(2)
        assert client[:].apply_sync(lambda: __import__("os").environ["RANK"]) == ["0", "1"]
        assert terminal("status").stdout.count("used by ipyparallel") == 2
        family = psutil.Process(process.pid).children(recursive=True)
        client.close()
        ipcluster("stop")
        process.wait(20)
    until(lambda: not still_running(family), 10)


FORKS = """
import os, sys, nbddp
pool = nbddp.Pool(nproc=1)
pid = list(pool.run(os.getpid))
if not os.fork():
    sys.exit(0)
os.wait()
print(pool.running, list(pool.run(os.getpid)) == pid)
"""


def test_a_forked_child_that_ends_does_not_end_the_pool() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKS]
    ran = subprocess.run(command, cwd=places.ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout == "True True\n", ran.stderr


def leave_children() -> None:
    subprocess.Popen("sleep 1000 & exec sleep 1000", shell=True)
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,)).start()


def family_of(agent: psutil.Process) -> list[psutil.Process]:
    """All processes below an agent, when what `leave_children` starts is there: the shell becomes the second sleep."""
    while True:
        found = agent.children(recursive=True)
        with suppress(psutil.NoSuchProcess):
            if sum(p.name() == "sleep" for p in found) == 2:
                return found
        time.sleep(0.01)


def test_a_killed_agent_leaves_neither_its_folder_nor_what_its_ranks_have_started() -> None:
    """Also where it is killed a second time, as the agent that has taken the place."""
    with WorkerPool(nproc=1) as pool:
        for _ in range(2):
            pool.run(leave_children)
            assert pool.agent is not None
            agent, home, bulk = psutil.Process(pool.agent.hello.pid), pool.agent.home, pool.agent.bulk
            family = family_of(agent)
            agent.kill()
            until(lambda: not still_running(family), 5)  # noqa: B023
            until(lambda: not home.exists() and not bulk.exists(), 5)  # noqa: B023


@pytest.mark.parametrize("whom", ["controller", "rank"])
def test_what_a_rank_has_started_ends_with_it_whoever_is_killed(whom: str) -> None:
    with WorkerPool(nproc=1) as pool:
        pool.run(leave_children)
        assert pool.agent is not None
        agent, home = psutil.Process(pool.agent.hello.pid), pool.agent.home
        family, rank = family_of(agent), psutil.Process(pool.workers[0].pid)
        controller = next(c["pid"] for c in pool.agent.request("status")["children"] if c["kind"] == "controller")
        ended = family if whom == "controller" else [rank, *rank.children(recursive=True)]
        (psutil.Process(controller) if whom == "controller" else rank).kill()
        until(lambda: not still_running(ended), 5)
        if whom == "controller":
            until(lambda: not home.exists(), 5)


def test_crowd_is_refused_before_anything_is_started_and_a_user_may_insist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with warm.pool(1) as pool:
        pids = {w.pid for w in pool.workers.values()}
        with monkeypatch.context() as patched:
            patched.setattr(pool.group, "match", lambda *a, **k: pytest.fail("it starts them"))
            with pytest.raises(nbddp.BadInput, match=r"99999 more workers would need about .* add --oversubscribe"):
                pool.ensure(LaunchSpec(nproc=100_000))
        assert {w.pid for w in pool.workers.values()} == pids
        with monkeypatch.context() as patched:
            patched.setattr(capacity, "MANY", 0)
            notes = pool.ensure(LaunchSpec(nproc=2))
        assert any(note.startswith("2 workers share ") and "so that starts, steps" in note for note in notes), notes
        pool.ensure(LaunchSpec(nproc=1))
        assert pool.agent is not None
        take = pool.agent.take
        tight = {"limits": [{"what": "memory", "each": 50 << 20, "free": 1 << 20}]}
        monkeypatch.setattr(pool.agent, "take", lambda *a: tight if "limits" in (answer := take(*a)) else answer)
        with pytest.raises(nbddp.BadInput, match="use --nproc 1, or add --oversubscribe"):
            pool.ensure(LaunchSpec(nproc=2))
        pool.ensure(LaunchSpec(nproc=2, oversubscribe=True))
        assert list(pool.run(rank_times, 5)) == [0, 5]


def test_two_pools_do_not_touch_each_other() -> None:
    with warm.pool(1) as one, warm.pool(2) as two:
        one.push({"x": 1})
        two.push({"x": 2})
        assert list(one.pull(["x"])["x"]) == [1]
        assert list(two.pull(["x"])["x"]) == [2, 2]
        one.stop()
        assert list(two.run(rank_times, 1)) == [0, 1]


def test_worker_that_cannot_start_is_told_and_the_next_start_works(monkeypatch: pytest.MonkeyPatch) -> None:
    real = start_requests.worker

    def broken(*args: Any, **kwargs: Any) -> StartWorker:
        return replace(real(*args, **kwargs), url_file="/nowhere")

    with warm.pool(1) as pool:
        monkeypatch.setattr(start_requests, "worker", broken)
        with pytest.raises(nbddp.PoolError, match="rank 1 exited while starting"):
            pool.ensure(LaunchSpec(nproc=2))
        monkeypatch.undo()
        pool.ensure(LaunchSpec(nproc=2))
        assert list(pool.run(rank_times, 5)) == [0, 5]


def test_a_start_does_not_raise_what_the_one_before_has_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first start ends with rank 1, while rank 2 is still starting; it ends when the second start waits for it."""
    real, slow = start_requests.worker, tmp_path / "slow"
    os.mkfifo(slow)

    def broken(*args: Any, **kwargs: Any) -> StartWorker:
        one = real(*args, **kwargs)
        return replace(one, url_file="/nowhere" if one.rank == 1 else str(slow))

    with warm.pool(1) as pool:
        monkeypatch.setattr(start_requests, "worker", broken)
        with pytest.raises(nbddp.PoolError, match="rank 1 exited while starting"):
            pool.ensure(LaunchSpec(nproc=3))
        monkeypatch.undo()
        wait_for = pool.group.wire.wait_for

        def let_go(uuids: dict[int, str], *args: object) -> None:
            if 2 in uuids and slow.exists():
                assert list(uuids) == [2]
                with slow.open("w"):  # nothing comes: it ends
                    slow.unlink()
            wait_for(uuids, *args)

        monkeypatch.setattr(pool.group.wire, "wait_for", let_go)
        pool.ensure(LaunchSpec(nproc=3))
        assert not slow.exists()
        assert list(pool.run(rank_times, 5)) == [0, 5, 10]
