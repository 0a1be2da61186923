"""Requests to ranks over an ipyparallel client, and what comes back.

`Wire` sends a request to a rank with its metadata and buffers, hears every iopub message
of it from before the moment it is sent (nothing can be missed), and asks questions over
the control channel. What it needs of the client's internals is in
`ipyparallel_seams`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nbddp.errors import PoolError
from nbddp.pool import ipyparallel_seams

DIGESTS = 8192  # signatures remembered against replay; ipyparallel's 65536 fill 8 MB over a day's cells
Hear = Callable[[int, dict[str, Any]], None]


class Wire:
    """A connected ipyparallel client, as seen by runs: ranks in, messages out."""

    def __init__(self, client: Any):
        self.client = client
        lacking = ipyparallel_seams.missing(client)
        if lacking:
            raise PoolError(f"this ipyparallel lacks {', '.join(lacking)}; install ipyparallel 9")
        client.session.digest_history_size = DIGESTS
        self._asked: dict[int, set[str]] = {}

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
            future.iopub_callbacks.append(lambda message: self._heard(rank, message, hear))

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
        return str(future.msg_id)

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
        for rank in ranks:
            future = self._question(rank, content)
            future.add_done_callback(lambda f, r=rank: hear(r, _answer(f, failed=True)))

    def _question(self, rank: int, content: dict[str, Any]) -> Any:
        future = ipyparallel_seams.send_question(self.client, rank, "nbddp_request", content)
        asked = self._asked.setdefault(rank, set())
        asked.add(future.msg_id)
        future.add_done_callback(lambda f: asked.discard(f.msg_id))
        return future

    def forget(self, rank: int, uuid: str, timeout: float = 5.0) -> None:
        """Tell hub and client that an engine has ended, so that its rank can be given again."""
        client, end = self.client, time.monotonic() + timeout
        if self.engines().get(rank) == uuid:
            ipyparallel_seams.unregister(client, rank)
        while self.engines().get(rank) == uuid:
            time.sleep(0.005)
            if time.monotonic() > end:
                raise PoolError(f"the hub did not let go of rank {rank}; %ddp stop, then start again")
        for question in list(self._asked.pop(rank, ())):  # nobody will answer; the client would keep them for ever
            ipyparallel_seams.forget_message(client, question)
        client.history.clear()

    def close(self) -> None:
        self.client.close(linger=0)


def join(connection_file: str) -> Wire:
    """A second client of a cluster that another process runs."""
    from ipyparallel import Client

    return Wire(Client(connection_file))


def _answer(future: Any, failed: bool = False) -> Any:
    """A worker's answer; of a question that failed None, or why it did."""
    answer = future.result()["content"]
    if failed and answer.get("status") == "error" and "why" in answer:
        return {"failed": answer["why"]}
    return answer.get("answer") if answer.get("status") == "ok" else None
