"""The result of a run: its error, and the state that it leaves, from all facts that are known when it ends. Pure."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from nbddp.deadlock import proof
from nbddp.deadlock.positions import Position
from nbddp.errors import (
    Cause,
    Frame,
    Left,
    PoolNotRunning,
    Raised,
    RankState,
    RunFailed,
    RunHung,
    RunStopped,
    RunTimedOut,
    Waiting,
    WorkerFailed,
    in_kernel,
)
from nbddp.execution import report, supervise
from nbddp.execution.report import COLOURED, PLAIN, WEIGHTED, PlainStyle
from nbddp.launch.topology import Topology, rank_words
from nbddp.protocol import outcome
from nbddp.protocol.outcome import DIED, FAILED, REPLACED, GroupFacts, ProcessExit, RankExit
from nbddp.protocol.position import Whereabouts

SCHEDULERS = (-signal.SIGTERM, -signal.SIGKILL)  # exit codes of what a scheduler ends

UNSAID = Whereabouts()


class RankPlaces(Protocol):
    """What is known of ranks apart from any run."""

    def node_of(self, rank: int) -> int: ...
    def log_of(self, rank: int) -> str: ...
    def device_of(self, rank: int) -> str: ...
    def taken_of(self, rank: int) -> str: ...
    def fate(self) -> str: ...
    def advice_of(self, cause: Cause) -> str: ...


@dataclass(frozen=True)
class RankSeats:
    """Where the ranks of a run were. pids: rank → its process's; sees_files: whether their files are read by their
    paths, as files of this machine."""

    topology: Topology
    pids: Mapping[int, int]
    sees_files: bool


@dataclass(frozen=True)
class StuckRank:
    """One that could not end its process group. code: of its process, if that has died; said: when it was asked last,
    after the run."""

    code: int | None = None
    said: Whereabouts = UNSAID


@dataclass
class RunResult:
    """How a run has ended, or stands.

    ended: rank → how it left; running: ranks that have not. positions, facts: where each was last, and what it said.
    stuck: those that could not end their process group after the run. deadlock: the one that stood last. ended_by: why
    we ended the run, as `supervise` has it, or empty; interrupted_at: when (time.monotonic()); stops: when Stop was
    pressed. timeout: the run's, in seconds. logs: rank → file.
    """

    places: RankPlaces
    ended: Mapping[int, RankExit]
    running: tuple[int, ...] = ()
    positions: Mapping[int, Position] = field(default_factory=dict)
    facts: Mapping[int, Whereabouts] = field(default_factory=dict)
    stuck: Mapping[int, StuckRank] = field(default_factory=dict)
    deadlock: proof.Deadlock | None = None
    ended_by: str = ""
    interrupted_at: float | None = None
    stops: tuple[float, ...] = ()
    timeout: float | None = None
    logs: Mapping[int, str] = field(default_factory=dict)
    one_shot: bool = False  # whether the ranks' processes end with their program
    why: Mapping[int, str] = field(default_factory=dict)  # rank → why it was replaced, if not since it was stuck
    restarted: tuple[int, ...] = ()  # ranks that the user has restarted, which ended the run
    restarted_at: float | None = None

    def groups(self) -> dict[int, GroupFacts]:
        return {r: e.group for r, e in self.ended.items() if e.group is not None}

    def disordered(self) -> bool:
        """Whether the ranks left the run at different places, so that they cannot use one group together; what is
        left of one that was not made in full is to be ended too."""
        ends = {r: e.status for r, e in self.ended.items()}
        return bool(self.running or self.broken()) or supervise.group_is_broken(ends, self.groups())

    def untouched(self) -> bool:
        """Whether every rank has said of this run that it had nothing to do with a process group; then there is none
        to end."""
        said = self.groups()
        return all(r in said and not said[r].touched for r in self.ended) and not self.running

    def broken(self) -> list[int]:
        """Ranks whose CUDA context is broken."""
        return [r for r, e in self.ended.items() if e.lost_context and e.status not in outcome.GONE]

    def broke_group(self) -> bool:
        """Whether there was a group that cannot be used again."""
        if self.one_shot:
            return False
        had = any(g.run is not None or g.aborted for g in self.groups().values())
        missing = bool(self.broken()) or any(e.status in outcome.GONE for e in self.ended.values())
        return (had or missing) and self.disordered()

    @property
    def well(self) -> bool:
        """Every rank came to its end, and nobody ended the run."""
        return all(e.well for e in self.ended.values()) and not self.ended_by

    def error(self) -> RunFailed | PoolNotRunning | None:
        """What ended the run, with the report; None if it ended well. A report that cannot be worded is the facts."""
        try:
            found = self._error(PLAIN)
            if isinstance(found, RunFailed):
                painted = self._error(WEIGHTED if in_kernel() else COLOURED)
                assert isinstance(painted, RunFailed)
                found.painted = painted.report
            return found
        except Exception as e:
            return self._unworded(e)

    def _error(self, paint: PlainStyle) -> RunFailed | PoolNotRunning | None:
        found = blame(self.ended)
        ended = found.ended.pool_ended if found is not None else False
        if ended and isinstance(ended, str):
            return PoolNotRunning(ended)
        if ended:
            return PoolNotRunning(
                "the pool stopped while the cell was running, because its agent or its controller exited; variables on "
                "its workers are lost, and the next %%ddp cell starts a new pool"
            )
        if self.restarted_at is not None and (found is None or found.at > self.restarted_at):
            return self._restarted(paint)
        ends = {supervise.STOPPED: self._stopped, supervise.HUNG: self._hung, supervise.LATE: self._late}
        if self.ended_by in ends and (found is None or self.interrupted_at is None or found.at > self.interrupted_at):
            return ends[self.ended_by](paint)
        if found is None:
            return self._stopped(paint) if self.stops else None
        cause, states = self._cause(found), self._states
        cause = replace(cause, advice=self.places.advice_of(cause))
        has_more = {s.rank for s in states if s.status == outcome.REPLACED} | set(self.stuck)
        others = [s for s in states if s.rank != cause.rank or s.rank in has_more]
        left = sorted(r for r, e in self.ended.items() if e.well and e.at < found.at - DEATH_FIRST)
        text = report.failure_text(cause, others, dropped=self.broke_group(), paint=paint, left=left)
        return WorkerFailed(report.headline(cause), cause=cause, states=states, report=text, logs=dict(self.logs))

    def so_far(self) -> str:
        """What ends the run, in a line, while ranks are still at work: `rank 2 raised ValueError: bad batch (cell line
        9)`. Empty if somebody's wish does, or if only what another rank's end will explain is known."""
        try:
            if self.ended_by == supervise.LATE:
                return f"the run took longer than --timeout {self.timeout:g}"
            if self.ended_by == supervise.HUNG and self.deadlock is not None:
                return f"deadlock: {'; '.join(self.deadlock.words)}"
            found = blame(self.ended) if self.ended_by == supervise.FAILED else None
            if found is None or found.left is not None or lost_connection(found.ended):
                return ""
            return report.headline(self._cause(found, asks=False))
        except Exception:  # the report at the end of the run says what cannot be worded
            return ""

    def _unworded(self, error: Exception) -> WorkerFailed:
        """As it is, what is known of a run whose report could not be made."""
        facts = [f"rank {r} {e.status}: {e.chain or e.code}" for r, e in sorted(self.ended.items())]
        bad = [r for r, e in sorted(self.ended.items()) if not e.well]
        cause = Cause(rank=bad[0] if bad else 0, node=0, kind="raised")
        text = report.unworded_text(error, facts)
        states = tuple(RankState(r, e.status) for r, e in sorted(self.ended.items()))
        head = f"{rank_words(bad)} failed"
        return WorkerFailed(head, cause=cause, states=states, report=f"{head}\n{text}", logs=dict(self.logs))

    def _stopped(self, paint: PlainStyle) -> RunFailed:
        text = report.stopped_text(self._states, dropped=self.broke_group(), paint=paint)
        return RunStopped("the run was stopped by the user", states=self._states, report=text)

    def _restarted(self, paint: PlainStyle) -> RunFailed:
        others = [s.rank for s in self._states if s.rank not in self.restarted and s.status not in outcome.WELL]
        head = report.restarted_words(self.restarted, others)
        text = report.stopped_text(self._states, dropped=self.broke_group(), paint=paint, head=head)
        return RunStopped(head, states=self._states, report=text)

    def _hung(self, paint: PlainStyle) -> RunFailed:
        assert self.deadlock is not None
        words, dropped = list(self.deadlock.words), self.broke_group()
        text = report.hung_text("deadlock", words, self.deadlock.advice, self._states, dropped=dropped, paint=paint)
        return RunHung(f"deadlock: {'; '.join(words)}", states=self._states, report=text)

    def _late(self, paint: PlainStyle) -> RunFailed:
        words = list(self.deadlock.words) if self.deadlock else []
        head = f"the run took longer than --timeout {self.timeout:g}"
        advice = self.deadlock.advice if self.deadlock else ""
        text = report.hung_text(head, words, advice, self._states, dropped=self.broke_group(), paint=paint)
        return RunTimedOut(head, states=self._states, report=text)

    @cached_property
    def _states(self) -> tuple[RankState, ...]:
        """Once for the plain report and the coloured one."""
        return tuple(self._state_of(e) for _, e in sorted(self.ended.items()))

    def _cause(self, found: Blame, asks: bool = True) -> Cause:
        """asks: whether a scheduler may be asked, which takes as long as it likes."""
        ended = found.ended
        died = ended.status == outcome.DIED
        kind = "left" if found.left else "died" if died else "exit" if ended.exit_code is not None else "raised"
        cause = Cause(
            rank=ended.rank,
            node=self.places.node_of(ended.rank),
            kind=kind,
            chain=() if found.left else ended.chain,
            code=ended.code if died else ended.exit_code,
            log=self.places.log_of(ended.rank),
            left=found.left,
            stage=ended.outcome.stage if ended.outcome is not None else "",
        )
        return cause if ended.process is None or not died else self._of_dead(cause, ended.process, asks)

    def _of_dead(self, cause: Cause, process: ProcessExit, asks: bool) -> Cause:
        """Whose signal it was is asked only where a scheduler sends such."""
        taken = self.places.taken_of(cause.rank) if asks and process.code in SCHEDULERS else ""
        return replace(
            cause, lost=process.lost, taken=taken, device=self.places.device_of(cause.rank),
            peak_kib=process.peak_kib, last_words=process.last_words, overrun=process.overrun,
        )  # fmt: skip

    def _lost(self, ended: RankExit) -> str:
        """`lost its connection to rank 1`, if that is what a rank reports and another rank is the cause."""
        found = blame(self.ended)
        if lost_connection(ended) and self.restarted_at is not None and ended.at > self.restarted_at:
            return f"lost its connection to {rank_words(self.restarted)}"
        if not lost_connection(ended) or found is None or found.ended is ended:
            return ""
        dead = [e.rank for e in self.ended.values() if e.status == outcome.DIED]
        left = leaver(self.ended, ended)
        ranks = dead or ([left.rank] if left else [])
        return f"lost its connection to {rank_words(ranks) if ranks else 'another rank'}"

    def _state_of(self, ended: RankExit) -> RankState:
        return replace(self._state(ended), script=self.one_shot)

    def _state(self, ended: RankExit) -> RankState:
        if ended.rank in self.stuck:  # at the end of its group, after this run
            names, imports = self._names_lost(ended.rank)
            code = self.stuck[ended.rank].code
            if code is not None:
                words = f"{report.end_words(code)}, after it had left the cell; {report.lost_words(names, imports)}"
                return RankState(ended.rank, outcome.DIED, detail=words)
            doing = "closing the process group"
            fate = self.places.fate()
            return RankState(ended.rank, outcome.REPLACED, doing=doing, lost=names, imports=imports, fate=fate)
        if ended.rank in self.broken():
            return self._without_context(ended)
        status = ended.status
        lost = self._lost(ended) if status == outcome.FAILED else ""
        if lost:
            return RankState(ended.rank, outcome.INTERRUPTED, report.place_of(ended.chain[-1].frames), doing=lost)
        if status == outcome.FAILED:
            return RankState(ended.rank, status, detail=report.failing(self._cause(Blame(ended, ended.at))))
        if status == outcome.DIED:
            lost = (ended.process.lost if ended.process is not None else "") or report.HOST_GONE
            return RankState(ended.rank, status, detail=report.end_words(ended.code, lost))
        if status in outcome.WELL:
            return RankState(ended.rank, status)
        position = self.positions.get(ended.rank)
        chain = ended.chain
        where = position.where if position else ""
        if not where and chain:
            where = report.place_of(chain[-1].frames)
        doing = proof.waiting_words(position, self.positions) if position else ""
        names, imports = self._names_lost(ended.rank) if status == outcome.REPLACED else ((), ())
        found = RankState(ended.rank, status, where, doing=doing, lost=names, imports=imports, fate=self.places.fate())
        return replace(found, why=self.why[ended.rank]) if ended.rank in self.why else found

    def _without_context(self, ended: RankExit) -> RankState:
        context = ended.lost_context
        assert context is not None
        where = report.place_of(ended.chain[-1].frames) if ended.chain else ""
        doing = f"raised {ended.chain[-1].type}" if ended.chain else ""
        return RankState(
            ended.rank, outcome.REPLACED, where, doing=doing, lost=context.names, imports=context.imports,
            why=report.broken_words(context.why), fate=self.places.fate(),
        )  # fmt: skip

    def _names_lost(self, rank: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names and imports that went with a rank's process, as it had told them before."""
        facts = self.stuck[rank].said if rank in self.stuck else self.facts.get(rank, UNSAID)
        return facts.names or (), facts.imports or ()


