"""What else of a program may still run its code on this rank, apart from the thread that represents the rank.

A rank is out of the game only if there is nothing of the kind. So this is a list of what is known to call nobody.
Everything else counts: each Python thread that is no service of nbddp's, torch's or the IPython kernel's, and no idle
thread of an executor; each thread of C's that is not known by its name or by the libraries on its stack; RPC,
whose agent runs what others ask for; and where the main thread runs Python, signal handlers and what stands in its
event loop. Each is a few words for people.

Known is what was there before the first run (`before_first_run`), and what the tables here name.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import functools
import os
import re
import signal
import struct
import sys
import sysconfig
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

import ipykernel
import ipyparallel
import tornado
import zmq
from ipykernel import ipkernel
from IPython import get_ipython

from nbddp.compat import ipykernel as ipykernel_compat
from nbddp.compat.clock import clock
from nbddp.compat.thread import OwnThread
from nbddp.deadlock.on_rank import frames, threads
from nbddp.deadlock.on_rank.frames import SeenFrame
from nbddp.protocol.codec import name_of

OWN = tuple(f"{frames.ROOT}/{folder}/" for folder in ("capabilities", "compat", "deadlock", "protocol", "worker"))
# packages whose coroutines and callbacks are none of the program's
MACHINERY = (*OWN, *(os.path.dirname(str(m.__file__)) + "/" for m in (ipykernel, ipyparallel, tornado, zmq)))
ASYNCIO = os.path.dirname(asyncio.__file__) + "/"
STARTERS = (threading.__file__, ipkernel.__file__)  # a thread's outermost frames, whoever has started it
# files whose threads serve a library and call no program
SERVICES = (
    "/torch/utils/data/_utils/pin_memory.py",
    "/torch/_inductor/compile_worker/subproc_pool.py",
    "/multiprocessing/queues.py",
    "/multiprocessing/resource_sharer.py",
    "/zmq/utils/garbage.py",
    "/tqdm/_monitor.py",
    "/rich/live.py",
    "/tensorboard/summary/writer/event_file_writer.py",
)
LOADERS = "/torch/utils/data/_utils/signal_handling.py"  # its handler of SIGCHLD looks for loader workers that died
# names of C++'s threads: torch's, gloo's, ZeroMQ's, CUDA's and NCCL's
NATIVE = re.compile(r"pt_|gloo_|zmqbg|cuda|nccl")
# libraries whose threads call no program: C's, and OpenMP's, BLAS's, torch's, Triton's, NVIDIA's, Arrow's
LIBC = re.compile(r"(lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)|ld-linux-[\w-]+)(-[\w.]+)?\.so[\d.]*")
LIBRARIES = re.compile(
    r"lib(gomp|omp|iomp5|mkl|\w*openblas|torch|c10|caffe2|cuda|cublas|cudnn|cufft|cupti|curand|cusparse|cusolver|cufile"
    r"|triton|proton|nvidia|nvrtc|nvJit|nvToolsExt|nccl|gloo|zmq|arrow|parquet|jemalloc|tbb)[\w.+-]*\.so[\w.]*"
)
PYTHON, EXTENSIONS = os.path.realpath(sys.executable), sysconfig.get_config_var("DESTSHARED")
STACK = 1 << 16  # bytes of a thread's stack that are read
POOLED = concurrent.futures.thread.__file__  # where a thread of an executor waits for work
RESTS = 0.04  # seconds in which a thread that waits for the interpreter has tried several times to get it
DISPATCHER = "CallbackDispatcher"  # ipywidgets' class for lists of callbacks
NESTED = 8  # functions within functions, looked into so far
ANSWER = 0.1  # seconds in which an idle main thread says what stands in its event loop

_known: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # that were there before the first run
_resting: weakref.WeakKeyDictionary[threading.Thread, tuple[int | None, float]] = weakref.WeakKeyDictionary()
_natives: set[str] = set()  # Linux's numbers of C's threads that are known to call nobody
_handlers: dict[int, Any] = {}  # signal → its handler before the first run


def before_first_run() -> None:
    """Note what is there, but for the main thread: it carries questions and output, and is no program's."""
    if _known:
        return
    _known.update(threading.enumerate())
    _handlers.update(_callable_handlers())
    threads.before_first_run()
    LOOP.begin()


