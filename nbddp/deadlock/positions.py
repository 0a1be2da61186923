"""Where one rank is at one moment, from what its worker answers: what is evident, and what only seems so. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from nbddp.errors import RankStatus, place
from nbddp.protocol.codec import from_json
from nbddp.protocol.position import BlockingCall, CallHistory, Channel, PendingCollective, Place, Whereabouts
from nbddp.protocol.run_spec import Reply

NEW_GROUP = "new_group"
UNIFORM = {
    NEW_GROUP,
    "all_reduce",
    "allreduce",
    "broadcast",
    "reduce",
    "all_gather",
    "barrier",
}  # same shape and dtype everywhere
IN_TORCH = ("collective", "send", "recv", "store", "init", "new_group", "wait")
GONE = (RankStatus.FINISHED, RankStatus.FAILED, RankStatus.DIED, RankStatus.ABSENT)
APART = "apart"  # a call in which it waits for what the pool does not know: seen, and never part of a verdict
NCCL, STORE = "nccl", "store"  # what a collective waits with
SEND, RECV, ANY = "s", "r", -1  # the sides of a channel; a receive from any source
SENDS = "send"  # a kind of call
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
DESTROY = "destroy_process_group"
NOT_BEGUN = "not begun yet"
LITTLE = 0.2  # of the time between two looks: a process that has used less CPU does not compute

NO_HISTORY = CallHistory()


@dataclass(frozen=True)
class Call:
    """A call that blocks.

    `op` is the name that the user wrote, `made_of` the collective under it (`all_gather` under `gather_object`), `what`
    its tensors (`float[4]`); `root`: its source or destination, if any. `group` is the group's name, `ranks` its
    members, `of` what is said of it. A send or receive is the `nth` on its `channel`. `seen`: that it is not done is
    evident. `note`: what else is known of what it waits for; `missing`: ranks of its `world` that no pool has.
    """

    op: str
    kind: str
    group: str = ""
    ranks: tuple[int, ...] = ()
    sequence: int = 0
    made_of: str = ""
    what: str = ""
    root: int | None = None
    peer: int | None = None
    channel: Channel | None = None
    nth: int = 0
    of: str = ""
    seen: bool = True
    epoch: tuple[int, int] = (0, 0)
    in_thread: bool = False
    note: str = ""
    world: int = 0
    missing: tuple[int, ...] = ()

    def describe(self) -> str:
        """`all_reduce #14`, `recv from rank 1`, `init_process_group`."""
        return f"{self._words()}{' in a thread' if self.in_thread else ''}"

    def _words(self) -> str:
        if self.kind in ("send", "recv"):
            return f"{self.op if self.peer is None else f'{self.op} {_to(self.kind == SENDS, self.peer)}'}{self.of}"
        number = f" #{self.sequence}{self.of}" if self.sequence else ""
        if self.kind == "backward":
            made_of = self.made_of or ("collective" if number else "")
            return f"backward, {made_of}{number}" if made_of else "backward"
        if self.kind == DESTROY and self.made_of:
            return f"{self.op} for its pending {self.made_of}{number}"
        if self.kind == "wait":
            return f"wait() for {self.made_of}{number}" if self.made_of else self._wait_words()
        return f"{self.op}{number}"

    def _wait_words(self) -> str:
        if self.channel is None:
            return "wait() for a send or receive"
        side, _, source, to, _ = self.channel
        if side == SEND:
            return f"wait() for a send {_to(True, to)}{self.of}"
        return f"wait() for a recv{'' if source == ANY else f' {_to(False, source)}'}{self.of}"

    def fits(self, made_of: str, what: str, root: int | None = None) -> bool:
        """Whether another rank's call can be the other end of this one; one that is not known can."""
        if not (made_of and self.made_of):
            return True
        same_root = None in (self.root, root) or self.root == root
        return self.made_of == made_of and same_root and (made_of not in UNIFORM or self.what == what)


def _to(sends: bool, peer: int) -> str:
    return f"{'to' if sends else 'from'} rank {peer}"


