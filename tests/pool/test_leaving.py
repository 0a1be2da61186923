"""Every way in which a rank can leave a cell, on real ranks: its verdict, its words, its output, and the next cell."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nbddp
from nbddp.errors import WorkerFailed
from nbddp.execution import report
from nbddp.launch.options import LaunchSpec
from nbddp.output.buffer import Text
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests import warm
from tests.kernels import Kernel
from tests.pool.faults import FREED_STATUS, check_after, needs_recorder, numbered
from tests.screens import Hearing
from tests.waiting import until

START = """
import asyncio, ctypes, os, signal, sys, threading, time, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
t = torch.ones(1)
"""


@pytest.fixture(scope="module")
def made() -> Iterator[WorkerPool]:
    with warm.pool(2) as pool:
        yield pool


@pytest.fixture
def two(made: WorkerPool) -> WorkerPool:
    made.ensure(LaunchSpec())
    made.run_cell("import os; kept = int(os.environ['RANK'])", screen=NullScreen())
    return made


def fails(pool: WorkerPool, code: str) -> WorkerFailed:
    with pytest.raises(nbddp.WorkerFailed) as caught:
        pool.run_cell(code, want_value=True, hang_after=1.0, screen=NullScreen())
    return caught.value


def lines(pool: WorkerPool, rank: int, stream: str = "stdout") -> list[str]:
    assert pool.last_run is not None
    texts = [i for i in pool.last_run.outputs[rank].items if isinstance(i, Text)]
    return [line for text in texts for line in text.lines_of(stream)]


OTHERS = {"sleep": "time.sleep(600)", "collective": "dist.all_reduce(t)", "done": "pass"}
INTERRUPTS = {
    "raises KeyboardInterrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "gets SIGINT": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(600)", "KeyboardInterrupt"),
    "is cancelled": ("raise asyncio.CancelledError('c')", "CancelledError: c"),
}


@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("how", INTERRUPTS)
def test_an_interrupt_of_the_programs_own_is_a_failure(two: WorkerPool, how: str, others: str) -> None:
    code, words = INTERRUPTS[how]
    error = fails(two, START + f"if rank == 1:\n    print('before')\n    {code}\nelse: {OTHERS[others]}")
    assert str(error) == f"rank 1 raised {words} (cell line 8)"
    status = {"sleep": "interrupted", "collective": FREED_STATUS, "done": "finished"}[others]
    assert {s.rank: s.status for s in error.states} == {0: status, 1: "failed"}
    assert lines(two, 1) == ["before"]
    check_after(two, ())


def test_an_interrupt_in_a_cell_that_awaits_is_a_failure_too(two: WorkerPool) -> None:
    code = START + "await asyncio.sleep(0)\nif rank == 1: raise asyncio.CancelledError\nelse: await asyncio.sleep(600)"
    assert str(fails(two, code)) == "rank 1 raised CancelledError (cell line 7)"
    check_after(two, ())


WAYS = {
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", "died: killed by SIGTERM", True),
    "SIGHUP": ("os.kill(os.getpid(), signal.SIGHUP)", "died: killed by SIGHUP", True),
    "SIGQUIT": ("os.kill(os.getpid(), signal.SIGQUIT); time.sleep(600)", "died: killed by SIGQUIT", True),
    "SIGTERM to a handler": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9)); os.kill(os.getpid(), signal.SIGTERM); time.sleep(600)",
        "exited with code 9 (cell line 8, in <lambda>)",
        False,
    ),
    "_exit": ("os._exit(3)", "died: its process exited with code 3", True),
    "_exit in a thread": (
        "threading.Thread(target=os._exit, args=(3,)).start(); time.sleep(600)",
        "died: its process exited with code 3",
        True,
    ),
    "GeneratorExit": ("raise GeneratorExit('g')", "raised GeneratorExit: g (cell line 8)", False),
    "BaseException": ("raise type('Bare', (BaseException,), {})('b')", "raised Bare: b (cell line 8)", False),
    "argparse": (
        "import argparse; argparse.ArgumentParser().parse_args(['--no'])", "exited with code 2 (cell line 8)", False,
    ),
    "exit with a code": ("sys.exit(-1)", "exited with code 255 (cell line 8)", False),
    "exit with a word": ("sys.exit('bye')", "exited with code 1 (cell line 8)", False),
    "%time": ("get_ipython().run_line_magic('time', '1/0')", "raised ZeroDivisionError: division by zero", False),
    "%run": (
        "file = os.path.dirname(os.environ['TORCHELASTIC_ERROR_FILE']) + '/bad.py'; open(file, 'w').write('1 / 0'); "
        "get_ipython().run_line_magic('run', repr(file))",
        "raised ZeroDivisionError: division by zero (bad.py line 1)",
        False,
    ),
}  # fmt: skip


@pytest.mark.every(2)
@pytest.mark.parametrize("way", WAYS)
def test_each_way_out_has_its_words_and_loses_no_output(two: WorkerPool, way: str) -> None:
    code, words, dies = WAYS[way]
    error = fails(two, START + f"if rank == 1:\n    print('before')\n    {code}\nelse: dist.all_reduce(t)")
    assert str(error).startswith(f"rank 1 {words}"), error
    assert lines(two, 1)[0] == "before"
    if way == "exit with a word":
        assert lines(two, 1, "stderr") == ["bye"]
    check_after(two, (1,) if dies else ())


def test_a_signal_that_the_program_handles_is_its_own_business(two: WorkerPool) -> None:
    code = START + (
        "heard = []\nsignal.signal(signal.SIGTERM, lambda *_: heard.append(1))\n"
        "os.kill(os.getpid(), signal.SIGTERM)\nwhile not heard: time.sleep(0.01)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)\nheard"
    )
    assert list(two.run_cell(code, want_value=True, screen=NullScreen())) == [[1], [1]]
    check_after(two, ())


@pytest.mark.parametrize("way", ["sys.exit()", "sys.exit(0)", "sys.exit(256)"])
def test_an_exit_that_is_a_success_leaves_no_value(two: WorkerPool, way: str) -> None:
    found = two.run_cell(START + f"if rank == 1: {way}\nrank", want_value=True, screen=NullScreen())
    assert found.by_rank() == {0: 0}
    check_after(two, ())


def test_an_exit_in_a_thread_is_the_threads_alone(two: WorkerPool) -> None:
    code = START + "thread = threading.Thread(target=sys.exit, args=(3,)); thread.start(); thread.join()\nrank"
    assert list(two.run_cell(code, want_value=True, screen=NullScreen())) == [0, 1]


def test_a_process_that_ends_well_is_a_success_and_its_names_are_told_to_be_gone(two: WorkerPool) -> None:
    screen = Hearing()
    found = two.run_cell(
        "import os\nprint('before')\nif os.environ['RANK'] == '1': os._exit(0)\n5", want_value=True, screen=screen
    )
    assert found.by_rank() == {0: 5}
    assert lines(two, 1) == ["before"]
    assert screen.said == ["rank 1 exited with code 0; its variables are lost, and the next cell starts a new process"]
    check_after(two, (1,))


def test_a_request_is_no_program_and_must_be_answered(two: WorkerPool) -> None:
    class Leaving:
        def __reduce__(self) -> tuple[Any, ...]:
            return sys.exit, (0,)

    with pytest.raises(nbddp.WorkerFailed, match="rank 0 exited with code 0"):
        two.push({"it": Leaving()})
    check_after(two, ())


def test_a_worker_that_cannot_begin_is_told_as_that(two: WorkerPool) -> None:
    two.run_cell(START + "if rank == 1: os.path.isdir = lambda *_, **__: 1 / 0", screen=NullScreen())
    error = fails(two, "print('never')")
    assert str(error).startswith("rank 1 could not begin the cell: ZeroDivisionError: division by zero")
    assert "%ddp restart --ranks 1" in error.report
    two.restart([1])
    check_after(two, (1,))


EXHAUSTS = "held = []\nwhile True: held.append(os.open(os.devnull, os.O_RDONLY))"
NO_CLOCK = (
    "def bad(*_): raise RuntimeError('no clock')\n"
    "for name in ('time', 'time_ns', 'monotonic', 'monotonic_ns', 'perf_counter'): setattr(time, name, bad)\n"
)
NO_MEMORY = """\
import resource
size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 20), -1))
held, piece = [], 1 << 26
while piece > 16:
    try: held.append(bytearray(piece))
    except MemoryError: piece //= 2
