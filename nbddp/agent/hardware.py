"""The parts of this machine other than GPUs: NUMA nodes, cores, network interfaces, and memory and threads of
processes."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from nbddp.compat import system

NUMA_NODES, PROC = Path("/sys/devices/system/node"), Path("/proc")


def allowed_cores() -> set[int]:
    """The cores this process and those it starts may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def numa(allowed: set[int], root: Path = NUMA_NODES) -> list[dict[str, Any]]:
    """NUMA nodes with their cores, as far as they are among `allowed`: fields of `machine.Numa`. Linux tells
    them; elsewhere, and where the folder is missing (some containers), there are none to be seen."""
    found = []
    for folder in sorted(
        root.glob("node[0-9]*") if root.is_dir() else (), key=lambda f: int(f.name.removeprefix("node"))
    ):
        cores = cores_of((folder / "cpulist").read_text())
        found.append({"index": int(folder.name.removeprefix("node")), "cores": sorted(cores & allowed)})
    return found


def cores_of(text: str) -> set[int]:
    """Linux's list of cores, such as `0-3,8`, as numbers."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return found


def address_towards(to: str) -> str:
    """The address from which packets to a host go; nothing is sent. Raises OSError where there is no way."""
    family, kind, _, _, address = socket.getaddrinfo(to, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def interfaces() -> list[dict[str, Any]]:
    """The network interfaces that are up: fields of `machine.Interface`, and their `addresses`."""
    loopback, addresses = loopback_name(), psutil.net_if_addrs()
    return [
        {
            "name": name,
            "speed": int(stats.speed),
            "loopback": name == loopback,
            "addresses": [a.address for a in addresses.get(name, ()) if a.family in (socket.AF_INET, socket.AF_INET6)],
        }
        for name, stats in psutil.net_if_stats().items()
        if stats.isup
    ]


def loopback_name() -> str:
    """The name of the loopback interface (`lo`, `lo0`), or empty if there is none to be seen."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and a.address == "127.0.0.1" for a in addresses):
            return name
    return ""


def memory_of(process: psutil.Process) -> int:
    """Bytes of a process: its proportional share of pages, or all that are resident elsewhere than on Linux; 0 where
    nobody tells."""
    try:
        facts = process.memory_full_info() if system.is_linux() else process.memory_info()
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        return 0
    return int(getattr(facts, "pss", facts.rss))


def own_threads(proc: Path = PROC) -> int:
    """Threads of this user's processes."""
    count = 0
    for folder in proc.glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if folder.stat().st_uid == os.geteuid():
                count += len(os.listdir(folder / "task"))
    return count
