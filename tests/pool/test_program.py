"""A cell as a program: its file, the processes that it starts, and what these print and leave."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import IPython
import psutil
import pytest

import nbddp
from nbddp.launch.options import LaunchSpec
from nbddp.output.buffer import Text
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from nbddp.protocol.request import Request
from tests.kernels import HAS_AUTORELOAD, Kernel
from tests.pool.faults import StopWhenReady
from tests.screens import Hearing

needs_autoreload = pytest.mark.skipif(not HAS_AUTORELOAD, reason="this Python cannot load this IPython's %autoreload")


class StopOnLine(NullScreen):
    """A screen that presses Stop when a line is printed."""

    def __init__(self, line: str) -> None:
        self.awaited = line

    def line(self, rank: int, stream: str, text: str) -> None:
        if text == self.awaited:
            os.kill(os.getpid(), signal.SIGINT)


METHODS = ("spawn", "forkserver", "fork")
EARLIER = """
import inspect, logging, os, sys, time, __main__
import multiprocessing as mp
import torch, torch.multiprocessing as tmp
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i): return Sample(scaled(i))

class Outer:
    class Inner:
        def __init__(self, x): self.x = x

@dataclass
class Sample:
    x: float
"""
LATER = """
FACTOR = 3
def scaled(i): return float(i * FACTOR)
def collated(samples): return [s.x for s in samples]
def sample(i): return Sample(scaled(i))
def inner(i): return Outer.Inner(i)
def nested(i):
    with mp.get_context("spawn").Pool(1) as pool: return pool.map(sample, [i])[0]
def loaded(module): return module in sys.modules
class Plain: pass
class Holder:
    Sample = Sample
def held(i): return Holder.Sample(scaled(i))
"""


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    """A pool of one in a folder of its own, in which two cells have defined what later ones use."""
    folder = tmp_path_factory.mktemp("program")
    before = Path.cwd()
    os.chdir(folder)
    with WorkerPool(nproc=1) as pool:
        os.chdir(before)
        pool.run_cell(EARLIER, cell=1, screen=NullScreen())
        pool.run_cell(LATER, cell=2, screen=NullScreen())
        yield pool


def value(pool: WorkerPool, code: str, cell: int = 3) -> Any:
    pool.ensure(LaunchSpec())
    return pool.run_cell(code, want_value=True, cell=cell, screen=NullScreen())[0]


def test_what_a_request_says_arrives_on_the_rank(one: WorkerPool) -> None:
    asked = Request(code="get_ipython().kernel.spec", cell=70, argv=("--lr", "1"), argv0="train", want_value=True,
                    check=True, timings=False, memory=True)  # fmt: skip
    spec = one.carry_out(asked, NullScreen())[0]
    assert spec.rendezvous.env["RANK"] == "0"
    assert replace(spec, rendezvous=None, debug=False, as_python=None) == asked.spec(spec.run)


def printed(pool: WorkerPool, stream: str = "stdout") -> list[str]:
    assert pool.last_run is not None
    texts = [i for i in pool.last_run.outputs[0].items if isinstance(i, Text)]
    return [line for text in texts for line in text.lines_of(stream)]


# -- the file ---------------------------------------------------------------------------------


def test_a_cell_has_a_file_in_the_working_directory(one: WorkerPool) -> None:
    file, of_main, folder, exists = value(one, "__file__, __main__.__file__, os.getcwd(), os.path.exists(__file__)", 7)
    assert file == of_main == os.path.join(folder, "In[7].py")
    assert not exists, "nothing is written into the user's folder"
    assert value(one, "__file__", 8).endswith("In[8].py")
    assert value(one, "%%capture --no-stdout\nx = __file__\n", 9) is None
    assert value(one, "x", 10).endswith("In[9].py"), "a part that a magic runs is no cell"


def test_cells_without_numbers_have_files_of_their_own(one: WorkerPool) -> None:
    names = [value(one, f"def f{n}(): return 1 / 0\n__file__", 0) for n in range(2)]
    assert len(set(names)) == 2
    with pytest.raises(nbddp.WorkerFailed) as caught:
        value(one, "f0()", 0)
    assert "def f0(): return 1 / 0" in caught.value.report


def test_a_cell_in_a_folder_that_is_gone_runs(one: WorkerPool) -> None:
    assert value(one, "here = os.getcwd(); os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')", 11) is None
    assert value(one, "os.chdir(here); __file__", 12) == "In[12].py"


def test_sources_of_classes_and_functions_of_any_cell_are_found(one: WorkerPool) -> None:
    for name, first in (("Numbers", "class Numbers(Dataset):"), ("Plain", "class Plain: pass"),
                        ("Sample", "@dataclass"), ("scaled", "def scaled(i): return float(i * FACTOR)")):  # fmt: skip
        assert value(one, f"inspect.getsource({name})").splitlines()[0] == first
    assert value(one, "inspect.getsourcefile(Numbers)").endswith("In[1].py")


# -- processes by spawn and forkserver --------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.parametrize("how", METHODS)
def test_a_data_loaders_workers_find_what_cells_have_defined(one: WorkerPool, how: str) -> None:
    code = f"list(DataLoader(Numbers(4), 2, num_workers=1, collate_fn=collated, multiprocessing_context={how!r}))"
    assert value(one, code) == [[0.0, 3.0], [6.0, 9.0]]


@pytest.mark.parametrize("how", METHODS)
def test_tasks_and_answers_of_a_pool_have_the_cells_classes(one: WorkerPool, how: str) -> None:
    code = f"""with mp.get_context({how!r}).Pool(1) as pool:
    got = pool.map(sample, [1]) + [pool.apply(inner, (2,)), pool.apply(Outer.Inner, (3,))]
    light = pool.map(loaded, ["torch", "ipyparallel", "nbddp.worker.engine"])
