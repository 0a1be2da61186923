"""What this rank asks of its process groups, noted as it asks: nothing says it afterwards.

gloo's recorder has no entry for a send or a receive. A `Work` knows neither its peer nor its tag. No recorder has the
root of a broadcast. So the methods of torch's `ProcessGroup` are wrapped once, when the worker starts. Sends and
receives are counted per channel, roots are kept per collective, and each `Work` is remembered with its origin.
`Work.wait`, `Store.get`, `Store.wait` and the store's other blocking methods are wrapped too. They block in C++ without
a Python frame of their own. For each wait the log keeps what is waited for.

A note holds names and numbers. It keeps no group, no tensor and no `Work` alive. On gloo the thread that drops the last
reference to a group joins itself, and the process aborts.
"""

from __future__ import annotations

import collections
import functools
import itertools
import sys
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from nbddp.compat import torch
from nbddp.compat.clock import clock
from nbddp.deadlock.on_rank import frames, own_stores

SEND, RECV, ANY = "s", "r", -1  # the two sides of a channel; receives from any source
UNKNOWN = -1  # the number of a collective
ROOTED = ("broadcast", "reduce", "gather", "scatter")
MORE_WAITS = ("multi_get", "queue_pop", "barrier")  # methods of a store that block, besides get and wait
COUNTED = ("gloo", "nccl")  # backends whose groups count their collectives
STANDS_FOR: dict[str, str] = {}  # backend → another that does its work, under whose name recorders have its calls
EPOCHS = 64  # inits remembered
ROOTS = 512  # collectives whose root is remembered
FUTURES = 256  # works whose future was taken, remembered; of those that are not done all

# method → what it is called in torch.distributed, position of its input, and whether all ranks' shapes are equal
COLLECTIVES = {
    "allreduce": ("all_reduce", 0, True),
    "allreduce_coalesced": ("all_reduce_coalesced", 0, True),
    "broadcast": ("broadcast", 0, True),
    "reduce": ("reduce", 0, True),
    "allgather": ("all_gather", 1, True),
    "allgather_coalesced": ("all_gather_coalesced", 1, True),
    torch.ALL_GATHER_BASE: ("all_gather_into_tensor", 1, True),
    "all_gather_single": ("all_gather_into_tensor", 1, True),
    "gather": ("gather", 1, True),
    "scatter": ("scatter", 0, True),
    "reduce_scatter": ("reduce_scatter", 1, True),
    torch.REDUCE_SCATTER_BASE: ("reduce_scatter_tensor", 1, True),
    "reduce_scatter_single": ("reduce_scatter_tensor", 1, True),
    "alltoall": ("all_to_all", 1, False),
    "alltoall_base": ("all_to_all_single", 1, False),
    "all_to_all_single": ("all_to_all_single", 1, False),
    "barrier": ("barrier", -1, True),
}


@dataclass(frozen=True)
class Epoch:
    """From the n-th init of a run on, until the next. Ranks give groups of one init the same names."""

    began_ns: int
    run: int
    init: int

    @property
    def prefix(self) -> str:
        return f"{self.run}.{self.init}/"


LONG_AGO = Epoch(0, 0, 0)


class CallRecord(tuple[Any, ...]):
    """The origin of a `Work`: (SEND or RECV, group, source, destination, tag, n-th call), with ranks in the group; for
    a collective (operation, group, sequence number)."""

    __slots__ = ()

    @property
    def is_peer(self) -> bool:
        return self[0] in (SEND, RECV)


@dataclass(frozen=True)
class Subgroup:
    """One that was made since the last init. named: what its program calls it, as torch has it; where: the user's file,
    line and function."""

    ranks: tuple[int, ...]
    named: str
    where: tuple[str, int, str] | None


ProcessGroup = Any  # torch's, whose types are not known here
STORE = CallRecord(("the store", "", UNKNOWN))


class _Ref(weakref.ref):  # type: ignore[type-arg]
    """A weak reference that knows under which number its object is noted."""

    __slots__ = ("note", "number")
    note: CallRecord
    number: int