"""  # not a byte is left, also for the cells that follow
SPOILS = {  # what a program does to the process in which the worker has to come to the end of its run
    "no descriptors": (EXHAUSTS, "rank 1 raised OSError: [Errno 24] Too many open files: '/dev/null' (cell line 4)"),
    "none, and caught": (f"try:\n    {EXHAUSTS.replace(chr(10), chr(10) + '    ')}\nexcept OSError: pass", ""),
    "no memory": (f"{NO_MEMORY}raise MemoryError", "rank 1 raised MemoryError (cell line 10)"),
    "no memory, and caught": (NO_MEMORY, ""),
    "a clock that raises": (f"{NO_CLOCK}1 / 0", "rank 1 raised ZeroDivisionError: division by zero (cell line 5)"),
    "a clock that raises, and an end": (NO_CLOCK, ""),
    "another user": ("os.setuid(65534)", ""),
    "no imports": ("import builtins\nbuiltins.__import__ = None", ""),
    "no imports, and an error": (
        "import builtins\ndel builtins.__import__\n1 / 0",
        "rank 1 raised ZeroDivisionError: division by zero (cell line 5)",
    ),
    "an open that raises": (
        "import builtins\nbuiltins.open = lambda *_, **__: 1 / 0\nraise ValueError('mine')",
        "rank 1 raised ValueError: mine (cell line 5)",
    ),
    "no functions of Python's": (
        "import builtins\nfor name in ('len', 'isinstance', 'print', 'getattr'): setattr(builtins, name, None)\n"
        "raise ValueError('mine')",
        "rank 1 raised ValueError: mine (cell line 5)",
    ),
    "no modules": ("import sys\nsys.modules.clear()", ""),
    "an odd hook of the collector": ("import gc\ndef bad(*_): raise RuntimeError('no')\ngc.callbacks.append(bad)", ""),
    "no word": (
        "get_ipython().kernel._send = lambda *_: None",
        "rank 1 raised RuntimeError: the rank finished the cell without a report; %ddp log shows its output",
    ),
    "no way to say one": (
        "def bad(*_): raise RuntimeError('no words')\nget_ipython().kernel._send = bad",
        "rank 1 died: its process exited with code 70",
    ),
}


@pytest.mark.parametrize("how", SPOILS)
def test_whatever_a_program_has_done_to_its_process_how_it_ended_is_told(two: WorkerPool, how: str) -> None:
    code, words = SPOILS[how]
    code = "import os, time\nif kept:\n" + "".join(f"    {line}\n" for line in code.splitlines())
    if how == "another user" and os.getuid():
        pytest.skip("only root may become another user")
    if words:
        with pytest.raises(WorkerFailed, match=re.escape(words)):
            two.run_cell(code, timeout=20, screen=NullScreen())
    else:
        two.run_cell(code, timeout=20, screen=NullScreen())
    with contextlib.suppress(WorkerFailed):  # the next cell ends, too, as well as it can there
        two.run_cell("after = 1", timeout=20, screen=NullScreen())
    two.ensure(LaunchSpec())
    two.restart([1])
    check_after(two, (1,))


def test_a_signal_that_a_program_waits_for_reaches_no_thread_of_the_workers(two: WorkerPool) -> None:
    """As in a script that blocks it before it starts threads: a job's notice of its end, say."""
    two.ensure(LaunchSpec(fresh=True))
    code = (
        "import os, signal, threading\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\nheard = []\n"
        "waits = threading.Thread(target=lambda: heard.append(signal.sigwait([signal.SIGUSR1]))); waits.start()\n"
        "os.kill(os.getpid(), signal.SIGUSR1); waits.join()\n"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])\n"
        "len(heard), signal.pthread_sigmask(signal.SIG_BLOCK, [])"
    )
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert list(two.run_cell(code, want_value=True, screen=NullScreen())) == [(1, mask)] * 2


