"""The notebook's side: output that dead ranks had written but not sent becomes part of their output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbddp.agent.gather import AgentRequests
from nbddp.errors import AgentFailed
from nbddp.launch.topology import rank_words

if TYPE_CHECKING:
    from nbddp.execution.execution import Execution
    from nbddp.pool.state import PoolState


class SpoolPart:
    def __init__(self, pool: PoolState):
        self._pool = pool

    def ranks_gone(self, run: Execution, ranks: list[int]) -> None:
        asked, of = AgentRequests(), list[list[int]]()  # the ranks that each request is about
        for node in self._pool.group.nodes:
            own = [(rank, run.outputs[rank].received) for rank in ranks if rank in node.workers]
            if own:
                asked.post_if_alive(node.agent, "written", run=run.number, ranks=own)
                of.append([rank for rank, _ in own])
        for its, answer in zip(of, asked.answers(), strict=True):
            if isinstance(answer, AgentFailed):
                run.display.screen.say(f"last output of {rank_words(its)} may be missing: {answer}")
                continue
            for rank, stream, lost, text in answer.get("written", ()):
                missing = f"\n… {lost} characters lost …\n" * bool(lost) + text
                run.display.take(rank, "stream", {"name": stream, "text": missing})
