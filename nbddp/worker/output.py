"""The output of a worker as one sequence: stdout, stderr, and text from the descriptors (`captured`).

ipykernel has a buffer for each stream, and sends them apart; here both go into one, and what has been printed within
some milliseconds is one message. Only public names of ipykernel's streams are used.

Text that C++, subprocesses and forked processes write to the descriptors 1 and 2 is captured (`CapturedFds`). Each
leads into a pipe, which a thread reads; whoever prints in Python reads it first (`take`), so what was written before
comes before. New text is left in the pipe for a few milliseconds. If a process dies just then, whoever else holds the
read ends can still read its last output.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import faulthandler
import functools
import io
import os
import select
import stat
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

from nbddp.compat import torch as torch_compat
from nbddp.compat.clock import clock
from nbddp.protocol import codec, messages
from nbddp.protocol.codec import plain
from nbddp.protocol.messages import JupyterHeader

FLUSH_SECONDS = 0.02  # ipykernel's 0.2 makes a print arrive 0.1 s late
ON_THE_WAY = 64  # batches that wait to be sent, above which who flushes waits too
PATIENCE = 10.0  # seconds
PRINT_SECONDS = 0.01  # between two parts of a print


LEAVE_SECONDS = 0.005
LARGEST = 1 << 16  # bytes: a pipe holds no more
LINE_BUFFERED, BUFFER = 1, 0  # setvbuf's _IOLBF, and its own size

Put = Callable[[str, str, "Pipe"], None]  # stream, text, where that was written to


class Pipe:
    """A pipe, and the stream as which its text appears."""

    def __init__(self, stream: str):
        self.stream = stream
        self.read, self.write = os.pipe()
        self.inode = os.fstat(self.read).st_ino
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def close_write(self) -> None:
        os.close(self.write)
        self.write = -1


class CapturedFds:
    """Descriptors of a worker as pipes. echo: stream → the descriptor where its own led before, to which the text goes
    too: the worker's log. `now`: the pipes into which they lead; `pipes`: all that are read, by their read ends.
    `lock`: held while text is taken. Makes a thread."""

    DESCRIPTORS = {"stdout": 1, "stderr": 2}

    def __init__(self, echo: Mapping[str, int], put: Put, waits: Callable[[float], bool]):
        """waits: whether text that comes at this time (time.monotonic()) is left in the pipe for a moment more."""
        self.lock = threading.RLock()
        self.moved: list[Callable[[], object]] = []  # called when the descriptors lead into other pipes
        self._echo, self._put, self._waits = echo, put, waits
        self.now = {stream: Pipe(stream) for stream in echo}
        self.pipes: dict[int, Pipe] = {}
        self._poll = select.poll()
        self._woken, self._wake = os.pipe()
        for stream, pipe in self.now.items():
            os.dup2(pipe.write, self.DESCRIPTORS[stream])
            pipe.close_write()
            self.add(pipe)
        _buffer_lines()
        if echo:
            threading.Thread(target=self._watch, name="nbddp-captured", daemon=True).start()

    def read_ends(self) -> dict[str, int]:
        """Of the pipes into which the descriptors lead."""
        return {stream: pipe.read for stream, pipe in self.now.items()}

    def add(self, pipe: Pipe) -> None:
        """Read this one too."""
        with self.lock:
            self.pipes[pipe.read] = pipe
            self._poll.register(pipe.read, select.POLLIN)
        os.write(self._wake, b"\n")

    def _end(self, pipe: Pipe) -> None:
        """Nobody writes into it any more."""
        del self.pipes[pipe.read]
        self._poll.unregister(pipe.read)
        if pipe is not self.now[pipe.stream]:
            os.close(pipe.read)

    # -- reading -------------------------------------------------------------------------------------

    def take(self) -> None:
        """Take all that has been written by now; with the lock held."""
        for read, _ in self._poll.poll(0):
            pipe = self.pipes[read]
            data = os.read(read, LARGEST)
            if not data:
                self._end(pipe)
                continue
            self._put(pipe.stream, pipe.decoder.decode(data), pipe)
            with_log = memoryview(data)
            while with_log:
                with_log = with_log[os.write(self._echo[pipe.stream], with_log) :]

    def _watch(self) -> None:
        """The reader thread."""
        while True:
            poll = select.poll()
            with self.lock:
                for read in (*self.pipes, self._woken):
                    poll.register(read, select.POLLIN)
            ready = poll.poll()
            if any(read == self._woken for read, _ in ready):
                os.read(self._woken, LARGEST)
            clock.sleep(LEAVE_SECONDS)
            with self.lock:
                if not self._waits(clock.monotonic()):
                    self.take()


def _buffer_lines() -> None:
    """Have C's stdout hand on each line as it is ended, as to a terminal: into a pipe, blocks of 4 KiB come, late."""
    found = _c_stdout()
    if found is not None:
        found[0].setvbuf(found[1], None, LINE_BUFFERED, BUFFER)


