"""What the panel says of CPU, memory and GPUs: NVML → agent → JSON → a row of the strip. The machines are recorded."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest

from nbddp.agent.process_id import ProcessId
from nbddp.capabilities.gpus import on_agent as devices
from nbddp.capabilities.panel import on_agent, page, poll
from nbddp.capabilities.panel import state as panel_state
from nbddp.capabilities.panel.on_agent import Gpus
from nbddp.capabilities.panel.poll import MEMORY_EVERY, Uses
from nbddp.capabilities.panel.rows import SeenRanks, rows
from nbddp.capabilities.panel.state import State
from nbddp.errors import AgentFailed
from nbddp.launch.machine import Device, Node
from nbddp.launch.topology import Topology
from tests.machines import Recorded, nvswitch_machine, pcie_machine, refused
from tests.notebook.test_panel import Balanced

GIB = 2**30


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Four GPUs, each as busy as its position says."""
    found = pcie_machine(pynvml.NVML_TOPOLOGY_NODE, 4)
    for i, gpu in enumerate(found.gpus):
        gpu.busy, gpu.used = 10 * i, i * GIB
    for module in (devices, on_agent):
        monkeypatch.setattr(module, "pynvml", found)
    return found


# -- an agent's GPUs -------------------------------------------------------------------------------


def test_gpus_are_told_by_the_numbers_that_cuda_gives_them_and_nvml_stays_open(machine: Recorded) -> None:
    found = Gpus({"CUDA_VISIBLE_DEVICES": "2,0"})
    assert found.use() == {0: {"busy": 20, "memory": 2 * GIB}, 1: {"busy": 0, "memory": 0}}
    machine.gpus[2].busy = 77
    assert found.use()[0]["busy"] == 77
    assert (machine.open, found.why) == (1, "")


def test_what_nvml_refuses_of_a_gpu_is_none_and_the_rest_is_told(machine: Recorded) -> None:
    machine.gpus[1].busy, machine.gpus[3].used = refused(), refused(pynvml.NVML_ERROR_GPU_IS_LOST)
    found = Gpus({}).use()
    assert found[1] == {"busy": None, "memory": GIB}
    assert found[3] == {"busy": 30, "memory": None}


