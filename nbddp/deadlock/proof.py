"""Who waits for whom, and whether that can ever end: pure functions over the ranks' places.

A rank waits in a call for ranks that are known not to have done their part. A send waits for the receive of the same
number on its channel; a collective waits for members that have not called it. A rank is stuck if it waits for a rank
that cannot come. That one has finished the cell, failed, died, or is stuck itself. The largest set of ranks that is
closed under this rule is a deadlock: no event inside the run can end it.

Only what is evident counts. A rank that computes, sleeps or does not answer is never stuck. Nor is one that was not
seen in the same wait in two rounds of looks. One round ends before the next begins, so at one instant all were in their
waits. A rank that waits for such a rank is not stuck either. What both sides have entered in the same way is a
transfer, however long it takes; entered in different ways, it is none once no byte moves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from nbddp.deadlock.positions import ANY, APART, GONE, NEW_GROUP, RECV, SEND, Call, Position, Positions
from nbddp.errors import RankStatus
from nbddp.launch.topology import rank_words


@dataclass(frozen=True)
class Deadlock:
    """Ranks that wait for what cannot happen. `words` is one sentence per thing that is wrong."""

    ranks: tuple[int, ...]
    words: tuple[str, ...]
    advice: str = ""


# collectives that no rank leaves before all have entered, by the names that the recorders of gloo and NCCL have
OF_ALL = ("all_reduce", "allreduce", "all_gather", "allgather", "barrier", "reduce_scatter")
FROM_ROOT = ("broadcast", "scatter")  # their root is a source, that of the others a destination
MOST = 3  # things that may act on a rank, told
PLURALS = {"has": "have", "waits": "wait", "takes": "take", "is": "are", "does": "do"}
Waits = tuple[tuple[int, ...], bool]  # the ranks that a rank waits for, and whether all must come (False: any one)


def waits_for(me: Position, all_of: Positions, *, seems: bool = False) -> Waits:
    """The ranks that `me` waits for, and whether all of them must come (False: any one may free it).

    seems: also those of which it only seems so, for the eyes. Ending a group waits for nobody for long: its
    connections are shut.
    """
    call = me.call
    if call is None or call.kind == "drop" or not (call.seen or seems):
        return (), True
    others = [p for r, p in sorted(all_of.items()) if r != me.rank]
    if call.channel is not None:
        return _peers(me, call, all_of, seems)
    if call.kind == "init":
        return tuple(p.rank for p in others if p.inits < me.inits), True
    if call.kind == NEW_GROUP:
        late = [p.rank for p in others if p.groups < me.groups and p.inits <= me.inits]
        makes_another = [p.rank for p in others if p.rank in call.ranks and _makes_another(call, p)]
        return tuple(dict.fromkeys([*late, *makes_another])), True
    if call.sequence:
        members = frozenset(call.ranks or all_of)
        return tuple(p.rank for p in others if p.rank in members and _awaits(me, call, p, seems)), True
    if call.kind != "store" or (not seems and any(p.children for p in all_of.values())):  # a child may set the key
        return (), True
    return tuple(p.rank for p in others), False


def _makes_another(call: Call, other: Position) -> bool:
    """Whether `other` has made, or makes, a group of other ranks as its `call.sequence`-th one."""
    then = _called_as(other, call)
    return bool(call.sequence) and then is not None and not call.fits(*then)


def _peers(me: Position, call: Call, all_of: Positions, seems: bool) -> Waits:
    """Whom a send or receive waits for: nobody if the other end has made as many calls on the channel."""
    assert call.channel is not None
    side, group, source, to, tag = call.channel

    def made(rank: int, side: str, source: int) -> float:
        peer = all_of.get(rank)
        if peer is not None and not (peer.informed or seems):
            return float("inf")
        return peer.channels.get((side, group, source, to, tag), 0) if peer is not None else 0

    if side == SEND:
        came = made(to, RECV, source) + made(to, RECV, ANY)
        return (() if came >= call.nth else (to,)), True
    if source != ANY:
        return (() if made(source, SEND, source) >= call.nth else (source,)), True
    members = tuple(r for r in sorted(call.ranks or all_of) if r != me.rank)
    # another receive may have taken what was sent: then this one is not seen to wait
    return (() if sum(made(r, SEND, r) for r in members) >= call.nth else members), False


def _awaits(me: Position, call: Call, other: Position, seems: bool) -> bool:
    """Whether `other` is known not to have entered `call`, or to have entered it in another way."""
    then = _called_as(other, call)
    if then is not None:
        return not call.fits(*then) and not (me.moved or other.moved)
    reached = other.reached.get(call.group, 0)
    if other.call is not None and other.call.group == call.group:
        reached = max(reached, other.call.sequence)
    passed = reached > call.sequence  # it is past this one, though the record of it is not here
    return not passed and other.latest.get(call.group, 0) < call.sequence and (seems or other.knows(call.group))


def _called_as(other: Position, call: Call) -> tuple[str, str, int | None] | None:
    """What `other` has called as this collective: operation, tensors, root."""
    now = other.call
    if now is not None and (now.group, now.sequence) == (call.group, call.sequence):
        return (now.made_of, now.what, now.root) if now.seen else (call.made_of, call.what, call.root)
    return other.past.get((call.group, call.sequence))


def diagnose(all_of: Positions, program: str = "cell") -> Deadlock | None:
    """The deadlock among these ranks, if there is one. program: what they run, as the sentences name it."""
    waits = {r: waits_for(p, all_of) for r, p in all_of.items() if p.state == RankStatus.BLOCKED and p.sure}
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
    ranks, told = tuple(sorted(stuck)), _told_apart(all_of)
    return Deadlock(ranks, tuple(_sentences(ranks, told, program)), _advice(ranks, told))


def held(all_of: Positions, left: Collection[int]) -> set[int]:
    """Ranks seen once, after a failure, in a collective that cannot end for them any more.

    left: ranks that have left the run and have said since what they had called. Only collectives count that no rank
    leaves before all have entered. So one look is enough: a rank of `left` calls nothing any more, and nor does a rank
    that waits for it. A circle of ranks that are at work is none of this; see `diagnose`.
    """
    waits = {
        r: waits_for(p, all_of)[0]
        for r, p in all_of.items()
        if p.state == RankStatus.BLOCKED and p.alone and p.call is not None and p.call.made_of in OF_ALL
    }
    gone = set(left)
    while more := {r for r, ranks in waits.items() if r not in gone and not gone.isdisjoint(ranks)}:
        gone |= more
    return gone - set(left)


def _told_apart(all_of: Positions) -> Positions:
    """Collectives of an older group say so where another rank is past that group's init."""
    newest = max((p.inits for p in all_of.values()), default=0)
    told = dict(all_of)
    for r, p in all_of.items():
        if p.call is not None and p.call.sequence and newest > 1 and p.call.epoch[1] not in (0, newest):
            told[r] = replace(p, call=replace(p.call, of=f"{p.call.of} of the group of init #{p.call.epoch[1]}"))
    return told


