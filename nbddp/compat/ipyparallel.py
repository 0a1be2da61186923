"""Every private name of ipyparallel's client that nbddp uses, each as a function with a name of ours.

No other module reads one (`tests/versions/test_seams.py`). `missing` tells what an unknown ipyparallel lacks.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import SourceLoader
from types import CodeType, FunctionType
from typing import Any

import zmq

STREAMS = (
    "_iopub_stream", "_notification_stream", "_query_stream", "_control_stream", "_mux_stream", "_task_stream",
    "_broadcast_stream",
)  # fmt: skip  # made by each client when it connects
NEEDED = (
    "_engines", "_io_loop", "_io_thread", "_dispatch_notification", "_dispatch_single_reply", "_dispatch_reply",
    *STREAMS,
)  # fmt: skip
MAGICS = "ipyparallel.client.magics"
CLOSING_TIME = 2.0  # seconds
AT_ONCE = 64  # messages that are read before the client's loop has its turn
Receive = Callable[[list[Any]], None]
Hear = Callable[[Any], None]  # a message, as the session has it
Noticed = Callable[[str], None]  # the stream on which the hub has said something
Dropped = Callable[[str, list[Any], BaseException], None]  # stream, frames, what was wrong with them
# The names that a private API of `%ddp doctor` needs, as module:attribute
NAMES = {
    "client's connection": tuple(f"ipyparallel:Client.{name}" for name in NEEDED if name not in STREAMS),
    "engine's kernel": ("ipyparallel.engine.app:Kernel",),
    "controller's processes": ("ipyparallel.controller.app:Process",),
}


def missing(client: Any) -> list[str]:
    """Names of the client's internals that are needed and not there."""
    return [name for name in NEEDED if not hasattr(client, name)]


def load_magics() -> None:
    """Load ipyparallel's magics, which each client registers in IPython, with their docstrings. `python -OO` leaves
    these out, and the module, which puts its own together from them, could not be loaded."""
    spec = importlib.util.find_spec(MAGICS) if sys.flags.optimize > 1 and MAGICS not in sys.modules else None
    source = spec.loader.get_source(MAGICS) if spec is not None and isinstance(spec.loader, SourceLoader) else None
    if spec is not None and source is not None:
        module = importlib.util.module_from_spec(spec)
        exec(compile(source, str(spec.origin), "exec", dont_inherit=True, optimize=0), vars(module))
        sys.modules[MAGICS] = module


def engines(client: Any) -> dict[int, str]:
    """engine id → uuid, as the client knows them now."""
    found: dict[int, str] = client._engines
    return found


class Outbox:
    """What a client's thread, to which its sockets belong, is to send. Many messages cost one wake-up of it.

    `Client` would make four futures of each message, and keep each one's output and results.
    """

    def __init__(self, client: Any):
        self._client = client
        self._waiting: deque[tuple[Any, dict[str, Any], bytes, Sequence[bytes]]] = deque()
        self._called = False

    def request(self, engine: str, message: dict[str, Any], buffers: Sequence[bytes]) -> None:
        """Over the shell channel of the engine with this uuid."""
        self._put(self._client._mux_stream, engine, message, buffers)

    def question(self, engine: str, message: dict[str, Any]) -> None:
        """Over its control channel."""
        self._put(self._client._control_stream, engine, message, ())

    def _put(self, stream: Any, engine: str, message: dict[str, Any], buffers: Sequence[bytes]) -> None:
        self._waiting.append((stream, message, engine.encode(), buffers))
        if not self._called:
            self._called = True
            self._client._io_loop.add_callback(self._send)

    def _send(self) -> None:
        self._called = False  # what is put from here on is sent now, or by another call
        ways: dict[Any, _AtOnce] = {}
        try:
            while self._waiting:
                stream, message, ident, buffers = self._waiting.popleft()
                way = ways.setdefault(stream, _AtOnce(stream))
                self._client.session.send(way, message, ident=ident, buffers=[*buffers])
        finally:
            if self._waiting:  # of what could not be sent the loop tells
                self._client._io_loop.add_callback(self._send)
            for stream in ways:
                stream.flush()  # what waits in its queue; and a socket that was sent to tells no more of what has come


