"""Requests to ranks over an ipyparallel client, and their answers; and a connection that survives its client.

`RankRpc` sends a request to a rank with its metadata and buffers, and asks questions over the control channel. It hears
every iopub message of the rank from before the request on, so it can miss none. What it needs of the client's internals
is in `compat.ipyparallel`.

`Connection` sees to it that the client works. What a stream of the client's cannot read is dropped and counted
(`dropped`). A client is replaced, under the same session, if its thread has ended, a stream of it is closed, or it does
not answer. So the ranks' messages to it are still ours; the ranks notice nothing. `tend` looks at the beat that it
asked for last time and costs microseconds; `check` waits for one.
"""

from __future__ import annotations

import functools
import json
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from nbddp.agent import stop
from nbddp.compat import ipyparallel
from nbddp.errors import PoolError
from nbddp.launch.topology import counted, rank_words
from nbddp.protocol import messages
from nbddp.protocol.codec import Json, from_json, to_json
from nbddp.protocol.messages import JupyterMessage
from nbddp.protocol.outcome import Outcome
from nbddp.protocol.run_spec import Question, Reply, RunSpec

Hear = Callable[[int, JupyterMessage], None]
HearReply = Callable[[int, Reply], None]
HearKernel = Callable[[int, str, dict[str, Any]], None]  # rank, type and content
DIGESTS = 8192  # signatures remembered against replay; ipyparallel's 65536 fill 8 MB over a day's cells
BEAT_TIME = 1.0  # seconds that `check` waits for a beat: the thread may be reading a large message
LOOK_EVERY, SILENT_LOOKS = 0.25, 40  # so long without a beat (10 s of looking) is a thread that is stuck
AHEAD = 1.0  # seconds that what `ask` has asked counts: the command that asked may have come to nothing
HUB_TRY = 10.0  # seconds that one client waits for a hub's answer
Connect = Callable[..., Any]  # options of ipyparallel's Client → a client
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


class Connection:
    """`client` is the one to use now; `renewed` counts how often it was replaced."""

    def __init__(
        self,
        connect: Connect,
        hear: ipyparallel.Hear,
        on_renewed: Callable[[], None] = lambda: None,
        noticed: ipyparallel.Noticed = lambda stream: None,
        patience: float = 0.0,
    ):
        """hear: is given what ranks publish and answer, in the client's thread. noticed: gets the news that the hub has
        spoken. patience: seconds that a hub which is just starting may take to answer; 0: as `connect` has it."""
        self._connect, self._hear, self._on_renewed, self._noticed = connect, hear, on_renewed, noticed
        self.dropped: Counter[str] = Counter()  # stream → messages
        self.last_dropped = ""
        self.renewed = 0
        self._take(patient(connect, patience) if patience else connect())

    def _take(self, client: Any) -> None:
        lacking = ipyparallel.missing(client)
        if lacking:
            raise PoolError(f"this ipyparallel lacks {', '.join(lacking)}; install ipyparallel 9")
        client.session.digest_history_size = DIGESTS
        client.session.pack = exact(client.session.pack)
        self.client = client
        self.outbox = ipyparallel.Outbox(client)
        self._receivers = ipyparallel.guard(client, self._hear, self._drop, self._noticed)
        self._closed = False
        self._beaten = threading.Event()
        self._silent, self._looked_at = 0, 0.0
        self._ahead = 0.0  # when `ask` asked (time.monotonic())
        self._ask()

    def _drop(self, stream: str, frames: list[Any], error: BaseException) -> None:
        self.dropped[stream] += 1
        self.last_dropped = f"{stream}: {type(error).__name__}: {error}; {len(frames)} frames"

    def troubles(self) -> str:
        """What went wrong with the connection so far, and was mended; or empty."""
        words = []
        if self.dropped:
            messages = counted(sum(self.dropped.values()), "message")
            words.append(f"{messages} could not be read and were dropped, the last: {self.last_dropped}")
        if self.renewed:
            words.append(f"the connection was lost and restored {counted(self.renewed, 'time')}")
        return "; ".join(words)

    def _ask(self) -> None:
        """Have the client's thread say that it lives, and look at every stream."""
        self._beaten.clear()
        ipyparallel.call_in_thread(self.client, self._beat)

    def _beat(self) -> None:
        try:
            ipyparallel.receive_with(self.client, self._receivers)
        except OSError:
            self._closed = True
        self._beaten.set()

    def ask(self) -> None:
        """Have the client asked already whether it works; `check` waits for its word."""
        asked = time.monotonic() - self._ahead <= AHEAD
        if not asked and not self._closed and ipyparallel.runs(self.client):
            self._ask()
            self._ahead = time.monotonic()

    def check(self) -> None:
        """See that the client works, waiting for its word, and replace it if it does not. Raises PoolError if the
        controller does not answer. What `ask` has asked just before is waited for."""
        if time.monotonic() - self._ahead > AHEAD:
            self._ask()
        self._ahead = 0.0
        end = time.monotonic() + BEAT_TIME
        while ipyparallel.runs(self.client) and time.monotonic() < end:
            if self._beaten.wait(0.05) and not self._closed:
                self._silent = 0
                return
        self.tend()

    def tend(self) -> None:
        """As `check`, by the last beat that was asked for."""
        if self._is_lost():
            self._renew()

    def _is_lost(self) -> bool:
        if self._closed or not ipyparallel.runs(self.client):
            return True
        if self._beaten.is_set():
            self._silent = 0
            self._ask()
        elif time.monotonic() - self._looked_at > LOOK_EVERY:  # looks are counted: a process that slept made none
            self._silent, self._looked_at = self._silent + 1, time.monotonic()
        return self._silent > SILENT_LOOKS

    def _renew(self) -> None:
        old = self.client
        try:
            client = self._connect(session=old.session.session)
        except (OSError, RuntimeError) as e:
            raise PoolError(
                f"the connection to the workers was lost, and the controller does not answer ({e}); "
                "%ddp stop, then run the cell again"
            ) from None
        client.session.message_count = old.session.message_count  # the ids go on: an old one would be taken for a new
        self._take(client)
        self.renewed += 1
        self._on_renewed()
        ipyparallel.give_up(old)

    def close(self) -> None:
        ipyparallel.give_up(self.client)


def exact(pack: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """`pack`, which makes bytes of a message, for text that a program will read, such as its arguments. Names that are
    no UTF-8 arrive unchanged too."""
    from jupyter_client.jsonutil import json_default

    @functools.wraps(pack)
    def packed(message: Any) -> bytes:
        with suppress(UnicodeEncodeError):
            if (found := pack(message)).isascii():
                return found
        return json.dumps(message, default=json_default).encode()

    return packed


def patient(connect: Connect, seconds: float) -> Any:
    """A client whose hub has answered. On a crowded machine (64 workers that start) the hub may be late; one that has
    lost a client's first message answers the next client. Raises PoolError after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        try:
            return connect(timeout=min(seconds, HUB_TRY))
        except TimeoutError:
            if time.monotonic() >= end:
                raise PoolError(
                    f"the pool's controller did not answer for {seconds:.0f} s; run the cell again, with fewer "
                    "workers or other programs if the machine is overloaded"
                ) from None


def _nobody(*told: Any) -> None:
    pass


def join(connection_file: str, uuids: Mapping[int, str] | None = None) -> RankRpc:
    """A second client of a cluster that another process runs. uuids: as `RankRpc.name_ranks` has them."""
    from ipyparallel import Client

    wire = RankRpc(lambda **options: Client(connection_file, **options))
    wire.name_ranks(uuids or {})
    return wire