def flush_c() -> None:
    """Have C's stdout hand on what it holds."""
    found = _c_stdout()
    if found is not None:
        found[0].fflush(found[1])


def _c_stdout() -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    library = _c_library()
    for name in ("stdout", "__stdoutp"):  # the second is macOS's
        try:
            return library, ctypes.c_void_p.in_dll(library, name)
        except ValueError:
            continue
    return None


@functools.cache
def _c_library() -> ctypes.CDLL:
    """Once: ctypes makes a class of functions for each library object."""
    return ctypes.CDLL(None)


class Batch:
    """Text that belongs to one request. cell: who has started what printed it after the request's end."""

    def __init__(self, header: JupyterHeader, cell: int | None):
        self.header, self.cell = header, cell
        self.segments: list[tuple[str, list[str]]] = []

    def add(self, stream: str, text: str) -> None:
        if not self.segments or self.segments[-1][0] != stream:
            self.segments.append((stream, []))
        self.segments[-1][1].append(text)

    def messages(self) -> list[tuple[str, codec.Json]]:
        """(type, content): one for all, if the client is ours and there is more than one segment."""
        texts = tuple([(stream, "".join(parts)) for stream, parts in self.segments])
        if len(texts) > 1 and self.header.get("msg_type") == messages.RUN:
            return [(messages.STREAMS, codec.to_json(messages.Streams(texts, self.cell)))]
        told = {} if self.cell is None else {"cell": self.cell}
        return [("stream", {"name": stream, "text": text, **told}) for stream, text in texts]