def acts(of_all: threads.Stacks, ident: int, is_torch: threads.Asks, is_user: threads.Asks) -> list[str]:
    """What may act besides the thread `ident`. of_all: the frames of all threads but the one that asks."""
    main = threading.main_thread().ident

    def is_programs(f: SeenFrame) -> bool:
        return is_torch(f) or (is_user(f) and not f.file.startswith(MACHINERY))

    found = [*_python_threads(of_all, {ident, main}, is_programs), *_native_threads(of_all)]
    if ident != main:  # the main thread waits in Python for `ident`
        found += handlers()
    return [*found, *rpc()]


def idle(of_all: threads.Stacks, is_torch: threads.Asks, is_user: threads.Asks) -> list[str]:
    """What may act on a rank whose main thread has ended its cell."""
    found = acts(of_all, threading.main_thread().ident or 0, is_torch, is_user)
    return [*found, *handlers(), *LOOP.ask()]


# -- threads -----------------------------------------------------------------------------------------


def _python_threads(of_all: threads.Stacks, quiet: set[int | None], acts: threads.Asks) -> Iterator[str]:
    there = threading.enumerate()
    named = {t.ident: t for t in there}
    for ident, its in of_all.items():
        thread = named.get(ident)
        if ident not in quiet and (
            any(map(acts, its)) or not (thread in _known or _serves(its) or _rests(thread, its))
        ):
            yield f'thread "{name_of(thread.name)}"' if thread is not None else "a thread"
    yield from (f'thread "{name_of(t.name)}"' for t in there if _begins(t))


def _begins(thread: threading.Thread) -> bool:
    """Whether a thread has been started, and has not come to its function."""
    return thread.native_id is None and not (isinstance(thread, OwnThread) and thread.has_died_early())


def _serves(its: list[SeenFrame]) -> bool:
    """Whether a thread that has these frames is none of the program's."""
    first = next((f for f in reversed(its) if f.file not in STARTERS), None)
    if first is None:
        return False
    return first.file.endswith(SERVICES) or first.file.startswith(OWN)


def _rests(thread: threading.Thread | None, its: list[SeenFrame]) -> bool:
    """Whether a thread of an executor has nothing to do: its queue is empty, and it has not run since it was seen so
    before. One that has just been given something, and waits for the interpreter, wakes up again and again."""
    if thread is None or not its or its[0].file != POOLED:
        return False
    (queue,) = its[0].get("work_queue")
    ran, now = threads.ran(thread.native_id), clock.monotonic()
    before, since = _resting.get(thread, (None, now))
    if ran is None or queue is None or queue.qsize() or ran != before:
        _resting[thread] = ran, now
        return False
    return now - since > RESTS


def _native_threads(of_all: threads.Stacks) -> Iterator[str]:
    """C's threads. One that has Python frames is looked at by these."""
    there = set(threads.tasks())
    _natives.intersection_update(there)
    pythons = {str(t.native_id) for t in threading.enumerate() if t.ident in of_all}
    ours = {str(threads.main_native()), str(threading.get_native_id())}
    named = {thread: threads.name(thread) for thread in there - threads.machinery() - _natives - pythons - ours}
    unknown = {thread: name for thread, name in named.items() if name and not NATIVE.match(name.lower())}
    if unknown:
        CODE.read()
    acts = {thread: name for thread, name in unknown.items() if not _in_libraries(thread)}
    _natives.update(named.keys() - acts.keys())
    yield from (f'thread "{name}" of a library' for name in acts.values())


def _in_libraries(thread: str) -> bool:
    """Whether a thread of C's waits, and its stack leads to nothing but libraries that call no program. One that leads
    to C's own alone may be a timer of anybody's. Words of the interpreter are left by a Python thread that had this
    stack before. A thread that is Python's now has frames, and is judged by them."""
    with suppress(OSError, ValueError):
        stack, at = (int(n, 16) for n in threads.short(f"/proc/self/task/{thread}/syscall").split()[-2:])
        files = {CODE.owner(word) for word in (at, *_words(stack))} - {""}
        others = {os.path.basename(file) for file in files if not _is_pythons(file)}
        others = {name for name in others if not LIBC.fullmatch(name)}
        return bool(others) and all(map(LIBRARIES.fullmatch, others))
    return False


