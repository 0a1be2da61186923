"""Every private name of ipyparallel's client that nbddp uses, each as a function with a name of ours.

No other module reads one (`tests/test_seams.py`). `missing` tells what an unknown ipyparallel lacks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

STREAMS = (
    "_iopub_stream", "_notification_stream", "_query_stream", "_control_stream", "_mux_stream", "_task_stream",
    "_broadcast_stream",
)  # fmt: skip  # made by each client when it connects
NEEDED = (
    "_send", "_engines", "_io_loop", "_io_thread", "_futures",
    "_dispatch_iopub", "_dispatch_notification", "_dispatch_single_reply", "_dispatch_reply",
    *STREAMS,
)  # fmt: skip
CLOSING_TIME = 2.0  # seconds
Receive = Callable[[list[Any]], None]
Dropped = Callable[[str, list[Any], BaseException], None]  # stream, frames, what was wrong with them
TABLES = ("_futures", "_output_futures")
# What a seam of `nbddp.seams` needs, as module:attribute
NAMES = {
    "client's connection": tuple(f"ipyparallel:Client.{name}" for name in NEEDED if name not in STREAMS),
    "client's memory": tuple(f"ipyparallel:Client.{name}" for name in TABLES),
    "engine's kernel": ("ipyparallel.engine.app:Kernel",),
    "controller's processes": ("ipyparallel.controller.app:Process",),
}
SENT = ("socket", "msg_type", "content", "ident", "buffers", "metadata", "track_outstanding", "message_future_hook")


def missing(client: Any) -> list[str]:
    """Names of the client's internals that are needed and not there."""
    return [name for name in NEEDED if not hasattr(client, name)]


def engines(client: Any) -> dict[int, str]:
    """engine id → uuid, as the client knows them now."""
    found: dict[int, str] = client._engines
    return found


def send_request(client: Any, rank: int, message: str, **parts: Any) -> Any:
    """Send a message over the rank's shell channel; a future of its reply."""
    return client._send(client._mux_stream, message, ident=client._engines[rank].encode(), **parts)


def send_question(client: Any, rank: int, message: str, content: dict[str, Any]) -> Any:
    """Send a message over the rank's control channel; a future of its reply."""
    ident = client._engines[rank].encode()
    return client._send(client._control_stream, message, content=content, ident=ident)


def unregister(client: Any, rank: int) -> None:
    """Ask the hub to let go of an engine; from the client's thread, to which its sockets belong."""
    client._io_loop.add_callback(
        client.session.send, client._query_stream, "unregistration_request", content={"id": rank}
    )


def forget_message(client: Any, message_id: str) -> None:
    """Drop all that the client keeps of a message that nobody will answer."""
    tables = [getattr(client, name, {}) for name in TABLES]
    for table in (*tables, client.results, client.metadata):
        table.pop(message_id, None)


# -- what can be known of a class before there is a client or a controller ----------------------


def unsent(client_class: type) -> list[str]:
    """What a client of this class would lack: streams that it never makes, arguments that `_send` does not take."""
    made = used_by(client_class)
    taken = inspect.signature(client_class._send).parameters  # type: ignore[attr-defined]
    return [s for s in STREAMS if s not in made] + [a for a in SENT if a not in taken]


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


def guard(client: Any, dropped: Dropped) -> dict[str, Receive]:
    """A receiver per stream of the client's that never raises: what it cannot read it gives to `dropped`.

    An exception in a receiver leaves pyzmq's stream without a look at what is queued behind the message; the
    descriptor it waits at tells of new messages only to one who has taken all, so the stream is deaf for good. And
    `Client` has no `log`, to which ipyparallel would report a message that it cannot verify: that raises too.
    """
    dispatch = {
        "iopub": client._dispatch_iopub,
        "notification": client._dispatch_notification,
        "query": client._dispatch_single_reply,
        "control": client._dispatch_single_reply,
        "mux": client._dispatch_reply,
        "task": client._dispatch_reply,
        "broadcast": client._dispatch_reply,
    }
    return {name: _guarded(name, receive, dropped) for name, receive in dispatch.items()}


def _guarded(name: str, receive: Receive, dropped: Dropped) -> Receive:
    def guarded(frames: list[Any]) -> None:
        try:
            receive(frames)
        except Exception as e:
            dropped(name, frames, e.__context__ or e)

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


def listen(client: Any, message_id: str, hear: Callable[[dict[str, Any]], None]) -> None:
    """Hear the iopub messages of a request that this client has not sent, or has done with."""
    from ipyparallel.client.futures import MessageFuture

    future = MessageFuture(message_id)
    future.iopub_callbacks.append(hear)
    client._futures[message_id] = future


def give_up(client: Any) -> None:
    """Close a client, whatever state its thread is in: one that is stuck is left to itself, since ipyparallel's own
    way to close waits for it. What it has not sent by then would come too late."""
    client.session.send = lambda *args, **options: None
    client._io_loop.add_callback(client._io_loop.stop)
    client._io_thread.join(CLOSING_TIME)
    if not client._io_thread.is_alive():
        client.close(linger=0)