[type(x) for x in got] == [Sample, Outer.Inner, Outer.Inner], got[0].x, got[2].x, light"""
    assert value(one, code) == (True, 3.0, 3, [how == "fork"] * 3)


def test_a_class_that_another_holds_under_its_name_stays_its_own(one: WorkerPool) -> None:
    code = "with mp.get_context('spawn').Pool(1) as pool: got = pool.map(held, [1])[0]\ntype(got) is Sample, got.x"
    assert value(one, code) == (True, 3.0)


def test_a_definition_that_a_later_cell_replaces_is_the_one_that_is_sent(one: WorkerPool) -> None:
    code = """def twice(x): return 2 * x
with ProcessPoolExecutor(1, mp_context=mp.get_context("spawn")) as pool:
    got = [pool.submit(twice, 2).result()]
    def twice(x): return 20 * x
    got.append(pool.submit(twice, 2).result())
got"""
    assert value(one, code) == [4, 40]


def test_a_spawned_process_that_spawns_sends_them_on(one: WorkerPool) -> None:
    code = """with ProcessPoolExecutor(1, mp_context=mp.get_context("spawn")) as pool:
    got = pool.submit(nested, 5).result()
type(got) is Sample, got.x"""
    assert value(one, code) == (True, 15.0)


def test_what_two_processes_send_to_a_third_is_told_apart(one: WorkerPool) -> None:
    code = """spawn = mp.get_context("spawn")
def first(): return "first"
def second(): return "second"
def takes(tasks, answers):
    for _ in range(2): answers.put(tasks.get()())
def between(tasks, answers):
    process = spawn.Process(target=takes, args=(tasks, answers)); process.start()
    tasks.put(first); process.join()
