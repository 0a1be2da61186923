"""Stop at any moment of any command: one line that is true, and the pool works on."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from nbddp.agent import client, stop
from nbddp.agent.client import AgentClient
from nbddp.errors import Raised, RunStopped, RunTimedOut, WorkerFailed
from nbddp.execution.execution import Execution
from nbddp.launch.options import LaunchSpec
from nbddp.output.screens import NullScreen
from nbddp.pool import start_requests
from nbddp.pool.change import PoolSnapshot, changed
from nbddp.pool.pool import WorkerPool
from nbddp.protocol.agent import StartWorker
from nbddp.protocol.messages import OUTCOME
from nbddp.protocol.outcome import Outcome
from nbddp.protocol.request import Request
from nbddp.protocol.run_spec import RunSpec
from tests.kernels import Kernel, Shown, loaded
from tests.pool.faults import StopAgain, StopWhenReady

START, SET_UP = (
    "%ddp start --nproc 2",
    """%%ddp --nproc 2
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
if not dist.is_initialized(): dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(64, 64))
for _ in range(3): model(torch.ones(8, 64)).sum().backward()""",
)
COMMANDS = {
    "restart": "%ddp restart --ranks 1",
    "topology": "%ddp topology",
    "timings": "%ddp timings",
    "memory": "%ddp memory",
    "forecast": "%ddp forecast",
    "compare": "%ddp compare model",
    "status": "%ddp status",
    "bench": "%ddp bench --max 4KiB --repeat 3",
    "stacks": "%ddp stacks",
    "log": "%ddp log --rank 0",
    "pull": "%ddp pull model",
    "push": "%ddp push given",
    "start": "%ddp start --nproc 3",
    "stop": "%ddp stop",
    "cold": "%ddp start --nproc 2",
    "cell": "%%ddp\nprint('done')",
}
FIGURES = ("topology", "timings", "memory", "forecast", "bench")
MOMENTS = int(os.environ.get("NBDDP_STOP_MOMENTS", "2"))  # of each command; more make a longer sweep
OURS = ("CommandStopped", "RunStopped")
AFTER = "%%ddp --nproc 2\nimport os\nprint('works', os.environ['WORLD_SIZE'])"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with loaded(str(tmp_path_factory.mktemp("stop")), warm=False) as kernel:  # all processes are under it
        assert kernel.run("given = list(range(1000))").ok
        yield kernel


def stop_after(kernel: Kernel, code: str, seconds: float, press: Callable[[Kernel], None] = Kernel.interrupt) -> Shown:
    """Run a cell and press Stop so long after the kernel has taken it up."""
    cell = kernel.send(code)
    while True:
        message = kernel.client.get_iopub_msg(timeout=60)
        if message["msg_type"] == "execute_input" and message["parent_header"].get("msg_id") == cell:
            break
    time.sleep(seconds)
    press(kernel)
    return kernel.collect(cell)


def press_on_all(kernel: Kernel) -> None:
    """Stop as VS Code has it: SIGINT to every process under the kernel, and to the kernel after them."""
    for process in psutil.Process(kernel.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGINT)
    os.kill(kernel.pid, signal.SIGINT)


def one_line(shown: Shown) -> bool:
    """What a stopped command may show; one that was done before answers as always."""
    if shown.ok:
        return True
    lines = shown.reply["traceback"]
    return shown.reply["ename"] in OURS and len(lines) == 1 and (
        "\n" not in lines[0] or shown.reply["evalue"] == "the run was stopped by the user"
    )  # fmt: skip


@pytest.mark.every(5)
@pytest.mark.parametrize("name", COMMANDS)
def test_stop_gives_one_line_and_the_next_cell_works(stopped: Kernel, name: str) -> None:
    k, code, chance = stopped, COMMANDS[name], random.Random(name)
    took = 0.0
    moments = MOMENTS if name not in ("stop", "cold") else max(1, MOMENTS // 2)  # each starts an agent
    for i in range(moments + 1):
        shown = k.run("%ddp stop" if name == "cold" else SET_UP)
        assert shown.ok, shown.error
        if i == 0:
            assert name not in FIGURES or k.run(code).ok, "matplotlib is there"
            shown = k.run(code)
            assert shown.ok, shown.error
            took = shown.took
            continue
        moment = took * (i - 1 + chance.random()) / moments
        shown = stop_after(k, code, moment)
        assert one_line(shown), f"after {moment:.3f} of {took:.3f} s\n{shown.error}"
        print(f"{name} {moment:.3f}/{took:.3f}", "ok" if shown.ok else shown.evalue)
        after = k.run(AFTER)
        assert after.ok, after.error
        assert after.text().endswith("ranks 0–1 │ works 2\n")


STOPPED = "the run was stopped by the user"
UNDER_ALL = {  # code, seconds until Stop, what is answered
    "sleep": ("%%ddp\nimport time; time.sleep(60)", 0.5, STOPPED),
    "blocked": ("%%ddp\nif dist.get_rank(): time.sleep(60)\ndist.barrier()", 0.5, STOPPED),
    "no cell of ours": ("import time; time.sleep(60)", 0.5, ""),
    "command": ("%ddp bench --max 64MiB --repeat 99", 0.5, "%ddp bench was stopped by the user; the pool is unchanged"),
}


@pytest.mark.parametrize("name", UNDER_ALL)
def test_stop_that_goes_to_all_processes_under_the_kernel_is_stop(stopped: Kernel, name: str) -> None:
    code, seconds, words = UNDER_ALL[name]
    shown = stopped.run(f"{SET_UP}\nimport time; kept = 41")
    assert shown.ok, shown.error
    shown = stop_after(stopped, code, seconds, press_on_all)
    assert shown.evalue == words, shown.error
    if words == STOPPED:
        again = stopped.run("%ddp attach")
        assert again.evalue == STOPPED, "the cell was stopped, and not this command"
        assert "%ddp attach" not in again.error
    after = stopped.run("%%ddp\nprint(kept)")
    assert after.text() == "ranks 0–1 │ 41\n", after.error


@pytest.mark.every(2)
@pytest.mark.parametrize("seconds", [0.05, 0.6])  # before the agent's code runs, and while it imports torch
def test_stop_that_goes_to_all_processes_while_a_pool_starts_is_stop(stopped: Kernel, seconds: float) -> None:
    assert stopped.run("%ddp stop").ok
    shown = stop_after(stopped, "%ddp start --nproc 2", seconds, press_on_all)
    assert one_line(shown), shown.error
    after = stopped.run(AFTER)
    assert after.text().endswith("ranks 0–1 │ works 2\n"), after.error


# -- a program on its way out ----------------------------------------------------------------------

BEGIN = """
import ctypes, os, signal, sys, threading, time, torch, torch.distributed as dist
rank, t, interrupts = int(os.environ["RANK"]), torch.ones(1), None
if not dist.is_initialized(): dist.init_process_group("gloo")
blocks = lambda: (dist.barrier(), threading.Thread(target=say_ready).start(), dist.all_reduce(t))
pause = lambda: (dist.barrier(), time.sleep(600))
def say_ready(main=threading.get_ident(), was=None, at=None):
    while at is None or at != was or at[0] == "<lambda>":  # until the program rests in its collective
        time.sleep(0.02)
        was, frame = at, sys._current_frames()[main]
        at = frame.f_code.co_name, frame.f_lasti
    print("ready", flush=True)