def test_a_module_that_a_program_removes_is_imported_again_and_its_own_import_stays(two: WorkerPool) -> None:
    """As in a plain kernel. torch imports all of sympy, before any cell."""
    two.ensure(LaunchSpec(fresh=True))
    removes = "import sys\nfor name in [n for n in sys.modules if n.startswith('sympy')]: del sys.modules[name]"
    two.run_cell(removes, screen=NullScreen())
    two.run_cell("print('sympy' in sys.modules)", screen=NullScreen())
    assert lines(two, 1) == ["False"]
    hook = "import builtins\nseen, first = [], builtins.__import__\ndef noting(name, *more):\n    seen.append(name)\n"
    two.run_cell(f"{hook}    return first(name, *more)\nbuiltins.__import__ = noting", screen=NullScreen())
    two.run_cell("import json\nprint('json' in seen, builtins.__import__ is noting)", screen=NullScreen())
    assert lines(two, 1) == ["True True"]
    two.run_cell("builtins.__import__ = first", screen=NullScreen())


@pytest.mark.parametrize(
    "ends", [pytest.param({"hang_after": 0.5}, marks=needs_recorder), {"hang_after": None, "timeout": 1.0}]
)
def test_a_clock_that_stands_still_holds_up_neither_a_deadlocks_end_nor_a_timeouts(
    two: WorkerPool, ends: dict[str, float | None]
) -> None:
    code = START + "import time as module\nif rank: module.monotonic = lambda: 5.0\nif rank: dist.all_reduce(t)\n"
    code += "" if ends["hang_after"] else "else: time.sleep(600)"
    with pytest.raises(nbddp.RunFailed) as caught:
        two.run_cell(code, screen=NullScreen(), **ends)
    assert "replaced" not in {s.status for s in caught.value.states}, caught.value.report
    check_after(two, ())
    two.restart([1])


