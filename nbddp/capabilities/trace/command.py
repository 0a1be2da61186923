"""`Pool.trace`, and the output of a cell with `--trace`: the ranks' traces, merged and written to a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbddp.analysis.answers import IdleRanks, clocks, unpacked
from nbddp.capabilities.trace.merge import Merged, RankTrace, merge
from nbddp.errors import BadInput
from nbddp.notebook.commands import Asked
from nbddp.protocol.pickling import NotSent


def trace(ranks: IdleRanks) -> Merged:
    """The merged profile of the last cell that ran with `trace`. Ranks that have been replaced since are listed in
    `missing`. Raises PoolNotRunning, or BadInput if there is none."""
    # of each rank its trace, or why there is none
    found: dict[int, RankTrace | str | NotSent] = unpacked(ranks.answers("trace", meets=False))
    places = ranks.placed().workers
    traces = {r: replace(t, node=places[r].node) for r, t in found.items() if isinstance(t, RankTrace)}
    lacking = {r: t for r, t in found.items() if t and not isinstance(t, RankTrace)}
    why = {r: t.why if isinstance(t, NotSent) else t for r, t in lacking.items()}
    if not traces and why:
        raise BadInput(f"no rank has a trace; rank {min(why)}: {why[min(why)]}")
    if not traces:
        raise BadInput("no cell has been traced on these workers; %%ddp --trace traces one")
    merged = merge(traces, clocks(ranks))
    merged.missing, merged.why = sorted(set(found) - set(traces)), why
    return merged


def show_recorded(asked: Asked, file: str) -> Sequence[Any]:
    """`%%ddp --trace`. That there is no trace is said, and is no error of the cell's."""
    try:
        with asked.progress() as progress:
            return write(asked.pool, Path(file), progress)
    except BadInput as e:
        print(e)
        return ()


def write(ranks: IdleRanks, file: Path, progress: Callable[[str], None]) -> tuple[Any, Any]:
    """Write the merged trace of the cell that has just run. Returns where it is, and the figure of what it shows."""
    from nbddp.capabilities.collectives.program import program
    from nbddp.capabilities.trace.written import written

    progress("collecting and merging the ranks' traces")
    merged = trace(ranks)
    progress(f"writing {file}")
    found = written(merged, file)
    progress("analysing the trace")
    return found, program(merged.data["traceEvents"]).draw()


def in_terminal(ranks: IdleRanks, file: str) -> str:
    """`--trace` of a script that a terminal runs. Returns what was written, or why nothing: the script has run all the
    same."""
    from nbddp.capabilities.trace.written import written

    try:
        return str(written(trace(ranks), Path(file)))
    except BadInput as e:
        return str(e)
