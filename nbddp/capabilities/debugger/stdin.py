"""Where a reader types lines for stopped ranks. It is IPython's prompt, a plain terminal, or the front end of a kernel,
which opens a box or a line as for `input()`.

Each is heard beside the run's events, so that the run goes on while a line is awaited. The edges of
`capabilities.debugger.prompt`.
"""

from __future__ import annotations

import functools
import os
import queue
import select
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from nbddp.agent import stop
from nbddp.capabilities.debugger.part import can_type
from nbddp.capabilities.debugger.prompt import Keyboard
from nbddp.capabilities.debugger.transcript import last_word
from nbddp.compat.extra import ipykernel as ipykernel_extra

Complete = Callable[[str], Sequence[str]]
END = "\x04"  # what a front end sends for Ctrl-D
CHECKED = 0.1  # seconds after which a command that waits hears Stop
CLEAR = "\r\x1b[K"  # the line where the cursor is


def for_ranks(shell: Any) -> Keyboard | None:
    """Where lines for ranks are typed in this shell; None where nobody can."""
    if not can_type(shell):
        return None
    kernel = getattr(shell, "kernel", None)
    if kernel is not None:
        return FrontEnd(kernel)
    return Edited() if getattr(shell, "pt_app", None) is not None else PlainTerminal()


class PlainTerminal:
    """A terminal that edits lines by itself."""

    def __init__(self) -> None:
        self.open = False
        self._prompt = ""

    def ask(self, prompt: str, complete: Complete) -> None:
        self.open, self._prompt = True, prompt
        self.show()

    def hear(self, descriptor: int, seconds: float | None) -> str | None:
        heard = [descriptor, sys.stdin.fileno()] if self.open else [descriptor]
        ready, _, _ = select.select(heard, [], [], seconds)
        if not self.open or sys.stdin.fileno() not in ready:
            return None
        self.open = False
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def hide(self) -> None:
        if self.open:
            print(end=CLEAR, flush=True)

    def show(self) -> None:
        if self.open:
            print(end=self._prompt, flush=True)

    def withdraw(self) -> None:
        if self.open:
            print(flush=True)
        self.open = False


class Edited:
    """IPython's terminal: lines are edited, completed and remembered by prompt_toolkit, in a thread. What is printed
    meanwhile appears above."""

    def __init__(self) -> None:
        self.open = False
        self._typed: queue.SimpleQueue[str | BaseException] = queue.SimpleQueue()
        self._ends = (-1, -1)
        self._thread: threading.Thread | None = None

    def ask(self, prompt: str, complete: Complete) -> None:
        self.open, self._ends = True, os.pipe()
        asked = (_session(), prompt, complete)
        self._thread = threading.Thread(target=self._read, args=asked, name="nbddp-prompt", daemon=True)
        self._thread.start()

    def _read(self, session: Any, prompt: str, complete: Complete) -> None:
        from prompt_toolkit.patch_stdout import patch_stdout

        try:
            with patch_stdout(raw=True):
                self._typed.put(session.prompt(prompt, completer=_completer(complete), handle_sigint=False))
        except BaseException as e:  # Ctrl-C, Ctrl-D, or why there is no prompt: raised in the run's thread
            self._typed.put(e)
        os.write(self._ends[1], b".")

    def hear(self, descriptor: int, seconds: float | None) -> str | None:
        heard = [descriptor, self._ends[0]] if self.open else [descriptor]
        ready, _, _ = select.select(heard, [], [], seconds)
        if not self.open or self._ends[0] not in ready:
            return None
        typed = self._end()
        if isinstance(typed, BaseException):
            raise typed
        return typed

    def hide(self) -> None:
        """What is printed appears above anyway."""

    def show(self) -> None: ...

    def withdraw(self) -> None:
        if self.open:
            self._end()

    def _end(self) -> str | BaseException:
        """End a prompt that has begun, and wait until the thread has ended."""
        assert self._thread is not None
        while self._thread.is_alive():
            app = _session().app
            if self._typed.empty() and app.loop is not None and app.is_running:
                app.loop.call_soon_threadsafe(_leave, app)
            self._thread.join(0.02)
        self.open = False
        for end in self._ends:
            os.close(end)
        return self._typed.get()


@functools.cache
def _session() -> Any:
    """The one of this process, which remembers lines."""
    from prompt_toolkit import PromptSession

    return PromptSession(complete_in_thread=True, complete_while_typing=False)


def _completer(complete: Complete) -> Any:
    from prompt_toolkit.completion import Completer, Completion

    class Words(Completer):
        def get_completions(self, document: Any, complete_event: Any) -> Any:
            typed = document.text_before_cursor
            for name in complete(typed):
                yield Completion(name, start_position=-len(last_word(typed)))

    return Words()


def _leave(app: Any) -> None:
    with suppress(Exception):  # a line has just come
        app.exit(exception=EOFError())


class FrontEnd:
    """A notebook or a console, over the notebook kernel's stdin channel. It shows a box or a line until it is answered;
    an answer to a question that was withdrawn is dropped."""

    def __init__(self, kernel: Any):
        import zmq

        self._kernel, self.open = kernel, False
        self._poller, self._readable = zmq.Poller(), zmq.POLLIN
        self._poller.register(kernel.stdin_socket, self._readable)
        self._heard: int | None = None

    def ask(self, prompt: str, complete: Complete) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        while self._receive() is not None:
            pass
        kernel, content = self._kernel, {"prompt": prompt, "password": False}
        identity = ipykernel_extra.identity_of_cell(kernel)
        kernel.session.send(kernel.stdin_socket, "input_request", content, kernel.get_parent("shell"), ident=identity)
        self.open = True

    def hear(self, descriptor: int, seconds: float | None) -> str | None:
        if self._heard != descriptor:
            self._poller.register(descriptor, self._readable)
            self._heard = descriptor
        ready = dict(self._poller.poll(None if seconds is None else round(seconds * 1000 + 0.5)))
        if self._kernel.stdin_socket not in ready:
            return None
        typed = self._receive()
        if typed is None or not self.open:
            return None
        self.open = False
        if typed == END:
            raise EOFError
        return typed

    def _receive(self) -> str | None:
        """An answer that has come, if one has."""
        try:
            _, reply = self._kernel.session.recv(self._kernel.stdin_socket)
        except Exception:  # malformed, or signed wrongly: as ipykernel does, it is reported, and the question stays
            self._kernel.log.warning("Invalid Message:", exc_info=True)
            return None
        return None if reply is None else str(reply["content"].get("value", ""))

    def hide(self) -> None:
        """What is printed appears beside the question anyway."""

    def show(self) -> None: ...

    def withdraw(self) -> None:
        self.open = False


def line(keyboard: Keyboard, prompt: str, complete: Complete) -> str:
    """Ask for a line, and wait for it. Raises KeyboardInterrupt or EOFError as `hear` does, and for Stop."""
    nothing, end = os.pipe()
    keyboard.ask(prompt, complete)
    try:
        while True:
            stop.check()
            typed = keyboard.hear(nothing, CHECKED)
            if typed is not None:
                return typed
    finally:
        keyboard.withdraw()
        for each in (nothing, end):
            os.close(each)