def write(seconds=1.8):
    with open(file, "w") as out:
        for i in range(100):
            out.write("x"); out.flush()
            time.sleep(seconds / 100)
def times_interrupted():
    global interrupts
    interrupts = 0
    until = time.monotonic() + 1.8
    while time.monotonic() < until:
        try: write()
        except KeyboardInterrupt: interrupts += 1
"""
WAYS_OUT = {  # what ends ranks that are at work: on rank 0, and on rank 1, which cleans up for longer than PATIENCE
    "in except": ("blocks()", "try: pause()\nexcept KeyboardInterrupt: times_interrupted(); raise"),
    "by a handler of its own": (
        "blocks()",
        "told = []; signal.signal(signal.SIGINT, lambda *_: told.append(1)); dist.barrier()\n"
        "while not told: time.sleep(0.01)\nwrite(); interrupts = len(told) - 1",
    ),
    "while it holds the interpreter": (
        "blocks()",
        "try: pause()\nexcept KeyboardInterrupt: ctypes.PyDLL(None).sleep(2); write(0.1); interrupts = 0",
    ),
    "with a collective": (
        "try: dist.barrier(); print('ready', flush=True); pause()\nexcept KeyboardInterrupt: dist.all_reduce(t)",
        "try: dist.barrier(); pause()\n"
        "except KeyboardInterrupt: write(0.5); dist.all_reduce(t); interrupts = int(t) - 2",
    ),
    "after a failure": ("dist.barrier(); 1 / 0", "try: pause()\nfinally: times_interrupted()"),
}


@pytest.mark.parametrize("way", WAYS_OUT)
def test_one_stop_is_one_interrupt_and_what_cleans_up_comes_to_its_end(
    pools: dict[int, WorkerPool], tmp_path: Path, way: str
) -> None:
    pool, screen = pools[2], StopAgain(again=False)
    zero, one = (f"if rank == {n}:\n" + "".join(f"    {line}\n" for line in code.splitlines())
                 for n, code in enumerate(WAYS_OUT[way]))  # fmt: skip
    with pytest.raises((RunStopped, WorkerFailed)) as caught:
        pool.run_cell(f"{BEGIN}file = {str(tmp_path / 'checkpoint')!r}\n{zero}{one}", screen=screen)
    assert isinstance(caught.value, WorkerFailed) == (way == "after a failure")
    assert not {s.status for s in caught.value.states} & {"replaced", "died"}, caught.value.report
    assert (tmp_path / "checkpoint").read_text() == "x" * 100
    again = pool.run_cell("interrupts if rank else 0", want_value=True, screen=NullScreen())
    assert list(again) == [0, 0]
    if "times_interrupted" in one:
        assert any(
            re.search(r"rank 1 is cleaning up, cell line \d+, in write, 1 s; press Stop( again)? to kill", line)
            for line in screen.told
        )
    if "blocks" in zero:
        assert re.search(
            r"rank 0: cell line 5, in <lambda>, .*waiting in all_reduce #\d+ for rank 1; unblocked", caught.value.report
        )


def test_stop_that_reaches_the_ranks_by_itself_too_is_one_interrupt(pools: dict[int, WorkerPool]) -> None:
    """VS Code interrupts every process under the kernel, and then the kernel."""
    pool = pools[2]

    class ToAll(StopWhenReady):
        def line(self, rank: int, stream: str, text: str) -> None:
            for worker in pool.workers.values() if text == "ready" else ():
                os.kill(worker.pid, signal.SIGINT)
            super().line(rank, stream, text)

    code = f"""{BEGIN}
