"""A pool on the engines of a real stock cluster of ipyparallel's: what holds of it, what does not, and that the engines
are engines again when it has gone."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ipyparallel
import psutil
import pytest
from ipyparallel.error import RemoteError

import nbddp
from nbddp.capabilities.attached import clusters, nodes
from nbddp.capabilities.attached.nodes import AttachedCluster, AttachedNode, Engine
from nbddp.capabilities.stacks import command
from nbddp.capabilities.status.table import status_table
from nbddp.errors import PoolError, PoolNotRunning
from nbddp.launch.options import LaunchSpec
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from nbddp.protocol.run_spec import Question
from tests.pool.faults import needs_recorder
from tests.processes import still_running

ENGINES = 3
INIT = "import os, torch, torch.distributed as dist\nif not dist.is_initialized(): dist.init_process_group('gloo')\n"
SUM = f"{INIT}t = torch.ones(1)\ndist.all_reduce(t)\nt.item()"
TAKEN = "__import__('nbddp.capabilities.attached.engine_side', fromlist=['engine_side'])"


class Stock:
    """A cluster with all its engines, another where a test has ended some; and the pool that has them."""

    def __init__(self) -> None:
        self.cluster: ipyparallel.Cluster | None = None
        self.client: ipyparallel.Client
        self.pool = WorkerPool(cluster="stock")
        self.notes: list[str] = []  # what the pool's start said

    def begin(self) -> None:
        running = os.environ.pop("PYTEST_CURRENT_TEST", "")  # ipykernel would not capture what C and subprocesses write
        made = ipyparallel.Cluster(n=ENGINES, cluster_id="stock", delay=0, log_level=40)
        made.start_cluster_sync()
        os.environ["PYTEST_CURRENT_TEST"] = running
        self.cluster, self.client = made, made.connect_client_sync()
        self.client.wait_for_engines(ENGINES, timeout=60)

    def end(self) -> None:
        self.pool.stop()
        if self.cluster is not None:
            self.client.close()
            self.cluster.stop_cluster_sync()
            self.cluster = None
            for file in Path(os.environ["IPYTHONDIR"]).glob("profile_default/*/*stock*"):
                file.unlink()  # or the next client finds the controller that has ended


@pytest.fixture(scope="module")
def stock() -> Iterator[Stock]:
    made = Stock()
    yield made
    made.end()


@pytest.fixture
def cluster(stock: Stock) -> ipyparallel.Cluster:
    """No pool has its engines."""
    stock.pool.stop()
    if stock.cluster is None:
        stock.begin()
    assert stock.cluster is not None
    return stock.cluster


@pytest.fixture
def ends(stock: Stock) -> Iterator[None]:
    """The test ends engines, or the cluster."""
    yield
    stock.end()


@pytest.fixture
def client(stock: Stock, cluster: ipyparallel.Cluster) -> ipyparallel.Client:
    return stock.client


@pytest.fixture
def taken(stock: Stock) -> WorkerPool:
    """The pool, which has the engines."""
    if stock.cluster is None:
        stock.begin()
    if not stock.pool.running:
        stock.notes[:] = stock.pool.start()
    return stock.pool


def found() -> clusters.Cluster:
    return clusters.find("stock", Path(os.environ["IPYTHONDIR"]))


def value(pool: WorkerPool, code: str) -> list[Any]:
    return list(pool.run_cell(code, want_value=True, screen=NullScreen()))


def test_engines_are_ranks_and_meet(taken: WorkerPool, stock: Stock, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "OMP_NUM_THREADS"]
    where = value(taken, f"{INIT}[int(os.environ[n]) for n in {names!r}], os.getcwd(), torch.get_num_threads()")
    assert where == [([r, r, ENGINES, ENGINES, 1, 1], os.getcwd(), 1) for r in range(ENGINES)]
    assert value(taken, SUM) == [float(ENGINES)] * ENGINES
    taken.run_cell("print('said by', os.environ['RANK']); os.system('echo from a subprocess')")
    printed = capsys.readouterr().out
    assert all(f"said by {r}" in printed for r in range(ENGINES))
    assert "from a subprocess" in printed
    rows = [
        dict(zip(status_table(taken.status()).columns, row, strict=True)) for row in status_table(taken.status()).rows
    ]
    assert [row["pid"] for row in rows] == stock.client[:].apply_sync(os.getpid)
    assert all(str(row["memory"]).endswith("MiB") and row["state"] == "idle" for row in rows), rows
    assert stock.notes[:1] == [
        "nbddp did not start the engines of cluster stock: it cannot replace one that exits, and their logs "
        "are with their launcher. --fresh, --max-restarts and %ddp restart are not possible; after %ddp stop the "
        "engines keep running"
    ]
    assert all("had already imported torch" in note for note in stock.notes[1:]), "a pool has had them before"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells what a process has mapped")
def test_torch_is_imported_before_the_store_of_the_ranks_is_needed(taken: WorkerPool) -> None:
    """The store is on this machine, and its process is forked from the agent's: it would import torch by itself."""
    assert taken.agent is not None
    assert "libtorch" in Path(f"/proc/{taken.agent.hello.pid}/maps").read_text()


