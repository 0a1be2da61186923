"""Placements in words: who runs where, on which hardware; and layouts on paper, from numbers alone. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from nbddp.errors import BadInput, counted, rank_words, several
from nbddp.launch.machine import SELF, UNKNOWN, Device, Node, Numa, gpu_noun, node_holds
from nbddp.launch.topology import Topology

PATHS = {  # nvidia-smi's codes, closest first, and what lies between the two GPUs
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the PCIe host bridge of a CPU",
    "NODE": "PCIe host bridges within one NUMA node",
    "SYS": "the interconnect between NUMA nodes",
}
MOST_PLANNED, MOST_ON_NODE = 100_000, 256  # processes or GPUs on paper: a mistyped number must not fill the memory


def describe(placed: Topology) -> str:
    """The whole placement as text: the equation, then each node with what is known of its GPUs.

    Of a node without GPUs only what does not differ from laptop to laptop: not its cores.
    """
    lines = [placed.equation()]
    told: dict[object, int] = {}
    for nodes in placed.folded():
        first = nodes[0]
        if len(nodes) > 1:
            lines.append(f"nodes {first.index}–{nodes[-1].index}: same; {placed.ranks_on(nodes)}")
            continue
        hardware = _gpu_words(placed, first)
        as_told = told.setdefault(placed.likeness(first), first.index)
        if hardware and as_told != first.index:
            hardware = [f"same hardware as node {as_told}"]
        lines += [_node_words(placed, first), *(f"  {line}" for line in hardware)]
    lines += [joint] if (joint := joint_words(placed)) else []
    return "\n".join([*lines, *placed.untold()])


def joint_words(placed: Topology) -> str:
    """What joins the nodes, or empty where it is not known or there is nothing to join."""
    interfaces = dict.fromkeys(n.interface for n in placed.nodes if n.interface)
    if placed.nnodes < 2 or not interfaces:
        return ""
    if all(i.loopback for i in interfaces):  # lo, lo0: its name differs from system to system
        return "the nodes are one machine and meet over its loopback interface"
    return f"the nodes are connected by {' and '.join(i.describe() for i in interfaces)}"


def _node_words(placed: Topology, node: Node) -> str:
    places = [f"rank {w.rank} (local rank {w.local_rank}) on {w.device_words()}" for w in placed.on_node(node.index)]
    owners = placed.owners(node.index)
    idle = [i for i, ranks in owners.items() if not ranks]
    if idle:
        places.append(f"{several('GPU', idle)} {'is' if len(idle) == 1 else 'are'} idle")
    places += [f"GPU {i} is shared by {rank_words(r)}" for i, r in owners.items() if len(r) > 1]
    holds = node_holds(node) if node.devices else "CPU"  # cores differ from laptop to laptop
    return f"{node.label()}, {holds}: {'; '.join(places)}"


def _gpu_words(placed: Topology, node: Node) -> list[str]:
    """Lines on a node's GPUs: model and memory, bus ids, NUMA nodes with their cores and ranks, links."""
    models: dict[str, list[int]] = {}
    for device in node.devices:
        models.setdefault(model_words(device), []).append(device.index)
    noun = gpu_noun(node.devices)
    lines = [f"{several(noun, indices)}: {model}" for model, indices in models.items() if model]
    buses = [f"GPU {d.index} at {bus_words(d.bus_id)}" for d in node.devices if d.bus_id]
    lines += [f"PCI bus: {', '.join(buses)}"] if buses else []
    if node.devices:
        lines += [", ".join([numa_words(numa), *near(placed, node, numa)]) for numa in node.numa]
    return [*lines, *matrix_words(node)]


def near(placed: Topology, node: Node, numa: Numa) -> list[str]:
    """`GPUs 0–3` and `ranks 0–3`: what is known to hang on a NUMA node; a rank by its GPUs."""
    gpus = [d.index for d in node.devices if d.numa == numa.index]
    ranks = [w.rank for w in placed.on_node(node.index) if any(d.numa == numa.index for d in w.devices)]
    return [*([several("GPU", gpus)] if gpus else []), *([rank_words(ranks)] if ranks else [])]