interrupts, ends = 0, None
while ends is None or time.monotonic() < ends:
    try:
        if ends is None:
            dist.barrier()
            if rank == 0: print("ready", flush=True)
        time.sleep(1)
    except KeyboardInterrupt:
        interrupts, ends = interrupts + 1, ends or time.monotonic() + 0.5"""
    with pytest.raises(RunStopped):
        pool.run_cell(code, screen=ToAll())
    assert list(pool.run_cell("interrupts", want_value=True, screen=NullScreen())) == [1, 1]


IGNORES = "while True:\n    try: time.sleep(600)\n    except KeyboardInterrupt: pass"


def test_an_interrupt_that_does_not_arrive_is_sent_again(
    pools: dict[int, WorkerPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pools[2]
    pids = pool.run_cell("import os, time\nos.getpid()", want_value=True, screen=NullScreen())
    with monkeypatch.context() as patch:
        patch.setattr(pool.group, "signal", lambda ranks, number, *, group=False: None)
        with pytest.raises(RunTimedOut):
            pool.run_cell("time.sleep(60)", timeout=0.3, screen=NullScreen())
    assert list(pool.run_cell("os.getpid()", want_value=True, screen=NullScreen())) == list(pids)


ON_A_LOOP = """import asyncio, ctypes, signal, time
loop, calls = asyncio.get_running_loop(), []
loop.add_signal_handler(signal.SIGINT, calls.append, 1)
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_timedlock(mutex, (ctypes.c_long * 2)(int(time.time()) + 3))  # no signal ends this wait
await asyncio.sleep(0.3)
loop.remove_signal_handler(signal.SIGINT)
"""


def test_an_event_loops_handler_is_called_once_though_native_code_keeps_the_rank(pools: dict[int, WorkerPool]) -> None:
    """Such a handler hears of each signal, also of two that came while nothing could be noticed."""
    with pytest.raises(RunTimedOut):
        pools[2].run_cell(ON_A_LOOP, timeout=0.3, screen=NullScreen())
    assert list(pools[2].run_cell("len(calls)", want_value=True, screen=NullScreen())) == [1, 1]
    pools[2].restart()  # asyncio has changed how the process takes signals


def test_stop_just_before_workers_are_started_leaves_none_that_is_not_known(
    pools: dict[int, WorkerPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command has noted it, and first says so once the workers are written down."""
    real, pool = start_requests.worker, pools[2]

    def pressed(*args: Any, **kwargs: Any) -> StartWorker:
        signal.raise_signal(signal.SIGINT)
        return real(*args, **kwargs)

    pool.ensure(LaunchSpec(nproc=2))
    with monkeypatch.context() as patch, stop.heard_at_checks():
        patch.setattr(start_requests, "worker", pressed)
        patch.setattr(client, "SLICE", 0.0)  # as where the agent's answer takes longer
        with pytest.raises(KeyboardInterrupt):
            pool.ensure(LaunchSpec(nproc=3))
    assert sorted(pool.workers) == [0, 1, 2]
    pool.ensure(LaunchSpec(nproc=3))
    ranks = "import os; int(os.environ['RANK'])"
    assert list(pool.run_cell(ranks, want_value=True, screen=NullScreen())) == [0, 1, 2]
    pool.ensure(LaunchSpec(nproc=2))