tasks, answers = spawn.Queue(), spawn.Queue()
process = spawn.Process(target=between, args=(tasks, answers)); process.start()
got = [answers.get(timeout=40)]; tasks.put(second); got.append(answers.get(timeout=40)); process.join(); got"""
    assert value(one, code) == ["first", "second"]


def test_nothing_of_a_cell_runs_twice(one: WorkerPool) -> None:
    code = "print('once', flush=True)\ndef child(i): sys.stdout.write(f'child {i}\\n')\ntmp.spawn(child, nprocs=1)"
    assert value(one, code) is None
    assert sorted(printed(one)) == ["child 0", "once"]


def test_what_cannot_be_sent_is_named(one: WorkerPool) -> None:
    code = "import threading; lock = threading.Lock()\ndef uses(i): return lock\n"
    with pytest.raises(nbddp.WorkerFailed) as caught:
        value(one, code + "mp.get_context('spawn').Process(target=uses, args=(1,)).start()")
    assert "uses is sent to a new process and uses lock, which cannot be sent" in str(caught.value)
    forked = "with mp.get_context('fork').Pool(1) as pool: got = pool.map(len, [[1]]) + pool.map(is_lock, [1])\ngot"
    assert value(one, "def is_lock(i): return lock is not None\n" + forked) == [1, True], "a forked one has it"


def test_programs_under_a_guard_run_as_they_are(one: WorkerPool) -> None:
    code = "def main():\n    with mp.get_context('spawn').Pool(1) as pool: return pool.map(scaled, [1])\n"
    assert value(one, code + "if __name__ == '__main__': got = main()\ngot") == [3.0]


# -- what they print, and their end -------------------------------------------------------------------


@pytest.mark.parametrize("how", METHODS)
def test_what_a_started_process_prints_is_shown(one: WorkerPool, how: str) -> None:
    code = f"""def talks(i):
    print("out", end=" "); print("put"); sys.stdout.write("unended "); sys.stdout.flush()
    os.system("echo from a shell"); print("told", file=sys.stderr)
process = mp.get_context({how!r}).Process(target=talks, args=(1,)); process.start(); process.join()"""
    assert value(one, code) is None
    assert printed(one) == ["out put", "unended from a shell"]
    assert printed(one, "stderr") == ["told"]


def test_a_handler_that_holds_the_stream_is_heard_from_a_forked_process(one: WorkerPool) -> None:
    code = """log = logging.Logger("of the cell"); log.addHandler(logging.StreamHandler(sys.stdout))
def talks(i): log.warning("heard")
process = mp.get_context("fork").Process(target=talks, args=(1,)); process.start(); process.join()"""
    assert value(one, code) is None
    assert printed(one) == ["heard"]


ENDS = {
    "stopped": ("print('ready', flush=True); process.join()", nbddp.RunStopped),
    "failed": ("raise ValueError('on purpose')", nbddp.WorkerFailed),
}


@pytest.mark.parametrize("how", METHODS)
@pytest.mark.parametrize("way", ENDS)
def test_a_cell_that_does_not_end_well_ends_what_it_started(one: WorkerPool, way: str, how: str) -> None:
    then, kind = ENDS[way]
    code = f"""def waits(i): print("at work", flush=True); time.sleep(600)
process = mp.get_context({how!r}).Process(target=waits, args=(1,)); process.start(); pid = process.pid
{then}"""
    with pytest.raises(kind) as caught:
        one.run_cell(code, screen=StopWhenReady(after=0.2))
    assert [s.lost for s in caught.value.states] == [()]
    assert not psutil.pid_exists(value(one, "pid"))


@pytest.mark.parametrize("how", METHODS)
def test_an_interrupt_reaches_what_the_cell_has_started(one: WorkerPool, how: str, tmp_path: Path) -> None:
    """As Ctrl-C in a terminal does: an executor is left once its processes have ended what they do. They clean up, and
    the next cell has all variables."""
    file = tmp_path / "file"
    code = f"""def waits():
    print("at work", flush=True)
    try: time.sleep(20); how = "slept"
    except KeyboardInterrupt: how = "interrupted"
    open({str(file)!r}, "w").write(how)
