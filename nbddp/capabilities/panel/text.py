"""A panel's state as plain text: for terminals, saved notebooks and screen readers. Pure."""

from __future__ import annotations

from nbddp.capabilities.panel.state import State


def words(state: State) -> str:
    """All that the panel shows, as lines."""
    found = state.considered
    lines = [state.pool_words()]
    if state.placed is None and found.topology is not None:
        lines += ["planned:", *(f"  {line}" for line in found.topology.words().splitlines())]
    elif state.placed is not None:
        lines += state.placed.words().splitlines()[1:]
    lines += [f"not possible: {found.refusal}"] if found.refusal else []
    lines += [f"  {line}" for line in (found.cell, found.torchrun) if line]
    lines += [state.failure, *state.log] if state.failure else []
    return "\n".join(lines)
