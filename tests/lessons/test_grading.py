"""A folder of submissions is graded by the checks that learners had: from pytest, from the command line, in Python."""

from __future__ import annotations

import csv
import json
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import nbformat
import psutil
import pytest

from nbddp.errors import BadInput
from nbddp.grading import gradebook, json_values
from nbddp.grading.definitions import take
from nbddp.grading.sandbox.client import Server
from nbddp.grading.submissions import cells_of, defined
from nbddp.lessons.framework.answer import Wrong
from nbddp.teach import check, grade
from tests import places
from tests.lessons.answers import NOTEBOOKS
from tests.unit.test_grading import RIGHT
from tests.waiting import until

ROOT = places.ROOT
LESSON = "02-ranks-and-devices.ipynb"


def notebook(path: Path, *cells: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    nbformat.write(book, path)


@pytest.fixture(scope="module")
def grader() -> Iterator[grade.Grader]:
    """A warm grader whose learners get two ranks each, for all tests of this file."""
    with grade.ranks(2) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Submissions to lesson 02, right and wrong ones."""
    made = tmp_path_factory.mktemp("all the submissions")
    shutil.copytree(NOTEBOOKS / "solutions", made / "ada", ignore=lambda _, names: [n for n in names if n != LESSON])
    (made / "bo").mkdir()
    shutil.copy(NOTEBOOKS / LESSON, made / "bo")
    notebook(
        made / "cy" / LESSON,
        "%load_ext nbddp\nfrom math import floor",
        "%%ddp --nproc 2\nraise SystemExit",
        "STEP = 1",
        "def place_of(rank, n):\n    return floor(rank / n), rank % n",
        "check.place_of(place_of)",
        "raise RuntimeError('cells that are no definitions are not run')",
        "def gpus_of(rank, n, g):\n    print('looking')\n    return [rank * STEP]\n%ddp status\nplace_of?",
    )
    notebook(
        made / "dee" / LESSON, "def gpus_of(rank, n, g)\n    return []", "def place_of(a, b=missing):\n    return a"
    )
    notebook(
        made / "eve" / LESSON,
        "%%ddp\ndef gpus_of(rank, n, g):\n    return []",
        "def place_of(r, n): return divmod(r, n)",
    )
    (made / "fay").mkdir()
    (made / "fay" / LESSON).write_text("{ not a notebook")
    notebook(
        made / "gus" / LESSON,
        "import nowhere",
        "START = sum([0])\ndef gpus_of(rank, n, g):\n    return [START]",
        "def place_of(rank, n):\n    return nowhere.divmod(rank, n)",
    )
    (made / "hal" / "empty").mkdir(parents=True)
    notebook(made / "ida" / "a.ipynb", "x = 1")
    notebook(made / "ida" / "b.ipynb", "def place_of(r, n): return divmod(r, n)")
    notebook(
        made / "jo" / "renamed (1).ipynb",
        "def gpus_of(rank, n, g=exit()): return []",
        "def place_of(r, n): return divmod(r, n)",
    )
    (made / ".ipynb_checkpoints").mkdir()
    shutil.copy(NOTEBOOKS / LESSON, made / ".ipynb_checkpoints")
    return made


SAYS = {
    "ada-gpus_of": "ok",
    "ada-place_of": "ok",
    "bo-gpus_of": "have not written",
    "bo-place_of": "have not written",
    "cy-gpus_of": "the global rank is not a device index",
    "cy-place_of": "ok",
    "dee-gpus_of": "cell 1: SyntaxError: expected ':' (line 1)",
    "dee-place_of": "cell 2 raised NameError: name 'missing' is not defined",
    "eve-gpus_of": "not handed in: no cell outside %%ddp defines gpus_of",
    "eve-place_of": "ok",
    "fay-gpus_of": f"{LESSON} is not a notebook: it does not contain notebook JSON",
    "fay-place_of": f"{LESSON} is not a notebook",
    "gus-gpus_of": "gpus_of(0, 4, 1) raised NameError: name 'START' is not defined (cell 2 computes it, but only",
    "gus-place_of": "name 'nowhere' is not defined (cell 1 raised ModuleNotFoundError: No module named 'nowhere')",
    "hal-gpus_of": "not handed in: there is no notebook in the folder",
    "hal-place_of": "not handed in: there is no notebook in the folder",
    "ida-gpus_of": "not handed in: no cell outside %%ddp defines gpus_of in a.ipynb, b.ipynb",
    "ida-place_of": "ok",
    "jo-gpus_of": "cell 1 raised SystemExit: None",
    "jo-place_of": "ok",
}


def test_every_answer_gets_its_line_in_the_table(
    grader: grade.Grader, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    works = grade.found(folder)
    assert [str(w) for w in works] == sorted(SAYS)
    table = grade.graded(works)
    assert [*map("-".join, zip(table["learner"], table["exercise"], strict=True))] == sorted(SAYS)
    for work, ok, line in zip(works, table["ok"], table["says"], strict=True):
        says = SAYS[str(work)]
        assert says in line, f"{work}: {line}"
        assert ok == ("yes" if says == "ok" else "no")
    assert capfd.readouterr().out == "", "what is handed in does not print among the marks"


def test_an_endless_answer_is_ended_and_the_next_is_graded(
    grader: grade.Grader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grader, "deadline", 1.0)
    grader.end_sitting()  # of a learner of this name, with another deadline
    notebook(tmp_path / "ada.ipynb", "def gpus_of(rank, n, g):\n    while True: pass")
    notebook(tmp_path / "bo.ipynb", "import os\ndef gpus_of(rank, n, g):\n    os._exit(3)")
    (tmp_path / "cy.py").write_text("def gpus_of(rank, n, g):\n    return [rank % n * g + k for k in range(g)]\n")
    lines = [w.check().line for w in grade.found(tmp_path)]
    assert lines[0].startswith("no answer after 1 s")
    assert "its process exited with code 3" in lines[1]
    assert lines[2] == "ok"


SHARED = """
import mmap, os, time
def place_of(rank, n):
    for _ in range(6):
        if not os.fork():
            held = mmap.mmap(-1, 100 << 20)
            held.write(bytes(100 << 20))
            time.sleep(60)
            os._exit(0)
    time.sleep(60)
"""


def test_processes_of_all_together_are_bounded(grader: grade.Grader, tmp_path: Path) -> None:
    """Each goes on where its parent does, and forks at every later call: one by one they could not be ended."""
    (tmp_path / "many.py").write_text("import os\ndef place_of(rank, n):\n    os.fork()\n    return divmod(rank, n)\n")
    (work,) = grade.found(tmp_path)
    assert work.check().line == "its ranks had more than 50 processes, and were stopped"


def test_memory_of_all_together_is_bounded(
    grader: grade.Grader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is memory that no limit of a process's counts."""
    monkeypatch.setattr(grader, "memory", 256 << 20)
    (tmp_path / "much.py").write_text(SHARED)
    (work,) = grade.found(tmp_path)
    assert work.check().line == "its ranks held more than 768 MiB of memory, and were stopped"


def test_a_daemon_ends_with_its_learner(grader: grade.Grader, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    (tmp_path / "daemon.py").write_text(f"PID, MARKS = {str(pid)!r}, {str(tmp_path / 'marks')!r}\n{FORKS_TWICE}{RIGHT}")
    (work,) = grade.found(tmp_path)
    assert work.check().ok
    until(lambda: bool(pid.read_text()))
    daemon = psutil.Process(int(pid.read_text()))
    grader.end_sitting()
    assert not daemon.is_running()


STOPPED = """
import time
def gpus_of(rank, n, g):
    open(BEGUN, "w").close()
    time.sleep(99)
def place_of(rank, n):
    return divmod(rank, n)
"""


def test_stop_amid_an_answer_leaves_no_answer_for_the_next(grader: grade.Grader, tmp_path: Path) -> None:
    """In a notebook the grader outlives Stop; the verdict that was not waited for is nobody else's."""
    begun = tmp_path / "begun"
    (tmp_path / "ada.py").write_text(f"BEGUN = {str(begun)!r}{STOPPED}")
    works = {w.exercise: w for w in grade.found(tmp_path)}

    def stop() -> None:
        until(begun.exists)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    stopping = threading.Thread(target=stop)
    try:
        stopping.start()
        with pytest.raises(KeyboardInterrupt):
            works["gpus_of"].check()
    finally:
        stopping.join()
        signal.signal(signal.SIGINT, before)
    assert works["place_of"].check().line == "ok"


def test_a_stop_that_goes_to_every_process_ends_none(grader: grade.Grader, tmp_path: Path) -> None:
    (tmp_path / "ada.py").write_text(RIGHT)
    (work,) = grade.found(tmp_path)
    assert work.check().ok
    below = psutil.Process(grader.server.process.pid).children(recursive=True)
    for process in (grader.server.process, *below):
        os.kill(process.pid, signal.SIGINT)
    assert work.check().ok
    assert {p.pid for p in below} <= {p.pid for p in psutil.Process(grader.server.process.pid).children(recursive=True)}


def test_a_stop_while_the_warm_process_starts_does_not_end_it() -> None:
    server = Server()
    ready = threading.Event()

    def stop() -> None:
        while not ready.wait(0.01):
            os.kill(server.process.pid, signal.SIGINT)

    stopping = threading.Thread(target=stop)
    stopping.start()
    try:
        assert server.ask({"op": "warm", "modules": ["json"], "spared": []}, 60)["missing"] == ""
    finally:
        ready.set()
        stopping.join()
        server.close()


def test_a_sandbox_that_ends_with_its_parent_does_not_end_with_a_thread() -> None:
    """`bwrap --die-with-parent` means the thread that started it, and threads come and go with learners."""
    if shutil.which("setpriv") is None:
        pytest.skip("there is no setpriv here")
    with grade.ranks(2, sandbox=["setpriv", "--pdeathsig", "KILL"]) as own:
        own.server.process.kill()
        own.server.process.wait()
        order, threads = {"op": "warm", "modules": [], "spared": []}, []

        def revive() -> None:
            threads.append(threading.get_native_id())
            own.revive()
            own.server.ask(order, 60)

        threading.Thread(target=revive).start()
        until(lambda: bool(threads) and not Path(f"/proc/self/task/{threads[0]}").exists())
        assert own.server.ask(order, 60)["missing"] == ""


def test_what_is_asked_for_is_missed(tmp_path: Path) -> None:
    (tmp_path / "ada.py").write_text("x = 1\n")
    (work,) = grade.found(tmp_path, ["accumulate"])
    assert work.check().line == "not handed in: no cell outside %%ddp defines accumulate"
    with pytest.raises(BadInput, match="there is no exercise 'accumulat';"):
        grade.found(tmp_path, ["accumulat"])
    (tmp_path / "none").mkdir()
    with pytest.raises(BadInput, match="give the folder of the submissions"):
        grade.found(tmp_path / "none")


def test_who_hands_in_twice_has_two_answers(grader: grade.Grader, tmp_path: Path) -> None:
    notebook(tmp_path / "ada" / "02.ipynb", "def place_of(r, n): return n, r")
    notebook(tmp_path / "ada" / "02-Copy1.ipynb", "def place_of(r, n): return divmod(r, n)")
    table = grade.graded(grade.found(tmp_path))
    assert table["file"] == ["ada/02-Copy1.ipynb", "ada/02.ipynb"]
    assert table["ok"] == ["yes", "no"]


def test_all_exercises_of_all_lessons_can_be_graded() -> None:
    asked = {m for p in NOTEBOOKS.glob("source/*.py") for m in re.findall(r"check\.(\w+)\(", p.read_text())}
    assert asked <= set(grade.exercises())


def cells(path: Path) -> list[tuple[str, str]]:
    return cells_of(path.suffix, path.read_text())


def test_a_later_cell_wins_and_calls_are_left_out(tmp_path: Path) -> None:
    notebook(
        tmp_path / "a.ipynb",
        "def f():\n    return 1",
        "%%time\ndef f():\n    return base + 1",
        "base = 1\nbase = print('called')",
        "for base in (5, 6): pass\n!ls",
    )
    found = cells(tmp_path / "a.ipynb")
    assert defined(found, ["f", "g", "base"]) == ["f", "base"]
    assert take(found, "f")() == 2
    with pytest.raises(Wrong, match="not handed in"):
        take(found, "g")
    notebook(tmp_path / "b.ipynb", "x = make()", "y = dict(a=1)\nz = {'a': 1}")
    other = cells(tmp_path / "b.ipynb")
    assert (take(other, "y"), take(other, "z")) == ({"a": 1}, {"a": 1}), "what is asked for itself may call"
    with pytest.raises(Wrong, match="cell 1 raised NameError"):
        take(other, "x")


WRONG = "def place_of(rank, n):\n    return rank, n\n"
SECRET = "hunter2"
PATCHES = """
class Patched:
    import builtins, torch
    import nbddp.lessons.framework.answer as answer
    import nbddp.lessons.framework.tables as tables
    import nbddp.lessons.framework.run_check as running
    answer.Exercise.__call__ = answer.Exercise._line = lambda *a, **k: answer.Answer(True, "ok")
    tables.Table.judge = running.on_ranks = lambda *a, **k: "ok"
    tables.same = torch.equal = torch.allclose = lambda *a, **k: True
"""
PATCHED_RANK = """
import nbddp.lessons.l05_averaging_gradients.on_rank as rank
class Patched:
    rank._gradients = lambda model: {n: [1.0] * p.numel() for n, p in model.named_parameters()}
def average_gradients(model):
    pass
"""
KILLS = """
import os
def place_of(rank, n):
    above, pid = [], os.getppid()
    while b"nbddp.teach.grade" not in open(f"/proc/{pid}/cmdline", "rb").read():
        above.append(pid)
        pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
    if not os.fork():  # what outlives them makes their folder again
        os.setsid()
        while True:
            os.makedirs(os.environ["NBDDP_RUNTIME_DIR"], exist_ok=True)
    for pid in reversed(above):
        os.kill(pid, 9)
"""
EVIL = """
import pickle
class Evil:
    def __reduce__(self):
        return open, (MARK, "w")
"""
FORGES = (
    EVIL
    + """
import nbddp.grading.json_values as answers
class Patched:
    answers.write = lambda value: pickle.dumps(Evil())
"""
)
SENDS_PICKLES = (
    EVIL
    + """
from IPython import get_ipython
class Sent:
    kernel, bad = get_ipython().kernel, pickle.dumps(Evil())
    for kind in ("data_message", "apply_reply", "execute_result"):
        kernel.session.send(kernel.iopub_socket, kind, {"status": "ok"}, parent=kernel._parent, buffers=[bad])
"""
)
FORKS_TWICE = """
import os, time
class Daemon:
    if os.environ["RANK"] == "0" and not os.fork():
        os.setsid()
        if not os.fork():
            open(PID, "w").write(str(os.getpid()))
            while True:
                open(MARKS, "w").write("learner,exercise,ok,file,says,digest\\nforks twice,place_of,yes,x,ok,y\\n")
                time.sleep(0.01)
        os._exit(0)
"""
TELLS_WHERE = """
import os
def told(function):
    open(f"{WHERE}.{os.getpid()}", "w").write(open("/proc/self/stat").read())
    return function
@told
def place_of(rank, n):
    return divmod(rank, n)
"""
ATTACKS = {  # learner → what is in the file, what is said of place_of
    "class body": (PATCHES + WRONG, "place_of(0, 4): expected [0, 0], got [0, 4]"),
    "exits": (
        f"import os\nclass A:\n    os._exit(0)\n{RIGHT}",
        "when its cells were run: every rank called sys.exit()",
    ),
    "forges": (FORGES + RIGHT, "a rank sent no valid answer"),
    "sends pickles": (SENDS_PICKLES + RIGHT, "ok"),
    "forks twice": (FORKS_TWICE + WRONG, "place_of(0, 4): expected [0, 0], got [0, 4]"),
    "=1+1": (TELLS_WHERE, "ok"),
    "endless class": (
        f"class A:\n    while True: pass\n{RIGHT}{PATCHED_RANK}",
        "when its cells were run: no answer after 2 s",
    ),
    "patched rank": (RIGHT + PATCHED_RANK, "ok"),
    "x kills": (KILLS, "no verdict: the process that judges it"),
    "z after that": (WRONG, "place_of(0, 4): expected [0, 0], got [0, 4]"),
}
ODD = {  # exercise → what its function does, what is said of it
    "gpus_of": ("raise ValueError(chr(0xd800))", "raised ValueError: \\ud800"),
    "pack": (r"raise ValueError('\x1b[2J\x1b[31mred\x07\u202e')", "raised ValueError: red"),
    "exposed": ("return chr(0xd800)", "got '\\\\ud800'"),
    "nodes_of": ("a = []\nfor _ in range(9999): a = [a]\nreturn a", "raised RecursionError"),
    "missing_ranks": ("a = ()\nfor _ in range(99): a = (a,)\nreturn a", "TooMuch: the answer has more than 50 lists"),
    "bytes_per_rank": ("return 'x' * (1 << 20)", "TooMuch: the answer takes"),
    "variables_of": ("return bytearray(3 << 30)", "it raised MemoryError"),
    "share_of": (
        "with open('large', 'wb') as f:\n    f.truncate(1 << 30)",
        "raised OSError: [Errno 27] File too large",
    ),
    "by_rank": ("import time\nwhile True: time.sleep(0.01)", "no answer after 2 s"),
    "by_size": (
        "import subprocess\nreturn [subprocess.Popen(['sleep', '600']).pid for _ in range(99)]",
        "its ranks had more than 50 processes, and were stopped",
    ),
    "by_host": (
        "import glob, os, socket\nagent = socket.socket(socket.AF_UNIX)\n"
        "agent.connect(*glob.glob(os.environ['NBDDP_RUNTIME_DIR'] + '/nbddp-*/*/agent.sock'))\n"
        'agent.sendall(b\'{"op": "stop"}\\n\')\nreturn agent.recv(999).decode()',
        "this agent takes orders only from its owner",
    ),
    "by_address": (
        "import os\nseen, pid = ['own'] * ('MY_SECRET' in os.environ), os.getpid()\nwhile pid > 1:\n"
        "    try: seen += ['above'] * ('MY_SECRET' in open(f'/proc/{pid}/environ', errors='replace').read())\n"
        "    except PermissionError: pass\n"
        "    pid = int(open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1])\nreturn seen",
        f"by_address(0, 0) is {[] if os.geteuid() else ['above']}",
    ),
}
UNPARSED = {  # exercise → what stands in its cell, what is said of it
    "place_of": (f"x = {'-' * 100_000}1", "cell 1: it is nested too deeply to be read"),
    "gpus_of": (f"x = {'[' * 100_000}", "cell 2: SyntaxError: too many nested parentheses"),
    "pack": ("x = 1\0", "null bytes"),
    "exposed": ("x = '\ud800'", "cell 4: it cannot be read as Python"),
}


@dataclass(frozen=True)
class Graded:
    """A run of the command: its exit status, process, output, and the rows of the file that it wrote."""

    code: int
    pid: int
    out: str
    err: str
    rows: dict[tuple[str, str], dict[str, str]]
    folder: Path


def run(folder: Path, *options: str, env: Mapping[str, str] = {}) -> Graded:
    """Grade `folder/submissions` into `folder/marks.csv`."""
    command = [sys.executable, "-m", "nbddp.teach.grade", "submissions", "--csv", "marks.csv", "--nproc", "2", *options]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )  # fmt: skip
    out, err = process.communicate(timeout=170)
    return Graded(process.returncode, process.pid, out, err, rows_of(folder / "marks.csv"), folder)


def rows_of(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    rows = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    return {(r["learner"], r["exercise"]): r for r in rows}


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Graded:
    """All attacks, graded two at a time: who kills what is above also hits the other, who is tried again alone."""
    folder = tmp_path_factory.mktemp("attacked")
    (folder / "submissions").mkdir()
    names = {"MARK": "pickled", "PID": "pid", "MARKS": "marks.csv", "WHERE": "where"}
    paths = "".join(f"{name} = {str(folder / file)!r}\n" for name, file in names.items())
    for learner, (text, _) in ATTACKS.items():
        (folder / "submissions" / f"{learner}.py").write_text(paths + text)
    odd = "".join(f"def {name}(*args):\n{textwrap.indent(body, '    ')}\n" for name, (body, _) in ODD.items())
    (folder / "submissions" / "odd.py").write_text(odd)
    cells = [{"cell_type": "code", "source": f"{x}\ndef {name}(): pass"} for name, (x, _) in UNPARSED.items()]
    (folder / "submissions" / "unparsed.ipynb").write_text(json.dumps({"cells": cells}))
    deep = '{"cells": ' + "[" * 100_000 + "]" * 100_000 + "}"
    (folder / "submissions" / "deep notebook.ipynb").write_text(deep)
    (folder / "submissions" / "link.py").symlink_to(folder / "submissions" / "patched rank.py")
    os.mkfifo(folder / "submissions" / "pipe.py")
    options = ("--deadline", "2", "--jobs", "2", "--wide", "wide.csv", "--feedback", "told")
    with tempfile.TemporaryDirectory() as short:
        made = run(folder, *options, env={"MY_SECRET": SECRET, "TMPDIR": short})
        assert made.err.count(" ok") >= len(ATTACKS), made.err
        assert os.listdir(short) == [], "nothing is left of examinations"
    return made


@pytest.mark.parametrize("learner", ATTACKS)
def test_attacks_get_the_answer_that_they_deserve(attacked: Graded, learner: str) -> None:
    _, says = ATTACKS[learner]
    row = attacked.rows[f"'{learner}" if learner == "=1+1" else learner, "place_of"]
    assert says in row["says"], row["says"]
    assert row["ok"] == ("yes" if says == "ok" else "error" if says.startswith("no verdict") else "no")


@pytest.mark.parametrize(
    ("learner", "exercise", "says"),
    [("odd", name, says) for name, (_, says) in ODD.items()]
    + [("unparsed", name, says) for name, (_, says) in UNPARSED.items()],
)
def test_odd_answers_are_answers(attacked: Graded, learner: str, exercise: str, says: str) -> None:
    row = attacked.rows[learner, exercise]
    assert says in row["says"], row["says"]
    assert row["ok"] == "no"


def test_every_learner_has_a_row_for_every_exercise_and_the_exit_status_says_what_is_missing(attacked: Graded) -> None:
    learners = {learner for learner, _ in attacked.rows}
    assert len(learners) == len(ATTACKS) + 5
    assert len(attacked.rows) == len({*ODD, *UNPARSED, "average_gradients"}) * len(learners)
    assert attacked.code == 1
    assert "answers have no verdict (error); --resume tries them again" in attacked.err
    said = {learner: row["says"] for (learner, exercise), row in attacked.rows.items() if exercise == "place_of"}
    assert said["deep notebook"] == "deep notebook.ipynb is not a notebook: it does not contain notebook JSON"
    assert said["link"].startswith("link.py is a link; hand in the file itself")
    assert said["pipe"] == "pipe.py is not a file"


def test_nothing_of_a_learners_runs_in_the_grader(attacked: Graded) -> None:
    ran = [path.read_text().split() for path in attacked.folder.glob("where.*")]
    assert ran
    assert all(attacked.pid not in (int(pid), int(parent)) for pid, _, _, parent, *_ in ran)


def test_what_is_right_comes_from_ranks_that_no_learner_has_patched(attacked: Graded) -> None:
    row = attacked.rows["patched rank", "average_gradients"]
    assert (row["ok"], "yours is" in row["says"]) == ("no", True), row


def test_no_learner_sees_the_graders_variables(attacked: Graded) -> None:
    files = [p.read_text() for p in (attacked.folder / "told").iterdir()]
    assert not any(SECRET in text for text in (attacked.out, attacked.err, str(attacked.rows), *files))


def test_no_pickle_of_a_learners_is_loaded(attacked: Graded) -> None:
    assert not (attacked.folder / "pickled").exists()


def test_who_forks_twice_is_gone_and_has_not_changed_the_marks(attacked: Graded) -> None:
    assert not psutil.pid_exists(int((attacked.folder / "pid").read_text()))
    assert "marks.csv was changed by another process while " in attacked.err
    assert attacked.rows["forks twice", "place_of"]["ok"] == "no"


def test_no_file_of_ours_holds_a_formula_or_a_control_character(attacked: Graded) -> None:
    files = [attacked.folder / "marks.csv", attacked.folder / "wide.csv", *(attacked.folder / "told").iterdir()]
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text.replace("\r\n", "\n")), path
        cells = [cell for row in csv.reader(text.splitlines()) for cell in row]
        assert path.suffix != ".csv" or not any(cell.startswith(("=", "+", "-", "@")) for cell in cells)
    (formula,) = [row for row in csv.DictReader(files[1].read_text().splitlines()) if row["learner"] == "'=1+1"]
    assert (formula["place_of"], formula["total"]) == ("1", "1")
    assert len(list((attacked.folder / "told").iterdir())) == len(ATTACKS) + 5


@pytest.mark.lessons
def test_ctrl_c_keeps_what_is_known_and_resume_goes_on(tmp_path: Path) -> None:
    sent = tmp_path / "submissions"
    slow = "import time\ndef place_of(rank, n):\n    time.sleep(99)\n"
    for learner, text in {"abe": RIGHT, "ada": RIGHT, "al": RIGHT, "bo": slow, "cy": WRONG}.items():
        notebook(sent / learner / "a.ipynb", text)
    command = [sys.executable, "-m", "nbddp.teach.grade", "submissions", "--csv", "marks.csv", "--nproc", "2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    begun = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    until(lambda: ("al", "place_of") in rows_of(tmp_path / "marks.csv"))
    begun.send_signal(signal.SIGINT)
    out, err = begun.communicate(timeout=60)
    assert begun.returncode == 130, err
    assert "stopped; 3 of 5 answers have their verdicts; --resume continues" in err
    assert re.search(r"(?m)^al +place_of +yes", out)
    assert list(rows_of(tmp_path / "marks.csv")) == [(learner, "place_of") for learner in ("abe", "ada", "al")]
    shutil.rmtree(sent / "abe")
    notebook(sent / "al" / "a.ipynb", WRONG)
    notebook(sent / "bo" / "a.ipynb", RIGHT)
    more = run(tmp_path, "--resume", "--jobs", "2", "--summary", "summary.csv", "--feedback", "told")
    assert more.code == 0, more.err
    assert "1 of 4 learners already have all their verdicts, and unchanged files" in more.err
    assert re.search(r"(?m)^[1-3] of 3: bo, 1 of 1 ok", more.err)
    ok = {learner: row["ok"] for (learner, _), row in more.rows.items()}
    assert ok == {"ada": "yes", "al": "no", "bo": "yes", "cy": "no"}
    (summary,) = csv.DictReader((tmp_path / "summary.csv").read_text().splitlines())
    assert (summary["answers"], summary["ok"], summary["times"]) == ("4", "2", "2")
    assert summary["most frequent message"] == more.rows["cy", "place_of"]["says"]
    told = (tmp_path / "told" / "cy.txt").read_text()
    assert told.startswith("cy: 0 of 1 exercises are right\n")
    assert more.rows["cy", "place_of"]["says"] in told
    (tmp_path / "marks.csv").write_text("learner,marks\nada,10\n")
    refused = subprocess.run([*command, "--resume"], cwd=tmp_path, capture_output=True, text=True, env=env, check=False)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "was not written by this command, so it cannot be resumed" in refused.stderr
    (tmp_path / "file").touch()
    for option, path in (("--wide", "nowhere/w.csv"), ("--summary", "submissions"), ("--feedback", "file")):
        refused = subprocess.run([*command, option, path], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "cannot be " in refused.stderr
    assert (tmp_path / "marks.csv").read_text() == "learner,marks\nada,10\n", "nothing has begun"


@pytest.mark.parametrize("room", [0, 10], ids=["for nothing", "for a part of a row"])
def test_a_full_disk_loses_no_row(tmp_path: Path, room: int) -> None:
    book = gradebook.Book(tmp_path / "marks.csv")
    rows = [gradebook.GradeRow(f"learner {n}", "place_of", "yes", "a.py", "ok", "sha256:0") for n in range(4)]
    book.add(rows[0])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "marks.csv").stat().st_size + room, before[1]))
    try:
        book.add(rows[1])
        assert book.lacks
        book.add(rows[2])
        assert book.check(), "nobody else has changed it"
        assert book.lacks
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
        with pytest.raises(BadInput, match=r"other.csv cannot be written: File too large"):
            gradebook.Book(tmp_path / "other.csv")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    book.add(rows[3])
    assert book.check()
    assert not book.lacks
    assert (
        sorted(book.rows) == sorted(gradebook.Book(tmp_path / "marks.csv", resume=True).rows) == [r.key for r in rows]
    )
    assert [p.name for p in tmp_path.iterdir()] == ["marks.csv"]


