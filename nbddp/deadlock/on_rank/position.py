"""The position of this rank: the user's line, torch's call, and the known facts about its wait.

Read from outside the main thread, while that is blocked: from its Python frames; from what was noted when the call
was made (`call_log`); and from torch's flight recorder (`flight`), which also knows the collectives that C++ calls,
those of DDP above all. Plain data out, with what is evidence marked as such; what it means, across ranks, is for
`deadlock.proof` to say.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import CoroutineType, FrameType, TracebackType
from typing import Any, TypedDict

from nbddp.compat import torch
from nbddp.compat.clock import clock
from nbddp.deadlock.on_rank import (
    call_log,
    child_waits,
    flight,
    frames,
    own_stores,
    runnable,
    store_client,
    threads,
    torch_debug_detail,
)
from nbddp.deadlock.on_rank.call_log import ANY, CALLS, CallRecord
from nbddp.deadlock.on_rank.frames import SeenFrame
from nbddp.protocol.codec import FILE, name_of
from nbddp.protocol.position import (
    BlockingCall,
    CalledFrom,
    CallHistory,
    Channel,
    PastCall,
    PendingCollective,
    Place,
    StackRow,
    Whereabouts,
)

COLLECTIVES = "torch/distributed/distributed_c10d.py"
OTHERS = (torch.FUNCTIONAL,)
RESULT, FOR_RESULT = "wait_tensor", ("unwrap", "trigger_wait", "wait", "wait_tensor")  # of a functional collective
HERE = call_log.FILE
GROUPS = os.path.join(frames.ROOT, "worker", "process_groups.py")  # it imports what is here
REACHING = store_client.__file__
OWN_STORES = own_stores.__file__
STORES = {REACHING: "TCPStore", OWN_STORES: "FileStore"}
INIT, NEW_GROUP, BACKWARD = "init_process_group", "new_group", torch.BACKWARD
APART = "apart"  # a call in which a rank waits for what the pool does not know
DESTROY = "destroy_process_group"
TO_PEER, FROM_PEER = ("send", "isend", "send_object_list"), ("recv", "irecv", "recv_object_list")
DEFAULT, UNNAMED = "default_pg", ("default_pg", "undefined", "")  # how torch describes groups that nobody has described
HISTORY = 64
ALSO = 4  # other threads in torch's calls, told
MOST_MISSING = 100_000  # ranks of a world that are named as missing
LOOKS = 5  # at a rank that moves on while it is looked at
Claims = Sequence[Callable[[list[SeenFrame]], PendingCollective | None]]
Asks = Callable[[Any], bool]
OWN: dict[str, int] = {}  # this worker's rank and the size of the world, whatever a program does to its environment


def install() -> None:
    """Have calls noted; once, when the worker starts."""
    place(os.environ)
    call_log.install()


def place(env: Mapping[str, str]) -> None:
    """This worker's place, as of a run that begins: a pool that grows or shrinks gives it a world of another size."""
    OWN.update(rank=int(env["RANK"]), size=int(env["WORLD_SIZE"]))


def position(
    names: dict[str, str], groups: Any, since_ns: int, recorded: list[flight.FlightEntry], claims: Claims = ()
) -> Whereabouts:
    """The rank's place: that of its main thread, or of the thread which that joins.

    names: file of a cell → `Cell In[n]`. groups: the worker's `Groups`. since_ns: when the
    run began (clock.time_ns()); what C++ called before is not this run's. recorded: what may not be done.
    claims: say what a thread is about to call (`parts`).
    """
    for _ in range(LOOKS):
        try:
            return _position(names, groups, since_ns, recorded, claims)
        except frames.Moved:
            continue
    return _position(names, groups, since_ns, recorded, claims, moves=True)


