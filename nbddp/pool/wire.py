"""Requests to ranks over an ipyparallel client, and what comes back.

`Wire` sends a request to a rank with its metadata and buffers, hears every iopub message
of it from before the moment it is sent (nothing can be missed), and asks questions over
the control channel. What it needs of the client's internals is in `ipyparallel_seams`;
that the client works is seen to by `connection`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nbddp.base import stop
from nbddp.errors import PoolError
from nbddp.pool.connection import Connect, Connection
from nbddp.seams import ipyparallel_seams

Hear = Callable[[int, dict[str, Any]], None]


class Wire:
    """A connected ipyparallel client, as seen by runs: ranks in, messages out."""

    def __init__(self, connect: Connect):
        """connect: makes a client of the cluster; called again where a client is lost."""
        self._asked: dict[int, set[str]] = {}
        self._last: dict[int, tuple[str, Hear]] = {}  # rank → its last request
        self._unanswered: dict[str, Callable[[], None]] = {}  # question → what says that no answer will come
        self.connection = Connection(connect, self._listen_again)

    @property
    def client(self) -> Any:
        return self.connection.client

    def _listen_again(self) -> None:
        """A new client hears what the ranks still have to say of the requests of the one before; questions of that one
        stay without an answer."""
        self._asked.clear()
        unanswered, self._unanswered = self._unanswered, {}
        for no_answer in unanswered.values():
            no_answer()
        for rank, (message_id, hear) in self._last.items():
            ipyparallel_seams.listen(self.client, message_id, self._hearing(rank, hear))

    def engines(self) -> dict[int, str]:
        """rank → uuid of the engines that are registered now."""
        ids = self.client.ids  # flushes notifications
        known = ipyparallel_seams.engines(self.client)
        return {i: known[i] for i in ids if i in known}

    def wait_for(self, uuids: Mapping[int, str], still_starting: Callable[[], None], timeout: float) -> None:
        """Wait until every rank is registered under the uuid it was started with.

        still_starting: called while waiting; raises if a start has failed.
        """
        end = time.monotonic() + timeout
        while any(self.engines().get(r) != u for r, u in uuids.items()):
            still_starting()
            self.connection.tend()
            stop.check()
            if time.monotonic() > end:
                late = sorted(r for r, u in uuids.items() if self.engines().get(r) != u)
                raise PoolError(f"ranks {late} did not register within {timeout:.0f} s; %ddp log tells why")
            time.sleep(0.01)

    def send(
        self,
        rank: int,
        spec: dict[str, Any],
        hear: Hear,
        *,
        code: str = "",
        buffers: list[bytes] | None = None,
    ) -> str:
        """Send one request; its message id. `hear(rank, message)` is called in the client's thread."""

        def hook(future: Any) -> None:
            future.iopub_callbacks.append(self._hearing(rank, hear))

        future = ipyparallel_seams.send_request(
            self.client,
            rank,
            "execute_request",
            content={"code": code, "silent": False, "user_expressions": {}, "stop_on_error": False},
            metadata={"nbddp": spec},
            buffers=buffers,
            track_outstanding=True,
            message_future_hook=hook,
        )
        self._last[rank] = str(future.msg_id), hear
        return str(future.msg_id)

    def _hearing(self, rank: int, hear: Hear) -> Callable[[dict[str, Any]], None]:
        return lambda message: self._heard(rank, message, hear)

    def listen_again(self, rank: int) -> None:
        """Hear what a rank says of its last request although the client may be done with it."""
        if rank in self._last:
            message_id, hear = self._last[rank]
            ipyparallel_seams.listen(self.client, message_id, self._hearing(rank, hear))

    def _heard(self, rank: int, message: dict[str, Any], hear: Hear) -> None:
        if message["header"]["msg_type"] in ("stream", "display_data"):
            # the client keeps all output, and joins text anew at every message: quadratic
            kept = self.client.metadata.get(message["parent_header"]["msg_id"])
            if kept is not None:
                kept["stdout"] = kept["stderr"] = ""
                kept["outputs"] = []
        hear(rank, message)

    def ask(self, rank: int, content: dict[str, Any], timeout: float = 1.0) -> Any:
        """A question to a possibly busy worker; None if it does not answer in time."""
        future = self._question(rank, content)
        return _answer(future) if future.wait(timeout) else None

    def ask_all(self, ranks: Sequence[int], content: dict[str, Any], hear: Callable[[int, Any], None]) -> None:
        """The same question to several; `hear(rank, answer)` is called in the client's thread as answers come. Where
        the question failed, the answer is {"failed": why}."""
        self.connection.tend()
        for rank in ranks:
            future = self._question(rank, content)
            self._unanswered[future.msg_id] = functools.partial(hear, rank, None)
            future.add_done_callback(lambda f, r=rank: self._answered(r, f, hear))

    def _answered(self, rank: int, future: Any, hear: Callable[[int, Any], None]) -> None:
        if self._unanswered.pop(future.msg_id, None) is not None:
            hear(rank, _answer(future, failed=True))

    def _question(self, rank: int, content: dict[str, Any]) -> Any:
        future = ipyparallel_seams.send_question(self.client, rank, "nbddp_request", content)
        asked = self._asked.setdefault(rank, set())
        asked.add(future.msg_id)
        future.add_done_callback(lambda f: asked.discard(f.msg_id))
        return future

    def forget(self, rank: int, uuid: str, timeout: float = 5.0) -> None:
        """Tell hub and client that an engine has ended, so that its rank can be given again."""
        asked, end = None, time.monotonic() + timeout
        while self.engines().get(rank) == uuid:
            self.connection.tend()
            if asked is not self.client:  # the one that was asked may have been lost
                asked = self.client
                ipyparallel_seams.unregister(asked, rank)
            time.sleep(0.005)
            if time.monotonic() > end:
                raise PoolError(f"the hub did not let go of rank {rank}; %ddp stop, then start again")
        self._last.pop(rank, None)
        for question in list(self._asked.pop(rank, ())):  # nobody will answer; the client would keep them for ever
            self._unanswered.pop(question, None)
            ipyparallel_seams.forget_message(self.client, question)
        self.client.history.clear()

    def close(self) -> None:
        self.connection.close()


def join(connection_file: str) -> Wire:
    """A second client of a cluster that another process runs."""
    from ipyparallel import Client

    return Wire(lambda **options: Client(connection_file, **options))


def _answer(future: Any, failed: bool = False) -> Any:
    """A worker's answer; of a question that failed None, or why it did."""
    answer = future.result()["content"]
    if failed and answer.get("status") == "error" and "why" in answer:
        return {"failed": answer["why"]}
    return answer.get("answer") if answer.get("status") == "ok" else None