def test_a_row_that_was_cut_through_is_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "marks.csv"
    book = gradebook.Book(path)
    for learner in ("ada", "bo"):
        book.add(gradebook.GradeRow(learner, "place_of", "yes", "a.py", "ok", "sha256:0"))
    path.write_bytes(path.read_bytes()[:-3])
    assert [learner for learner, _, _ in gradebook.Book(path, resume=True).rows] == ["ada"]


ANSWERS = [None, True, 1, -(1 << 200), 1.5, float("inf"), "é\n", [1, [2]], (1, (2, [3])), {1: "a", None: (2,)}, []]


@pytest.mark.parametrize("answer", ANSWERS, ids=repr)
def test_an_answer_travels_as_it_is(answer: object) -> None:
    assert repr(json_values.read(json_values.write(answer))) == repr(answer)


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b'{"x": []}', b'{"t": 1}', b'{"d": [[[1], 2]]}', b'{"d": [1]}', b'{"i": "0x" }', b'{"s": 1}',
     b"[" * 9999, b"[" * 60 + b"]" * 60, b'{"t": [], "d": []}', b"1" * 9999, b'"' + b"x" * (5 << 20) + b'"',
     pickle.dumps([1])],
)  # fmt: skip
def test_what_is_no_answer_is_refused(data: bytes) -> None:
    with pytest.raises(BadInput, match="a rank"):
        json_values.read(data)