kept = mp.get_context({how!r}).Process(target=time.sleep, args=(600,), daemon=True); kept.start()
with ProcessPoolExecutor(1, mp_context=mp.get_context({how!r})) as executor: executor.submit(waits).result()"""
    with pytest.raises(nbddp.RunStopped) as caught:
        one.run_cell(code, timeout=60, screen=StopOnLine("at work"))
    assert [s.lost for s in caught.value.states] == [()]
    assert file.read_text() == "interrupted"
    assert value(one, "alive = kept.is_alive(); kept.kill(); kept.join(); alive") is True, "a daemon is its holder's"


def test_a_process_of_the_clean_up_has_no_interrupt(one: WorkerPool, tmp_path: Path) -> None:
    """The notebook asks for those of the cell after the rank has had its own interrupt, here when the clean-up runs."""
    file = tmp_path / "file"
    code = f"""began = mp.get_context("fork").Event()
def saves(): began.set(); time.sleep(0.5); open({str(file)!r}, "w").write("saved")
print("ready", flush=True)
try: time.sleep(600)
except KeyboardInterrupt:
    process = mp.get_context("fork").Process(target=saves); process.start(); began.wait()
    get_ipython().kernel.children.interrupt()
    process.join(); ended = process.exitcode; raise"""
    with pytest.raises(nbddp.RunStopped):
        one.run_cell(code, timeout=60, screen=StopWhenReady(after=0.1))
    assert (value(one, "ended"), file.read_text()) == (0, "saved")


def test_a_rank_that_waits_for_what_it_has_started_says_so(one: WorkerPool, tmp_path: Path) -> None:
    """A process that does not heed the interrupt has its time, as the rank's own code has."""
    file, told = tmp_path / "told", list[str]()

    class Tells(StopOnLine):
        def ends(self, text: str) -> None:
            told.append(text)
            if re.search(r"rank 0 is cleaning up, cell line \d+, its 1 child process does nothing, \d s; press", text):
                file.touch()

    code = f"""def waits():
    __import__("signal").signal(2, __import__("signal").SIG_IGN); print("at work", flush=True)
    while not os.path.exists({str(file)!r}): time.sleep(0.05)
process = mp.get_context("fork").Process(target=waits); process.start()
try: process.join()
finally: process.join()"""
    with pytest.raises(nbddp.RunStopped):
        one.run_cell(code, timeout=60, screen=Tells("at work"))
    assert file.exists(), told


def test_what_other_cells_started_and_daemons_stay(one: WorkerPool) -> None:
    code = """def waits(i): time.sleep(600)
old = mp.get_context("fork").Process(target=waits, args=(1,)); old.start()"""
    assert value(one, code) is None
    with pytest.raises(nbddp.WorkerFailed):
        value(one, "new = mp.get_context('fork').Process(target=waits, args=(1,), daemon=True); new.start(); 1 / 0")
    assert value(one, "alive = old.is_alive(), new.is_alive(); old.kill(); new.kill(); alive") == (True, True)


def test_an_exit_without_error_ends_nothing(one: WorkerPool) -> None:
    code = "kept = mp.get_context('fork').Process(target=time.sleep, args=(600,)); kept.start(); sys.exit(0)"
    one.run_cell(code, screen=NullScreen())
    assert value(one, "alive = kept.is_alive(); kept.kill(); alive") is True


# -- stdout as a program knows it, and its end ----------------------------------------------------------