@needs_recorder
def test_a_failure_frees_the_others_and_a_deadlock_is_told(taken: WorkerPool) -> None:
    with pytest.raises(nbddp.WorkerFailed, match="rank 1 raised ValueError: mine") as caught:
        taken.run_cell(
            f"{INIT}kept = 7\nif dist.get_rank() == 1: raise ValueError('mine')\ndist.barrier()", screen=NullScreen()
        )
    assert re.search(
        r"ranks? (0|2|0, 2): cell line 5, (apparently )?waiting in barrier", caught.value.report
    )  # the other may be late
    assert "unblocked, variables are kept" in caught.value.report
    with pytest.raises(nbddp.RunHung, match=r"rank 0 waits in barrier #\d+ \(line 3\); ranks 1–2 have finished"):
        taken.run_cell(f"{INIT}if dist.get_rank() == 0: dist.barrier()", hang_after=0.5, screen=NullScreen())
    with pytest.raises(nbddp.RunTimedOut):
        taken.run_cell("import time\nwhile True: time.sleep(0.01)", timeout=0.3, screen=NullScreen())
    assert value(taken, "kept") == [7] * ENGINES


def test_what_is_asked_of_ranks_between_cells(taken: WorkerPool) -> None:
    taken.push({"given": [1, 2]})
    assert list(taken.pull(["given"])["given"]) == [[1, 2]] * ENGINES
    assert list(taken.run(lambda x: x * 2, 21)) == [42] * ENGINES
    assert taken.compare("given").equal
    code = (
        f"{INIT}from torch.nn.parallel import DistributedDataParallel as DDP\nmodel = DDP(torch.nn.Linear(64, 64))\n"
        "for _ in range(3):\n    model.zero_grad(); model(torch.randn(8, 64)).sum().backward()\n"
    )
    taken.run_cell(code, screen=NullScreen())
    assert sorted(taken.timings().steps) == [*range(ENGINES)]
    assert "giv" in str(taken.ask(0, Question.of("complete", code="giv", cursor_pos=3)))
    assert taken.agent is not None
    assert [p.state.value for p in command.live(taken.agent).positions.values()] == ["finished"] * ENGINES
    seen = status_table(taken.agent.request("status"))
    assert [row[5] for row in seen.rows] == ["an engine of cluster stock"] * ENGINES, "asked from a terminal"