def test_a_stream_of_the_programs_own_stays_and_needs_nothing_but_write(two: WorkerPool) -> None:
    code = "import sys\nfirst = sys.stdout\nclass Loud:\n    def write(self, text): first.write(text.upper())\n"
    two.run_cell(code + "sys.stdout = Loud()", screen=NullScreen())
    two.run_cell("print('again'); sys.stdout = first", screen=NullScreen())
    assert lines(two, 1) == ["AGAIN"]


def test_closed_stdout_is_the_cells_alone(two: WorkerPool) -> None:
    two.run_cell(
        "import io, sys\nsys.stdout = io.StringIO(); sys.stdout.close(); sys.stderr = None", screen=NullScreen()
    )
    two.run_cell("print('again'); print('and here', file=sys.stderr)", screen=NullScreen())
    assert (lines(two, 1), lines(two, 1, "stderr")) == (["again"], ["and here"])


# -- who is to blame ------------------------------------------------------------------------


LEAVES = {
    "in a collective": ("dist.all_reduce(t)", "dist.destroy_process_group(); time.sleep(600)", "all_reduce #2"),
    "after a barrier it skipped": ("dist.barrier()", "dist.destroy_process_group()", "barrier #2"),
    "in backward": (
        "y.backward()",
        "del model, y; gc.collect(); dist.destroy_process_group(); time.sleep(600)",
        "backward",
    ),
    "in a receive": ("dist.recv(t, 1)", "dist.destroy_process_group()", "recv from rank 1"),
}


@pytest.mark.parametrize("how", LEAVES)
def test_the_rank_that_left_the_collective_is_named(two: WorkerPool, how: str) -> None:
    waits, leaves, call = LEAVES[how]
    ddp = "import gc; model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1)); y = model(t).sum(); "
    before = f"{ddp if call == 'backward' else ''}dist.all_reduce(t)\n"
    error = fails(two, START + f"{before}if rank == 1:\n    time.sleep(0.1)\n    {leaves}\nelse: {waits}")
    assert str(error) == numbered(
        f"rank 1 left: it destroyed the process group (cell line 9) while rank 0 waited in {call} (cell line 10)"
    )
    assert (error.rank, error.cause.kind, error.exception_type) == (1, "left", "")
    assert "rank 0: cell line 10, lost its connection to rank 1; unblocked, variables are kept" in error.report
    assert "GLHF" not in error.report
    check_after(two, ())


def test_a_process_that_ended_well_under_a_collective_is_named(two: WorkerPool) -> None:
    meet = "store = dist.distributed_c10d._get_default_store()\n"  # rank 0 has left init_process_group by then
    leave = "if rank == 1: store.wait(['there']); os._exit(0)\nstore.set('there', '1'); dist.all_reduce(t)"
    error = fails(two, START + meet + leave)
    assert str(error) == numbered(
        "rank 1 left: its process exited with code 0 while rank 0 waited in all_reduce #1 (cell line 8)"
    )
    check_after(two, (1,))


def test_the_real_error_is_the_cause_though_its_peer_was_heard_first(two: WorkerPool) -> None:
    code = START + (
        "dist.all_reduce(t)\nif rank == 1:\n    dist.destroy_process_group()\n    time.sleep(0.1)\n"
        "    raise ValueError('real')\ndist.all_reduce(t)"
    )
    error = fails(two, code)
    assert str(error) == "rank 1 raised ValueError: real (cell line 10)"
    assert "rank 0: cell line 11, lost its connection to rank 1; unblocked, variables are kept" in error.report
    assert "also " not in error.report
    check_after(two, ())