def planned(
    *,
    nnodes: int | None = None,
    gpus_per_node: int | None = None,
    gpus_per_proc: int | None = None,
    nproc: int | str | None = None,
    oversubscribe: bool = False,
) -> Topology:
    """A layout on paper, from numbers alone. Raises BadInput with what to type where it is impossible."""
    count, gpus = nnodes or 1, gpus_per_node or 0
    if gpus_per_proc and not gpus:
        raise BadInput(
            f"--gpus-per-proc {gpus_per_proc} needs the number of GPUs per planned node; "
            f"add --gpus-per-node {gpus_per_proc} or more"
        )
    if nproc == "cpu" or (not gpus and nproc in ("auto", "gpu")):
        raise BadInput(f"--nproc {nproc} counts a machine's devices, which a planned node does not have; use --nproc 2")
    each = max(gpus, nproc if isinstance(nproc, int) else 2)
    if each > MOST_ON_NODE:
        raise BadInput(f"a planned node has at most {MOST_ON_NODE} processes or GPUs, not {each}; use smaller numbers")
    if count * each > MOST_PLANNED:
        raise BadInput(
            f"a planned layout has at most {MOST_PLANNED} processes or GPUs, not {count * each}; "
            f"use --nnodes {MOST_PLANNED // each} or fewer"
        )
    devices = tuple(Device(i, str(i)) for i in range(gpus))
    hosts = [Node(i, f"planned {i}", devices, planned=True) for i in range(count)]
    return Topology.plan(
        hosts, nproc=nproc, nnodes=count, gpus_per_proc=gpus_per_proc, oversubscribe=oversubscribe,
        device="cuda" if gpus else "cpu",
    )  # fmt: skip


# -- hardware ------------------------------------------------------------------------------------------


def model_words(device: Device) -> str:
    """`NVIDIA H100 80GB HBM3, 79.6 GiB`, or what of it is known."""
    memory = f"{device.memory / 2**30:.1f} GiB" if device.memory else ""
    return ", ".join(filter(None, (device.name, memory)))


def bus_words(bus_id: str) -> str:
    """`00000000:19:00.0` → `19:00.0`; a PCI domain other than 0 stays, without its leading zeros."""
    domain, _, rest = bus_id.lower().partition(":")
    return (f"{domain.lstrip('0')}:{rest}" if domain.strip("0") else rest) if rest.count(":") else bus_id.lower()


def numa_words(numa: Numa) -> str:
    """`NUMA 0: cores 0–47`."""
    return f"NUMA {numa.index}: {several('core', numa.cores) if numa.cores else 'no core that may be used'}"


def codes(links: Sequence[Sequence[str]]) -> list[str]:
    """The codes that occur in a matrix of links, closest first, without the diagonal."""
    found = {code for row in links for code in row} - {SELF}
    return sorted(found, key=_distance)


def code_words(code: str) -> str:
    """`NV18: 18 NVLinks`, `SYS: the interconnect between NUMA nodes`."""
    if code == UNKNOWN:
        return "?: not reported"
    return f"{code}: {PATHS[code] if code in PATHS else counted(int(code[2:]), 'NVLink')}"


def _distance(code: str) -> tuple[int, int]:
    if code.startswith("NV"):
        return (0, -int(code[2:]))
    return (1 + list(PATHS).index(code), 0) if code in PATHS else (9, 0)


def matrix_words(node: Node) -> list[str]:
    """The links of a node's GPUs as aligned lines, one per GPU; none if no link is known."""
    if not node.links:
        return []
    heads = [f"GPU {d.index}" for d in node.devices]
    width = max(map(len, heads))
    lines = ["  ".join(["links".ljust(width), *heads])]
    for head, row in zip(heads, node.links, strict=True):
        cells = [(code or "?").center(len(h)) for code, h in zip(row, heads, strict=True)]
        lines.append("  ".join([head.ljust(width), *cells]).rstrip())
    return [*lines, "; ".join(code_words(code) for code in codes(node.links))]
