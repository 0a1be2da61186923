"""`Pool.collectives`: what any program's collectives have cost, without a trace."""

from __future__ import annotations

from dataclasses import replace

from nbddp.analysis.answers import clocks, unpacked
from nbddp.analysis.clocks import ClockOffset
from nbddp.analysis.steps import origin
from nbddp.capabilities.collectives.from_flight_recorder import cell_from, untraced_program
from nbddp.capabilities.collectives.program import Breakdown
from nbddp.errors import BadInput
from nbddp.execution.protocols import IdleRanks

UNSEEN = (
    "under TORCH_DISTRIBUTED_DEBUG=DETAIL torch does not record the groups of collectives that C++ calls (of FSDP, "
    "tensor parallel or DDP's constructor); type %ddp start --debug off and run the cell again"
)


def collectives(ranks: IdleRanks) -> Breakdown:
    """Who arrived last at the collectives of the last run that called some, and how each rank spent that run: for
    any program, without a trace. Raises BadInput if no run has called a collective."""
    answered = unpacked(ranks.answers("together"))
    found = {r: f if f and f["run"] is not None else None for r, f in answered.items()}
    if not any(found.values()):
        if any(answered.values()):
            raise BadInput(f"no collective has been recorded, because {UNSEEN}")
        raise BadInput("no collective has been recorded; call some in a %%ddp cell first")
    newest = max((f for f in found.values() if f), key=lambda f: f["run"])
    of_it = {r: f for r, f in found.items() if f and f["run"] == newest["run"]}
    by_rank = clocks(ranks)
    cells = {r: cell_from(f, by_rank.get(r, ClockOffset())) for r, f in of_it.items()}
    shown = untraced_program(
        cells, sorted(set(found) - set(of_it)), origin(newest["run"], newest["cell"], ranks.newest())
    )
    more = [f"Not all of its collectives were recorded: {UNSEEN}"] if any(f["unseen"] for f in of_it.values()) else []
    return replace(shown, notes=[*shown.notes, *more])