def test_help_tells_all() -> None:
    text = grade.parser().format_help()
    page = (NOTEBOOKS / "INSTRUCTORS.md").read_text(encoding="utf-8")
    for option in re.findall(r"--[a-z]+", text):
        assert option in page or option in ("--help",), option


TRIES = """
import os, socket
def tried():
    yield lambda: open(OUTSIDE).read()
    yield lambda: open(MARKS, "w").write("nonsense")
    yield lambda: open(os.path.join(os.path.dirname(os.__file__), "new"), "w").close()
    yield lambda: socket.create_connection(("192.0.2.1", 80), timeout=1)
    yield lambda: os.kill(GRADER, 0)
def outcome(attempt):
    try:
        attempt()
    except OSError as error:
        return type(error).__name__
    return "done"
def place_of(rank, n):
    return [outcome(attempt) for attempt in tried()]
"""


def sandboxed() -> str:
    """The command of the instructor's page that grades in a sandbox."""
    page = (NOTEBOOKS / "INSTRUCTORS.md").read_text(encoding="utf-8")
    (command,) = [c for c in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "--sandbox" in c]
    return str(command)


@pytest.mark.more
def test_the_sandbox_of_the_instructors_page_closes_what_an_account_leaves_open(tmp_path: Path) -> None:
    able = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
    if shutil.which("bwrap") is None or subprocess.run(able, capture_output=True, check=False).returncode:
        pytest.skip("bubblewrap is not installed, or may not be used here")
    home = tmp_path / "home of a teacher"
    home.mkdir()
    (home / "secret").write_text(SECRET)
    names = {"OUTSIDE": str(home / "secret"), "MARKS": str(tmp_path / "marks.csv"), "GRADER": os.getpid()}
    text = "".join(f"{name} = {value!r}\n" for name, value in names.items()) + TRIES
    notebook(tmp_path / "submissions" / "ada.ipynb", text)
    notebook(tmp_path / "submissions" / "bo.ipynb", RIGHT)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(home), "PATH": path}
    checkout = f" --ro-bind '{ROOT}' '{ROOT}'\""  # which may lie below /tmp; the page says that it needs this then
    line = sandboxed().rstrip().removesuffix('"') + checkout + " --nproc 2"
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True,
        timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "marks.csv")
    came_of_it = "['FileNotFoundError', 'done', 'OSError', 'OSError', 'ProcessLookupError']"
    assert came_of_it in rows["ada", "place_of"]["says"], rows["ada", "place_of"]["says"]
    assert "changed" not in done.stderr, "what was written is a file of the sandbox's own"
    assert rows["bo", "place_of"]["ok"] == "yes"


