"""The resources that limit the number of workers on a machine: free memory, threads and descriptors."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

from nbddp.agent import children
from nbddp.agent.hardware import PROC, own_threads
from nbddp.agent.server import WORKER, NodeAgent, Peer
from nbddp.compat import system
from nbddp.protocol.codec import Message

CGROUPS = Path("/sys/fs/cgroup")
FORKED, SPAWNED = 50 << 20, 220 << 20  # bytes of a worker that has done nothing yet (its share of pages; all its own)
THREADS = 13  # of a worker with a process group on gloo
CONTROLLERS_FILES, WORKERS_FILES = 120, 6  # descriptors of the controller: at first, and for each worker


def limits(agent: NodeAgent, peer: Peer, message: Message) -> Message:
    """What bounds the number of workers beyond those that there are, as it is now: fields of `Limit` in `part`."""
    workers = sum(child.kind == WORKER for child in agent.children.values())
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # the controller raises its own limit as far as it may
    left = None if files == resource.RLIM_INFINITY else files - CONTROLLERS_FILES - WORKERS_FILES * workers
    found = (
        ("memory", SPAWNED if children.why_not_fork() else FORKED, free_memory()), ("threads", THREADS, free_threads()),
        ("open files", WORKERS_FILES, left),
    )  # fmt: skip
    return {"limits": [{"what": what, "each": each, "free": free} for what, each, free in found if free is not None]}


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
