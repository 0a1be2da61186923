"""Which rank a failed run is blamed on: a pure function of how its ranks ended.

A lost connection is a consequence. The cause is, in this order: the earliest rank that failed by itself; a rank that
left the collective its peers were in (it destroyed the process group, or its process ended); and only where neither is
known the rank that lost its connection.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nbddp.errors import Frame, Left, Raised, Waiting
from nbddp.execution import report
from nbddp.protocol.outcome import DIED, FAILED, REPLACED, RankExit

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
    """Whether what a rank raised is how torch says that a peer has gone."""
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