def _position(
    names: dict[str, str], groups: Any, since_ns: int, recorded: list[flight.FlightEntry], claims: Claims,
    moves: bool = False,
) -> Whereabouts:  # fmt: skip
    """moves: the rank does not stay where it is for as long as a look takes, so it is in no call that blocks. Raises
    frames.Moved."""
    of_all = frames.of_all()
    ident = threads.speaker(of_all) if not moves else threading.main_thread().ident or 0
    its = of_all.get(ident, [])
    at = next((i for i, f in enumerate(its) if frames.is_user(f.file, names)), len(its))
    inside = its[:at]
    call = _call(inside, lambda store: groups is not None and groups.owns(store)) if not moves else None
    serial, note = CALLS.waiting.get(ident, (0, None)) if _in_wait(inside) else (0, None)
    peer = note is not None and note.is_peer
    if call is not None and call.kind == NEW_GROUP and (made := CALLS.makes(ident)) is not None:
        call = replace(call, made=made)
    claimed = (found for claim in claims if (found := claim(its)) is not None)
    claim = None if moves else next(claimed, None) or _met(call, inside)
    pending = claim or (None if peer or moves else _pending(call, note, inside, recorded, since_ns))
    if pending is None and note is not None and peer:
        pending = _unseen("", note[1], 0)
    pending = None if pending is None else _told_apart(pending, names)
    if call is not None and pending is not None and call.op == RESULT and pending.op:
        call = replace(call, op=pending.op)  # whose result it is
    processes, ticks = threads.children()
    counts = _counts(groups)
    return Whereabouts(
        user=_users(its, names) or _users(of_all.get(threading.main_thread().ident or 0, []), names),
        call=_on_channel(call, note) if call is not None and note is not None and peer else call,
        pending=pending,
        exact=claim is not None or note is not None,
        waits="futex" if any(map(_looks_for_key, inside)) else threads.waits(threads.native(ident)),
        cpu=_computed(), bytes=threads.bytes_moved(),
        children=(len(processes), ticks), child_waits=child_waits.of(processes),
        also=_also(of_all, {ident, threading.main_thread().ident}, names),
        token=(serial, *counts, hash(tuple(f.lasti for f in its))),
        thread=ident != threading.main_thread().ident,
        acts=("its main thread",) if moves else _acts(of_all, ident, names, recorded, note, inside),
        inits=counts[0], groups=counts[1],
    )  # fmt: skip


def _users(its: list[SeenFrame], names: dict[str, str]) -> Place | None:
    """The user's innermost place among these frames. A thread that is waited for may be a library's alone."""
    return next((_place(f, names) for f in its if frames.is_user(f.file, names)), None)


def awaits(task: asyncio.Future[Any] | None, names: dict[str, str]) -> Place | None:
    """The user's innermost place in a cell that awaits something, while its loop runs."""
    of = task.get_coro() if isinstance(task, asyncio.Task) else None
    return _users(frames.awaiting(of), names) if isinstance(of, CoroutineType) else None


def _also(
    of_all: threads.Stacks, but: set[int | None], names: dict[str, str]
) -> tuple[tuple[str, str, Place | None], ...]:
    """Other threads that are in a call of torch's that blocks: name, call, the user's place if there is one."""
    named = {t.ident: name_of(t.name) for t in threading.enumerate()}
    found = []
    for ident, its in of_all.items():
        if ident not in but and any(map(_is_torch, its)):
            at = next((i for i, f in enumerate(its) if frames.is_user(f.file, names)), len(its))
            call = _call(its[:at])
            if call is not None:
                found.append((named.get(ident, ""), call.op, _place(its[at], names) if at < len(its) else None))
    return tuple(found[:ALSO])


def idle(names: dict[str, str], groups: Any, recorded: list[flight.FlightEntry], *, begun: bool) -> Whereabouts:
    """What is to be known of a rank whose main thread has ended its cell."""
    of_all = frames.of_all()
    acts = (*runnable.idle(of_all, _is_torch, lambda f: frames.is_user(f.file, names)), *_calls_back(recorded, set()))
    (processes, ticks), (inits, count) = threads.children(), _counts(groups)
    return Whereabouts(
        idle=True, begun=begun, acts=acts, cpu=_computed(), bytes=threads.bytes_moved(),
        children=(len(processes), ticks), child_waits=child_waits.of(processes), inits=inits, groups=count,
    )  # fmt: skip


def _computed() -> float:
    """Seconds of CPU time of this process. RPC's threads spin while they wait."""
    return clock.process_time() - (threads.spun() if runnable.rpc() else 0.0)


def _counts(groups: Any) -> tuple[int, int]:
    """How many inits and groups there were."""
    return groups.inits if groups is not None else 0, group_count()