def test_a_rank_that_goes_on_is_ended_by_a_second_stop_and_what_was_lost_is_told(pools: dict[int, WorkerPool]) -> None:
    code = f"{BEGIN}kept = 1\nif rank == 0: blocks()\ndist.barrier()\n{IGNORES}"
    with pytest.raises(RunStopped) as caught:
        pools[2].run_cell(code, screen=StopAgain())
    assert [s.status for s in caught.value.states] == ["interrupted", "replaced"]
    words = r"rank 1: cell line \d+, still running; Stop was pressed again, so it is replaced; lost: .*kept"
    assert re.search(words, caught.value.report), caught.value.report
    pools[2].ensure(LaunchSpec())


def test_after_a_failure_the_time_to_clean_up_has_a_bound(pools: dict[int, WorkerPool]) -> None:
    screen = StopAgain(again=False)
    with pytest.raises(WorkerFailed) as caught:
        pools[2].run_cell(f"{BEGIN}if rank == 0: 1 / 0\n{IGNORES}", shutdown_timeout=1.6, screen=screen)
    assert [s.status for s in caught.value.states] == ["failed", "replaced"]
    late = "it was still running 1.6 s after the interrupt (--shutdown-timeout), so it is replaced"
    assert late in caught.value.report
    assert any(line.endswith("are lost. This happens after 1.6 s anyway (--shutdown-timeout)") for line in screen.told)
    pools[2].ensure(LaunchSpec())


def test_after_stop_a_rank_has_no_longer_than_the_time_limit_and_its_clean_up(pools: dict[int, WorkerPool]) -> None:
    screen = StopAgain(again=False)
    with pytest.raises(RunStopped) as caught:
        pools[2].run_cell(
            f"{BEGIN}if rank == 0: blocks()\ndist.barrier()\n{IGNORES}",
            timeout=2.5,
            shutdown_timeout=1.2,
            screen=screen,
        )
    assert [s.status for s in caught.value.states] == ["interrupted", "replaced"]
    assert re.search(
        r"still running \d\.?\d? s after the interrupt \(--timeout and --shutdown-timeout\)", caught.value.report
    )
    pools[2].ensure(LaunchSpec())


