"""The notebook's side: what ranks that died had written, and their messages did not bring, is part of their output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbddp.agent.gather import AgentRequests
from nbddp.protocol.outcome import GONE

if TYPE_CHECKING:
    from nbddp.execution.execution import Execution
    from nbddp.pool.state import PoolState

NAME = "spool"


class SpoolPart:
    def __init__(self, pool: PoolState):
        self._pool = pool

    def run_settles(self, run: Execution) -> None:
        gone = []
        for rank, ended in run.ended.items():
            if ended.status in GONE or ended.code is not None:
                gone.append(rank)
            if ended.outcome is not None and NAME in ended.outcome.parts:
                run.display.unsaved[rank] = ended.outcome.parts[NAME]
        if gone:
            self._fill_in(run, gone)

    def _fill_in(self, run: Execution, ranks: list[int]) -> None:
        asked = AgentRequests()
        for node in self._pool.group.nodes:
            own = [(rank, run.outputs[rank].received) for rank in ranks if rank in node.workers]
            if own:
                asked.post_if_alive(node.agent, "written", run=run.number, ranks=own)
        for answer in asked.take():
            for rank, stream, lost, text in answer.get("written", ()):
                missing = f"\n… {lost} characters lost …\n" * bool(lost) + text
                run.display.take(rank, "stream", {"name": stream, "text": missing})
