"""What of this machine is no GPU: NUMA nodes and cores, network interfaces, and what bounds the number of workers."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from nbddp.compat import system

NUMA_NODES, PROC, CGROUPS = Path("/sys/devices/system/node"), Path("/proc"), Path("/sys/fs/cgroup")
FORKED, SPAWNED = 50 << 20, 220 << 20  # bytes of a worker that has done nothing yet (its share of pages; all its own)
THREADS = 13  # of a worker with a process group on gloo
CONTROLLERS_FILES, WORKERS_FILES = 120, 6  # descriptors of the controller: at first, and for each worker


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
    """The kernel's list of cores, such as `0-3,8`, as numbers."""
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


def limits(workers: int, spawned: bool) -> list[dict[str, Any]]:
    """What bounds the number of workers beyond those that there are: fields of `capacity.Limit`. spawned: each imports
    torch anew."""
    found = [{"what": "memory", "each": SPAWNED if spawned else FORKED, "free": free_memory()}]
    threads = free_threads()
    if threads is not None:
        found.append({"what": "threads", "each": THREADS, "free": threads})
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # the controller raises its own limit as far as it may
    if files != resource.RLIM_INFINITY:
        free = files - CONTROLLERS_FILES - WORKERS_FILES * workers
        found.append({"what": "open files", "each": WORKERS_FILES, "free": free})
    return found


def free_memory(proc: Path = PROC, root: Path = CGROUPS) -> int:
    """Bytes that can be had without swapping: the machine's, or what the tightest control group leaves."""
    free = [psutil.virtual_memory().available]
    for folder in control_groups("memory", proc, root):
        for limit, used, idle in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            bound, now = _number(folder / limit), _number(folder / used)
            if bound is not None and now is not None:
                free.append(bound - now + _field(folder / "memory.stat", idle))
    return max(0, min(free))


def free_threads(proc: Path = PROC, root: Path = CGROUPS) -> int | None:
    """Threads that may still be made; None where nothing bounds them."""
    free = []
    for folder in control_groups("pids", proc, root):
        bound, now = _number(folder / "pids.max"), _number(folder / "pids.current")
        if bound is not None and now is not None:
            free.append(bound - now)
    bound = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if system.is_linux() and bound != resource.RLIM_INFINITY and os.geteuid() != 0:  # root is not bound by it
        free.append(bound - own_threads(proc))  # elsewhere it bounds processes
    return max(0, min(free)) if free else None


def control_groups(controller: str, proc: Path = PROC, root: Path = CGROUPS) -> Iterator[Path]:
    """Folders of this process's control groups of one kind, from its own up to the root's: version 2, then 1. In a
    container the path may lead outside; then only the root is there."""
    file = proc / "self/cgroup"
    for line in file.read_text().splitlines() if file.exists() else ():  # Linux has them
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        base = root / controller if names else root
        own = base / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_dir():
                yield folder
            if folder == base:
                break


def own_threads(proc: Path = PROC) -> int:
    """Threads of this user's processes."""
    count = 0
    for folder in proc.glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if folder.stat().st_uid == os.geteuid():
                count += len(os.listdir(folder / "task"))
    return count


def _number(file: Path) -> int | None:
    """What the file holds; None if it is missing or holds no bound (`max`)."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _field(file: Path, name: str) -> int:
    try:
        rows = dict(line.split(" ", 1) for line in file.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(rows.get(name, 0))
