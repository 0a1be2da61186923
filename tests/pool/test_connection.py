"""The client's connection: what it cannot read is dropped, and when it is lost another takes its place."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import zmq
from jupyter_client.session import DELIM, Session
from zmq.eventloop.zmqstream import ZMQStream

import nbddp
from nbddp.compat import ipyparallel
from nbddp.execution.execution import Execution
from nbddp.output.screens import NullScreen
from nbddp.pool import rpc
from nbddp.pool.pool import WorkerPool
from nbddp.pool.rpc import RankRpc
from nbddp.protocol.messages import OUTCOME
from nbddp.protocol.run_spec import Question
from tests.lessons.answers import pool_of
from tests.waiting import until

LAST = [b"x"] * 11  # of a burst; libzmq aborts if a socket that has read half a message leaves its sender
STREAMS = ("iopub", "notification", "query", "control", "mux")


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with pool_of(2) as made:
        made.push({"kept": 7})
        yield made


def kept(pool: WorkerPool) -> None:
    """A cell runs, and the names are there. The limit is a day's work for it: a hang fails here, not in the runner."""
    found = pool.run_cell("kept", want_value=True, screen=NullScreen(), timeout=60)
    assert list(found) == [7, 7]


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    asyncio.set_event_loop(made)
    yield made
    asyncio.set_event_loop(None)
    made.close()


def client_of(stream: ZMQStream, calls: list[Callable[[], None]]) -> Any:
    """What an outbox uses of a client."""
    loop_of = SimpleNamespace(add_callback=calls.append)
    return SimpleNamespace(_mux_stream=stream, _io_loop=loop_of, session=Session(key=b"key"))


def test_messages_that_wait_go_out_in_one_turn_of_the_clients_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Where a stream sent them by itself, each would take a turn, and a handover of the interpreter."""
    calls: list[Callable[[], None]] = []
    with zmq.Context() as context, context.socket(zmq.ROUTER) as near, context.socket(zmq.DEALER) as far:
        far.identity = b"engine"
        far.bind("inproc://engine")
        near.connect("inproc://engine")
        far.send(b"hello")
        assert near.poll(5000)
        near.recv_multipart()
        client = client_of(ZMQStream(near), calls)
        outbox = ipyparallel.Outbox(client)
        for _ in range(5):
            outbox.request("engine", client.session.msg("request"), ())
        (send,) = calls
        send()
        assert not client._mux_stream.sending()
        for _ in range(5):
            assert far.poll(5000)
            far.recv_multipart()
        client._mux_stream.close()


def test_what_a_socket_does_not_take_waits_for_its_turn_and_nothing_that_has_come_is_overlooked(
    loop: asyncio.AbstractEventLoop,
) -> None:
    calls: list[Callable[[], None]] = []
    came: list[list[bytes]] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as near, context.socket(zmq.DEALER) as far:
        near.sndhwm = far.rcvhwm = 1
        far.bind("inproc://small")
        near.connect("inproc://small")
        client = client_of(ZMQStream(near), calls)
        client._mux_stream.on_recv(came.append)
        outbox = ipyparallel.Outbox(client)
        for number in range(5):
            outbox.request("engine", client.session.msg("request", content={"number": number}), ())
        far.send(b"answer")
        calls.pop()()
        assert came == [[b"answer"]]
        assert client._mux_stream.sending()
        numbers = []
        while len(numbers) < 5:
            if far.poll(20):
                numbers.append(json.loads(far.recv_multipart()[-1])["number"])
            loop.run_until_complete(asyncio.sleep(0.001))
        assert numbers == list(range(5))
        client._mux_stream.close()


def test_many_messages_are_read_in_one_turn_of_the_clients_loop(loop: asyncio.AbstractEventLoop) -> None:
    """But not all there are: the loop has its turn."""
    read: list[int] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as near, context.socket(zmq.DEALER) as far:
        far.bind("inproc://many")
        near.connect("inproc://many")
        stream = ZMQStream(near)
        turns: list[int] = []
        guarded = ipyparallel._guarded("name", stream, lambda frames: read.append(int(bytes(frames[0]))), print)
        most = ipyparallel.AT_ONCE + 1
        stream.on_recv(lambda frames: (turns.append(len(read)), guarded(frames)), copy=False)
        for number in range(2 * most):
            far.send(b"%d" % number)
        while len(read) < 2 * most:
            loop.run_until_complete(asyncio.sleep(0.001))
        assert read == list(range(2 * most))
        assert turns == [0, most]
        stream.close()


def malformed(session: Any) -> list[list[bytes]]:
    """Messages that are none: too short, without a delimiter, unsigned, wrongly signed, twice, not JSON, without keys,
    of unknown kinds, and of a cell of ours that does not exist."""

    def signed(*parts: bytes) -> list[bytes]:
        return [DELIM, session.sign(list(parts)), *parts]

    def message(kind: str, parent: dict[str, Any]) -> list[bytes]:
        header = {"msg_id": kind, "msg_type": kind, "session": "x", "username": "", "version": "5.3"}
        return signed(json.dumps(header).encode(), json.dumps(parent).encode(), b"{}", b"{}")

    return [
        [b""], [b"1728.25"], [b"a", b"b", b"c"], [DELIM], [DELIM, b""], [DELIM, b"short"], [b"a", DELIM, b"s", b"{}"],
        [DELIM, b"0" * 64, b"{}", b"{}", b"{}", b"{}"], signed(b"{}", b"{}", b"{}", b"{}"),
        signed(b"{}", b"{}", b"{}", b"{}"), signed(b"nonsense", b"{}", b"{}", b"\xff"),
        signed(b"[]", b"3", b"{}", b"1"),
        message("nobody_knows", {"msg_id": "x", "session": "y"}), message("status", {"session": session.session}),
        message("execute_reply", {}), message("registration_notification", {}),
    ]  # fmt: skip


@pytest.mark.parametrize("stream", STREAMS)
def test_malformed_messages_are_dropped_and_the_stream_goes_on(pool: WorkerPool, stream: str) -> None:
    """A stranger takes part in the client's own socket and sends a burst; what comes behind it is read."""
    link = pool.group.wire.connection
    client, before = link.client, link.dropped[stream]
    socket = getattr(client, f"_{stream}_socket")
    bad = malformed(client.session)
    subscribes = stream in ("iopub", "notification")
    with zmq.Context.instance().socket(zmq.XPUB if subscribes else zmq.DEALER) as stranger:
        public, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.curve_server = True
        port = stranger.bind_to_random_port("tcp://127.0.0.1")
        in_thread(client, lambda: connects(socket, public, port))
        if subscribes:
            assert stranger.recv() == b"\x01"
        for _ in range(5):
            for frames in bad:
                stranger.send_multipart(frames)
        stranger.send_multipart(LAST)
        until(lambda: link.last_dropped.startswith(stream) and f"{len(LAST)} frames" in link.last_dropped)
        assert link.dropped[stream] >= before + 5 * 8
        in_thread(client, lambda: socket.disconnect(f"tcp://127.0.0.1:{port}"))
        in_thread(client, lambda: setattr(socket, "curve_serverkey", client.curve_serverkey))
    kept(pool)
    assert pool.ask(0, Question.of("where"), timeout=30) is not None
    pool.restart([1])
    pool.push({"kept": 7}, [1])
    kept(pool)
    assert link.client is client, "it was not lost"


