"""The parts of a machine, as data and text: GPUs, the links between them, NUMA nodes, the network.

Facts come from `OnAgent.gpus` and `agent/hardware.py`. An unknown fact is left
empty, never guessed, and a sentence in `Node.untold` reports it. Pure: imports only the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nbddp.errors import counted, listed, several

__all__ = [
    "SELF", "UNKNOWN", "Device", "Interface", "Node", "Numa", "counted",
    "gpu_noun", "listed", "node_holds", "node_of", "several",
]  # fmt: skip

SELF, UNKNOWN = "X", ""


@dataclass(frozen=True)
class Device:
    """One accelerator of a node.

    `index` is its position on the node as the parent process sees it (what
    `cuda:<index>` means under `--visible all`); `mask` is its entry for
    CUDA_VISIBLE_DEVICES (an index or a UUID of the parent's own list);
    `memory` is in bytes, `bus_id` as NVML writes it; `numa` is its NUMA node,
    or None where that is not known; `simulated`: the CPU computes in its place.
    """

    index: int
    mask: str
    name: str = ""
    memory: int = 0
    uuid: str = ""
    bus_id: str = ""
    numa: int | None = None
    simulated: bool = False


@dataclass(frozen=True)
class Numa:
    """A NUMA node, and those of its cores that processes of ours may run on."""

    index: int
    cores: tuple[int, ...] = ()


@dataclass(frozen=True)
class Interface:
    """The network interface that joins a node to the others; `speed` in Mbit/s, 0 where it is not told."""

    name: str
    speed: int = 0
    loopback: bool = False

    def describe(self) -> str:
        """`eth0, 25 Gbit/s`, `lo, the loopback interface`."""
        speed = f"{self.speed / 1000:g} Gbit/s" if self.speed >= 1000 else f"{self.speed} Mbit/s" * bool(self.speed)
        return ", ".join(filter(None, (self.name, "the loopback interface" if self.loopback else speed)))


@dataclass(frozen=True)
class Node:
    """One machine, or (`simulated`) a share of one that the ranks take for a machine, or (`planned`) one on paper.

    `links[i][j]` is the code of the way from `devices[i]` to `devices[j]`. That is `NV18` (18 NVLinks), a key of PATHS,
    `X` on the diagonal, or empty if unknown; no rows if nothing is known.
    """

    index: int
    host: str
    devices: tuple[Device, ...] = ()
    cores: int = 1
    simulated: bool = False
    planned: bool = False
    links: tuple[tuple[str, ...], ...] = ()
    numa: tuple[Numa, ...] = ()
    interface: Interface | None = None
    untold: tuple[str, ...] = ()

    def label(self) -> str:
        """`node 0`, `node 0 (simulated)`."""
        return f"node {self.index}{' (simulated)' * self.simulated}{' (planned)' * self.planned}"

    def likeness(self) -> object:
        """Equal for nodes of which one may be drawn for both."""
        devices = tuple((d.index, d.name, d.memory, d.bus_id, d.numa, d.simulated) for d in self.devices)
        return devices, self.cores, self.simulated, self.planned, self.links, self.numa, self.interface, self.untold

    def part(self, first: int, last: int) -> dict[str, Any]:
        """The GPUs from `first` up to, not including, `last`, with the links among them: fields for `replace`."""
        links = tuple(row[first:last] for row in self.links[first:last])
        known = any(code not in (SELF, UNKNOWN) for row in links for code in row)
        return {"devices": self.devices[first:last], "links": links if known else ()}


def node_of(data: Mapping[str, Any]) -> Node:
    """A node from its JSON data (`dataclasses.asdict`)."""
    interface = data.get("interface")
    made = {
        "devices": tuple(Device(**row) for row in data.get("devices", ())),
        "links": tuple(tuple(row) for row in data.get("links", ())),
        "numa": tuple(Numa(row["index"], tuple(row["cores"])) for row in data.get("numa", ())),
        "interface": Interface(**interface) if interface else None,
        "untold": tuple(data.get("untold", ())),
    }
    return Node(**{**data, **made})


def node_holds(node: Node) -> str:
    """`4 GPUs`, `4 simulated GPUs` or `2 cores`: what a node offers its processes."""
    return counted(len(node.devices), gpu_noun(node.devices)) if node.devices else counted(node.cores, "core")


def gpu_noun(devices: Iterable[Device]) -> str:
    """`GPU`, or `simulated GPU` if these are."""
    return "simulated GPU" if any(d.simulated for d in devices) else "GPU"
