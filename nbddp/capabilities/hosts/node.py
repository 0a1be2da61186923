"""A node of the pool on another host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from nbddp.agent.gather import AgentRequests
from nbddp.capabilities.hosts.remote_client import RemoteAgentClient
from nbddp.errors import AgentFailed
from nbddp.launch.machine import Node
from nbddp.launch.topology import Topology, Worker
from nbddp.pool import start_requests
from nbddp.pool.node import ClusterFiles, PoolNode, ends_pool
from nbddp.protocol.agent import StartWorker
from nbddp.protocol.codec import Json, Message
from nbddp.protocol.outcome import ProcessExit


class RemoteNode(PoolNode):
    """A node on another host: its files are its own, and its agent, however it was reached, reports on them."""

    agent: RemoteAgentClient
    sees_files = False
    given: Mapping[str, str] = {}
    _engine_file = ""  # there
    _putting: int | None = None  # the request by which it comes there

    def __init__(
        self,
        agent: RemoteAgentClient,
        died: Callable[[int, ProcessExit], None],
        process_ended: Callable[[Message], None],
    ):
        super().__init__(agent, died, process_ended)
        self.name = str(agent.host)

    def host(self, index: int) -> Node:
        """That machine; its name is the one under which it is reached."""
        return start_requests.host(self.facts, index, self.address, self.agent.host.name)

    def describe(self, subject: tuple[object, ...], info: Callable[[], Json], files: list[str]) -> None:
        """The files are this machine's; over there the same names may lie in a home folder that both share."""
        super().describe(subject, info, [])

    @property
    def joining(self) -> Mapping[str, str]:
        """The variables that name interfaces in the set-up there."""
        return self.agent.hello.joining

    def take_way(self, address: str, own: bool) -> None:
        """Others reach this node at this address. own: whether interfaces that its set-up names stay."""
        self.address, self.given = address, dict(self.joining) if own else {}

    def prepare(self, cluster: ClusterFiles) -> None:
        """The controller's file for engines is to go there."""
        if not self._engine_file:
            here = Path(cluster.engine_file)
            try:
                text = here.read_text(encoding="utf-8")
            except FileNotFoundError:  # it goes with the agent here
                raise AgentFailed("the pool's controller exited while workers were starting") from None
            self._putting = self.agent.post("put", name=here.name, text=text)

    def request(self, place: Worker, topology: Topology, visible: str, cluster: ClusterFiles) -> StartWorker:
        """The agent adds its own environment, folder and path; it has got the controller's file (`prepare`)."""
        if self._putting is not None:
            self._engine_file, self._putting = self.agent.take(self._putting)["path"], None
        return start_requests.worker(
            place,
            topology,
            env={**self.given, **self.variables},
            visible=visible,
            home=self.agent.far_home,
            profile_dir=str(self.agent.far_home / "profile"),
            url_file=self._engine_file,
            options=self.options,
        )

    def _sizes(self, logs: Sequence[str]) -> dict[str, int]:
        return dict.fromkeys(logs, 0)  # the agent counts for itself

    def signal(self, ranks: Sequence[int], number: int, asked: AgentRequests, *, group: bool = False) -> None:
        """Not waited for: beyond a cut cable nobody answers, and the others are to be informed at once."""
        pids = [self.workers[r].pid for r in ranks if r in self.workers and self.workers[r].lives]
        if pids:
            with suppress(AgentFailed):  # it has just gone, which is reported as the end of its ranks
                self.agent.tell("signal", pids=pids, signal=int(number), group=group)

    def begin_logs(self, ranks: Sequence[int]) -> Sequence[int]:
        return [r for r in ranks if r in self.workers]

    def hear_home(self, event: Message) -> None:
        """The events of this machine's agent, in its reader thread."""
        if ends_pool(event):
            for worker in list(self.workers.values()):
                self.exited(worker, super()._gone())

    def _gone(self) -> ProcessExit:
        """Only this host is gone; ranks on others hear of it as of any death."""
        return ProcessExit(last_words=self.agent.last_words())

    def _clear_up(self) -> None:
        """The agent's keeper there does; where that was killed too, the next agent there removes the folder."""

    def taken_away(self) -> str:
        return self.agent.taken_away()

    def last_words(self, rank: int) -> str:
        """Of one whose exit the agent has told, it has told them with it."""
        told = self.workers[rank].exit
        return told.last_words if told is not None else "" if self.alive else self.agent.last_words()

    def errors_of(self, number: int) -> Path:
        return self.agent.far_bulk / "runs" / str(number)
