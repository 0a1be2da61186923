"""`%ddp topology`: the layout of the pool, or one that is only planned."""

from __future__ import annotations

from typing import Any

from nbddp.analysis.placement import describe, planned
from nbddp.errors import BadInput
from nbddp.launch.options import Parser, positive, workers_per_node
from nbddp.launch.topology import Topology, topology_of
from nbddp.notebook.commands import Asked, CommandLine

PLAN = ("nnodes", "gpus_per_node", "gpus_per_proc", "nproc", "oversubscribe")


def arguments(parser: Parser) -> None:
    plan = parser.add_argument_group("planned layout (nothing is started)")
    plan.add_argument("--nnodes", type=positive, metavar="N", help="nodes (default 1)")
    plan.add_argument("--gpus-per-node", type=positive, metavar="G", help="GPUs of each node (default: none)")
    plan.add_argument("--gpus-per-proc", type=positive, metavar="K", help="consecutive GPUs per process (default 1)")
    plan.add_argument("-n", "--nproc", "--nproc-per-node", "--nproc_per_node", dest="nproc", type=workers_per_node,
                      metavar="N", help="processes per node (default: as many as fit the GPUs)")  # fmt: skip
    plan.add_argument("--oversubscribe", action="store_true", help="allow more processes than GPUs")


def planned_layout(line: CommandLine) -> Topology | None:
    """The layout that the options request; None without options. Raises BadInput if it is impossible."""
    asked = {name: line.args[name] for name in PLAN}
    if not any(asked.values()):
        return None
    if line.args.get("pool"):
        raise BadInput(
            f"topology shows a pool or a planned layout, not both; remove {line.args['pool']} or the options"
        )
    return planned(**asked)


def in_notebook(asked: Asked, line: CommandLine) -> Any:
    from nbddp.capabilities.topology.figure import draw_topology

    return draw_topology(planned_layout(line) or asked.pool.placed())


def in_terminal(line: CommandLine) -> None:
    layout = planned_layout(line)
    if layout is not None:
        print(describe(layout))
        return
    for agent in line.agents():
        data = agent.request("status")["info"].get("topology")
        print(describe(topology_of(data)) if data else f"pool {agent.pool_id} has no workers yet")