def user_place(frame: FrameType | None, names: dict[str, str]) -> Place | None:
    """The user's innermost place at or outside `frame`: file, line, function."""
    user = next((f for f in frames.outwards(frame) if frames.is_user(f.file, names)), None)
    return _place(user, names) if user is not None else None


def came_from(
    tb: TracebackType | None, names: dict[str, str], since_ns: int, known: KnownEntries | None = None
) -> CalledFrom | None:
    """The call of torch's that an exception came out of: op, kind, peer; for a collective also its group and sequence
    number. None if it came from none. known: what the recorders have said before."""
    inside: list[SeenFrame] = []  # innermost first, inside the user's
    while tb is not None:
        inside = [] if frames.is_user(tb.tb_frame.f_code.co_filename, names) else [frames.own(tb.tb_frame), *inside]
        tb = tb.tb_next
    call = _call(inside)
    if call is None:
        return None
    found = CalledFrom(call.op, call.kind, call.peer)
    if found.kind != "collective":
        return found
    entries = known.entries if known is not None and known.lasts() else flight.entries(flight.dumps(active=False))
    last = next((e for e in reversed(entries) if e.created_ns >= since_ns and e.sequence), None)
    if last is None:
        return found
    return replace(found, op=last.op if found.op == RESULT else found.op, group=last.group, sequence=last.sequence or 0)


class KnownEntries:
    """The entries of the recorders at one moment, for as long as nothing more is called."""

    def __init__(self, entries: list[flight.FlightEntry]) -> None:
        self.entries, self._called = entries, CALLS.called()

    def lasts(self) -> bool:
        """Whether it is known that no group has called a collective since."""
        return bool(self._called) and call_log.UNKNOWN not in self._called.values() and CALLS.called() == self._called


def record(entries: list[flight.FlightEntry], own: Mapping[str, Sequence[PastCall]]) -> CallHistory:
    """What this rank is known to have called, with global ranks.

    entries: all that the recorders hold. own: histories that parts of capabilities have.
    """
    history = {group: tuple(calls) for group, calls in own.items() if calls}
    called = CALLS.called()
    latest = {**dict.fromkeys(called, 0), **dict.fromkeys(own, 0)}
    latest |= torch_debug_detail.CHECKS.counted(called)
    if CALLS.made:
        made = list(CALLS.made.items())[-HISTORY:]
        history[CALLS.subgroups] = tuple((n, NEW_GROUP, str([*it.ranks]), None) for n, it in made)
    by_key: dict[str, list[flight.FlightEntry]] = {}
    for e in entries:
        by_key.setdefault(key_of(e), []).append(e)
    for key in filter(CALLS.is_recent, by_key):
        latest[key] = max(latest.get(key, 0), *(e.sequence for e in by_key[key]))
        last = by_key[key][-HISTORY:]
        history[key] = tuple((e.sequence, e.op, e.what, _root(key, e.group, e.sequence)) for e in last)
    blind = tuple(key for key, n in called.items() if n == call_log.UNKNOWN or n > latest[key])
    return CallHistory(history, latest, blind, bool(entries), _channels())


def key_of(entry: flight.FlightEntry) -> str:
    """The group of a recorder's entry as `CallLog.key` names it."""
    return f"{CALLS.epoch_at(entry.created_ns).prefix}{entry.group}/{entry.backend}"


def _root(key: str, group: str, sequence: int) -> int | None:
    root = CALLS.roots.get((key, sequence))
    if root is None:
        return None
    members = members_of(group)[0]
    return members[root] if root < len(members) else root


def _channels() -> tuple[tuple[Channel, int], ...]:
    by_key = CALLS.members()
    return tuple(
        ((side, key, _global(by_key[key], source), _global(by_key[key], to), tag), n)
        for (side, key, source, to, tag), n in list(CALLS.counts.items())
        if key in by_key
    )


def _global(ranks: list[int], of_group: int) -> int:
    return of_group if of_group == ANY else ranks[of_group]


def _on_channel(call: BlockingCall, note: CallRecord) -> BlockingCall:
    """The call, with the send or receive that it waits for."""
    side, key, source, to, tag, n = note
    ranks = CALLS.members().get(key)
    if ranks is None:
        return call
    channel = (side, key, _global(ranks, source), _global(ranks, to), tag)
    return replace(call, channel=channel, nth=n, members=tuple(ranks))


