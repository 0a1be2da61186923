"""Process groups from cell to cell: what is pending ends with a bad run, nothing of it stays, and a script's own
setup() with a port of its own can be run again and again."""

from __future__ import annotations

import functools
import os
import re
import signal
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import nbddp
from nbddp.execution.execution import Execution
from nbddp.launch.options import LaunchSpec
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from nbddp.pool.runs import Runs
from nbddp.protocol.run_spec import RunSpec
from nbddp.worker import process_groups
from tests.pool.faults import (
    INIT,
    OLD_DESTROY,
    SET_UP,
    Impatient,
    StopAgain,
    StopWhenReady,
    check_after,
    needs_recorder,
)
from tests.ports import connections, quiet_port

PREPARE = SET_UP.format(fault="") + INIT + "kernel = get_ipython().kernel\n"


# -- after a run that went wrong -----------------------------------------------------------------------


@pytest.mark.parametrize("again", range(5))
def test_work_that_a_finished_rank_left_pending_does_not_hold_up_the_next_cell(two: WorkerPool, again: int) -> None:
    """Rank 1 holds a finished work, and by that its connections, so rank 0's pending one would never end."""
    code = "work = dist.all_reduce(torch.ones(4), async_op=True); work.wait()\n"
    code += "if rank == 1: raise ValueError('x')\npending = dist.all_reduce(torch.ones(4), async_op=True)"
    with pytest.raises(nbddp.WorkerFailed, match="rank 1 raised ValueError: x") as caught:
        two.run_cell(PREPARE + code, screen=NullScreen())
    assert "\n  rank 0: finished the cell\n" in caught.value.report
    assert "\nnbddp closed the process group" in caught.value.report
    assert list(two.run_cell("kept", want_value=True, timeout=10, screen=NullScreen())) == [0, 1]
    check_after(two, ())


def test_thread_that_a_finished_rank_left_in_a_collective_is_freed(two: WorkerPool) -> None:
    code = """import threading
held = dist.group.WORLD
def reduce(group=held):
    try: dist.all_reduce(torch.ones(4), group=group)
    except RuntimeError: pass
if rank == 1: raise ValueError('x')
thread = threading.Thread(target=reduce); thread.start()
while not kernel.groups.facts().sequence: time.sleep(0.01)  # it has called"""
    with pytest.raises(nbddp.WorkerFailed, match="rank 1 raised ValueError: x"):
        two.run_cell(PREPARE + code, screen=NullScreen())
    ended = (
        "import time\nend = time.monotonic() + 10\nwhile rank == 0 and thread.is_alive() and time.monotonic() < end:\n"
    )
    ended += "    time.sleep(0.01)\nrank == 0 and thread.is_alive()"
    assert list(two.run_cell(ended, want_value=True, screen=NullScreen())) == [False, False]
    check_after(two, ())