class PrintedOutput:
    """The two streams of a worker. Takes the place of their `write`, `flush` and `close`."""

    def __init__(self, streams: Sequence[Any], running: Callable[[], JupyterHeader | None]):
        """streams: ipykernel's, stdout and stderr. running: the header of the request that is carried out, or None."""
        self._running = running
        self._first = streams[0]
        self.copies: dict[str, Callable[[str], None]] = {}  # stream → who else is given its text
        # the cell that has started what writes between two, and has written into this pipe; None: not known
        self.cell_of: Callable[[Pipe | None], int | None] = lambda pipe: None
        self._batches: list[Batch] = []
        self._due = self._open = False
        self._code: CodeType | None = None  # what has written last, where in it, and when
        self._at, self._written, self._writer = 0, 0.0, 0
        self._on_the_way: deque[None] = deque()
        echo = led_before(streams)
        self.captured = CapturedFds(echo, self._put, self.amid_print)
        self._lock = self.captured.lock
        for stream in streams:
            stream.write = functools.partial(self._write, stream.name)
            stream.flush = stream.close = self._flush
        for stream in streams:
            if stream.name in echo:  # ipykernel's own answer is the descriptor before it was captured: the log
                stream.fileno = functools.partial(CapturedFds.DESCRIPTORS.__getitem__, stream.name)
        sends = self._first.pub_thread
        sends.send_multipart = self._after_text(sends.send_multipart)

    def _write(self, stream: str, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text)}")
        caller = sys._getframe(1)
        while caller.f_code.co_name == "write" and caller.f_back is not None:  # IPython's own, or one of the program's
            caller = caller.f_back
        code, at, now = caller.f_code, caller.f_lasti, clock.monotonic()
        with self._lock:
            goes_on = self._open and code is self._code and at == self._at
            if not (goes_on and (now - self._written < PRINT_SECONDS or _only_prints(code))):
                self.captured.take()
            self._put(stream, text, None)
            self._code, self._at, self._written, self._writer = code, at, now, threading.get_ident()
            self._open = text != "" and not text.endswith("\n")  # print(…, end="") writes "" in the end
        return len(text)

    def amid_print(self, now: float) -> bool:
        """Whether a line was begun that its print is about to end. `print` writes each of its parts by itself, and
        nothing is to come in between, also where its thread waits long for its turn. With the lock held."""
        since = now - self._written
        return self._open and (since < PRINT_SECONDS or (since < PATIENCE and self._writes_on()))

    def _writes_on(self) -> bool:
        """Whether the thread that has written last is still where it wrote."""
        called, frame = "write", sys._current_frames().get(self._writer)
        while frame is not None and not (frame.f_code is self._code and frame.f_lasti == self._at):
            called, frame = frame.f_code.co_name, frame.f_back
        return frame is not None and called in ("write", "_write")

    def _put(self, stream: str, text: str, pipe: Pipe | None) -> None:
        """With the lock held. pipe: into which it was written; None: by Python."""
        if not text:
            return
        text = plain(text)
        if stream in self.copies:
            self.copies[stream](text)
        header, cell = self._running(), None
        if header is None:
            header, cell = self._first.parent_header, self.cell_of(pipe)
        last = self._batches[-1] if self._batches else None
        if last is None or last.header is not header or last.cell != cell:
            last = Batch(header, cell)
            self._batches.append(last)
        last.add(stream, text)
        if not self._due:
            self._due = True
            thread = self._first.pub_thread
            thread.schedule(functools.partial(thread.io_loop.call_later, FLUSH_SECONDS, self._is_due))

    # -- sending: what is sent on iopub after a cut comes after the text ------------------------------

    def _after_text(self, send: Callable[..., Any]) -> Callable[..., Any]:
        """Have a message that is sent otherwise, such as a display, come after the text printed before. Its sender
        flushes sys.stdout, which may be an object of the program's."""

        @functools.wraps(send)
        def after(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not self._first.pub_thread.thread:
                self.flush()
            return send(*args, **kwargs)

        return after

    def _is_due(self) -> None:
        """In the thread that sends; whoever has the lock may wait for that."""
        thread = self._first.pub_thread
        if not self._lock.acquire(blocking=False):
            thread.io_loop.call_later(FLUSH_SECONDS / 4, self._is_due)
            return
        try:
            self._due = False
            self._cut()
        finally:
            self._lock.release()

    def _cut(self) -> None:
        batches, self._batches = self._batches, []
        for batch in batches:
            self._on_the_way.append(None)
            self._first.pub_thread.schedule(functools.partial(self._send, batch))

    def _send(self, batch: Batch) -> None:
        self._on_the_way.popleft()
        stream, socket = self._first, self._first.pub_thread.socket
        if socket is None:  # it has been closed
            return
        for kind, content in batch.messages():
            stream.session.send(socket, kind, content, parent=batch.header, ident=stream.topic)

    def _flush(self) -> None:
        """The program's own flush: it is through with what it has written."""
        if self._writer == threading.get_ident():
            self._open = False
        self.flush()

    def flush(self) -> None:
        """Have all that was written by now go out before what is sent next. In the middle of another thread's print,
        captured text is left for a moment: also ipykernel flushes, after each request on its control thread."""
        with self._lock:
            if self._writer == threading.get_ident() or not self.amid_print(clock.monotonic()):
                self.captured.take()
            self._cut()
        if len(self._on_the_way) > ON_THE_WAY:
            thread, sent = self._first.pub_thread, threading.Event()
            thread.schedule(sent.set)
            if thread.thread is not threading.current_thread():
                sent.wait(PATIENCE)

    def finish(self) -> None:
        """A request has been carried out: all goes out that was written, also what C holds."""
        flush_c()
        with self._lock:
            self.captured.take()
        self.flush()


def _only_prints(code: CodeType) -> bool:
    """Whether what this code writes comes by `print`, which ends what it has begun; `write` may be called once more."""
    return "print" in code.co_names and "write" not in code.co_names


def led_before(streams: Sequence[Any]) -> dict[str, int]:
    """Stream → the descriptor to which its own led before ipykernel captured it; without those that it has not."""
    found = {}
    for stream in streams:
        try:
            found[stream.name] = int(stream.fileno())
        except io.UnsupportedOperation:
            continue
    return found


# -- stdout and stderr as programs have them --------------------------------------------------------

# The features of sys.stdout and sys.stderr that programs expect beyond ipykernel's: bytes, `reconfigure`, forked
# printers.
# A forked process has the streams without the thread that sends. So its prints go to the descriptors, like the output
# of any subprocess, and the worker reads them there.

OWN = f'File "{__file__}", line'.encode()


class Bytes(io.BufferedIOBase):
    """`sys.stdout.buffer`: what is written as bytes appears as text, UTF-8 with what is not replaced."""

    def __init__(self, stream: Any):
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.name = getattr(stream, "name", "")

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if isinstance(data, str):
            raise TypeError("a bytes-like object is required, not 'str'")
        view = memoryview(data)
        self._stream.write(self._decoder.decode(view.tobytes()))
        return view.nbytes

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def close(self) -> None:
        """Nobody closes the worker's output."""


class DescriptorWriter:
    """Writes text to a descriptor, whole lines at once."""

    def __init__(self, descriptor: int):
        self._descriptor, self._text = descriptor, ""

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text)}")
        self._text += text
        if "\n" in text:
            self._send(self._text.rindex("\n") + 1)
        return len(text)

    def flush(self) -> None:
        self._send(len(self._text))

    def _send(self, length: int) -> None:
        left, self._text = self._text[:length].encode("utf-8", "backslashreplace"), self._text[length:]
        while left:
            left = left[os.write(self._descriptor, left) :]