# -- the rank that is blamed ------------------------------------------------------------------------

# Which rank a failed run is blamed on: a pure function of how its ranks ended.
# A lost connection is a consequence. The cause is, in this order: the earliest rank that failed by itself; a rank that
# left the collective its peers were in (it destroyed the process group, or its process ended); and only where neither
# is known the rank that lost its connection.

DEATH_FIRST = 0.5  # seconds by which a neighbour's error may come before the death that caused it
AT_ONCE = 0.05  # seconds within which equal errors of several ranks are one
PEER_GONE = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")
LOST = ("onnection", "roken pipe")  # in gloo's and the store's messages


@dataclass(frozen=True)
class Blame:
    """The rank that is named, when its failure was noticed (monotonic), and how it left, if that is what it did."""

    ended: RankExit
    at: float
    left: Left | None = None


def blame(all_of: Mapping[int, RankExit]) -> Blame | None:
    """Whom to name; None if no rank failed or died."""
    bad = [e for e in all_of.values() if e.status in (FAILED, DIED)]
    if not bad:
        return None
    own = [e for e in bad if not lost_connection(e)]
    if own:
        first = _first(own)
        return Blame(first, first.at)
    first = _first(bad)
    left = leaver(all_of, first)
    return Blame(first, first.at) if left is None else Blame(all_of[left.rank], first.at, left)


