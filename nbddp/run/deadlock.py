"""Who waits for whom, and whether that can ever end: pure functions over the ranks' places.

A rank waits in a call for the ranks that have not done their part of it. A rank is stuck if it
waits for a rank that cannot come: one that has finished the cell, failed or died, or one
that is itself stuck. The largest set of ranks that is closed under this rule is a deadlock:
no event inside the run can end it. A rank that computes, sleeps or does not answer is never
stuck, and neither is a rank that waits for it alone; and a call that everybody has entered in
the same way is a transfer, however long it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nbddp.run.report import place
from nbddp.topology import rank_words

UNIFORM = {"all_reduce", "allreduce", "broadcast", "reduce", "all_gather", "barrier"}  # same shape and dtype everywhere
IN_TORCH = ("collective", "send", "recv", "store", "init", "new_group", "wait")
GONE = ("finished", "failed", "died", "absent")


@dataclass(frozen=True)
class Call:
    """A call that blocks. `op` is what the user wrote, `made_of` the collective under it (`all_gather` under
    `gather_object`), `what` its tensors (`float[4]`); `group` is torch's name, `ranks` its members."""

    op: str
    kind: str
    group: str = ""
    ranks: tuple[int, ...] = ()
    sequence: int = 0
    made_of: str = ""
    what: str = ""
    peer: int | None = None
    tag: int = 0

    def words(self) -> str:
        """`all_reduce #14`, `recv from rank 1`, `init_process_group`."""
        if self.kind in ("send", "recv"):
            if self.peer is None:
                return self.op
            return f"{self.op} {'to' if self.kind == 'send' else 'from'} rank {self.peer}"
        number = f" #{self.sequence}" if self.sequence else ""
        if self.kind == "backward":
            return f"backward, {self.made_of}{number}" if self.made_of else "backward"
        if self.kind == "wait":
            return f"wait for {self.made_of}{number}" if self.made_of else "wait for a send or receive"
        return f"{self.op}{number}"

    def fits(self, made_of: str, what: str) -> bool:
        """Whether another rank's call can be the other end of this one."""
        return self.made_of == made_of and (made_of not in UNIFORM or self.what == what)


@dataclass(frozen=True)
class Position:
    """A rank at one moment.

    `state` is "running", "blocked", "silent" (does not answer: native code that holds the interpreter),
    "finished", "failed", "died" or "absent" (its rank takes no part in the run). `past`: (group, sequence) → what
    was called there.
    """

    rank: int
    state: str
    where: str = ""
    line: int | None = None
    call: Call | None = None
    inits: int = 0
    groups: int = 0
    past: Mapping[tuple[str, int], tuple[str, str]] = field(default_factory=dict)
    cpu: float = 0.0


@dataclass(frozen=True)
class Deadlock:
    """Ranks that wait for what cannot happen. `words` is one sentence per thing that is wrong."""

    ranks: tuple[int, ...]
    words: tuple[str, ...]
    advice: str = ""


Positions = Mapping[int, Position]


def position_of(rank: int, facts: Mapping[str, Any] | None, before: Position | None, elapsed: float) -> Position:
    """A rank's place from what its worker answered (None: it did not), and its place `elapsed` seconds earlier."""
    if facts is None:
        return Position(rank, "silent", where=before.where if before else "")
    past = {
        (group, sequence): (op, what)
        for group, calls in facts.get("history", {}).items()
        for sequence, op, what in calls
    }
    counts = {"inits": facts.get("inits", 0), "groups": facts.get("groups", 0), "past": past}
    if facts.get("idle"):
        return Position(rank, "running" if facts.get("threads") else "finished", **counts)
    user = facts["user"]
    where, line = (place(*user), user[1] if user[0].startswith("Cell In[") else None) if user else ("", None)
    call = _call_of(facts["call"], facts["pending"])
    used = facts["cpu"] - before.cpu if before is not None else elapsed
    blocked = call is not None and not facts["threads"] and _is_blocked(call, facts, used < 0.2 * elapsed)
    return Position(
        rank, "blocked" if blocked else "running", where, line, call if blocked else None, cpu=facts["cpu"], **counts
    )


def _call_of(call: Mapping[str, Any] | None, pending: Mapping[str, Any] | None) -> Call | None:
    if call is None and pending is None:
        return None
    if call is None:
        call = {"op": pending["op"] if pending else "", "kind": "pending"}
    known: dict[str, Any] = {
        "op": call["op"],
        "kind": call["kind"],
        "peer": call.get("peer"),
        "tag": call.get("tag", 0),
    }
    if pending is not None and call["kind"] in ("collective", "wait", "backward", "pending"):
        known.update(
            group=pending["group"], ranks=tuple(pending["ranks"]), sequence=pending["sequence"],
            made_of=pending["op"], what=pending["what"],
        )  # fmt: skip
    return Call(**known)


