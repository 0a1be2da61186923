"""Nothing hangs, nothing is lost: every blocked call against every fault, on real ranks."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import nbddp
from nbddp.launch.options import LaunchSpec
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests.pool import faults
from tests.pool.faults import (
    CALLS,
    FREED,
    FREED_STATUS,
    FREES,
    INIT,
    LAZY,
    NO_LAZY,
    NO_RECORDER,
    RECORDS,
    SEEN_WITHOUT,
    SET_UP,
    StopWhenReady,
    Watching,
    cases,
    check_after,
    check_case,
    needs_recorder,
    replaced,
)
from tests.waiting import until

PREPARE = SET_UP.format(fault="") + INIT
PREPARE += "\n" * (23 - PREPARE.count("\n"))  # what a test adds begins at line 24
assert PREPARE.count("\n") == 23


@pytest.mark.every(2)
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.cuts), 4])
@pytest.mark.parametrize(("call", "fault"), list(cases()))
def test_fault_matrix(
    pools: dict[int, WorkerPool], world: int, call: str, fault: str, fault_matrix: Callable[[str], None]
) -> None:
    if not RECORDS and fault in ("skip", "mismatch") and call not in SEEN_WITHOUT:
        pytest.skip(NO_RECORDER)
    line = check_case(pools[world], call, fault)
    fault_matrix(f"{world} ranks  {line}")


HANGS = {
    "crossed recv": (
        "dist.recv(torch.ones(1), 1 - rank)",
        "rank 0 waits in recv from rank 1 (line 24), and rank 1 waits in recv from rank 0 (line 24)",
        "batch_isend_irecv",
    ),
    "crossed send": (
        "dist.send(torch.ones(1), 1 - rank)",
        "rank 0 waits in send to rank 1 (line 24), and rank 1 waits in send to rank 0 (line 24)",
        "Order the calls by rank",
    ),
    "different collectives": (
        "if rank == 0: dist.barrier()\nelse: dist.all_reduce(torch.ones(1000))",
        "collective #1 differs between ranks, with barrier on rank 0 (line 24), "
        "all_reduce on rank 1 (line 25)",
        "",
    ),
    "different shapes": (
        "dist.all_reduce(torch.ones(1_000_000 * (1 + rank)))",
        "all_reduce #1 has different shapes or dtypes, float[1000000] on rank 0, float[2000000] on rank 1 (line 24)",
        "",
    ),
    "evaluation on rank 0 alone": (
        "model = DDP(torch.nn.BatchNorm1d(4))\nmodel(torch.ones(2, 4)).sum().backward()\n"
        "if rank == 0: model(torch.ones(2, 4))",
        "rank 0 waits in broadcast #8 (line 26); rank 1 has finished the cell without calling it", "use model.module",
    ),
    "uneven batches": (
        "model = DDP(torch.nn.Linear(4, 4))\nfor batch in range(3 + (rank == 0)):\n"
        "    model(torch.ones(2, 4)).sum().backward()",
        "rank 0 waits in backward, all_reduce #9 (line 26); rank 1 has finished the cell without calling it",
        "the same number of batches",
    ),
    "uneven batches, backward ended by the program": (
        "model = DDP(torch.nn.Linear(4, 4))\nmodel.require_manual_backward_finalization = True\n"
        "for batch in range(3 + (rank == 0)):\n    model(torch.ones(2, 4)).sum().backward()\n"
        "    model.finalize_backward()",
        "rank 0 waits in backward, all_reduce #9 (line 28); rank 1 has finished the cell without calling it",
        "the same number of batches",
    ),
    "a wait for what was never sent": (
        "if rank == 0: dist.irecv(torch.ones(4), 1).wait()",
        "rank 0 waits in wait() for a recv from rank 1 (line 24); rank 1 has finished the cell without calling it", "",
    ),
    "an asynchronous collective": (
        "if rank == 0: dist.all_reduce(torch.ones(4), async_op=True).wait()",
        "rank 0 waits in wait() for all_reduce #1 (line 24); rank 1 has finished the cell without calling it", "",
    ),
    "sends before receives, both asynchronous": (
        "dist.isend(torch.ones(1), 1 - rank).wait()",
        "rank 0 waits in wait() for a send to rank 1 (line 24), "
        "and rank 1 waits in wait() for a send to rank 0 (line 24)",
        "batch_isend_irecv",
    ),
    "one send too few": (
        "for i in range(3 - rank): dist.recv(torch.ones(1), 1) if rank == 0 else dist.send(torch.ones(1), 0)",
        "rank 0 waits in recv from rank 1 (line 24); rank 1 has finished the cell without calling it", "",
    ),
    "a collective in a thread": (
        "import threading\nthread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1)))\n"
        "if rank == 0: thread.start(); thread.join()",
        "rank 0 waits in all_reduce #1 in a thread (line 25); rank 1 has finished the cell without calling it", "",
    ),
    "groups in different orders": (
        "a, b = dist.new_group([0, 1]), dist.new_group([0, 1], group_desc='mine')\n"
        "for group in ((a, b) if rank == 0 else (b, a)): dist.all_reduce(torch.ones(1), group=group)",
        "rank 0 waits in all_reduce #1 of group {0, 1} (line 25); "
        "rank 1 waits in all_reduce #1 of group {0, 1} (mine) (line 25)", "",
    ),
    "groups of one name in different orders": (
        "a, b = dist.new_group([0, 1]), dist.new_group([1, 0])\n"
        "for group in ((a, b) if rank == 0 else (b, a)): dist.all_reduce(torch.ones(1), group=group)",
        "rank 0 waits in all_reduce #1 of the first group {0, 1} (made at cell line 24) (line 25); "
        "rank 1 waits in all_reduce #1 of the second group {0, 1} (made at cell line 24) (line 25)", "",
    ),
    "a send and a receive in two groups of one name": (
        "def make(): return dist.new_group([0, 1])\na, b = make(), make()\n"
        "if rank: dist.send(torch.ones(1), 0, group=a)\nelse: dist.recv(torch.ones(1), 1, group=b)",
        "rank 0 waits in recv from rank 1 of the second group {0, 1} (made at cell line 24, in make) (line 27), "
        "and rank 1 waits in send to rank 0 of the first group {0, 1} (made at cell line 24, in make) (line 26)", "",
    ),
    "a second init on one rank": (
        "held = dist.group.WORLD\nif rank == 0:\n    dist.destroy_process_group()\n"
        "    dist.init_process_group('gloo')\nelse: dist.all_gather([torch.ones(1)] * 2, torch.ones(1))",
        "rank 0 waits in init_process_group #2 (line 27); "
        "rank 1 waits in all_gather #1 of the group of init #1 (line 28)",
        "",
    ),
    "a receive from any source": (
        "if rank == 0: dist.recv(torch.ones(1))\nelse: dist.barrier()",
        "rank 0 waits in recv (line 24); rank 1 waits in barrier #1 (line 25)", "",
    ),
    "another src of a broadcast": (
        "dist.broadcast(torch.ones(4), src=rank)",
        "broadcast #1 has different src, src=0 on rank 0 (line 24), src=1 on rank 1 (line 24)", "",
    ),
    "another src of a broadcast of objects": (
        "dist.broadcast_object_list([1], src=1 - rank)",
        "broadcast #1 has different src, src=1 on rank 0 (line 24), src=0 on rank 1 (line 24)", "",
    ),
    "another src of a scatter": (
        "dist.scatter(torch.ones(4), [torch.ones(4)] * 2, src=rank)",
        "scatter #1 has different src, src=0 on rank 0 (line 24), src=1 on rank 1 (line 24)", "",
    ),
    "another src of a scatter of objects": (
        "dist.scatter_object_list([None], [1, 2], src=1 - rank)",
        "broadcast #1 has different src, src=1 on rank 0 (line 24), src=0 on rank 1 (line 24)", "",
    ),
    "another dst of a reduce": (
        "dist.reduce(torch.ones(4), dst=rank)",
        "reduce #1 has different dst, dst=0 on rank 0 (line 24), dst=1 on rank 1 (line 24)", "",
    ),
    "another dst of a gather": (
        "dist.gather(torch.ones(4), [torch.ones(4)] * 2, dst=rank)",
        "gather #1 has different dst, dst=0 on rank 0 (line 24), dst=1 on rank 1 (line 24)", "",
    ),
    "another dst of a gather of objects": (
        "dist.gather_object(rank, [None] * 2, dst=rank)",
        "gather #2 has different dst, dst=0 on rank 0 (line 24), dst=1 on rank 1 (line 24)", "",
    ),
    "a result of a functional collective": (
        "import torch.distributed._functional_collectives as functional\n"
        "if rank == 0: print(functional.all_reduce(torch.ones(4), 'sum', dist.group.WORLD) + 1)",
        "rank 0 waits in all_reduce #1 (line 25); rank 1 has finished the cell without calling it", "",
    ),
    "a new group": (
        "if rank == 0: dist.new_group([0, 1])",
        "rank 0 waits in new_group #1 (line 24); rank 1 has finished the cell without calling it", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HANGS)
def test_deadlock_is_named_and_freed(two: WorkerPool, name: str) -> None:
    if not RECORDS and name not in ("crossed recv", "crossed send", "a new group"):
        pytest.skip(NO_RECORDER)
    code, words, advice = HANGS[name]
    if "finalize_backward" in code and not LAZY:
        pytest.skip(NO_LAZY)
    with pytest.raises(nbddp.RunHung) as caught:
        two.run_cell(PREPARE + code, hang_after=0.3, timeout=30, screen=NullScreen())
    assert str(caught.value) == f"deadlock: {words}"
    assert words in caught.value.report
    assert advice in caught.value.report
    assert not FREES or not replaced(two)
    check_after(two, ())


SLOW = {
    "sleeps": "time.sleep(1.0)",
    "computes": "end = time.monotonic() + 1.0\n"
    "while time.monotonic() < end: torch.ones(200, 200) @ torch.ones(200, 200)",
    "waits for a child": "import subprocess; subprocess.run(['sleep', '1.0'])",
    "holds the interpreter": "import ctypes; ctypes.PyDLL(None).usleep(1_000_000)",
}


class Fails(NullScreen):
    """A screen that raises where the front end would, at each `times` further look."""

    def __init__(self, where: str, times: int) -> None:
        self.where, self.times, self.ready = where, times, False

    def line(self, rank: int, stream: str, text: str) -> None:
        self.ready = True

    def refresh(self, outputs: object, status: Callable[[], str]) -> float | None:
        if self.where == "refresh" and self.ready and self.times > 0:
            self.times -= 1
            raise BrokenPipeError("the front end is gone")
        return 0.05

    def finish(self, outputs: object) -> None:
        if self.where == "finish":
            raise BrokenPipeError("the front end is gone")


BLOCKED = "print('ready', flush=True)\nif rank == 0: dist.barrier()\nelse: time.sleep(600)"


@pytest.mark.parametrize("where", ["refresh", "finish"])
def test_a_front_end_that_fails_leaves_no_rank_at_work(two: WorkerPool, where: str) -> None:
    code = PREPARE + (BLOCKED if where == "refresh" else "kept = kept")
    with pytest.raises(BrokenPipeError, match="the front end is gone"):
        two.run_cell(code, screen=Fails(where, 9))
    check_after(two, ())


@pytest.mark.parametrize("times", [1, 2, 9])
def test_another_signals_exception_amid_a_cell_leaves_no_rank_at_work(two: WorkerPool, times: int) -> None:
    """A time limit of the caller's own; it may expire again while the ranks are freed, as Stop may be pressed twice."""
    left = list(range(times))

    class Expires(NullScreen):
        def line(self, rank: int, stream: str, text: str) -> None:
            signal.setitimer(signal.ITIMER_REAL, 0.1, 0.02)

    def expired(*_: object) -> None:
        if left and left.pop() is not None:
            raise TimeoutError("of the caller's own")

    before = signal.signal(signal.SIGALRM, expired)
    try:
        with pytest.raises(TimeoutError, match="of the caller's own"):
            two.run_cell(PREPARE + BLOCKED, screen=Expires())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if times > 1:  # what had not ended yet was replaced
        two.ensure(LaunchSpec())
        two.run_cell("import os; kept = int(os.environ['RANK'])", screen=NullScreen())
    check_after(two, ())