# -- words -----------------------------------------------------------------------------------


def _sentences(stuck: Iterable[int], all_of: Positions, program: str) -> list[str]:
    found, left = [], list(stuck)
    for rank in list(left):
        if rank in left:
            said, ranks = _mismatch(all_of[rank], all_of)
            if said and said not in found:
                found.append(said)
                left = [r for r in left if r not in ranks]
    if not found and left and all(_peer(_call(all_of[r])) in left for r in left):
        crossed = [f"rank {r} waits in {_call(all_of[r]).describe()}{_at(all_of[r])}" for r in left]
        return [", and ".join(crossed) if len(crossed) < 3 else "; ".join(crossed)]
    by_call: dict[tuple[str, str], list[int]] = {}
    for r in left:
        by_call.setdefault((_call(all_of[r]).describe(), _at(all_of[r])), []).append(r)
    waiting = [f"{rank_words(ranks)} {_s('wait', ranks)} in {words}{at}" for (words, at), ranks in by_call.items()]
    awaited = {w for r in left for w in waits_for(all_of[r], all_of)[0]} - set(left)
    ends: dict[str, list[int]] = {}
    for w in sorted(awaited):
        ends.setdefault(_fate(all_of.get(w), program), []).append(w)
    missing = [f"{rank_words(ranks)} {_plural(words) if len(ranks) > 1 else words}" for words, ranks in ends.items()]
    if waiting:
        found.append("; ".join([*waiting, *missing]))
    return found


def _peer(call: Call) -> int | None:
    """The one rank at the other end of a send or receive."""
    if call.channel is None:
        return None
    side, _, source, to, _ = call.channel
    return to if side == SEND else None if source == ANY else source


def _mismatch(me: Position, all_of: Positions) -> tuple[str, list[int]]:
    """Where ranks called different things as the same collective of a group: the sentence and its ranks."""
    call = me.call
    if call is None or not call.sequence:
        return "", []
    called: dict[tuple[str, str, int | None, str], list[int]] = {}
    differs = False
    for r, p in sorted(all_of.items()):
        what = _called_as(p, call)
        if what is None:
            continue
        now = p.call is not None and (p.call.group, p.call.sequence) == (call.group, call.sequence)
        differs = differs or not call.fits(*what)
        called.setdefault((*what, _at(p) if now else ""), []).append(r)
    if not differs:
        return "", []
    ranks = [r for some in called.values() for r in some]
    return _difference(call, called), ranks


