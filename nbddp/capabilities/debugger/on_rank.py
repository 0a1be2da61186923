"""`breakpoint()` on a rank: Python's own pdb, whose lines come from the notebook and whose answers go there.

The rank's main thread stands in pdb and waits; lines come by the control thread (`line`). What pdb says is published
with the place where the rank stands, each time that it waits for a line, and when it goes on. Where nobody would send
lines (`begin`), a breakpoint raises, so that no rank waits for ever. The machinery around a cell is not stepped
through.
"""

from __future__ import annotations

import ast
import io
import linecache
import os
import pdb  # noqa: T100 - this is a debugger
import queue
import re
import rlcompleter
import sys
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any

from IPython.core.error import StdinNotImplementedError

from nbddp.capabilities.debugger.messages import STOPPED, Stopped
from nbddp.deadlock.on_rank import frames
from nbddp.protocol.codec import plain, to_json
from nbddp.protocol.outcome import Outcome
from nbddp.protocol.position import Place, Whereabouts
from nbddp.worker.parts import RankWorker

WORD = re.compile(r"[^\W\d][\w.]*\Z")
MOST = 200  # names that are offered
Publish = Callable[[Stopped], None]
MOST_NAMES = 20  # of a frame
LENGTH = 60  # characters of a text
NEAR = 5  # lines before and after the one where a rank has stopped
IDENTIFIER = re.compile(r"[^\W\d]\w*")
NOT_TOLD = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)


class Debugger:
    """One rank's. `stopped`: whether it waits for a line. is_users: whether a file is the user's own; named: what it is
    called. worker: whose runs say whether lines may come."""

    def __init__(
        self,
        publish: Publish,
        is_users: Callable[[str], bool],
        named: Callable[[str], str],
        worker: RankWorker | None = None,
    ):
        self.is_users, self.named, self._worker = is_users, named, worker
        self.stopped = False
        self._publish = publish
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._pdb: _Pdb | None = None

    def over(self, outcome: Outcome, error: BaseException | None) -> None:
        """A run has ended in which the rank has stopped: nothing is traced any more."""
        sys.settrace(None)
        self._pdb = None
        self.stopped = False
        while not self._lines.empty():
            self._lines.get_nowait()

    def position(self, found: Whereabouts) -> Whereabouts:
        """Whatever is on its way, it is the reader that a rank waits for which has stopped."""
        return replace(found, stopped=True, call=None, pending=None) if self.stopped else found

    def values(self, frame: FrameType, line: str) -> list[tuple[str, str]]:
        """What the names of a failing frame held."""
        return values(frame, line)

    def breakpoint(self, *args: Any, **kwargs: Any) -> None:
        """`sys.breakpointhook`. Python's own would wait for a front end, or do nothing where ipykernel has put debugpy
        there."""
        if os.environ.get("PYTHONBREAKPOINT") == "0":  # as Python has it
            return
        if not self.may_stop():
            from nbddp.worker.kernel import NO_PROMPT

            raise StdinNotImplementedError(NO_PROMPT)
        self.stop(sys._getframe(1))

    def may_stop(self) -> bool:
        """Whether a breakpoint may wait here: a thread of the program's own may not, as Stop would not reach it."""
        spec = self._worker.spec if self._worker is not None else None
        return spec is not None and spec.debug and threading.current_thread() is threading.main_thread()

    def stop(self, frame: FrameType) -> None:
        """Wait for lines at the next line of this frame."""
        if self._pdb is None:
            self._pdb = _Pdb(self)
            if self._worker is not None:
                self._worker.parts.at_end("debugger", self.over)
        self._pdb.set_trace(frame)

    def line(self, text: str) -> bool:
        """A line for the prompt; whether the rank waits for one."""
        if self.stopped:
            self._lines.put(text)
        return self.stopped

    def names(self, text: str) -> list[str]:
        """What may stand in the place of the last word of this line: names of the frame that the prompt is in."""
        pdb_ = self._pdb
        if not self.stopped or pdb_ is None or pdb_.curframe is None:
            return []
        held = getattr(pdb_, "curframe_locals", None)  # to read a frame's own again takes back what a line has set
        known = {**pdb_.curframe.f_globals, **(pdb_.curframe.f_locals if held is None else held)}
        return completions(text, known)

    def wait(self, said: str, place: Place, frame: FrameType | None = None) -> str:
        """Say this, and what is at this place of a frame, and wait for the next line. The answer may come, in the
        control thread, before this thread has returned from publishing."""
        self.stopped = True
        try:
            self._publish(Stopped(True, said, place, *_around(frame, place[1])))
            return self._lines.get()
        finally:
            self.stopped = False

    def goes_on(self, said: str) -> None:
        self._publish(Stopped(False, said))


