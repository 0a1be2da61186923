"""The features of sys.stdout and sys.stderr that programs expect beyond ipykernel's: bytes, `reconfigure`, forked
printers.

A forked process has the streams without the thread that sends. So its prints go to the descriptors, like the output of
any subprocess, and the worker reads them there.
"""

from __future__ import annotations

import codecs
import faulthandler
import functools
import io
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from nbddp.worker.fd_capture import CapturedFds
from nbddp.worker.output import led_before

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