def test_an_interrupt_that_python_has_ignored_in_a_destructor_is_sent_again(pools: dict[int, WorkerPool]) -> None:
    code = """import time
class Slow:
    def __del__(self):
        print("ready", flush=True); time.sleep(600)
Slow()
time.sleep(600)"""
    with pytest.raises(RunStopped) as caught:
        pools[2].run_cell(code, ranks=[0], screen=StopWhenReady())
    assert [s.status for s in caught.value.states] == ["interrupted"]


LOADER = """
class Data(torch.utils.data.Dataset):
    def __len__(self): return 1000
    def __getitem__(self, i): return item(i)
class Slow:
    def __init__(self): self.itself = self
    def __del__(self): time.sleep(12)
def load():
    slow = Slow()
    for x in torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2): dist.all_reduce(t)
kept = rank
def item(i):
"""
ITEMS = {  # what a data loader's process does: in the end it is torch that joins each for 5 s
    "raises": "    if rank and i == 9: raise ValueError('bad item')\n    return t",
    "sleeps": "    if i == 9: print('ready', flush=True); time.sleep(600)\n    return t",
}


def left(pool: WorkerPool, code: str) -> tuple[RunStopped | WorkerFailed, float]:
    """How a program over a loader ended, which keeps its variables, and how many seconds after it `began`."""
    pool.ensure(LaunchSpec())
    with pytest.raises((RunStopped, WorkerFailed)) as caught:
        pool.run_cell(BEGIN + LOADER + code, screen=StopWhenReady())
    assert "replaced" not in {s.status for s in caught.value.states}
    took = pool.run_cell("(kept, time.monotonic() - began)", want_value=True, screen=NullScreen())
    assert [value[0] for value in took] == [0, 1]
    return caught.value, max(value[1] for value in took)


@pytest.mark.parametrize("how", ITEMS)
def test_no_finalizer_of_what_a_program_leaves_delays_its_report_or_ends_a_rank(
    pools: dict[int, WorkerPool], how: str
) -> None:
    """A `__del__` that sleeps for 12 s, and processes of data loaders that torch joins for 5 s each."""
    error, took = left(pools[2], f"{ITEMS[how]}\nbegan = time.monotonic()\nload()")
    assert isinstance(error, RunStopped) == (how == "sleeps")
    assert took < 4
    pools[2].restart()  # the finalizer sleeps on, and the next program's leavings would wait for it


SLOW_START = """
start = threading.Thread.start
def slow(self):
    start(self)
    if self.name == "nbddp-ending": threading.Thread.start = start; self.join(30)
threading.Thread.start = slow
"""  # who starts the thread that lets go goes on when that one has ended


def test_what_a_program_leaves_dies_in_no_thread_that_a_cell_waits_for(pools: dict[int, WorkerPool]) -> None:
    code = (
        f"import threading\n{SLOW_START}class Slow:\n    def __del__(self):\n        global died\n"
        "        died = threading.current_thread().name\n"
        "def f():\n    slow = Slow()\n    raise ValueError('mine')\nf()"
    )
    with pytest.raises(WorkerFailed, match="mine"):
        pools[2].run_cell(code, screen=NullScreen())
    died = pools[2].run_cell("died", want_value=True, screen=NullScreen())
    assert list(died) == ["nbddp-ending"] * 2


LATE = """
import threading
run, failed = threading.Thread.run, threading.Event()
def late(self):
    if self.name == "nbddp-loader": failed.wait(30)
    if self.name == "nbddp-ending": threading.Thread.run = run; failed.set()
    run(self)
threading.Thread.run = late
"""  # the thread that ends a loader comes to it when the program has failed
LEFT = {  # an iterator that dies while the program's own thread goes on: its process is in the middle of an item
    "the body raises": "for x in loader: raise ValueError('body')",
    "by break": "for x in loader: break\nraise ValueError('body')",
    "by break, late": f"{LATE}for x in loader: break\nraise ValueError('body')",
    "in a function": "def load():\n    for x in loader: dist.all_reduce(t); raise ValueError('body')\nload()",
}