class _Pdb(pdb.Pdb):
    """Reads from the debugger and writes into a text, which goes out when a line is wanted. It stops in the user's own
    files alone. IPython runs each statement of a cell by itself, so from the end of one it goes on to the next; after
    a breakpoint that no line follows it stops at the end of the last."""

    def __init__(self, debugger: Debugger):
        self._text = io.StringIO()
        super().__init__(stdin=self, stdout=self._text, nosigint=True, readrc=False)  # type: ignore[arg-type]
        self.prompt = ""
        self._debugger = debugger
        self._asked: FrameType | None = None  # where a breakpoint was met that has not stopped yet

    def set_trace(self, frame: FrameType | None = None, **kwargs: Any) -> None:
        self._asked = frame
        super().set_trace(frame, **kwargs)

    def readline(self) -> str:
        """The next line, for cmd.Cmd."""
        frame, number = self.stack[self.curindex]
        place = (frame.f_code.co_filename, number, frame.f_code.co_name)
        return f"{self._debugger.wait(self._taken(), place, frame)}\n"

    def _taken(self) -> str:
        said = self._text.getvalue()
        self._text.seek(0)
        self._text.truncate()
        return said

    def interaction(self, *args: Any, **kwargs: Any) -> None:
        self._asked = None
        super().interaction(*args, **kwargs)
        self._debugger.goes_on(self._taken())

    def do_interact(self, arg: str) -> None:
        """Lines come one by one, each as a message: there is nothing that Python's own prompt could read from."""
        self.message("interact has no prompt on a rank; type expressions and statements here")

    def do_run(self, arg: str) -> None:
        """A cell's run is the notebook's."""
        self.message("q ends the cell; run it again from the notebook")

    do_restart = do_run

    def _cmdloop(self) -> None:
        self.cmdloop()  # Stop ends the cell, and not the line

    # -- where it stops ------------------------------------------------------------------------

    def stop_here(self, frame: FrameType) -> bool:
        return self._debugger.is_users(frame.f_code.co_filename) and super().stop_here(frame)

    def user_call(self, frame: FrameType, argument_list: None) -> None:
        """It stops at the function's first line anyway."""

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        if not _is_statement(frame):
            super().user_return(frame, return_value)
        elif frame is self._asked and _is_in_last_statement(frame):
            self.message("--Return--")  # pdb's own also sets __return__, which would be a name of the cell
            self.interaction(frame, None)

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        """Without what has called the program."""
        stack, at = super().get_stack(f, t)
        first = next((i for i, (frame, _) in enumerate(stack) if self._debugger.is_users(frame.f_code.co_filename)), 0)
        return stack[first:], max(0, at - first)

    def format_stack_entry(self, frame_lineno: tuple[FrameType, int], lprefix: str = ": ") -> str:
        frame, number = frame_lineno
        file = frame.f_code.co_filename
        inside = "" if _is_statement(frame) else f", in {frame.f_code.co_name}"
        line = linecache.getline(file, number, frame.f_globals).strip()
        return f"{self._debugger.named(file)} line {number}{inside}{lprefix}{line}"


def _around(frame: FrameType | None, number: int) -> tuple[tuple[tuple[int, str], ...], tuple[tuple[str, str], ...]]:
    """The source around a line of a frame, as (number, text), and the frame's names with their values."""
    if frame is None:
        return (), ()
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    first = max(1, number - NEAR)
    source = tuple((n, lines[n - 1].rstrip("\n")) for n in range(first, min(len(lines), number + NEAR) + 1))
    return source, tuple(values(frame, "".join(lines)))


def _is_statement(frame: FrameType) -> bool:
    """Whether a frame is one of a cell's own level; IPython 7 and 8 call it `<cell line: 3>`."""
    return frame.f_code.co_name == "<module>" or frame.f_code.co_name.startswith("<cell line")