def test_what_cannot_be_done_says_what_is_true_and_what_to_type(taken: WorkerPool) -> None:
    with pytest.raises(nbddp.BadInput, match=r"--fresh replaces processes.* %reset -f in a %%ddp cell"):
        taken.ensure(LaunchSpec(fresh=True))
    with pytest.raises(nbddp.BadInput, match=r"%ddp restart replaces the ranks' processes, .* restart the cluster"):
        taken.restart()
    with pytest.raises(nbddp.BadInput, match=r"--max-restarts 2 replaces the ranks' processes"):
        taken.run_cell("1", max_restarts=2)
    with pytest.raises(nbddp.BadInput, match="cannot be changed; %ddp stop, then %ddp start --cluster stock"):
        taken.ensure(LaunchSpec(nproc=2))
    with pytest.raises(nbddp.BadInput, match="remove --nnodes or --cluster"):
        taken.ensure(LaunchSpec(nnodes=2))
    with pytest.raises(nbddp.BadInput, match="the pool runs on cluster stock; %ddp stop ends it"):
        taken.ensure(LaunchSpec(hosts="nodea"))
    assert taken.ensure(LaunchSpec()) == []


def test_only_ranks_and_what_they_start_reach_the_store(taken: WorkerPool) -> None:
    """The engines are no children of the agent's; the gate knows them all the same, and nobody else."""
    probe = (  # who is not let in is told so, at once or late
        "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "s.settimeout(float(sys.argv[2]))\ntry: print(s.recv(1))\nexcept TimeoutError: print('let in')\n"
    )
    code = (
        f"{INIT}import subprocess, sys\n"
        f"run = [sys.executable, '-c', {probe!r}, os.environ['MASTER_PORT'], '0.5']\n"
        "run[3], subprocess.run(run, capture_output=True, text=True).stdout.strip()"
    )
    answers = value(taken, code)
    assert [said for _, said in answers] == ["let in"] * ENGINES
    stranger = subprocess.run(
        ["setsid", "--fork", "--wait", sys.executable, "-c", probe, answers[0][0], "30"], capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    mine = subprocess.run(
        [sys.executable, "-c", probe, answers[0][0], "30"], capture_output=True, text=True, check=False
    )
    assert "let in" not in stranger.stdout + mine.stdout


def test_another_pool_is_told_who_has_the_engines(taken: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    other = AttachedCluster(found(), "another")
    words = f"the pool of process {os.getpid()} on {socket.gethostname()} .* is using engine 0 of cluster stock"
    try:
        with pytest.raises(PoolError, match=words):
            other.look(lambda text: None)
        asked = {"owner": other.owner, "env": {"RANK": "9"}, "cwd": "/", "roots": [], "rank": 9}
        with pytest.raises(PoolError, match=r"did not become a worker: RuntimeError: the pool of process \d+"):
            other.evaluate({0: f"take({asked!r})"}, 10)
        monkeypatch.setattr(nodes, "SLOW", 0.2)
        code = ("import time; time.sleep(2)",)
        at_work = threading.Thread(target=taken.run_cell, args=code, kwargs={"screen": NullScreen()})
        at_work.start()
        while (taken.ask(0, Question.of("where")) or {"idle": True}).get("idle"):
            time.sleep(0.01)
        began = time.monotonic()
        with pytest.raises(PoolError, match=r"is using engine \d of cluster stock, which is busy"):
            other.look(lambda text: None)
        assert time.monotonic() - began < 1.5
        at_work.join()
    finally:
        other.leave()
        other.wire.close()
    assert value(taken, "int(os.environ['RANK'])") == [*range(ENGINES)]


OWN_GROUP = """
import os, torch, torch.distributed as dist
dist.init_process_group('gloo', init_method='tcp://127.0.0.1:{port}', rank={rank}, world_size=2)
t = torch.ones(1); dist.all_reduce(t); dist.destroy_process_group(); total = t.item()
"""


def test_stop_leaves_engines_that_can_be_taken_again(
    taken: WorkerPool, stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here as if they were of another container: one of them starts the gate through which they reach the store."""
    taken.run_cell(f"{SUM}\nkept = 'still here'", screen=NullScreen())
    client = stock.client
    pids = client[:].apply_sync(os.getpid)
    taken.stop()
    view = client[:]
    assert client.ids == [*range(ENGINES)]
    assert view.apply_sync(os.getpid) == pids
    view.execute("found = kept, os.environ.get('RANK'), os.environ.get('MASTER_PORT'), os.getcwd(), "
                 "torch.get_num_threads(), dist.is_initialized()", block=True)  # fmt: skip
    cores = len(os.sched_getaffinity(0))
    assert view.pull("found", block=True) == [("still here", None, None, os.getcwd(), cores, False)] * ENGINES
    assert view.execute("print('as ever')", block=True).stdout == ["as ever\n"] * ENGINES
    for pid in pids:
        os.kill(pid, signal.SIGINT)
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    own = [client[r].execute(OWN_GROUP.format(port=port, rank=r)) for r in range(2)]
    for result in own:
        result.get(30)
    assert client[:2].pull("total", block=True) == [2.0, 2.0], "a program's own process group"
    with pytest.raises(RemoteError, match="ValueError: mine"):
        view.execute("raise ValueError('mine')", block=True)

    monkeypatch.setattr(Engine, "here", False)
    with WorkerPool(cluster="default/stock", nproc=2) as again:
        assert again.world_size == 2
        assert value(again, SUM) == [2.0, 2.0]
        assert value(again, "kept") == ["still here"] * 2
        gates = [p for pid in pids for p in psutil.Process(pid).children() if "store_host" in " ".join(p.cmdline())]
        assert len(gates) == 1
    assert not still_running(gates)


def test_a_start_that_fails_leaves_the_engines(client: ipyparallel.Client) -> None:
    """Those that had become ranks already, too; the pool may start again, here or on the cluster."""
    last, module = client[2], f"m = {TAKEN}; "
    last.apply_sync(exec, f"{module}m.able = m.take; m.take = lambda asked: 1 / 0")
    pool = WorkerPool(cluster="stock")
    able = f"{module}m.take = m.able"
    try:
        with pytest.raises(PoolError, match="engine 2 of cluster stock did not become a worker: ZeroDivisionError"):
            pool.start()
        assert client[:].apply_sync(eval, f"{TAKEN}.holder()") == [""] * ENGINES
        last.apply_sync(exec, able)
        with pytest.raises(nbddp.BadInput, match=r"has 3 engines\. Use --nproc 3"):
            pool.ensure(LaunchSpec(cluster="stock", nproc=4))
        pool.ensure(LaunchSpec(nproc=1))
        assert pool.running
        assert pool.group.nodes == pool.group.hosts
        pool.stop()
        pool.ensure(LaunchSpec(cluster="stock"))
        assert value(pool, SUM) == [float(ENGINES)] * ENGINES
    finally:
        last.apply_sync(exec, able)
        pool.stop()


ENDS = """
import os, sys
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
pool = WorkerPool(cluster="stock")
pool.start()
pool.run_cell("kept = 1", screen=NullScreen())
print("ready", flush=True)
sys.stdin.readline() or os._exit(1)
"""


@pytest.mark.more
@pytest.mark.parametrize("killed", [True, False])
def test_engines_outlive_the_pools_process(client: ipyparallel.Client, killed: bool) -> None:
    """One that ends leaves them; they notice of one that is killed, since it no longer says that it lives."""
    client[:].apply_sync(eval, f"setattr({TAKEN}, 'PATIENCE', 3.0)")
    owner = subprocess.Popen([sys.executable, "-c", ENDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdin is not None
    assert owner.stdout.readline() == "ready\n"
    holders = client[:].apply_sync(eval, f"{TAKEN}.holder()")
    assert all(f"process {owner.pid}" in words for words in holders)
    if killed:
        owner.kill()
    else:
        owner.stdin.write("\n")
        owner.stdin.flush()
    owner.wait(20)
    free = f"[{TAKEN}.holder(), __import__('os').environ.get('RANK', '')]"
    until = time.monotonic() + (10 if killed else 0.5)
    while client[:].apply_sync(eval, free) != [["", ""]] * ENGINES:
        assert time.monotonic() < until
        time.sleep(0.05)
    owner.stdin.close()
    owner.stdout.close()


def test_engines_outlive_the_pools_agent(client: ipyparallel.Client) -> None:
    pids = client[:].apply_sync(os.getpid)
    with WorkerPool(cluster="stock") as pool:
        assert pool.agent is not None
        agent = psutil.Process(pool.agent.hello.pid)
        home = pool.agent.home
        agent.kill()
        with pytest.raises(PoolError, match="the node agent"):
            [pool.run_cell("1", screen=NullScreen()) for _ in itertools.count()]
        while home.exists():
            time.sleep(0.01)
    assert client[:].apply_sync(os.getpid) == pids


def test_a_task_of_an_engine_that_is_one_again_is_interrupted(client: ipyparallel.Client, tmp_path: Path) -> None:
    with WorkerPool(cluster="stock") as pool:
        pool.run_cell("1", screen=NullScreen())
    begun = tmp_path / "begun"
    code = f"(__import__('pathlib').Path({str(begun)!r}).touch(), __import__('time').sleep(60))"
    pid = client[0].apply_sync(os.getpid)
    task = client[0].apply_async(eval, code)
    until = time.monotonic() + 30
    while not begun.exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(pid, signal.SIGINT)
    with pytest.raises(ipyparallel.error.RemoteError, match="KeyboardInterrupt"):
        task.get(20)


@pytest.mark.parametrize("late", [False, True], ids=["told at once", "told late"])
def test_engines_keep_names_when_the_pools_agent_ends_amid_a_cell(
    client: ipyparallel.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """late: Stop comes before the thread that has noticed the end tells the engines of it."""
    begun, stopped = tmp_path / "begun", threading.Event()
    if late:
        clear_up = AttachedNode._clear_up
        monkeypatch.setattr(AttachedNode, "_clear_up", lambda node: stopped.wait(30) and clear_up(node))
    code = f"import pathlib, time\nkept = 3\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(600)"
    with WorkerPool(cluster="stock") as pool:
        assert pool.agent is not None
        agent = psutil.Process(pool.agent.hello.pid)

        def end() -> None:
            while not begun.exists():
                time.sleep(0.01)
            agent.kill()

        threading.Thread(target=end, daemon=True).start()
        with pytest.raises(PoolNotRunning, match="variables stay on its engines, and %ddp start --cluster stock"):
            pool.run_cell(code, screen=NullScreen())
        pool.stop()
        stopped.set()
        pool.start()
        assert value(pool, "kept") == [3] * ENGINES


@pytest.mark.usefixtures("ends")
def test_an_engine_that_dies_is_told_and_what_is_left_can_be_taken(client: ipyparallel.Client) -> None:
    with WorkerPool(cluster="stock") as pool:
        began = time.monotonic()
        with pytest.raises(nbddp.WorkerFailed, match="rank 2 died: its engine has exited, or the cluster") as caught:
            pool.run_cell("import os, time\nif os.environ['RANK'] == '2': os.kill(os.getpid(), 9)\ntime.sleep(30)",
                          screen=NullScreen())  # fmt: skip
        assert time.monotonic() - began < 3
        assert "ranks 0–1: cell line 3" in caught.value.report
        assert "starts a new process" not in caught.value.report
        with pytest.raises(PoolError, match=r"the engine of rank 2 ended, .* %ddp stop, then %ddp start --cluster"):
            pool.run_cell("1", screen=NullScreen())
        pool.stop()
        pool.start()
        assert value(pool, SUM) == [2.0, 2.0]


@pytest.mark.more
@pytest.mark.usefixtures("ends")
def test_an_engine_that_cannot_be_freed_is_ended(client: ipyparallel.Client) -> None:
    with WorkerPool(cluster="stock") as pool:
        code = "import ctypes, os\nif os.environ['RANK'] == '1': ctypes.PyDLL(None).sleep(60)"
        with pytest.raises(nbddp.RunTimedOut) as caught:
            pool.run_cell(code, timeout=0.5, screen=NullScreen())
        assert "ended; its variables are lost" in caught.value.report
        assert "replaced" not in caught.value.report
    assert client.ids == [0, 2]


@pytest.mark.more
@pytest.mark.usefixtures("ends")
def test_a_controller_that_dies_is_told(cluster: ipyparallel.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "SILENT", 2)
    below = psutil.Process(cluster.controller.pid).children(recursive=True)
    with WorkerPool(cluster=str(cluster.controller.connection_files["client"])) as pool:
        threading.Timer(0.5, psutil.Process(cluster.controller.pid).kill).start()
        with pytest.raises(
            PoolNotRunning, match=r"the controller of cluster .* has not answered for 2 s; variables stay on its"
        ):
            pool.run_cell("import time; time.sleep(30)", screen=NullScreen())
        with pytest.raises(PoolNotRunning, match=r"%ddp start --cluster .* uses them again once it answers"):
            pool.ensure(LaunchSpec())
    for process in below:  # the schedulers of a controller that was killed outlive it
        if process.is_running():
            process.kill()


# -- which cluster is meant ---------------------------------------------------------------------------


def listed(folder: Path, profile: str, cluster_id: str, **info: object) -> Path:
    security = folder / f"profile_{profile}" / "security"
    security.mkdir(parents=True, exist_ok=True)
    file = security / f"ipcontroller{f'-{cluster_id}' * bool(cluster_id)}-client.json"
    file.write_text(json.dumps({"interface": "tcp://127.0.0.1", "mux": 1, **info}))
    return file


def test_a_cluster_is_found_as_ipyparallel_names_it(tmp_path: Path) -> None:
    plain, mine, pbs = (listed(tmp_path, *at) for at in (("default", ""), ("default", "mine"), ("pbs", "")))
    twice = [listed(tmp_path, profile, "twice") for profile in ("pbs", "mpi")]
    listed(tmp_path, "pbs", "mine")  # the one of the default profile is meant
    listed(tmp_path, "default", "nbddp-123abc")  # a pool of ours
    described = mine.with_name("cluster-mine.json")
    described.write_text(
        json.dumps({"cluster": {"cluster_id": "mine", "profile_dir": str(mine.parent.parent)}, "controller": {}})
    )
    meant = {"default/": plain, "mine": mine, "default/mine": mine, "/mine": mine, "pbs": pbs, "mpi/twice": twice[1],
             str(pbs): pbs, str(described): mine}  # fmt: skip
    assert {name: clusters.find(name, tmp_path).file for name in meant} == meant
    refused = {
        "twice": "is the id of several clusters; use mpi/twice or pbs/twice",
        "other": "no IPython profile has a cluster of this name; there are default/, default/mine, mpi/twice",
        "no/such.json": "there is no such file; there are default/",
    }
    for name, words in refused.items():
        with pytest.raises(nbddp.BadInput, match=words):
            clusters.find(name, tmp_path)
    with pytest.raises(nbddp.BadInput, match="start one with ipcluster start -n 4"):
        clusters.find("other", tmp_path / "empty")


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({}, ""),
        ({"interface": "tcp://10.0.0.1", "curve_serverkey": "key"}, ""),
        ({"interface": "tcp://10.0.0.1", "ssh": "login"}, ""),
        ({"interface": "tcp://10.0.0.1"}, "not encrypted, and its controller listens on 10.0.0.1: anyone who can read"),
        (
            {"interface": "tcp://*"},
            "listens on all interfaces: anyone who can read that network's traffic can read cells",
        ),
    ],
)
def test_messages_that_others_can_read_are_told(tmp_path: Path, info: dict[str, object], words: str) -> None:
    listed(tmp_path, "default", "mine", **info)
    said = clusters.find("mine", tmp_path).open_words(has_key=True)
    assert words in said
    assert bool(words) == ("key to the ranks' store" in said)