@needs_recorder
@pytest.mark.parametrize("how", SLOW)
def test_slow_rank_is_no_deadlock_and_its_line_is_shown(two: WorkerPool, how: str) -> None:
    watching = Watching()
    body = "\n    ".join(SLOW[how].split("\n"))
    code = f"{PREPARE}if rank == 1:\n    {body}\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()"
    assert list(two.run_cell(code, hang_after=0.3, want_value=True, screen=watching)) == [2.0, 2.0]
    last = code.count("\n")
    silent = how == "holds the interpreter"  # then nobody knows what it has called
    waits = "apparently waiting" if silent else "waiting"
    assert watching.saw(f"rank 0 (cell line {last}, {waits} in all_reduce #1 for rank 1)")
    assert watching.saw("in native code that holds" if silent else "rank 1 (cell line 2")


@needs_recorder
def test_report_names_the_first_failure_and_where_the_others_were(two: WorkerPool) -> None:
    with pytest.raises(nbddp.WorkerFailed) as caught:
        two.run_cell(
            PREPARE + "if rank == 0: dist.all_reduce(torch.ones(1))\nelse: raise ValueError('bad')", screen=NullScreen()
        )
    error = caught.value
    assert str(error) == "rank 1 raised ValueError: bad (cell line 25)"
    assert f"rank 0: cell line 24, waiting in all_reduce #1 for rank 1; {FREED}" in error.report
    assert (error.rank, error.node, error.exception_type, error.exception_message) == (1, 0, "ValueError", "bad")
    assert Path(error.logs[0]).parent.is_dir()
    with pytest.raises(nbddp.WorkerFailed, match="Default process group has not been initialized"):
        two.run_cell("dist.all_reduce(torch.ones(1))", screen=NullScreen())