def _first(bad: list[RankExit]) -> RankExit:
    """The first in time.

    A death comes before an error of its neighbours at about the same time: they lose their
    connection to it before the agent has heard. Of ranks that raise the same at the same time
    the lowest is named, so that a saved notebook's message stays.
    """
    first = min(bad, key=lambda e: e.at)
    deaths = [e for e in bad if e.status == DIED and e.at - first.at < DEATH_FIRST]
    if deaths:
        return min(deaths, key=lambda e: e.at)
    same = [e for e in bad if e.at - first.at < AT_ONCE and e.raised_as(first)]
    return min(same, key=lambda e: e.rank)


def lost_connection(ended: RankExit) -> bool:
    """Whether a rank's exception is torch's report of a lost peer."""
    return _is_lost(ended.chain)


def _is_lost(chain: Sequence[Raised]) -> bool:
    """A group of exceptions counts if each of them does."""
    return any(
        (r.type in PEER_GONE and any(word in r.message for word in LOST))
        or (bool(r.group) and not r.more and all(map(_is_lost, r.group)))
        for r in chain
    )


def leaver(all_of: Mapping[int, RankExit], victim: RankExit) -> Left | None:
    """The rank that left the group before `victim` lost its connection; None if none is known to have."""
    until = victim.ended_ns or time.time_ns()
    inits = victim.group.inits if victim.group is not None else 0
    group = victim.call.group if victim.call is not None else ""
    found = [
        (at, left)
        for e in all_of.values()
        if not (e.status == FAILED and lost_connection(e))  # what it ended then, it had lost already
        for at, left in _departures(e, group, inits, until)
        if at <= until
    ]
    if not found:
        return None
    _, left = min(found, key=lambda f: (f[0], f[1].rank))
    return Left(left.rank, left.how, left.place, left.code, waiting(all_of, victim))


