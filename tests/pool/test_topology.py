"""What `%ddp draw_topology` says is true: of recorded machines, of this one, and of layouts that are only planned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pynvml
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from nbddp.agent import hardware
from nbddp.analysis.placement import PATHS, describe, joint_words, planned
from nbddp.capabilities.gpus import on_agent as devices
from nbddp.capabilities.topology.boxes import Box, layout_boxes
from nbddp.capabilities.topology.figure import draw_topology
from nbddp.errors import BadInput
from nbddp.figures.figure import DPI
from nbddp.launch.machine import Device, Interface, Node, Numa
from nbddp.launch.topology import Topology, topology_of
from nbddp.pool import start_requests
from nbddp.pool.pool import WorkerPool
from nbddp.protocol.agent import Warm
from nbddp.protocol.codec import from_json
from tests.kernels import Kernel
from tests.machines import Gpu, Recorded, mesh_machine, nvswitch_machine, pcie_machine, refused
from tests.unit.test_topology import cpu

LOOPBACK = {"name": "lo", "speed": 0, "loopback": True}
ETH = Interface("eth0", 25_000)
TWO_NUMA = [{"index": 0, "cores": list(range(48))}, {"index": 1, "cores": list(range(48, 96))}]


def facts_of(machine: Recorded, env: dict[str, str] | None = None) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "pynvml", machine)
        found = devices.gpus(env or {})
    assert machine.open == 0
    return found


def host_of(machine: Recorded, env: dict[str, str] | None = None) -> Node:
    """The machine as a node, through all that its facts go through: NVML → agent → JSON → node."""
    warm = {
        **facts_of(machine, env), "cores": 96, "numa": TWO_NUMA, "host": "h",
        "interfaces": [{"name": "eth0", "speed": 25_000, "loopback": False}, LOOPBACK],
    }  # fmt: skip
    return start_requests.host(from_json(Warm, json.loads(json.dumps(warm))))


def cluster(count: int, **asked: Any) -> Topology:
    host = replace(host_of(nvswitch_machine()), interface=ETH)
    return Topology.plan([replace(host, index=i, host=f"h{i}") for i in range(count)], nnodes=count, **asked)


# -- facts ------------------------------------------------------------------------------------


def test_a_pair_on_nvswitches_has_as_many_links_as_each_has_to_the_switches() -> None:
    host = host_of(nvswitch_machine())
    assert [d.bus_id for d in host.devices][::7] == ["00000000:19:00.0", "00000000:DB:00.0"]
    assert [d.numa for d in host.devices] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert host.links == tuple(tuple("X" if a == b else "NV18" for b in range(8)) for a in range(8))
    assert host.untold == ()


def test_of_two_gpus_on_a_switch_the_one_with_fewer_active_links_counts() -> None:
    machine = nvswitch_machine()
    machine.gpus[3].links[5:] = [replace(link, active=False) for link in machine.gpus[3].links[5:]]
    links = host_of(machine).links
    assert (links[3][0], links[0][3], links[0][1]) == ("NV5", "NV5", "NV18")


def test_links_between_gpus_are_counted_pair_by_pair_and_the_rest_goes_over_pcie() -> None:
    host = host_of(mesh_machine())
    assert host.links == (("X", "NV2", "PXB"), ("NV2", "X", "NV1"), ("PXB", "NV1", "X"))


@pytest.mark.parametrize("driver", [True, False])
def test_a_driver_without_nvml_is_told_and_no_driver_is_an_ordinary_machine(
    driver: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = pcie_machine(pynvml.NVML_TOPOLOGY_NODE)
    machine.nvmlInit = refused_call  # type: ignore[method-assign]
    if driver:
        (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(devices, "DRIVER", tmp_path / "nvidiactl")
    found = facts_of(machine)
    assert found["devices"] == []
    assert ["the driver capability utility" in line for line in found["untold"]] == [True] * driver


def refused_call() -> None:
    raise refused(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)


def test_a_divided_gpu_shows_the_first_of_its_instances() -> None:
    machine = pcie_machine(pynvml.NVML_TOPOLOGY_NODE, 1)
    whole = machine.gpus[0]
    whole.instances = [replace(whole, name=f"{i}g", uuid=f"MIG-{i}") for i in (1, 2)]
    assert [(d.name, d.mask) for d in host_of(machine).devices] == [("1g", "MIG-1")]
    found = host_of(machine, {"CUDA_VISIBLE_DEVICES": "MIG-2,MIG-1"})
    assert [(d.name, d.mask) for d in found.devices] == [("2g", "MIG-2"), ("1g", "MIG-1")]


@pytest.mark.parametrize(
    ("level", "code"),
    [
        (pynvml.NVML_TOPOLOGY_INTERNAL, "PIX"),
        (pynvml.NVML_TOPOLOGY_SINGLE, "PIX"),
        (pynvml.NVML_TOPOLOGY_MULTIPLE, "PXB"),
        (pynvml.NVML_TOPOLOGY_HOSTBRIDGE, "PHB"),
        (pynvml.NVML_TOPOLOGY_NODE, "NODE"),
        (pynvml.NVML_TOPOLOGY_SYSTEM, "SYS"),
    ],
)
def test_gpus_without_nvlink_have_the_code_of_their_common_ancestor(level: int, code: str) -> None:
    host = host_of(pcie_machine(level))
    assert host.links == (("X", code), (code, "X"))
    assert host.untold == ()
    assert code in PATHS


def test_simulated_nodes_have_the_links_among_their_own_gpus() -> None:
    machine = mesh_machine()
    machine.gpus.append(Gpu("Tesla V100", 16 * 2**30, "GPU-3", "00000000:04:00.0"))
    machine.ancestors = {(0, 2): 50, (0, 3): 50, (1, 3): 50, (2, 3): pynvml.NVML_TOPOLOGY_SINGLE}
    halves = Topology.plan([host_of(machine)], nnodes=2)
    assert [n.links for n in halves.nodes] == [(("X", "NV2"), ("NV2", "X")), (("X", "PIX"), ("PIX", "X"))]
    alone = Topology.plan([host_of(machine)], nnodes=4)
    assert [n.links for n in alone.nodes] == [()] * 4
    assert "links" not in describe(alone)


def test_a_masked_and_reordered_list_keeps_each_gpus_own_facts() -> None:
    machine = mesh_machine()
    host = host_of(machine, {"CUDA_VISIBLE_DEVICES": "2,0"})
    assert [(d.index, d.mask, d.bus_id) for d in host.devices] == [
        (0, "2", "00000000:03:00.0"),
        (1, "0", "00000000:01:00.0"),
    ]
    assert host.links == (("X", "PXB"), ("PXB", "X"))


REFUSALS: dict[str, tuple[Callable[[Recorded], None], str]] = {
    "name": (lambda m: setattr(m.gpus[1], "name", refused()), "name of GPU 1"),
    "memory": (lambda m: setattr(m.gpus[1], "memory", refused()), "memory of GPU 1"),
    "uuid": (lambda m: setattr(m.gpus[1], "uuid", refused()), "UUID of GPU 1"),
    "bus": (lambda m: setattr(m.gpus[1], "bus", refused()), "PCI bus id of GPU 1"),
    "numa": (lambda m: setattr(m.gpus[1], "numa", refused()), "NUMA node of GPU 1"),
    "several numa nodes": (lambda m: setattr(m.gpus[1], "numa", (3,)), "NUMA node of GPU 1: it names 2"),
    "no numa node": (lambda m: setattr(m.gpus[1], "numa", (0,)), "NUMA node of GPU 1: it names 0"),
    "ancestor": (lambda m: setattr(m, "ancestors", refused()), "PCIe links of GPUs 0–1"),
    "link state": (lambda m: m.gpus[1].links.append(refused(pynvml.NVML_ERROR_UNKNOWN)), "NVLinks of GPU 1: Unknown"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_nvml_refuses_is_left_out_and_said_and_the_rest_stays(name: str) -> None:
    machine = pcie_machine(pynvml.NVML_TOPOLOGY_HOSTBRIDGE)
    REFUSALS[name][0](machine)
    env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    host = host_of(machine, env)
    assert len(host.devices) == 2
    assert host.devices[0] == host_of(pcie_machine(pynvml.NVML_TOPOLOGY_HOSTBRIDGE), env).devices[0]
    assert host.links == (() if name in ("ancestor", "link state") else (("X", "PHB"), ("PHB", "X")))
    placed = Topology.plan([host])
    (said,) = host.untold
    assert said.startswith(f"NVML does not report the {REFUSALS[name][1]}")
    assert said in describe(placed).splitlines()
    assert said in [b.text.replace("\n", " ") for b in layout_boxes(placed).boxes if b.kind == "note"]


def test_a_far_end_that_is_not_told_is_not_taken_for_pcie() -> None:
    machine = nvswitch_machine()
    machine.gpus[0].links[0] = replace(machine.gpus[0].links[0], kind=refused(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND))
    host = host_of(machine)
    assert (host.links[0][1], host.links[1][0], host.links[1][2]) == ("", "", "NV18")
    assert host.untold[0].startswith("NVML does not report the NVLinks of GPU 0")
    words = describe(Topology.plan([host]))
    assert "  GPU 0    X      ?      ?" in words
    assert "NV18: 18 NVLinks; ?: not reported" in words


def test_gpus_of_several_models_in_unknown_order_have_no_facts_and_the_words_say_what_to_set() -> None:
    machine = pcie_machine(pynvml.NVML_TOPOLOGY_NODE)
    machine.gpus[1].name = "Tesla T4"
    host = host_of(machine)
    assert (host.devices, host.links) == ((Device(0, "0"), Device(1, "1")), ())
    assert "set CUDA_DEVICE_ORDER=PCI_BUS_ID" in describe(Topology.plan([host]))


def test_no_driver_is_an_ordinary_cpu_machine() -> None:
    machine = Recorded([], 0)
    machine.nvmlInit = lambda: (_ for _ in ()).throw(refused(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))  # type: ignore[method-assign]
    assert facts_of(machine) == {"devices": [], "links": [], "untold": []}


def test_nvml_that_cannot_give_a_gpu_does_not_end_the_agent() -> None:
    machine = Recorded([Gpu("a", 1, "u", "b")], 0)
    machine.nvmlDeviceGetHandleByIndex = lambda index: (_ for _ in ()).throw(refused(pynvml.NVML_ERROR_GPU_IS_LOST))  # type: ignore[method-assign,assignment]
    host = host_of(machine)
    assert host.devices == ()
    assert "NVML does not list the GPUs: GPU is lost" in describe(Topology.plan([host])).splitlines()


def test_numa_nodes_have_the_cores_that_may_be_used(tmp_path: Path) -> None:
    for index, cores in ((0, "0-3,8-11\n"), (1, "4-7,12\n"), (10, "\n")):
        (tmp_path / f"node{index}").mkdir()
        (tmp_path / f"node{index}" / "cpulist").write_text(cores)
    (tmp_path / "online").write_text("0-1,10")
    assert hardware.numa({2, 3, 8, 12, 99}, tmp_path) == [
        {"index": 0, "cores": [2, 3, 8]},
        {"index": 1, "cores": [12]},
        {"index": 10, "cores": []},
    ]
    assert hardware.numa({0}, tmp_path / "nothing") == []


def test_the_running_pool_tells_this_machine_and_the_terminal_reads_the_same() -> None:
    with WorkerPool(nproc=1, nnodes=2) as pool:
        placed = pool.placed()
        assert pool.agent is not None
        said = subprocess.run(
            [sys.executable, "-m", "nbddp", "topology", pool.agent.pool_id], capture_output=True, text=True, check=True
        )
    assert topology_of(json.loads(json.dumps(asdict(placed)))) == placed
    assert said.stdout.rstrip("\n") == describe(placed)
    node = placed.nodes[0]
    assert {core for numa in node.numa for core in numa.cores} <= hardware.allowed_cores()
    assert bool(node.numa) == any(hardware.NUMA_NODES.glob("node[0-9]*"))
    assert node.interface is not None
    assert (node.interface.name, node.interface.loopback) == (hardware.loopback_name(), True)
    assert "the nodes are one machine and meet over its loopback interface" in said.stdout


# -- words ------------------------------------------------------------------------------------


def test_words_of_the_recorded_machine_of_eight() -> None:
    head, *lines = describe(Topology.plan([host_of(nvswitch_machine())], gpus_per_proc=2)).splitlines()
    assert head == "world size 4 = 1 node × 4 processes; each owns 2 GPUs"
    assert lines[:5] == [
        "node 0, 8 GPUs: rank 0 (local rank 0) on GPUs 0, 1; rank 1 (local rank 1) on GPUs 2, 3; "
        "rank 2 (local rank 2) on GPUs 4, 5; rank 3 (local rank 3) on GPUs 6, 7",
        "  GPUs 0–7: NVIDIA H100 80GB HBM3, 79.6 GiB",
        "  PCI bus: GPU 0 at 19:00.0, GPU 1 at 3b:00.0, GPU 2 at 4c:00.0, GPU 3 at 5d:00.0, "
        "GPU 4 at 9b:00.0, GPU 5 at bb:00.0, GPU 6 at cb:00.0, GPU 7 at db:00.0",
        "  NUMA 0: cores 0–47, GPUs 0–3, ranks 0–1",
        "  NUMA 1: cores 48–95, GPUs 4–7, ranks 2–3",
    ]
    assert lines[5:8] == [
        "  links  GPU 0  GPU 1  GPU 2  GPU 3  GPU 4  GPU 5  GPU 6  GPU 7",
        "  GPU 0    X     NV18   NV18   NV18   NV18   NV18   NV18   NV18",
        "  GPU 1   NV18    X     NV18   NV18   NV18   NV18   NV18   NV18",
    ]
    assert lines[-1] == "  NV18: 18 NVLinks"


def test_idle_and_shared_gpus_stand_in_the_words() -> None:
    four, two = (host_of(pcie_machine(pynvml.NVML_TOPOLOGY_SINGLE, n)) for n in (4, 2))
    idle = describe(Topology.plan([four], gpus_per_proc=3)).splitlines()[1]
    assert idle == "node 0, 4 GPUs: rank 0 (local rank 0) on GPUs 0, 1, 2; GPU 3 is idle"
    assert describe(Topology.plan([four], nproc=1)).splitlines()[1].endswith("on GPU 0; GPUs 1–3 are idle")
    shared = describe(Topology.plan([two], nproc=3, oversubscribe=True)).splitlines()[1]
    assert shared.endswith("rank 2 (local rank 2) on GPU 0; GPU 0 is shared by ranks 0, 2")


def test_nodes_are_joined_by_their_interface() -> None:
    assert describe(cluster(2)).splitlines()[-1] == "the nodes are connected by eth0, 25 Gbit/s"
    mixed = cluster(2)
    nodes = (mixed.nodes[0], replace(mixed.nodes[1], interface=Interface("ib0", 0)))
    assert joint_words(replace(mixed, nodes=nodes)) == "the nodes are connected by eth0, 25 Gbit/s and ib0"
    said = [b.title for b in layout_boxes(replace(mixed, nodes=nodes)).boxes if b.kind == "network"]
    assert said == ["eth0, 25 Gbit/s", "ib0"]
    unknown = replace(mixed, nodes=(mixed.nodes[0], replace(mixed.nodes[1], interface=None)))
    assert [b.title for b in layout_boxes(unknown).boxes if b.kind == "network"] == [
        "eth0, 25 Gbit/s",
        "network unknown",
    ]
    assert joint_words(cluster(1)) == ""
    assert [b.title for b in layout_boxes(cluster(2)).boxes if b.kind == "network"] == ["network: eth0, 25 Gbit/s"]
    assert Interface("e", 100).describe() == "e, 100 Mbit/s"


def test_a_run_of_equal_nodes_folds_also_when_they_are_few() -> None:
    for count in (4, 16):
        words = describe(cluster(count)).splitlines()
        assert f"nodes 2–{count - 1}: same; ranks 16–{8 * count - 1}" in words
        assert words[words.index("  same hardware as node 0") - 1].startswith("node 1, 8 GPUs: rank 8 ")
        titles = [b.title for b in layout_boxes(cluster(count)).boxes if b.kind in ("node", "fold")]
        assert titles == ["node 0", "node 1", f"nodes 2–{count - 1}: same"]
    assert [len(n) for n in cluster(3).folded()] == [1, 1, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"links": ()},
        {"numa": ()},
        {"cores": 1},
        {"interface": None},
        {"untold": ("x",)},
        {"devices": tuple(replace(d, bus_id="x") for d in host_of(nvswitch_machine()).devices)},
        {"devices": tuple(replace(d, memory=1) for d in host_of(nvswitch_machine()).devices)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_node_that_differs_in_any_fact_is_not_folded_away(change: dict[str, Any]) -> None:
    placed = cluster(12)
    odd = replace(placed, nodes=tuple(replace(n, **change) if n.index == 6 else n for n in placed.nodes))
    folded = [[n.index for n in nodes] for nodes in odd.folded()]
    assert folded == [[0], [1], [2, 3, 4, 5], [6], [7], [8], [9, 10, 11]]


def test_the_terminal_plans_without_pool_agent_torch_or_figure(tmp_path: Path) -> None:
    code = (
        "import sys; from nbddp.capabilities.terminal import main as terminal\n"
        "terminal.main(['topology', '--nnodes', '2', '--gpus-per-node', '4', '--gpus-per-proc', '2'])\n"
        "print(sorted({'torch', 'matplotlib', 'ipyparallel', 'zmq'} & set(sys.modules)))"
    )
    env = {**os.environ, "NBDDP_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    lines = done.stdout.splitlines()
    assert lines[0] == "world size 4 = 2 planned nodes × 2 processes; each owns 2 GPUs"
    assert lines[-1] == "[]"
    assert list(tmp_path.iterdir()) == []
    refusal = subprocess.run(
        [sys.executable, "-m", "nbddp", "topology", "--gpus-per-proc", "2"], capture_output=True, text=True, check=False
    )
    assert (refusal.returncode, refusal.stdout) == (2, "")
    assert "add --gpus-per-node 2 or more" in refusal.stderr


def test_the_notebook_plans_without_a_pool(new_kernel: Kernel) -> None:
    shown = new_kernel.run("%ddp topology --nnodes 2 --gpus-per-node 4 --gpus-per-proc 2")
    (picture,) = shown.displays
    assert picture["text/plain"].startswith("world size 4 = 2 planned nodes × 2 processes; each owns 2 GPUs\nnode 0")
    assert "image/png" in picture
    assert "--gpus-per-proc 4" in new_kernel.run("%ddp topology --gpus-per-node 4 --gpus-per-proc 8").evalue
    assert "no workers are running" in new_kernel.run("%ddp topology").evalue
    assert "no pool" in new_kernel.run("%ddp stop").text()


# -- the figure -------------------------------------------------------------------------------


def simulated(nnodes: int) -> Topology:
    return Topology.plan([host_of(nvswitch_machine())], nnodes=nnodes)


def differing(count: int) -> Topology:
    placed = cluster(count)
    joined = [Interface(f"enp{i}s0f1", 1000 * i) if i else None for i in range(count)]
    return replace(placed, nodes=tuple(replace(n, interface=joined[n.index]) for n in placed.nodes))


def refusing() -> Topology:
    machine = nvswitch_machine()
    for gpu in machine.gpus[:3]:
        gpu.numa = refused()
        gpu.links[0] = refused(pynvml.NVML_ERROR_UNKNOWN)
    return Topology.plan([host_of(machine)])


def models(*names: str) -> Topology:
    devices = tuple(
        Device(i, str(i), name, (i + 1) * 2**34, f"u{i}", f"0000:0{i}:00.0", 0) for i, name in enumerate(names)
    )
    return Topology.plan([Node(0, "h", devices, 8, numa=(Numa(0, (0, 2, 4, 6, 8, 10, 12, 14, 16, 18)),))])


PIXEL = 1 / DPI
PCIE = {n: host_of(pcie_machine(pynvml.NVML_TOPOLOGY_HOSTBRIDGE, n)) for n in (2, 4)}
PLACEMENTS = {
    "2 on CPU": cpu(2, 1, nproc=2),
    "64 on CPU": cpu(128, 2, nproc=64),
    "2 simulated × 2 on CPU": cpu(2, 1, nproc=2, nnodes=2),
    "no NUMA to be seen": cpu(8, 0, nproc=4),
    "2 nodes × 8": cluster(2),
    "3 nodes × 8": cluster(3),
    "16 nodes × 8": cluster(16),
    "5 nodes of 5 networks": differing(5),
    "eight, one each": cluster(1),
    "eight of one": cluster(1, gpus_per_proc=8),
    "two idle": cluster(1, gpus_per_proc=3),
    "two simulated": simulated(2),
    "eight simulated": simulated(8),
    "shared": Topology.plan([PCIE[2]], nproc=4, oversubscribe=True),
    "pairs of three, shared": planned(nnodes=2, gpus_per_node=3, gpus_per_proc=2, nproc=4, oversubscribe=True),
    "one of four idle": Topology.plan([PCIE[4]], gpus_per_proc=3),
    "planned": planned(nnodes=2, gpus_per_node=4, gpus_per_proc=2),
    "planned, huge": planned(nnodes=2_500, gpus_per_node=8),
    "planned on CPU": planned(nnodes=6, nproc=3),
    "refusing": refusing(),
    "four models": models("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "Tesla T4", "NVIDIA GeForce RTX 4090"),
}  # fmt: skip
EVERY = pytest.mark.parametrize("place", PLACEMENTS.values(), ids=PLACEMENTS)


def of_kind(place: Topology, *kinds: str) -> list[Box]:
    return [b for b in layout_boxes(place).boxes if b.kind in kinds]


def apart(a: Box, b: Box, slack: float = 1e-9) -> bool:
    beside = a.right <= b.x + slack or b.right <= a.x + slack
    return beside or a.bottom <= b.y + slack or b.bottom <= a.y + slack


@EVERY
def test_every_box_lies_inside_its_parent_and_siblings_do_not_overlap(place: Topology) -> None:
    boxes = layout_boxes(place).boxes
    for a, b in combinations(boxes, 2):
        assert a.holds(b) or apart(a, b), (a, b)
    for inner, outer in (("process", "node"), ("gpu", "node"), ("shared", "node"), ("idle", "node"), ("numa", "node")):
        for box in (b for b in boxes if b.kind == inner):
            assert sum(b.holds(box) for b in boxes if b.kind == outer) == 1


@EVERY
def test_every_process_and_gpu_of_a_node_is_drawn_once_where_it_belongs(place: Topology) -> None:
    shown = [nodes[0] for nodes in place.folded() if len(nodes) == 1]
    boxes = layout_boxes(place).boxes
    for node in shown:
        (frame,) = (b for b in boxes if b.kind == "node" and b.title == node.label())
        inside = [b for b in boxes if frame.holds(b)]
        workers = place.on_node(node.index)
        processes = [b for b in inside if b.kind == "process"]
        assert [b.title for b in processes] == [f"rank {w.rank}" for w in workers]
        gpus = [b for b in inside if b.kind in ("gpu", "shared", "idle")]
        assert sorted(b.title for b in gpus) == sorted(f"GPU {d.index}" for d in node.devices)
        owners = place.owners(node.index)
        for gpu in gpus:
            ranks = owners[int(gpu.title.split()[1])]
            assert gpu.kind == ("idle", "gpu", "shared")[min(2, len(ranks))]
            held = [p.title for p in processes if p.holds(gpu)]
            some_shared = any(len(r) > 1 for r in owners.values())
            assert held == ([] if some_shared else [f"rank {r}" for r in ranks])


def test_a_gpu_says_its_bus_its_numa_node_and_that_it_is_idle_or_shared() -> None:
    def said(name: str, kind: str) -> list[str]:
        return [b.text.replace("\n", " ") for b in of_kind(PLACEMENTS[name], kind)]

    assert said("one of four idle", "idle") == ["idle 44:00.0 NUMA 0"]
    assert said("eight, one each", "gpu")[7] == "db:00.0 NUMA 1"
    assert said("shared", "shared") == ["ranks 0, 2 41:00.0 NUMA 0", "ranks 1, 3 42:00.0 NUMA 0"]
    assert said("four models", "gpu")[2] == "Tesla T4 48.0 GiB 02:00.0 NUMA 0"
    assert said("2 nodes × 8", "node") == ["8 GPUs · NVIDIA H100 80GB HBM3, 79.6 GiB"] * 2
    assert said("2 nodes × 8", "numa")[2:] == ["cores 0–47 GPUs 0–3, ranks 8–11", "cores 48–95 GPUs 4–7, ranks 12–15"]
    assert said("planned", "gpu") == [""] * 8
    assert [b.title for b in of_kind(PLACEMENTS["2 simulated × 2 on CPU"], "node")][1] == "node 1 (simulated)"
    assert of_kind(PLACEMENTS["planned on CPU"], "numa") == []


@EVERY
def test_each_different_node_has_one_matrix_symmetric_with_x_on_the_diagonal(place: Topology) -> None:
    boxes = layout_boxes(place).boxes
    different = {(n.links, tuple(d.index for d in n.devices)) for n in place.nodes if n.links}
    matrices = [b for b in boxes if b.kind == "matrix"]
    assert len(matrices) == len(different)
    for matrix, (links, _) in zip(matrices, sorted(different, key=lambda d: d[1]), strict=True):
        cells = [b for b in boxes if matrix.holds(b) and b.kind in {"NV", "X", "?", *PATHS}]
        rows = [[b.title for b in cells if b.y == y] for y in sorted({b.y for b in cells})]
        assert rows == [[code or "?" for code in row] for row in links]
        assert rows == [list(column) for column in zip(*rows, strict=True)]
        assert [i for i, row in enumerate(rows) for j, code in enumerate(row) if (code == "X") != (i == j)] == []


@pytest.mark.every(3)
@EVERY
def test_text_stays_inside_its_box_and_off_other_text(place: Topology) -> None:
    figure = draw_topology(place).figure
    figure.dpi = DPI
    FigureCanvasAgg(figure).draw()
    (axes,) = figure.axes
    to_inches = axes.transData.inverted()
    for box, texts in zip(layout_boxes(place).boxes, zip(axes.texts[::2], axes.texts[1::2], strict=True), strict=True):
        extents = []
        for text in (t for t in texts if t.get_text()):
            assert text.get_size() >= 6.5
            (x0, low), (x1, high) = to_inches.transform(text.get_window_extent())
            extents.append(Box("text", x0, high, x1 - x0, low - high, text.get_text()))
        grown = replace(box, x=box.x - PIXEL, width=box.width + 2 * PIXEL)  # extents are whole pixels
        assert all(grown.holds(e) for e in extents), (box, extents)
        assert all(apart(a, b) for a, b in combinations(extents, 2)), box


@EVERY
def test_nodes_are_joined_by_lines_that_end_at_them(place: Topology) -> None:
    made = layout_boxes(place)
    nodes = [b for b in made.boxes if b.kind in ("node", "fold")]
    starts = {start for start, _ in made.lines}
    assert [(b.x + b.width / 2, b.bottom) in starts for b in nodes] == [place.nnodes > 1] * len(nodes)
    different = len({n.interface for n in place.nodes}) > 1
    assert len([b for b in made.boxes if b.kind == "network"]) == (place.nnodes > 1) * (len(nodes) if different else 1)
    graph: dict[int, set[int]] = {i: {i} for i in range(len(made.lines))}
    for (i, a), (j, b) in combinations(enumerate(made.lines), 2):
        if touch(a, b):
            joined = graph[i] | graph[j]
            for k in joined:
                graph[k] = joined
    assert len({id(s) for s in graph.values()}) <= 1  # one network


@EVERY
def test_no_line_crosses_a_box(place: Topology) -> None:
    made = layout_boxes(place)
    for (x0, y0), (x1, y1) in made.lines:
        drawn = Box("line", min(x0, x1), min(y0, y1), abs(x1 - x0), abs(y1 - y0))
        assert all(apart(drawn, b) for b in made.boxes), drawn
        assert Box("figure", 0, 0, made.width, made.height).holds(drawn)


def touch(a: Any, b: Any) -> bool:
    """True if an end of one of two level or upright lines lies on the other."""

    def on(point: tuple[float, float], line: Any) -> bool:
        (x0, y0), (x1, y1) = line
        return min(x0, x1) <= point[0] <= max(x0, x1) and min(y0, y1) <= point[1] <= max(y0, y1)

    return any(on(p, b) for p in a) or any(on(p, a) for p in b)


@pytest.mark.every(3)
@EVERY
def test_the_figures_words_are_the_placements(place: Topology) -> None:
    shown = draw_topology(place)
    assert shown.figure.axes[0].get_title("left").replace("\n", " ") == place.equation()
    bundle, metadata = shown._repr_mimebundle_()
    assert bundle["text/plain"] == describe(place) == metadata["image/png"]["alt"]


def test_a_figure_can_be_drawn_in_given_axes_and_leaves_matplotlib_as_it_was() -> None:
    before = dict(mpl.rcParams)
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    shown = draw_topology(PLACEMENTS["2 nodes × 8"], left)
    draw_topology(PLACEMENTS["2 on CPU"], right)
    assert shown.figure is figure
    assert shown.png()
    assert dict(mpl.rcParams) == before


@settings(max_examples=40)
@given(st.integers(1, 9), st.integers(0, 17), st.integers(1, 4), st.integers(1, 9), st.booleans())
def test_any_layout_has_its_boxes_in_place(nnodes: int, gpus: int, per_proc: int, nproc: int, share: bool) -> None:
    try:
        place = planned(
            nnodes=nnodes, gpus_per_node=gpus, gpus_per_proc=per_proc if gpus else None, nproc=nproc,
            oversubscribe=share,
        )  # fmt: skip
    except BadInput:
        return
    test_every_box_lies_inside_its_parent_and_siblings_do_not_overlap(place)
    test_every_process_and_gpu_of_a_node_is_drawn_once_where_it_belongs(place)
