"""`nbddp.Pool.status`: the processes of a pool, as a table, text and data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbddp.capabilities.status import command
from nbddp.capabilities.status.table import held_bytes, state_words, status_table, words_without
from nbddp.figures.result import Result, Row
from nbddp.figures.table import Table
from nbddp.protocol.pool_parts import lines

if TYPE_CHECKING:
    from nbddp.pool.pool import WorkerPool


@dataclass(frozen=True, eq=False, repr=False)
class StatusResult(Result[dict[str, Any]]):
    """The processes of a pool.

    `to_dict()` has `workers`, a list of rows, and `to_frame()` has the same rows. The fields of a row:

    - `rank`, `node`, `local_rank`; `host`: empty on this machine; `device`.
    - `pid`: None if the process has ended; `state` (str), such as `idle`.
    - `memory_bytes`: proportional set size; None if it is not known.
    """

    def _draw(self) -> Table:
        return status_table(self._found)

    def _data(self) -> Row:
        return {"workers": self._rows()}

    def _rows(self) -> Sequence[Row]:
        info = self._found["info"]
        alive = {c["rank"]: c for c in self._found["children"] if c["kind"] == "worker"}
        return [_row(place, alive.get(place["rank"]), info) for place in info.get("workers", [])]


def _row(place: Row, child: Row | None, info: Row) -> Row:
    return {
        **{name: place[name] for name in ("rank", "node", "local_rank", "host", "device")},
        "pid": child and child["pid"], "state": state_words(child) if child else words_without(place, info),
        "memory_bytes": (held_bytes(child) or None) if child else None,
    }  # fmt: skip


def status(pool: WorkerPool) -> StatusResult:
    """The state, device, process id and memory of each rank. Raises PoolNotRunning.

    Example:

        assert pool.status().to_dict()["workers"][0]["state"] == "idle"
    """
    answer = command.status(pool)
    simulated, _ = pool.marks("status")
    return StatusResult(answer, simulated, tuple(lines(pool.parts.holds)))