@dataclass(frozen=True)
class Position:
    """A rank at one moment.

    `why`: the error that its answer was, if its state is unknown. `acts`: what on it may act besides the thread that
    was seen, in words; `sure`: nothing does, and it was seen in the same wait in two rounds of looks. `children`: how
    many processes descend from it. `moved`: it has read or written since the last look; where Linux does not count its
    `bytes` (None), it has computed. `rests`: it is not known to be blocked, and waits for something while its
    process and its children do nothing; `also`: what it and its other threads seem to wait in then.

    `stopped`: it waits in its debugger for the reader. `unanswered`: for how many seconds it has not answered.
    `advice`: what would help the processes that it has started.

    `past`: (group, sequence) → what was called there, and with which root. `latest`: group → number of its last
    collective; `blind`: groups of which more was called than is known; `records`: that what is not in `past` was
    not called. `channels`: how often it has sent and received. `informed`: that it has said all this.
    """

    rank: int
    state: RankStatus
    where: str = ""
    line: int | None = None
    call: Call | None = None
    inits: int = 0
    groups: int = 0
    past: Mapping[tuple[str, int], tuple[str, str, int | None]] = field(default_factory=dict)
    cpu: float = 0.0
    sure: bool = True
    acts: tuple[str, ...] = ()
    children: int = 0
    children_cpu: int = 0
    rests: bool = False
    also: tuple[str, ...] = ()
    moved: bool = False
    bytes: int | None = 0
    token: tuple[Any, ...] = ()
    latest: Mapping[str, int] = field(default_factory=dict)
    blind: frozenset[str] = frozenset()
    records: bool = True
    channels: Mapping[Channel, int] = field(default_factory=dict)
    informed: bool = True
    why: str = ""
    stopped: bool = False
    unanswered: float = 0.0
    advice: str = ""

    @property
    def alone(self) -> bool:
        return not self.acts

    @cached_property
    def reached(self) -> Mapping[str, int]:
        """Group → the highest number of a collective in `past` and `latest`."""
        found = dict(self.latest)
        for group, sequence in self.past:
            found[group] = max(found.get(group, 0), sequence)
        return found

    def knows(self, group: str) -> bool:
        """Whether all that this rank has called in a group is known."""
        return self.informed and group not in self.blind and (self.records or group in self.latest)


Positions = Mapping[int, Position]


def facts_of(reply: Reply) -> Whereabouts | None:
    """What a rank answered to `where` or `stack`; None if its answer was lost."""
    if reply.failed:
        return Whereabouts(failed=reply.failed)
    return None if reply.answer is None else from_json(Whereabouts, reply.answer)


def position_of(rank: int, facts: Whereabouts | None, before: Position | None, elapsed: float) -> Position:
    """A rank's place from what its worker answered (None: it did not), and its place `elapsed` seconds earlier."""
    if facts is None:
        return _unanswered(Position(rank, RankStatus.SILENT, informed=False), before, elapsed)
    if facts.failed:
        return Position(rank, RankStatus.UNKNOWN, informed=False, why=facts.failed)  # it may be elsewhere by now
    elapsed += before.unanswered if before is not None else 0.0
    used = facts.cpu - before.cpu if before is not None else elapsed
    known = _known(rank, facts, before, computes=used >= LITTLE * elapsed)
    # what could act at the last look may be acting at this one, unseen: a handler that has just removed itself
    acts = facts.acts or (before is not None and before.acts)
    if facts.idle:
        if not facts.begun:  # it is still starting, or has other work: nobody may say that it has finished
            return replace(known, where=NOT_BEGUN)
        return known if acts else replace(known, state=RankStatus.FINISHED)
    user = facts.user
    where, line = (place(*user), user[1] if user[0].startswith("Cell In[") else None) if user else ("", None)
    if facts.stopped:
        at = ", ".join(filter(None, (where, "stopped by breakpoint()")))
        return replace(known, where=at, line=line, sure=False, stopped=True)
    at_work = replace(known, where=where, line=line)
    return _at_work(at_work, facts, before, acts=bool(acts), still=used < LITTLE * elapsed and not known.moved)


def _unanswered(silent: Position, before: Position | None, elapsed: float) -> Position:
    """A rank that was late, with what the next answer is compared with."""
    if before is None:
        return silent
    late = before.unanswered + elapsed
    counts = replace(silent, cpu=before.cpu, bytes=before.bytes, children=before.children)
    return replace(counts, children_cpu=before.children_cpu, where=before.where, unanswered=late)


def _at_work(known: Position, facts: Whereabouts, before: Position | None, *, acts: bool, still: bool) -> Position:
    """Whether it is blocked, or rests. acts: whether another thread may act; still: it hardly computes."""
    waits = facts.child_waits  # whoever looks again and again for a server computes a little
    children_rest = before is not None and known.children_cpu - before.children_cpu <= len(waits)
    call = _call_of(facts)
    blocked = call is not None and _is_blocked(call, facts, still)
    token = (*facts.token, call)
    also = [] if call is None or blocked else [f"in {call.describe()}"]
    also += [_also_words(*row) for row in facts.also]
    if known.children and not also and not blocked:
        also = _children_words(known.children, [words for words, _ in waits])
    return replace(
        known,
        state=RankStatus.BLOCKED if blocked else RankStatus.RUNNING,
        call=call if blocked else None,
        token=token,
        sure=before is not None and before.token == token and not acts,
        rests=not blocked and still and children_rest and facts.waits in ("futex", "sleep"),
        also=tuple(also),
        advice=next((each for _, each in waits if each), ""),
    )


