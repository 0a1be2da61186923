"""Resource limits of a process that runs untrusted code, set in a new process before its work begins.

Limits are hard ones of the operating system (`setrlimit`), so only root can lift them again. They are per process:
several processes together may use several times as much, which `grading.sandbox.agent` watches. Not bounded here: the
network, the number of files, and what may be read.
"""

from __future__ import annotations

import os
import resource
from dataclasses import asdict, dataclass

from nbddp.compat import system
from nbddp.protocol.codec import Message

PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 4, 38
STACKS = 256 << 20  # bytes of DATA for the stacks of an engine's threads
MAPPED = 2 << 30  # bytes of address space beyond memory: stacks, malloc's arenas, files


@dataclass(frozen=True)
class Limits:
    """memory, file: bytes, beyond what the process begins with and of each file that it writes; files: open ones;
    cpu: seconds of its life; account: processes and threads that its account may have in all (0: no limit)."""

    memory: int = 1 << 30
    file: int = 64 << 20
    files: int = 512
    cpu: int = 1800
    account: int = 0

    def request(self) -> dict[str, int]:
        """As a start request carries them."""
        return asdict(self)


def bounded(limits: dict[str, int]) -> Message:
    """What a start request says for a process within `Limits.request()`."""
    return {"enters": f"{__name__}:apply", "limits": limits}


def apply(request: Message) -> None:
    """Bound this process, and all that it will start, by the limits of `bounded`; no program that it starts gets more
    rights than it has (sudo is refused). Memory is bounded on Linux alone: other kernels do not keep to it."""
    limits = Limits(**request["limits"])
    bounds = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: limits.file,
        resource.RLIMIT_NOFILE: limits.files,
        resource.RLIMIT_CPU: limits.cpu,
    }
    if system.is_linux():
        size, data = _mapped()
        bounds[resource.RLIMIT_AS] = size + limits.memory + MAPPED
        bounds[resource.RLIMIT_DATA] = data + limits.memory + STACKS
    if limits.account:
        bounds[resource.RLIMIT_NPROC] = limits.account
    for kind, bound in bounds.items():
        lowered = _lower(bound, resource.getrlimit(kind)[1])
        resource.setrlimit(kind, (lowered, lowered))
    system.prctl(PR_SET_NO_NEW_PRIVS, 1)
    system.prctl(PR_SET_DUMPABLE, 1)  # /proc/self, which a worker reads, is its own again


def hide() -> None:
    """Keep this process from others of the account: they can neither trace it nor read its memory, environment and
    open files in /proc. Root still can. Inherited by fork, not by exec."""
    system.prctl(PR_SET_DUMPABLE, 0)


def bound_self(memory: int) -> None:
    """Bound the address space of this process to what it has and `memory` bytes."""
    if system.is_linux():
        bound = _lower(_mapped()[0] + memory, resource.getrlimit(resource.RLIMIT_AS)[1])
        resource.setrlimit(resource.RLIMIT_AS, (bound, bound))


def _lower(bound: int, hard: int) -> int:
    return bound if hard == resource.RLIM_INFINITY else min(bound, hard)


def _mapped() -> tuple[int, int]:
    """Bytes of address space, and of data, that this process has now, as Linux counts them for its limits."""
    with open("/proc/self/statm") as file:
        pages = [int(n) for n in file.read().split()]
    page = os.sysconf("SC_PAGE_SIZE")
    return pages[0] * page, pages[5] * page
