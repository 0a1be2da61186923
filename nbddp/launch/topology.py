"""Who runs where: nodes, their devices, and the workers placed on them.

A plan is made before any process is started, by arithmetic on plain data. `Topology.plan` places `nproc` workers on
every node, in order of local rank, each with its `gpus_per_proc` consecutive GPUs. Or it refuses with a sentence that
says what to type. Pure: imports only the standard library, `nbddp.errors` and `nbddp.launch.machine`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from nbddp.errors import BadInput, counted, rank_words
from nbddp.launch.machine import (
    Device,
    Interface,
    Node,
    Numa,
    gpu_noun,
    node_holds,
    node_of,
)

__all__ = [
    "Device", "Interface", "Node", "Numa", "Topology", "Worker", "counted", "cpu_default", "node_holds",
    "rank_words", "simulate", "topology_of",
]  # fmt: skip

FOLD_FROM = 4  # equal nodes in a row: the first two are shown, the rest folded


@dataclass(frozen=True)
class Worker:
    """One process of the worker group, under torchrun's names."""

    rank: int
    local_rank: int
    node: int
    world_size: int
    local_world_size: int
    nnodes: int
    devices: tuple[Device, ...] = ()

    def __repr__(self) -> str:
        return (
            f"Worker(local_rank={self.local_rank}({self.local_world_size}), "
            f"node={self.node}({self.nnodes}), rank={self.rank}({self.world_size}), "
            f"device={self.device_words()})"
        )

    def device_words(self) -> str:
        """`cpu`, `GPU 2`, `GPUs 2, 3` or `simulated GPU 2`."""
        if not self.devices:
            return "cpu"
        indices = ", ".join(str(d.index) for d in self.devices)
        return f"{gpu_noun(self.devices)}{'s' * (len(self.devices) > 1)} {indices}"


