"""What to do next in a run: a pure function of what has happened so far.

`next_action(state)` decides; the loop in `run.spmd` carries it out and holds no rules.
Times are seconds of one monotonic clock. A run that has a failure is ended: the ranks that
still work are interrupted after GRACE, since they may be about to report the same error, and
those that an interrupt does not free within PATIENCE (blocked in a collective) are replaced. Stop
interrupts at once; Stop pressed twice replaces at once.
"""

from __future__ import annotations

from dataclasses import dataclass

GRACE = 0.3
PATIENCE = 1.2


@dataclass(frozen=True)
class RunState:
    """`running`: ranks without an outcome. `failed_at`: time of the first failure or death."""

    now: float
    running: tuple[int, ...]
    failed_at: float | None = None
    stops: tuple[float, ...] = ()
    interrupted_at: float | None = None
    replaced: bool = False


@dataclass(frozen=True)
class Wait:
    """Nothing to do before `seconds` have passed (None: until something happens)."""

    seconds: float | None


@dataclass(frozen=True)
class Interrupt:
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Replace:
    """End these ranks' processes; they are started anew before the next run."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Finish:
    pass


Action = Wait | Interrupt | Replace | Finish


def next_action(state: RunState) -> Action:
    """The table of the module's docstring."""
    if not state.running:
        return Finish()
    if state.replaced:
        return Wait(None)
    if len(state.stops) > 1:
        return Replace(state.running)
    due = _interrupt_due(state)
    if due is None:
        return Wait(None)
    if state.interrupted_at is None:
        return Interrupt(state.running) if state.now >= due else Wait(due - state.now)
    left = state.interrupted_at + PATIENCE - state.now
    return Replace(state.running) if left <= 0 else Wait(left)


def _interrupt_due(state: RunState) -> float | None:
    if state.stops:
        return state.stops[0]
    return None if state.failed_at is None else state.failed_at + GRACE


def group_is_broken(ends: dict[int, str], groups: dict[int, dict[str, object]]) -> bool:
    """True if the ranks' process group may not be used again after a run that went wrong.

    ends: rank → "ok", "failed", "interrupted", "replaced" or "died".
    groups: rank → {"run", "sequence"}: when the group was made and how many collectives it
        has seen. Ranks that all failed at the same point of the program still agree.
    """
    if all(end == "ok" for end in ends.values()):
        return False
    if any(end in ("interrupted", "replaced", "died") for end in ends.values()):
        return True
    return len({(g["run"], g["sequence"]) for g in groups.values()}) > 1