def stack(names: dict[str, str]) -> tuple[StackRow, ...]:
    """The main thread's frames from the user's first, outermost first."""
    its = [f for f in reversed(frames.of(threading.main_thread().ident or 0)) if f.file != HERE]  # our notes of calls
    rows = [(*_place(f, names), frames.is_user(f.file, names)) for f in its]
    first = next((i for i, row in enumerate(rows) if row[3]), 0)
    return tuple(rows[first:])


def _met(call: BlockingCall | None, inside: list[SeenFrame]) -> PendingCollective | None:
    """The collective before which a rank waits in a check of torch's (debug level DETAIL). Which one is not known."""
    if (call is not None and call.kind not in ("collective", "backward")) or not _in_native(inside):
        return None
    meeting = torch_debug_detail.CHECKS.meeting()
    if meeting is None:
        return None
    group, key, sequence = meeting
    return collective(key, group.group_name, group.group_desc, sequence, "", seen=True)


def _place(frame: SeenFrame, names: dict[str, str]) -> Place:
    return names.get(frame.file, frame.file)[:FILE], frame.line, name_of(frame.name)


def _call(inside: list[SeenFrame], owns: Asks = lambda store: True) -> BlockingCall | None:
    """The outermost call of torch's that blocks, among the frames inside the user's. owns: whether a store is the
    pool's."""
    inner = ""
    for i, frame in enumerate(reversed(inside)):
        file, name = frame.file.replace("\\", "/"), frame.name
        if file in STORES:
            return BlockingCall(STORES[file], APART, note=_reaches(inside))
        if file.endswith(COLLECTIVES) and name == INIT:
            return replace(_init(frame), note=_reaches(inside[: len(inside) - i]))
        if file == GROUPS and name == "drop":
            return BlockingCall("destroy_process_group of an earlier cell's group", "drop")
        if file == GROUPS and name == DESTROY:  # gloo's threads are joined when torch's own frame has gone
            return BlockingCall(name, DESTROY)
        if file == HERE and name in ("wait", "store_wait"):
            noted = _of_store(frame, owns) if name == "store_wait" else BlockingCall("wait", "wait")
            return replace(noted, op=f"{noted.op} {_reaches(inside)}".rstrip())
        if file.endswith(COLLECTIVES) and name != "wrapper" and not name.startswith("_"):
            return _described(name, frame)
        if file.endswith(OTHERS) and not name.startswith("_"):
            return BlockingCall(RESULT if name in FOR_RESULT else name, "collective")
        if name == BACKWARD or (name == torch.FINALIZE and file.endswith(torch.DDP_FILE)):
            inner = "backward"
    return BlockingCall(inner, "backward") if inner else None


def _of_store(frame: SeenFrame, owns: Asks) -> BlockingCall:
    """A key of a store that others can reach may be set from outside the run: nobody can say that it will not."""
    original, store, given, named = frame.get("original", "self", "given", "named")
    keys, *limits = [*(given or ()), *(named or {}).values()] or [""]
    ends = limits or original.__name__ not in ("get", "wait")  # with a time limit it ends by itself
    kind = APART if not owns(store) else "outside" if ends else "store"
    return BlockingCall(f"store.{original.__name__}({name_of(repr(keys))})", kind)


def _init(frame: SeenFrame) -> BlockingCall:
    size, rank = (_placed(*each) for each in zip(("size", "rank"), frame.get("world_size", "rank"), strict=True))
    kind = "init" if size == OWN["size"] else APART
    if size <= OWN["size"] or rank != OWN["rank"]:  # of fewer ranks: which ones is not known
        return BlockingCall(INIT if rank == OWN["rank"] else f"{INIT} as rank {rank}", kind)
    return BlockingCall(INIT, kind, world=size, missing=tuple(range(OWN["size"], min(size, MOST_MISSING))))


