"""A wait for a store of the program's own to which no socket leads: one in a file, or in this process's memory.

torch waits for its keys in C++, until the store's own timeout, and hears neither Stop nor `release`: such a rank could
only be replaced. So what is waited for is waited for here, and torch is asked once it is there. Where C++ itself asks
the store, as gloo does when a group is made, it is given one that asks here (`heard`). A frame of `until` says for
which store a rank waits (`deadlock.on_rank.position`).
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from nbddp.compat.clock import clock

FREED = threading.Event()  # while the calls of this rank are ended
FIRST, MOST = 0.001, 0.05  # seconds between two looks, the first and the longest
USUAL = 300.0  # seconds that torch waits for a folder
LAZY = "TORCH_GLOO_LAZY_INIT"  # gloo asks the store later then, in its own threads
IN_MEMORY = "at a HashStore, which no other process reaches"
TIMED_OUT, ENDED = "Wait timeout", "the wait for {} stopped with the run"

Version = tuple[int, int] | None  # of a file: its number and its size, since a store only adds; None: there is none


def base(store: Any) -> Any:
    """The store that does not hear, at the bottom of these prefixes; None if it hears."""
    import torch.distributed as dist

    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, (dist.FileStore, dist.HashStore)) else None


def call(original: Callable[..., Any], store: Any, bottom: Any, *args: Any, **kwargs: Any) -> Any:
    """A method of a store's that blocks, where it is heard. bottom: its `base`."""
    name = original.__name__
    if name in ("barrier", "multi_get"):
        return original(_heard_kind()(store), *args, **kwargs)  # torch makes them of the others
    key, *more = [*args, *kwargs.values()] or [None]
    asked, keys = f"{name}({key!r})", [key] if name == "get" else key
    if name == "queue_pop":
        if all(more):  # it blocks
            until(lambda: bool(store.queue_len(key)), bottom, store.timeout, asked)
    elif _are_right(keys, more):
        until(lambda: bool(store.check(list(keys))), bottom, more[0] if more else store.timeout, asked)
    return original(store, *args, **kwargs)


def _are_right(keys: Any, limits: list[Any]) -> bool:
    """Whether torch will take them; if not, it reports that."""
    listed = isinstance(keys, (list, tuple)) and all(isinstance(key, str) for key in keys)
    return listed and all(isinstance(limit, timedelta) for limit in limits)


def until(there: Callable[[], bool], bottom: Any, limit: timedelta, asked: str) -> None:
    """Returns when it is there. Raises as torch does when it is too late, and when the run is ended."""
    end = clock.monotonic() + limit.total_seconds() if limit else None  # torch has none for a limit of zero
    file, pause = getattr(bottom, "path", None), FIRST
    where = f"at the file {file}" if file else IN_MEMORY  # noqa: F841  # read by `position`
    seen: Any = ()
    while True:
        now = _version(file) if file else ()
        if (now != seen or not file) and now is not None and there():
            return
        seen = now
        if end is not None and clock.monotonic() >= end:
            raise _error(bottom)(TIMED_OUT)
        if FREED.wait(pause):
            raise _error(bottom)(ENDED.format(asked))
        pause = min(pause * 2, MOST)


def _version(file: str) -> Version:
    """It is opened, since a network file system asks its server then; and not read, which is counted as work."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # torch would wait in C++ for a file that is not there
        return None
    try:
        state = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return state.st_ino, state.st_size


def _error(bottom: Any) -> type[Exception]:
    import torch.distributed as dist

    return RuntimeError if hasattr(bottom, "path") else dist.DistStoreError


def opened(original: Callable[..., None], store: Any, *args: Any, **kwargs: Any) -> None:
    """A FileStore is made. torch waits in C++ for a folder that is not there, as long as a store does by default."""
    file = args[0] if args else kwargs.get("file_name")
    if isinstance(file, str):
        folder = os.path.dirname(os.path.abspath(file))
        until_folder(folder, clock.monotonic() + USUAL)
    original(store, *args, **kwargs)


def until_folder(folder: str, end: float) -> None:
    where = f"opening a store in {folder}, a folder that does not exist"  # noqa: F841  # read by `position`
    while not os.path.isdir(folder):
        if clock.monotonic() >= end:
            raise RuntimeError(f"a store in a file: there is no folder {folder}")
        if FREED.wait(MOST):
            raise RuntimeError(ENDED.format(f"the folder {folder}"))


def heard(store: Any) -> Any:
    """The store as C++ is to have it while it makes a group."""
    lazy = os.environ.get(LAZY, "0").lower() not in ("", "0", "n", "no", "f", "false")
    return store if lazy or base(store) is None else _heard_kind()(store)


@functools.cache
def _heard_kind() -> type:
    from torch.distributed import Store

    class Heard(Store):  # type: ignore[misc,unused-ignore]
        """Asks a store by its methods in Python, which are waited for here. C++ may have it for as long as a call."""

        def __init__(self, store: Any) -> None:
            super().__init__()
            self._store = store

        def has_extended_api(self) -> bool:
            return False

    for name in ("set", "get", "add", "check", "wait", "delete_key", "num_keys", "compare_set", "set_timeout"):
        setattr(Heard, name, _passed(name))
    return Heard


def _passed(name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any) -> Any:
        return getattr(self._store, name)(*args)

    return call
