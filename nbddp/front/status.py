"""One table of a pool: rank, node, local rank, device, pid, state, memory."""

from __future__ import annotations

from typing import Any

import psutil

from nbddp.agent.identity import Identity
from nbddp.base import system
from nbddp.base.table import Table

COLUMNS = ("rank", "node", "local rank", "device", "pid", "state", "memory")


def table(answer: dict[str, Any], title: str = "") -> Table:
    """The agent's answer to `status` as a table; memory is the process's proportional share (all of it that is
    resident, elsewhere than on Linux)."""
    info = answer["info"]
    alive = {c["rank"]: c for c in answer["children"] if c["kind"] == "worker"}
    mark = " (simulated)" if info.get("simulated") else ""
    rows = []
    for place in info.get("workers", []):
        child = alive.get(place["rank"])
        rows.append(
            (
                place["rank"],
                f"{place['node']}{mark}",
                place["local_rank"],
                place["device"],
                child["pid"] if child else "–",
                child["state"] if child else "ended; replaced by the next cell",
                megabytes(child) if child else "–",
            )
        )
    return Table(COLUMNS, rows, title=title)


def megabytes(child: dict[str, Any]) -> str:
    """Proportional set size (resident size where there is no such thing), in MiB."""
    process = Identity(child["pid"], child["started"]).process()
    if process is None:
        return "–"
    try:
        facts = process.memory_full_info() if system.is_linux() else process.memory_info()
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        return "–"
    return f"{getattr(facts, 'pss', facts.rss) / 2**20:.0f} MiB"