@pytest.mark.parametrize("stuck", [0, 1])
def test_rank_that_cannot_end_its_group_is_replaced_and_that_is_said(
    two: WorkerPool, stuck: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nbddp.pool.runs.END_GROUP_SECONDS", 0.5)
    code = f"import functools\nif rank == {stuck}: dist.destroy_process_group = functools.partial(time.sleep, 600)\n"
    with pytest.raises(nbddp.WorkerFailed, match="rank 1 raised ValueError: x") as caught:
        two.run_cell(PREPARE + code + "if rank == 1: raise ValueError('x')\ndist.barrier()", screen=NullScreen())
    said = f"rank {stuck}: closing the process group; could not be unblocked, so it is replaced; lost: "
    assert said in caught.value.report
    state = caught.value.states[stuck]
    assert {"kept", "go_wrong"} <= set(state.lost)
    assert set(state.imports) >= {"os", "time", "torch", "dist", "DDP", "functools"}
    assert not set(state.lost) & set(state.imports)
    assert two.ensure(LaunchSpec()) == [f"rank {stuck} is new and empty"]
    check_after(two, (stuck,))


@pytest.mark.parametrize("late", ["before", "while"])
def test_process_that_dies_after_its_rank_had_left_the_cell_is_told(
    two: WorkerPool, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo aborts one whose pending call does not fit: before the groups are ended, or while they are."""
    two.run_cell("pass", screen=NullScreen())  # what an earlier test has left broken is ended
    ends = two.runs.end_groups

    def end_groups(after: Execution | None = None) -> dict[int, dict[str, object]]:
        while late == "before" and two.workers[0].exit is None:
            time.sleep(0.01)
        return ends(after)

    monkeypatch.setattr(two.runs, "end_groups", end_groups)
    dies = {
        "before": "import threading; threading.Timer(0.2, os.abort).start()",
        "while": "dist.destroy_process_group = lambda *_: os.abort()",
    }
    pending = "dist.all_reduce(torch.ones(4), async_op=True)"
    code = f"if rank == 0: {dies[late]}\nelse:\n    {pending}\n    raise ValueError('x')"
    with pytest.raises(nbddp.WorkerFailed, match="rank 1 raised ValueError: x") as caught:
        two.run_cell(PREPARE + code, screen=NullScreen())
    monkeypatch.undo()
    assert "rank 0: died: killed by SIGABRT, after it had left the cell; " in caught.value.report
    assert caught.value.states[0].status == "died"
    assert two.ensure(LaunchSpec()) == ["rank 0 is new and empty"]
    check_after(two, (0,))


def test_a_rank_that_had_to_be_freed_ends_its_group_unasked(two: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, str]] = []
    send = two.runs.ranks.send

    def noted(rank: int, spec: RunSpec, *more: object) -> None:
        assert two.runs.ranks.current is not None
        asked.append((spec.op, rank, two.runs.ranks.current.request.op))
        send(rank, spec, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(two.runs.ranks, "send", noted)
    with pytest.raises(nbddp.WorkerFailed, match="rank 1 raised ValueError: x") as caught:
        two.run_cell(PREPARE + "if rank == 1: raise ValueError('x')\ndist.barrier()", screen=NullScreen())
    assert re.search(r"waiting in barrier #\d+ for rank 1; unblocked, variables are kept", caught.value.report), (
        caught.value.report
    )
    at_work = asked[asked.index(("cell", 0, "cell")) :]
    assert at_work == [("cell", 0, "cell"), ("cell", 1, "cell"), ("end_group", 1, "cell")]  # and while rank 0 is freed
    monkeypatch.undo()
    check_after(two, ())


def test_the_next_cell_meets_elsewhere_if_the_process_that_held_the_stores_was_killed(two: WorkerPool) -> None:
    [port] = set(two.run_cell(PREPARE + "int(os.environ['MASTER_PORT'])", want_value=True, screen=NullScreen()))
    stores = two.group.stores
    assert stores is not None
    for process in psutil.Process(two.agent.hello.pid).children(recursive=True):
        if any(c.status == "LISTEN" and c.laddr.port == port for c in connections(process)):
            process.kill()
    while stores.serves:  # until the agent has told
        time.sleep(0.01)
    code = "dist.destroy_process_group()\ndist.init_process_group()\nint(os.environ['MASTER_PORT'])"
    assert port not in set(two.run_cell(code, want_value=True, timeout=20, screen=NullScreen()))
    check_after(two, ())


@OLD_DESTROY
def test_group_of_an_earlier_cell_whose_pending_work_cannot_end_is_ended_all_the_same(two: WorkerPool) -> None:
    """All ranks finished well. Where its rank is meanwhile is shown."""
    code = "work = dist.all_reduce(torch.ones(4), async_op=True); work.wait()\n"
    two.run_cell(
        PREPARE + code + "if rank == 0: pending = dist.all_reduce(torch.ones(4), async_op=True)", screen=NullScreen()
    )
    shown: list[str] = []

    class Watching(NullScreen):
        def refresh(self, outputs: object, status: Callable[[], str]) -> float | None:
            shown.append(status())
            return 0.05

    again = "import os, torch, torch.distributed as dist\ndist.init_process_group('gloo')\nt = torch.ones(1)\n"
    again += "dist.all_reduce(t)\nt.item()"
    two.run_cell(  # long enough to be seen
        "import functools, nbddp.worker.process_groups as g; grace, g.GRACE = g.GRACE, 2.5", screen=NullScreen()
    )
    values = two.run_cell(again, want_value=True, timeout=20, hang_after=0.3, screen=Watching())
    assert list(values) == [2.0, 2.0]
    assert any("rank 0 (cell line 2, in destroy_process_group of an earlier cell's group)" in s for s in shown), shown
    two.run_cell("g.GRACE = grace", screen=NullScreen())
    check_after(two, ())


@pytest.mark.more
@pytest.mark.parametrize(
    "call", [pytest.param("dist.all_reduce(torch.ones(4))", marks=needs_recorder), "dist.init_process_group('gloo')"]
)
def test_thirty_deadlocks_leave_no_descriptors_and_threads_behind(two: WorkerPool, call: str) -> None:
    code = PREPARE + "model = DDP(torch.nn.Linear(2, 2))\n"
    if "init" in call:
        code += "dist.destroy_process_group()\n"

    def counts() -> list[tuple[int, int]]:
        two.run_cell("pass", screen=NullScreen())
        places = [Path(f"/proc/{w.pid}") for w in two.workers.values()]
        return [(len(list((p / "fd").iterdir())), len(list((p / "task").iterdir()))) for p in places]

    def deadlock() -> None:
        with pytest.raises(nbddp.RunHung):
            two.run_cell(f"{code}if rank == 0: {call}", hang_after=0.05, screen=NullScreen())

    deadlock()
    before = counts()
    for _ in range(30):
        deadlock()
    for (files, threads), (files_before, threads_before) in zip(counts(), before, strict=True):
        assert files <= files_before + 4
        assert threads <= threads_before + 4
    assert (
        list(two.run_cell("type(model).__name__", want_value=True, screen=NullScreen()))
        == ["DistributedDataParallel"] * 2
    ), "what a user's name holds stays"


# -- receives from any source --------------------------------------------------------------------------

FROM_ANY = {
    "recv": "if rank == 0: dist.recv(torch.ones(4))",
    "recv with a tag": "if rank == 0: dist.recv(torch.ones(4), tag=3)",
    "irecv": "if rank == 0: dist.irecv(torch.ones(4)).wait()",
    "on every rank": "dist.recv(torch.ones(4))",
}


@pytest.mark.parametrize("how", FROM_ANY)
def test_receive_from_any_source_is_freed(two: WorkerPool, how: str) -> None:
    with pytest.raises(nbddp.RunHung) as caught:
        two.run_cell(PREPARE + FROM_ANY[how], hang_after=0.3, screen=NullScreen())
    assert {s.status for s in caught.value.states} <= {"interrupted", "finished"}
    assert "unblocked, variables are kept" in caught.value.report
    check_after(two, ())


def test_program_that_receives_from_any_source_again_and_again_is_freed(two: WorkerPool) -> None:
    loop = "if rank == 1: raise ValueError('x')\n"
    loop += "while True:\n    try: dist.recv(torch.ones(4))\n    except ValueError: pass"
    with pytest.raises(nbddp.WorkerFailed, match="rank 1 raised ValueError: x") as caught:
        two.run_cell(PREPARE + loop, screen=NullScreen())
    assert caught.value.states[0].status == "interrupted"
    check_after(two, ())


def test_receive_from_any_source_says_who_sent(two: WorkerPool) -> None:
    code = "t = torch.zeros(2)\nif rank: dist.send(torch.ones(2), 0)\n(dist.recv(t) if rank == 0 else None, t.tolist())"
    found = two.run_cell(PREPARE + code, want_value=True, screen=NullScreen())
    assert [tuple(v) for v in found] == [(1, [1.0, 1.0]), (None, [0.0, 0.0])]
    check_after(two, ())


# -- in the midst of large messages --------------------------------------------------------------------

LARGE = "t = torch.ones(40_000_000)\nprint('ready', flush=True)\n"  # 160 MB: a message takes some 100 ms
IN_A_LOOP = {
    "recv": "dist.send(t, 0) if rank else dist.recv(t, 1)",
    "broadcast": "dist.broadcast(t, 1)",
    "gather": "dist.gather(t, into if rank == 0 else None)",
}


@pytest.mark.every(3)
@pytest.mark.parametrize("call", IN_A_LOOP)
def test_stop_lets_a_message_on_its_way_through_and_names_are_kept(two: WorkerPool, call: str) -> None:
    """gloo forgets a message that is cut in its midst: its wait never ends."""
    prepare = PREPARE + ("into = [torch.ones(40_000_000) for _ in range(2)]\n" if call == "gather" else "")
    with pytest.raises(nbddp.RunStopped) as caught:
        two.run_cell(f"{prepare}{LARGE}while True: {IN_A_LOOP[call]}", screen=StopWhenReady(after=0.7))
    assert {s.status for s in caught.value.states} == {"interrupted"}
    two.run_cell("t = into = None", screen=NullScreen())
    check_after(two, ())


@pytest.mark.parametrize("call", IN_A_LOOP)
def test_message_is_let_through_whose_receiver_stands_still_for_a_moment(two: WorkerPool, call: str) -> None:
    """Nothing moves then, as where a machine is short of memory; what the sender has queued says that a message is on
    its way. A receiver has no such sign of a sender that stands still."""
    prepare = PREPARE + ("into = [torch.ones(40_000_000) for _ in range(2)]\n" if call == "gather" else "")
    worker = psutil.Process(two.workers[0].pid)

    def stop_and_go_on() -> None:
        worker.suspend()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.7)
        worker.resume()

    class Stop(NullScreen):
        def line(self, rank: int, stream: str, text: str) -> None:
            if rank == 0:
                threading.Timer(0.7, stop_and_go_on).start()

    with pytest.raises(nbddp.RunStopped) as caught:
        two.run_cell(f"{prepare}{LARGE}while True: {IN_A_LOOP[call]}", screen=Stop())
    assert {s.status for s in caught.value.states} == {"interrupted"}
    two.run_cell("t = into = None", screen=NullScreen())
    check_after(two, ())


@pytest.mark.parametrize("sender", [0, 1])
def test_peer_of_a_rank_that_dies_in_the_midst_of_a_message_is_freed(two: WorkerPool, sender: int) -> None:
    code = f"{PREPARE}import threading\n{LARGE}"
    code += "if rank == 1: threading.Timer(0.7, os.kill, (os.getpid(), 9)).start()\n"
    code += f"while True: dist.send(t, 1 - rank) if rank == {sender} else dist.recv(t, 1 - rank)"
    with pytest.raises(nbddp.WorkerFailed, match="rank 1 died: killed by SIGKILL") as caught:
        two.run_cell(code, screen=NullScreen())
    assert caught.value.states[0].status == "interrupted"
    two.ensure(LaunchSpec())
    two.run_cell("t = None", screen=NullScreen())
    check_after(two, (1,))


def test_rank_that_never_stops_to_move_bytes_is_replaced_by_a_second_stop(two: WorkerPool) -> None:
    """It has had the interrupt of the first, and may be on its way out."""
    code = f"{PREPARE}{LARGE}while True:\n    try: {IN_A_LOOP['recv']}\n    except BaseException: pass"
    with pytest.raises(nbddp.RunStopped) as caught:
        two.run_cell(code, screen=StopAgain(after=0.7))
    assert {s.status for s in caught.value.states} == {"replaced"}
    assert "Stop was pressed again, so it is replaced; lost: " in caught.value.report
    two.ensure(LaunchSpec())
    check_after(two, (0, 1))


# -- NCCL, by stand-ins --------------------------------------------------------------------------------


def test_rank_whose_abort_does_not_return_is_replaced(two: WorkerPool) -> None:
    """It would end the next cell's group whenever it does return."""
    code = """import nbddp.worker.release as release
def frees_and_never_returns():
    kernel.groups.sockets.shut()
    time.sleep(600)
if rank == 0:  # alone: a peer that is freed first would free this one
    release.abort_nccl = frees_and_never_returns
    dist.recv(torch.ones(4), 1)"""
    with pytest.raises(nbddp.RunHung) as caught:
        two.run_cell(PREPARE + code, hang_after=0.3, screen=NullScreen())
    assert [s.status for s in caught.value.states] == ["replaced", "finished"]
    check_after(two, (0,))


def test_report_says_that_the_group_has_been_ended_if_all_ranks_aborted_it(two: WorkerPool) -> None:
    code = """import nbddp.worker.release as release, nbddp.compat.torch as seams
was = release.has_nccl, seams.abort_groups
def abort_groups(destroy=dist.destroy_process_group):
    kernel.groups.sockets.shut()
    destroy()
release.has_nccl, seams.abort_groups = dist.is_initialized, abort_groups
dist.recv(torch.ones(4), 1 - rank)"""
    with pytest.raises(nbddp.RunHung) as caught:
        two.run_cell(PREPARE + code, hang_after=0.3, screen=NullScreen())
    two.run_cell("release.has_nccl, seams.abort_groups = was", screen=NullScreen())
    assert two.last_run is not None
    assert [s.status for s in caught.value.states] == ["interrupted", "interrupted"]
    assert "nbddp closed the process group" in caught.value.report
    check_after(two, ())


# -- a port of the cell's own --------------------------------------------------------------------------

TUTORIAL = """
import os, sys, tempfile, time, torch, torch.distributed as dist, torch.nn as nn, torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP

def setup(rank, world_size):
    os.environ['MASTER_ADDR'] = 'localhost'
    os.environ['MASTER_PORT'] = '{port}'
    time.sleep({slow} * rank)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)

def cleanup():
    dist.destroy_process_group()

def step(model):
    optimizer = optim.SGD(model.parameters(), lr=0.001)
    nn.MSELoss()(model(torch.randn(20, 10)), torch.randn(20, 5)).backward()
    optimizer.step()

def basic(rank, world_size):
    setup(rank, world_size)
    step(DDP(nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))))
    cleanup()

def checkpoint(rank, world_size):
    setup(rank, world_size)
    model = DDP(nn.Linear(10, 5))
    path = tempfile.gettempdir() + "/model.checkpoint" + os.environ["TORCHELASTIC_RUN_ID"]
    if rank == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()
    model.load_state_dict(torch.load(path, weights_only=True))
    step(model)
    dist.barrier()
    if rank == 0:
        os.remove(path)
    cleanup()

def two_parts(rank, world_size):
    setup(rank, world_size)
    step(DDP(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 5))))
    cleanup()

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
for demo in (basic, checkpoint, two_parts):
    demo(rank, world)
"""


@pytest.mark.every(2)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("slow", [0, 0.02])
def test_tutorials_three_demos_with_a_port_of_their_own_run_in_one_cell(
    pools: dict[int, WorkerPool], world: int, slow: float
) -> None:
    pools[world].ensure(LaunchSpec())
    for _ in range(5):
        pools[world].run_cell(TUTORIAL.format(port=12355, slow=slow), timeout=60, screen=NullScreen())


@pytest.mark.parametrize("slow", ["0", "1"])
def test_group_is_destroyed_when_every_rank_is_through_its_making(two: WorkerPool, slow: str) -> None:
    """The init or new_group of a slow rank would be cut off. Of gloo's groups no rank is through before all are."""
    code = f"""import os, time, torch.distributed as dist
from nbddp.capabilities.private import on_rank as peer_check
peer_check.check, known_check = lambda *_: False, peer_check.check
groups = get_ipython().kernel.groups
def slowly(group, more, known=groups._through):
    if os.environ['RANK'] == '1' and more and group == '{slow}': time.sleep(0.3)
    return known(group, more)
groups._through = slowly
try:
    dist.init_process_group(); pair = dist.new_group([0, 1]); through = time.monotonic()
    dist.destroy_process_group(); destroyed = time.monotonic()
    assert sorted(groups._made.items()) == [('0', 2), ('1', 2)]
finally:
    del groups._through
    peer_check.check = known_check
through, destroyed"""
    quick, late = two.run_cell(code, want_value=True, screen=NullScreen())
    assert late[0] <= quick[1]


def test_group_is_destroyed_all_the_same_if_a_rank_never_is(two: WorkerPool) -> None:
    code = """import os, time, torch.distributed as dist
from nbddp.worker import process_groups
from nbddp.capabilities.private import on_rank as peer_check
peer_check.check, known_check = lambda *_: False, peer_check.check
groups = get_ipython().kernel.groups
if os.environ['RANK'] == '1':  # it waits for rank 0, and never says that it is through itself
    groups._through = lambda group, more, known=groups._through: 1 + known(group, 0)
else: process_groups.CONNECTING, was = 0.2, process_groups.CONNECTING
try:
    dist.init_process_group(); dist.destroy_process_group()
finally:  # else each group that follows hangs
    if os.environ['RANK'] == '1': del groups._through
    else: process_groups.CONNECTING = was
    peer_check.check = known_check
dist.is_initialized()"""
    found = two.run_cell(code, want_value=True, screen=NullScreen())
    assert list(found) == [False, False]


def test_nothing_listens_at_a_port_of_the_cells_own(two: WorkerPool) -> None:
    """Somebody else may: of several people on one machine, say, who all run the tutorial."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        two.run_cell(TUTORIAL.format(port=listener.getsockname()[1], slow=0), timeout=60, screen=NullScreen())
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_ranks_that_name_the_same_port_in_two_ways_meet(two: WorkerPool) -> None:
    code = "os.environ['MASTER_PORT'] = '12355'\nos.environ['MASTER_ADDR'] = ['localhost', '127.0.0.1'][rank]\n"
    code = SET_UP.format(fault="") + code + INIT + "t = torch.ones(1)\ndist.all_reduce(t)\nt.item()"
    assert list(two.run_cell(code, want_value=True, screen=NullScreen())) == [2.0, 2.0]
    check_after(two, ())


def test_group_of_other_ranks_has_torchs_own_store(two: WorkerPool) -> None:
    code = "os.environ['MASTER_PORT'] = '0'\ndist.init_process_group('gloo', rank=0, world_size=1)\n"
    code += "found = dist.get_world_size(), kernel.groups.owns(dist.distributed_c10d._get_default_store())\n"
    code += "dist.destroy_process_group()\nfound"
    code = SET_UP.format(fault="") + "kernel = get_ipython().kernel\n" + code
    found = two.run_cell(code, want_value=True, screen=NullScreen())
    assert [tuple(v) for v in found] == [(1, False)] * 2


def test_only_the_pools_ranks_meet_at_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    mine = process_groups.Groups()
    assert mine._meets_here("localhost", 1, 2)
    assert not mine._meets_here("another-host", 1, 2)
    assert not mine._meets_here("localhost", 0, 2)
    assert not mine._meets_here("localhost", 1, 3)
    mine._process = 0
    assert not mine._meets_here("localhost", 1, 2), "a forked child's ranks are its own"


# -- what a cell leaves, and nobody waits for ------------------------------------------------------------


@OLD_DESTROY
def test_destroyed_group_that_a_model_held_is_let_go_after_the_cell_that_replaces_the_model(two: WorkerPool) -> None:
    """Not in it: gloo would wait there for each connection. And not later."""
    ddp = "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
    step = "model(torch.randn(4, 2)).sum().backward()\n"
    old = "import weakref\nold = weakref.ref(dist.group.WORLD)\n"
    run = functools.partial(two.run_cell, screen=NullScreen())
    run(PREPARE + old + ddp + step + "dist.destroy_process_group()")
    assert list(run("old() is not None", want_value=True)) == [True, True]
    made = PREPARE + ddp + step + "dist.destroy_process_group()\nimport gc; gc.collect(); old() is not None"
    assert list(run(made, want_value=True)) == [True, True]
    until_gone = "end = time.monotonic() + 20\nwhile old() is not None and time.monotonic() < end: time.sleep(0.01)\n"
    assert list(run(until_gone + "old() is None", want_value=True)) == [True, True]
    run("del model")


@pytest.mark.parametrize("by", ["the end of its group", "a script"])
def test_what_a_finished_rank_leaves_in_cycles_is_let_go(two: WorkerPool, by: str, tmp_path: Path) -> None:
    """Though no error has ended its run: a model in a cycle holds the threads of a group."""
    run = functools.partial(two.run_cell, screen=NullScreen())
    run("import gc, sys, time, weakref\nsys.gone = gone = []\ngc.disable()")
    cycle = "import sys, weakref\nit = type('It', (), {})(); it.itself = it\n"
    cycle += "weakref.finalize(it, sys.gone.append, 1); del it\n"
    if by == "a script":
        (tmp_path / "cycle.py").write_text(cycle)
        two.run_script(str(tmp_path / "cycle.py"), keep=True, screen=NullScreen())
    else:
        fails = "if rank == 1: raise ValueError('x')\nwork = dist.all_reduce(torch.ones(4), async_op=True)"
        with pytest.raises(nbddp.WorkerFailed, match="rank 1 raised ValueError: x"):
            run(PREPARE + cycle + fails)
    until = time.monotonic() + 20
    ended = f"while not gone and time.monotonic() < {until}: time.sleep(0.01)\nfound = len(gone); gc.enable(); found"
    assert list(run(ended, want_value=True)) == [1, 1]


def test_next_cell_meets_no_end_of_a_group_although_an_older_one_is_still_ending() -> None:
    """The cell before has just ended, and its group's model is replaced at once."""
    may_end, ends = threading.Event(), []

    class Group:
        def __init__(self, name: str):
            self.name = name

        def __del__(self) -> None:
            if self.name == "older":
                may_end.wait(20)
            ends.append((self.name, threading.current_thread().name))

    kept = process_groups.Groups()
    for name in ("older", "newer", "newest"):
        model = Group(name)
        kept._destroyed.append(weakref.ref(model))
        kept.let_go()  # the cell has ended
        del model  # the next one replaces it
        assert all(thread == "nbddp-ending" for _, thread in ends)

    def wait_for(count: int) -> None:
        until = time.monotonic() + 20
        while len(ends) < count and time.monotonic() < until:
            time.sleep(0.01)

    wait_for(1)
    assert [name for name, _ in ends] == ["newer"]
    may_end.set()
    wait_for(2)
    assert sorted(ends) == [("newer", "nbddp-ending"), ("older", "nbddp-ending")]


@pytest.mark.parametrize(("body", "ends"), [("", 0), (INIT, 1), (f"{INIT}dist.destroy_process_group()\n", 1)])
def test_only_where_a_rank_had_a_group_are_groups_ended_after_a_failure(
    two: WorkerPool, body: str, ends: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.run_cell(f"{PREPARE}dist.destroy_process_group()", screen=NullScreen())
    calls, known = [], Runs.end_groups
    monkeypatch.setattr(Runs, "end_groups", lambda runs, *after: calls.append(1) or known(runs, *after))
    code = f"{SET_UP.format(fault='')}{body}if rank == 1: raise ValueError('x')\ntime.sleep(60)"
    with pytest.raises(nbddp.WorkerFailed, match="rank 1 raised ValueError: x"):
        two.run_cell(code, screen=NullScreen())
    assert len(calls) == ends
    check_after(two, ())


# -- stores of the program's own ---------------------------------------------------------------------

WAITING = "import torch.distributed as dist\nr = int(os.environ['RANK'])\n"
OWN_STORES = {
    "dist.init_process_group('gloo', rank=r, world_size=4)": (
        "ranks 0–1: waiting in init_process_group for ranks 2–3, which this pool does not have",
    ),
    "os.environ['WORLD_SIZE'] = '3'; dist.init_process_group('gloo')": (
        "ranks 0–1: waiting in init_process_group for rank 2, which this pool does not have",
    ),
    "os.environ.update(MASTER_ADDR='no-such-host.invalid', MASTER_PORT='{port}'); dist.init_process_group('gloo')": (
        "rank 0: in init_process_group, waiting for others to connect to its store at no-such-host.invalid:{port}",
        "rank 1: in init_process_group, connecting to a store at no-such-host.invalid:{port}, an unknown host name",
    ),
    "dist.TCPStore('localhost', {port} + r, 2, is_master=r == 0)": (
        "rank 0: waiting for others to connect to its store at 127.0.0.1:{port}",
        "rank 1: connecting to a store at 127.0.0.1:{next}, where no process answers",
    ),
    "r and dist.TCPStore('127.0.0.1', {port}, 2, is_master=False)": (
        "rank 1: connecting to a store at 127.0.0.1:{port}, where no process answers",
    ),
    "dist.init_process_group('gloo', rank=0, world_size=2)": ("rank 1: in init_process_group as rank 0",),
    "dist.init_process_group('gloo', rank=r + 1, world_size=3)": (
        "rank 0: in init_process_group as rank 1", "rank 1: in init_process_group as rank 2",
    ),
    "dist.init_process_group('gloo', init_method=f'file://{folder}/meets', rank=r, world_size=4)": (
        "ranks 0–1: waiting in init_process_group for ranks 2–3, which this pool does not have, "
        "at the file {folder}/meets",
    ),
    "dist.init_process_group('gloo', store=dist.HashStore(), rank=r, world_size=2)": (
        "ranks 0–1: in init_process_group, at a HashStore, which no other process reaches",
    ),
    "dist.PrefixStore('p', dist.FileStore('{folder}/keys', 2)).get('k')": (
        "ranks 0–1: in store.get('k') at the file {folder}/keys",
    ),
    "dist.HashStore().wait(['k'], __import__('datetime').timedelta(seconds=90))": (
        "ranks 0–1: in store.wait(['k']) at a HashStore, which no other process reaches",
    ),
    "dist.FileStore('{folder}/both', 2).multi_get(['k'])": (
        "ranks 0–1: in store.multi_get(['k']) at the file {folder}/both",
    ),
    "dist.FileStore('{folder}/not/there', 2)": (
        "ranks 0–1: opening a store in {folder}/not, a folder that does not exist",
    ),
}  # fmt: skip


@pytest.mark.parametrize("program", OWN_STORES)
def test_who_waits_for_what_no_rank_of_the_pool_is_says_so_and_is_freed(two: WorkerPool, program: str) -> None:
    port = quiet_port(count=2)
    with tempfile.TemporaryDirectory(prefix="nbddp") as folder:
        code = WAITING + program.replace("{port}", str(port)).replace("{folder}", folder)
        words = [w.format(port=port, next=port + 1, folder=folder).partition(": ") for w in OWN_STORES[program]]
        seen = [rf"(?=.*{ranks} \((cell line \d, )?{re.escape(waits)})" for ranks, _, waits in words]
        screen = Impatient("".join(seen))
        with pytest.raises(nbddp.RunFailed) as failed:
            two.run_cell(code, hang_after=0.3, timeout=20, screen=screen)
    assert screen.said, screen.shown[-1]
    said = failed.value.report
    assert "lost" not in said
    assert list(two.run_cell("kept", want_value=True, timeout=10, screen=NullScreen())) == [0, 1]


def test_a_host_that_is_not_this_one_is_named_by_the_rank_that_cannot_serve_there(two: WorkerPool) -> None:
    program = "os.environ['MASTER_ADDR'] = 'no-such-host.invalid'\ndist.init_process_group('gloo')"
    with pytest.raises(nbddp.WorkerFailed, match=r"no-such-host\.invalid is not an address of this machine") as failed:
        two.run_cell(WAITING + program, screen=NullScreen())
    assert "lost" not in failed.value.report
    assert list(two.run_cell("kept", want_value=True, timeout=10, screen=NullScreen())) == [0, 1]


def test_a_store_waits_for_its_server_as_long_as_it_is_told(two: WorkerPool) -> None:
    program = """
from datetime import timedelta
import time
if not r:
    time.sleep(0.7)
store = dist.TCPStore('localhost', PORT, 2, is_master=not r, timeout=timedelta(seconds=9))
store.set(f'from {r}', 'here')
assert store.get(f'from {1 - r}') == b'here' and store.timeout == timedelta(seconds=9)
store.add('through', 1)
while store.add('through', 0) < 2:
    time.sleep(0.01)
began = time.monotonic()
try:
    dist.TCPStore('127.0.0.1', PORT + 1, 2, is_master=False, timeout=timedelta(seconds=0.4))
except dist.DistNetworkError as e:
    assert '400ms' in str(e), e
assert 0.3 < time.monotonic() - began < 5
""".replace("PORT", str(quiet_port(count=2)))
    two.run_cell(WAITING + program, screen=NullScreen())


def test_stores_in_files_and_in_memory_do_what_torchs_do(two: WorkerPool, tmp_path: Path) -> None:
    """Keys that come late, limits, errors, and groups that are made and ended with them."""
    program = """
import gc, threading, time
from datetime import timedelta
path, soon = PATH, timedelta(seconds=0.2)
def later(store):
    threading.Timer(0.3, store.set, ('late', 'came')).start()
    return store.get('late')
assert later(dist.HashStore()) == b'came'
store = dist.PrefixStore('a', dist.FileStore(path, 2))
store.set(f'from {r}', str(r)); store.wait([f'from {1 - r}'])
assert store.get(f'from {1 - r}') == str(1 - r).encode()
for one, error in ((dist.HashStore(), dist.DistStoreError), (store, RuntimeError)):
    one.set_timeout(soon)
    for waits in (lambda: one.get('never'), lambda: one.wait(['never']), lambda: one.wait(['never'], soon)):
        began = time.monotonic()
        try: waits()
        except error as e: assert 'imeout' in str(e), e
        else: raise AssertionError
        assert 0.1 < time.monotonic() - began < 2
    for wrong in (lambda: one.get(5), lambda: one.wait(), lambda: one.wait(['a'], 3)):
        try: wrong()
        except TypeError as e: assert 'incompatible' in str(e), e
        else: raise AssertionError
store.set_timeout(timedelta(seconds=20))
for file in (path + 'one', path + 'two'):  # torch removes it with the last group, unless both go at once
    dist.init_process_group('gloo', init_method='file://' + file, rank=r, world_size=2)
    dist.barrier(dist.new_group([0, 1])); gathered = [None] * 2; dist.all_gather_object(gathered, r)
    assert gathered == [0, 1]
    dist.barrier()
    if r: store.wait([file])
    dist.destroy_process_group(); gc.collect()
    if not r: store.set(file, 'let go')
    until = time.monotonic() + 10
    while os.path.exists(file) and time.monotonic() < until: time.sleep(0.01)
    assert not os.path.exists(file)
if hasattr(store, 'barrier'):
    store.set_timeout(timedelta(seconds=20)); store.barrier('meet', 2)
if hasattr(store, 'multi_get'):
    assert store.multi_get(['from 0', 'from 1']) == [b'0', b'1']
    one = dist.PrefixStore('b', dist.HashStore()); one.set('c', 'd'); assert one.multi_get(['c']) == [b'd']
if hasattr(store, 'queue_pop'):
    one.queue_push('q', b'1'); assert one.queue_pop('q') == b'1'
""".replace("PATH", repr(str(tmp_path / "keys")))
    two.run_cell(WAITING + program, timeout=60, screen=NullScreen())


def test_a_thread_in_such_a_wait_is_freed_with_the_run(two: WorkerPool) -> None:
    """An interrupt reaches the main thread alone, and that waits for the other."""
    program = """
import threading
def waits():
    try: dist.HashStore().get('k')
    except RuntimeError as e: said.append(str(e)); done.set()
said, done = [], threading.Event()
thread = threading.Thread(target=waits); thread.start()
try: thread.join()
finally: done.wait()
"""
    with pytest.raises(nbddp.RunTimedOut) as failed:
        two.run_cell(WAITING + program, hang_after=0.3, timeout=2, screen=NullScreen())
    assert "lost" not in failed.value.report
    told = list(two.run_cell("said", want_value=True, timeout=10, screen=NullScreen()))
    assert told == [["the wait for get('k') stopped with the run"]] * 2
