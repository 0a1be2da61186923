"""Which of the panel's buttons act now, and what they will do. Pure.

A button that would do nothing is shown so, and its tooltip says why. It can still be pressed, which says the same: one
that a front end disables drops the keyboard's focus.
"""

from __future__ import annotations

from collections.abc import Mapping

from nbddp.capabilities.panel.state import State
from nbddp.launch.topology import counted

STEPPING = ("Next", "Step in", "Out", "Continue", "Send")


def start_label(state: State) -> str:
    """What Start will do: `Start 4 workers`, `Resize to 6 workers`, `Change the pool`."""
    planned, now = state.considered.topology, state.placed
    if planned is None:
        return "Start" if now is None else "Change the pool"
    workers = counted(planned.world_size, "worker")
    if now is None or state.plan == state.standing:
        return f"Start {workers}"
    return f"Resize to {workers}" if planned.world_size != now.world_size else "Change the pool"


def why_off(state: State) -> Mapping[str, str]:
    """Button → why it would do nothing now; empty if it acts."""
    pool = "" if state.placed is not None else "no workers are running"
    cell = "" if state.program else "no cell is running"
    blocked = any(row.state == "waiting" for row in state.ranks)
    stopped = any(talk.stopped for talk in state.talks)
    idle = cell or ("" if blocked else "no rank is blocked in a collective")
    post = f"{state.program} is running" if state.program else "" if state.has_failed else "no cell has failed"
    return {
        "Start": _start(state), "Stop": cell, "Free": idle, "Stacks": pool, "Restart": pool, "Shut down": pool,
        "Show": "" if state.curve.points else "no step of DDP is recorded", "Post-mortem": post,
        **dict.fromkeys(STEPPING, "" if cell == "" and stopped else "no rank waits in a debugger"),
    }  # fmt: skip


def _start(state: State) -> str:
    if not state.may_start:
        return state.why_not()
    if state.program:
        return f"{state.program} is running"
    whole = all(row.state != "dead" for row in state.ranks)
    return "the pool is as planned" if state.placed is not None and state.plan == state.standing and whole else ""