class CallLog:
    """The notes of this process; one for all groups and threads."""

    def __init__(self) -> None:
        self.counts: dict[tuple[Any, ...], int] = {}
        self.roots: dict[tuple[str, int], int] = {}
        self.peer_calls: collections.Counter[str] = collections.Counter()
        self._inside = 0  # sends and receives that have been counted and have not returned
        self.waiting: dict[int, tuple[int, CallRecord | None]] = {}
        self.futures: collections.deque[tuple[CallRecord | None, _Ref | None]] = collections.deque()
        self.ended: dict[str, tuple[int, list[int]]] = {}
        self.ending: str | None = None  # the one group that was destroyed last; None: all of them
        self.most_groups = 0  # since the last init; torch counts anew once they are ended
        # hears of each call of a collective, and of each wait, when it has ended: whether it is a wait; its begin, as
        # `_clocks` has it; what it was for
        self.spends: Callable[[bool, tuple[int, int], CallRecord | None], None] = lambda waits, began, note: None
        self.made: dict[int, Subgroup] = {}  # by their numbers, in the order of calls
        self.making: dict[int, int] = {}  # thread → the number of the one that it makes
        self._works: dict[int, _Ref] = {}
        self._gone: collections.deque[_Ref] = collections.deque()
        self._serial = itertools.count(1)
        self._lock = threading.Lock()
        self._epochs = [LONG_AGO]
        self.world: tuple[int, int] | None = None  # rank and size of the world that the last init made

    # -- which group ---------------------------------------------------------------------

    def new_epoch(self, run: int, init: int) -> None:
        """The n-th init of a run begins: torch gives the names of its groups anew."""
        with self._lock:
            self._epochs = [LONG_AGO, *self._epochs[1:][-EPOCHS:], Epoch(clock.time_ns(), run, init)]
            self.counts = {k: n for k, n in self.counts.items() if self.is_recent(k[1])}
            self.ended = {k: known for k, known in self.ended.items() if self.is_recent(k)}
            self.futures.clear()
            self.made = {}
            self.most_groups = 0

    def is_recent(self, key: str) -> bool:
        """Whether a group is of the last init or the one before."""
        return key.startswith(tuple(e.prefix for e in self._epochs[-2:]))

    @property
    def epoch(self) -> Epoch:
        return self._epochs[-1]

    def epoch_at(self, created_ns: int) -> Epoch:
        """The init that was the newest at this time (time.time_ns()); LONG_AGO if that is forgotten. torch's recorder
        remembers more runs than are remembered here."""
        if created_ns >= self._epochs[-1].began_ns:
            return self._epochs[-1]
        return self._epochs[bisect_right([e.began_ns for e in self._epochs], created_ns) - 1]

    def key(self, group: Any) -> str:
        """A group's name here: its init, torch's name, the backend that counts its collectives."""
        return f"{self.epoch.prefix}{group.group_name}/{backend_of(group)}"

    # -- calls -------------------------------------------------------------------------------

    def peer_call(self, side: str, group: Any, peer: int, tag: int) -> CallRecord:
        """Count a send or a receive, before it is made: its other end may be quicker than its return."""
        me = group.rank()
        ends = (me, peer) if side == SEND else (peer, me)
        channel = (side, self.key(group), *ends, tag)
        with self._lock:
            n = self.counts[channel] = self.counts.get(channel, 0) + 1
            self.peer_calls[channel[1]] += 1
            self._inside += 1
        return CallRecord((*channel, n))

    def peer_called(self, note: CallRecord, ok: bool) -> None:
        """The call has returned, or it has raised and was none."""
        with self._lock:
            self._inside -= 1
            if not ok:
                self.counts[note[:-1]] -= 1
                self.peer_calls[note[1]] -= 1

    def called(self) -> dict[str, int]:
        """Group → how many collectives its backend has counted, of those that live and those that were ended."""
        return {**{key: n for key, (n, _) in self.ended.items()}, **self._counted()}

    def members(self) -> dict[str, list[int]]:
        """Group → its global ranks by rank in the group, of those that live and those that were ended."""
        living = {self.key(group): ranks_of(group) for group in groups().values()}
        return {**{key: ranks for key, (_, ranks) in self.ended.items()}, **living}

    def _counted(self) -> dict[str, int]:
        found = {}
        for group in groups().values():
            if backend_of(group) in COUNTED:
                key = self.key(group)
                try:
                    found[key] = self.sequence(group, key)
                except RuntimeError:  # it is being made or ended
                    found[key] = UNKNOWN
        return found

    @contextmanager
    def making_group(self, name: str, ranks: list[int], named: str) -> Iterator[None]:
        """A subgroup is made, by the name that torch has given it: a number, where all ranks make it."""
        me, number = threading.get_ident(), int(name) if name.isdecimal() else 0
        if number:
            user = next((f for f in frames.outwards(sys._getframe()) if frames.is_user(f.file, {})), None)
            where = (user.file, user.line, user.name) if user is not None else None
            self.made[number], self.making[me] = Subgroup(tuple(ranks), named, where), number
        try:
            yield
        finally:
            self.making.pop(me, None)

    def makes(self, ident: int) -> tuple[str, int, tuple[int, ...]] | None:
        """The subgroup that a thread makes: a name for all subgroups of this init, its number, its ranks."""
        number = self.making.get(ident)
        return None if number is None else (self.subgroups, number, self.made[number].ranks)

    def twins(self, key: str) -> tuple[int, Subgroup] | None:
        """Which of the subgroups of the same ranks and the same name a group is, if there are several."""
        name = key.removeprefix(self.epoch.prefix).rpartition("/")[0]
        mine = self.made.get(int(name)) if name.isdecimal() else None
        if mine is None:
            return None
        twins = [n for n, it in sorted(self.made.items()) if (set(it.ranks), it.named) == (set(mine.ranks), mine.named)]
        return (twins.index(int(name)) + 1, mine) if len(twins) > 1 else None

    @property
    def subgroups(self) -> str:
        return f"{self.epoch.prefix}new_group"

    def keep_counts(self) -> None:
        """Groups are about to be ended: nobody can ask them afterwards."""
        self.most_groups = max(self.most_groups, torch.group_count())
        members = self.members()
        self.ended.update({key: (n, members[key]) for key, n in self._counted().items()})

    def collective(self, name: str, group: Any, options: tuple[Any, ...]) -> CallRecord:
        """Note a collective that has just been called."""
        key = self.key(group)
        sequence = self.sequence(group, key)
        if name in ROOTED and sequence != UNKNOWN:
            self._keep_root(key, sequence, options)
        return CallRecord((COLLECTIVES.get(name, (name,))[0], key, sequence))

    def sequence(self, group: Any, key: str) -> int:
        """The number of the collective called last, as the recorder has it; UNKNOWN where that cannot be known."""
        backend = backend_of(group)
        if backend not in COUNTED:
            return UNKNOWN
        if backend != "gloo":
            return torch.sequence(group)
        before = self.peer_calls[key]  # gloo counts sends and receives too, and its recorder does not
        sequence = torch.sequence(group) - before
        return sequence if self._inside == 0 and self.peer_calls[key] == before else UNKNOWN  # a thread is in one

    def _keep_root(self, key: str, sequence: int, options: tuple[Any, ...]) -> None:
        root = next((o.rootRank for o in options if hasattr(o, "rootRank")), None)
        if root is None:
            root = next((o for o in options if isinstance(o, int)), None)
        if root is None:
            return
        self.roots[key, sequence] = root
        while len(self.roots) > ROOTS:
            self.roots.pop(next(iter(self.roots)))

    def remember(self, work: Any, note: CallRecord) -> None:
        """Which call a `Work` belongs to, for as long as it lives."""
        if work is None:
            return
        self.forget()
        ref = _Ref(work, self._gone.append)  # not a function of Python's: an interrupt that hits one here is lost
        ref.note, ref.number = note, id(work)
        self._works[ref.number] = ref

    def forget(self) -> int:
        """Drop what was noted of works that are gone; how many others there are."""
        with suppress(IndexError):
            while True:
                ref = self._gone.popleft()
                if self._works.get(ref.number) is ref:  # another object may have this number by now
                    self._works.pop(ref.number, None)
        return len(self._works)

    def transfers(self) -> list[Any]:
        """The living works of sends and receives."""
        works = [ref() for ref in list(self._works.values()) if ref.note.is_peer]
        return [work for work in works if work is not None]

    def of_work(self, work: Any) -> CallRecord | None:
        ref = self._ref(work)
        return ref.note if ref is not None else None

    def _ref(self, work: Any) -> _Ref | None:
        ref = self._works.get(id(work))
        return ref if ref is not None and ref() is work else None

    # -- waits -------------------------------------------------------------------------------

    def wait_in(self, original: Any, waiter: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a method that blocks, with a note of what it waits for, numbered. One with a time limit ends by itself:
        for it nothing is noted."""
        me = threading.get_ident()
        before, began = self.waiting.get(me), _clocks()
        note = self.of_work(waiter) if hasattr(waiter, "is_completed") else STORE
        self.waiting[me] = (next(self._serial), None if args or kwargs or note is STORE else note)
        try:
            return original(waiter, *args, **kwargs)
        finally:
            if before is None:
                self.waiting.pop(me, None)
            else:
                self.waiting[me] = before
            self.spends(True, began, note)

    def future_taken(self, work: Any) -> None:
        """A callback on this work's future may call anything when the work is done."""
        ref = self._ref(work)
        if len(self.futures) >= FUTURES:
            self._forget_done()
        self.futures.append((ref.note if ref else None, ref))

    def _forget_done(self) -> None:
        """Of the works whose future was taken the first FUTURES / 2 are put away, but for those that are not done."""
        first = [self.futures.popleft() for _ in range(FUTURES // 2)]
        kept = [(note, ref) for note, ref in first if ref is not None and not _is_done(ref())]
        self.futures.extendleft(reversed(kept))

    def open_futures(self) -> list[CallRecord | None]:
        """Works that are not done, or may not be, and whose future somebody has."""
        works = [(note, None if ref is None else ref()) for note, ref in list(self.futures)]
        return [note for note, work in works if work is None or not work.is_completed()]


def _is_done(work: Any) -> bool:
    return work is None or bool(work.is_completed())


def _clocks() -> tuple[int, int]:
    return clock.perf_counter_ns(), clock.thread_time_ns()


def groups() -> dict[str, ProcessGroup]:
    """torch's name → each living group that this rank is a member of."""
    world = torch.world()
    if world is None:
        return {}
    return {name: group for group, name in list(world.pg_names.items()) if hasattr(group, "group_name")}


def backend_of(group: Any) -> str:
    """The backend whose recorder has a group's calls."""
    name = str(group.name())
    return STANDS_FOR.get(name, name)


def ranks_of(group: Any) -> list[int]:
    """Global ranks of a group's members, by rank in the group."""
    known = torch.numbered(group)
    return sorted(known, key=known.__getitem__) if known else list(range(group.size()))


CALLS = CallLog()
FILE = __file__


def install(notes: CallLog = CALLS) -> None:
    """Wrap torch's methods; once, when the worker starts."""
    import torch.distributed as dist

    if not dist.is_available() or getattr(dist.Work.wait, "__globals__", None) is globals():
        return
    for name in ("send", "recv", "recv_anysource"):
        _wrap(dist.ProcessGroup, name, _peer(notes, name, getattr(dist.ProcessGroup, name)))
    for name in (*COLLECTIVES, *torch.COALESCED):
        if name in vars(dist.ProcessGroup):
            _wrap(dist.ProcessGroup, name, _collective(notes, name, getattr(dist.ProcessGroup, name)))
    _wrap(dist.Work, "wait", _wait(notes, dist.Work.wait))
    _wrap(dist.Work, "get_future", _future(notes, dist.Work.get_future))
    destroy = _destroy(notes, dist.destroy_process_group)
    for module in (dist, dist.distributed_c10d):
        _wrap(module, "destroy_process_group", destroy)
    for name in ("get", "wait"):
        _wrap(dist.Store, name, _store_wait(notes, getattr(dist.Store, name)))
    for name in MORE_WAITS:  # not of Store itself: in a program's own kind of store C++ would take it for its method
        for kind in (dist.FileStore, dist.HashStore, dist.PrefixStore):
            if hasattr(dist.Store, name):
                _wrap(kind, name, _store_wait(notes, getattr(dist.Store, name)))


def _wrap(owner: Any, name: str, wrapped: Any) -> None:
    setattr(owner, name, wrapped)


def unnoted(method: Any) -> Any:
    """torch's own method behind what `install` has put in its place. It is called from this file too: a rank that
    waits within waits in torch."""
    original = getattr(method, "__wrapped__", method)

    def call(*args: Any) -> Any:
        return original(*args)

    return call


def _peer(notes: CallLog, name: str, original: Any) -> Any:
    side = SEND if name == "send" else RECV

    @functools.wraps(original)
    def call(group: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        peer, tag = (ANY, given[0]) if name == "recv_anysource" else given[:2]
        note = notes.peer_call(side, group, peer, tag)
        ok = False
        try:
            work = original(group, tensors, *args, **kwargs)
            ok = True
        finally:
            notes.peer_called(note, ok)
        notes.remember(work, note)
        return work

    return call


def _collective(notes: CallLog, name: str, original: Any) -> Any:
    @functools.wraps(original)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        began = _clocks()
        work = original(group, *args, **kwargs)
        note = notes.collective(name, group, (*args, *kwargs.values()))
        notes.remember(work, note)
        notes.spends(False, began, note)
        return work

    return call


def _wait(notes: CallLog, original: Any) -> Any:
    @functools.wraps(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        return notes.wait_in(original, self, *args, **kwargs)

    return wait


def _destroy(notes: CallLog, original: Any) -> Any:
    @functools.wraps(original)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist

        notes.keep_counts()
        group = args[0] if args else kwargs.get("group")
        is_one = group is not None and group is not dist.group.WORLD and hasattr(group, "group_name")
        notes.ending = notes.key(group) if is_one else None  # torch takes what is no group, too
        del group
        return original(*args, **kwargs)

    return destroy_process_group


def _future(notes: CallLog, original: Any) -> Any:
    @functools.wraps(original)
    def get_future(self: Any) -> Any:
        notes.future_taken(self)
        return original(self)

    return get_future


def _store_wait(notes: CallLog, original: Any) -> Any:
    @functools.wraps(original)
    def store_wait(self: Any, *given: Any, **named: Any) -> Any:
        bottom = own_stores.base(self)
        if bottom is None:
            return notes.wait_in(original, self, *given, **named)
        return notes.wait_in(functools.partial(own_stores.call, original), self, bottom, *given, **named)

    return store_wait
