"""Process groups that outlive a run, and the rendezvous of every run.

torch is left as it is, but for a few seams. `init_process_group` is wrapped: a group left over
from an earlier run is destroyed first, so that a cell can be run again and again; a
second init within one run stays torch's own error. The store that `env://` makes is
taken from the pool's store, under a prefix of this run and this init, if address and port are those
that were injected; a cell that sets its own MASTER_PORT gets torch's own behaviour,
with rank 0 as the server.

The second seam is private (`torch_seams.wrap_create_store`). Where it
is missing, torch's own agent-store client is used; then a second init within one run
meets stale addresses, which torchrun has too.

The third: the sockets that appear while a store or a group is made are noted as torch's
(`release.Sockets`), because only they may be shut to free a blocked call.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nbddp.worker import noted, torch_seams
from nbddp.worker.release import Sockets

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


class Groups:
    """The default process group of this worker, across runs."""

    def __init__(self) -> None:
        self.run = 0
        self.made_in: int | None = None
        self.inits = 0
        self.sockets = Sockets()
        self._injected: tuple[str, int] = ("", 0)
        self._connect = ""
        self._clients: dict[tuple[str, int], Any] = {}

    def install(self) -> None:
        """Put the two seams in place; once, when the worker starts."""
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        if not dist.is_available():
            return
        init = self._wrap_init(distributed_c10d.init_process_group)
        dist.init_process_group = init
        distributed_c10d.init_process_group = init
        torch_seams.wrap_create_store(self._wrap_create)
        self._watch(dist.TCPStore, "__init__")
        self._watch(distributed_c10d, torch_seams.NEW_GROUP)

    def begin(self, run: int, injected: tuple[str, int], connect: str, *, drop: bool) -> None:
        """Enter run number `run`; `drop` ends a group that an earlier failure may have broken."""
        self.run, self._injected, self._connect, self.inits = run, injected, connect, 0
        if drop:
            self.drop()

    def store(self, name: str) -> Any:
        """The pool's store under a prefix of this run and `name`, for what is no business of the user's groups."""
        from torch.distributed import PrefixStore, TCPStore

        where = (self._connect, self._injected[1])
        if where not in self._clients:
            self._clients = {where: TCPStore(*where, is_master=False)}
        return PrefixStore(f"nbddp/run{self.run}/{name}", self._clients[where])

    def owns(self, store: Any) -> bool:
        """Whether this is the pool's store, which no process but the ranks reaches."""
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return getattr(store, "port", None) == self._injected[1]

    def released(self) -> None:
        """A release has shut the sockets: no client of a store can be used again."""
        self._clients = {}

    def _watch(self, owner: Any, name: str) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self.sockets.watch():
                return original(*args, **kwargs)

        setattr(owner, name, watched)

    def facts(self) -> dict[str, Any]:
        """`run` in which the living default group was made (None: there is none), and how many
        collectives it has seen; equal on all ranks unless something broke."""
        dist = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_available() or not dist.is_initialized():
            self.made_in = None
            return {"run": None, "sequence": 0}
        return {"run": self.made_in, "sequence": _sequence()}

    def drop(self) -> None:
        """Destroy the default group and everything torch remembers of it."""
        import torch.distributed as dist

        if dist.is_initialized():
            try:
                dist.destroy_process_group()
            except Exception as e:
                print(f"destroying the old process group: {type(e).__name__}: {e}", file=sys.stderr)
        _forget()
        self.made_in = None

    def _wrap_init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            import torch.distributed as dist

            if dist.is_initialized() and self.made_in != self.run:
                self.drop()
            if not dist.is_initialized():
                _forget()
                self.inits += 1
                noted.NOTES.new_epoch(self.run, self.inits)
            hook = sys.excepthook
            try:
                result = original(*args, **kwargs)
            finally:
                sys.excepthook = hook  # every init nests another one
            self.made_in = self.run
            return result

        return init_process_group

    def _wrap_create(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def create_store(hostname: str, port: int, *args: Any, **kwargs: Any) -> Any:
            if (hostname, port) != self._injected:
                with _own_store():
                    return original(hostname, port, *args, **kwargs)
            from torch.distributed import PrefixStore

            where = (self._connect, port)
            if where not in self._clients:
                # one client for all runs at this store: connecting looks names up, which can take seconds
                self._clients = {where: original(*where, *args, **kwargs)}
            return PrefixStore(f"nbddp/run{self.run}/init{self.inits}", self._clients[where])

        return create_store


@contextmanager
def _own_store() -> Iterator[None]:
    """Let rank 0 host the store: the address is the user's, not the one injected."""
    before = os.environ.pop(AGENT_STORE, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[AGENT_STORE] = before


def _sequence() -> int:
    group = torch_seams.default_group()
    try:
        return torch_seams.sequence(group)
    except (RuntimeError, AttributeError):  # a backend without sequence numbers
        return 0


def _forget() -> None:
    """Clear torch's bookkeeping of groups, in Python and in C++: a failed init leaves its counter one too high, and
    then the next init waits under another prefix than its peers; or it leaves a group registered under
    a name that the next init needs."""
    torch_seams.forget_groups()
