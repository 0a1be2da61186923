"""Every private name of ipyparallel's client that nbddp uses, each as a function with a name of ours.

No other module reads one (`tests/test_seams.py`). `missing` tells what an unknown ipyparallel lacks.
"""

from __future__ import annotations

from typing import Any

NEEDED = ("_send", "_engines", "_mux_stream", "_control_stream", "_query_stream", "_io_loop")


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
    for table in (client._futures, client._output_futures, client.results, client.metadata):
        table.pop(message_id, None)
