"""Requests to ranks over an ipyparallel client, and their answers.

`RankRpc` sends a request to a rank with its metadata and buffers, and asks questions over the control channel. It hears
every iopub message of the rank from before the request on, so it can miss none. What it needs of the client's internals
is in `compat.ipyparallel`; that the client works is seen to by `connection`.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nbddp.agent import stop
from nbddp.compat import ipyparallel
from nbddp.errors import PoolError
from nbddp.launch.topology import rank_words
from nbddp.pool.connection import Connect, Connection
from nbddp.protocol import messages
from nbddp.protocol.codec import Json, from_json, to_json
from nbddp.protocol.messages import JupyterMessage
from nbddp.protocol.outcome import Outcome
from nbddp.protocol.run_spec import Question, Reply, RunSpec

Hear = Callable[[int, JupyterMessage], None]
HearReply = Callable[[int, Reply], None]
HearKernel = Callable[[int, str, dict[str, Any]], None]  # rank, type and content
WORDS_EVERY = 0.1  # seconds between two words on how many ranks are registered
KERNELS = 1000  # messages to kernels of which it is remembered who hears what comes of them


class RankRpc:
    """A connected ipyparallel client, as seen by runs: ranks in, messages out."""

    def __init__(
        self,
        connect: Connect,
        noticed: ipyparallel.Noticed = lambda stream: None,
        patience: float = 0.0,
    ):
        """connect: makes a client of the cluster; called again where a client is lost. noticed, patience: as
        `Connection` has them."""
        self._uuids: dict[int, str] = {}
        self._last: dict[int, tuple[str, Hear]] = {}  # rank → its last request
        self._hears: dict[str, tuple[int, Hear]] = {}  # request whose outcome has not come → its rank
        self._asked: dict[str, tuple[int, Callable[[Reply], None]]] = {}  # question → its rank
        self._ranks: dict[str, int] = {}  # engine → the rank that it is, or was
        self.late: HearKernel = _nobody  # hears what comes unasked
        self.comm: Callable[[int, str, dict[str, Any], Sequence[Any]], object] = _nobody  # hears comms of idle ranks
        self.ended: list[Callable[[Collection[int]], None]] = []  # told of ranks whose processes are over
        self._told: dict[str, tuple[int, HearKernel]] = {}  # message to a kernel → its rank
        ipyparallel.load_magics()
        self.connection = Connection(connect, self._heard, self._forget_questions, noticed, patience)

    @property
    def client(self) -> Any:
        return self.connection.client

    def _forget_questions(self) -> None:
        """Those of a client that is lost stay without an answer. What the ranks still have to say of its requests the
        new one hears."""
        unanswered, self._asked = self._asked, {}
        for _, hear in unanswered.values():
            hear(Reply())

    def name_ranks(self, uuids: Mapping[int, str]) -> None:
        """Have ranks be these engines, where an engine's id is not its rank."""
        self._uuids = dict(uuids)

    def registered(self) -> dict[int, str]:
        """id → uuid of the engines that the hub has now."""
        ids = self.client.ids  # flushes notifications
        known = ipyparallel.engines(self.client)
        return {i: known[i] for i in ids if i in known}

    def engines(self) -> dict[int, str]:
        """rank → uuid of the engines that are registered now."""
        found = self.registered()
        if not self._uuids:
            return found
        there = set(found.values())
        return {rank: uuid for rank, uuid in self._uuids.items() if uuid in there}

    def _engine(self, rank: int) -> str:
        return self._uuids.get(rank) or ipyparallel.engines(self.client)[rank]

    def wait_for(
        self,
        uuids: Mapping[int, str],
        still_starting: Callable[[], None],
        timeout: float,
        there: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Wait until every rank is registered under the uuid it was started with.

        still_starting: called while waiting; raises if a start has failed. there: gets the number of those registered,
        when that has changed and some time has passed.
        """
        began = time.monotonic()
        end, told, next_word = began + timeout, 0, began + WORDS_EVERY
        while late := self._without(uuids):
            still_starting()
            if (count := len(uuids) - len(late)) != told and time.monotonic() > next_word:
                told, next_word = count, time.monotonic() + WORDS_EVERY
                there(count)
            self.connection.tend()
            stop.check()
            if time.monotonic() > end:
                raise PoolError(f"ranks {late} did not register within {timeout:.0f} s; %ddp log shows why")
            time.sleep(0.01)

    def send(self, rank: int, spec: RunSpec, hear: Hear, *, code: str = "", buffers: Sequence[bytes] = ()) -> str:
        """Send one request; its message id. `hear(rank, message)` is called in the client's thread, until the outcome
        has come."""
        message = self.client.session.msg(messages.RUN, content={"code": code}, metadata={messages.SPEC: to_json(spec)})
        number = str(message["header"]["msg_id"])
        self._hears.pop(self._last.get(rank, ("",))[0], None)
        self._last[rank] = number, hear
        self._hears[number] = rank, hear
        engine = self._engine(rank)
        self._ranks[engine] = rank
        self.connection.outbox.request(engine, message, buffers)
        return number

    def listen_again(self, rank: int) -> None:
        """Hear what a rank says of its last request although its outcome has come."""
        if rank in self._last:
            number, hear = self._last[rank]
            self._hears[number] = rank, hear

    def _heard(self, message: JupyterMessage) -> None:
        """What a rank has published or answered, in the client's thread."""
        number, kind = message["parent_header"].get("msg_id"), message["header"]["msg_type"]
        if kind == messages.REPLY:
            if number in self._asked:
                self._asked.pop(number)[1](from_json(Reply, message["content"]))
        elif number in self._hears:
            rank, hear = self._hears[number]
            # what is printed from now on comes late; but a rank may have another outcome to tell
            if kind == messages.OUTCOME:
                message["content"] = outcome = from_json(Outcome, message["content"])
                if outcome.next_run is None:
                    self._hears.pop(number, None)
            hear(rank, message)
        elif kind.startswith("comm_"):  # a widget changes although no run is on
            if (owner := self._rank_of(message["header"]["session"])) is not None:
                self.comm(owner, kind, message["content"], message["buffers"])
        elif number in self._told:
            rank, hear_kernel = self._told[number]
            hear_kernel(rank, kind, message["content"])

        elif message["header"]["session"] in self._ranks and message["parent_header"].get("msg_type") == messages.RUN:
            self.late(self._ranks[message["header"]["session"]], kind, message["content"])

    def _rank_of(self, uuid: str) -> int | None:
        """The rank whose engine this is."""
        known = self._uuids or ipyparallel.engines(self.client)
        return next((rank for rank, there in known.items() if there == uuid), None)

    def tell_kernel(self, rank: int, kind: str, content: Json, buffers: Sequence[bytes], hear: HearKernel) -> None:
        """Send a message of Jupyter's own, which the rank takes when it is idle; nothing if it has ended. `hear` gets
        what the rank publishes because of it, in the client's thread."""
        if rank not in self.engines():
            return
        message = self.client.session.msg(kind, content=content)
        self._told[message["header"]["msg_id"]] = rank, hear
        for old in list(self._told)[:-KERNELS]:
            del self._told[old]
        self.connection.outbox.request(self._engine(rank), message, buffers)

    def ask(self, rank: int, question: Question, timeout: float = 1.0) -> Any:
        """A question to a possibly busy worker; None if it does not answer in time."""
        answers: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._question(rank, question, answers.put)
        try:
            return answers.get(timeout=timeout).answer
        except queue.Empty:
            return None

    def ask_all(self, ranks: Sequence[int], question: Question, hear: HearReply) -> None:
        """The same question to several; `hear(rank, reply)` is called in the client's thread as replies come, and where
        none will come."""
        self.connection.tend()
        self.question(ranks, question, hear)

    def question(self, ranks: Sequence[int], question: Question, hear: HearReply) -> None:
        """As `ask_all`, by the client as it is: in any thread."""
        for rank in ranks:
            self._question(rank, question, lambda a, r=rank: hear(r, a))  # type: ignore[misc]

    def tell(self, ranks: Sequence[int], question: Question) -> None:
        """What is to be done at once on workers that may be busy, and needs no answer."""
        self.connection.tend()
        content = to_json(replace(question, answers=False))
        for rank in ranks:
            message = self.client.session.msg(messages.QUESTION, content=content)
            self.connection.outbox.question(self._engine(rank), message)

    def _question(self, rank: int, question: Question, hear: Callable[[Reply], None]) -> None:
        message = self.client.session.msg(messages.QUESTION, content=to_json(question))
        self._asked[message["header"]["msg_id"]] = rank, hear
        self.connection.outbox.question(self._engine(rank), message)

    def _without(self, uuids: Mapping[int, str]) -> list[int]:
        """The ranks that are not registered under these uuids."""
        known = self.engines()
        return sorted(r for r, u in uuids.items() if known.get(r) != u)

    def forget(self, uuids: Mapping[int, str], timeout: float = 5.0) -> None:
        """Tell hub and client that engines have ended, so that their ranks can be given again. timeout: seconds for
        each answer."""
        asked, end, left = None, time.monotonic() + timeout, len(uuids) + 1
        while still := sorted(uuids.keys() - self._without(uuids)):
            self.connection.tend()
            if asked is not self.client:  # the one that was asked may have been lost
                asked = self.client
                for rank in still:
                    ipyparallel.unregister(asked, rank)
            if len(still) < left:
                left, end = len(still), time.monotonic() + timeout
            time.sleep(0.005)
            if time.monotonic() > end:
                raise PoolError(f"the hub did not unregister {rank_words(still)}; %ddp stop, then start again")
        for hear in self.ended:
            hear(uuids.keys())
        for rank in uuids:
            self._hears.pop(self._last.pop(rank, ("",))[0], None)
        for question in [q for q, (r, _) in list(self._asked.items()) if r in uuids]:  # nobody will answer
            self._asked.pop(question, None)

    def close(self) -> None:
        self.connection.close()


def _nobody(*told: Any) -> None:
    pass


def join(connection_file: str, uuids: Mapping[int, str] | None = None) -> RankRpc:
    """A second client of a cluster that another process runs. uuids: as `RankRpc.name_ranks` has them."""
    from ipyparallel import Client

    wire = RankRpc(lambda **options: Client(connection_file, **options))
    wire.name_ranks(uuids or {})
    return wire
