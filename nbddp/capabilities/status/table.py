"""One table of a pool: rank, node, local rank, device, pid, state, memory."""

from __future__ import annotations

from typing import Any

from nbddp.agent import hardware
from nbddp.agent.process_id import ProcessId
from nbddp.errors import RankStatus
from nbddp.figures.result import Row
from nbddp.figures.table import Table

COLUMNS = ("rank", "node", "local rank", "device", "pid", "state", "memory")


def status_table(answer: dict[str, Any], title: str = "") -> Table:
    """The agent's answer to `status` as a table; memory is the process's proportional set size (on systems other than
    Linux, its resident size)."""
    info = answer["info"]
    alive = {c["rank"]: c for c in answer["children"] if c["kind"] == "worker"}
    mark = " (simulated)" if info.get("simulated") else ""
    rows = []
    for place in info.get("workers", []):
        child = alive.get(place["rank"])
        rows.append(
            (
                place["rank"],
                f"{place['node']} ({place['host']})" if place["host"] else f"{place['node']}{mark}",
                place["local_rank"],
                place["device"],
                child["pid"] if child else "–",
                state_words(child) if child else words_without(place, info),
                megabytes(child) if child else "–",
            )
        )
    return Table(COLUMNS, rows, title=title)


def state_words(child: dict[str, Any]) -> str:
    """`running Cell In[3]`; what the pool's owner has no words for is its state's own text."""
    return str(child["doing"] or RankStatus(child["status"]))


def words_without(place: dict[str, Any], info: dict[str, Any]) -> str:
    """Of a worker that the agents which were asked do not have."""
    if "cluster" in info:
        return "its engine has exited" if info.get("asked_all") else f"an engine of cluster {info['cluster']}"
    return "on that host" if place["host"] and not info.get("asked_all") else "ended; the next cell replaces it"


def megabytes(child: dict[str, Any]) -> str:
    """Proportional set size (resident size where there is no such thing), in MiB; of a process of another host as that
    host's agent has told it."""
    held = held_bytes(child)
    return f"{held / 2**20:.0f} MiB" if held else "–"


def held_bytes(child: Row) -> int:
    """The same in bytes; 0 if it is not known."""
    if "memory" in child:
        return int(child["memory"])
    process = ProcessId(child["pid"], child["started"]).process()
    return hardware.memory_of(process) if process is not None else 0