def _is_blocked(call: Call, facts: Mapping[str, Any], still: bool) -> bool:
    """Whether the main thread waits in `call`; `still`: its process has used hardly any CPU since the last look."""
    if call.kind == "drop":
        return True
    waits, pending = facts["waits"], facts["pending"]
    if pending is not None and "nccl" in pending["backend"]:
        return bool(waits != "sleep")  # CUDA waits may spin
    if call.kind in ("store", "init", "new_group") or (pending is not None and pending["backend"] == "store"):
        return bool(waits != "busy")  # a store's client sleeps in poll or read
    if call.kind in IN_TORCH:
        return waits in ("futex", "")
    return waits in ("futex", "") and still and pending is not None


def waits_for(me: Position, all_of: Positions) -> tuple[tuple[int, ...], bool]:
    """The ranks that `me` waits for, and whether all of them must come (False: any one may free it)."""
    call = me.call
    if call is None or call.kind == "drop":  # ending a group waits for nobody for long: its connections are shut
        return (), True
    others = [p for r, p in sorted(all_of.items()) if r != me.rank]
    if call.kind in ("send", "recv") and call.peer is not None:
        peer = all_of.get(call.peer)
        met = peer is not None and peer.call is not None and _meet(me, peer)
        return (() if met else (call.peer,)), True
    if call.kind == "init":
        return tuple(p.rank for p in others if p.inits < me.inits), True
    if call.kind == "new_group":
        return tuple(p.rank for p in others if p.groups < me.groups), True
    if call.sequence:
        members = call.ranks or tuple(all_of)
        return tuple(p.rank for p in others if p.rank in members and not _did(p, call)), True
    return tuple(p.rank for p in others), False


def _meet(me: Position, peer: Position) -> bool:
    mine, theirs = me.call, peer.call
    assert mine is not None
    assert theirs is not None
    return (
        theirs.kind != mine.kind
        and theirs.kind in ("send", "recv")
        and theirs.peer == me.rank
        and mine.tag == theirs.tag
    )


def _did(other: Position, call: Call) -> bool:
    """Whether `other` has entered `call`, or has been through it."""
    now = other.call
    if now is not None and (now.group, now.sequence) == (call.group, call.sequence):
        return call.fits(now.made_of, now.what)
    then = other.past.get((call.group, call.sequence))
    if then is not None:
        return call.fits(*then)
    reached = [s for g, s in other.past if g == call.group]
    if now is not None and now.group == call.group:
        reached.append(now.sequence)
    return max(reached, default=0) > call.sequence  # it is past this one, though the record of it is not here


def diagnose(all_of: Positions) -> Deadlock | None:
    """The deadlock among these ranks, if there is one."""
    waits = {r: waits_for(p, all_of) for r, p in all_of.items() if p.state == "blocked"}
    stuck = {r for r, (ranks, _) in waits.items() if ranks}
    while True:
        never = stuck | {r for r, p in all_of.items() if p.state in GONE}
        free = set()
        for r in stuck:
            ranks, every = waits[r]
            hopeless = any(w in never for w in ranks) if every else all(w in never for w in ranks)
            if not hopeless:
                free.add(r)
        if not free:
            break
        stuck -= free
    if not stuck:
        return None
    ranks = tuple(sorted(stuck))
    return Deadlock(ranks, tuple(_sentences(ranks, all_of)), _advice(ranks, all_of))


# -- words -----------------------------------------------------------------------------------