def _difference(call: Call, called: Mapping[tuple[str, str, int | None, str], list[int]]) -> str:
    ops, roots = {op for op, *_ in called}, {root for _, _, root, _ in called}
    number = f"#{call.sequence}{call.of}"

    def each(words: Mapping[tuple[str, str, int | None, str], str]) -> str:
        return ", ".join(f"{words[key]} on {rank_words(ranks)}{key[3]}" for key, ranks in called.items())

    if len(ops) > 1:
        return f"collective {number} differs between ranks, with {each({k: k[0] for k in called})}"
    op = ops.pop()
    if len(roots - {None}) > 1:
        name = "src" if op in FROM_ROOT else "dst"
        return f"{op} {number} has different {name}, {each({k: f'{name}={k[2]}' for k in called})}"
    if op == NEW_GROUP:
        return f"{op} {number} has different ranks, {each({k: k[1] for k in called})}"
    return f"{op} {number} has different shapes or dtypes, {each({k: k[1] or 'no tensor' for k in called})}"


def _fate(p: Position | None, program: str) -> str:
    if p is None:
        return "is not a rank of this pool"
    return {
        RankStatus.ABSENT: "does not take part in this run",
        RankStatus.FINISHED: f"has finished the {program} without calling it",
        RankStatus.FAILED: "has failed",
        RankStatus.DIED: "has died",
        RankStatus.SILENT: "does not answer",
        RankStatus.UNKNOWN: f"cannot report its position: {p.why}",
    }.get(p.state, f"waits in {p.call.describe()}{_at(p)}" if p.call else "is running")


def _advice(stuck: Iterable[int], all_of: Positions) -> str:
    """What usually is behind a deadlock of this shape."""
    ranks = list(stuck)
    kinds = {_call(all_of[r]).kind for r in ranks}
    between_peers = all(_call(all_of[r]).channel is not None for r in ranks)
    awaited = {w for r in ranks for w in waits_for(all_of[r], all_of)[0]} - set(ranks)
    finished = [w for w in awaited if w in all_of and all_of[w].state == RankStatus.FINISHED]
    if finished and kinds & {"backward"}:
        return (
            "Ranks took different numbers of steps. Give every rank the same number of batches "
            "(DistributedSampler, drop_last=True), or train inside torch.distributed.algorithms.join.Join."
        )
    if finished and ranks == [0] and not between_peers:
        return (
            "Only rank 0 makes this call; every rank of the group must make it. DDP's forward may also call a "
            "collective. For work on one rank only, use model.module, and then call a barrier on all ranks."
        )
    if between_peers:
        return "One side must send while the other receives. Order the calls by rank, or use batch_isend_irecv."
    return ""


def waiting_words(p: Position, all_of: Positions) -> str:
    """`waiting in all_reduce #14 for rank 1`, for a blocked rank; or empty."""
    if p.state == RankStatus.SILENT:
        return "does not answer; it may be in native code that holds the interpreter"
    if p.state == RankStatus.UNKNOWN:
        return f"cannot report its position: {p.why}"
    if p.call is None:
        return ""
    (ranks, every), known = waits_for(p, all_of, seems=True), waits_for(p, all_of)[0]
    if p.call.missing:
        missing = f"{rank_words(p.call.missing)}, which this pool does not have"
        return _noted(f"waiting in {p.call.describe()} for {missing}", p.call)
    if not ranks:
        return p.call.note if p.call.kind == APART and p.call.note else _noted(f"in {p.call.describe()}", p.call)
    waits = "waiting" if set(known) == set(ranks) else "apparently waiting"
    if _peer(p.call) is not None:
        return f"{waits} in {p.call.describe()}"  # which names the rank
    one_of = "" if every or len(ranks) == 1 else "any of "
    return _noted(f"{waits} in {p.call.describe()} for {one_of}{rank_words(ranks)}", p.call)


def _noted(words: str, call: Call) -> str:
    return f"{words}, {call.note}" if call.note else words


def may_act_words(all_of: Positions) -> list[str]:
    """`rank 0 may still call from its handler of SIGALRM`, for each rank on which more may act than is seen."""
    by_words: dict[str, list[int]] = {}
    for r, p in sorted(all_of.items()):
        if p.acts:
            by_words.setdefault(_listed(dict.fromkeys(p.acts)), []).append(r)
    return [f"{rank_words(ranks)} may still call from {words}" for words, ranks in by_words.items()]


def _listed(words: Iterable[str]) -> str:
    """The first few of them."""
    listed = list(words)
    return ", ".join(listed[:MOST]) + (f" and {len(listed) - MOST} more" if len(listed) > MOST else "")


def _call(p: Position) -> Call:
    assert p.call is not None
    return p.call


def _at(p: Position) -> str:
    if p.line is not None:
        return f" (line {p.line})"
    return f" ({p.where})" if p.where else ""


def _plural(words: str) -> str:
    verb, _, rest = words.partition(" ")
    return f"{PLURALS.get(verb, verb)} {rest}"


def _s(verb: str, ranks: list[int]) -> str:
    return verb if len(ranks) > 1 else f"{verb}s"