def _described(name: str, frame: SeenFrame) -> BlockingCall:
    if name == "wait":
        return BlockingCall("wait", "wait")
    if name == "monitored_barrier":  # it has a time limit and a report of its own
        return BlockingCall(name, "outside")
    if name.startswith(NEW_GROUP) or name in ("new_subgroups", "split_group"):
        return BlockingCall(NEW_GROUP, NEW_GROUP)
    if name in TO_PEER or name in FROM_PEER:
        sends = name in TO_PEER
        peer, in_group = frame.get("dst", "group_dst") if sends else frame.get("src", "group_src")
        return BlockingCall(name, "send" if sends else "recv", in_group if peer is None else peer)
    return BlockingCall(name, "collective")


def _placed(which: str, given: Any) -> int:
    """The rank, or the size of the world, that an init is for: as given, or as the environment has it."""
    if isinstance(given, int) and given >= 0:
        return given
    try:
        return int(os.environ[{"size": "WORLD_SIZE", "rank": "RANK"}[which]])
    except (KeyError, ValueError):
        return OWN[which]


def _reaches(inside: list[SeenFrame]) -> str:
    """Which store of the program's own a rank waits for, or at, if it does."""
    for frame in inside:
        if _looks_for_key(frame):
            return str(frame.get("where")[0] or "")
        if frame.file != REACHING:
            continue
        if frame.name == "until_there":
            host, port, why = frame.get("host", "port", "why")
            return f"connecting to a store at {store_client.address(host, port)}{f', {why}' if why else ''}"
        if frame.name == "serve":
            return f"waiting for others to connect to its store at {frame.get('where')[0]}"
        if frame.name == "join":
            (given,) = frame.get("given")
            return f"connecting to a store at {store_client.address(given['host_name'], given['port'])}"
    return ""


def _looks_for_key(frame: SeenFrame) -> bool:
    """Whether it waits for a store of the program's own, which is looked at again and again."""
    return frame.file == OWN_STORES and frame.name in ("until", "until_folder")


def _in_wait(inside: list[SeenFrame]) -> bool:
    return any(f.file == HERE and f.name == "wait" for f in inside)


def _pending(
    call: BlockingCall | None,
    note: CallRecord | None,
    inside: list[SeenFrame],
    recorded: list[flight.FlightEntry],
    since_ns: int,
) -> PendingCollective | None:
    """The collective that is waited for, with `seen`: that the recorder has it, and not as done.

    Of a `Work` it was noted which it is. C++ waits for the oldest that is not done; which one, is not known if
    several groups have some.
    """
    if note is not None and note[2] != call_log.UNKNOWN:
        op, key, sequence = note
        entry = next((e for e in recorded if (key_of(e), e.sequence) == (key, sequence)), None)
        return _of_entry(entry) if entry is not None else _unseen(op, key, sequence)
    recent = [e for e in recorded if e.active and e.created_ns >= since_ns]
    if _ends(call) and CALLS.ending is not None:
        recent = [e for e in recent if key_of(e) == CALLS.ending]
    of_nccl = [e for e in recent if e.backend == flight.NCCL]
    if of_nccl:  # its wait may be in any call of torch's or the user's, and is for all that was called before
        return None if _in_library(inside) else _of_entry(of_nccl[0])
    if note is not None or (call is not None and call.kind not in ("collective", "backward", DESTROY)):
        return None
    one_group = len({key_of(e) for e in recent}) == 1
    return _of_entry(recent[0]) if one_group and (_in_native(inside) or _ends(call)) else None


def _ends(call: BlockingCall | None) -> bool:
    """Whether the call ends groups, which waits for what is pending in them."""
    return call is not None and call.kind == DESTROY


def _in_native(inside: list[SeenFrame]) -> bool:
    """Whether the innermost frame is one from which torch waits in C++ for its collectives."""
    if not inside:
        return False
    file = inside[0].file.replace("\\", "/")
    return file == HERE or any(part in file for part in torch.WAIT_IN_NATIVE)


def _in_library(inside: list[SeenFrame]) -> bool:
    """Whether the innermost frame is of a library that waits for other things than a GPU."""
    file = inside[0].file.replace("\\", "/") if inside else ""
    return bool(file) and file != HERE and ("/torch/" not in file or torch.LOADERS in file)


def _of_entry(entry: flight.FlightEntry) -> PendingCollective:
    key, epoch = key_of(entry), CALLS.epoch_at(entry.created_ns)
    found = collective(key, entry.group, entry.description, entry.sequence, entry.op, seen=entry.active)
    root = _root(key, entry.group, entry.sequence)
    return replace(found, what=entry.what, backend=entry.backend, root=root, epoch=(epoch.run, epoch.init))


