"""Process groups that survive a run, and the rendezvous of every run.

torch is left as it is, but for a few private APIs. `init_process_group` is wrapped: a group left over from an earlier
run is destroyed first, so that a cell can be run again and again; a second init within one run stays torch's own error.
After a failed run, the pool has every rank end its group (`drop`) before anything else. The sockets of pending calls
are shut, so nobody waits for a peer.

The store for `env://` is taken from the pool's store. Its prefix has this run, the port, and the count of inits at this
port. That holds for the injected address, and for any port of this machine if the group is to have the pool's ranks.
The setup() of many a script sets a port of its own. Inits one after another at the same port are a race in torch. A
slow rank meets the store that rank 0 is about to close. So nothing listens at such a port. Another race is between
making a group and destroying it. A rank is through `init` or `new_group` while a slow one still connects to others, and
would be cut off. So `destroy_process_group` waits for those. On gloo no rank is through before all are, if a guard has
them compare whom they are connected to (`rank_guard`). For groups of other ranks, and elsewhere, torch's own behaviour
is kept, with rank 0 as the server; where that listens is the guard's matter.

The second of them is private (`torch_compat.wrap_create_store`). Where it is missing, `init_process_group` is given the
store as an argument.

The third: sockets that appear while a store or a group is made are noted as torch's (`release.Sockets`). Only they may
be shut to release a blocked call.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from nbddp.compat import system, torch
from nbddp.compat.clock import clock
from nbddp.compat.thread import OwnThread
from nbddp.deadlock.on_rank import call_log, flight, own_stores, store_client, torch_debug_detail
from nbddp.deadlock.on_rank.store_client import Given
from nbddp.protocol.outcome import GroupFacts
from nbddp.protocol.run_spec import Rendezvous
from nbddp.worker import gpus, rank_guard
from nbddp.worker.output import GlooSilencer
from nbddp.worker.release import Sockets, abort_nccl, abort_transfers, has_nccl

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
HANDLING, TEARS_DOWN = "TORCH_NCCL_ASYNC_ERROR_HANDLING", ("1", "3")  # torch's ErrorHandlingMode; 3 is its own default
HELPER = ("group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name")  # its parameters
CONNECTING = 10.0  # seconds that slower ranks have to come through the making of a group that is to be destroyed
SETTLE = 0.02  # seconds for gloo's threads to drop the tensors of what has ended, where destroy would not let them
GRACE = 1.0  # seconds that pending work of a group which did not fail has to come to its end


class Groups:
    """The default process group of this worker, across runs."""

    def __init__(self) -> None:
        self.run = 0
        self.made_in: int | None = None
        # whether this run has, or had, anything of torch.distributed's that may have to be ended; an engine may have
        self.touched = True
        self.dropping = self.shares_gpus = False
        self.cut = False  # whether connections to a host that does not answer were shut in this run
        self.tell: Callable[[str], None] = lambda hook: None  # calls a method of the worker's parts
        self.inits = 0
        self.handling = ""  # what of HANDLING has a group of this run end the process if a collective fails
        self.sockets = Sockets()
        self.guard = rank_guard.guard()
        self._process = os.getpid()
        self._met: dict[int, list[int]] = {}
        self._prefixes: dict[int, str] = {}  # of the inits of this run that met at the pool's store
        self._made: dict[str, int] = {}  # name of each group that the last of them has made, unchecked → its size
        self._compared = False  # whether all ranks are known to be through the making of the newest group
        self._quiet = GlooSilencer()
        self._where: tuple[object, ...] | None = None  # where the ranks of the last run met
        self._injected: tuple[str, int] = ("", 0)  # MASTER_ADDR and MASTER_PORT
        self._connect = ("", 0)  # where this node reaches the store
        self._gives_store = False
        self._clients: dict[tuple[str, int], Any] = {}
        self._left: list[dict[str, call_log.ProcessGroup]] = []
        self._destroyed: list[weakref.ref[Any]] = []  # by the program
        self._outlived: list[Any] = []  # of these, those that something of the program's still held after the run

    def install(self) -> None:
        """Replace the two functions of torch; once, when the worker starts."""
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        if not dist.is_available():
            return
        init = self._wrap_init(distributed_c10d.init_process_group)
        dist.init_process_group = init
        distributed_c10d.init_process_group = init
        self._gives_store = not torch.wrap_create_store(self._wrap_create)
        _wrap(dist.TCPStore, "__init__", lambda original: self.guard.store_made(self._wrap_store(original)))
        _wrap(dist.FileStore, "__init__", _wrap_file_store)
        torch_debug_detail.CHECKS.install()
        if hasattr(dist, "ProcessGroupGloo"):
            _wrap(dist.ProcessGroupGloo, "__init__", self._wrap_gloo)
        _wrap(distributed_c10d, torch.NEW_GROUP, self._wrap_new_group)

    def hold_destroy(self) -> None:
        """Have `destroy_process_group` wait for slower ranks; after all that note when a group is ended."""
        import torch.distributed as dist

        if dist.is_available():
            destroy = self._wrap_destroy(dist.destroy_process_group)
            dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = destroy

    def begin(self, run: int, here: Rendezvous) -> None:
        """Enter run number `run`, whose ranks meet there."""
        if self.touched and not _is_initialized():
            self.tell("group_gone")
        if (where := (here.listen, here.master, here.store)) != self._where:
            self._injected, self._connect = here.master, here.store
            self.guard.begin(here)
            store_client.programs_have(here.master[1])
            self._where = where  # the last: Stop may have come in between
        self.run, self._process = run, os.getpid()
        self.inits, self._met, self._prefixes, self._made = 0, {}, {}, {}
        self.touched = _is_initialized()
        self.handling = ""

    def rest(self) -> None:
        """No pool has this process from here on: its group is ended, and programs meet where torch has them meet."""
        self.drop(broken=False)
        self.released()
        self.run, self._where, self._injected, self._connect, self._process = 0, None, ("", 0), ("", 0), 0
        self.shares_gpus = False
        store_client.programs_have(None)

    def store(self, name: str) -> Any:
        """The pool's store under a prefix of this run and `name`, for what is no business of the user's groups."""
        return self._under(f"nbddp/run{self.run}/{name}")

    def _under(self, prefix: str, **options: Any) -> Any:
        """The kept client of the pool's store, or a new one made with these options, under a prefix.

        One client for all runs: connecting looks names up, which can take seconds. It is made here and not by torch's
        `_create_c10d_store`. Since torch 2.14 that has rank 0 try to serve (and complain) at any address but the one in
        MASTER_ADDR; ours is connected to by number.
        """
        from torch.distributed import PrefixStore, TCPStore

        where = self._connect
        if where not in self._clients:
            self._clients = {where: TCPStore(*where, is_master=False, **options)}
        return PrefixStore(prefix, self._clients[where])

    def owns(self, store: Any) -> bool:
        """Whether this is the pool's store. With a guard, only the ranks, the processes that they start, and the
        notebook's kernel reach it. The pool reports if it cannot be guarded here (`Pool.shortcomings`)."""
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return getattr(store, "port", None) in (self._injected[1], self._connect[1])

    def released(self) -> None:
        """The sockets have been shut: no client of a store can be used again."""
        self._clients = {}

    def let_go(self) -> None:
        """A run is over, and has been reported. A DDP model keeps its group when the program has destroyed that, until
        the next cell puts another in its place; there gloo would wait for up to 10 ms per connection. So what is held
        then is held here too, and let go after that run."""
        held, destroyed = self._outlived, _living(self._destroyed)
        self._outlived, self._destroyed = destroyed, []
        if held and not OwnThread("nbddp-ending", self._let_go, held).begin():
            self._outlived += held

    def _let_go(self, held: list[Any]) -> None:
        """Which a program still has is kept on."""
        known = [weakref.ref(group) for group in held]
        held.clear()
        self._outlived += _living(known)

    def facts(self, aborted: bool = False) -> GroupFacts:
        """What is known of the default group after a run; equal on all ranks unless something broke."""
        if not _is_initialized():
            self.made_in = None
            return GroupFacts(None, 0, self.touched, self.inits, aborted, self.cut)
        sequence = torch.sequence(torch.default_group())
        return GroupFacts(self.made_in, sequence, True, self.inits, aborted, self.cut)

    def drop(self, *, broken: bool) -> None:
        """End the default group and everything torch remembers of it.

        The threads of a group are joined, which takes until its pending work is done. Of a `broken` group it may never
        be, so its connections are shut at once; those of another one after GRACE, since a peer may still be at work.
        Objects that only garbage holds (an exception's frames, a DDP model) are let go by `leavings`. No object of the
        program's may die here, where the pool waits. Where connections cannot be shut, a group that has not ended after
        GRACE is left to itself.
        """
        self.made_in, self.dropping = None, True  # nobody is waited for, and nobody leaves
        if broken:
            self._outlived.clear()
        if not system.has_proc():
            self._leave()
            return
        try:
            with self.sockets.shutting(after=0 if broken else GRACE) as shut:
                if broken:
                    abort_transfers()
                _end_default_group(broken)
                _forget()
        finally:
            self.dropping = False
        self.tell("group_gone")
        if shut.is_set():
            self.released()

    def _leave(self) -> None:
        """Take the groups from torch. Whoever drops the last reference to one waits for its pending work: that is a
        thread, or, where work is known to be pending, nobody."""
        try:
            held = {**call_log.groups(), "": sys.modules["torch.distributed"].group.WORLD}
            if _has_pending_work():
                self._left.append({**held})
            torch.set_default_group(None)
            _forget()
            ending = OwnThread("nbddp-ending", _let_go, held)
            if ending.begin():
                ending.join(GRACE)
        finally:
            self.dropping = False
        self.tell("group_gone")

    def _wrap_init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            import torch.distributed as dist

            self.touched = True
            if dist.is_initialized() and self.made_in != self.run:
                self.drop(broken=False)
            if not dist.is_initialized():
                _forget()
                self.inits += 1
                self._made = {}
                call_log.CALLS.new_epoch(self.run, self.inits)
                self.tell("group_begins")
            if self.shares_gpus and kwargs.get("world_size") != 1:
                args, kwargs = gpus.with_backend(args, kwargs)
            if self._gives_store and len(args) < 2:
                kwargs = self._with_store(kwargs)
            hook = sys.excepthook
            try:
                result = original(*args, **kwargs)
            finally:
                sys.excepthook = hook  # every init nests another one
            self.made_in = self.run
            if has_nccl() and os.environ.get(HANDLING, "3") in TEARS_DOWN:
                self.handling = os.environ.get(HANDLING, "3")
            call_log.CALLS.world = (dist.get_rank(), dist.get_world_size())
            return result

        return init_process_group

    def _wrap_store(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(store: Any, *args: Any, **kwargs: Any) -> None:
            self.touched = True
            with self.sockets.watch(), self._quiet.connecting():
                store_client.make(original, store, args, kwargs, self._is_of_pool(*args, **kwargs))

        return __init__

    def _is_of_pool(self, *args: Any, **kwargs: Any) -> bool:
        """Whether these arguments of a store are those of the pool's."""
        given = {**dict(zip(store_client.PARAMETERS, args, strict=False)), **kwargs}
        return (given.get("host_name"), given.get("port")) in (self._injected, self._connect)

    def _wrap_new_group(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """torch makes a group, and a store for it; of one that this rank is no member of, a mere sign."""

        @functools.wraps(original)
        def new_group(*args: Any, **kwargs: Any) -> Any:
            self._compared, self.touched = False, True
            given = {**dict(zip(HELPER, args, strict=False)), **kwargs}
            named = str(given.get("group_desc") or "")
            making = call_log.CALLS.making_group(str(given["group_name"]), given["global_ranks_in_group"], named)
            with making, self.sockets.watch(), self._quiet.connecting():
                made = original(*args, **kwargs)
            if self.inits in self._prefixes and hasattr(made[0], "group_name") and not self._compared:
                self._made[made[0].group_name] = made[0].size()
                self._through(made[0].group_name, 1)
            return made

        return new_group

    def _wrap_gloo(self, original: Callable[..., None]) -> Callable[..., None]:
        """With a guard, a group is not used before it is known that its connections lead to its ranks."""

        @functools.wraps(original)
        def __init__(group: Any, *args: Any, **kwargs: Any) -> None:
            self.touched = True
            given = {**dict(zip(("store", "rank", "size"), args, strict=False)), **kwargs}
            with self.sockets.watch(to_peers=True) as appeared:
                if args:
                    args = (own_stores.heard(args[0]), *args[1:])
                elif "store" in kwargs:
                    kwargs["store"] = own_stores.heard(kwargs["store"])
                original(group, *args, **kwargs)
            store = given["store"] if os.getpid() == self._process and self.owns(given["store"]) else None
            self._compared = self.guard.group_made(appeared, store, given["rank"], given["size"])

        return __init__

    def _through(self, group: str, more: int) -> int:
        """How many ranks are through the making of a group, `more` of them from now on."""
        return int(self._under(self._prefixes[self.inits]).add(f"nbddp/through/{group}", more))

    def _wrap_destroy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
            import torch.distributed as dist

            group = args[0] if args else kwargs.get("group")
            if dist.is_initialized():
                all_of_them = group in (None, torch.default_group())
                self._wait_for_slower_ranks(list(self._made) if all_of_them else [getattr(group, "group_name", "")])
                if torch.destroy_holds_interpreter():
                    clock.sleep(SETTLE)
                else:
                    ended = [*call_log.groups().values(), torch.default_group()] if all_of_them else [group]
                    self._destroyed += [weakref.ref(g) for g in ended if isinstance(g, dist.ProcessGroup)]
                    del ended
            try:
                return original(*args, **kwargs)
            finally:
                torch_debug_detail.CHECKS.let_go()

        return destroy_process_group

    def _wait_for_slower_ranks(self, groups: Sequence[str]) -> None:
        if self.made_in != self.run or self.inits not in self._prefixes or os.getpid() != self._process:
            return
        until = clock.monotonic() + CONNECTING
        try:
            for group in groups:
                while self._through(group, 0) < self._made.get(group, 0) and clock.monotonic() < until:
                    clock.sleep(0.01)
        except RuntimeError as e:  # the store is gone, and with it the run
            print(f"the creation of a group could not be followed ({type(e).__name__}: {e})", file=sys.__stderr__)

    def _with_store(self, given: Given) -> Given:
        """Arguments of an init that would go by `env://` to the pool's store, with what it would find there."""
        env = os.environ
        asked = given.get("init_method") in (None, "env://") and given.get("store") is None
        if not asked or "MASTER_PORT" not in env:
            return given
        place = {n: given.get(n, -1) for n in ("rank", "world_size")}
        found = {n: int(env[n.upper()]) if value < 0 else value for n, value in place.items()}
        if not self._meets_here(env.get("MASTER_ADDR", ""), found["rank"], found["world_size"]):
            return given
        prefix = self._prefix(int(env["MASTER_PORT"]))
        return {**given, **found, "init_method": None, "store": self._under(prefix)}

    def _wrap_create(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def create_store(
            hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, *args: Any, **kwargs: Any
        ) -> Any:
            if not self._meets_here(hostname, rank, world_size):
                with _agent_store((hostname, port) == self._injected):
                    return original(hostname, port, rank, world_size, timeout, *args, **kwargs)
            return self._under(self._prefix(port), timeout=timeout)

        return create_store

    def _meets_here(self, hostname: str, rank: int, world_size: int) -> bool:
        """Whether the ranks that meet at this address are the pool's, so that its store can be their meeting place.
        A process that was forked from this one has a rank of its own."""
        ours = (str(rank), str(world_size)) == (os.environ.get("RANK"), os.environ.get("WORLD_SIZE"))
        return (
            ours and os.getpid() == self._process and (hostname == self._injected[0] or store_client.is_local(hostname))
        )

    def _prefix(self, port: int) -> str:
        """For the default group's init that is going on, by how many there were at this port in this run."""
        inits = self._met.setdefault(port, [])
        if self.inits not in inits:
            inits.append(self.inits)
        self._prefixes[self.inits] = f"nbddp/run{self.run}/port{port}/init{len(inits)}"
        return self._prefixes[self.inits]


def _wrap(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `wrap(original)` in an attribute's place, where it is there."""
    if hasattr(owner, name):
        setattr(owner, name, wrap(getattr(owner, name)))


def _wrap_file_store(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(store: Any, *args: Any, **kwargs: Any) -> None:
        own_stores.opened(original, store, *args, **kwargs)

    return __init__


@contextmanager
def _agent_store(outside: bool) -> Iterator[None]:
    """Whether the store is hosted outside the ranks, as torch reads it; if not, rank 0 hosts it."""
    before = os.environ.pop(AGENT_STORE, None)
    if outside:
        os.environ[AGENT_STORE] = "True"
    try:
        yield
    finally:
        os.environ.pop(AGENT_STORE, None)
        if before is not None:
            os.environ[AGENT_STORE] = before


def _is_initialized() -> bool:
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and bool(dist.is_initialized())


def _end_default_group(broken: bool) -> None:
    """A broken group of NCCL's is aborted: to destroy it would flush what can never end."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return
    if broken and has_nccl():
        abort_nccl()
    else:
        try:
            dist.destroy_process_group()
        except Exception as e:
            print(f"the old process group could not be destroyed ({type(e).__name__}: {e})", file=sys.stderr)
    if dist.is_initialized():
        torch.set_default_group(None)


def _has_pending_work() -> bool:
    """Whether the recorder knows a collective of the last init's groups that is not done."""
    since = call_log.CALLS.epoch.began_ns
    return any(e.active and e.created_ns >= since for e in flight.entries(flight.dumps(active=True)))


def _living(known: Iterable[weakref.ref[Any]]) -> list[Any]:
    """What these still lead to."""
    return [found for found in (one() for one in known) if found is not None]


def _let_go(held: dict[str, call_log.ProcessGroup]) -> None:
    held.clear()
    gc.collect()


def _forget() -> None:
    """Clear torch's bookkeeping of groups, in Python and in C++. A failed init leaves its counter one too high, and the
    next init then waits under another prefix than its peers; or it leaves a group registered under a name that the next
    init needs."""
    torch.forget_groups()
    torch_debug_detail.CHECKS.let_go()
