"""The parts of a release that need no second rank; NCCL's through stand-ins with its interface."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import threading
import types
from typing import Any

import pytest

from nbddp.capabilities.check import on_rank
from nbddp.compat import torch
from nbddp.compat.thread import OwnThread
from nbddp.deadlock.on_rank import flight, position, runnable, threads
from nbddp.deadlock.on_rank.call_log import CallLog, CallRecord
from nbddp.worker import gpus
from nbddp.worker.cell_end import Leftovers
from nbddp.worker.process_groups import Groups
from nbddp.worker.release import BorrowedSocket, Release, Sockets, abort_nccl, python_sockets


class FakeNccl(types.SimpleNamespace):
    """torch.distributed as it looks with an NCCL group; `aborted` and `destroyed` count."""

    def __init__(self, config: str, private: bool = True, fails: bool = False):
        super().__init__()
        self.aborted = self.destroyed = 0
        self.living = True

        def abort() -> None:
            self.aborted += 1
            if fails:
                raise RuntimeError("no communicator")
            if private:
                self.living = False

        def destroy() -> None:
            self.destroyed += 1
            self.living = False

        def set_default(group: object) -> None:
            self.living = False

        self.is_available, self.is_initialized = lambda: True, lambda: self.living
        self.destroy_process_group = destroy
        self.get_backend_config = lambda: config
        group = types.SimpleNamespace(abort=abort)
        self.distributed_c10d = types.SimpleNamespace(_get_default_group=lambda: group, _update_default_pg=set_default)
        if private:
            self.distributed_c10d._abort_process_group = abort


@pytest.mark.parametrize(
    ("config", "private", "times"),
    [("cuda:nccl", True, 1), ("cpu:gloo,cuda:nccl", False, 1), ("cpu:gloo", True, 0)],
)
def test_nccl_groups_are_aborted_and_others_left(
    monkeypatch: pytest.MonkeyPatch, config: str, private: bool, times: int
) -> None:
    fake = FakeNccl(config, private)
    monkeypatch.setitem(sys.modules, "torch.distributed", fake)
    abort_nccl()
    assert fake.aborted == times


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize(
    ("config", "broken", "aborted", "destroyed"),
    [("cuda:nccl", True, 1, 0), ("cuda:nccl", False, 0, 1), ("cpu:gloo", True, 0, 1)],
)
def test_broken_group_of_nccl_is_aborted_and_any_other_destroyed(
    monkeypatch: pytest.MonkeyPatch, config: str, private: bool, broken: bool, aborted: int, destroyed: int
) -> None:
    fake = FakeNccl(config, private)
    monkeypatch.setitem(sys.modules, "torch.distributed", fake)
    monkeypatch.setattr(torch, "forget_groups", lambda: None)
    Groups().drop(broken=broken)
    assert (fake.aborted, fake.destroyed, fake.living) == (aborted, destroyed, False)


def test_run_does_not_end_before_its_abort_has_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the abort would end the group that the next run makes."""
    order, entered, go_on = [], threading.Event(), threading.Event()

    def abort() -> bool:
        entered.set()
        go_on.wait()
        order.append("aborted")
        return True

    monkeypatch.setattr("nbddp.worker.release.abort_nccl", abort)
    release = Release(Sockets())
    release.begin()
    release.start()
    entered.wait()
    ending = threading.Thread(target=lambda: order.append("ended" if release.end() else ""))
    ending.start()
    ending.join(0.2)
    assert ending.is_alive()
    go_on.set()
    ending.join()
    assert (order, release.aborted) == (["aborted", "ended"], True)
    release.begin()
    assert not release.aborted


