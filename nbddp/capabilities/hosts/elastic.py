"""Which nodes an elastic pool may have, which are on their way, and when one that did not come is tried again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from nbddp.agent.gather import end_all
from nbddp.capabilities.hosts.names import Host
from nbddp.capabilities.hosts.remote_client import RemoteAgentClient
from nbddp.capabilities.hosts.transports import Transport
from nbddp.errors import AgentFailed, BadInput
from nbddp.launch.topology import counted

RETRY, LONGEST_RETRY = 5.0, 60.0  # seconds until a host is tried again, at first and in the end
LOOK_EVERY = 0.2  # seconds between two looks while a cell runs
JOIN_TIMEOUT = 600.0  # seconds that the fewest nodes may take to come; torchrun's default


class NodePlace(NamedTuple):
    """A host on which a node may be, and what starts its agent. keep_alive: seconds for which it is to survive the
    connection to it."""

    host: Host
    way: Transport
    keep_alive: float = 0.0


class Members:
    """The nodes of a pool that was started with `--nnodes LEAST:MOST`. `target`: how many there are to be now.

    `places` are tried in order. begin: starts the agent of a place. `why`: host → why it did not come last time.
    """

    def __init__(
        self,
        least: int,
        most: int,
        target: int,
        places: Sequence[NodePlace],
        begin: Callable[[NodePlace], RemoteAgentClient],
    ):
        self.least, self.most, self.target = least, most, target
        self.places = list(places)
        self.why: dict[str, str] = {}
        self._begin = begin
        self._joining: dict[str, RemoteAgentClient] = {}
        self._again: dict[str, tuple[float, float]] = {}  # host → when it may be tried, and how long the next wait is

    @property
    def bounds(self) -> tuple[int, int]:
        return self.least, self.most

    def want(self, nodes: int) -> None:
        """From here on `nodes` nodes. Raises BadInput where that is not between least and most."""
        if not self.least <= nodes <= self.most:
            raise BadInput(
                f"the pool cannot have {counted(nodes, 'node')}: it was started with --nnodes {self.least}:{self.most}"
            )
        self.target = nodes
        self._again.clear()

    def look(self, living: Iterable[Host]) -> list[RemoteAgentClient]:
        """Have as many on their way as are missing; those that are ready to join."""
        there = {host.name for host in living}
        for agent in list(self._joining.values()):
            if agent.closed:
                self._did_not_come(agent)
        missing = self.target - len(there) - len(self._joining)
        now = time.monotonic()
        for place in self.places:
            name = place.host.name
            if (
                missing > 0
                and name not in there
                and name not in self._joining
                and self._again.get(name, (0,))[0] <= now
            ):
                missing -= 1
                try:
                    self._joining[name] = self._begin(place)
                except AgentFailed as e:
                    self._later(name, str(e))
        return [agent for agent in self._joining.values() if agent.warm is not None and not agent.closed]

    def on_their_way(self) -> bool:
        return bool(self._joining)

    def end(self) -> None:
        """What is on its way is ended."""
        joining, self._joining = self._joining, {}
        end_all([*joining.values()])

    def take(self, agent: RemoteAgentClient) -> None:
        """It has joined."""
        del self._joining[agent.host.name]
        self._again.pop(agent.host.name, None)

    def turn_away(self, agent: RemoteAgentClient, why: str) -> None:
        """It cannot take part, and ends. It is tried again later: what is wrong there may be mended."""
        name = agent.host.name
        del self._joining[name]
        with suppress(AgentFailed):
            agent.stop()
        self._later(name, why)

    def later(self, host: Host, why: str) -> None:
        """It did not come up, or has gone: it is tried again, but not at once."""
        self._later(host.name, why)

    def _did_not_come(self, agent: RemoteAgentClient) -> None:
        why = ""
        try:
            agent.wait_warm(0.0)
        except AgentFailed as e:
            why = str(e)
        self.turn_away(agent, why)

    def _later(self, name: str, why: str) -> None:
        _, wait = self._again.get(name, (0.0, RETRY))
        self._again[name] = time.monotonic() + wait, min(2 * wait, LONGEST_RETRY)
        self.why[name] = why