def _departures(ended: RankExit, group: str, inits: int, until: int) -> Iterable[tuple[int, Left]]:
    """When and how a rank left a group of this name ("": any). One that it ended before so many inits had begun was of
    an earlier init than the group that was lost."""
    for left in ended.outcome.group_exits if ended.outcome is not None else ():
        if left.inits >= inits and (not left.group or not group or left.group == group):
            place = Frame(*left.place, user=True) if left.place else None
            yield left.ended_ns, Left(ended.rank, "destroyed", place)
    gone_ns = ended.process.seen_ns if ended.process is not None else None
    if gone_ns is not None and ended.status not in (DIED, REPLACED):
        heard_late = until < gone_ns <= until + DEATH_FIRST * 1e9
        yield until if heard_late else gone_ns, Left(ended.rank, "ended", code=ended.code)


def waiting(all_of: Mapping[int, RankExit], victim: RankExit) -> Waiting:
    """Where `victim` was, and the other ranks that were in the same call."""
    mine = _place_and_call(victim)
    ranks = [r for r, e in all_of.items() if e.call is not None and _place_and_call(e) == mine]
    place, call = mine
    return Waiting(tuple(sorted({victim.rank, *ranks})), call, place)


def _place_and_call(ended: RankExit) -> tuple[str, str]:
    chain = ended.chain
    place = report.place_of(chain[-1].frames) if chain else ""
    return place, report.call_words(ended.call)
