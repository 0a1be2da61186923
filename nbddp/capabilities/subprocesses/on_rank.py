"""Functions and classes of cells in processes that a cell starts by spawn or forkserver.

Such a process gets its functions and classes by name, and reads a script once more to find them. There is none to read
here, and the names may be of earlier cells. So each value that is sent (target, dataset, collate_fn, a pool's function)
brings along, by value, the functions and classes that it needs. In the new process these are put into `__main__`, where
the answers, which go by name, find them. Nothing of a cell runs twice.

This module is imported in the new process too, and imports no more than it needs.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import multiprocessing.spawn
import os
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.context import get_spawning_popen
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

from nbddp.deadlock.on_rank import child_waits, store_client
from nbddp.protocol import pickling
from nbddp.protocol.run_spec import CELL
from nbddp.worker import rank_guard

if TYPE_CHECKING:
    from nbddp.worker.parts import RankWorker


import importlib.abc
import importlib.util
from collections.abc import Sequence
from importlib.machinery import ModuleSpec

Defined = types.FunctionType | type
Number = tuple[int, int]  # the process that sends, and its count
LIBRARY = "torch.distributed"


class _Sending:
    """A process's side: what was started, and the numbers of what has been sent. worker: None in a process that was
    started by spawn. What is forked from a worker has all names too, and answers by name."""

    def __init__(self, worker: RankWorker | None):
        self.worker = worker
        self.count = itertools.count()
        self.begin()

    def begin(self) -> None:
        """In a new process; its numbers are its own."""
        self.started = False  # a process by spawn or forkserver
        self.process = os.getpid()
        self.numbers: weakref.WeakKeyDictionary[Defined, Number] = weakref.WeakKeyDictionary()

    def is_cell(self, path: object) -> bool:
        return self.worker is not None and self.worker.files.is_one(path)

    def by_name(self) -> bool:
        """Whether the program is no cell but a file, which a new process reads."""
        spec = self.worker.spec if self.worker is not None else None
        return spec is not None and spec.cell is not None and spec.op != CELL

    def number(self, thing: Defined) -> Number:
        found = self.numbers.get(thing)
        if found is None:
            found = self.numbers[thing] = (self.process, next(self.count))
        return found


_sending: _Sending | None = None
_arrived: dict[Number, Any] = {}  # in a process that was started by spawn


def install(worker: RankWorker | None) -> None:
    """Have multiprocessing send them; once in a process."""
    global _sending
    _sending = _Sending(worker)
    os.register_at_fork(after_in_child=_sending.begin)
    spawn: Any = multiprocessing.spawn
    spawn.get_preparation_data = _without_cell(spawn.get_preparation_data)
    pickler: Any = ForkingPickler
    pickler.reducer_override = _reduce


def _without_cell(original: Callable[[str], dict[str, object]]) -> Callable[[str], dict[str, object]]:
    """The first instruction of a new process; a cell is not a file to be run again."""

    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict[str, object]:
        assert _sending is not None
        _sending.started = True
        found = original(name)
        if _sending.is_cell(found.get("init_main_from_path")):
            del found["init_main_from_path"]
        return found

    return get_preparation_data


def _reduce(pickler: object, thing: Any) -> Any:
    """How multiprocessing pickles a function or class, and a process that is started; any other thing as ever."""
    assert _sending is not None
    starts = get_spawning_popen() is not None
    if starts and isinstance(thing, BaseProcess):
        reduced: Any = thing.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return _begin, (*reduced[:2], child_waits.folder()), *reduced[2:]
    if _sending.by_name() or not (starts or _sending.started) or not _is_defined(thing):
        return NotImplemented
    name = thing.__qualname__
    try:
        return _arrive, (_sending.number(thing), name, _packed(_found(name.partition(".")[0])))
    except pickle.PicklingError:
        if starts:
            raise
        return NotImplemented  # the process that gets it may have been forked, and then has it


def _found(name: str) -> Any:
    """What `__main__` has under a name."""
    thing: Any = sys.modules["__main__"]
    for part in name.split("."):
        thing = getattr(thing, part, None)
    return thing


def _packed(top: Defined) -> bytes:
    """A function or class and all others of the cells that it needs, by value."""
    assert _sending is not None
    needed = {_sending.number(thing): thing for thing in _with_needed(top)}
    try:
        return _bytes(needed)
    except Exception as e:
        raise pickle.PicklingError(_why(needed.values(), e)) from e


def _bytes(thing: Any) -> bytes:
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        dispatch_table = pickling.table()

    made = io.BytesIO()
    Pickler(made).dump(thing)
    return made.getvalue()


def _why(needed: Any, error: Exception) -> str:
    for thing in needed:
        for name, value in _globals_of(thing):
            if not _is_defined(value):
                try:
                    _bytes(value)
                except Exception as e:
                    user, why = thing.__qualname__, f"{type(e).__name__}: {e}"
                    return (
                        f"{user} is sent to a new process and uses {name}, which cannot be sent ({why}); create "
                        f"{name} inside {user}, or start the process by fork"
                    )
    return f"{type(error).__name__}: {error}"


def _with_needed(top: Defined) -> list[Defined]:
    """`top` and the functions and classes of cells that it names, and those that these name."""
    found, left = [top], [top]
    while left:
        for _, value in _globals_of(left.pop()):
            thing = value if _is_defined(value) else type(value)
            if _is_defined(thing):
                thing = _found(thing.__qualname__.partition(".")[0])
                if not any(thing is other for other in found):
                    found.append(thing)
                    left.append(thing)
    return found


def _is_defined(thing: Any) -> bool:
    """Whether it is a function or class that `__main__` has under its name."""
    return (
        isinstance(thing, (types.FunctionType, type))
        and thing.__module__ == "__main__"
        and _found(thing.__qualname__) is thing
    )


def _globals_of(thing: Defined) -> Iterator[tuple[str, Any]]:
    """Global names that a function or class uses, with what they hold; a class's bases too."""
    if isinstance(thing, type):
        yield from ((base.__name__, base) for base in thing.__bases__)
        for value in vars(thing).values():
            parts = (value.fget, value.fset, value.fdel) if isinstance(value, property) else (value,)
            for part in parts:
                inner = getattr(part, "__func__", part)
                if isinstance(inner, types.FunctionType) or (isinstance(inner, type) and _is_defined(inner)):
                    yield from _globals_of(inner)
        return
    for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # nothing is in it yet
            yield name, cell.cell_contents
    for value in (*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()):
        yield type(value).__name__, value
    for name in _names(thing.__code__):
        if name in thing.__globals__:
            yield name, thing.__globals__[name]