class _AtOnce:
    """A stream, as `Session.send` asks for one. A message goes to its socket by the stream's queue only if the socket
    takes no more. The queue costs as much again as everything else for a message."""

    def __init__(self, stream: Any):
        self._stream = stream

    def send_multipart(self, parts: Sequence[Any], copy: bool = True) -> None:
        if not self._stream.sending():
            try:
                self._stream.socket.send_multipart(parts, zmq.NOBLOCK, copy=copy)
                return
            except zmq.Again:
                pass
        self._stream.send_multipart(parts, copy=copy)


def ask_hub(client: Any) -> None:
    """Have the hub answer something, on the stream `query`."""
    client._io_loop.add_callback(client.session.send, client._query_stream, "connection_request", content={})


def unregister(client: Any, rank: int) -> None:
    """Ask the hub to let go of an engine; from the client's thread, to which its sockets belong."""
    client._io_loop.add_callback(
        client.session.send, client._query_stream, "unregistration_request", content={"id": rank}
    )


# -- what can be known of a class before there is a client or a controller ----------------------


def unsent(client_class: type) -> list[str]:
    """What a client of this class would lack: streams that it never makes."""
    made = used_by(client_class)
    return [s for s in STREAMS if s not in made]


def used_by(owner: type) -> set[str]:
    """All names that the methods of a class use."""
    found: set[str] = set()
    for method in vars(owner).values():
        plain = getattr(method, "__func__", method)
        plain = getattr(plain, "__wrapped__", plain)
        if isinstance(plain, FunctionType):
            found.update(*(code.co_names for code in _codes(plain.__code__)))
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def guard(client: Any, hear: Hear, dropped: Dropped, noticed: Noticed = lambda stream: None) -> dict[str, Receive]:
    """A receiver per stream of the client's that never raises: what it cannot read it gives to `dropped`. What ranks
    publish and answer goes to `hear`. `noticed` is called when the client has read what the hub has said.

    An exception in a receiver leaves pyzmq's stream without a look at what is queued behind the message; the
    descriptor it waits at tells of new messages only to one who has taken all, so the stream is deaf for good. And
    `Client` has no `log`, to which ipyparallel would report a message that it cannot verify: that raises too.
    """

    def read(frames: list[Any]) -> None:
        _, message = client.session.feed_identities(frames, copy=False)
        hear(client.session.deserialize(message, content=True, copy=False))

    def noticing(stream: str, dispatch: Receive) -> Receive:
        def receive(frames: list[Any]) -> None:
            dispatch(frames)
            noticed(stream)

        return receive

    dispatch = {
        "iopub": read,
        "notification": noticing("notification", client._dispatch_notification),
        "query": noticing("query", client._dispatch_single_reply),
        "control": read,
        "mux": client._dispatch_reply,
        "task": client._dispatch_reply,
        "broadcast": client._dispatch_reply,
    }
    return {
        name: _guarded(name, getattr(client, f"_{name}_stream"), receive, dropped) for name, receive in dispatch.items()
    }


def _guarded(name: str, stream: Any, receive: Receive, dropped: Dropped) -> Receive:
    def read(frames: list[Any]) -> None:
        try:
            receive(frames)
        except Exception as e:
            dropped(name, frames, e.__context__ or e)

    def guarded(frames: list[Any]) -> None:
        """A message, and more that have come: a turn of the loop for each costs more than to read it."""
        read(frames)
        for _ in range(AT_ONCE):
            try:
                more = stream.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except (zmq.ZMQError, AttributeError):  # there is none; or the stream is closed, as its own loop finds out
                return
            read(more)

    return guarded


def runs(client: Any) -> bool:
    """Whether the client's thread is alive."""
    return bool(client._io_thread is not None and client._io_thread.is_alive())


def call_in_thread(client: Any, call: Callable[[], None]) -> None:
    """Have the client's thread call this when it comes to it; never, if that has ended."""
    client._io_loop.add_callback(call)


def receive_with(client: Any, receivers: dict[str, Receive]) -> None:
    """Set the streams' receivers, in the client's thread. Set anew, pyzmq looks for messages it has overlooked.

    Raises OSError if a stream is closed.
    """
    for name, receive in receivers.items():
        getattr(client, f"_{name}_stream").on_recv(receive, copy=False)


def give_up(client: Any) -> None:
    """Close a client, whatever the state of its thread. A stuck thread is left to itself, since ipyparallel's own way
    to close waits for it. What it has not sent by then would come too late."""
    client.session.send = lambda *args, **options: None
    client._io_loop.add_callback(client._io_loop.stop)
    client._io_thread.join(CLOSING_TIME)
    if not client._io_thread.is_alive():
        client.close(linger=0)
