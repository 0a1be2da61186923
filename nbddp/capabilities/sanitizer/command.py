"""`--sanitize` and `Pool.findings`: the ranks are asked for their records, and these are judged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbddp.analysis.answers import IdleRanks, unpacked
from nbddp.capabilities.sanitizer.findings import SanitizerFindings
from nbddp.capabilities.sanitizer.options import Sanitize
from nbddp.capabilities.sanitizer.recording import RankRecord
from nbddp.capabilities.sanitizer.rules import judge
from nbddp.capabilities.sanitizer.table import KINDS
from nbddp.errors import BadInput
from nbddp.notebook.commands import Asked


def findings(ranks: IdleRanks, *, allow: Sequence[str] = (), same_input: bool = False) -> SanitizerFindings:
    """The mistakes of the last run under `sanitize`, most serious first. Raises PoolNotRunning, or BadInput if no run
    was under `sanitize`, or `allow` has an unknown kind."""
    unknown = [name for name in allow if name not in KINDS]
    if unknown:
        raise BadInput(f"{unknown[0]!r} is not a kind of finding; the kinds are {', '.join(KINDS)}")
    found: dict[int, RankRecord | None] = unpacked(ranks.answers("sanitized", meets=False))
    newest = max((record.run for record in found.values() if record), default=0)
    if not newest:
        raise BadInput("no run was sanitized on these workers; %%ddp --sanitize does it for a cell")
    records = {rank: record for rank, record in found.items() if record and record.run == newest}
    group = {rank for record in records.values() for model in record.models for rank in model.group}
    return judge(records, allow, same_input, sorted((group & found.keys()) - records.keys()))


def show_recorded(asked: Asked, said: Sanitize | bool) -> list[Any]:
    """`%%ddp --sanitize`."""
    return [_of(asked.pool, said)]


def in_terminal(ranks: IdleRanks, said: Sanitize | bool) -> str:
    """`--sanitize` of a script that a terminal runs."""
    try:
        return str(_of(ranks, said))
    except BadInput as e:
        return str(e)


def _of(ranks: IdleRanks, said: Sanitize | bool) -> SanitizerFindings:
    options = said if isinstance(said, Sanitize) else Sanitize()
    return findings(ranks, allow=options.allow, same_input=options.same_input)