def test_a_lost_connection_that_nobody_explains_has_no_address_in_its_headline(two: WorkerPool) -> None:
    gloo = "[/src/pair.cc:553] Connection closed by peer [127.0.0.1]:51401. This is typically caused by a crash."
    error = fails(two, f"import os\nif os.environ['RANK'] == '1': raise RuntimeError({gloo!r})")
    assert str(error) == "rank 1 raised RuntimeError: Connection closed by peer (cell line 2)"
    assert gloo in error.report, "whole in the traceback"


def test_last_words_are_this_cells(two: WorkerPool) -> None:
    speak = "import ctypes, os\nctypes.CDLL(None).dprintf(2, b'terminate called by hand\\n')\n"
    two.run_cell(speak, screen=NullScreen())
    assert lines(two, 1, "stderr") == ["terminate called by hand"]
    assert "last words" not in fails(two, "import os\nif os.environ['RANK'] == '1': os._exit(3)").report
    two.ensure(LaunchSpec())
    again = fails(two, f"{speak}if os.environ['RANK'] == '1': os._exit(3)")
    assert "Its last output:\n    terminate called by hand" in again.report


def test_an_exception_that_cannot_word_itself_keeps_its_type(two: WorkerPool) -> None:
    code = "import os\nclass Mute(Exception):\n    def __str__(self): raise RuntimeError('in str')\n"
    error = fails(two, f"{code}if os.environ['RANK'] == '1': raise Mute")
    assert error.exception_type == "Mute"
    assert str(error) == (
        "rank 1 raised Mute: (its message cannot be shown: reading it raises RuntimeError) (cell line 4)"
    )
    check_after(two, ())


def test_an_outcome_that_cannot_be_sent_is_replaced_by_one_that_can(two: WorkerPool) -> None:
    spoil = "get_ipython().kernel.departures.seen.append(lambda: 0)"
    error = fails(two, f"if kept:\n    {spoil}\n    raise ValueError('it')")
    assert (error.rank, error.exception_type) == (1, "ValueError")
    assert error.exception_message.startswith("it\n(the report of this rank is incomplete because of ")
    check_after(two, ())


