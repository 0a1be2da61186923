"""`Pool.collectives`: the cost of any program's collectives, without a trace.

compute is the CPU time of a rank's main thread; communication is the time for which that thread is blocked in a
collective. All of it is exposed; the part hidden behind compute is not known. Of a collective that C++ calls and waits
for (tensor parallel's, DDP's), only the time of the call is known. A rank counts as waiting from then on, until the
last rank has called it, or until its own next collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nbddp.analysis.activity import Activity, CollectivePart
from nbddp.analysis.answers import ClockOffset, IdleRanks, clocks, unpacked
from nbddp.analysis.cause import INPUT, OPTIMIZER, steady
from nbddp.analysis.steps import Origin, Span, common, length, minus, none_since, origin, union, whence
from nbddp.capabilities.collectives.breakdown import Split
from nbddp.capabilities.collectives.instances import (
    CollectiveInstance,
    kinds,
    latest,
    meetings,
    places,
    stretches,
    waits,
)
from nbddp.capabilities.collectives.program import Breakdown
from nbddp.errors import BadInput
from nbddp.launch.topology import rank_words

if TYPE_CHECKING:
    from nbddp.capabilities.collectives.on_rank import RecordedProgram

UNSEEN = (
    "under TORCH_DISTRIBUTED_DEBUG=DETAIL torch does not record the groups of collectives that C++ calls (of FSDP, "
    "tensor parallel or DDP's constructor); type %ddp start --debug off and run the cell again"
)
OWN = "compute and other code"
NAMED = {"loader": INPUT, "optimizer": OPTIMIZER}
HOW = (
    "measured without a trace: compute is the CPU time of a rank's main thread, communication the time in which it is "
    "blocked in collectives; %%ddp --trace shows calls, kernels and what overlaps"
)
OF_GPUS = "these are times of the host, which runs ahead of a GPU; %%ddp --trace shows what the GPUs do"


def collectives(ranks: IdleRanks) -> Breakdown:
    """The breakdown of the last run that called collectives. Raises PoolNotRunning, or BadInput if no run has."""
    answered = unpacked(ranks.answers("together", meets=False))
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


# -- from calls to times ---------------------------------------------------------------------------


@dataclass(frozen=True)
class RankCell:
    """One rank's part in a cell. ran: CPU time outside of collectives. blocked: in collectives and waits for them. own:
    what is known of the rest."""

    begin: int
    end: int
    ran: int
    blocked: Sequence[Span]
    parts: Mapping[tuple[str, int, int], CollectivePart]
    own: Mapping[str, Sequence[Span]]
    gpu: bool = False


def cell_from(data: RecordedProgram, clock: ClockOffset) -> RankCell:
    """A cell from the plain data that a worker sends, on the common clock."""
    ahead = clock.offset
    calls = sorted(data["calls"], key=lambda c: c["arrived"])
    after = [*(c["arrived"] for c in calls[1:]), data["end"]]
    parts, blocked = {}, [(a + ahead, b + ahead) for a, b in data["blocked"]]
    for call, then in zip(calls, after, strict=True):
        arrived, ended = call["arrived"] + ahead, (call["ended"] or then) + ahead
        known = call["ended"] is not None
        parts[call["key"], call["sequence"], 0] = CollectivePart(
            call["op"], arrived, ended, tuple(call["ranks"]), known, call["place"]
        )
    own = {name: [(a + ahead, b + ahead) for kind, a, b in data["own"] if kind == kept] for kept, name in NAMED.items()}
    return RankCell(data["begin"] + ahead, data["end"] + ahead, data["ran"], union(blocked), parts, own, data["gpu"])


def untraced_program(
    cells: Mapping[int, RankCell], missing: Sequence[int] = (), origin: Origin | None = None
) -> Breakdown:
    """What is known of a cell without a trace."""
    met = meetings({r: Activity(False, [], [], [], {}, c.parts) for r, c in cells.items()})
    blocked = {r: union([*c.blocked, *_unseen(met, r)]) for r, c in cells.items()}
    ranks = {r: Activity(False, [], blocked[r], [], {}, c.parts) for r, c in cells.items()}
    window = min(c.begin for c in cells.values()), max(c.end for c in cells.values())
    splits = {r: _split(cells[r], a.communication, window, waits(met, r)) for r, a in ranks.items()}
    late = latest(ranks, met, window)
    spans = stretches(met, min(c.begin for c in cells.values()))
    why = steady([_times(cells, blocked, span) for span in spans], late.rank) if late is not None else None
    since = none_since(origin)
    away = [f"The cell was not recorded on {rank_words(missing)}."] if missing else []
    notes = [HOW, *away, *([OF_GPUS] if any(c.gpu for c in cells.values()) else []), *([since] if since else [])]
    title = f"collectives{whence(origin)}: "
    lines = {r: places(met, r) for r in cells}
    return Breakdown(splits, False, kinds(met), [], late, why, notes, title, "of the cell", lines)


def _unseen(met: Sequence[CollectiveInstance], rank: int) -> list[Span]:
    """When the rank waited for others in collectives of which the wait is not known."""
    return [m.wait(rank) for m in met if rank in m.parts and not m.parts[rank].known]


def _split(cell: RankCell, blocked: Sequence[Span], window: Span, waits: list[Span]) -> Split:
    total, exposed = window[1] - window[0], length(blocked)
    compute = max(0, min(cell.ran, total - exposed))
    return Split(total, compute, exposed, 0, total - compute - exposed, None, 0, length(common(blocked, waits)))


def _times(
    cells: Mapping[int, RankCell], blocked: Mapping[int, Sequence[Span]], span: Span
) -> dict[int, dict[str, int]]:
    """Rank → part → nanoseconds in a span of time."""
    found: dict[int, dict[str, int]] = {}
    for rank, cell in cells.items():
        left = minus([span], blocked[rank])
        found[rank] = {}
        for name, spans in cell.own.items():
            found[rank][name] = length(common(left, spans))
            left = minus(left, spans)
        found[rank][OWN] = length(left)
    return found