def test_abort_that_fails_is_told_and_does_not_stop_the_release(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", FakeNccl("cuda:nccl", fails=True))
    abort_nccl()
    assert "aborting NCCL: RuntimeError: no communicator" in capfd.readouterr().err


def pair() -> tuple[Any, Any]:
    """A connected pair that no Python object holds, as C++ makes it, and a Python object to read the other end."""
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    listener.close()
    return near.detach(), far


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no /proc")
def test_a_socket_that_somebody_looks_at_is_shut_all_the_same() -> None:
    """Its copy is an object in Python, and whatever is one is not torch's."""
    torchs = Sockets()
    with socket.create_server(("127.0.0.1", 0)) as door:
        lower = os.open(os.devnull, os.O_RDONLY)
        with torchs.watch():
            number = socket.create_connection(door.getsockname()).detach()
        with BorrowedSocket(number) as higher:
            assert higher.fileno() > number
            assert torchs.torchs() == [number]
        os.close(lower)
        os.close(number)


def test_nor_does_a_copy_under_a_lower_number_hide_it() -> None:
    torchs = Sockets()
    with socket.create_server(("127.0.0.1", 0)) as door:
        lower = os.open(os.devnull, os.O_RDONLY)
        with torchs.watch():
            number = socket.create_connection(door.getsockname()).detach()
        os.close(lower)
        with BorrowedSocket(number) as copy:
            assert copy.fileno() < number
            assert len(torchs.torchs()) == 1
        assert torchs.shut() == 1
        os.close(number)


def test_a_connection_that_is_being_made_is_shut_too() -> None:
    torchs = Sockets()
    with socket.create_server(("127.0.0.1", 0), backlog=0) as door, contextlib.ExitStack() as full:
        for _ in range(4):  # more than the door takes unasked
            one = full.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(door.getsockname())
        with torchs.watch():
            late = socket.socket()
            late.setblocking(False)
            late.connect_ex(door.getsockname())
            number = late.detach()
        assert torchs.shut() == 1
        with socket.socket(fileno=number) as late:
            assert late.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or late.recv(1) == b""


def test_only_sockets_that_appeared_while_watched_are_shut() -> None:
    found = Sockets()
    mine, my_end = pair()
    with found.watch():
        theirs, their_end = pair()
        pythons = socket.create_server(("127.0.0.1", 0))
    late, late_end = pair()
    assert set(found.torchs()) == {theirs}
    assert pythons.fileno() in python_sockets()
    assert found.shut() == 1
    assert their_end.recv(1) == b"", "shut"
    for fd, end in ((mine, my_end), (late, late_end)):
        held = socket.socket(fileno=fd)
        held.sendall(b"x")
        assert end.recv(1) == b"x"
        held.close()
        end.close()
    for s in (socket.socket(fileno=theirs), their_end, pythons):
        s.close()
    gc.collect()


def with_peers(count: int) -> tuple[Sockets, list[socket.socket]]:
    """Connections as of a group of gloo's, and their other ends, in the order of their descriptors."""
    found = Sockets()
    with socket.create_server(("127.0.0.1", 0)) as door:
        with found.watch(to_peers=True):
            ours = [socket.create_connection(door.getsockname()) for _ in range(count)]
            of = [one.getsockname() for one in ours]
            for one in ours:
                one.detach()
        ends = {end.getpeername(): end for end in (door.accept()[0] for _ in range(count))}
    return found, [ends[name] for name in of]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no /proc")
def test_what_a_peer_has_shut_is_left_to_gloo_the_first_time() -> None:
    """Of many ranks each would shut what those before it have shut already."""
    found, (left, gone) = with_peers(2)
    gone.close()
    assert found.shut(first=True) == 1
    assert left.recv(1) == b""
    assert found.shut() == 1, "gloo may not have noticed"
    assert found.shut() == 0
    for fd in found.torchs():
        os.close(fd)
    left.close()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no /proc")
@pytest.mark.parametrize("how", ["shut by a peer", "found shut and closed", "ended before", "open"])
def test_a_connection_that_gloo_has_found_shut_is_cut_and_one_that_a_program_ended_is_not(how: str) -> None:
    found, (end, other) = with_peers(2)
    one, two = found.torchs()
    if how == "ended before":
        os.close(one)
    found.note()
    assert not found.cut()
    if how == "shut by a peer":
        end.close()
    elif how == "found shut and closed":
        os.close(one)
    assert found.cut() == (how in ("shut by a peer", "found shut and closed"))
    for fd in {one, two} - ({one} if "close" in how or "before" in how else set()):
        os.close(fd)
    end.close()
    other.close()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no /proc")
def test_call_in_progress_counts_what_has_appeared_so_far() -> None:
    found = Sockets()
    with found.watch():
        theirs, their_end = pair()
        assert found.torchs() == [theirs]
    their_end.close()
    socket.socket(fileno=theirs).close()


def test_release_ends_with_its_run_and_never_reaches_the_next() -> None:
    class Counting(Sockets):
        shuts = 0

        def shut(self, *, first: bool = False) -> int:
            self.shuts += 1
            return 0

    counting = Counting()
    release = Release(counting)
    assert not release.start(), "no run is on"
    release.begin()
    assert release.start()
    while not counting.shuts:
        pass
    assert release.end(), "it was released"
    before = counting.shuts
    assert not release.start()
    release.begin()
    assert not release.end(), "the next run was not"
    assert counting.shuts == before


@pytest.fixture
def stillborn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads die before they begin, as where there is no memory; `Thread.start` would wait for them without end."""
    monkeypatch.setattr(OwnThread, "_bootstrap", lambda self: None)


@pytest.mark.usefixtures("stillborn")
def test_nobody_waits_for_a_thread_that_dies_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbddp.compat.thread.BEGINS", 0.0)
    thread = OwnThread("nbddp-test", int)
    assert thread.begin()
    thread.join()
    assert thread.has_died_early()
    left = Leftovers(())
    left.hold(object())
    left.let_go()
    release = Release(Sockets())
    release.begin()
    assert release.start()
    assert release.end()
    with Sockets().shutting(after=0):
        pass
    assert not any(
        ident.startswith('thread "nbddp-') for ident in runnable.acts({}, 0, lambda f: False, lambda f: False)
    )


def test_a_release_whose_thread_begins_late_ends_nothing_of_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    late, aborts = list[OwnThread](), list[str]()
    monkeypatch.setattr(OwnThread, "begin", lambda self: bool(late.append(self)) or True)
    monkeypatch.setattr("nbddp.worker.release.abort_nccl", lambda: bool(aborts.append("aborted")))
    release = Release(Sockets())
    release.begin()
    release.start()
    release.end()
    release.begin()
    late[0].run()
    assert not aborts


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no /proc")
def test_sockets_are_shut_from_a_while_after_until_the_block_has_ended() -> None:
    found = Sockets()
    with found.watch():
        theirs, their_end = pair()
    with found.shutting(after=60) as shut:
        pass
    assert not shut.is_set()
    with found.shutting(after=0) as shut:
        assert their_end.recv(1) == b"", "shut"
    assert shut.is_set()
    their_end.close()
    socket.socket(fileno=theirs).close()


def test_only_transfers_of_gloos_are_aborted() -> None:
    from torch.distributed import Work

    class Mine(Work):
        pass

    notes = CallLog()
    kept, gone = Mine(), Mine()
    notes.remember(gone, CallRecord(("r", "", 0, 1, 0, 1)))
    del gone
    notes.remember(kept, CallRecord(("s", "", 0, 1, 0, 1)))
    notes.remember(collective := Mine(), CallRecord(("all_reduce", "", 1)))
    assert notes.transfers() == [kept]
    assert not torch.abort_transfer(kept)
    del collective


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's numbers of threads are Linux's")
def test_main_thread_of_a_fork_is_its_own() -> None:
    """Python goes on to give the parent's number (up to 3.13)."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, f"{os.getpid()} {threads.native(threading.main_thread().ident)}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    own, told = os.read(read, 100).split()
    os.close(read), os.close(write)
    assert own == told


def test_memory_is_given_back_after_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class OutOfMemoryError(RuntimeError):
        pass

    emptied: list[bool] = []
    cuda = types.SimpleNamespace(is_initialized=lambda: True, empty_cache=lambda: emptied.append(True))
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError, cuda=cuda))
    freed: list[str] = []

    class Tensor:
        def __del__(self) -> None:
            freed.append("tensor")

    def forward() -> None:
        activations = Tensor()
        raise OutOfMemoryError(f"tried to allocate {activations}")

    with pytest.raises(OutOfMemoryError) as caught:
        forward()
    assert not freed
    gpus.let_go_of_memory(caught.value)
    assert (freed, emptied) == (["tensor"], [True])
    gpus.let_go_of_memory(ValueError("another"))
    assert emptied == [True]