def test_one_malformed_message_of_the_controllers_does_not_deafen_the_client(pool: WorkerPool) -> None:
    """It comes the way of the ranks' own messages, which are queued behind it: unguarded, no cell ever ended again. Who
    sends it has the keys, as the ranks have."""
    link = pool.group.wire.connection
    before = link.dropped["iopub"]
    with open(pool.group.cluster.controller.connection_files["engine"]) as file:
        info = json.load(file)
    with zmq.Context.instance().socket(zmq.PUB) as stranger:
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.curve_serverkey = info["curve_serverkey"].encode()
        stranger.connect(f"{info['interface']}:{info['iopub']}")

        def arrives() -> bool:
            stranger.send(b"1728.25")
            return link.dropped["iopub"] > before

        until(arrives)
    kept(pool)
    assert "DELIM" in link.last_dropped


def test_a_cell_is_one_message_to_each_rank_and_one_back(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither replies nor states, which nobody would read; and the hub is told of none of them."""
    link, heard = pool.group.wire.connection, []
    monkeypatch.setattr(link, "_hear", lambda message: heard.append(message) or pool.group.wire._heard(message))
    receivers = ipyparallel.guard(link.client, link._hear, link._drop)
    monkeypatch.setattr(link, "_receivers", receivers)
    pool.run_cell("pass", screen=NullScreen())
    assert [(m["header"]["msg_type"], m["buffers"]) for m in heard] == [(OUTCOME, [])] * 2
    known = link.client.queue_status()
    assert all(known[rank] == {"queue": 0, "completed": 0, "tasks": 0} for rank in (0, 1))


def connects(socket: Any, public: bytes, port: int) -> None:
    socket.curve_serverkey = public
    socket.connect(f"tcp://127.0.0.1:{port}")


def in_thread(client: Any, call: Callable[[], object]) -> None:
    """In the thread to which the client's sockets belong."""
    done = threading.Event()
    ipyparallel.call_in_thread(client, lambda: (call(), done.set()))  # type: ignore[func-returns-value]
    assert done.wait(30)


def stop_loop(client: Any) -> None:
    client._io_loop.add_callback(client._io_loop.stop)
    client._io_thread.join(30)


def raise_in_loop(client: Any) -> None:
    def leave() -> None:
        raise SystemExit

    client._io_loop.add_callback(leave)
    client._io_thread.join(30)


def close_stream(client: Any, name: str) -> None:
    in_thread(client, getattr(client, f"_{name}_stream").close)


LOSSES: dict[str, Callable[[Any], None]] = {
    "loop stopped": stop_loop,
    "loop left": raise_in_loop,
    **{f"{name} closed": lambda c, n=name: close_stream(c, n) for name in STREAMS},  # type: ignore[misc]
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_lost_client_is_replaced_before_the_next_run_and_the_ranks_keep_their_names(
    pool: WorkerPool, loss: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "BEAT_TIME", 0.1)
    pids = {w.pid for w in pool.workers.values()}
    LOSSES[loss](pool.group.wire.client)
    assert list(pool.run_cell("kept", want_value=True, timeout=60)) == [7, 7]
    assert "the connection to the workers was lost and restored; variables on them are kept" in capsys.readouterr().out
    assert {w.pid for w in pool.workers.values()} == pids
    kept(pool)


def test_cell_goes_on_while_its_client_is_lost(pool: WorkerPool) -> None:
    """Ranks end one before and one after the other client is there: neither outcome is lost."""
    lost = threading.Timer(0.5, lambda: stop_loop(pool.group.wire.client))
    lost.start()
    cell = "import os, time\ntime.sleep(0.6 + 2 * int(os.environ['RANK']))\nkept + int(os.environ['RANK'])"
    renewed = pool.group.wire.connection.renewed
    assert list(pool.run_cell(cell, want_value=True, screen=NullScreen(), timeout=60)) == [7, 8]
    lost.join()
    assert pool.group.wire.connection.renewed == renewed + 1


def test_outcome_that_did_not_arrive_is_sent_again(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    hear, lost = Execution.hear, []

    def lossy(run: Execution, rank: int, message: dict[str, Any]) -> None:
        if message["header"]["msg_type"] == OUTCOME and rank not in lost:
            lost.append(rank)
        else:
            hear(run, rank, message)

    monkeypatch.setattr(Execution, "hear", lossy)
    kept(pool)
    assert sorted(lost) == [0, 1]


def test_outcome_too_large_to_be_kept_is_an_error_and_no_hang(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hear, lost = Execution.hear, []

    def lossy(run: Execution, rank: int, message: dict[str, Any]) -> None:
        if rank == 1 and message["header"]["msg_type"] == OUTCOME and not lost:
            lost.append(rank)
        else:
            hear(run, rank, message)

    pool.run_cell("import nbddp.worker.kernel as k\nk.REPEATED = 1000", screen=NullScreen())
    monkeypatch.setattr(Execution, "hear", lossy)
    with pytest.raises(nbddp.WorkerFailed, match="too large to be sent again"):
        pool.run_cell("'x' * 2000", want_value=True, screen=NullScreen(), timeout=60)
    kept(pool)


def test_stuck_thread_is_replaced_after_many_looks_and_not_before(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was given to it to send is lost; that ends the cell with an error of the rank that was not reached."""
    free, link = threading.Event(), pool.group.wire.connection
    client = link.client
    ipyparallel.call_in_thread(client, free.wait)  # type: ignore[arg-type]
    monkeypatch.setattr(rpc, "BEAT_TIME", 0.1)
    try:
        link.check()
        assert link.client is client, "a thread that is at work is left alone"
        monkeypatch.setattr(rpc, "SILENT_LOOKS", 2)
        with pytest.raises(nbddp.WorkerFailed, match="lost before this rank was reached; run the cell again"):
            pool.run_cell("kept = 8", screen=NullScreen(), timeout=60)
    finally:
        free.set()
    assert link.client is not client
    kept(pool)


def test_controller_that_does_not_answer_is_told() -> None:
    """Where there is nobody to connect to, the error is ours."""
    calls: list[dict[str, Any]] = []

    with pool_of(1) as pool:
        made = pool.group.wire.client

        def connect(**options: Any) -> Any:
            calls.append(options)
            if len(calls) > 1:
                raise TimeoutError("Hub connection request timed out")
            return made

        wire = RankRpc(connect)
        stop_loop(made)
        with pytest.raises(nbddp.PoolError, match="the controller does not answer"):
            wire.connection.check()
    assert calls[1] == {"session": made.session.session}


def test_a_controller_that_is_late_is_waited_for(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine where 64 workers start, its hub may need longer than ipyparallel's 10 s."""
    cluster, tries = pool.group.cluster, list[dict[str, Any]]()
    controller = psutil.Process(cluster.controller.pid)

    def connect(**options: Any) -> Any:
        tries.append(options)
        if len(tries) == 2:
            controller.resume()
        return cluster.connect_client_sync(**options)

    monkeypatch.setattr(rpc, "HUB_TRY", 0.5)
    controller.suspend()
    try:
        with pytest.raises(nbddp.PoolError, match="the pool's controller did not answer for 0 s; run the cell again"):
            rpc.patient(cluster.connect_client_sync, 0.1)
        link = rpc.Connection(connect, lambda *message: None, lambda: None, patience=30)
    finally:
        controller.resume()
    assert len(tries) > 1
    link.close()
    kept(pool)
