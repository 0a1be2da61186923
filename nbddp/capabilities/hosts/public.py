"""`nbddp.Pool.checkup`: facts of a pool's hosts and what to improve there, as text and data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbddp.capabilities.hosts import command
from nbddp.capabilities.hosts.report import UNLIMITED, HostReport, HostsReport
from nbddp.figures.result import Result, Row

if TYPE_CHECKING:
    from nbddp.pool.pool import WorkerPool


@dataclass(frozen=True, eq=False, repr=False)
class CheckupResult(Result[HostsReport]):
    """A check of a pool's hosts.

    `to_dict()` has `findings`, a list of sentences that name a fault and its repair, and `hosts`, a list of rows.
    `to_frame()` has the rows. The fields of a row:

    - `host` (str); `gpus`: a list of names. `versions`: a dict of name → version, on that host.
    - `interface`, `address` (str): where the other hosts reach it; `not_reached_by`: a list of hosts that do not.
    - `shm_free_bytes`: free in /dev/shm; None without one.
    - `open_files`, `processes`, `locked_memory_bytes`: its limits; None: no limit.
    - `clock_s`: its clock is ahead of this machine's by so much, give or take `clock_error_s`.
    """

    def _draw(self) -> HostsReport:
        return self._found

    def _data(self) -> Row:
        return {"findings": self._found.findings(), "hosts": self._rows()}

    def _rows(self) -> Sequence[Row]:
        hosts = self._found.hosts.items()
        return [{**_row(name, one), "not_reached_by": self._found.unreached(i)} for i, (name, one) in enumerate(hosts)]


def _row(name: str, one: HostReport) -> Row:
    limits = {kind: None if now == UNLIMITED else now for kind, (now, _) in one.facts["limits"].items()}
    return {
        "host": name, "gpus": list(one.gpus), "versions": dict(one.facts["versions"]),
        "interface": one.offer.interface, "address": one.offer.address,
        "shm_free_bytes": one.facts["shm"][1] if one.facts["shm"] else None,
        "open_files": limits["nofile"], "processes": limits["nproc"], "locked_memory_bytes": limits["memlock"],
        "clock_s": one.skew, "clock_error_s": one.within,
    }  # fmt: skip


def checkup(pool: WorkerPool, progress: Callable[[str], None] | None = None) -> CheckupResult | None:
    """Check the pool's hosts, as `%ddp doctor` does. Returns None for a pool on this machine.

    - progress (function of str): called with a line on each step (default: none).

    Raises AgentFailed if a host does not answer.

    Example:

        checked = pool.checkup()
        problems = checked.to_dict()["findings"] if checked is not None else []
    """
    found = command.checkup(pool, progress or (lambda text: None))
    return None if found is None else CheckupResult(found, *pool.marks("topology"))