def test_stdout_takes_bytes_and_can_be_reconfigured(one: WorkerPool) -> None:
    code = """sys.stdout.reconfigure(encoding="utf-8", line_buffering=True); sys.stderr.reconfigure(errors="replace")
text = "grüß\\n".encode()
count = sys.stdout.buffer.write(text[:3]) + sys.stdout.buffer.write(memoryview(text[3:])); sys.stdout.buffer.flush()
sys.stderr.buffer.write(b"\\xff\\n"); sys.stdout.buffer.close(); print("on"); count, sys.stdout.buffer.writable()"""
    assert value(one, code) == (len("grüß\n".encode()), True)
    assert (printed(one), printed(one, "stderr")) == (["grüß", "on"], ["\ufffd"])
    with pytest.raises(nbddp.WorkerFailed, match="bytes-like object is required"):
        value(one, "sys.stdout.buffer.write('text')")
    forked = "process = mp.get_context('fork').Process(target=sys.stdout.buffer.write, args=(b'forked\\n',))"
    assert value(one, f"{forked}; process.start(); process.join()") is None
    assert printed(one) == ["forked"]


LEAVES = """
import atexit, os, sys, time
path = sys.argv[1] + "/" + os.environ["RANK"]
def leave(word, end=""): open(path, "a").write(word + end)
atexit.register(leave, "last", end="."); atexit.register(leave, "unwanted"); atexit.unregister(leave)
atexit.register(leave, "second", end=" "); atexit.register(lambda: 1 / 0); atexit.register(leave, "first", end=" ")
"""
WAYS: dict[str, Callable[[WorkerPool], object]] = {
    "stop": lambda pool: pool.stop(),
    "restart": lambda pool: pool.restart(),
    "fresh": lambda pool: pool.ensure(LaunchSpec(fresh=True)),
    "shrink": lambda pool: pool.ensure(LaunchSpec(nproc=1)),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("way", WAYS)
def test_atexit_is_called_when_a_worker_is_ended(way: str, tmp_path: Path) -> None:
    with WorkerPool(nproc=2) as pool:
        pool.run_cell(LEAVES, argv=[str(tmp_path)], screen=NullScreen())
        WAYS[way](pool)
        left = {int(path.name): path.read_text() for path in tmp_path.iterdir()}
        assert left == dict.fromkeys([1] if way == "shrink" else [0, 1], "first second ")
    if way == "shrink":
        assert (tmp_path / "0").read_text() == "first second "


def test_a_pool_stops_also_where_what_atexit_prints_cannot_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(NullScreen):
        def line(self, rank: int, stream: str, text: str) -> None:
            raise BrokenPipeError("the front end is gone")

    pool = WorkerPool(nproc=1)
    pool.start()
    pool.run_cell("import atexit; atexit.register(print, 'bye')", screen=NullScreen())
    pid = pool.workers[0].pid
    monkeypatch.setattr("nbddp.pool.runs.for_shell", lambda shell: Gone())
    with pytest.raises(BrokenPipeError, match="the front end is gone"):
        pool.stop()
    assert not pool.running
    assert not psutil.pid_exists(pid)


def test_a_function_of_atexit_that_does_not_return_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nbddp.pool.runs.EXIT_SECONDS", 1.0)
    with WorkerPool(nproc=1) as pool:
        pool.run_cell(LEAVES + "atexit.register(time.sleep, 600)", argv=[str(tmp_path)], screen=NullScreen())
        pool.restart()
        assert (tmp_path / "0").read_text() == "first second ", "the others were called"
        assert pool.run_cell("'path' in globals()", want_value=True, screen=NullScreen())[0] is False


def test_nothing_is_left_of_a_pool_whose_cells_started_processes() -> None:
    code = "import multiprocessing as mp, time\npids = []\n" + "".join(
        f"p = mp.get_context({how!r}).Process(target=time.sleep, args=(600,)); p.start(); pids.append(p.pid)\n"
        for how in METHODS
    )
    with WorkerPool(nproc=1) as pool:
        pids = pool.run_cell(code + "pids", want_value=True, screen=NullScreen())[0]
        assert all(map(psutil.pid_exists, pids))
    _, left = psutil.wait_procs([psutil.Process(p) for p in pids if psutil.pid_exists(p)], timeout=5)
    assert left == []


# -- who asks the user --------------------------------------------------------------------------------


@pytest.mark.parametrize("asks", ["input('name? ')", "import getpass; getpass.getpass()"])
def test_a_program_that_asks_is_told_how_to_hand_it_over(one: WorkerPool, asks: str) -> None:
    with pytest.raises(nbddp.WorkerFailed, match=r"input\(\) does not work on a rank. Ask in a cell without %%ddp"):
        value(one, asks)


@pytest.mark.parametrize(
    "asks",
    [
        "breakpoint()\n2",
        "import pdb; pdb.set_trace()\n2",
        "from IPython.core.debugger import set_trace; set_trace()\n2",
    ],
)
def test_a_debugger_on_a_rank_says_what_to_do_and_where_it_is(one: WorkerPool, asks: str) -> None:
    with pytest.raises(
        nbddp.WorkerFailed, match=r"a debugger prompt cannot open.*run %ddp debug in a cell without"
    ) as caught:
        value(one, f"def within():\n    {asks.replace(chr(10), chr(10) + '    ')}\nwithin()")
    assert "in within" in str(caught.value)
    assert value(one, "1 + 1") == 2


FAILS = """%%ddp --nproc 2
import os, torch
rank = int(os.environ["RANK"])
class Says:
    def __repr__(self): raise KeyError("of the program's own")
def step(batch, odd):
    total, word, many = batch.sum(), "x" * 100, {1: [2]}
    if rank == 1: raise ValueError("bad")
step(torch.ones(2, 3), Says())
"""


def test_debug_shows_the_ranks_frames_with_values_and_none_of_ours(new_kernel: Kernel) -> None:
    assert new_kernel.run(FAILS).evalue == "rank 1 raised ValueError: bad (cell line 8, in step)"
    shown = new_kernel.run("%debug").text()
    assert new_kernel.run("%ddp debug").text() == shown
    for line in (
        "---->    9 step(torch.ones(2, 3), Says())",
        '---->    8     if rank == 1: raise ValueError("bad")',
        "           batch = tensor float32 [2, 3] on cpu",
        "           total = tensor float32 [] on cpu = 6.0",
        "           odd = Says object",
        f"           word = {'x' * 60!r}… (100 long)",
        "           many = dict of 1",
    ):
        assert line in shown.splitlines(), shown
    assert "nbddp" not in shown
    assert "to see what failed on the ranks" in new_kernel.run("%%ddp\n%debug").text()
    waits = "import torch.distributed as dist\ndist.init_process_group('gloo')\nif rank: dist.recv(torch.ones(1), 0)"
    assert new_kernel.run(f"%%ddp --hang-after 0.5\n{waits}").evalue.startswith("deadlock")  # no recorder is needed
    assert "No rank raised an exception" in new_kernel.run("%debug").text()


def asked_by_debugger(kernel: Kernel) -> str:
    """What IPython's debugger asks for a command with; it is told to quit. After an error ipykernel 6 drops what is
    sent at once, and `run` sends it again."""
    assert kernel.run("pass").ok
    cell = kernel.client.execute("%debug", allow_stdin=True)
    prompt: str = kernel.client.get_stdin_msg(timeout=30)["content"]["prompt"]
    kernel.client.input("q")
    assert kernel.collect(cell).ok
    return prompt


def test_debug_is_ipythons_after_any_other_error(new_kernel: Kernel) -> None:
    """Also when other magics of its class have been used, which IPython 9 loads with the first."""
    for other in ("", "%time 1", "%config"):
        assert new_kernel.run(other).ok
        assert new_kernel.run("def own(): return 1 / 0\nown()").evalue == "division by zero"
        assert asked_by_debugger(new_kernel) == "ipdb> "
    assert new_kernel.run("%unload_ext nbddp").ok
    assert new_kernel.run("def own(): return 1 / 0\nown()").evalue == "division by zero"
    assert asked_by_debugger(new_kernel) == "ipdb> "


# -- modules of the user's own --------------------------------------------------------------------------


def said(pool: WorkerPool, code: str) -> list[str]:
    heard = Hearing()
    pool.run_cell(code, screen=heard)
    return heard.said


ANEW = "since the ranks imported it; reload it with importlib.reload in a %%ddp cell, or with --fresh"


def test_a_module_that_has_changed_is_told_once_for_each_change(one: WorkerPool, tmp_path: Path) -> None:
    file = tmp_path / "model_of_mine.py"
    file.write_text("x = 1\n")
    assert said(one, f"sys.path.insert(0, {str(tmp_path)!r}); import model_of_mine") == []
    assert said(one, "assert model_of_mine.x == 1") == []
    for text in ("x = 22\n", "x = 333\n"):
        file.write_text(text)
        assert said(one, "model_of_mine.x") == [f"model_of_mine changed on disk {ANEW}"]
        assert said(one, "model_of_mine.x") == []
    file.write_text("x = 4444\n")
    assert said(one, "import importlib; importlib.reload(model_of_mine); assert model_of_mine.x == 4444") == []
    assert said(one, "pass") == [], "what was read again is known"


@needs_autoreload
def test_a_module_that_autoreload_has_read_is_not_told(one: WorkerPool, tmp_path: Path) -> None:
    """With each of its two ways, and not before it is on, nor where it fails. (Each text has another length: what is
    compiled is known by that, and by whole seconds.)"""
    file, told = tmp_path / "net_of_mine.py", [f"net_of_mine changed on disk {ANEW}"]
    file.write_text("def f(): return 1\n")
    assert said(one, f"sys.path.insert(0, {str(tmp_path)!r}); import net_of_mine\n%load_ext autoreload") == []
    file.write_text("def f(): return 22\n")
    assert said(one, "assert net_of_mine.f() == 1") == told, "it is off"
    for mode, value in (("2", 333), ("2", 4444), *[("3", 55555)] * (IPython.version_info >= (8,))):
        assert said(one, f"%autoreload {mode}") == []
        file.write_text(f"def f(): return {value}\n")
        assert said(one, f"assert net_of_mine.f() == {value}") == []
    file.write_text("def f(: return 6666666\n")
    assert said(one, f"assert net_of_mine.f() == {value}") == told
    assert said(one, "%autoreload 0\nsys.path.pop(0); del sys.modules['net_of_mine']") == []


@needs_autoreload
def test_what_autoreload_finds_changed_when_it_is_loaded_is_told(one: WorkerPool, tmp_path: Path) -> None:
    file = tmp_path / "data_of_mine.py"
    file.write_text("x = 1\n")
    assert said(one, f"sys.path.insert(0, {str(tmp_path)!r}); import data_of_mine") == []
    file.write_text("x = 22\n")
    told = said(one, "%reload_ext autoreload\n%autoreload 2\nassert data_of_mine.x == 1")
    assert told == [f"data_of_mine changed on disk {ANEW}"]
    assert said(one, "%autoreload 0\nsys.path.pop(0); del sys.modules['data_of_mine']") == []


def test_a_module_that_another_folder_has_now_is_told(one: WorkerPool, tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "settings_of_mine.py").write_text(f"where = {name!r}\n")
    assert said(one, f"sys.path.insert(0, {str(tmp_path / 'first')!r}); import settings_of_mine") == []
    assert said(one, f"sys.path[0] = {str(tmp_path / 'second')!r}") == []
    moved = f"settings_of_mine would now be imported from another folder {ANEW}"
    assert said(one, "assert settings_of_mine.where == 'first'") == [moved]
    assert said(one, "sys.path.pop(0); del sys.modules['settings_of_mine']") == []


QUIET = "import atexit\natexit.register(list)"
LOUD = "import atexit\natexit.register(print, 'bye')"


def test_exits_that_print_nothing_show_nothing(new_kernel: Kernel) -> None:
    assert new_kernel.run(f"%%ddp --nproc 2\n{QUIET};").ok
    assert new_kernel.run("%ddp restart").outputs == new_kernel.run("%ddp restart").outputs
    assert new_kernel.run(f"%%ddp\n{LOUD};").ok
    shown = new_kernel.run("%ddp stop")
    assert shown.text().splitlines()[0] == "ranks 0–1 │ bye", shown.outputs


def test_breakpoints_that_are_switched_off_do_nothing(one: WorkerPool) -> None:
    code = "os.environ['PYTHONBREAKPOINT'] = '0'; breakpoint(); del os.environ['PYTHONBREAKPOINT']; 'on'"
    assert value(one, code) == "on"


KINDS = """
import abc, dataclasses, enum, os, typing
class Color(enum.Enum):
    RED = 1
    BLUE = "blue"
    def pid(self): return os.getpid()
class Flags(enum.IntFlag):
    A = 1
    B = 2
class Named(abc.ABC):
    @abc.abstractmethod
    def name(self): ...
@dataclasses.dataclass(frozen=True)
class Point(Named):
    x: int
    color: Color = Color.RED
    more: typing.List[int] = dataclasses.field(default_factory=list)
    def name(self) -> str: return f"{self.color} at {self.x}"
class Own:
    rank = int(os.environ["RANK"])
values = [Color.BLUE, Flags.A | Flags.B, Point(1), Color]
values
"""


@pytest.mark.more
def test_values_of_several_ranks_are_equal_where_their_classes_have_one_definition(two: WorkerPool) -> None:
    """Each rank has defined them, and cloudpickle sends them by value."""
    first = two.run_cell(KINDS, want_value=True, screen=NullScreen())
    assert first[0] == first[1]
    assert first[0] == two.pull(["values"])["values"][1]
    two.push({"back": first[1]})
    same = "[type(a) is type(b) for a, b in zip(values, back)]"
    assert list(two.run_cell(same, want_value=True, screen=NullScreen())) == [[True] * 4] * 2
    two.run_cell("values = back", screen=NullScreen())
    again = two.pull(["values"])["values"]
    assert first[0] == again[0] == again[1]
    anew = two.run_cell(KINDS, want_value=True, screen=NullScreen())
    assert anew[0] == anew[1]
    assert anew[0] == two.run_cell(KINDS, want_value=True, screen=NullScreen())[1], "defined anew in the same words"


def test_values_that_come_back_are_of_the_ranks_own_classes_also_after_the_cell_ran_again(two: WorkerPool) -> None:
    for _ in range(2):
        sent = two.run_cell(KINDS, want_value=True, screen=NullScreen())
        two.run_cell("name = Point.name", screen=NullScreen())
        two.push({"back": sent[1]})
        same = "[type(a) is type(b) for a, b in zip(values, back)], Point.name is name"
        assert list(two.run_cell(same, want_value=True, screen=NullScreen())) == [([True] * 4, True)] * 2
        two.run_cell("values = back", screen=NullScreen())
        again = two.pull(["values"])["values"]
        assert sent[0] == again[0] == again[1]


def test_a_class_that_differs_between_ranks_stays_one_of_each(two: WorkerPool) -> None:
    two.run_cell(KINDS, screen=NullScreen())
    assert [kind.rank for kind in two.pull(["Own"])["Own"]] == [0, 1]
    before = two.pull(["Point"])["Point"]
    assert before[0] is before[1]
    two.run_cell("if Own.rank: Point.extra = 5", screen=NullScreen())
    after = two.pull(["Point"])["Point"]
    assert [getattr(kind, "extra", 0) for kind in after] == [0, 5]


def test_a_class_of_the_notebooks_comes_back_as_itself(two: WorkerPool) -> None:
    class Here:
        pass

    two.push({"here": Here()})
    assert [type(value) for value in two.pull(["here"])["here"]] == [Here, Here]