def complete(streams: Sequence[Any]) -> None:
    """Give the worker's stdout and stderr what they lack; once.

    Whoever holds a stream, a logging handler say, holds the same one in a forked process.
    """
    for stream in streams:
        if not hasattr(stream, "buffer"):
            stream.buffer = Bytes(stream)
        if not hasattr(stream, "reconfigure"):
            stream.reconfigure = _reconfigure
    led = led_before(streams)
    pairs = [(stream, CapturedFds.DESCRIPTORS[stream.name]) for stream in streams if stream.name in led]

    def in_child() -> None:
        for stream, descriptor in pairs:
            direct = DescriptorWriter(descriptor)
            stream.write, stream.flush, stream.close = direct.write, direct.flush, direct.flush

    os.register_at_fork(after_in_child=in_child)


def free_dumps() -> None:
    """Have faulthandler dump beside the pipes what it is asked for; once. It holds the interpreter while it writes, and
    the thread that reads a pipe needs it: a pipe that is full would never be read."""
    for name in ("dump_traceback", "dump_c_stack"):
        if hasattr(faulthandler, name):
            setattr(faulthandler, name, _beside_pipes(getattr(faulthandler, name)))


def _beside_pipes(dump: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(dump)
    def dumped(file: Any = None, *args: Any, **kwargs: Any) -> None:
        descriptor = file if isinstance(file, int) else (sys.stderr if file is None else file).fileno()
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            dump(file, *args, **kwargs)
            return
        with tempfile.TemporaryFile() as held:
            dump(held, *args, **kwargs)
            held.seek(0)
            left = b"".join(line for line in held if OWN not in line)
        while left:
            left = left[os.write(descriptor, left) :]

    return dumped


def _reconfigure(
    *,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    line_buffering: bool | None = None,
    write_through: bool | None = None,
) -> None:
    """As of io.TextIOWrapper, and without effect: text goes to the notebook as text, and at once."""


# -- what gloo prints -------------------------------------------------------------------------------

# Keeps what gloo prints while it connects out of the ranks' output.
# gloo as torch 2.8 to 2.10 ship it prints two lines whenever a group is made: `[Gloo] Rank 0 is connected to 3 peer
# ranks.` They say only that the call will succeed. They differ from rank to rank, so no cell with an init would fold to
# one line. They go to descriptor 1 past Python, which leads nowhere meanwhile.


class GlooSilencer:
    """Descriptor 1 leads nowhere while any thread is inside `connecting`; where gloo is silent nothing is done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._stdout = -1

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        if not torch_compat.gloo_reports_connections():
            yield
            return
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._stdout = os.dup(1)
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 1)
                os.close(null)

    def _leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                os.dup2(self._stdout, 1)
                os.close(self._stdout)
