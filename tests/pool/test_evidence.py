"""What is said of a rank is evident, on real ranks: what cannot be known is shown and never ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nbddp.deadlock.on_rank import call_log, flight
from nbddp.errors import RunHung, RunStopped, RunTimedOut, WorkerFailed
from nbddp.launch.options import LaunchSpec
from nbddp.output.screens import NullScreen, Screen
from nbddp.pool.pool import WorkerPool
from tests import warm
from tests.pool.faults import INIT, SET_UP, Impatient, Watching, needs_recorder
from tests.ports import quiet_port

PREPARE = SET_UP.format(fault="") + INIT


@pytest.fixture(scope="module")
def two() -> Iterator[WorkerPool]:
    with warm.pool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def one() -> Iterator[WorkerPool]:
    with warm.pool(1) as pool:
        yield pool


HEALTHY = {
    "large transfers both ways": (
        "out, into = torch.ones(40_000_000), torch.empty(40_000_000)\n"
        "for _ in range(6):\n"
        "    for work in [dist.isend(out, 1 - rank), dist.irecv(into, 1 - rank)]: work.wait()"
    ),
    "a thread sends what the main threads wait for": (
        "import threading\n"
        "def later(): time.sleep(1); dist.send(torch.ones(1), 1 - rank)\n"
        "thread = threading.Thread(target=later); thread.start()\n"
        "dist.recv(torch.ones(1), 1 - rank); thread.join()"
    ),
    "a timer sends it": (
        "import threading\n"
        "timer = threading.Timer(1, dist.send, (torch.ones(1), 1 - rank)); timer.start()\n"
        "dist.recv(torch.ones(1), 1 - rank); timer.join()"
    ),
    "a rank ends its cell, and a thread of it sends later": (
        "import threading\n"
        "if rank == 0: dist.recv(torch.ones(1), 1)\n"
        "else: threading.Timer(1, dist.send, (torch.ones(1), 0)).start()"
    ),
    "a callback on a future calls what the other rank waits for": (
        "other = dist.new_group([0, 1])\n"
        "if rank == 0:\n"
        "    first = dist.all_reduce(torch.ones(1), async_op=True)\n"
        "    done = first.get_future().then(lambda f: dist.send(torch.ones(1), 1, group=other))\n"
        "    dist.recv(torch.ones(1), 1, group=other, tag=1)\n"
        "else:\n"
        "    time.sleep(1); dist.all_reduce(torch.ones(1))\n"
        "    dist.recv(torch.ones(1), 0, group=other); dist.send(torch.ones(1), 0, group=other, tag=1)"
    ),
    "the other rank has ended its groups": (
        "if rank == 0:\n    tensor = torch.ones(50_000_000); work = dist.isend(tensor, 1)\n"
        "    group = dist.new_group([0, 1]); dist.destroy_process_group()\n"
        "else:\n    group = dist.new_group([0, 1]); time.sleep(1); dist.recv(torch.empty(50_000_000), 0)"
    ),
    "waits with a time limit": (
        "import datetime\nstore = dist.distributed_c10d._get_default_store()\n"
        "work = dist.irecv(torch.ones(1), 1 - rank)\n"
        "for wait in (work.wait, lambda limit: store.wait(['key'], limit)):\n"
        "    try: wait(datetime.timedelta(seconds=1))\n"
        "    except RuntimeError: pass\n"
        "    else: raise AssertionError('nobody has sent it')"
    ),
    "worlds of one rank each": (
        "dist.destroy_process_group()\n"
        "import tempfile\n"
        "dist.init_process_group('gloo', init_method='file://' + tempfile.mktemp(), rank=0, world_size=1)\n"
        "if rank == 0: time.sleep(1)\n"
        "dist.all_reduce(torch.ones(1)); dist.destroy_process_group()"
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_can_end_is_not_ended(two: WorkerPool, name: str) -> None:
    two.run_cell(PREPARE + HEALTHY[name], hang_after=0.3, timeout=60, screen=NullScreen())


def test_a_work_of_an_earlier_cell_is_waited_for(two: WorkerPool) -> None:
    """Rank 1 has called its part two cells ago, and has finished."""
    two.run_cell(PREPARE + "tensor = torch.ones(60_000_000)", screen=NullScreen())
    two.run_cell("work = [dist.all_reduce(tensor, async_op=True) for _ in range(8)]", screen=NullScreen())
    two.run_cell("if rank == 0: [w.wait() for w in work]", hang_after=0.1, timeout=60, screen=NullScreen())


def test_a_rank_that_has_not_begun_is_not_said_to_have_finished(two: WorkerPool, tmp_path: Path) -> None:
    """Its main thread is still at work for nobody: it hears of the next cell late."""
    sleeps = tmp_path / "sleeps"
    busy = f"import asyncio, pathlib, time\ndef busy(): pathlib.Path({str(sleeps)!r}).touch(); time.sleep(1.5)\n"
    two.run_cell(busy + "asyncio.get_event_loop().call_later(0.1, busy)", ranks=[0], screen=NullScreen())
    while not sleeps.exists():
        time.sleep(0.01)
    watching = Watching()
    two.run_cell(PREPARE + "dist.barrier()", hang_after=0.3, timeout=60, screen=watching)
    assert watching.saw("rank 0 (not begun yet)"), watching.shown


@needs_recorder
def test_a_question_that_failed_is_told_as_that(two: WorkerPool, tmp_path: Path) -> None:
    told, words = tmp_path / "told", "rank 1 (cannot report its position: KeyError: 'profiling_name')"

    class Telling(Watching):
        """Rank 1 goes on once it has been said."""

        def refresh(self, outputs: object, status: Callable[[], str]) -> float | None:
            seconds = super().refresh(outputs, status)
            if self.saw(words):
                told.touch()
            return seconds

    rename = (
        "from nbddp.compat import torch as torch_compat\nkept = torch_compat.flight_recorders\n"
        "def renamed(dump):\n"
        "    return lambda **options: dump(**options).replace(b'profiling_name', b'name')\n"
        "if rank == 1: torch_compat.flight_recorders = lambda: [renamed(dump) for dump in kept()]\n"
    )
    back = "\ntorch_compat.flight_recorders = kept"
    wait = f"\nimport pathlib\nwhile rank == 1 and not pathlib.Path({str(told)!r}).exists(): time.sleep(0.05)\n"
    watching = Telling()
    code = PREPARE + rename + "dist.barrier()" + wait + "dist.all_reduce(torch.ones(1))" + back
    try:
        two.run_cell(code, hang_after=0.3, timeout=60, screen=watching)
        assert watching.saw(words), watching.shown
        code = PREPARE + rename + "dist.barrier()\nif rank == 0: dist.all_reduce(torch.ones(1))"
        with pytest.raises(RunTimedOut):
            two.run_cell(code, hang_after=0.3, timeout=1.5, screen=watching)
    finally:
        two.ensure(LaunchSpec(fresh=True))


NAMED = {
    "destroy_process_group with a pending collective": (
        "if rank: work = dist.all_reduce(torch.ones(4), async_op=True); dist.destroy_process_group()",
        r"rank 1 waits in destroy_process_group for its pending all_reduce #1 \(line \d+\); rank 0 has finished",
    ),
    "destroy_process_group, and a barrier of another group": (
        "group = dist.new_group([0, 1])\n"
        "if rank: work = dist.all_reduce(torch.ones(4), async_op=True); dist.destroy_process_group()\n"
        "else: dist.barrier(group)",
        r"rank 0 waits in barrier #1 of group {0, 1} .*; rank 1 waits in destroy_process_group for its pending all_r",
    ),
    "new_group in another order": (
        "for ranks in ([0, 1], [0]) if rank == 0 else ([0], [0, 1]): dist.new_group(ranks)",
        r"new_group #1 has different ranks, \[0, 1\] on rank 0 \(line \d+\), \[0\] on rank 1",
    ),
    "placements that differ": (
        "from torch.distributed.tensor import distribute_tensor, Replicate, Shard\n"
        "mesh = init_device_mesh('cpu', (world,))\n"
        "distribute_tensor(torch.ones(4, 4), mesh, [Shard(0) if rank else Replicate()])",
        r"collective #1 differs between ranks, with broadcast on rank 0 \(line \d+\), scatter on rank 1",
    ),
    "messages with other tags": (
        "dist.recv(torch.ones(1), 0, tag=2) if rank else dist.send(torch.ones(1), 1, tag=1)",
        r"rank 0 waits in send to rank 1 \(line \d+\), and rank 1 waits in recv from rank 0 \(line \d+\)",
    ),
    "a batch of messages that lacks one": (
        "ops = [dist.P2POp(dist.irecv, torch.ones(1), 1 - rank)]\n"
        "ops += [dist.P2POp(dist.isend, torch.ones(1), 1 - rank)] * (rank == 0)\n"
        "[work.wait() for work in dist.batch_isend_irecv(ops)]",
        r"rank 0 waits in wait\(\) for a recv from rank 1 \(line \d+\); rank 1 has finished the cell",
    ),
    "a barrier in a hook of one rank's backward": (
        "model = DDP(torch.nn.Linear(2, 1)); loss = model(torch.ones(1, 2)).sum()\n"
        "if rank: loss.register_hook(lambda gradient: dist.barrier())\nloss.backward()",
        r"collective #\d+ differs between ranks, with all_reduce on rank 0 \(line \d+\), barrier on rank 1 \(line",
    ),
    "a checkpoint that one rank writes": (
        "import tempfile, torch.distributed.checkpoint as dcp\n"
        "if rank: dcp.save({'a': torch.ones(4)}, checkpoint_id=tempfile.mkdtemp())",
        r"rank 1 waits in gather_object #\d+ \(line \d+\); rank 0 has finished the cell",
    ),
    "a key of the store, with a time limit of its own": (
        "import datetime\nstore = dist.distributed_c10d._get_default_store()\n"
        "store.set_timeout(datetime.timedelta(seconds=25))\nif rank: store.wait(['key'])",
        r"rank 1 waits in store.wait\(\['key'\]\) \(line \d+\); rank 0 has finished the cell",
    ),
    "a key that a child process can set no more": (
        "import subprocess\nchild = subprocess.Popen(['true'])  # nobody waits for it\n"
        "from multiprocessing import forkserver, resource_tracker\n"
        "forkserver.ensure_running(); resource_tracker.ensure_running()\n"
        "if rank: dist.distributed_c10d._get_default_store().wait(['key'])",
        r"rank 1 waits in store.wait\(\['key'\]\) \(line \d+\); rank 0 has finished the cell",
    ),
}


@needs_recorder
@pytest.mark.parametrize("name", NAMED)
def test_waits_of_other_kinds_are_named(two: WorkerPool, name: str) -> None:
    code, words = NAMED[name]
    with pytest.raises(RunHung, match=words):
        two.run_cell(PREPARE + code, hang_after=0.3, timeout=20, screen=NullScreen())
    two.ensure(LaunchSpec(nproc=2))


def test_a_child_of_multiprocessings_server_counts_and_the_server_does_not(two: WorkerPool) -> None:
    code = (
        "import time\nfrom multiprocessing import get_context\nfrom nbddp.deadlock.on_rank import threads\n"
        "child = get_context('forkserver').Process(target=time.sleep, args=(30,))\nchild.start()\n"
        "found = threads.children()[0], child.pid\nchild.kill(); child.join()\nfound"
    )
    for found, pid in two.run_cell(code, want_value=True, screen=NullScreen()):
        assert found == [pid]


SEEMS = {  # what cannot be proven: the words of the live view, after `hang_after` and a second
    "a call in a thread that the cell awaits": (
        "import asyncio\nif rank: await asyncio.to_thread(dist.barrier)",
        r'rank 1 \(cell line \d+, thread "asyncio_\d" is in barrier\); no progress for \d s; '
        r"rank 0 has finished the cell; "
        r'rank 1 may still call from thread "asyncio_\d"; press Stop to unblock the ranks',
    ),
    "an executor that may call": (
        "import concurrent.futures as cf\nif rank == 0:\n"
        "    ex = cf.ThreadPoolExecutor(1); ex.submit(time.sleep, 3); ex.shutdown(False)\n"
        "else: dist.barrier()",
        r"rank 1 \(cell line \d+, waiting in barrier #\d for rank 0\); no progress for \d s; "
        r'rank 0 may still call from thread "ThreadPoolExecutor-\d+_0"; press Stop to unblock the ranks',
    ),
    "an asynchronous checkpoint that one rank does not write": (
        "import tempfile, torch.distributed.checkpoint as dcp\n"
        "if rank: dcp.async_save({'a': torch.ones(4)}, checkpoint_id=tempfile.mkdtemp()).result()",
        r'rank 1 \(cell line \d+, .*thread "AsyncCheckpointExecutor_\d+" is in \w+\); no progress for \d s; '
        r"rank 0 has finished the cell; rank 1 may still call from .*; press Stop to unblock the ranks",
    ),
    "two threads that share a group": (
        "import threading\nif rank: threading.Thread(target=dist.all_reduce, args=(torch.ones(1),)).start()\n"
        "time.sleep(0.3); dist.barrier()",
        r'rank 1 \(cell line \d+, .*barrier.*, thread "Thread-\d+.*" is in all_reduce\); no progress for \d s; '
        r"rank 1 may still call from .*; two threads of a rank need a group each .*; press Stop to unblock the ranks",
    ),
    "a process that waits": (
        "import subprocess\nif rank: subprocess.run(['sleep', '30'])\nelse: dist.barrier()",
        r"rank 1 \(cell line \d+, its 1 child process does nothing\); no progress for \d s; .*press Stop to unblock",
    ),
    "a pool of processes, in which one works on": (
        "import concurrent.futures as cf\nif rank:\n"
        "    with cf.ProcessPoolExecutor(1) as pool: asked = pool.submit(time.sleep, 10)\nelse: dist.barrier()",
        r"rank 1 \(cell line \d+, its 1 child process does nothing\); no progress for \d s; .*press Stop to unblock",
    ),
    "a server to which nobody connects": (
        "import socket\nif rank: socket.create_server(('127.0.0.1', 0)).accept()\nelse: dist.barrier()",
        r"rank 1 \(cell line \d+\); no progress for \d s; press Stop to unblock",
    ),
    "a signal that nobody sends": (
        "import signal\nif rank: signal.pause()\nelse: dist.barrier()",
        r"rank 1 \(cell line \d+\); no progress for \d s; press Stop to unblock",
    ),
    "a store of the program's own": (
        "store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\nif rank: store.wait(['key'])",
        r"rank 1 \(cell line \d+, in store.wait\(\['key'\]\)\); no progress for \d s; "
        r".*press Stop to unblock the ranks",
    ),
}
QUIET = r"; no progress for \d s; .*press Stop to unblock the ranks"
LINE = r"rank 1 \(cell line \d+\)" + QUIET
MORE_SEEMS = {  # further kinds of waits that a program can be in
    "RPC that one rank shuts down": (
        "import torch.distributed.rpc as rpc\nrpc.init_rpc(f'w{rank}', rank=rank, world_size=world)\n"
        "if rank: rpc.shutdown()",
        r"rank 1 \(cell line \d+\); no progress for \d s; ranks 0–1 may still call from .*RPC; press Stop",
    ),
    "an event that a cell awaits": (
        "import asyncio\nif rank: await asyncio.Event().wait()\nelse: dist.barrier()", LINE,
    ),
    "a lock of a file that the other rank has": (
        "import fcntl, tempfile\nfile = open(os.path.join(tempfile.gettempdir(), f'{os.getppid()}.lock'), 'w')\n"
        "if rank == 0: fcntl.flock(file, fcntl.LOCK_EX)\ndist.barrier()\n"
        "if rank: fcntl.flock(file, fcntl.LOCK_EX)\ndist.barrier()",
        r"waiting in barrier #2 for rank 1\); " + LINE,
    ),
    "a barrier of threads that no other thread enters": (
        "import threading\nif rank: threading.Barrier(2).wait()\nelse: dist.barrier()", LINE,
    ),
    "a lock that the rank itself has": (
        "import threading\nlock = threading.Lock()\n"
        "if rank: lock.acquire(); lock.acquire()\nelse: dist.barrier()", LINE,
    ),
    "a queue": ("import queue\nif rank: queue.SimpleQueue().get()\nelse: dist.barrier()", LINE),
    "a pipe": ("ends = os.pipe()\nif rank: os.read(ends[0], 1)\nelse: dist.barrier()", LINE),
    "a Future": (
        "import concurrent.futures as cf\nif rank: cf.Future().result()\nelse: dist.barrier()", LINE,
    ),
    "a program that reads": (
        "import subprocess\nif rank: subprocess.run(['cat'], stdin=(lower := os.pipe())[0])\nelse: dist.barrier()",
        r"rank 1 \(cell line \d+, its 1 child process does nothing\)" + QUIET,
    ),
    "a page that nobody serves": (
        "import socket, urllib.request\nat = socket.create_server(('127.0.0.1', 0))\n"
        "if rank: urllib.request.urlopen(f'http://127.0.0.1:{at.getsockname()[1]}')\nelse: dist.barrier()", LINE,
    ),
    "zmq": (
        "import zmq\nif rank: gets = zmq.Context().socket(zmq.PULL); gets.bind('inproc://it'); gets.recv()\n"
        "else: dist.barrier()", LINE,
    ),
    "a monitored barrier with a time limit": (
        "import datetime\nif not rank: dist.monitored_barrier(timeout=datetime.timedelta(seconds=60))",
        r"rank 0 \(cell line \d+, in monitored_barrier\)" + QUIET,
    ),
    "a group that only its members make": (
        "if rank: dist.new_group([0, 1], use_local_synchronization=True)",
        r"rank 1 \(cell line \d+, in new_group\); no progress for \d s; rank 0 has finished the cell; press Stop",
    ),
    "a loader whose workers do not come on": (
        "class Slow(torch.utils.data.Dataset):\n    def __len__(self): return 2\n"
        "    def __getitem__(self, i): time.sleep(60)\n"
        "if rank: list(torch.utils.data.DataLoader(Slow(), num_workers=1))\nelse: dist.barrier()",
        r"rank 1 \(cell line \d+, its 1 child process does nothing\)" + QUIET,
    ),
    "an executor whose thread is in a collective": (
        "import concurrent.futures as cf\nif rank:\n"
        "    with cf.ThreadPoolExecutor(2) as ex: list(ex.map(lambda _: dist.barrier(), range(1)))",
        r'rank 1 \(cell line \d+, thread "ThreadPoolExecutor-\d+_0" is in barrier \(cell line \d+, in <lambda>\)\)'
        + QUIET,
    ),
}  # fmt: skip
ALWAYS = 2  # of these, the first are always run


@needs_recorder
@pytest.mark.parametrize(
    "name",
    [*SEEMS, *(pytest.param(n, marks=[pytest.mark.more] * (i >= ALWAYS)) for i, n in enumerate(MORE_SEEMS))],
)
def test_what_only_seems_to_wait_is_said_and_not_ended(two: WorkerPool, name: str) -> None:
    code, words = {**SEEMS, **MORE_SEEMS}[name]
    screen, began = Impatient(words), time.monotonic()
    with pytest.raises((RunStopped, RunTimedOut)):
        two.run_cell(PREPARE + code, hang_after=0.3, timeout=20, screen=screen)
    assert screen.said, screen.shown[-1]
    assert screen.said - began < 10
    two.ensure(LaunchSpec(nproc=2, fresh=name.startswith("RPC")))
    two.run_cell(PREPARE + "dist.barrier()", hang_after=0.3, timeout=20, screen=NullScreen())


SPAWNS = """
import os, torch.distributed as dist, torch.multiprocessing as mp
def child(i):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="{port}", RANK=str(i), WORLD_SIZE="2", {more})
    dist.init_process_group("gloo")
