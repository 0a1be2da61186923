"""`nbddp.Pool.topology`: which rank runs where, as a figure, text and data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbddp.figures.result import Result, Row
from nbddp.launch.topology import Topology

if TYPE_CHECKING:
    from nbddp.figures.figure import DescribedFigure
    from nbddp.pool.pool import WorkerPool


@dataclass(frozen=True, eq=False, repr=False)
class TopologyResult(Result[Topology]):
    """The placement of ranks on nodes and devices.

    The fields of `to_dict()`:

    - `world_size`, `nnodes`, `nproc_per_node` (int); `workers`: a list of rows, which `to_frame()` has too.
    - `nodes`: a list of dicts of `node`, `host`, `simulated` (bool: a share of this machine), `cores` and `gpus`. A GPU
      is a dict of `gpu` (its index), `name`, `memory_bytes` and `simulated`.

    A row has `rank`, `node`, `local_rank`, `host` and `gpus` (list of int: indices on the node; empty on CPU).
    """

    def _draw(self) -> DescribedFigure:
        from nbddp.capabilities.topology.figure import draw_topology

        return draw_topology(self._found)

    def _data(self) -> Row:
        placed = self._found
        nodes = [
            {
                "node": n.index, "host": n.host, "simulated": n.simulated, "cores": n.cores,
                "gpus": [
                    {"gpu": d.index, "name": d.name, "memory_bytes": d.memory, "simulated": d.simulated}
                    for d in n.devices
                ],
            }
            for n in placed.nodes
        ]  # fmt: skip
        return {
            "world_size": placed.world_size, "nnodes": placed.nnodes, "nproc_per_node": placed.nproc_per_node,
            "workers": self._rows(), "nodes": nodes,
        }  # fmt: skip

    def _rows(self) -> Sequence[Row]:
        return [
            {
                "rank": w.rank, "node": w.node, "local_rank": w.local_rank, "host": self._found.nodes[w.node].host,
                "gpus": [d.index for d in w.devices],
            }
            for w in self._found.workers
        ]  # fmt: skip


def topology(pool: WorkerPool) -> TopologyResult:
    """Which rank runs on which node and device. Raises PoolNotRunning.

    Example:

        assert pool.topology().to_dict()["world_size"] == pool.world_size
    """
    return TopologyResult(pool.placed(), *pool.marks("topology"))