def _is_in_last_statement(frame: FrameType) -> bool:
    """Whether nothing of the file or cell comes after the statement that a frame is in."""
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    try:
        body = compile(source, "<cell>", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT).body
    except SyntaxError:  # IPython's own syntax is in it
        return False
    return not body or frame.f_lineno >= body[-1].lineno


def completions(text: str, known: dict[str, object]) -> list[str]:
    """Names, or attributes after a dot, that the last word of a line may become."""
    found = WORD.search(text)
    word = found[0] if found else ""
    completer, names = rlcompleter.Completer(known), list[str]()
    while word and (name := completer.complete(word, len(names))) is not None:
        names.append(name.rstrip("( "))
    return [name for name in dict.fromkeys(names) if name != word][:MOST]


# -- on a worker ---------------------------------------------------------------------------------


def part(worker: RankWorker) -> Debugger:
    """The worker's own, which `breakpoint()` stops in."""

    def publish(said: Stopped) -> None:
        place = said.place
        if place is not None:
            place = (debugger.named(place[0]), *place[1:])
        worker.publish(STOPPED, to_json(replace(said, place=place)))

    debugger = Debugger(
        publish, lambda file: frames.is_user(file, {}), lambda file: worker.files.shown.get(file, file), worker
    )
    sys.breakpointhook = debugger.breakpoint
    worker.shell.register_magic_function(_where_debug_is, "line", "debug")
    return debugger


def _where_debug_is(line: str) -> None:
    print("%debug has no prompt on a rank; run it in a cell without %%ddp to see what failed on the ranks")


def evaluate(worker: RankWorker, buffers: Sequence[Any], *, text: str) -> list[bytes]:
    """An expression of the names that cells have set: its value in words, or its error."""
    try:
        said = repr(eval(text, worker.shell.user_ns))
    except Exception as e:
        said = f"{type(e).__name__}: {e}"
    return [said.encode("utf-8", "backslashreplace")]


def debug(worker: RankWorker, line: str) -> bool:
    """A line for the rank's debugger; whether it stands there."""
    waits: bool = worker.parts["debugger"].line(line)
    return waits


def debug_names(worker: RankWorker, text: str) -> list[str]:
    """What may complete a line for the rank's debugger."""
    found: list[str] = worker.parts["debugger"].names(text)
    return found


# -- what the names of a failing frame held --------------------------------------------------------


def values(frame: types.FrameType, line: str) -> list[tuple[str, str]]:
    """Names and what they held: of a function all its own, of a cell those on the failing line.

    No code of the program's is called for it: its `__repr__` may raise, take long, or wait for other ranks.
    """
    held = frame.f_locals
    own_level = frame.f_code.co_name.startswith(("<module>", "<cell line"))
    names = list(dict.fromkeys(IDENTIFIER.findall(line))) if own_level else list(held)
    told = [n for n in names if n in held and not n.startswith("__") and not issubclass(type(held[n]), NOT_TOLD)]
    found = [(name, _told(held[name])) for name in told[:MOST_NAMES]]
    return found if len(told) <= MOST_NAMES else [*found, ("…", f"{len(told) - MOST_NAMES} more names")]


def describe(value: Any) -> str:
    """A value in a line."""
    kind = type(value)  # a class may have its own idea of equality: identity alone counts
    if any(kind is k for k in (bool, int, float, complex, type(None), range)):
        return _short(repr(value))
    if kind is str or kind is bytes:
        return repr(value) if len(value) <= LENGTH else f"{value[:LENGTH]!r}… ({len(value)} long)"
    if any(kind is k for k in (list, tuple, set, frozenset, dict)):
        return _short(repr(value)) if not value else f"{kind.__name__} of {len(value)}"
    torch = sys.modules.get("torch")
    if torch is not None and (kind is torch.Tensor or kind is torch.nn.Parameter):
        what = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
        number = f" = {value.item()!r}" if value.device.type == "cpu" and value.dim() == 0 else ""
        return f"{'parameter' if kind is torch.nn.Parameter else 'tensor'} {what}{number}"
    return f"{type.__getattribute__(kind, '__qualname__')} object"


def _told(value: Any) -> str:
    try:
        return plain(describe(value))
    except Exception as e:  # a tensor whose memory is gone, say
        return f"(cannot be read: {type(e).__name__})"


def _short(text: str) -> str:
    return text if len(text) <= LENGTH else text[:LENGTH] + "…"