if __name__ == "__main__":
    mp.start_processes(child, nprocs={nprocs}, start_method="{method}")
"""
NOBODY = (
    r"rank 0 \(.* line 7, 2 of its \d child processes are connecting to a store at 127.0.0.1:\d+, where no "
    r"process answers\); "
    r"no progress for \d s; TORCHELASTIC_USE_AGENT_STORE=True is inherited by started processes.* Keep the "
    r"launcher's MASTER_PORT, or set TORCHELASTIC_USE_AGENT_STORE=False in them; press Stop to unblock the ranks"
)
ALONE = (
    r"rank 0 \(.* line 7, (\d of )?its (\d )?child process(es)? (is|are) waiting for others to connect to its "
    r"store at 127.0.0.1:\d+\); "
    r"no progress for \d s; press Stop to unblock the ranks"
)
OWN_SERVER = "TORCHELASTIC_USE_AGENT_STORE='False'"
STARTED = {
    "spawn": ({"method": "spawn", "more": "", "nprocs": 2}, NOBODY),
    "a server that is alone": ({"method": "spawn", "more": OWN_SERVER, "nprocs": 1}, ALONE),
    "fork, alone": ({"method": "fork", "more": "", "nprocs": 1}, ALONE),  # these serve themselves
}


def spawning(pool: WorkerPool, by: str, folder: Path, how: dict[str, object], screen: Screen) -> None:
    """Run the program that starts processes, as a cell or as a script."""
    program = SPAWNS.format(port=quiet_port(), **how)
    if by == "cell":
        pool.run_cell(program, hang_after=0.3, timeout=150, screen=screen)
    else:
        script = folder / "starts.py"
        script.write_text(program)
        pool.run_script(str(script), hang_after=0.3, timeout=150, shutdown_timeout=1, screen=screen)


BY = [(name, by) for name in STARTED for by in ("cell", "script")[:: -1 if "fork" in name else 1]]


@pytest.mark.every(4)
@pytest.mark.parametrize(("name", "by"), BY)
def test_where_started_processes_wait_is_said(one: WorkerPool, name: str, by: str, tmp_path: Path) -> None:
    how, words = STARTED[name]
    screen = Impatient(words)
    with pytest.raises((RunStopped, RunTimedOut)):
        spawning(one, by, tmp_path, how, screen)
    assert screen.said, screen.shown[-1]
    assert time.monotonic() - screen.said < 20, "a script that is stopped has one second to end"


@pytest.mark.every(2)
@pytest.mark.parametrize("by", ["script", "cell"])
def test_the_advice_for_started_processes_helps(one: WorkerPool, by: str, tmp_path: Path) -> None:
    spawning(one, by, tmp_path, {**STARTED["a server that is alone"][0], "nprocs": 2}, NullScreen())


def test_a_wait_for_a_key_names_the_rank_that_has_left(two: WorkerPool) -> None:
    """It has a time limit of its own, so nothing ends it before; the live view says who waits, and who has left."""
    watching = Watching()
    code = "import datetime\nstore = dist.distributed_c10d._get_default_store()\n"
    wait = "if rank: store.wait(['key'], datetime.timedelta(seconds=3))"
    with pytest.raises(WorkerFailed, match="rank 1 raised DistStoreError") as caught:
        two.run_cell(PREPARE + code + wait, hang_after=0.3, timeout=30, screen=watching)
    assert watching.saw("in store.wait(['key'])); no progress for 1 s; rank 0 has finished the cell"), watching.shown
    told = "No rank set the key in time; rank 0 has left the cell without setting it."
    assert told in caught.value.report.splitlines()


def test_notes_keep_nothing_alive(two: WorkerPool) -> None:
    code = (
        "import gc, weakref\nfrom nbddp.deadlock.on_rank.call_log import CALLS\ngc.collect()\nbefore = CALLS.forget()\n"
        "tensor = torch.ones(4)\nfor _ in range(50):\n"
        "    dist.all_reduce(tensor)\n    dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)\n"
        "mine = dist.all_reduce(tensor, async_op=True); mine.wait()\n"
        "left = [weakref.ref(tensor), weakref.ref(mine), weakref.ref(dist.group.WORLD)]\n"
        "noted = CALLS.forget() - before\n"
        "del tensor, mine; dist.destroy_process_group(); gc.collect()\n"
        "(noted, CALLS.forget() - before, [ref() is None for ref in left])"
    )
    found = two.run_cell(PREPARE + code, want_value=True, screen=NullScreen())
    assert list(found) == [(1, 0, [True, True, True])] * 2


def test_the_end_of_a_work_runs_nothing_that_an_interrupt_could_be_lost_in() -> None:
    """Python only prints a KeyboardInterrupt that hits the callback of a weak reference."""
    notes, ran, numbers = call_log.CallLog(), [], set()
    for number in range(100):
        work = {number}  # the next one often is at the same address
        numbers.add(id(work))
        notes.remember(work, call_log.CallRecord(("all_reduce", "group", number)))
        assert notes.of_work(work) == ("all_reduce", "group", number)
        sys.setprofile(lambda frame, event, what: ran.append((event, getattr(what, "__name__", ""))))
        del work
        sys.setprofile(None)
    assert len(numbers) < 100
    assert "call" not in {event for event, _ in ran}, ran
    assert notes.forget() == 0


@needs_recorder
def test_workers_record_and_their_environment_does_not_show_it(two: WorkerPool) -> None:
    code = "from nbddp.deadlock.on_rank import flight\ndist.barrier()\n"
    code += "[e.op for e in flight.entries(flight.dumps(False))][-1:]"
    assert list(two.run_cell(PREPARE + code, want_value=True, screen=NullScreen())) == [["barrier"]] * 2
    found = two.run_cell(f"[n for n in {flight.SIZES} if n in os.environ]", want_value=True, screen=NullScreen())
    assert list(found) == [[], []]


@pytest.mark.more
def test_without_a_recorder_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A healthy loop goes on; a real hang is shown for what it seems, until Stop or a time limit ends it."""
    monkeypatch.setenv(flight.SIZES[0], "0")
    with WorkerPool(nproc=2) as pool:
        loop = "end = time.monotonic() + 2\ngo = torch.ones(1)\nwhile go.item():\n"
        loop += "    go.fill_(float(time.monotonic() < end)); dist.all_reduce(go, dist.ReduceOp.MIN)"
        pool.run_cell(PREPARE + loop, hang_after=0.3, screen=NullScreen())
        watching = Watching()
        with pytest.raises(RunTimedOut) as caught:
            pool.run_cell("if rank == 0: dist.barrier()", hang_after=0.3, timeout=4, screen=watching)
        assert watching.saw("apparently waiting in barrier"), watching.shown
        told = "no progress for 1 s; rank 1 has finished the cell; press Stop to unblock the ranks"
        assert watching.saw(told), watching.shown
        assert not watching.saw(", waiting in"), watching.shown
        assert "deadlock" not in str(caught.value)
        pool.ensure(LaunchSpec())
        with pytest.raises(RunHung, match="rank 0 waits in recv from rank 1"):
            pool.run_cell(PREPARE + "if rank == 0: dist.recv(torch.ones(1), 1)", hang_after=0.3, screen=NullScreen())