@needs_recorder
def test_ranks_that_take_no_part_are_not_waited_for_in_vain(two: WorkerPool) -> None:
    two.run_cell(PREPARE, screen=NullScreen())
    with pytest.raises(nbddp.RunHung) as caught:
        two.run_cell("dist.all_reduce(torch.ones(1))", ranks=[0], hang_after=0.3, screen=NullScreen())
    assert str(caught.value).endswith("rank 0 waits in all_reduce #1 (line 1); rank 1 does not take part in this run")
    check_after(two, ())


def test_a_rank_that_dies_beside_a_cell_of_others_is_none_of_its_concern(two: WorkerPool) -> None:
    killed = two.workers[1]
    code = f"import os; os.kill({killed.pid}, 9); kept"
    assert two.run_cell(code, ranks=[0], want_value=True, screen=NullScreen())[0] == 0
    until(lambda: killed.exit is not None)
    assert two.run_cell("1", want_value=True, screen=NullScreen()) == [1, 1], "rank 1 is new"


@needs_recorder
def test_place_in_the_users_own_module_is_told(two: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text("import torch, torch.distributed as dist\ndef fit():\n    dist.barrier()\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport trainer\nif rank == 0: trainer.fit()"
    with pytest.raises(nbddp.RunHung) as caught:
        two.run_cell(PREPARE + code, hang_after=0.3, screen=NullScreen())
    words = "rank 0 waits in barrier #1 (trainer.py line 3, in fit); rank 1 has finished the cell without calling it"
    assert str(caught.value) == f"deadlock: {words}"
    check_after(two, ())


def test_key_that_may_come_from_outside_is_waited_for(two: WorkerPool, tmp_path: Path) -> None:
    from torch.distributed import FileStore

    path = str(tmp_path / "store")
    coming = threading.Timer(0.8, lambda: FileStore(path, -1).set("it", "came"))
    coming.start()
    code = f"from torch.distributed import FileStore\nFileStore({path!r}, -1).get('it').decode()"
    assert list(two.run_cell(code, hang_after=0.3, want_value=True, screen=NullScreen())) == ["came"] * 2


@needs_recorder
def test_error_in_a_comm_hook_is_the_cause(two: WorkerPool) -> None:
    hook = (
        "model = DDP(torch.nn.Linear(4, 4))\ndef hook(state, bucket):\n"
        "    if rank == 1: raise ValueError('in the hook')\n"
        "    work = dist.all_reduce(bucket.buffer(), async_op=True)\n"
        "    return work.get_future().then(lambda f: f.value()[0])\n"
        "model.register_comm_hook(None, hook)\nmodel(torch.ones(2, 4)).sum().backward()"
    )
    with pytest.raises(nbddp.WorkerFailed) as caught:
        two.run_cell(PREPARE + hook, screen=NullScreen())
    assert str(caught.value) == "rank 1 raised ValueError: in the hook (cell line 26, in hook)"
    assert f"rank 0: cell line 30, waiting in backward, all_reduce #4 for rank 1; {FREED}" in caught.value.report
    check_after(two, ())


def test_program_that_swallows_the_error_is_freed_too(two: WorkerPool) -> None:
    loop = (
        "if rank == 1: raise ValueError('x')\n"
        "while True:\n    try: dist.all_reduce(torch.ones(4))\n    except RuntimeError: pass"
    )
    with pytest.raises(nbddp.WorkerFailed, match="rank 1 raised ValueError"):
        two.run_cell(PREPARE + loop, screen=NullScreen())
    check_after(two, ())


def test_group_that_an_interrupted_init_left_registered_is_forgotten(two: WorkerPool) -> None:
    """torch registers a group's name in C++ before it notes the group in Python; a Stop may fall between."""
    left = (
        "from torch._C import _distributed_c10d as c10d\nheld = dist.group.WORLD\n"
        "world = dist.distributed_c10d._world\nworld.pg_map.clear(); world.pg_names.clear()\n"
        "dist.distributed_c10d.GroupMember.WORLD = None\nraise ValueError('as after a Stop')"
    )
    with pytest.raises(nbddp.WorkerFailed, match="as after a Stop"):
        two.run_cell(PREPARE + left, screen=NullScreen())
    check_after(two, ())


def test_what_cannot_be_freed_is_replaced_and_the_lost_names_are_told(two: WorkerPool) -> None:
    """A client of a store in a file, as torch has it, looks into it until its own timeout, and listens to nothing. That
    nobody else will come is not known here: the third rank may be a process outside the pool."""
    code = (
        "import os, tempfile, torch.distributed as dist\nstore = 'file://' + tempfile.mktemp()\n"
        "from nbddp.deadlock.on_rank import own_stores; own_stores.base = lambda store: None\n"
        "if os.environ['RANK'] == '1': dist.init_process_group('gloo', init_method=store, rank=1, world_size=3)"
    )
    with pytest.raises(nbddp.RunTimedOut) as caught:
        two.run_cell(code, hang_after=0.3, timeout=1, screen=NullScreen())
    state = caught.value.states[1]
    assert (state.status, "kept" in state.lost) == ("replaced", True)
    assert set(state.imports) >= {"os", "tempfile", "dist"}
    assert "could not be unblocked" not in caught.value.report  # the table says it in its own words
    assert "replaced; lost: " in caught.value.report
    check_after(two, (1,))


@needs_recorder
def test_timeout_ends_the_cell_with_the_table(two: WorkerPool) -> None:
    with pytest.raises(nbddp.RunTimedOut) as caught:
        two.run_cell(PREPARE + "if rank: time.sleep(600)\ndist.barrier()", timeout=1.0, screen=NullScreen())
    assert str(caught.value) == "the run took longer than --timeout 1"
    assert "waiting in barrier #1 for rank 1" in caught.value.report
    check_after(two, ())


@pytest.mark.parametrize(
    "busy",
    [
        "while True: pass",
        "time.sleep(600)",
        "import subprocess; subprocess.run(['sleep', '600'])",
        "import asyncio; await asyncio.sleep(600)",
        "import asyncio; await asyncio.sleep(0)\nwhile True: pass",
    ],
)
def test_stop_ends_python_of_every_kind(two: WorkerPool, busy: str) -> None:
    with pytest.raises(nbddp.RunStopped):
        two.run_cell("import time\nprint('ready', flush=True)\n" + busy, screen=StopWhenReady())
    check_after(two, ())


def test_a_cell_that_ends_well_in_spite_of_stop_is_still_stopped(two: WorkerPool) -> None:
    code = "import time\ntry:\n    print('ready', flush=True)\n    time.sleep(600)\nexcept KeyboardInterrupt: pass"
    with pytest.raises(nbddp.RunStopped):
        two.run_cell(code, screen=StopWhenReady())


def test_stop_pressed_twice_replaces_at_once(two: WorkerPool) -> None:
    with pytest.raises(nbddp.RunStopped) as caught:
        two.run_cell("print('ready', flush=True)\nimport time; time.sleep(600)", screen=StopWhenReady(times=2))
    assert {s.status for s in caught.value.states} <= {"replaced", "interrupted"}
    assert any(s.status == "replaced" for s in caught.value.states)


DEATHS = {
    "SIGSEGV": ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV", "Fatal Python error: Segmentation fault"),
    "abort": ("import ctypes; ctypes.CDLL(None).abort()", "killed by SIGABRT", "Fatal Python error: Aborted"),
    "_exit": ("os._exit(7)", "its process exited with code 7", ""),
    "SIGKILL": ("os.kill(os.getpid(), 9)", "killed by SIGKILL; the usual cause is that the machine", ""),
    "gloo's own abort": ("dist.all_reduce(torch.ones(8))", "killed by SIGABRT", "--check to see the rank"),
    "a word from C": (
        "import ctypes; c = ctypes.CDLL(None); c.dprintf(2, b'terminate called by hand\\n'); c.abort()",
        "killed by SIGABRT",
        "    terminate called by hand",
    ),
}


@pytest.mark.parametrize("how", DEATHS)
def test_death_is_told_with_signal_memory_last_words_and_log(two: WorkerPool, how: str) -> None:
    code, words, last = DEATHS[how]
    with pytest.raises(nbddp.WorkerFailed) as caught:
        two.run_cell(PREPARE + f"if rank == 1: {code}\ndist.all_reduce(torch.ones(4))", screen=NullScreen())
    error = caught.value
    assert words in str(error)
    assert error.cause.kind == "died"
    assert last in error.report
    assert re.search(r"^It ran on cpu and held at most \d+ MiB\.$", error.report, re.MULTILINE | re.IGNORECASE)
    assert str(error.cause.log) in error.report
    other = error.states[1 - error.rank]
    if how == "gloo's own abort" and other.status == "replaced":  # once in 8: gloo forgets a message cut in its midst
        return
    assert other.status in ("interrupted", FREED_STATUS)
    check_after_says_new(two, error.rank)


def test_last_line_of_a_killed_rank_is_not_lost(two: WorkerPool) -> None:
    """A process that is killed right after a print takes messages with it that have not left it."""
    for number in range(8):
        with pytest.raises(nbddp.WorkerFailed):
            two.run_cell(
                f"import os, sys\nprint('last', {number}); print('word', {number}, file=sys.stderr)\n"
                "if os.environ['RANK'] == '1': os.kill(os.getpid(), 9)",
                screen=NullScreen(),
            )
        assert two.last_run is not None
        for output in two.last_run.outputs.values():
            assert sorted(output.log.read_text().splitlines()) == [f"last {number}", f"word {number}"]
        two.ensure(LaunchSpec())


def check_after_says_new(pool: WorkerPool, rank: int) -> None:
    assert pool.ensure(LaunchSpec()) == [f"rank {rank} is new and empty"]
    assert pool.ensure(LaunchSpec()) == [], "said once"
    check_after(pool, (rank,))


def test_release_touches_only_torchs_sockets(two: WorkerPool, tmp_path: Path) -> None:
    """A user's TCP connection, a ZMQ pair and a DataLoader with workers outlive a freeing."""
    mine = """
import socket, threading, zmq
from torch.utils.data import DataLoader
listener = socket.create_server(("127.0.0.1", 0))
mine = socket.create_connection(listener.getsockname()); theirs, _ = listener.accept()
context = zmq.Context(); push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
port = pull.bind_to_random_port("tcp://127.0.0.1"); push.connect(f"tcp://127.0.0.1:{port}")
push.send(b"0"); assert pull.recv() == b"0"
"""
    between = """
late = []
def meanwhile():  # a connection that is made while torch makes its group
    for _ in range(50):
        a = socket.create_connection(listener.getsockname()); b, _ = listener.accept(); late.append((a, b))
thread = threading.Thread(target=meanwhile); thread.start()
dist.init_process_group('gloo')
thread.join()
loader = DataLoader(
    list(range(400)), batch_size=2, num_workers=1, multiprocessing_context="fork", persistent_workers=True
)
batches = iter(loader); next(batches)
if rank == 0: dist.all_reduce(torch.ones(1))
else: raise ValueError("x")
"""
    after = """
mine.sendall(b"hello"); assert theirs.recv(5) == b"hello"
for a, b in late:
    a.sendall(b"hi"); assert b.recv(2) == b"hi"
push.send(b"1"); assert pull.recv() == b"1"
count = sum(1 for _ in batches)
for s in (mine, theirs, listener, *(s for pair in late for s in pair)): s.close()
context.destroy(linger=0); del batches, loader
count
"""
    with pytest.raises(nbddp.WorkerFailed, match="rank 1 raised ValueError: x"):
        two.run_cell(SET_UP.format(fault="") + mine + between, screen=NullScreen())
    assert two.last_run is not None
    assert two.last_run.ended[0].status == "interrupted"
    assert list(two.run_cell(after, want_value=True, screen=NullScreen())) == [199, 199]
    check_after(two, ())


CHECKS = {
    "dtype": (
        "dist.all_reduce(torch.ones(4, dtype=torch.int32 if rank else torch.float32))",
        "all_reduce differs between ranks, with float32[4] on rank 0; int32[4] on rank 1",
    ),
    "shape": (
        "dist.all_reduce(torch.ones(4 + rank))",
        "all_reduce differs between ranks, with float32[4] on rank 0; float32[5] on rank 1",
    ),
    "reduce op": (
        "dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)",
        "all_reduce differs between ranks, with SUM on rank 0; MAX on rank 1",
    ),
    "operation": (
        "if rank: dist.barrier()\nelse: dist.all_reduce(torch.ones(4))",
        "different collectives, with all_reduce float32[4] on rank 0; barrier on rank 1",
    ),
    "root": (
        "dist.broadcast(torch.ones(4), rank)",
        "broadcast differs between ranks, with root 0 on rank 0; root 1 on rank 1",
    ),
    "order": (
        "a, b = torch.ones(1), torch.ones(2)\nfor t in ((a, b) if rank else (b, a)): dist.all_reduce(t)",
        "all_reduce differs between ranks, with float32[2] on rank 0; float32[1] on rank 1",
    ),
    "recv": (
        "if rank: dist.send(torch.ones(4), 0)\nelse: dist.recv(torch.ones(5), 1)",
        "recv from rank 1 expects float32[5], and rank 1 sends float32[4]",
    ),
}


@pytest.mark.parametrize("what", CHECKS)
def test_check_says_what_differs_between_which_ranks(two: WorkerPool, what: str) -> None:
    code, words = CHECKS[what]
    with pytest.raises(nbddp.WorkerFailed) as caught:
        two.run_cell(PREPARE + code, check=True, screen=NullScreen())
    assert caught.value.exception_type == "CollectiveMismatch"
    assert caught.value.exception_message == words
    check_after(two, ())


def test_check_leaves_a_right_program_alone_and_goes_away(pools: dict[int, WorkerPool]) -> None:
    four = pools[4]
    four.ensure(LaunchSpec())
    code = PREPARE + (
        "half = dist.new_group([0, 1]); t = torch.ones(2); dist.all_reduce(t)\n"
        "if rank < 2: dist.all_reduce(t, group=half)\n"
        "out = [None] * world; dist.all_gather_object(out, 'x' * rank)\n"
        "if rank == 0: dist.send(t, 1)\nif rank == 1: dist.recv(t, 0)\n"
        "rows = list(torch.ones(4, rank + 1).split(1)); dist.barrier()\n"
        "got = torch.zeros(world * 2); dist.all_gather_into_tensor(got, t)\n"
        "DDP(torch.nn.Linear(2, 1))(torch.ones(1, 2)).sum().backward()\n"
        "got.tolist(), out"
    )
    checked = four.run_cell(code, check=True, want_value=True, screen=NullScreen())
    plain = four.run_cell(code, want_value=True, screen=NullScreen())
    assert list(checked) == list(plain)
    assert (
        list(four.run_cell("vars(dist.ProcessGroup)['allreduce'].__name__", want_value=True, screen=NullScreen()))
        == ["allreduce"] * 4
    )


@needs_recorder
@pytest.mark.parametrize(
    "name",
    ["groups in different orders", "groups of one name in different orders", "a second init on one rank"],
)
def test_check_names_the_groups_of_a_deadlock(two: WorkerPool, name: str) -> None:
    """As without it: ranks that wait in different groups of the same ranks are told apart."""
    code, words, _ = HANGS[name]
    with pytest.raises(nbddp.RunHung) as caught:
        two.run_cell(PREPARE + code, check=True, hang_after=0.3, timeout=30, screen=NullScreen())
    assert str(caught.value) == f"deadlock: {words}"
    check_after(two, ())


def test_check_sees_a_missing_call_as_a_deadlock(two: WorkerPool) -> None:
    with pytest.raises(nbddp.RunHung) as caught:
        two.run_cell(
            PREPARE + "if rank: dist.all_reduce(torch.ones(4))", check=True, hang_after=0.3, screen=NullScreen()
        )
    assert "rank 1 waits in all_reduce #1 (line 24); rank 0 has finished" in str(caught.value)
    check_after(two, ())


TRAIN = """
import os, random, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 1)); optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
start, path = 0, {path!r}
if os.path.exists(path):
    held = torch.load(path)
    model.load_state_dict(held["model"]); optimizer.load_state_dict(held["optimizer"]); start = held["step"]
deaths = {deaths}
for step in range(start, 12):
    if attempt < len(deaths) and deaths[attempt] == (step, rank): os.kill(os.getpid(), 9)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + rank))
    optimizer.zero_grad(); (model(x) - x.sum(1, keepdim=True)).square().mean().backward(); optimizer.step()
    if rank == 0:
        torch.save(dict(model=model.state_dict(), optimizer=optimizer.state_dict(), step=step + 1), path + ".new")
        os.replace(path + ".new", path)
    dist.barrier()
dist.destroy_process_group()
attempt, os.environ["TORCHELASTIC_MAX_RESTARTS"], [p.tolist() for p in model.module.parameters()]
"""


def test_max_restarts_with_checkpoints_ends_with_the_same_bits(two: WorkerPool, tmp_path: Path) -> None:
    """On two ranks, since a sum of two has the same bits in every order."""
    calm = two.run_cell(TRAIN.format(path=str(tmp_path / "calm"), deaths=[]), want_value=True, screen=NullScreen())
    said: list[str] = []

    class Hearing(NullScreen):
        def say(self, text: str) -> None:
            said.append(text)

    deaths = sorted((step, random.randrange(2)) for step in random.sample(range(12), 3))
    code = TRAIN.format(path=str(tmp_path / "wild"), deaths=deaths)
    wild = two.run_cell(code, want_value=True, max_restarts=3, screen=Hearing())
    assert [(a, k) for a, k, _ in wild] == [(3, "3")] * 2
    assert [p for _, _, p in wild] == [p for _, _, p in calm]
    assert [text.split(" died")[0] for text in said] == [
        f"attempt {i} of 4: rank {r}" for i, (_, r) in enumerate(deaths, 1)
    ]
    assert (
        list(two.run_cell("os.environ['TORCHELASTIC_RESTART_COUNT']", want_value=True, screen=NullScreen()))
        == ["0"] * 2
    )


def test_when_all_attempts_fail_each_cause_is_in_the_report(two: WorkerPool) -> None:
    code = (
        "import os\nattempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "if os.environ['RANK'] == '1': raise ValueError('attempt ' + attempt)"
    )
    with pytest.raises(nbddp.WorkerFailed) as caught:
        two.run_cell(code, max_restarts=2, screen=NullScreen())
    assert caught.value.attempts == tuple(f"rank 1 raised ValueError: attempt {i} (cell line 3)" for i in range(3))
    assert all(f"attempt {i + 1} of 3: {why}" in caught.value.report for i, why in enumerate(caught.value.attempts))


def test_record_writes_the_error_file_that_torchrun_would(two: WorkerPool) -> None:
    code = (
        "import os\nfrom torch.distributed.elastic.multiprocessing.errors import record\n"
        "path = os.environ['TORCHELASTIC_ERROR_FILE']\n@record\ndef main():\n    raise ValueError('recorded')\nmain()"
    )
    with pytest.raises(nbddp.WorkerFailed, match="raised ValueError: recorded"):
        two.run_cell(code, screen=NullScreen())
    read = "import json; json.load(open(path))['message']['message']"
    assert list(two.run_cell(read, want_value=True, screen=NullScreen())) == ["ValueError: recorded"] * 2


def test_stacks_in_a_terminal_while_the_cell_runs_and_after_it(two: WorkerPool) -> None:
    from nbddp.capabilities.stacks import command as stacks_command

    found: list[subprocess.CompletedProcess[str]] = []
    assert two.agent is not None
    command = [sys.executable, "-m", "nbddp", "stacks", two.agent.pool_id]

    def ask() -> None:
        while two.current is None or not any(p.call for p in two.current.positions.values()):
            time.sleep(0.05)
        found.append(subprocess.run(command, capture_output=True, text=True, timeout=60, check=False))
        os.kill(os.getpid(), signal.SIGINT)

    asking = threading.Thread(target=ask)
    asking.start()
    code = (
        PREPARE
        + "def train():\n    dist.all_reduce(torch.ones(1))\n"
        + "if rank == 0: train()\nelse: import ctypes; ctypes.PyDLL(None).sleep(60)"
    )
    with pytest.raises(nbddp.RunStopped):
        two.run_cell(code, screen=NullScreen())
    asking.join()
    text = found[0].stdout
    assert "cell line 25, in train  apparently waiting in all_reduce #1 for rank 1" in text, found
    assert "in native code that holds the interpreter" in text
    assert "line 25, in train\n  torch/distributed/" in text
    own = r"line 27 in <(module|cell line: \d+)>"  # IPython 7 and 8 name a cell's own level by its line
    assert re.search(own, text), "the silent rank's stack comes from faulthandler"
    assert two.last_run is not None
    after = repr(stacks_command.of_run(two.last_run.positions, two.last_run.facts))
    assert "in all_reduce #1 for rank 1" in after  # rank 1's sleep may have been ended by the signal
    # a rank's outcome is there before its main thread has returned from the cell
    until(lambda: repr(stacks_command.live(two.agent)).count("idle") == 2)


def test_matrix_names_every_call_of_the_issue() -> None:
    assert len(CALLS) == 10
    assert len(list(cases())) == len(CALLS) * 4 + len(faults.WITH_SHAPES)
