"""A cell as a program: its file, its text, its imports and its interrupts.

A script's `__file__` names its folder, and libraries look there (Hydra for its configuration). They take a program
without one for a person who types, and they read classes' sources from it. A cell's is `In[3].py` in the working
directory. No such file is written: Python reads the lines from `linecache`, where IPython keeps them, and
`inspect` finds classes there.

As in a plain kernel, one Stop is one SIGINT. What a program does from then on, it does on its way out, and nobody may
end it for that. So the client gets a message once Python has handed the interrupt to its handler, the program's own
included: `signal.signal` is wrapped. It gets this before the handler is called, which may go on in native code that
holds the interpreter. Python prints and forgets an interrupt that hits a destructor or another callback of its own
(`sys.unraisablehook`): that one alone is sent again.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import inspect
import linecache
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import Any

import IPython
from IPython.core.inputtransformer2 import TransformerManager

from nbddp.compat.clock import clock
from nbddp.compat.thread import OwnThread
from nbddp.protocol.codec import first_word, program_rows


class CellFiles:
    """The names of a worker's cells as files; `shown` holds what reports call them: `Cell In[3]`."""

    def __init__(self) -> None:
        self.shown: dict[str, str] = {}
        self._codes: dict[str, str] = {}
        self._namespace: dict[str, Any] = {}
        self._named = True

    def install(self, shell: Any) -> None:
        self._namespace = shell.user_ns
        shell.compile.get_code_name = self._name
        reader: Any = inspect
        reader.getfile = _finding(inspect.getfile, self)

    def begin(self) -> None:
        """The next code that is compiled is a cell of its own, not a part that a magic runs."""
        self._named = False

    def is_one(self, path: object) -> bool:
        return path in self.shown

    def of_class(self, cls: type) -> str:
        """In which cell a class was defined; empty if that is not known."""
        for value in vars(cls).values():
            function = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else None
            if isinstance(function, FunctionType) and function.__qualname__.startswith(f"{cls.__qualname__}."):
                file = function.__code__.co_filename
                if not file.startswith("<"):  # as what a dataclass makes
                    return file
        defines = re.compile(rf"\s*class\s+{re.escape(cls.__name__)}\b")
        found = (file for file in reversed(self.shown) if any(map(defines.match, linecache.getlines(file))))
        return next(found, "")

    def _name(self, raw_code: str, transformed_code: str, number: int) -> str:
        """The file of a piece of code, for IPython's compiler."""
        name, digest = f"In[{number}]", hashlib.sha256(transformed_code.encode("utf-8", "replace")).hexdigest()
        if self._codes.setdefault(name, digest) != digest:  # outside of notebooks cells have no numbers
            name = f"{name}.{digest[:8]}"
        try:
            path = os.path.join(os.getcwd(), f"{name}.py")
        except FileNotFoundError:  # the working directory is gone
            path = f"{name}.py"
        self.shown.pop(path, None)
        self.shown[path] = f"Cell In[{number}]"  # the newest is last
        if not self._named:
            self._namespace["__file__"], self._named = path, True
        return path


def _finding(getfile: Callable[[Any], str], files: CellFiles) -> Callable[[Any], str]:
    """`inspect.getfile` that knows in which cell a class was defined: Python asks `__main__`, which is the last one."""

    @functools.wraps(getfile)
    def in_cells(object: Any) -> str:  # noqa: A002  # as its caller may name it
        found = getfile(object)
        if inspect.isclass(object) and files.is_one(found):
            return files.of_class(object) or found
        return found

    return in_cells


# -- the text of a cell -----------------------------------------------------------------------------

# A cell's text on its way to Python: each thing that is found out about it is found out once.
# What IPython's own syntax becomes is the same on all ranks, so the client says it with the cell
# (`execution.cell_text.as_python`). ipykernel asks for it, and IPython once more; both ask, too, whether the cell
# awaits something, which compiles it.

Given = tuple[str, str]  # the version of IPython that has transformed it, and the text after


class CellText:
    """Of a worker's shell."""

    def __init__(self) -> None:
        self._given: tuple[str, str] | None = None
        self._found: tuple[str, str] | None = None

    def install(self, shell: Any) -> None:
        """Once, when the worker starts."""
        manager = shell.input_transformer_manager
        manager.transform_cell = self._as_given(manager, manager.transform_cell)
        self._shell = shell
        shell.transform_cell = self._once(shell.transform_cell)
        shell.should_run_async = _asked_once(shell, shell.should_run_async)

    def begin(self, code: str, given: Given | None) -> None:
        """A run begins. given: what the client has found out about its code."""
        self._given = self._found = None
        if given is not None and given[0] == IPython.__version__:
            self._given = code, given[1]

    def _as_given(self, manager: Any, transform: Callable[[str], str]) -> Callable[[str], str]:
        """For a shell in which nobody has changed what is transformed, and how."""
        usual = _parts(TransformerManager())

        @functools.wraps(transform)
        def transform_cell(cell: str) -> str:
            if self._given is not None and cell == self._given[0] and _parts(manager) == usual:
                return self._given[1]
            return transform(cell)

        return transform_cell

    def _once(self, transform: Callable[[str], str]) -> Callable[[str], str]:
        """The second call for a cell gets what the first has got."""

        @functools.wraps(transform)
        def transform_cell(raw_cell: str) -> str:
            known, self._found = self._found, None
            if known is not None and known[0] == raw_cell:
                return known[1]
            found = self._expanded(transform(raw_cell))
            self._found = raw_cell, found
            return found

        return transform_cell

    def _expanded(self, text: str) -> str:
        """IPython takes the first word of a cell of one row for a magic or an alias (`ls`, `pwd`) if it is no name. It
        does not see that this is one: above the row is the magic line."""
        rows, of_program = text.splitlines(keepends=True), program_rows(text)
        if len(of_program) != 1 or len(rows) == 1 or not self._shell.automagic:
            return text
        at = of_program[0]
        if self._shell.find_line_magic(first_word(rows[at])) is None:
            return text
        with self._shell.builtin_trap:
            rows[at] = self._shell.prefilter_manager.prefilter_lines(rows[at]) + "\n"
        return "".join(rows)


