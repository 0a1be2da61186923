"""Launchers of ipyparallel that start everything through a node agent.

Registered by entry point as `nbddp`, so `ipcluster list` and `ipcluster stop` see a pool, and `ipcluster start
--controller nbddp --engines nbddp` makes one. An engine's id is its rank. ipyparallel's own launchers are not used.
They have one environment for a whole set of engines, leave orphans, and cannot replace one engine under its id.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ipyparallel.cluster.launcher import BaseLauncher, ControllerLauncher, EngineLauncher, NotRunning
from traitlets import Any as AnyTrait
from traitlets import Dict, Unicode

from nbddp.agent.child_logs import last_line
from nbddp.agent.client import AgentClient
from nbddp.compat.system import LOOPBACK
from nbddp.errors import AgentFailed, PoolError, RankStatus
from nbddp.launch.topology import Topology
from nbddp.pool import start_requests
from nbddp.pool.node import ends_pool
from nbddp.protocol.agent import Started, StartWorker
from nbddp.protocol.codec import Json, Message, from_json, to_json

EVENT_TIMEOUT = 2.0  # seconds; a start may fail before the agent's event comes
LOOK_EVERY, LOOKING = 0.004, 2.0  # seconds; later as often as ipyparallel looks


class _OnAgent(BaseLauncher):  # type: ignore[misc]
    """What both launchers share: an agent, found again by its folder."""

    agent = AnyTrait()
    home = Unicode().tag(to_dict=True)

    def find_args(self) -> list[str]:
        return ["nbddp"]

    def _take_agent(self) -> AgentClient:
        if self.agent is None:
            sibling = getattr(getattr(self.parent, "controller", None), "agent", None)
            self.agent = sibling or AgentClient.launch(os.environ)
        self.home = str(self.agent.home)
        self.agent.wait_warm()
        self.agent.on_event(self._hear)
        agent: AgentClient = self.agent
        return agent

    @classmethod
    def from_dict(cls, d: Json, **kwargs: Any) -> Any:
        launcher = super().from_dict(d, **kwargs)
        try:
            launcher.agent = AgentClient.connect(Path(launcher.home))
        except AgentFailed as e:
            raise NotRunning(str(e)) from None
        launcher.agent.on_event(launcher._hear)
        return launcher

    def _hear(self, message: Message) -> None:
        raise NotImplementedError

    async def join(self, timeout: float | None = None) -> None:
        end = None if timeout is None else asyncio.get_running_loop().time() + timeout
        while self.state == "running":
            if end is not None and asyncio.get_running_loop().time() > end:
                raise TimeoutError(f"{self.name} did not stop within {timeout} s")
            await asyncio.sleep(0.02)


class AgentControllerLauncher(_OnAgent, ControllerLauncher):  # type: ignore[misc]
    """The ipyparallel controller as a child of the agent."""

    pid = AnyTrait(0).tag(to_dict=True)
    ip = Unicode(LOOPBACK)
    end = AnyTrait()  # the event that told its end, or the agent's

    async def start(self) -> None:
        agent = self._take_agent()
        start = start_requests.controller(
            env=agent.env or dict(os.environ),
            home=agent.home,
            profile_dir=self.profile_dir,
            cluster_id=self.cluster_id,
            ip=self.ip,
            args=self.controller_args,
        )
        answer = agent.request("start", kind=start.kind, **to_json(start))
        self.pid = from_json(Started, answer).pid
        self.notify_start(answer)
        self._note_end()  # it may have ended before its pid was known

    async def get_connection_info(self, timeout: float | None = None) -> Json:
        """As ipyparallel's, which looks for the files ten times a second."""
        end = asyncio.get_running_loop().time() + LOOKING
        while not all(map(os.path.exists, self.connection_files.values())) and self.state == "running":
            if asyncio.get_running_loop().time() > end:
                break
            await asyncio.sleep(LOOK_EVERY)
        found: Json = await super().get_connection_info(timeout)
        return found

    def ended(self) -> PoolError | None:
        """Why the start failed: how the controller ended and what it said last, or that the agent ended. None if
        neither ended."""
        self.agent.wait_until(lambda: self.end is not None, EVENT_TIMEOUT)
        if self.end is None:
            return None
        if self.end["ev"] == "gone":
            return AgentFailed(self.agent.ended())
        ended = f"the pool's controller exited with code {self.end['code']} while starting"
        return PoolError(f"{ended}: {last_line(self.end['last_words'])}; run the cell again")

    def poll(self) -> int | None:
        return 1 if self.state == "after" else None

    def signal(self, sig: int) -> None:
        self.agent.request("signal", pids=[self.pid], signal=int(sig))

    async def stop(self) -> None:
        self.signal(signal.SIGTERM)
        await self.join(self.stop_timeout)

    def _hear(self, message: Message) -> None:
        if self.end is None and ends_pool(message):
            self.end = message
            self._note_end()

    def _note_end(self) -> None:
        if self.end is not None and self.pid:
            self.notify_stop({"exit_code": self.end.get("code", 0), "pid": self.pid})


class AgentEngineSetLauncher(_OnAgent, EngineLauncher):  # type: ignore[misc]
    """A worker group: `pids` maps rank (as text) to process."""

    pids = Dict().tag(to_dict=True)
    n = AnyTrait(0).tag(to_dict=True)
    started = AnyTrait()

    async def start(self, n: int) -> None:
        """Have the workers that were `started` (rank → pid), or start `n` that are placed on this machine."""
        agent = self._take_agent()
        if self.started:
            self.note(self.started)
            return
        keys = [(s.rank, agent.post("start", kind=s.kind, **to_json(s))) for s in self._plan(agent, n)]
        self.note({rank: from_json(Started, agent.take(key)).pid for rank, key in keys})
        agent.tell("note", ranks=list(range(n)), status=RankStatus.RUNNING, doing="used by ipyparallel")

    def note(self, started: Mapping[int, int]) -> None:
        """These workers have been started (rank → pid); also when ranks join or are replaced."""
        self.pids = {**self.pids, **{str(rank): pid for rank, pid in started.items()}}
        self.n = len(self.pids)
        self.notify_start(dict(self.pids))

    def signal(self, sig: int) -> None:
        self.agent.request("signal", pids=list(self.pids.values()), signal=int(sig))

    async def stop(self) -> None:
        self.signal(signal.SIGKILL)
        await self.join(self.stop_timeout)

    def _hear(self, message: Message) -> None:
        if message["ev"] == "exit" and self.pids.get(str(message["rank"])) == message["pid"]:
            self.pids = {r: p for r, p in self.pids.items() if p != message["pid"]}
            self.n = len(self.pids)
        if message["ev"] == "gone" or not self.pids:
            self.notify_stop({"exit_code": 0})

    def _plan(self, agent: AgentClient, n: int) -> list[StartWorker]:
        topology = Topology.plan([start_requests.host(agent.wait_warm())], nproc=n, oversubscribe=True)
        agent.tell("describe", info=start_requests.description(topology), files=list(self.connection_files.values()))
        return [
            start_requests.worker(
                place,
                topology,
                env=start_requests.here(),
                visible="own" if topology.oversubscribed else "all",
                home=agent.home,
                profile_dir=self.profile_dir,
                url_file=self.connection_files["engine"],
            )
            for place in topology.workers
        ]