def test_a_deadlock_is_named_also_when_the_pool_has_changed_its_size(two: WorkerPool) -> None:
    for nproc in (3, 2):
        two.ensure(LaunchSpec(nproc=nproc))
        with pytest.raises(RunHung, match=r"rank 0 waits in recv from rank 1 .*; rank 1 has finished the cell"):
            two.run_cell(
                PREPARE + "if rank == 0: dist.recv(torch.ones(1), 1)", hang_after=0.3, timeout=30, screen=NullScreen()
            )


@needs_recorder
def test_a_deadlock_is_named_after_many_groups(two: WorkerPool) -> None:
    """torch's recorder still holds the collectives of groups that nothing else remembers."""
    two.ensure(LaunchSpec(nproc=2))
    for _ in range(call_log.EPOCHS + 3):
        two.run_cell(PREPARE + "for _ in range(3): dist.all_reduce(torch.ones(1))", screen=NullScreen())
    with pytest.raises(RunHung, match=r"rank 0 waits in barrier #2 .*; rank 1 has finished the cell"):
        two.run_cell(
            PREPARE + "dist.barrier()\nif rank == 0: dist.barrier()", hang_after=0.3, timeout=30, screen=NullScreen()
        )


@needs_recorder
def test_what_a_recorder_said_holds_until_something_more_is_called(two: WorkerPool) -> None:
    """So a rank that is freed need not ask it again for the call that it was freed from."""
    code = "from nbddp.deadlock.on_rank import position, flight\ndist.all_reduce(torch.ones(1))\n"
    code += "known = position.KnownEntries(flight.held().of_all)\nbefore = known.lasts(), known.entries[-1].op\n"
    code += "dist.barrier()\nbefore, known.lasts()"
    found = two.run_cell(PREPARE + code, want_value=True, screen=NullScreen())
    assert list(found) == [((True, "all_reduce"), False)] * 2
