"""Requests to ranks over an ipyparallel client, and what comes back.

`Wire` sends a request to a rank with its metadata and buffers, hears every iopub message
of it from before the moment it is sent (nothing can be missed), and asks questions over
the control channel. What it needs of the client's internals is in `ipyparallel_seams`;
that the client works is seen to by `connection`.
"""

from __future__ import annotations

import queue
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
        self._last: dict[int, tuple[str, Hear]] = {}  # rank → its last request
        self._hears: dict[str, tuple[int, Hear]] = {}  # request whose outcome has not come → its rank
        self._asked: dict[str, tuple[int, Callable[[dict[str, Any]], None]]] = {}  # question → its rank
        self.connection = Connection(connect, self._heard, self._forget_questions)

    @property
    def client(self) -> Any:
        return self.connection.client

    def _forget_questions(self) -> None:
        """Those of a client that is lost stay without an answer. What the ranks still have to say of its requests the
        new one hears."""
        unanswered, self._asked = self._asked, {}
        for _, hear in unanswered.values():
            hear({})

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
        self, rank: int, spec: dict[str, Any], hear: Hear, *, code: str = "", buffers: Sequence[bytes] = ()
    ) -> str:
        """Send one request; its message id. `hear(rank, message)` is called in the client's thread, until the outcome
        has come."""
        message = self.client.session.msg("nbddp_run", content={"code": code}, metadata={"nbddp": spec})
        number = str(message["header"]["msg_id"])
        self._hears.pop(self._last.get(rank, ("",))[0], None)
        self._last[rank] = number, hear
        self._hears[number] = rank, hear
        self.connection.outbox.request(rank, message, buffers)
        return number

    def listen_again(self, rank: int) -> None:
        """Hear what a rank says of its last request although its outcome has come."""
        if rank in self._last:
            number, hear = self._last[rank]
            self._hears[number] = rank, hear

    def _heard(self, message: dict[str, Any]) -> None:
        """What a rank has published or answered, in the client's thread."""
        number, kind = message["parent_header"].get("msg_id"), message["header"]["msg_type"]
        if kind == "nbddp_reply":
            if number in self._asked:
                self._asked.pop(number)[1](message["content"])
        elif number in self._hears:
            rank, hear = self._hears[number]
            if kind == "nbddp_outcome":  # what threads of the program print from now on is heard by nobody
                self._hears.pop(number, None)
            hear(rank, message)

    def ask(self, rank: int, content: dict[str, Any], timeout: float = 1.0) -> Any:
        """A question to a possibly busy worker; None if it does not answer in time."""
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._question(rank, content, answers.put)
        try:
            return _answer(answers.get(timeout=timeout))
        except queue.Empty:
            return None

    def ask_all(self, ranks: Sequence[int], content: dict[str, Any], hear: Callable[[int, Any], None]) -> None:
        """The same question to several; `hear(rank, answer)` is called in the client's thread as answers come. Where
        the question failed, the answer is {"failed": why}; where none will come, it is None."""
        self.connection.tend()
        for rank in ranks:
            self._question(rank, content, lambda a, r=rank: hear(r, _answer(a, failed=True)))  # type: ignore[misc]

    def _question(self, rank: int, content: dict[str, Any], hear: Callable[[dict[str, Any]], None]) -> None:
        message = self.client.session.msg("nbddp_request", content=content)
        self._asked[message["header"]["msg_id"]] = rank, hear
        self.connection.outbox.question(rank, message)

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
        self._hears.pop(self._last.pop(rank, ("",))[0], None)
        for question in [q for q, (r, _) in list(self._asked.items()) if r == rank]:  # nobody will answer
            self._asked.pop(question, None)

    def close(self) -> None:
        self.connection.close()


def join(connection_file: str) -> Wire:
    """A second client of a cluster that another process runs."""
    from ipyparallel import Client

    return Wire(lambda **options: Client(connection_file, **options))


def _answer(answer: dict[str, Any], failed: bool = False) -> Any:
    """A worker's answer; of a question that failed None, or why it did."""
    if failed and answer.get("status") == "error" and "why" in answer:
        return {"failed": answer["why"]}
    return answer.get("answer") if answer.get("status") == "ok" else None
