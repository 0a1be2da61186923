"""Who runs where: nodes, their devices, and the workers placed on them.

A plan is made before any process is started, by arithmetic on plain data:
`Topology.plan` places `nproc` workers on every node, in order of local rank, each
with its `gpus_per_proc` consecutive GPUs, or refuses with a sentence that says what
to type. Pure: imports only the standard library and `nbddp.errors`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from nbddp.errors import BadInput


@dataclass(frozen=True)
class Device:
    """One accelerator of a node.

    `index` is its position on the node as the parent process sees it (what
    `cuda:<index>` means under `--visible all`); `mask` is its entry for
    CUDA_VISIBLE_DEVICES (an index or a UUID of the parent's own list);
    `memory` is in bytes.
    """

    index: int
    mask: str
    name: str = ""
    memory: int = 0
    uuid: str = ""
    bus_id: str = ""


@dataclass(frozen=True)
class Node:
    """One machine, or (`simulated`) a share of one that the ranks take for a machine."""

    index: int
    host: str
    devices: tuple[Device, ...] = ()
    cores: int = 1
    simulated: bool = False


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
        """`cpu`, `GPU 2` or `GPUs 2, 3`."""
        if not self.devices:
            return "cpu"
        indices = ", ".join(str(d.index) for d in self.devices)
        return f"GPU{'s' * (len(self.devices) > 1)} {indices}"


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

    @property
    def nproc_per_node(self) -> int:
        return self.workers[0].local_world_size if self.workers else 0

    @property
    def simulated(self) -> bool:
        return any(n.simulated for n in self.nodes)

    def on_node(self, node: int) -> tuple[Worker, ...]:
        """The local worker group of one node, in order of local rank."""
        return tuple(w for w in self.workers if w.node == node)

    def equation(self) -> str:
        """`world size 4 = 2 nodes × 2 processes; each owns 2 GPUs`."""
        nodes = counted(self.nnodes, "simulated node" if self.simulated else "node")
        text = f"world size {self.world_size} = {nodes} × {counted(self.nproc_per_node, 'process')}"
        if not self.gpus_per_proc:
            return f"{text}; on CPU"
        if self.oversubscribed:
            return f"{text}; GPUs are shared"
        return f"{text}; each owns {counted(self.gpus_per_proc, 'GPU')}"

    def words(self) -> str:
        """The whole placement as text: the equation, then one line per node."""
        lines = [self.equation()]
        for node in self.nodes:
            places = "; ".join(
                f"rank {w.rank} (local rank {w.local_rank}) on {w.device_words()}" for w in self.on_node(node.index)
            )
            label = f"node {node.index}{' (simulated)' * node.simulated}"
            holds = node_holds(node) if node.devices else "CPU"  # cores differ from laptop to laptop
            lines.append(f"{label}, {holds}: {places}")
        return "\n".join(lines)

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
        usable = hosts if use_gpus else [replace(h, devices=()) for h in hosts]
        nodes = simulate(usable[0], nnodes) if len(hosts) == 1 and nnodes > 1 else tuple(usable)
        if len(nodes) != nnodes:
            raise BadInput(
                f"--nnodes {nnodes} was asked for but there are {len(nodes)} hosts; use --nnodes {len(nodes)}"
            )
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


def cpu_default(cores: int) -> int:
    """Workers started on a machine without GPUs when nobody says how many: two, the fewest that
    communicate. (torchrun's own default is one, its `auto` one per core.)"""
    return 2


def simulate(host: Node, nnodes: int) -> tuple[Node, ...]:
    """Share one machine among `nnodes` simulated nodes: GPUs in consecutive equal blocks."""
    share = len(host.devices) // nnodes
    if host.devices and share == 0:
        raise BadInput(
            f"{counted(nnodes, 'simulated node')} cannot share {counted(len(host.devices), 'GPU')}; "
            f"use --nnodes {len(host.devices)} or fewer, or --device cpu"
        )
    return tuple(
        Node(
            index=i,
            host=host.host,
            devices=host.devices[i * share : (i + 1) * share],
            cores=max(1, host.cores // nnodes),
            simulated=True,
        )
        for i in range(nnodes)
    )


def counted(n: int, noun: str) -> str:
    """`1 node`, `2 nodes`, `2 processes`."""
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{n} {noun if n == 1 else plural}"


def rank_words(ranks: Iterable[int]) -> str:
    """`rank 2`, `ranks 0–3`, `ranks 0, 2–3`: a set of ranks as a person writes it."""
    ordered = sorted(set(ranks))
    spans: list[list[int]] = []
    for r in ordered:
        if spans and spans[-1][1] == r - 1:
            spans[-1][1] = r
        else:
            spans.append([r, r])
    text = ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in spans)
    return f"rank{'s' * (len(ordered) != 1)} {text}"


def node_holds(node: Node) -> str:
    """`4 GPUs` or `2 cores`: what a node offers its processes."""
    return counted(len(node.devices), "GPU") if node.devices else counted(node.cores, "core")


def _check_positive(option: str, value: int) -> None:
    if value < 1:
        raise BadInput(f"{option} {value} is not possible; use a positive number, such as {option} 2")


def _use_gpus(hosts: Sequence[Node], device: str, gpus_per_proc: int | None) -> bool:
    have = min((len(h.devices) for h in hosts), default=0)
    if device == "cpu":
        if gpus_per_proc:
            raise BadInput("--gpus-per-proc and --device cpu contradict each other; leave one out")
        return False
    if have == 0 and (device == "cuda" or gpus_per_proc):
        asked = "--device cuda" if device == "cuda" else f"--gpus-per-proc {gpus_per_proc}"
        raise BadInput(f"{asked} was asked for, but there is no GPU here; leave it out to run on CPU")
    return have > 0


def _local_world_size(nproc: int | str | None, nodes: Sequence[Node], per_proc: int) -> int:
    gpus = min(len(n.devices) for n in nodes)
    if isinstance(nproc, int):
        _check_positive("--nproc", nproc)
        return nproc
    if nproc not in (None, "auto", "gpu", "cpu"):
        raise BadInput(f"--nproc {nproc} is not a number of workers; use a number such as 2, or auto, gpu or cpu")
    if nproc == "gpu" and not per_proc:
        raise BadInput("--nproc gpu was asked for, but there is no GPU here; use --nproc 2 or --nproc cpu")
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
