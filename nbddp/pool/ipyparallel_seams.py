"""Every private name of ipyparallel's client that nbddp uses, each as a function with a name of ours.

No other module reads one (`tests/test_seams.py`). `missing` tells what an unknown ipyparallel lacks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

NEEDED = ("_send", "_engines", "_mux_stream", "_control_stream", "_query_stream", "_io_loop")

STREAMS = ("_mux_stream", "_control_stream", "_query_stream")  # made by each client when it connects
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
