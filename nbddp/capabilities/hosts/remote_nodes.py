"""The nodes of one worker group: reached on other hosts, lost, joined by others, and what they make of a plan."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from nbddp.agent import stop
from nbddp.agent.stop import uninterrupted
from nbddp.capabilities.hosts import pairwise_probe, sync
from nbddp.capabilities.hosts.elastic import JOIN_TIMEOUT, LOOK_EVERY, Members, NodePlace
from nbddp.capabilities.hosts.names import Host, hosts_of
from nbddp.capabilities.hosts.node import RemoteNode
from nbddp.capabilities.hosts.remote_client import RemoteAgentClient
from nbddp.capabilities.hosts.transports import SshTransport, TemplateTransport, Transport
from nbddp.capabilities.hosts.via import SSH, refuse_more_than_names, via_of
from nbddp.compat.extra.versions import differing, versions
from nbddp.errors import AgentFailed, BadInput, PoolNotRunning
from nbddp.launch.options import LaunchSpec
from nbddp.launch.topology import counted
from nbddp.launch.units import lasts
from nbddp.output.progress import StageText, counting
from nbddp.output.screens import NullScreen, Screen
from nbddp.pool.host_source import HostSource, Progress
from nbddp.pool.node import weakly
from nbddp.protocol.codec import Json, Message

if TYPE_CHECKING:
    from nbddp.pool.change import EnvChange
    from nbddp.pool.state import PoolState


class RemoteNodes(HostSource):
    """Nodes of other hosts, and simulated ones that may join and leave. `members`: which nodes there may be, where they
    may join and leave (`--nnodes MIN:MAX`)."""

    may_change = True

    def __init__(self, pool: PoolState):
        super().__init__(pool)
        self.members: Members | None = None
        self._interface: str | None = None  # that all hosts are to take
        self._reached: tuple[object, ...] = ()  # the hosts, and by which way
        self._hears_terminal = self._synced = False

    @property
    def nodes(self) -> list[RemoteNode]:
        """The nodes of other hosts."""
        return self.group.added

    def where(self, spec: LaunchSpec) -> str:
        return f"--hosts {spec.hosts}" if spec.hosts else ""

    def on(self, spec: LaunchSpec) -> str:
        return f"on {spec.hosts}" if spec.hosts else super().on(spec)

    def refuse_variables(self, spec: LaunchSpec, change: EnvChange) -> None:
        if change.at_import and spec.elsewhere:
            name = change.at_import[0]
            raise BadInput(
                f"{name} is read while torch is imported, before a host's workers start; %ddp stop, then "
                f"%ddp start --setup 'export {name}={change.wanted.get(name, '')}'"
            )

    def places(self, spec: LaunchSpec, progress: Progress) -> list[NodePlace]:
        """Where nodes of `spec` may be. Raises BadInput, AgentFailed."""
        python, setup = spec.python or sys.executable, spec.setup or ""
        via, hosts = via_of(spec.via or SSH), hosts_of(spec.hosts or "")
        if via == SSH:
            way: Transport = SshTransport(os.path.expanduser(spec.ssh_config or ""), python, setup)
        else:
            refuse_more_than_names(spec.via or "", hosts)
            way = TemplateTransport(via, python, setup)
        return [NodePlace(host, way, spec.keep_alive or 0.0) for host in hosts]

    def more(self, spec: LaunchSpec, nodes: int, progress: Progress) -> list[NodePlace]:
        """Places for so many more nodes, if there can be any. Raises as `places`."""
        return []

    def still_held(self) -> str:
        """That places wait for another try; empty where there are none."""
        return ""

    def end(self) -> None:
        members, self.members = self.members, None
        if members is not None:
            members.end()

    # -- a start -----------------------------------------------------------------------------------

    def warm(self, spec: LaunchSpec, old: LaunchSpec | None, progress: Progress) -> None:
        """Have an agent that is warm here and on each host that is asked for; all warm up at once. old: of the pool
        that runs.

        Raises AgentFailed for a host that does not come up; then those that have are left again.
        """
        asked = self.where(spec)
        _refuse_unmet(spec, old)
        if old is None and self._way(spec) != self._reached:  # an earlier start has failed, there or elsewhere
            self.leave()
        if asked and not self.nodes:
            self._reach_all(spec, progress)
            self._hear_terminal()
            return
        if asked and spec.sync:
            self.told += self.sync([node.agent for node in self.nodes], progress)
        self.group.warm_here(progress)
        if spec.elastic and not asked and (self.members is None or spec.elastic != self.members.bounds):
            self.members = Members(*spec.elastic, spec.elastic[0], [], self._begin)
        if not spec.elastic:
            self.members = None
        self._hear_terminal()

    def _say(self, words: str) -> None:
        """In the run in progress, else at the next start; in any thread."""
        with suppress(ReferenceError):  # nobody has the pool any more
            run = self.pool.current
            if run is None:
                self.told.append(words)
            else:
                run.tell(words)

    def description(self) -> Json:
        return {"elastic": self.members.bounds if self.members is not None else None}

    def _hear_terminal(self) -> None:
        """`python -m nbddp scale` speaks to the agent here, also while a cell runs."""
        if self.members is not None and not self._hears_terminal:
            self._hears_terminal = True
            self.group.nodes[0].agent.on_event(weakly(self._asked))

    def _asked(self, event: Message) -> None:
        if event["ev"] == "scale" and self.members is not None:
            with suppress(BadInput):  # who asked knows it
                self.members.want(event["nodes"])

    def _reach_all(self, spec: LaunchSpec, progress: Progress) -> None:
        try:
            self._reach(spec, progress)
        except BaseException as e:
            self.leave()
            still = self.still_held()
            if still and isinstance(e, AgentFailed):
                raise AgentFailed(f"{e}; {still}") from None
            raise

    def _way(self, spec: LaunchSpec) -> tuple[object, ...]:
        """Which hosts it reaches, and how."""
        how = (spec.via, spec.ssh_config, spec.python, spec.setup, spec.keep_alive, spec.interface)
        return (self.where(spec), *how) if self.where(spec) else ()

    def leave(self) -> None:
        with uninterrupted():
            self._reached = ()
            self.group.leave(self.nodes)

    def _take(self, agent: RemoteAgentClient) -> None:
        """Have its node."""
        node = RemoteNode(agent, *self.group.hears)
        self.group.nodes[0].agent.on_event(weakly(node.hear_home))
        self.group.take(node)

    def _find_ways(self) -> None:
        """Have every node know the address at which others reach it."""
        if self.nodes:
            pairwise_probe.find(self.group.nodes[0], self.nodes, self._interface)

    def _reach(self, spec: LaunchSpec, progress: Progress) -> None:
        """Start the agents of all hosts at once, and wait for each. Where nodes may join and leave, absent ones are
        reported, and tried again while a cell runs."""
        places = self.places(spec, progress)
        least, most = spec.elastic or (len(places), len(places))
        members = Members(least, most, min(most, len(places)), places, self._begin)
        progress(
            StageText(f"connecting to {', '.join(str(place.host) for place in places[: members.target])}", "agent")
        )
        for place in places[: members.target]:
            self._take(self._begin(place))
        self.group.warm_here(progress)
        failed: list[AgentFailed] = []
        for node in self.nodes:
            waits = counting(progress, f"importing torch on {node.agent.host}, once", "agent")
            try:
                node.agent.wait_warm(waits=waits)
            except AgentFailed as e:
                if not spec.elastic:
                    raise
                failed.append(e)
                members.later(node.agent.host, str(e))
                self.group.leave([node])
        if len(self.nodes) < least:
            raise (
                failed[0] if failed else AgentFailed(f"there are {len(places)} hosts, but at least {least} are needed")
            )
        self._interface, self._reached = spec.interface, self._way(spec)
        self._find_ways()
        self.members = members if spec.elastic else None
        agents = [node.agent for node in self.nodes]
        told = [line for agent in agents for line in agent.differences(versions(), not spec.sync)]
        told += differing({str(agent.host): agent.hello.versions for agent in agents})
        self.told = [*map(str, failed), *told]
        if spec.sync:
            self.told += self.sync(agents, progress)

    def sync(self, agents: Sequence[RemoteAgentClient], progress: Progress) -> list[str]:
        """Have this process's working directory on these hosts, where workers that start from now on begin; what was
        copied, in words (`nbddp.capabilities.hosts.sync`). Raises BadInput where it is too much."""
        self._synced = True
        return sync.copy(agents, progress, living=bool(self.group.workers))

    def _begin(self, place: NodePlace) -> RemoteAgentClient:
        """Start the agent of a place."""
        home = self.group.nodes[0].agent.home
        log = home / f"host-{place.host.name.replace('/', '_')}.log"
        keep_alive = place.keep_alive if place.way.survives else 0.0
        agent = RemoteAgentClient(place.host, place.way, log, {}, keep_alive=keep_alive)
        if keep_alive:
            agent.on_event(functools.partial(self._heard, place.host))
        return agent

    def _heard(self, host: Host, event: Message) -> None:
        """An agent's connection is lost, or stands again; in the agent's threads."""
        if event["ev"] == "away":
            self._say(f"{host} is unreachable ({event['why']}); nbddp keeps trying, and its workers keep running")
        elif event["ev"] == "back":
            self._say(f"{host} is back")

    def wanted(self) -> int:
        return self.members.target if self.members is not None and not self.nodes else super().wanted()

    def slots(self) -> int | None:
        """The number of workers that the hosts file gave each host; None where it gave none. Raises BadInput where it
        gave them different ones."""
        found = {node.agent.host.slots for node in self.nodes}
        if len(found) > 1:
            raise BadInput("the hosts have different numbers of slots; set the number of workers per host with --nproc")
        return found.pop() if found else None

    # -- nodes that go, and come ---------------------------------------------------------------------

    def check(self, progress: Progress) -> None:
        """An elastic pool goes on without hosts that are gone. Raises PoolNotRunning where that cannot be: ranks of a
        pool on hosts are not silently started elsewhere. One that is away is waited for."""
        for node in self.nodes:
            while node.agent.away is not None and node.alive:
                left = node.agent.keep_alive - node.agent.away
                progress(f"{node.agent.host} is unreachable; nbddp keeps trying for {lasts(max(0.0, left))}")
                stop.check()
                time.sleep(LOOK_EVERY)
        lost = [node.agent for node in self.nodes if not node.alive]
        if not lost:
            return
        asked, words = self.where(self.pool.spec), "; ".join(dict.fromkeys(agent.last_words() for agent in lost))
        gone = f"{', '.join(str(agent.host) for agent in lost)} {'is' if len(lost) == 1 else 'are'} gone"
        if self.members is not None and len(self.nodes) - len(lost) >= self.members.least:
            self.reform(NullScreen())
            self.told.append(f"{gone} ({words}); {self.describe()}; variables on all workers are lost")
            return
        raise PoolNotRunning(
            f"the pool has stopped, because {gone} ({words}); variables on its workers are lost, and %ddp start "
            f"{asked} starts another"
        )

    def scale(self, nodes: int, progress: Progress) -> list[str]:
        """Have so many nodes; what was done, in words. Raises BadInput where the pool was not started for that."""
        if self.members is None:
            raise fixed(nodes)
        self.members.want(nodes)
        if self.nodes:
            self._find_places(progress)
            self._await(nodes, progress)
        before = self.group.placed().nnodes
        if self.changes():
            self.reform(NullScreen())
        missing = nodes - self.group.placed().nnodes
        why = [f"{name}: {reason}" for name, reason in self.members.why.items()] if missing else []
        if missing > 0 and not why:
            why = [
                f"there are {counted(len(self.members.places), 'host')}; name more with --hosts when you start the pool"
            ]
        same = before == self.group.placed().nnodes
        return [self.describe() + ("" if same else "; variables on all workers are lost"), *why]

    def _find_places(self, progress: Progress) -> None:
        """As many as are wanted."""
        assert self.members is not None
        more = self.members.target - len(self.members.places)
        if more > 0:
            self.members.places += self.more(self.pool.spec, more, progress)

    def _await(self, nodes: int, progress: Progress) -> None:
        """Until so many can be used, or none is on its way."""
        assert self.members is not None
        while len(self._staying()) + len(self._ready()) < nodes and self.members.on_their_way():
            progress(f"waiting for {counted(nodes, 'node')}")
            stop.check()
            time.sleep(LOOK_EVERY)

    def _staying(self) -> list[RemoteNode]:
        """Nodes on other hosts that live and are wanted."""
        assert self.members is not None
        return [node for node in self.nodes if node.alive][: self.members.target]

    def _ready(self) -> list[RemoteAgentClient]:
        """Agents that can join; those that cannot are turned away, with the reason."""
        members = self.members
        assert members is not None
        ready = []
        for agent in members.look(node.agent.host for node in self.nodes if node.alive):
            why = next(filter(None, (asks(agent.hello.versions) for asks in self.pool.parts.turned_away)), "")
            if why:
                members.turn_away(agent, why)
            else:
                ready.append(agent)
        return ready

    def changes(self) -> str:
        """How the nodes are to change, in words; empty if they are as they should be."""
        members, placed = self.members, self.group.topology
        if members is None or placed is None:
            return ""
        if not members.places:
            return "" if members.target == placed.nnodes else f"the pool will have {counted(members.target, 'node')}"
        ready = [str(agent.host) for agent in self._ready()]
        if ready:
            return f"{', '.join(ready)} can join"
        surplus = [str(node.agent.host) for node in self.nodes if node.alive][members.target :]
        return f"the pool will continue without {', '.join(surplus)}" if surplus else ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        if self.members is None:
            yield
            return
        over = threading.Event()

        def watch() -> None:
            while not over.wait(LOOK_EVERY):
                run, changes = self.pool.current, self.changes()
                if changes and run is not None:
                    run.restart(changes)
                    return

        watcher = threading.Thread(target=watch, name="nbddp-members", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()

    def renew(self, screen: Screen) -> None:
        if self.members is None:
            super().renew(screen)
            return
        self.pool.with_living_nodes(self.reform, screen)
        screen.say(self.describe())

    def reform(self, screen: Screen) -> None:
        """New workers on the nodes that there are now: those that live and are wanted, and those that can join. Raises
        PoolNotRunning where there are too few for too long."""
        group, members = self.group, self.members
        assert members is not None
        group.end(sorted(group.workers))
        staying = self._staying()
        leaving = [node for node in self.nodes if node not in staying]
        for node in [node for node in leaving if not node.alive]:
            members.later(node.agent.host, node.agent.last_words())
        group.leave(leaving)
        if members.places:
            self._await_least(screen)
            ready = self._ready()
            for agent in ready:
                members.take(agent)
                self._take(agent)
            if self._synced and ready:
                self.told += self.sync(ready, screen.progress)
        self._find_ways()
        group.meet_anew()
        group.broken, group.topology = False, None
        topology = self.plan(self.pool.spec)
        group.match(topology, group.visible, progress=screen.progress)
        group.topology = topology
        group.describe()

    def _await_least(self, screen: Screen) -> None:
        members, end = self.members, time.monotonic() + JOIN_TIMEOUT
        assert members is not None
        while (there := len(self._staying()) + len(self._ready())) < members.least:
            screen.progress(
                f"{counted(there, 'node')} of at least {members.least}; waiting for more, Stop ends the cell"
            )
            stop.check()
            time.sleep(LOOK_EVERY)
            if time.monotonic() > end:
                why = "; ".join(f"{name}: {reason}" for name, reason in members.why.items())
                raise PoolNotRunning(
                    f"fewer than {members.least} nodes are left ({why}); %ddp start {self.where(self.pool.spec)} tries "
                    f"again"
                )

    def describe(self) -> str:
        """`the pool has 2 nodes (nodea, nodeb), world size 4`."""
        placed = self.group.placed()
        where = ", ".join(str(node.agent.host) for node in self.nodes)
        on = f" ({where})" if where else ""
        return f"the pool has {counted(placed.nnodes, 'node')}{on}, world size {placed.world_size}"


def fixed(nodes: int) -> BadInput:
    """That a pool was not started with nodes that join and leave."""
    return BadInput(f"this pool has a fixed number of nodes; start it with --nnodes 1:{max(nodes, 2)}")


def _refuse_unmet(spec: LaunchSpec, old: LaunchSpec | None) -> None:
    """Raises BadInput for options of other hosts that cannot be met any more, or where there are none."""
    asked = f"--interface {spec.interface}" * bool(spec.interface) or "--sync" * spec.sync
    if asked and not spec.on_hosts:
        raise BadInput(f"{asked} is for other hosts; add --hosts, or remove {asked}")
    if old is not None and spec.interface != old.interface:
        raise BadInput(
            f"the pool's hosts are already connected; %ddp stop, then --interface {spec.interface} tries again"
        )