def _children_words(count: int, waits: list[str]) -> list[str]:
    """`2 of its 3 child processes are connecting to a store at localhost:29511, where no process answers`."""
    if not waits:
        return [f"its {count} child process{'es do' if count > 1 else ' does'} nothing"]
    found = []
    for words, n in Counter(waits).items():
        who = f"{n} of its {count} child processes" if count > 1 else "its child process"
        found.append(f"{who} {'are' if n > 1 else 'is'} {words}")
    return found


def _also_words(name: str, op: str, at: Place | None) -> str:
    """`thread "asyncio_0" is in barrier (cell line 3)`."""
    return f'thread "{name}" is in {op}{f" ({place(*at)})" if at else ""}'


def _known(rank: int, facts: Whereabouts, before: Position | None, computes: bool) -> Position:
    """What a rank is known to have called, and whether it moves bytes."""
    past = facts.past or NO_HISTORY
    return Position(
        rank, RankStatus.RUNNING, acts=facts.acts, children=facts.children[0], children_cpu=facts.children[1],
        inits=facts.inits, groups=facts.groups, cpu=facts.cpu, bytes=facts.bytes,
        past={(g, n): (op, what, root) for g, calls in past.history.items() for n, op, what, root in calls},
        latest=past.latest, blind=frozenset(past.blind), records=past.records, channels=dict(past.channels),
        informed=facts.past is not None,
        moved=computes if facts.bytes is None else before is None or facts.bytes != before.bytes,
    )  # fmt: skip


def _call_of(facts: Whereabouts) -> Call | None:
    seen, pending = facts.call, facts.pending
    if seen is None and pending is None:
        return None
    if seen is None:
        assert pending is not None
        seen = BlockingCall(pending.op or "collective", "pending")
    op = f"{seen.op} #{facts.inits}" if seen.kind == "init" and facts.inits > 1 else seen.op
    call = Call(
        op, seen.kind, peer=seen.peer, note=seen.note, world=seen.world, missing=seen.missing, in_thread=facts.thread
    )
    if seen.made is not None:
        key, number, ranks = seen.made
        return replace(call, group=key, sequence=number, ranks=ranks, made_of=NEW_GROUP, what=str([*ranks]))
    if seen.channel is not None:
        of = "" if pending is None else _of(pending)
        return replace(call, channel=seen.channel, nth=seen.nth, ranks=seen.members, of=of)
    if pending is None or seen.kind not in ("collective", "wait", "backward", "pending", DESTROY):
        return call
    return replace(
        call, group=pending.group, ranks=pending.ranks, sequence=pending.sequence, made_of=pending.op,
        what=pending.what, root=pending.root, of=_of(pending), seen=pending.seen, epoch=pending.epoch,
    )  # fmt: skip


def _of(pending: PendingCollective) -> str:
    """` of group {0, 1}`, with its description if the user gave one; ` of the second group {0, 1} (made at cell line
    5)` if there are several; nothing for the default group."""
    if pending.default:
        return ""
    made = f"made at {place(*pending.made_at)}" if pending.made_at else ""
    more = ", ".join(filter(None, (pending.named, made)))
    which = f"the {_ordinal(pending.nth)} " if pending.nth else ""
    return f" of {which}group {{{', '.join(map(str, sorted(pending.ranks)))}}}{f' ({more})' if more else ''}"


def _ordinal(n: int) -> str:
    """`second`, `12th`, `22nd`."""
    if n <= len(ORDINALS):
        return ORDINALS[n - 1]
    return f"{n}{'th' if n % 100 in (11, 12, 13) else {1: 'st', 2: 'nd', 3: 'rd'}.get(n % 10, 'th')}"


def _is_blocked(call: Call, facts: Whereabouts, still: bool) -> bool:
    """Whether the thread waits in `call`; `still`: its process hardly computes, and moves nothing."""
    if call.kind == "drop":
        return True
    waits, pending = facts.waits, facts.pending
    backend = pending.backend if pending is not None else ""
    if backend == NCCL:
        return waits in ("futex", "busy")  # CUDA waits may spin; that it does not move on is seen in two looks
    if call.kind in ("store", "init", "new_group", APART) or backend == STORE:
        return bool(waits != "busy")  # a store's client sleeps in poll or read
    if call.kind in IN_TORCH and (facts.exact or pending is None):
        return waits in ("futex", "")
    return waits in ("futex", "") and still and pending is not None