ENTRY = {
    "process_group": ["0", "default_pg"], "collective_seq_id": 7, "profiling_name": "nccl:all_reduce", "retired": False,
    "input_sizes": [[4, 2]], "input_dtypes": ["Float"], "is_p2p": False, "time_created_ns": 10, "pg_id": 0,
}  # fmt: skip
LATER = {**ENTRY, "collective_seq_id": 8}


@pytest.mark.parametrize(
    ("entries", "sequence"),
    [([ENTRY, LATER], 7), ([{**ENTRY, "time_created_ns": 3}, {**LATER, "retired": True}], None)],
)
def test_recorded_collectives_tell_what_is_pending(entries: list[dict[str, Any]], sequence: int | None) -> None:
    status = {"0": {"last_completed_collective": "6"}}
    recorded = flight.entries([{"entries": entries, "pg_status": status}])
    found = position._pending(None, None, [], recorded, 5)
    assert (found and found.sequence) == sequence
    if found:
        assert (found.op, found.what, found.backend) == ("all_reduce", "float[4, 2]", "nccl")


def test_difference_is_worded_by_what_differs() -> None:
    same = ["all_reduce", "float32[4]", "SUM", ""]
    assert on_rank.difference([0, 1, 2], [same, same, ["all_reduce", "float32[4]", "MAX", ""]]) == (
        "all_reduce differs between ranks, with SUM on ranks 0, 1; MAX on rank 2"
    )
    assert on_rank.difference([4, 5], [same, ["barrier", "", "", ""]]) == (
        "different collectives, with all_reduce float32[4] on rank 4; barrier on rank 5"
    )