def instructors_test() -> str:
    """The test file that the instructor's page shows."""
    page = (NOTEBOOKS / "INSTRUCTORS.md").read_text(encoding="utf-8")
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "grade" in c]
    return str(code)


@pytest.mark.lessons
def test_the_test_file_of_the_instructors_page_grades(folder: Path, tmp_path: Path) -> None:
    code = instructors_test()
    docs = [line.strip() for line in (grade.__doc__ or "").splitlines()]
    assert all(line.strip() in docs for line in code.splitlines()), "the module says the same"
    (tmp_path / "test_submissions.py").write_text(code)
    says = {name: text for name, text in SAYS.items() if name.startswith(("ada-", "cy-", "jo-"))}
    for learner in ("ada", "cy", "jo"):
        shutil.copytree(folder / learner, tmp_path / "submissions" / learner)
    report = tmp_path / "marks.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    env = {**{k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env, timeout=170, check=False)
    good = sum(text == "ok" for text in says.values())
    assert f"{len(says) - good} failed, {good} passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
    assert "\ngpus_of(4, 4, 1): expected [0], got [4]" in done.stdout, "the line alone, without a traceback"
    assert "Traceback" not in done.stdout
    assert 'name="test_work[cy-gpus_of]"' in report.read_text()


def test_the_command_line_writes_table_and_csv(folder: Path, tmp_path: Path) -> None:
    some = ("ada", "fay")
    for learner in some:
        shutil.copytree(folder / learner, tmp_path / "in" / learner)
    command = [sys.executable, "-m", "nbddp.teach.grade", "in", "--nproc", "2", "--csv", "m.csv", "--jobs", "2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=170, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = list(csv.DictReader((tmp_path / "m.csv").read_text(encoding="utf-8").splitlines()))
    assert {f"{r['learner']}-{r['exercise']}": r["ok"] for r in rows} == {
        name: "yes" if says == "ok" else "no" for name, says in SAYS.items() if name.split("-")[0] in some
    }
    assert done.stdout.splitlines()[0].split() == list(grade.COLUMNS)
    assert "looking" not in done.stdout
    (tmp_path / "empty").mkdir()
    done = subprocess.run([*command[:3], "empty"], capture_output=True, text=True, env=env, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "give the folder of the submissions" in done.stderr
    command = [*command[:4], "--sandbox", f"{tmp_path}/no-such-program --unshare-all"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no-such-program could not be started: [Errno 2]" in done.stderr


def test_the_page_tells_of_every_lesson() -> None:
    page = (NOTEBOOKS / "INSTRUCTORS.md").read_text(encoding="utf-8")
    for number in range(1, len(list(NOTEBOOKS.glob("source/*.py"))) + 1):
        assert re.search(rf"(?m)^\| {number:02d} ", page), f"no time for lesson {number:02d}"
        assert re.search(rf"(?m)^### {number:02d} ", page), f"nothing to say in lesson {number:02d}"
    for path in NOTEBOOKS.glob("source/*.py"):
        for name in re.findall(r"check\.(\w+)\(", path.read_text()):
            assert isinstance(getattr(check, name), check.Exercise)
