"""What of this machine is no GPU: NUMA nodes and cores, network interfaces."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import psutil

NUMA_NODES = Path("/sys/devices/system/node")


def allowed_cores() -> set[int]:
    """The cores this process and those it starts may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def numa(allowed: set[int], root: Path = NUMA_NODES) -> list[dict[str, Any]]:
    """NUMA nodes with their cores, as far as they are among `allowed`: fields of `machine.Numa`. Linux tells
    them; elsewhere, and where the folder is missing (some containers), there are none to be seen."""
    found = []
    for folder in sorted(root.glob("node[0-9]*"), key=lambda f: int(f.name.removeprefix("node"))):
        cores = cores_of((folder / "cpulist").read_text())
        found.append({"index": int(folder.name.removeprefix("node")), "cores": sorted(cores & allowed)})
    return found


def cores_of(text: str) -> set[int]:
    """The kernel's list of cores, such as `0-3,8`, as numbers."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return found


def interfaces() -> list[dict[str, Any]]:
    """The network interfaces that are up: fields of `machine.Interface`."""
    loopback = loopback_name()
    return [
        {"name": name, "speed": int(stats.speed), "loopback": name == loopback}
        for name, stats in psutil.net_if_stats().items()
        if stats.isup
    ]


def loopback_name() -> str:
    """The name of the loopback interface (`lo`, `lo0`), or empty if there is none to be seen."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and a.address == "127.0.0.1" for a in addresses):
            return name
    return ""
