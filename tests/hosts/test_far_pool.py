"""A pool on two hosts, reached by a real ssh: what holds on one machine holds there."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

import nbddp
from nbddp.analysis.placement import describe
from nbddp.capabilities.hosts.remote_agent import RemoteAgent
from nbddp.capabilities.hosts.remote_client import RemoteAgentClient
from nbddp.capabilities.private import store_guard
from nbddp.capabilities.scripts.logs import LogOptions
from nbddp.capabilities.scripts.part import failures_of
from nbddp.capabilities.status.table import status_table
from nbddp.errors import AgentFailed, PoolNotRunning, WorkerFailed
from nbddp.launch.options import LaunchSpec
from nbddp.output.progress import StageText
from nbddp.output.screens import NullScreen
from nbddp.pool.node import ClusterFiles
from nbddp.pool.pool import WorkerPool
from nbddp.protocol.agent import KEY_BYTES, PROTOCOL
from tests import places
from tests.hosts.ssh_hosts import HERE, MISSING, Hosts, ssh_hosts
from tests.pool.faults import needs_recorder
from tests.ports import connections, quiet_port
from tests.processes import still_running
from tests.waiting import until

pytestmark = pytest.mark.skipif(not HERE, reason=MISSING)
ROOT = places.ROOT
INIT = "import os, torch, torch.distributed as dist\nif not dist.is_initialized(): dist.init_process_group('gloo')\n"
PLACE = ["RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with ssh_hosts(tmp_path_factory.mktemp("ssh")) as made:
        yield made


def on(hosts: Hosts, names: str = "nodea,nodeb", **more: object) -> WorkerPool:
    setup = f"export PYTHONPATH={shlex.quote(str(ROOT))} NBDDP_RUNTIME_DIR={shlex.quote(str(hosts.folder))}"
    asked: dict[str, object] = {"nproc": 2, "ssh_config": str(hosts.config), "setup": setup, **more}
    return WorkerPool(hosts=names, **asked)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def said() -> list[str]:
    """What the start of the pool reported while it went on."""
    return []


@pytest.fixture(scope="module")
def far(hosts: Hosts, said: list[str]) -> Iterator[WorkerPool]:
    pool = on(hosts)
    pool.ensure(pool.spec, said.append)
    with pool:
        yield pool


def agents(pool: WorkerPool) -> list[RemoteAgentClient]:
    return [node.agent for node in pool.group.added]


def test_ranks_are_placed_on_hosts_and_meet(far: WorkerPool) -> None:
    code = f"{INIT}t = torch.ones(1)\ndist.all_reduce(t)\n[os.environ[n] for n in {PLACE!r}], t.item()"
    found = far.run_cell(code, want_value=True, screen=NullScreen())
    assert [[int(v) for v in place] for place, _ in found] == [
        [0, 0, 0, 4, 2, 2], [1, 1, 0, 4, 2, 2], [2, 0, 1, 4, 2, 2], [3, 1, 1, 4, 2, 2],
    ]  # fmt: skip
    assert [total for _, total in found] == [4.0] * 4
    rows = [dict(zip(status_table(far.status()).columns, row, strict=True)) for row in status_table(far.status()).rows]
    assert [row["node"] for row in rows] == ["0 (nodea)", "0 (nodea)", "1 (nodeb)", "1 (nodeb)"]
    assert all(str(row["memory"]).endswith("MiB") and row["state"] == "idle" for row in rows), rows


def test_names_stay_values_travel_and_functions_run_there(far: WorkerPool) -> None:
    far.run_cell("kept = int(os.environ['RANK'])", screen=NullScreen())
    far.push({"given": [1, 2]})
    assert list(far.run_cell("kept + given[1]", want_value=True, screen=NullScreen())) == [2, 3, 4, 5]
    assert list(far.pull(["kept"])["kept"]) == [0, 1, 2, 3]
    assert list(far.run(lambda x: x * 2, 21)) == [42] * 4
    assert not far.compare("kept").equal


@needs_recorder
def test_a_failure_frees_the_others_and_is_named(far: WorkerPool) -> None:
    with pytest.raises(nbddp.WorkerFailed, match="rank 3 raised ValueError: mine") as caught:
        far.run_cell(
            f"{INIT}kept = 7\nif dist.get_rank() == 3: raise ValueError('mine')\ndist.barrier()", screen=NullScreen()
        )
    assert "ranks 0–2: cell line 5, waiting in barrier" in caught.value.report
    assert "unblocked, variables are kept" in caught.value.report
    assert list(far.run_cell("kept", want_value=True, screen=NullScreen())) == [7] * 4


@needs_recorder
def test_a_deadlock_over_hosts_is_told(far: WorkerPool) -> None:
    with pytest.raises(nbddp.RunHung, match=r"rank 0 waits in barrier #\d+ \(line 3\); ranks 1–3 have finished"):
        far.run_cell(f"{INIT}if dist.get_rank() == 0: dist.barrier()", hang_after=0.5, screen=NullScreen())


def test_a_rank_that_dies_there_is_told_with_its_last_words_and_replaced(far: WorkerPool) -> None:
    far.run_cell("kept = 7", screen=NullScreen())
    with pytest.raises(nbddp.WorkerFailed, match="rank 2 died: killed by SIGABRT") as caught:
        far.run_cell("import os\nif os.environ['RANK'] == '2': os.abort()", screen=NullScreen())
    assert "Fatal Python error: Aborted" in caught.value.report
    assert far.ensure(LaunchSpec()) == ["rank 2 is new and empty"]
    found = far.run_cell(f"{INIT}t = torch.ones(1)\ndist.all_reduce(t)\nt.item(), 'kept' in globals()", want_value=True,
                         screen=NullScreen())  # fmt: skip
    assert list(found) == [(4.0, True), (4.0, True), (4.0, False), (4.0, True)]


def test_what_a_rank_prints_just_before_its_end_comes_from_there(
    far: WorkerPool, capsys: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import os\nprint('said', os.environ['RANK'], flush=True)\n"
        "if os.environ['RANK'] == '3': os.kill(os.getpid(), 9)"
    )
    with pytest.raises(nbddp.WorkerFailed, match="rank 3 died: killed by SIGKILL"):
        far.run_cell(code)
    assert "said 3" in capsys.readouterr().out
    far.ensure(LaunchSpec())


def test_steps_are_recorded_and_a_programs_own_store_serves_all_hosts(far: WorkerPool) -> None:
    code = (
        f"{INIT}from torch.nn.parallel import DistributedDataParallel as DDP\nmodel = DDP(torch.nn.Linear(64, 64))\n"
        "for _ in range(3):\n    model.zero_grad(); model(torch.randn(8, 64)).sum().backward()\n"
        f"s = dist.TCPStore(os.environ['MASTER_ADDR'], {quiet_port()}, 4, os.environ['RANK'] == '0')\n"
        "s.set(os.environ['RANK'], 'x'); s.get(str((int(os.environ['RANK']) + 1) % 4)); dist.barrier()"
    )
    far.run_cell(code, screen=NullScreen(), timeout=60)
    recording = far.timings()
    assert sorted(recording.steps) == [0, 1, 2, 3]
    assert [len(m.seconds) > 0 and m.wrong == 0 for m in far.bench("all_reduce", [1024], repeat=2, warmup=1)] == [True]
    assert [m.rank for m in far.memory()] == [0, 1, 2, 3]


def test_a_client_of_the_pools_store_reaches_it_from_every_host(far: WorkerPool) -> None:
    """Also one that a program makes itself, of MASTER_ADDR and MASTER_PORT."""
    code = (
        "import os, torch.distributed as dist\nrank, world = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])\n"
        "s = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False)\n"
        "s.set(f'hello from {rank}', 'here')\n[s.get(f'hello from {r}') for r in range(world)]"
    )
    assert list(far.run_cell(code, want_value=True, timeout=20, screen=NullScreen())) == [[b"here"] * 4] * 4


@pytest.mark.more
def test_traces_of_two_hosts_are_one_file_and_a_step_is_carried_on_to_more(far: WorkerPool) -> None:
    code = (
        f"{INIT}from torch.nn.parallel import DistributedDataParallel as DDP\nmodel = DDP(torch.nn.Linear(64, 64))\n"
        "for _ in range(4):\n    model.zero_grad(); model(torch.randn(8, 64)).sum().backward()"
    )
    far.run_cell(code, screen=NullScreen(), trace=True, timeout=60)
    merged = far.trace()
    assert merged.ranks == [0, 1, 2, 3]
    assert merged.joined > 0
    far.run_cell(code, screen=NullScreen(), timeout=60)
    found = far.forecast(inter_node=1e9, latency=1e-5, nodes=4)
    assert found.weak[-1].ranks == 8
    assert "world size 4 = 2 nodes × 2 processes" in describe(far.placed())


STRANGER = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
import torch.distributed as dist

def tried(place):
    try:
        dist.TCPStore(place[0], place[1], is_master=False, timeout=timedelta(seconds=2)).set('key', 'value')
    except Exception:
        return None
    return place

print(json.dumps(list(filter(None, ThreadPoolExecutor(8).map(tried, json.loads(sys.argv[1]))))))
"""


