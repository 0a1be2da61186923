"""The state of a pool, and how it begins, changes and ends: the agents, the worker group, the runs.

`Pool` is its face. `ensure` makes the living workers match a spec; if the agent or the controller has ended, everything
left is dropped. The next `ensure` begins again with as many workers as there were, and reports it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Any

from nbddp.agent.client import AgentClient, ask
from nbddp.agent.stop import uninterrupted
from nbddp.compat import system
from nbddp.errors import BadInput, PoolError, PoolNotRunning
from nbddp.execution.execution import Execution
from nbddp.launch import options, torchrun_env
from nbddp.launch.options import LaunchSpec
from nbddp.launch.topology import rank_words
from nbddp.launch.units import lasts
from nbddp.output.screens import NullScreen
from nbddp.pool import host_source
from nbddp.pool.change import EnvChange
from nbddp.pool.host_source import HostSource, Progress
from nbddp.pool.node import PoolNode
from nbddp.pool.runs import RankChannel, Runs
from nbddp.pool.worker_group import OwnedProcesses, WorkerGroup, check_ranks
from nbddp.protocol.capability import rows, told_to_ranks
from nbddp.protocol.codec import Message
from nbddp.protocol.pool_parts import PoolParts, call_all, lines

NO_LOOPBACK = (
    f"the processes of a pool meet at {system.LOOPBACK}, which this machine does not have; "
    f"ip link set lo up, and ip addr add {system.LOOPBACK}/8 dev lo where there is IPv6 alone"
)


class PoolState:
    """`spec`: what the pool was made for, then what it is. It ends what it holds when nobody holds it any more."""

    def __init__(self, spec: LaunchSpec, agent: AgentClient | None, connection: type[RankChannel]) -> None:
        """agent: one that may be used if it lives and suits; without it none of an earlier kernel is taken either."""
        self.spec = spec
        self._given_agent = agent
        self._takes = agent is not None  # whether a warm process of an earlier kernel may be taken
        self._connection = connection
        self._keep: float | None = None  # seconds, where no line has said otherwise
        self._ended = ""  # that the pool before has ended by itself, until a start has told it
        self.met: tuple[LaunchSpec, str] | None = None  # a line that was met, with nothing to say, and in which folder
        self._remains = OwnedProcesses()
        self.group = WorkerGroup(self._remains, HostSource(weakref.proxy(self)))
        self.parts = self.with_parts()
        self.runs = Runs(connection(self.group), self.parts)
        self.group.report_to(self.runs.ranks.died, self._process_ended)
        weakref.finalize(self, self._remains.end_elsewhere).atexit = False
        weakref.finalize(self, call_all, self.parts.left)

    def with_parts(self) -> PoolParts:
        """What capabilities have in it."""
        return PoolParts(weakref.proxy(self), rows())

    @property
    def current(self) -> Execution | None:
        """The run in progress."""
        return self.runs.ranks.current

    # -- to what is asked for ----------------------------------------------------------------------

    def ensure(self, spec: LaunchSpec, progress: Progress) -> list[str]:
        """Make the living workers match `spec`; what a user should know, in words. Raises BadInput, with nothing
        changed, if `spec` cannot be met."""
        self.met = None
        told = self._plan_and_match(spec, progress)
        if not (told or spec.fresh or self.spec.keep_warm or self.group.source.may_change):
            self.met = spec, system.working_dir()
        return told

    def _plan_and_match(self, spec: LaunchSpec, progress: Progress) -> list[str]:
        """`ensure`, where something may have to be done."""
        self.with_living_nodes(self.group.source.check, progress)
        self.leave_dead()
        stands = self.group.topology is not None or bool(self._ended)
        merged = options.merged(spec, self.spec if stands else None)
        self.parts.on("start")
        self.parts.on_options(merged)
        env = next((asks(merged) for asks in self.parts.environment), EnvChange())
        self._source_of(merged).refuse_variables(merged, env)
        if env.at_import and self.group.nodes:
            self.stop(keep=False)
        self.have_agent(env.imported, controls_only=merged.on_hosts)
        source = self._have_nodes(merged, progress)
        self._refuse_keeping(merged)
        return [*self._match(spec, merged, env, source, progress), *self._what_ended()]

    def _source_of(self, merged: LaunchSpec) -> HostSource:
        """The source of nodes that a line asks for: the one that there is, or a new one of another kind."""
        now, kind = self.group.source, host_source.kind_of(merged)
        return now if type(now) is kind else kind(weakref.proxy(self))

    def _have_nodes(self, merged: LaunchSpec, progress: Progress) -> HostSource:
        """Have warm nodes; their source. Raises BadInput where those of a pool that runs are others."""
        now, source = self.group.source, self._source_of(merged)
        old = self.spec if self.group.topology is not None else None
        if old is not None and source.where(merged) != now.where(old):
            raise BadInput(
                f"the pool runs {now.on(old)}; %ddp stop ends it, then {source.where(merged)} starts another"
            )
        if source is not now and old is None:  # an earlier start has failed
            now.leave()
            now.end()
            self.group.source = source
        source.warm(merged, old, progress)
        return source

    def _what_ended(self) -> list[str]:
        """What is to be said of the pool before, once there is another."""
        ended, self._ended = self._ended, ""
        new = rank_words(range(self.group.world_size))
        return [f"{ended}; {new} {'are' if self.group.world_size > 1 else 'is'} new and empty"] if ended else []

    def _refuse_keeping(self, merged: LaunchSpec) -> None:
        why = self.group.nodes[0].agent.why_not_kept() if merged.keep_warm else ""
        if merged.keep_warm and why:
            raise BadInput(f"--keep-warm {lasts(merged.keep_warm)}: {why}; remove --keep-warm")

    def _match(
        self, spec: LaunchSpec, merged: LaunchSpec, env: EnvChange, source: HostSource, progress: Progress
    ) -> list[str]:
        """Have the processes that the plan of `merged` wants, on nodes whose agents are warm."""
        group, visible = self.group, options.visible_gpus(merged)
        topology = source.plan(merged)
        said = [*env.notes, *(words for planned in self.parts.planned for words in planned(merged, topology))]
        check_ranks(spec.ranks, topology.world_size, "--ranks")
        check_ranks(spec.show, topology.world_size, "--show")
        if group.running:  # nothing refuses the line any more
            group.end_retired()
        if source is not group.source:
            source.told = group.source.told
            group.source.end()
            group.source = source
        if not group.running:
            self._start_cluster(progress)
        old, calls = group.topology, self.runs.call_exits
        group.variables, group.options = env.wanted, told_to_ranks(merged)
        renewed = spec.fresh or env.renews or any(renews(merged) for renews in self.parts.renews)
        notes = group.match(topology, visible, fresh=renewed, before_end=calls, progress=progress)
        notes = [*said, *group.source.told, *notes, *lines(self.parts.notes)]
        group.source.told = []
        if spec.gpus_per_proc and not spec.visible:
            notes += topology.device_notes(visible)
        group.broken |= old is not None and topology != old
        group.topology, group.visible, self.spec = topology, visible, replace(merged, visible=visible)
        group.describe()
        assert group.agent is not None
        group.nodes[0].keep(self._keep if merged.keep_warm is None else merged.keep_warm)
        group.source.settled(self.spec)
        for started in self.parts.started if old is None else ():
            started(group.agent)
        if env.asks is not None and old is not None and not renewed:
            self.runs.run(env.asks, NullScreen())
        return notes

    def _start_cluster(self, progress: Progress) -> None:
        """Of a cluster that does not start nothing is left: the next start is whole."""
        with uninterrupted():
            try:
                self.group.source.connect(progress)
            except Exception:
                self._forget_all()
                raise

    def have_agent(self, imported: Mapping[str, str] | None = None, controls_only: bool = False) -> None:
        """Have an agent on this machine, which may still warm up; of a pool that has ended nothing is left. imported:
        variables besides the notebook's with which it imports torch. controls_only: no worker will start here."""
        self.leave_dead()
        if not self.group.nodes:
            if not system.has_loopback():
                raise PoolError(NO_LOOPBACK)
            env = {**os.environ, **(imported or {})}
            given = self._given_agent if self._given_agent and self._given_agent.alive else None
            self._given_agent = None
            if given is not None and torchrun_env.needs_new_agent(given.env, env):
                given.close()
                given = None
            agent = given or AgentClient.launch(env, ask(env) if self._takes else None, controls_only)
            self.group.take(PoolNode(agent, *self.group.hears))

    def keep(self, seconds: float | None) -> None:
        """The default of `--keep-warm`; None: as the warm process has it from its last owner."""
        self._keep = seconds
        given = self._given_agent
        if seconds is not None and given is not None and given.alive:
            given.keep(seconds)
        if seconds is not None and self.group.alive and self.spec.keep_warm is None:
            self.group.nodes[0].keep(seconds)

    # -- new processes -------------------------------------------------------------------------------

    def restart(self, ranks: Sequence[int] | None) -> list[int]:
        """New processes under the same ranks (all, if None), which are returned."""
        self.group.need_running()
        self.group.source.refuse_renewal("%ddp restart")
        chosen = check_ranks(ranks, self.group.world_size, "--ranks")
        self.group.need_folder()
        self.runs.call_exits(chosen)
        self.group.end(chosen)
        self.group.renew()
        return list(chosen)

    def renew_all(self) -> None:
        """New processes under all ranks, as torchrun has them after a failure."""
        self.have_agent()
        self.group.warm_here(lambda text: None)
        self.group.need_running()
        self.group.need_folder()
        self.group.end(sorted(self.group.workers))
        self.group.broken = False
        self.group.renew()

    # -- the end --------------------------------------------------------------------------------------

    def stop(self, keep: bool) -> None:
        """keep: whether the warm process may go on."""
        try:
            self.runs.call_exits(sorted(self.group.workers))
        finally:
            with uninterrupted():
                self._forget_all(keep)
            self._ended = ""

    def close(self) -> None:
        """As `stop`, except for what `--keep-warm` keeps; an agent that was given but never used ends too."""
        if self.group.agent is None and self._given_agent is not None:
            self._given_agent.close()
        self.stop(keep=True)

    def leave_dead(self) -> None:
        if self.group.nodes and not self.group.alive:
            self._ended = self.group.ended or self._ended
            self._forget_all()

    def with_living_nodes(self, carry_out: Callable[..., None], *args: Any) -> None:
        """Where there are none any more, the pool has ended."""
        try:
            carry_out(*args)
        except PoolNotRunning:
            with uninterrupted():
                self._forget_all()
            raise

    def _forget_all(self, keep: bool = False) -> None:
        for ended in self.parts.ranks_ended:
            ended(self.group.workers)
        self.group.source.end()
        self._remains.end(keep)
        self.group = WorkerGroup(self._remains, HostSource(weakref.proxy(self)))
        self.runs.ranks = self._connection(self.group)
        self.group.report_to(self.runs.ranks.died, self._process_ended)
        for stopped in self.parts.stopped:
            stopped()

    def _process_ended(self, event: Message) -> None:
        for hear in self.parts.process_ended:
            hear(event)

    # -- in words -------------------------------------------------------------------------------------

    def shortcomings(self) -> list[str]:
        """What does not work here, in lines."""
        group = self.group
        warm = group.nodes[0].warm if group.nodes else None
        unguarded = (warm and warm.more.get("unguarded")) or (group.stores.unguarded if group.stores else "")
        why = group.nodes[0].agent.why_not_kept() if self._keep and group.nodes else ""
        unkept = f"no process is kept warm: {why}" if why else ""
        lacks = lines(self.parts.shortcomings)
        return list(filter(None, [system.lost(), *lacks, unguarded, unkept, _torchcomms()]))


def _torchcomms() -> str:
    """That the environment replaces the process groups. Where torchcomms is not installed torch ignores it."""
    asked = os.environ.get(torchrun_env.TORCHCOMMS, "") not in torchrun_env.NOT_TORCHCOMMS
    found = find_spec("torchcomms") if asked else None
    # PyPI's torchcomms 0.0.1 is a mere placeholder
    if found is None or PathFinder.find_spec("torchcomms.hooks", found.submodule_search_locations) is None:
        return ""
    return (
        f"{torchrun_env.TORCHCOMMS} replaces torch's process groups, so deadlocks may be missed and stuck ranks "
        f"replaced; to use the usual ones, remove it and restart the notebook kernel"
    )