def _parts(manager: TransformerManager) -> tuple[list[Any], ...]:
    return manager.cleanup_transforms, manager.line_transforms, manager.token_transformers


def _asked_once(shell: Any, ask: Callable[..., bool]) -> Callable[..., bool]:
    """`should_run_async`, which answers for the last cell from memory."""
    last: list[Any] = [None, False]

    @functools.wraps(ask)
    def should_run_async(raw_cell: str, **options: Any) -> bool:
        about = (shell.autoawait, options.get("transformed_cell"))
        if about[1] is None or options.get("preprocessing_exc_tuple") is not None:
            return ask(raw_cell, **options)
        if last[0] != about:
            last[:] = [about, ask(raw_cell, **options)]
        return bool(last[1])

    return should_run_async


# -- imports -------------------------------------------------------------------------------------------


PROGRAMS = {"print", "input", "breakpoint"}  # the worker needs none of them; threads of a program go on with its own


class OwnImports:
    """Modules that were there before any program, and Python's own functions, that which imports among them. A program
    may take all away, and between runs the worker needs them. A function that a program has put there is back in its
    next run."""

    def __init__(self) -> None:
        self._there, self._modules = vars(builtins), dict[str, ModuleType]()
        own = {name: it for name, it in self._there.items() if isinstance(it, (type, BuiltinFunctionType))}
        self._own = {**own, "__import__": self._there["__import__"]}
        self._programs: dict[str, Any] = {}

    def begin(self) -> None:
        self._modules = self._modules or dict(sys.modules)
        self._there.update({name: it for name, it in self._programs.items() if it is not None})
        self._programs = {}

    def end(self) -> None:
        """At once when a program has ended: nothing else works before. A second call changes nothing."""
        there = self._there
        now = {name: there.get(name) for name, it in self._own.items() if there.get(name) is not it}
        changed = {name: it for name, it in now.items() if name not in PROGRAMS or not callable(it)}
        if changed:
            self._programs = changed
            there.update({name: self._own[name] for name in changed})
        if __name__ not in sys.modules:  # not if it has removed some of its own
            sys.modules.update(self._modules | sys.modules)


# -- interrupts ----------------------------------------------------------------------------------------

FILE = __file__
AGAIN = 0.05  # seconds until an interrupt that Python has ignored is sent again
SAY = 0.005  # seconds in which the thread that sends may have the interpreter

Handler = Callable[[int, FrameType | None], Any]


class Noting:
    """A handler of SIGINT that is called after its interrupt has been noted."""

    def __init__(self, handler: Handler, note: Callable[[], None]):
        self.handler, self._note = handler, note

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        self._note()
        return self.handler(number, frame)


class WorkerInterrupts:
    """`is_on`: whether a program runs; `taken`: whether it has had an interrupt. say: tells the client; called in a
    signal's handler."""

    def __init__(self, say: Callable[[], None]) -> None:
        self._say = say
        self._process = os.getpid()
        self._run = 0
        self.is_on = self.taken = False
        self._signal, self._unraisable = signal.signal, sys.unraisablehook

    def install(self) -> None:
        """Have handlers noted from here on; once, when the worker starts."""
        set_handler, handler_of = signal.signal, signal.getsignal

        @functools.wraps(set_handler)
        def signal_(signalnum: Any, handler: Any) -> Any:
            noted = signalnum == signal.SIGINT and callable(handler)
            before = set_handler(signalnum, Noting(handler, self._note) if noted else handler)
            return before.handler if isinstance(before, Noting) else before

        @functools.wraps(handler_of)
        def getsignal(signalnum: Any) -> Any:  # asyncio asks whether it is default_int_handler
            handler = handler_of(signalnum)
            return handler.handler if isinstance(handler, Noting) else handler

        signal.signal, signal.getsignal = signal_, getsignal
        self._signal, self._unraisable = signal_, sys.unraisablehook
        sys.unraisablehook = self._ignored

    def begin(self) -> None:
        """A program begins; in the main thread."""
        self.taken, self.is_on, self._run = False, True, self._run + 1
        self._signal(signal.SIGINT, signal.default_int_handler)

    def end(self) -> None:
        """It has ended: an interrupt comes too late."""
        self._signal(signal.SIGINT, signal.SIG_IGN)
        self.is_on = False

    def _note(self) -> None:
        if self.taken or not self.is_on or os.getpid() != self._process:
            return
        self.taken = True
        self._say()
        clock.sleep(SAY)

    def _ignored(self, unraisable: Any) -> None:
        """What Python cannot raise, since nobody has called what raised it."""
        ours = self.taken and self.is_on and os.getpid() == self._process
        if ours and unraisable.exc_type is KeyboardInterrupt and threading.current_thread() is threading.main_thread():
            OwnThread("nbddp-interrupt", self._send_again, self._run).begin()
        else:
            self._unraisable(unraisable)

    def _send_again(self, run: int) -> None:
        clock.sleep(AGAIN)
        if self.is_on and self._run == run:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]