def test_only_the_pools_processes_reach_the_store(far: WorkerPool) -> None:
    """Neither at the gates, nor, without a signature, at the port for gates of other hosts."""
    far.run_cell(INIT, screen=NullScreen())
    keepers = [c["pid"] for a in agents(far) for c in a.request("status")["children"] if c["kind"] == "store"]
    found = [c.laddr for pid in keepers for c in connections(psutil.Process(pid), "tcp") if c.status == "LISTEN"]
    places = [(laddr.ip, laddr.port) for laddr in found]
    assert len(places) >= 5, "two gates with two doors each, and the one for other hosts"
    command = [sys.executable, "-c", STRANGER, json.dumps(places)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_a_gate_on_another_host_needs_the_key(tmp_path: Path) -> None:
    """Who has it reaches the store through a gate of his own; who has not is not answered."""
    from torch.distributed import TCPStore

    key = os.urandom(KEY_BYTES)
    served = store_guard.open_to_nodes("127.0.0.1", key, os.getpid())
    try:
        gate = store_guard.lead_to(("127.0.0.1", served.outside), key, os.getpid())
        store = TCPStore("127.0.0.1", gate.port, is_master=False, timeout=timedelta(seconds=10))
        store.set("key", "value")
        assert served.store.get("key") == b"value"
        with pytest.raises(OSError, match="timed out"):
            store_guard.lead_to(("127.0.0.1", served.outside), os.urandom(KEY_BYTES), os.getpid())
        with pytest.raises(OSError, match="timed out"):
            socket.create_connection(("127.0.0.1", served.outside), timeout=1)
        served.close()
        with pytest.raises(RuntimeError, match=r"recv|Connection|Broken|reset"):
            store.get("key")
        gate.close()
    finally:
        if served.store is not None:
            served.close()


def test_no_secret_is_on_a_command_line(far: WorkerPool) -> None:
    secrets = {far.group.stores._key if far.group.stores else "none"}
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        assert not any(secret in line for secret in secrets)


def test_a_worker_there_gets_nothing_of_this_machines_environment(far: WorkerPool) -> None:
    placed, node = far.placed(), far.group.added[0]
    asked = node.request(placed.workers[0], placed, "all", ClusterFiles("", far.group.files[-1]))
    assert "TORCHINDUCTOR_CACHE_DIR" not in asked.env
    assert "PATH" not in asked.env


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells what a process has mapped")
def test_torch_is_imported_where_workers_start_and_not_beside_the_notebook(far: WorkerPool) -> None:
    """So three imports of torch do not share the cores of a machine that has two hosts and the notebook."""
    home = far.group.nodes[0].agent
    assert home.process is not None
    assert "libtorch" not in Path(f"/proc/{home.process.pid}/maps").read_text()
    assert any(c["kind"] == "controller" for c in home.request("status")["children"]), "it serves all the same"
    seen = far.run_cell("open('/proc/self/maps').read().count('libtorch') > 0", want_value=True, screen=NullScreen())
    assert list(seen) == [True] * 4
    assert home.wait_warm().more["unkept"] == "the pool's workers are on other hosts"


def test_a_start_reports_its_stages_as_values(far: WorkerPool, said: list[str]) -> None:
    stage = {str(text): text.stage for text in said if isinstance(text, StageText)}
    assert stage["connecting to nodea, nodeb"] == stage["importing torch on nodea, once"] == "agent"
    assert stage.get("waiting for the node agent", "agent") == "agent", "it may be there already"
    assert list(dict.fromkeys(stage.values())) == ["agent", "controller", "engines", "devices"]


def test_what_has_started_an_agent_there_is_none_of_the_pool(tmp_path: Path) -> None:
    """ssh's own process, through which others may forward connections, does not pass the gate."""
    agent = RemoteAgent(tmp_path, 0, 1, {"cwd": ""})
    assert agent.owner_pid == os.getpid()
    agent.selector.close()


@pytest.mark.more
def test_a_hosts_file_is_read_once(hosts: Hosts, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    setup = f"export OWN=a PYTHONPATH={ROOT} NBDDP_RUNTIME_DIR={hosts.folder}"
    file.write_text(f"nodea slots=2 python={sys.executable} setup={shlex.quote(setup)}\n")
    with on(hosts, str(file), nproc=None, python="/no/such") as pool:
        assert pool.world_size == 2
        assert list(pool.run_cell("import os\nos.environ['OWN']", want_value=True, screen=NullScreen())) == ["a", "a"]
        file.unlink()
        assert pool.ensure(LaunchSpec()) == []
        assert list(pool.run_cell("1 + 1", want_value=True, screen=NullScreen())) == [2, 2]


@pytest.mark.more
def test_a_pool_that_grows_has_its_ranks_on_the_right_hosts(hosts: Hosts) -> None:
    """Rank 1 of two hosts with one worker each is on the second, and of two with two each on the first."""
    with on(hosts, nproc=1) as pool:
        pool.run_cell("kept = 7", screen=NullScreen())
        assert pool.ensure(LaunchSpec(nproc=2)) == [
            "pool grown from 2 to 4 workers; rank 0 keeps its variables",
            "rank 1 restarted on another host; its variables are lost",
        ]
        assert [sorted(node.workers) for node in pool.group.added] == [[0, 1], [2, 3]]
        code = f"{INIT}t = torch.ones(1)\ndist.all_reduce(t)\nt.item()"
        assert list(pool.run_cell(code, want_value=True, timeout=20, screen=NullScreen())) == [4.0] * 4


@pytest.mark.more
def test_workers_there_start_by_the_pools_method(hosts: Hosts) -> None:
    with on(hosts, "nodea", start_method="spawn") as pool:
        workers = [psutil.Process(worker.pid) for worker in pool.workers.values()]
        assert all(worker.cmdline() != worker.parent().cmdline() for worker in workers)
        assert len({*pool.run_cell("hash('a string')", want_value=True, screen=NullScreen())}) == 2


def test_other_hosts_than_those_it_runs_on_are_refused(far: WorkerPool) -> None:
    with pytest.raises(nbddp.BadInput, match="the pool runs on nodea,nodeb; %ddp stop ends it"):
        far.ensure(LaunchSpec(hosts="nodea"))
    assert far.world_size == 4


def test_hosts_that_do_not_come_up_are_named_and_the_rest_is_left_again(hosts: Hosts) -> None:
    pool = on(hosts, "nodea,127.0.1.3:1")
    with pytest.raises(AgentFailed, match=r"127.0.1.3:1 cannot be reached: .*Connection refused"):
        pool.start()
    assert not pool.running
    mine = [
        p
        for p in psutil.process_iter(["cmdline"])
        if "nbddp.capabilities.hosts.remote_agent" in " ".join(p.info["cmdline"] or ())
    ]
    until(
        lambda: not [p for p in mine if p.is_running() and "nodea" in " ".join(p.environ().get("SSH_CONNECTION", ""))]
    )
    pool.close()


def test_a_host_that_goes_is_named_and_nothing_is_left_of_the_pool(hosts: Hosts) -> None:
    pool = on(hosts, nproc=1)
    pool.start()
    first, second = agents(pool)
    begin = "import subprocess\nsubprocess.Popen(['sh', '-c', 'sleep 600 & sleep 600'], start_new_session=True).pid"
    started = [psutil.Process(int(pid)) for pid in pool.run_cell(begin, want_value=True, screen=NullScreen())]
    until(lambda: all(len(shell.children()) == 2 for shell in started))
    family = [p for a in (first, second) for p in psutil.Process(a.hello.pid).children(recursive=True)]
    assert {*started} < {*family}
    os.kill(second.hello.pid, signal.SIGKILL)
    until(lambda: not second.alive)
    with pytest.raises(
        PoolNotRunning, match=r"nodeb is gone .*; variables on its workers are lost, and %ddp start --hosts"
    ):
        pool.ensure(LaunchSpec())
    until(lambda: not still_running(family))
    assert not first.far_home.exists()
    until(lambda: not second.far_home.exists())
    assert not pool.running


@pytest.mark.cuts
def test_the_end_of_the_controller_is_told_in_a_running_cell_and_nothing_is_left(hosts: Hosts) -> None:
    """It is of this machine, where no rank is."""
    pool = on(hosts, nproc=1)
    pool.start()
    mine = [psutil.Process(agent.hello.pid) for agent in agents(pool)]
    mine += [child for process in mine for child in process.children(recursive=True)]
    threading.Timer(0.5, lambda: os.kill(pool.group.cluster.controller.pid, signal.SIGKILL)).start()
    with pytest.raises(
        PoolNotRunning, match="the pool stopped while the cell was running, because its agent or its contr"
    ):
        pool.run_cell("import time\ntime.sleep(30)", screen=NullScreen())
    pool.close()
    until(lambda: not still_running(mine))


def test_what_is_otherwise_on_a_host_is_told(far: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = agents(far)[0]
    here = dict(agent.hello.versions)
    assert agent.differences(here) == []
    monkeypatch.setattr(agent, "_hello", replace(agent.hello, moved="/no/such"))
    assert agent.differences({**here, "torch": "1.0"}) == [
        f"nodea has torch {here['torch']}; this machine has 1.0",
        f"nodea has no folder /no/such; its workers start in {agent.hello.cwd}",
    ]
    with pytest.raises(
        AgentFailed, match=f"nodea has nbddp {here['nbddp']}, but this machine has 9.9; install the same version"
    ):
        agent.differences({**here, "nbddp": "9.9"})
    monkeypatch.setattr(agent, "_hello", replace(agent.hello, protocol=PROTOCOL + 1))
    with pytest.raises(AgentFailed, match=f"nbddp on nodea has protocol {PROTOCOL + 1}, but nbddp on this machine has"):
        agent.differences(here)


def test_a_script_runs_there_and_its_log_files_are_here(far: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(
        "import os\nfrom torch.distributed.elastic.multiprocessing.errors import record\n"
        "print('rank', os.environ['RANK'], flush=True)\n"
        "@record\ndef main():\n    if os.environ['RANK'] == '1':\n        raise ValueError('bad')\nmain()\n"
    )
    logs = LogOptions(folder=str(tmp_path / "logs"), tee={None: frozenset({"stdout"})})
    with pytest.raises(WorkerFailed, match=r"rank 1 raised ValueError: bad \(fails.py line 7, in main\)"):
        far.run_script(str(tmp_path / "fails.py"), logs=logs, screen=NullScreen())
    assert far.last_run is not None
    failure = failures_of(far.last_run)[1]
    assert (failure.exitcode, failure.host) == (1, far.placed().nodes[far.placed().workers[1].node].host)
    texts = sorted(p.read_text() for p in (tmp_path / "logs").rglob("stdout.log"))
    assert texts == [f"rank {r}\n" for r in range(far.world_size)]
    assert len([*(tmp_path / "logs").rglob("error.json")]) == 1


@pytest.mark.more
def test_hosts_of_a_start_that_failed_get_no_workers_of_the_next(hosts: Hosts) -> None:
    pool = on(hosts, "nodea", nproc=1)
    with pytest.raises(nbddp.BadInput, match="--ranks"):  # all is reached by then
        pool.ensure(replace(pool.spec, ranks=(7,)))
    (kept,) = agents(pool)
    pool.ensure(pool.spec)
    assert agents(pool) == [kept], "the same hosts are not reached again"
    pool.stop()
    with pytest.raises(nbddp.BadInput, match="--ranks"):
        pool.ensure(replace(pool.spec, ranks=(7,)))
    (left,) = agents(pool)
    pool.ensure(LaunchSpec(nproc=1))
    assert agents(pool) == []
    assert not left.alive
    pool.stop()


@pytest.mark.more
def test_other_hosts_than_those_of_a_start_that_failed_are_the_pools_alone(hosts: Hosts) -> None:
    pool = on(hosts, "nodea", nproc=1)
    with pytest.raises(nbddp.BadInput, match="--ranks"):
        pool.ensure(replace(pool.spec, ranks=(7,)))
    pool.ensure(on(hosts, "nodeb", nproc=1).spec)
    assert [str(agent.host) for agent in agents(pool)] == ["nodeb"]
    pool.stop()