def test_a_report_that_cannot_be_worded_is_the_facts(two: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> str:
        raise KeyError("of ours")

    monkeypatch.setattr(report, "failure_text", broken)
    error = fails(two, "if kept: raise ValueError('theirs')")
    assert str(error) == "rank 1 failed"
    assert "theirs" in error.report
    assert "(the report could not be written because of KeyError: 'of ours')" in error.report


@pytest.mark.parametrize("way", ["raise KeyboardInterrupt", "os.kill(os.getpid(), 15)", "dist.destroy_process_group()"])
def test_workers_are_restarted_after_every_failure(two: WorkerPool, way: str) -> None:
    screen = Hearing()
    code = START + f"if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and rank == 1: {way}\ndist.barrier()\nrank"
    code = code.replace("dist.barrier()", "if dist.is_initialized(): dist.barrier()")
    assert list(two.run_cell(code, want_value=True, max_restarts=1, screen=screen)) == [0, 1]
    assert [text.split(" ")[:6] for text in screen.said] == [["attempt", "1", "of", "2:", "rank", "1"]]


def test_what_an_attempt_printed_is_not_drawn_for_the_next_one(two: WorkerPool) -> None:
    draws = []

    class Drawn(NullScreen):
        def shown_by(self, draw: Any) -> None:
            draws.append(draw)

    code = START + "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    for n in range(60): print(n)\n    1 / 0"
    two.run_cell(code, max_restarts=1, screen=Drawn())
    assert draws[-1](False, ()) is None, "the second attempt has printed nothing"


def test_threads_go_on_with_a_programs_own_print(two: WorkerPool) -> None:
    code = """import builtins, threading, time
done, said, pythons, interrupts = threading.Event(), [], print, get_ipython().kernel.interrupts
def later():
    while interrupts.is_on: time.sleep(0.001)
    print("mine"); done.set()
builtins.print = lambda *words: said.append(words)
threading.Thread(target=later).start()"""
    two.run_cell(code, screen=NullScreen())
    until(lambda: all(two.run_cell("done.is_set()", want_value=True, screen=NullScreen())))
    now = "builtins.print = pythons; said"
    assert list(two.run_cell(now, want_value=True, screen=NullScreen())) == [[("mine",)]] * 2


# -- as torchrun has it -------------------------------------------------------------------------


UNDER_TORCHRUN = {
    "os._exit(0)": "a success",
    "sys.exit('bye')": 1,
    "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)": -15,
}


@pytest.mark.torchrun
def test_verdicts_are_torchruns(two: WorkerPool, tmp_path: Path) -> None:
    runs = {}
    for number, way in enumerate(UNDER_TORCHRUN):
        script = tmp_path / f"{number}.py"
        script.write_text(f"import os, signal, sys, time\nif os.environ['RANK'] == '1': {way}\n")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
        runs[way] = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    answers = {way: run.communicate(timeout=150)[1] for way, run in runs.items()}
    for way, told in answers.items():
        codes = [int(code) for code in re.findall(r"exitcode +: (-?\d+)", told)]
        theirs = codes[0] if runs[way].returncode else "a success"
        assert theirs == UNDER_TORCHRUN[way], told
        two.ensure(LaunchSpec())
        try:
            two.run_cell(f"import os, signal, sys, time\nif os.environ['RANK'] == '1': {way}", screen=NullScreen())
            ours: int | str | None = "a success"
        except nbddp.WorkerFailed as error:
            ours = error.cause.code
        assert ours == theirs, way
        assert way != "sys.exit('bye')" or ("bye" in told and lines(two, 1, "stderr") == ["bye"])


# -- in a notebook ------------------------------------------------------------------------------


def test_a_cell_that_fails_at_once_under_trace_reports_its_failure(four: Kernel) -> None:
    fails = "import os\nif os.environ['RANK'] == '2': 1 / 0"
    shown = four.run(f"%%ddp --trace at-once.json\n{fails}")
    assert shown.evalue == "rank 2 raised ZeroDivisionError: division by zero (cell line 3)"
    assert "trace of 4 ranks: 0 spans" in shown.displays[0]["text/plain"]
    shown = four.run(f"%%ddp --trace {os.sep}no{os.sep}such{os.sep}folder.json\n{fails}")
    assert shown.evalue == "rank 2 raised ZeroDivisionError: division by zero (cell line 3)"
    assert shown.text().startswith("trace is not available (FileNotFoundError")


def test_all_ranks_that_waited_for_the_one_that_left_are_named(four: Kernel) -> None:
    """Also those that lost no connection, but were freed; nobody left by ending an earlier cell's group in its init."""
    assert four.run("%%ddp\nimport torch.distributed as dist\ndist.init_process_group('gloo')").ok
    code = """%%ddp
import os, pathlib, time, torch, torch.distributed as dist
dist.init_process_group('gloo')
here = pathlib.Path(os.environ['TORCHELASTIC_ERROR_FILE']).parent  # of this run alone
t = torch.ones(1)
dist.all_reduce(t)
try:
    if dist.get_rank() < 3:
        (here / f'{dist.get_rank()}.comes').touch(); dist.all_reduce(t)
    else:
        while len(list(here.glob('*.comes'))) < 3: time.sleep(0.01)
        time.sleep(0.1)
finally:
    dist.destroy_process_group()"""
    assert four.run(code).evalue == numbered(
        "rank 3 left: it destroyed the process group (cell line 14) "
        "while ranks 0–2 waited in all_reduce #2 (cell line 9)"
    )


def test_who_leaves_a_group_that_was_made_anew_is_named_with_that_line(four: Kernel) -> None:
    """And not with the line at which all have ended the one before."""
    code = """%%ddp
import torch, torch.distributed as dist
dist.init_process_group('gloo')
rank, t = dist.get_rank(), torch.ones(1)
dist.all_reduce(t)
dist.destroy_process_group()
dist.init_process_group('gloo')
if rank == 0: dist.destroy_process_group()
else: dist.all_reduce(t)"""
    found = four.run(code).evalue
    assert found.startswith("rank 0 left: it destroyed the process group (cell line 8) while ranks 1–3 waited"), found


def test_values_of_ranks_that_stayed_and_the_note_of_the_one_that_went(four: Kernel) -> None:
    shown = four.run("%%ddp -o left\nimport os\nif os.environ['RANK'] == '2': os._exit(0)\n7;")
    assert shown.ok, shown.error
    assert shown.text().startswith("rank 2 exited with code 0; its variables are lost")
    assert four.run("print(left.ranks)").text() == "(0, 1, 3)\n"
    assert four.run("%%ddp\nprint('on')").text() == "rank 2 is new and empty\nranks 0–3 │ on\n"