@pytest.mark.parametrize("how", LEFT)
def test_a_loaders_process_that_sleeps_holds_up_no_program_that_leaves_its_loop(
    pools: dict[int, WorkerPool], how: str
) -> None:
    """torch waits 5 s for each of the four in the loop's end."""
    code = (
        "    if i >= 4: time.sleep(600)\n    return t\n"
        "loader = torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=4)\nbegan = time.monotonic()\n"
    )
    error, took = left(pools[2], code + LEFT[how])
    assert isinstance(error, WorkerFailed)
    assert "body" in str(error)
    assert took < 10
    ended = (
        "import multiprocessing\nwhile multiprocessing.active_children(): time.sleep(0.01)\ntime.monotonic() - began"
    )
    assert max(pools[2].run_cell(ended, want_value=True, screen=NullScreen())) < 15


SPECS = {rank: RunSpec("cell", 1) for rank in (0, 1)}


class Interrupted(NullScreen):
    """Two ranks that an interrupt from elsewhere ends, one event at each look of the run at its screen; s is Stop."""

    def __init__(self, order: str, logs: Path) -> None:
        self.order = list(order)
        self.run = Execution(self, SPECS, Request(timeout=60), number=1, logs=logs, screen=self)

    def refresh(self, *shown: Any) -> None:
        if self.order and self.run.events.empty():
            event = self.order.pop(0)
            if event == "s":
                self.run.events.put(("stop", -1, time.monotonic()))
            else:
                self.signal([int(event)], signal.SIGINT)

    def signal(self, ranks: Sequence[int], number: int, *, group: bool = False) -> None:
        for rank in ranks:
            outcome = Outcome(1, "interrupt", chain=(Raised("KeyboardInterrupt", ""),))
            self.run.hear(rank, {"header": {"msg_type": OUTCOME}, "buffers": [], "content": outcome})

    def __getattr__(self, name: str) -> Any:
        return lambda *asked: {}


@pytest.mark.parametrize(
    ("order", "error"),
    [("01s", RunStopped), ("0s1", RunStopped), ("s01", RunStopped), ("0s", RunStopped), ("01", WorkerFailed),
     ("0", WorkerFailed)],
)  # fmt: skip
def test_an_interrupt_from_elsewhere_is_stop_only_if_stop_comes(tmp_path: Path, order: str, error: type) -> None:
    run, told = Interrupted(order, tmp_path).run, list[str]()
    run.ends.append(lambda: told.append("ends"))
    run.execute()
    with pytest.raises(error):
        run.raise_if_bad()
    assert told or "s" not in order, "who waits for a line hears of Stop"


def test_a_cells_stop_before_its_code_runs_is_answered(stopped: Kernel) -> None:
    """ipykernel leaves such a cell without an answer; here also one that is none of ours."""
    assert stopped.run("%%ddp --nproc 2\npass").ok  # so that there is a log
    for code in ("%ddp log --rank 0", "1 + 1"):
        for i in range(20):
            shown = stop_after(stopped, code, i * 0.0002)
            assert shown.reply["status"] in ("ok", "error")
            # of a Stop while the value is shown, ipykernel's reply names no error, and its traceback does
            assert one_line(shown) or "KeyboardInterrupt" in shown.error


def test_stop_in_a_plain_cell_shows_the_cells_frames_alone(stopped: Kernel) -> None:
    cell = stopped.send("import time\nprint('begun', flush=True)\ntime.sleep(60)")
    while stopped.client.get_iopub_msg(timeout=60)["content"].get("text", "")[:5] != "begun":
        pass
    stopped.interrupt()
    shown = stopped.collect(cell)
    assert shown.reply["ename"] == "KeyboardInterrupt"
    assert "time.sleep(60)" in shown.error
    assert "nbddp" not in shown.error


