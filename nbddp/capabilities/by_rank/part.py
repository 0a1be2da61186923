"""Draws the page of a run's output where it is worth one. It is imported by the first run, the drawing by the first
page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbddp.output.page import OutputPage, OutputState
    from nbddp.pool.state import PoolState


class ByRankPart:
    def __init__(self, pool: PoolState):
        self._pool = pool

    def output_pages(self, state: OutputState) -> OutputPage | None:
        if all(out.silent for out in state.outputs):
            return None
        from nbddp.capabilities.by_rank.tabs import page

        return page(state)

    def reattached(self, shell: Any) -> None:
        """Show the last run in the notebook of this shell. Raises what it has raised."""
        from nbddp.output.screens import for_shell

        self._pool.runs.show_last(for_shell(shell))