def _names(code: types.CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _begin(make: Callable[..., Any], args: tuple[Any, ...], waits: str) -> Any:
    """In a new process: what it is to run, before anything of it is read. waits: where it says what it waits for."""
    child_waits.arrive(waits)
    once_imported(_guard_stores)
    return make(*args)


@functools.cache
def _guard_stores() -> None:
    """Have programs make stores here as in a worker; once."""
    import torch.distributed as dist

    if dist.is_available():
        init = rank_guard.guard().store_made(_waits_here(dist.TCPStore.__init__))
        dist.TCPStore.__init__ = init


def _waits_here(original: Callable[..., None]) -> Callable[..., None]:
    """A client of a store in a new process waits for its server as one in a worker does, and reports it."""

    @functools.wraps(original)
    def __init__(store: Any, *args: Any, **kwargs: Any) -> None:
        store_client.make(original, store, args, kwargs, known=False)

    return __init__


def _arrive(number: Number, name: str, packed: bytes) -> Any:
    """In the process that receives: the function or class."""
    found = _found(name) if _sending is not None and _sending.worker is not None else None
    if found is not None:
        return found
    if _sending is None:
        install(None)  # what this process starts gets them in its turn
    if number not in _arrived:
        import cloudpickle

        new = {key: thing for key, thing in cloudpickle.loads(packed).items() if key not in _arrived}
        _arrived.update(new)
        for thing in new.values():
            setattr(sys.modules["__main__"], thing.__name__, thing)
        for thing in new.values():  # now each that has a name of its own is found under it
            _qualify(thing)
        _arrived.setdefault(number, _found(name))
    return _arrived[number]


def _qualify(thing: Any) -> None:
    """Classes within classes, by whose full names they are found: cloudpickle leaves them their last names."""
    for name, inner in list(vars(thing).items()) if isinstance(thing, type) else ():
        own = isinstance(inner, type) and inner.__name__ == name and inner.__module__ == "__main__"
        if own and not _is_defined(inner):
            inner.__qualname__ = f"{thing.__qualname__}.{name}"
            _qualify(inner)


# -- as soon as torch is there ---------------------------------------------------------------------


def once_imported(do: Callable[[], None]) -> None:
    """Call it at once where the library is there, else when its import ends."""
    if LIBRARY in sys.modules:
        do()
    else:
        sys.meta_path.insert(0, _Finder(do))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the library as ever, once."""

    def __init__(self, do: Callable[[], None]) -> None:
        self._do = do

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if name != LIBRARY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                self._do()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