@dataclass(frozen=True)
class Topology:
    """A placement of `world_size` workers on nodes. `workers[r].rank == r`."""

    nodes: tuple[Node, ...]
    workers: tuple[Worker, ...]
    gpus_per_proc: int = 0
    oversubscribed: bool = False
    hides_gpus: bool = False

    @property
    def world_size(self) -> int:
        return len(self.workers)

    @property
    def nnodes(self) -> int:
        return len(self.nodes)

    def joining(self, place: Worker) -> str:
        """The network interface by which a worker's libraries are to meet, which joins its node to others; empty where
        that is the loopback."""
        interface = self.nodes[place.node].interface
        return interface.name if interface is not None else ""

    @property
    def nproc_per_node(self) -> int:
        return self.workers[0].local_world_size if self.workers else 0

    @property
    def simulated(self) -> bool:
        return any(n.simulated for n in self.nodes)

    @property
    def on_gpus(self) -> bool:
        """Whether any worker has a GPU."""
        return any(w.devices for w in self.workers)

    @property
    def simulates_gpus(self) -> bool:
        """Whether any worker has a GPU for which the CPU computes."""
        return any(d.simulated for w in self.workers for d in w.devices)

    def on_node(self, node: int) -> tuple[Worker, ...]:
        """The local worker group of one node, in order of local rank."""
        local = self.nproc_per_node
        return self.workers[node * local : (node + 1) * local]

    @property
    def planned(self) -> bool:
        return any(n.planned for n in self.nodes)

    def owners(self, node: int) -> dict[int, list[int]]:
        """GPU of a node → the ranks that own it: none is idle, several share it."""
        group = self.on_node(node)
        return {d.index: [w.rank for w in group if d in w.devices] for d in self.nodes[node].devices}

    def folded(self) -> list[tuple[Node, ...]]:
        """Nodes one by one; of equal ones in a row, the first two, then all others as one tuple."""
        found: list[tuple[Node, ...]] = []
        for _, run in groupby(self.nodes, key=self.likeness):
            nodes = tuple(run)
            alone = 2 if len(nodes) >= FOLD_FROM else len(nodes)
            found += [(n,) for n in nodes[:alone]]
            found += [nodes[alone:]] if nodes[alone:] else []
        return found

    def likeness(self, node: Node) -> tuple[object, ...]:
        """Equal for nodes of the same hardware on which the processes lie alike."""
        return node.likeness(), tuple(tuple(d.index for d in w.devices) for w in self.on_node(node.index))

    def ranks_on(self, nodes: Iterable[Node]) -> str:
        """`ranks 16–127`."""
        return rank_words(w.rank for n in nodes for w in self.on_node(n.index))

    def equation(self) -> str:
        """`world size 4 = 2 nodes × 2 processes; each owns 2 GPUs`."""
        kind = "simulated " * self.simulated + "planned " * self.planned
        nodes = counted(self.nnodes, f"{kind}node")
        text = f"world size {self.world_size} = {nodes} × {counted(self.nproc_per_node, 'process')}"
        return f"{text}; {self.devices_words()}"

    def devices_words(self) -> str:
        """`each owns 2 GPUs`, `on CPU`."""
        if not self.gpus_per_proc:
            return "on CPU"
        noun = gpu_noun(d for w in self.workers for d in w.devices)
        return f"{noun}s are shared" if self.oversubscribed else f"each owns {counted(self.gpus_per_proc, noun)}"

    def untold(self) -> list[str]:
        """The facts that the machines did not report, a sentence each."""
        return list(dict.fromkeys(sentence for node in self.nodes for sentence in node.untold))

    @classmethod
    def plan(
        cls,
        hosts: Sequence[Node],
        *,
        nproc: int | str | None = None,
        nnodes: int = 1,
        gpus_per_proc: int | None = None,
        oversubscribe: bool = False,
        device: str = "auto",
    ) -> Topology:
        """Place workers, or raise BadInput with what to type.

        hosts: the real machines; one host and `nnodes` > 1 gives simulated nodes.
        nproc: workers per node; None or "auto" is one per share of GPUs, or the
            default of `cpu_default` without GPUs; "gpu" and "cpu" are torchrun's words.
        device: "auto" takes GPUs if there are any, "cpu" never, "cuda" insists.
        """
        _check_positive("--nnodes", nnodes)
        use_gpus = _use_gpus(hosts, device, gpus_per_proc)
        per_proc = (gpus_per_proc or 1) if use_gpus else 0
        if use_gpus:
            _check_positive("--gpus-per-proc", per_proc)
        usable = hosts if use_gpus else [_without_gpus(h) for h in hosts]
        nodes = simulate(usable[0], nnodes) if len(hosts) == 1 and nnodes > 1 else tuple(usable)
        if len(nodes) != nnodes:
            raise BadInput(f"--nnodes {nnodes} does not match the {len(nodes)} hosts; use --nnodes {len(nodes)}")
        local = _local_world_size(nproc, nodes, per_proc)
        if use_gpus and not oversubscribe:
            _refuse_shortage(nodes, local, per_proc)
        return cls(
            nodes=nodes,
            workers=tuple(_place(nodes, local, per_proc)),
            gpus_per_proc=per_proc,
            oversubscribed=use_gpus and any(local * per_proc > len(n.devices) for n in nodes),
            hides_gpus=not use_gpus and any(h.devices for h in hosts),
        )

    def device_notes(self, visible: str) -> list[str]:
        """What a program should know that takes its GPU by LOCAL_RANK, as most do."""
        if self.gpus_per_proc < 2 or visible != "all" or not any(w.devices for w in self.workers):
            return []
        return [
            f"each rank has {self.gpus_per_proc} GPUs and sees all: its first is "
            f"cuda:{{LOCAL_RANK * {self.gpus_per_proc}}}; with --visible own it sees only its own, from cuda:0 on"
        ]


def cpu_default(cores: int) -> int:
    """Workers started on a machine without GPUs when nobody says how many: two, the fewest that
    communicate. (torchrun's own default is one, its `auto` one per core.)"""
    return 2


