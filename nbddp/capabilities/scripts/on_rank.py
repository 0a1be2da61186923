"""A script or module as the program of this rank, the way Python runs it from a command line.

`__main__` is a fresh module, with `__file__`, `__spec__` and `__package__` as `python train.py` and `python -m train`
have them; sys.argv and sys.path[0] are the program's. A process that the program spawns finds `__main__` by its file.
At its end nbddp does what Python does at the end of a process, since this process goes on. It waits for threads, calls
functions of `atexit`, and ends or joins processes of multiprocessing's. A program that leaves its names to the next
cell (`keep`) has not come to its end.
"""

from __future__ import annotations

import asyncio
import builtins
import gc
import importlib.machinery
import importlib.util
import io
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from types import CodeType, ModuleType
from typing import Any

from nbddp.protocol.codec import plain
from nbddp.worker.parts import RankWorker

MAIN = "__main__"


class Script:
    """One program. After `run`, `error` is what ended it (None: it came to its end), and `module` its `__main__`."""

    def __init__(self, target: str, module: bool, keep: bool, argv: Sequence[str], call_exits: Callable[[], None]):
        """target, module, keep: as `ScriptProgram` has them. argv: its sys.argv. call_exits: calls what programs have
        given to `atexit` here."""
        self._target, self._is_module, self._keep = target, module, keep
        self._argv, self._call_exits = list(argv), call_exits
        self.module = ModuleType(MAIN)
        self.error: BaseException | None = None
        self.said = ""  # the traceback that Python would have written to stderr
        self._threads = set(threading.enumerate())
        self._executors = {id(e) for e in _executors()}
        self._processes = {p.pid for p in multiprocessing.active_children()}

    def run(self) -> None:
        """Run it, to its end unless it keeps its variables. Raises nothing: an interrupt is the program's `error`
        too."""
        path, main, hook = [*sys.path], sys.modules.get(MAIN), sys.excepthook
        try:
            with outside_loop():
                self._catch(self._execute)
                self._word()
                if not self._keep:
                    self._catch(self._end)
        finally:
            sys.path[:], sys.excepthook = path, hook
            if main is not None:
                sys.modules[MAIN] = main

    def _catch(self, do: Callable[[], None]) -> None:
        try:
            do()
        except BaseException as e:
            self.error = self.error or e

    def _execute(self) -> None:
        sys.excepthook = sys.__excepthook__
        sys.path[:] = [p for p in sys.path if p]
        target, module = self._target, self.module
        sys.argv = self._argv
        sys.orig_argv = [sys.executable, "-u", *(["-m"] if self._is_module else []), *sys.argv]  # torchrun's
        module.__dict__.update(__builtins__=builtins, __annotations__={}, __package__=None, __cached__=None)
        sys.modules[MAIN] = module
        code = (_module if self._is_module else _file)(target, module)
        exec(code, module.__dict__)

    def _word(self) -> None:
        """What Python writes to stderr of an exception that nobody has caught, by a hook of the program's if it has
        one."""
        error = self.error
        if error is None or isinstance(error, SystemExit):
            return
        tb = error.__traceback__
        while tb is not None and tb.tb_frame.f_code.co_filename == __file__:
            tb = tb.tb_next
        if sys.excepthook is not sys.__excepthook__:
            sys.excepthook(type(error), error, tb)
            return
        self.said = "".join(traceback.format_exception(type(error), error, tb))

    def _end(self) -> None:
        """What Python does when a process ends, in its order."""
        for executor in _executors():
            if id(executor) not in self._executors:
                executor.shutdown(wait=True)
        for thread in threading.enumerate():
            if thread not in self._threads and not thread.daemon and thread is not threading.current_thread():
                thread.join()
        self._call_exits()
        started = [p for p in multiprocessing.active_children() if p.pid not in self._processes]
        for process in started:
            if process.daemon:
                process.terminate()
        for process in started:
            process.join()


def _executors() -> list[Executor]:
    """Those of this process; what the warm process had is frozen, and not looked at."""
    return [found for found in gc.get_objects() if issubclass(type(found), Executor)]


def _file(target: str, module: ModuleType) -> CodeType:
    """A file, or a folder or archive that has a `__main__.py`."""
    path = os.path.abspath(target)
    spec = importlib.machinery.PathFinder.find_spec(MAIN, [path]) if not _is_source(path) else None
    if spec is not None:
        sys.path.insert(0, path)
        return _of_spec(spec, module)
    sys.path.insert(0, os.path.dirname(os.path.realpath(target)))
    loader: Any
    if path.endswith(".pyc"):
        loader = importlib.machinery.SourcelessFileLoader(MAIN, path)
        found = loader.get_code(MAIN)
    else:
        loader = importlib.machinery.SourceFileLoader(MAIN, path)
        with io.open_code(path) as file:
            found = compile(file.read(), path, "exec", dont_inherit=True)
    module.__dict__.update(__file__=path, __loader__=loader, __spec__=None)
    code: CodeType = found
    return code


def _is_source(path: str) -> bool:
    """Whether it is a file that no archive begins with."""
    if os.path.isdir(path):
        return False
    with io.open_code(path) as file:
        return file.read(2) != b"PK"


def _module(name: str, module: ModuleType) -> CodeType:
    """`python -m`: of a package, its `__main__`."""
    sys.path.insert(0, os.getcwd())
    spec = _found(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name, package = f"{name}.{MAIN}", name
        spec = _found(name)
        if spec is None:
            raise ImportError(f"No module named {name}; {package!r} is a package and cannot be directly executed")
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name}", name=name)
    code = _of_spec(spec, module)
    sys.argv[0] = spec.origin or name
    return code


def _found(name: str) -> importlib.machinery.ModuleSpec | None:
    """Where a module is; the packages around it are imported. None if one of these is missing."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as e:
        if e.name is not None and (name == e.name or name.startswith(f"{e.name}.")):
            return None
        raise


def _of_spec(spec: importlib.machinery.ModuleSpec, module: ModuleType) -> CodeType:
    loader: Any = spec.loader
    code: CodeType | None = loader.get_code(spec.name)
    if code is None:
        raise ImportError(f"No code object available for {spec.name}")
    module.__dict__.update(
        __file__=spec.origin, __cached__=spec.cached, __loader__=loader, __spec__=spec, __package__=spec.parent
    )
    return code


@contextmanager
def outside_loop() -> Iterator[None]:
    """As if no event loop ran in this thread: a script may call `asyncio.run`."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task(loop)
    if task is not None:
        asyncio.tasks._leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
        if task is not None:
            asyncio.tasks._enter_task(loop, task)
        asyncio.set_event_loop(loop)


def script(
    worker: RankWorker, buffers: Sequence[Any], *, target: str, module: bool, keep: bool, without: Sequence[str]
) -> list[bytes]:
    """Run a script or module. Raises what has ended it. without: variables that are taken away."""
    assert worker.spec is not None
    worker.leaves = True
    for name in without:
        os.environ.pop(name, None)
    program = Script(target, module, keep, worker.spec.argv, worker.exits.call)
    program.run()
    worker.forked.end(program.error, program.said)
    worker.parts.ended(program.error)
    worker.outcome.traceback = plain(program.said)
    if keep:
        names = vars(program.module).items()
        worker.shell.user_ns.update({n: v for n, v in names if not (n.startswith("__") and n.endswith("__"))})
    if program.error is not None:
        raise program.error
    return []