def test_stop_before_the_kernel_has_said_that_it_works_is_answered(stopped: Kernel) -> None:
    for _ in range(10):
        cell = stopped.send("%ddp status")
        while stopped.client.get_iopub_msg(timeout=60)["content"].get("execution_state") != "busy":
            pass
        stopped.interrupt()
        assert one_line(stopped.collect(cell))


PRESSED = """
import os, ipykernel.kernelbase as base
original = base.signal
def pressed(number, handler):
    before = original(number, handler)
    if handler is base.default_int_handler: os.kill(os.getpid(), number)
    return before
base.signal = pressed
"""  # ipykernel sets Python's handler outside of all that would catch a KeyboardInterrupt


def test_stop_in_the_moment_before_a_request_is_handled_ends_no_kernel(stopped: Kernel) -> None:
    assert stopped.run(PRESSED).ok
    assert stopped.run("1 + 1").ok
    assert stopped.run("base.signal = original").ok


AT_ITS_END = """
import os, signal
events = get_ipython().events
original = events.trigger
def trigger(event, *shown, **named):
    if event == "post_execute": os.kill(os.getpid(), signal.SIGINT)
    original(event, *shown, **named)
events.trigger = trigger
"""  # IPython answers an interrupt of a cell's code, and none that comes between the code and this event


@pytest.mark.parametrize("code", ["1 + 1", "%ddp status", "await __import__('asyncio').sleep(0)", "x ="])
def test_stop_in_the_moment_after_a_cells_code_is_answered(stopped: Kernel, code: str) -> None:
    assert stopped.run(AT_ITS_END).ok
    shown = stopped.run(code)
    assert shown.ok or shown.reply["ename"] in ("SyntaxError", "_IncompleteInputError"), shown.error
    assert stopped.run("events.trigger = original").ok


def test_stop_is_heard_after_a_cell_that_the_cell_has_run(stopped: Kernel) -> None:
    code = "_ = get_ipython().run_cell('1 + 1'); import time; time.sleep(60)"
    assert stop_after(stopped, code, 0.5).reply["ename"] == "KeyboardInterrupt"


def test_stop_in_the_moment_before_a_request_is_handled_ends_no_rank(pools: dict[int, WorkerPool]) -> None:
    pids = pools[2].run_cell(f"{PRESSED}\nos.getpid()", want_value=True, screen=NullScreen())
    after = pools[2].run_cell("base.signal = original\nos.getpid()", want_value=True, screen=NullScreen())
    assert list(after) == list(pids)


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ({}, {}, "the pool is unchanged"),
        ({"running": False, "workers": {}, "world_size": 0}, {"running": False}, "there is no pool"),
        ({}, {"running": False, "workers": {}, "world_size": 0}, "the pool has stopped"),
        ({"running": False, "workers": {}, "world_size": 0}, {"world_size": 0},
         "the pool is incomplete; the next %ddp start or %%ddp cell completes it"),
        ({}, {"workers": {0: 10, 1: 11, 2: 12, 3: 13}}, "the pool is unchanged"),
        ({}, {"workers": {0: 10, 1: 21, 2: 12}}, "variables on rank 1 are lost; ranks 0, 2 keep their variables"),
        ({}, {"workers": {2: 12}}, "variables on ranks 0–1 are lost; rank 2 keeps its variables; "
         "the next %ddp start or %%ddp cell restarts ranks 0–1"),
        ({}, {"group_broken": True}, "the process group is closed, and all variables are kept"),
        ({"group_broken": True}, {"group_broken": True}, "the pool is unchanged"),
    ],
)  # fmt: skip
def test_what_a_stopped_command_left_is_told(before: dict[str, Any], now: dict[str, Any], words: str) -> None:
    pool = PoolSnapshot(True, {0: 10, 1: 11, 2: 12}, 3, False)
    assert changed(replace(pool, **before), replace(pool, **now)) == words


@pytest.mark.usefixtures("cold")
def test_an_agent_that_still_imports_ends_at_once() -> None:
    agent = AgentClient.launch(os.environ)
    agent.wait_until(lambda: agent._hello is not None, 30)
    agent.close()
    assert agent.warm is None
    assert not agent.home.exists()