def simulate(host: Node, nnodes: int) -> tuple[Node, ...]:
    """Share one machine among `nnodes` simulated nodes: GPUs in equal blocks, but simulated GPUs all to each."""
    if any(d.simulated for d in host.devices):
        # a GPU of one node is none of another: a process that changes nodes is replaced
        each = [tuple(replace(d, uuid=f"node {i}, GPU {d.index}") for d in host.devices) for i in range(nnodes)]
        cores = max(1, host.cores // nnodes)
        return tuple(replace(host, index=i, devices=own, cores=cores, simulated=True) for i, own in enumerate(each))
    share = len(host.devices) // nnodes
    if host.devices and share == 0:
        raise BadInput(
            f"{counted(nnodes, 'simulated node')} cannot share {counted(len(host.devices), 'GPU')}; "
            f"use --nnodes {len(host.devices)} or fewer, or --device cpu"
        )
    return tuple(
        replace(
            host, index=i, cores=max(1, host.cores // nnodes), simulated=True, **host.part(i * share, (i + 1) * share)
        )
        for i in range(nnodes)
    )


def topology_of(data: Mapping[str, Any]) -> Topology:
    """A topology from the JSON data that a pool describes itself with."""
    return Topology(
        nodes=tuple(node_of(n) for n in data["nodes"]),
        workers=tuple(
            Worker(**{**w, "devices": tuple(Device(**row) for row in w["devices"])}) for w in data["workers"]
        ),
        gpus_per_proc=data["gpus_per_proc"],
        oversubscribed=data["oversubscribed"],
        hides_gpus=data["hides_gpus"],
    )


def _without_gpus(host: Node) -> Node:
    """A machine whose GPUs are not used; if it has none, it may still say why."""
    return replace(host, devices=(), links=(), untold=()) if host.devices else host


def _check_positive(option: str, value: int) -> None:
    if value < 1:
        raise BadInput(f"{option} {value} is not possible; use a positive number, such as {option} 2")


def _use_gpus(hosts: Sequence[Node], device: str, gpus_per_proc: int | None) -> bool:
    have = min((len(h.devices) for h in hosts), default=0)
    if device == "cpu":
        if gpus_per_proc:
            raise BadInput("--gpus-per-proc and --device cpu contradict each other; remove one of them")
        return False
    if have == 0 and (device == "cuda" or gpus_per_proc):
        asked = "--device cuda" if device == "cuda" else f"--gpus-per-proc {gpus_per_proc}"
        raise BadInput(f"{asked} needs a GPU, and this machine has none; remove the option to run on CPU")
    return have > 0


def _local_world_size(nproc: int | str | None, nodes: Sequence[Node], per_proc: int) -> int:
    gpus = min(len(n.devices) for n in nodes)
    if isinstance(nproc, int):
        _check_positive("--nproc", nproc)
        return nproc
    if nproc not in (None, "auto", "gpu", "cpu"):
        raise BadInput(f"--nproc {nproc} is not a number of workers; use a number such as 2, or auto, gpu or cpu")
    if nproc == "gpu" and not per_proc:
        raise BadInput("--nproc gpu needs a GPU, and this machine has none; use --nproc 2 or --nproc cpu")
    if nproc == "cpu":
        return min(n.cores for n in nodes)
    if per_proc:
        return max(1, gpus // per_proc)
    return min(n.cores for n in nodes) if nproc == "auto" else cpu_default(nodes[0].cores)


def _refuse_shortage(nodes: Sequence[Node], local: int, per_proc: int) -> None:
    gpus = min(len(n.devices) for n in nodes)
    if local * per_proc <= gpus:
        return
    where = "each node has" if len(nodes) > 1 else "there are" if gpus != 1 else "there is"
    fits = gpus // per_proc
    advice = f"use --nproc {fits}" if fits else f"use --gpus-per-proc {gpus}"
    raise BadInput(
        f"{counted(local, 'worker')} with {counted(per_proc, 'GPU')} each need "
        f"{local * per_proc} GPUs, but {where} {gpus}; {advice}, or add --oversubscribe to share them"
    )


def _place(nodes: Sequence[Node], local: int, per_proc: int) -> Iterable[Worker]:
    for node in nodes:
        for lr in range(local):
            yield Worker(
                rank=node.index * local + lr,
                local_rank=lr,
                node=node.index,
                world_size=local * len(nodes),
                local_world_size=local,
                nnodes=len(nodes),
                devices=_share(node.devices, lr, per_proc),
            )


def _share(devices: tuple[Device, ...], local_rank: int, per_proc: int) -> tuple[Device, ...]:
    """`per_proc` consecutive devices; past the end (oversubscribed) it starts again at the first."""
    n = len(devices)
    return tuple(devices[(local_rank * per_proc + k) % n] for k in range(min(per_proc, n)))
