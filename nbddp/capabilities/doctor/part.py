"""What a pool has of doctor: the seams are tried when its workers start, and what does not work is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nbddp.agent.client import AgentClient
from nbddp.capabilities.doctor.background import Probes

if TYPE_CHECKING:
    from nbddp.pool.state import PoolState


class DoctorPart:
    """`protocol.pool_parts` says when its methods are called."""

    def __init__(self, pool: Callable[[], PoolState | None]):
        self.probes = Probes()

    def started(self, agent: AgentClient) -> None:
        self.probes.begin(agent)

    def process_ended(self, event: Mapping[str, Any]) -> None:
        if event["kind"] == "trials":
            self.probes.heard(event)

    def shortcomings(self) -> list[str]:
        return self.probes.words()

    def stopped(self) -> None:
        self.probes = Probes()