def _is_pythons(file: str) -> bool:
    """Whether a file is the interpreter, or an extension of its standard library."""
    return file == PYTHON or os.path.dirname(file) == EXTENSIONS or os.path.basename(file).startswith("libpython3")


def _words(stack: int) -> tuple[int, ...]:
    """What is on a stack from its innermost end on, and nothing of what lies above it. By the file of memory: the
    thread may end meanwhile."""
    descriptor = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        held = os.pread(descriptor, min(STACK, CODE.end(stack) - stack), stack)
    finally:
        os.close(descriptor)
    return struct.unpack(f"{len(held) // 8}Q", held[: len(held) // 8 * 8])


class Code:
    """Which file an address of code is of, by this process's map of memory as it was read last."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._rows: list[tuple[int, str]] = []  # where a piece of memory ends, and the file of its code, or empty

    def read(self) -> None:
        with open("/proc/self/maps") as maps:
            rows = [line.rstrip("\n").split(maxsplit=5) for line in maps]
        self._begins, self._rows = [], []
        for place, rights, *_, last in rows:
            begin, end = (int(n, 16) for n in place.split("-"))
            self._begins.append(begin)
            self._rows.append((end, last if "x" in rights and last.startswith("/") else ""))

    def _row(self, address: int) -> tuple[int, str]:
        at = bisect_right(self._begins, address) - 1
        return self._rows[at] if at >= 0 and address < self._rows[at][0] else (address, "")

    def owner(self, address: int) -> str:
        """Empty where no file's code is."""
        return self._row(address)[1]

    def end(self, address: int) -> int:
        """Where the piece of memory ends that an address is in."""
        return self._row(address)[0]


CODE = Code()


# -- signals, RPC ---------------------------------------------------------------------------------------


def _callable_handlers() -> dict[int, Callable[..., object]]:
    found = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
    return {n: h for n, h in found.items() if callable(h)}


def handlers() -> list[str]:
    """The program's functions for signals."""
    found = [n for n, h in _callable_handlers().items() if not _handles_known(n, h)]
    return [f"its handler of {signal.Signals(n).name}" for n in found]


def _handles_known(number: int, handler: Any) -> bool:
    """Whether a handler is none of the program's. That of a DataLoader with workers stays, and calls the one before."""
    code = getattr(handler, "__code__", None)
    if code is not None and code.co_filename.endswith(LOADERS):
        held = [cell.cell_contents for cell in handler.__closure__ or ()]
        return all(_handles_known(number, one) for one in held if callable(one))
    return _handlers.get(number) is handler or _is_known(handler, MACHINERY)


def rpc() -> list[str]:
    """`RPC` if others may call the program's functions here."""
    module = sys.modules.get("torch.distributed.rpc")
    try:
        return ["RPC"] if module is not None and module.get_worker_info() is not None else []
    except (RuntimeError, AttributeError):  # it has not been begun, or this torch is built without
        return []


# -- widgets ----------------------------------------------------------------------------------------------


def comms() -> list[str]:
    """Whether a front end may call the program: callbacks of its widgets, and of other comms.

    A rank that has ended its cell hears them. A comm alone says nothing: a progress bar has some too. So what holds it
    is looked through for functions of the program's, or of torch's. To be asked in the main thread: whoever held a
    widget elsewhere would let it die there.
    """
    manager = getattr(getattr(get_ipython(), "kernel", None), "comm_manager", None)
    its = list(manager.comms.values()) if manager is not None else []
    seen: set[int] = set()
    return ["a callback of a widget"] * any(_may_call(one, seen) for comm in its for one in _holds(comm))


def _may_call(function: Any, seen: set[int]) -> bool:
    """Whether what is called here is the program's or torch's, or belongs to an object that holds such a function."""
    if _is(function, functools.partial):
        return any(_may_call(one, seen) for one in (function.func, *function.args) if callable(one))
    call = function if _is(function, FunctionType, MethodType) else getattr(type(function), "__call__", None)  # noqa: B004
    code = getattr(call, "__code__", None)
    if _is(function, BuiltinMethodType) or (code is not None and _of_program(code.co_filename)):
        return True
    holder = function.__self__ if _is(function, MethodType) else function
    if id(holder) in seen or _is(holder, FunctionType, type):
        return False
    seen.add(id(holder))
    return any(_may_call(one, seen) for one in (*_holds(holder), *_observers(holder)))


def _of_program(file: str) -> bool:
    return frames.is_user(file, {}) or "/torch/" in file


def _is(one: Any, *kinds: type) -> bool:
    """`isinstance` would ask the object too, which may be a proxy of one that is gone, or run code of the program's."""
    return issubclass(type(one), kinds)


def _held(holder: Any) -> list[Any]:
    try:
        return list(object.__getattribute__(holder, "__dict__").values())
    except (AttributeError, TypeError):  # a class without one
        return []


def _holds(holder: Any) -> Iterator[Any]:
    """Functions that an object has, by themselves or in a list of callbacks, which may be a trait."""
    for value in _held(holder):
        if _is(value, FunctionType, MethodType, BuiltinMethodType, functools.partial):
            yield value
        for one in (value, *(dict.values(value) if _is(value, dict) else ())):
            if type(one).__name__ == DISPATCHER:
                yield from one.callbacks


def _observers(holder: Any) -> Iterator[Any]:
    """What hears of the changes of traits: trait → kind of change → functions."""
    for kinds in (kinds for value in _held(holder) if _is(value, dict) for kinds in dict.values(value)):
        for heard in dict.values(kinds) if _is(kinds, dict) else ():
            yield from (one for one in list.__iter__(heard) if callable(one)) if _is(heard, list) else ()


# -- the event loop ---------------------------------------------------------------------------------------


def _is_known(function: Any, files: tuple[str, ...], depth: int = NESTED) -> bool:
    """Whether what is called here is defined in these folders, with the functions that it is given. What is written in
    C is not known, but for the interpreter's own handler of SIGINT."""
    if isinstance(function, functools.partial):
        given = (function.func, *function.args, *function.keywords.values())
    else:
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if function is not signal.default_int_handler and not (code and code.co_filename.startswith(files)):
            return False
        given = (getattr(getattr(function, "__self__", None), "callback", None),)  # of a timer of tornado's
    return depth > 0 and all(_is_known(one, files, depth - 1) for one in given if callable(one))


class Loop:
    """The event loop in which the main thread is while no cell runs. It says itself what stands in it: whoever held a
    program's callback elsewhere would let it die there."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._descriptors: set[int] = set()

    def begin(self) -> None:
        """In the loop's thread, before the first run."""
        self._loop = asyncio.get_running_loop()
        held = ipykernel_compat.held_by(self._loop)
        self._descriptors = set(held.descriptors) if held is not None else set()

    def ask(self) -> list[str]:
        """What of the program's stands in it; in another thread than the loop's."""
        if self._loop is None or self._loop.is_closed():
            return []
        found: list[str] = []
        answered = threading.Event()

        def answer() -> None:
            found.extend(self._stands())
            answered.set()

        self._loop.call_soon_threadsafe(answer)
        return list(found) if answered.wait(ANSWER) else ["its main thread"]

    def _stands(self) -> list[str]:
        assert self._loop is not None
        held = ipykernel_compat.held_by(self._loop)
        if held is None:
            return ["its event loop"]
        tasks = [t for t in asyncio.all_tasks(self._loop) if not _is_known_task(t)]
        known = all(_is_known(one, (*MACHINERY, ASYNCIO)) for call in held.calls for one in call if callable(one))
        more = [] if known else ["a callback of its event loop"]
        more += ["a connection of its event loop"] * bool(set(held.descriptors) - self._descriptors)
        return ["a task of its event loop"] * bool(tasks) + more + comms()


def _is_known_task(task: asyncio.Task[Any]) -> bool:
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and code.co_filename.startswith(MACHINERY)


LOOP = Loop()