def _sentences(stuck: Iterable[int], all_of: Positions) -> list[str]:
    found, left = [], list(stuck)
    for rank in list(left):
        if rank in left:
            said, ranks = _mismatch(all_of[rank], all_of)
            if said and said not in found:
                found.append(said)
                left = [r for r in left if r not in ranks]
    if (
        not found
        and left
        and all(_call(all_of[r]).kind in ("send", "recv") and _call(all_of[r]).peer in left for r in left)
    ):
        crossed = [f"rank {r} waits in {_call(all_of[r]).words()}{_at(all_of[r])}" for r in left]
        return [", and ".join(crossed) if len(crossed) < 3 else "; ".join(crossed)]
    by_call: dict[tuple[str, str], list[int]] = {}
    for r in left:
        by_call.setdefault((_call(all_of[r]).words(), _at(all_of[r])), []).append(r)
    waiting = [f"{rank_words(ranks)} {_s('wait', ranks)} in {words}{at}" for (words, at), ranks in by_call.items()]
    awaited = {w for r in left for w in waits_for(all_of[r], all_of)[0]} - set(left)
    ends: dict[str, list[int]] = {}
    for w in sorted(awaited):
        ends.setdefault(_fate(all_of.get(w)), []).append(w)
    missing = [f"{rank_words(ranks)} {_plural(words) if len(ranks) > 1 else words}" for words, ranks in ends.items()]
    if waiting:
        found.append("; ".join([*waiting, *missing]))
    return found


def _mismatch(me: Position, all_of: Positions) -> tuple[str, list[int]]:
    """Where ranks called different things as the same collective of a group: the sentence and its ranks."""
    call = me.call
    if call is None or not call.sequence:
        return "", []
    called: dict[tuple[str, str, str], list[int]] = {}
    differs = False
    for r, p in sorted(all_of.items()):
        now = p.call
        if now is not None and (now.group, now.sequence) == (call.group, call.sequence):
            what, at = (now.made_of, now.what), _at(p)
        elif (call.group, call.sequence) in p.past:
            what, at = p.past[call.group, call.sequence], ""
        else:
            continue
        differs = differs or not call.fits(*what)
        called.setdefault((*what, at), []).append(r)
    if not differs:
        return "", []
    ops = {op for op, _, _ in called}
    each = ", ".join(
        f"{what or 'no tensor' if len(ops) == 1 else op} on {rank_words(ranks)}{at}"
        for (op, what, at), ranks in called.items()
    )
    ranks = [r for some in called.values() for r in some]
    if len(ops) == 1:
        return f"{ops.pop()} #{call.sequence} has different shapes or dtypes: {each}", ranks
    return f"collective #{call.sequence} is a different one on different ranks: {each}", ranks


def _fate(p: Position | None) -> str:
    if p is None:
        return "is no rank of this pool"
    return {
        "absent": "takes no part in this run",
        "finished": "has finished the cell without calling it",
        "failed": "has failed",
        "died": "has died",
    }.get(p.state, f"waits in {p.call.words()}{_at(p)}" if p.call else "is running")


def _advice(stuck: Iterable[int], all_of: Positions) -> str:
    """What usually is behind a deadlock of this shape."""
    ranks = list(stuck)
    kinds = {_call(all_of[r]).kind for r in ranks}
    awaited = {w for r in ranks for w in waits_for(all_of[r], all_of)[0]} - set(ranks)
    finished = [w for w in awaited if w in all_of and all_of[w].state == "finished"]
    if finished and kinds & {"backward"}:
        return (
            "Ranks took different numbers of steps: give every rank equally many batches "
            "(DistributedSampler, drop_last=True), or train inside torch.distributed.algorithms.join.Join."
        )
    if finished and ranks == [0]:
        return (
            "Only rank 0 makes this call: every rank of the group must. DDP's forward may call one too; "
            "for work on one rank alone use model.module, and a barrier on all ranks after it."
        )
    if kinds <= {"send", "recv"}:
        return "One side must send while the other receives: order the calls by rank, or use batch_isend_irecv."
    return ""


def waiting_words(p: Position, all_of: Positions) -> str:
    """`waiting in all_reduce #14 for rank 1`, for a blocked rank; or empty."""
    if p.state == "silent":
        return "in native code that holds the interpreter"
    if p.call is None:
        return ""
    ranks, every = waits_for(p, all_of)
    if not ranks:
        return f"in {p.call.words()}"
    if p.call.kind in ("send", "recv") and p.call.peer is not None:
        return f"waiting in {p.call.words()}"  # which names the rank
    one_of = "" if every or len(ranks) == 1 else "any of "
    return f"waiting in {p.call.words()} for {one_of}{rank_words(ranks)}"


def _call(p: Position) -> Call:
    assert p.call is not None
    return p.call


def _at(p: Position) -> str:
    if p.line is not None:
        return f" (line {p.line})"
    return f" ({p.where})" if p.where else ""


def _plural(words: str) -> str:
    return words.replace("has ", "have ", 1).replace("waits ", "wait ", 1).replace("takes ", "take ", 1)


def _s(verb: str, ranks: list[int]) -> str:
    return verb if len(ranks) > 1 else f"{verb}s"