def _unseen(op: str, key: str, sequence: int) -> PendingCollective:
    group = next((g for g in call_log.groups().values() if CALLS.key(g) == key), None)
    name, description = (group.group_name, group.group_desc) if group is not None else ("", "")
    return collective(key, name, description, sequence, op)


def _told_apart(pending: PendingCollective, names: dict[str, str]) -> PendingCollective:
    """With what tells its group from others of the same ranks."""
    found = CALLS.twins(pending.group)
    if found is None:
        return pending
    nth, made = found
    at = None if made.where is None else (names.get(made.where[0], made.where[0])[:FILE], *made.where[1:])
    return replace(pending, nth=nth, made_at=at)


def collective(key: str, name: str, description: str, sequence: int, op: str, seen: bool = False) -> PendingCollective:
    """One of a group that torch calls `name`; key: what its collectives are noted under."""
    whole = sys.modules["torch.distributed"].group.WORLD
    default = description == DEFAULT or (whole is not None and whole.group_name == name)
    ranks = tuple(members_of(name)[0] or CALLS.members().get(key, ()))
    named = "" if description in UNNAMED else name_of(description)
    return PendingCollective(key, ranks, sequence, op, default=default, named=named, seen=seen)


def _acts(
    of_all: threads.Stacks,
    ident: int,
    names: dict[str, str],
    recorded: list[flight.FlightEntry],
    note: CallRecord | None,
    inside: list[SeenFrame],
) -> tuple[str, ...]:
    """What besides the thread `ident` may call torch, in words: what stands on this rank, or a callback on a future.

    A callback on the future of what is waited for, or of what was called later in the same group, comes too late.
    """
    open_ = {key_of(e) for e in recorded if e.active}
    waited = open_ if note is None and inside else {note[1]} if note and not note.is_peer else set()
    found = runnable.acts(of_all, ident, _is_torch, lambda f: frames.is_user(f.file, names))
    found += _calls_back(recorded, waited if len(waited) == 1 else set())
    return (*found, *["a world of its own"] * is_elsewhere())


def _calls_back(recorded: list[flight.FlightEntry], waited: set[str]) -> list[str]:
    """Whether the end of a collective (but of none of the group `waited`), a send or a receive may call something."""
    open_ = {(key_of(e), e.sequence) for e in recorded if e.active}
    futures = CALLS.open_futures()
    acts = any(n is None or n.is_peer or (n[1:] in open_ and n[1] not in waited) for n in futures)
    return ["a callback on a Future"] * acts


def _is_torch(frame: SeenFrame) -> bool:
    return frame.file == HERE or frame.file.replace("\\", "/").endswith(COLLECTIVES)


def is_elsewhere() -> bool:
    """Whether the program has made a world of its own, in which other ranks have other numbers than in the pool."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return False
    return CALLS.world not in (None, (OWN["rank"], OWN["size"]))


class CalledCollective(TypedDict):
    """One that this rank has called. ranks: global; created: nanoseconds since 1970. key: the group's, as
    `CallLog.key` names it."""

    op: str
    group: str
    ranks: tuple[int, ...]
    what: str
    sequence: int
    created: int
    key: str


def collectives(since: int) -> list[CalledCollective]:
    """Collectives that were called since then (nanoseconds since 1970), oldest first, with their groups' ranks."""
    return [
        {"op": e.name, "group": e.group, "ranks": tuple(members_of(e.group)[0]), "what": e.what,
         "sequence": e.sequence, "created": e.created_ns, "key": key_of(e)}
        for e in flight.entries(flight.dumps(active=False)) if e.created_ns >= since and e.sequence
    ]  # fmt: skip


def members_of(name: str) -> tuple[list[int], str]:
    """Global ranks, by rank in the group, and backends of the group of this name."""
    tables, group = torch.world(), call_log.groups().get(name)
    if tables is None:
        return torch.members(name)
    if group is None:
        return [], ""
    return call_log.ranks_of(group), str(tables.pg_backend_config.get(group, ""))


def group_count() -> int:
    """How many groups this rank has made since the last init, also after it has ended them."""
    return max(CALLS.most_groups, torch.group_count())