def test_gpus_that_cuda_orders_in_another_way_than_nvml_are_left_out(machine: Recorded) -> None:
    machine.gpus[1].name = "another model"
    assert Gpus({}).use() == {}
    assert sorted(Gpus({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).use()) == [0, 1, 2, 3]


def test_nvml_that_counts_no_gpu_says_why(machine: Recorded) -> None:
    machine.nvmlDeviceGetHandleByIndex = lambda index: (_ for _ in ()).throw(refused(pynvml.NVML_ERROR_GPU_IS_LOST))  # type: ignore[method-assign,assignment]
    found = Gpus({})
    assert (found.use(), found.why) == ({}, "GPU is lost")


# -- an agent's workers ----------------------------------------------------------------------------


def test_a_worker_is_found_once_and_tells_nothing_once_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(on_agent, "ProcessId", type("Counting", (ProcessId,), {
        "process": lambda self: looked.append(self.pid) or ProcessId.process(self)}))  # fmt: skip
    workers = on_agent.WorkerPids()
    children = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]

    def of(child: subprocess.Popen[bytes]) -> Any:
        return SimpleNamespace(rank=0, pid=child.pid, started=ProcessId.of(child.pid).started)

    try:
        first, second = map(of, children)
        found = [workers.of([first], memory)[0] for memory in ([], [0], [1])]
        assert [("memory" in told, told["resident"] > 0) for told in found] == [
            (False, True),
            (True, True),
            (False, True),
        ]
        assert looked == [first.pid]
        children[0].kill()
        while psutil.Process(first.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert workers.of([first], [0]) == {0: {}}
        assert workers.of([second], [])[0]["resident"] > 0, "the same rank, another process"
        assert looked == [first.pid, second.pid]
    finally:
        for child in children:
            child.kill()
            child.communicate()


# -- rows of ranks ---------------------------------------------------------------------------------


class Host:
    """A node whose agent answers as a real one does, from recorded GPUs; `silent`: it does not answer."""

    def __init__(self, ranks: Sequence[int], recorded: Recorded):
        self.workers, self.can_respawn = dict.fromkeys(ranks), True
        self.agent = self
        self.alive = True
        self.silent = False
        self.ended: set[int] = set()  # ranks of which it has nothing to tell
        self.asked: list[list[int]] = []  # ranks whose memory was wanted
        self.seconds = 0.0  # of CPU
        self.grown, self.costs = 0, 0.005  # bytes of resident pages; seconds of CPU to add up a rank's memory
        with pytest.MonkeyPatch.context() as patch:
            for module in (devices, on_agent):
                patch.setattr(module, "pynvml", recorded)
            self._gpus = Gpus({}).use()

    def post(self, op: str, memory: list[int]) -> int:
        assert op == "use"
        self.asked.append(memory)
        return len(self.asked)

    def take(self, key: int, timeout: float) -> Any:
        if self.silent:
            raise AgentFailed("no answer")
        self.seconds += 0.25
        wanted = self.asked[-1]
        told = {
            r: {
                "cpu": self.seconds,
                "resident": 3 * GIB + self.grown,
                **({"memory": (r + 1) * GIB} if r in wanted else {}),
            }
            for r in self.workers
        } | {r: {} for r in self.ended}
        took = self.costs * len(wanted)
        return json.loads(json.dumps({"workers": told, "took": took, "gpus": self._gpus, "why": ""}))


class Clock:
    """Half a second goes by from look to look."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(poll, "time", made)
    return made


def of_four() -> tuple[list[Host], Topology]:
    """Two hosts of eight GPUs; on each two ranks that own four."""
    hosts = []
    for first in (0, 2):
        recorded = nvswitch_machine()
        for i, gpu in enumerate(recorded.gpus):
            gpu.busy, gpu.used = 10 * first + i, (1 + first) * GIB
        hosts.append(Host((first, first + 1), recorded))
    nodes = [Node(i, f"h{i}", tuple(Device(d, str(d)) for d in range(8)), cores=8) for i in range(2)]
    return hosts, Topology.plan(nodes, nproc=2, nnodes=2, gpus_per_proc=4)


def pool_of(hosts: Sequence[Host]) -> Any:
    return SimpleNamespace(group=SimpleNamespace(nodes=hosts, engines=[]))


def strip(uses: Uses, placed: Topology) -> list[list[str]]:
    """Memory, CPU and GPU of each row, as a reader sees them."""
    found = rows(placed, SeenRanks(frozenset(range(placed.world_size))), uses.before, uses.now, {})
    shown = page.strip(panel_state.seen(State(placed=placed), found, "", 0))
    Balanced(shown)
    cells = [row.split('class="number">')[2:] for row in shown.split("<tr>")[2:]]
    return [[cell.partition("<")[0] for cell in of] for of in cells]


def test_a_rank_has_the_busiest_of_its_gpus_and_the_memory_of_all_on_each_host(clock: Clock) -> None:
    hosts, placed = of_four()
    uses = Uses()
    for _ in range(2):
        uses.take(pool_of(hosts), placed)
        clock.now += 0.5
    assert strip(uses, placed) == [
        ["1.0 GiB", "50 %", "3 % · 4.0 GiB"],
        ["2.0 GiB", "50 %", "7 % · 4.0 GiB"],
        ["3.0 GiB", "50 %", "23 % · 12 GiB"],
        ["4.0 GiB", "50 %", "27 % · 12 GiB"],
    ]


def test_simulated_gpus_are_not_as_busy_as_the_real_ones_of_the_same_numbers(clock: Clock) -> None:
    hosts, _ = of_four()
    nodes = [Node(i, f"h{i}", tuple(Device(d, str(d), simulated=True) for d in range(4)), cores=8) for i in range(2)]
    placed = Topology.plan(nodes, nproc=2, nnodes=2, gpus_per_proc=2)
    uses = Uses()
    for _ in range(2):
        uses.take(pool_of(hosts), placed)
        clock.now += 0.5
    assert [row[2] for row in strip(uses, placed)] == ["–"] * 4


def test_a_host_that_does_not_answer_has_empty_cells_and_the_other_has_its_own(clock: Clock) -> None:
    hosts, placed = of_four()
    uses = Uses()
    uses.take(pool_of(hosts), placed)
    hosts[0].silent, clock.now = True, 0.5
    uses.take(pool_of(hosts), placed)
    assert strip(uses, placed)[:3] == [["–"] * 3] * 2 + [["3.0 GiB", "50 %", "23 % · 12 GiB"]]
    hosts[0].silent = False
    for _ in range(2):
        clock.now += 0.5
        uses.take(pool_of(hosts), placed)
    assert strip(uses, placed)[0] == ["1.0 GiB", "50 %", "3 % · 4.0 GiB"]


def test_memory_is_asked_for_now_and_then_and_shown_meanwhile(clock: Clock) -> None:
    hosts, placed = of_four()
    uses = Uses()
    for _ in range(int(2 * MEMORY_EVERY) + 1):
        uses.take(pool_of(hosts), placed)
        assert uses.now[3].memory == 4 * GIB
        clock.now += 0.5
    assert [i for i, memory in enumerate(hosts[1].asked) if memory] == [0, 2 * MEMORY_EVERY]


def test_between_memory_follows_the_resident_pages(clock: Clock) -> None:
    hosts, placed = of_four()
    uses = Uses()
    uses.take(pool_of(hosts), placed)
    hosts[0].grown, clock.now = GIB // 2, 0.5
    uses.take(pool_of(hosts), placed)
    assert [uses.now[r].memory for r in range(4)] == [1.5 * GIB, 2.5 * GIB, 3 * GIB, 4 * GIB]


def test_memory_of_many_ranks_is_added_up_less_often(clock: Clock) -> None:
    """It costs no more than its share of a core."""
    hosts, placed = of_four()
    hosts[1].costs = 0.06
    uses = Uses()
    while clock.now < 200:
        uses.take(pool_of(hosts), placed)
        clock.now += 0.5
    assert [i / 2 for i, memory in enumerate(hosts[0].asked) if memory] == [0, 80, 160]


def test_memory_of_many_ranks_is_added_up_a_few_at_a_time(clock: Clock) -> None:
    """An agent that adds up pages hears nobody meanwhile."""
    hosts = [Host(range(10), nvswitch_machine())]
    placed = Topology.plan([Node(0, "h", cores=8)], nproc=10)
    uses = Uses()
    while clock.now < 80:
        uses.take(pool_of(hosts), placed)
        clock.now += 0.5
    assert hosts[0].asked[:3] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert all(use.memory is not None for use in uses.now.values())
    again = [(i / 2, ranks) for i, ranks in enumerate(hosts[0].asked) if ranks][3:]
    assert again[:3] == [(33.5, [0, 1, 2, 3]), (34, [4, 5, 6, 7]), (34.5, [8, 9])]


def test_ranks_that_have_ended_keep_no_other_from_its_turn(clock: Clock) -> None:
    """Four are asked for at once: as many have ended before their memory was told."""
    hosts = [Host(range(8), nvswitch_machine())]
    hosts[0].ended = {0, 1, 2, 3}
    placed = Topology.plan([Node(0, "h", cores=8)], nproc=8)
    uses = Uses()
    for _ in range(2):
        uses.take(pool_of(hosts), placed)
        clock.now += 0.5
    assert [use.memory is not None for use in uses.now.values()] == [False] * 4 + [True] * 4


def test_memory_of_a_new_process_is_asked_for_at_the_next_look(clock: Clock) -> None:
    hosts, placed = of_four()
    uses = Uses()
    found = []
    for look in range(4):
        if look == 2:
            hosts[0].seconds = 0.0  # both ranks of that host have been restarted
        uses.take(pool_of(hosts), placed)
        found.append([use.memory is not None for use in uses.now.values()])
        clock.now += 0.5
    assert found == [[True] * 4, [True] * 4, [False, False, True, True], [True] * 4]


def test_without_gpus_and_with_gpus_that_nvml_does_not_tell_of_the_cell_is_empty(clock: Clock) -> None:
    hosts, placed = of_four()
    hosts[0]._gpus = {i: {"busy": None, "memory": None} for i in range(4)}
    uses = Uses()
    uses.take(pool_of(hosts), placed)
    assert [gpu for _, _, gpu in strip(uses, placed)][:2] == ["–", "–"]
    plain = Topology.plan([Node(0, "h", cores=8)], nproc=4)
    uses.take(pool_of(hosts), plain)
    assert [gpu for _, _, gpu in strip(uses, plain)] == ["–"] * 4
