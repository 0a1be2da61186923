"""A folder of submissions is graded by the checks that learners had: from pytest, from the command line, in Python."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import nbddp
from nbddp.errors import BadInput
from nbddp.teach import check, grade, running
from nbddp.teach.answer import Wrong
from nbddp.teach.submissions import read
from tests.lessons import NOTEBOOKS

ROOT = Path(__file__).parent.parent
LESSON = "02-ranks-and-devices.ipynb"


def notebook(path: Path, *cells: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    nbformat.write(book, path)


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
    "bo-gpus_of": "still to be written",
    "bo-place_of": "still to be written",
    "cy-gpus_of": "the global rank is no device index",
    "cy-place_of": "ok",
    "dee-gpus_of": "cell 1: SyntaxError: expected ':' (line 1)",
    "dee-place_of": "cell 2 raised NameError: name 'missing' is not defined",
    "eve-gpus_of": "not handed in: no cell outside %%ddp defines gpus_of",
    "eve-place_of": "ok",
    "fay-gpus_of": f"{LESSON} is no notebook: it does not hold the JSON of one",
    "fay-place_of": f"{LESSON} is no notebook",
    "gus-gpus_of": "gpus_of(0, 4, 1) raised NameError: name 'START' is not defined (cell 2 computes it, and only",
    "gus-place_of": "name 'nowhere' is not defined (cell 1 raised ModuleNotFoundError: No module named 'nowhere')",
    "hal-gpus_of": "not handed in: there is no notebook in the folder",
    "hal-place_of": "not handed in: there is no notebook in the folder",
    "ida-gpus_of": "not handed in: no cell outside %%ddp defines gpus_of in a.ipynb, b.ipynb",
    "ida-place_of": "ok",
    "jo-gpus_of": "cell 1 raised SystemExit: None",
    "jo-place_of": "ok",
}


def test_every_answer_gets_its_line(pool: nbddp.Pool, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    works = grade.found(folder)
    assert [str(w) for w in works] == sorted(SAYS)
    answers = {str(w): w.check() for w in works}
    for name, says in SAYS.items():
        assert says in answers[name].line, f"{name}: {answers[name].line}"
        assert answers[name].ok == (says == "ok")
    assert capfd.readouterr().out == "", "what is handed in does not print among the marks"


def test_the_table_has_a_row_for_each_answer(pool: nbddp.Pool, folder: Path) -> None:
    table = grade.graded([w for w in grade.found(folder) if w.learner in ("ada", "bo")])
    assert table["learner"] == ["ada", "ada", "bo", "bo"]
    assert table["ok"] == ["yes", "yes", "no", "no"]


def test_an_endless_answer_is_ended_and_the_next_is_graded(
    pool: nbddp.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "DEADLINE", 1.0)
    notebook(tmp_path / "ada.ipynb", "def gpus_of(rank, n, g):\n    while True: pass")
    notebook(tmp_path / "bo.ipynb", "import os\ndef gpus_of(rank, n, g):\n    os._exit(3)")
    (tmp_path / "cy.py").write_text("def gpus_of(rank, n, g):\n    return [rank % n * g + k for k in range(g)]\n")
    lines = [w.check().line for w in grade.found(tmp_path)]
    assert lines[0].startswith("no answer after 1 s")
    assert "its process ended with exit code 3" in lines[1]
    assert lines[2] == "ok"


def test_what_is_asked_for_is_missed(tmp_path: Path) -> None:
    (tmp_path / "ada.py").write_text("x = 1\n")
    (work,) = grade.found(tmp_path, ["accumulate"])
    assert work.check().line == "not handed in: no cell outside %%ddp defines accumulate"
    with pytest.raises(BadInput, match="there is no exercise accumulat;"):
        grade.found(tmp_path, ["accumulat"])
    (tmp_path / "none").mkdir()
    with pytest.raises(BadInput, match="give the folder of the submissions"):
        grade.found(tmp_path / "none")


def test_who_hands_in_twice_has_two_answers(pool: nbddp.Pool, tmp_path: Path) -> None:
    notebook(tmp_path / "ada" / "02.ipynb", "def place_of(r, n): return n, r")
    notebook(tmp_path / "ada" / "02-Copy1.ipynb", "def place_of(r, n): return divmod(r, n)")
    table = grade.graded(grade.found(tmp_path))
    assert table["file"] == ["ada/02-Copy1.ipynb", "ada/02.ipynb"]
    assert table["ok"] == ["yes", "no"]


def test_all_exercises_of_all_lessons_can_be_graded() -> None:
    asked = {m for p in NOTEBOOKS.glob("source/*.py") for m in re.findall(r"check\.(\w+)\(", p.read_text())}
    assert asked <= set(grade.exercises())


def test_a_later_cell_wins_and_calls_are_left_out(tmp_path: Path) -> None:
    notebook(
        tmp_path / "a.ipynb",
        "def f():\n    return 1",
        "%%time\ndef f():\n    return base + 1",
        "base = 1\nbase = print('called')",
        "for base in (5, 6): pass\n!ls",
    )
    found = read(tmp_path / "a.ipynb")
    assert found.defines(["f", "g", "base"]) == ["f", "base"]
    assert found.get("f")() == 2
    with pytest.raises(Wrong, match="not handed in"):
        found.get("g")
    notebook(tmp_path / "b.ipynb", "x = make()", "y = dict(a=1)\nz = {'a': 1}")
    other = read(tmp_path / "b.ipynb")
    assert (other.get("y"), other.get("z")) == ({"a": 1}, {"a": 1}), "what is asked for itself may call"
    with pytest.raises(Wrong, match="cell 1 raised NameError"):
        other.get("x")


def instructors_test() -> str:
    """The test file that the instructor's page shows."""
    page = (NOTEBOOKS / "INSTRUCTORS.md").read_text(encoding="utf-8")
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "grade" in c]
    return str(code)


def test_the_test_file_of_the_instructors_page_grades(folder: Path, tmp_path: Path) -> None:
    code = instructors_test()
    docs = [line.strip() for line in (grade.__doc__ or "").splitlines()]
    assert all(line.strip() in docs for line in code.splitlines()), "the module says the same"
    (tmp_path / "test_submissions.py").write_text(code)
    shutil.copytree(folder, tmp_path / "submissions")
    report = tmp_path / "marks.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    env = {**{k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env, timeout=170, check=False)
    good = sum(says == "ok" for says in SAYS.values())
    assert f"{len(SAYS) - good} failed, {good} passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
    assert "\ngpus_of(4, 4, 1) is [4], right is [0]" in done.stdout, "the line alone, without a traceback"
    assert "Traceback" not in done.stdout
    assert 'name="test_work[cy-gpus_of]"' in report.read_text()


def test_the_command_line_writes_table_and_csv(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nbddp.teach.grade", str(folder), "--nproc", "2", "--csv", str(tmp_path / "m.csv")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=170, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = list(csv.DictReader((tmp_path / "m.csv").read_text(encoding="utf-8").splitlines()))
    assert {f"{r['learner']}-{r['exercise']}": r["ok"] for r in rows} == {
        name: "yes" if says == "ok" else "no" for name, says in SAYS.items()
    }
    assert done.stdout.splitlines()[0].split() == list(grade.COLUMNS)
    assert "looking" not in done.stdout
    (tmp_path / "empty").mkdir()
    done = subprocess.run([*command[:3], "empty"], capture_output=True, text=True, env=env, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "give the folder of the submissions" in done.stderr


def test_the_page_tells_of_every_lesson() -> None:
    page = (NOTEBOOKS / "INSTRUCTORS.md").read_text(encoding="utf-8")
    for number in range(1, 13):
        assert re.search(rf"(?m)^\| {number:02d} ", page), f"no time for lesson {number:02d}"
        assert re.search(rf"(?m)^### {number:02d} ", page), f"nothing to say in lesson {number:02d}"
    for path in NOTEBOOKS.glob("source/*.py"):
        for name in re.findall(r"check\.(\w+)\(", path.read_text()):
            assert isinstance(getattr(check, name), check.Exercise)


def test_the_pages_sessions_last_no_longer_than_they_say() -> None:
    page = (NOTEBOOKS / "INSTRUCTORS.md").read_text(encoding="utf-8")
    minutes = {n: int(m) for n, m in re.findall(r"(?m)^\| (\d\d) [^|]*\|[^|]*\| (\d+) \|", page)}
    (plan,) = re.findall(r"sessions of (\d+) minutes hold them all: ([^.]*)\.", page)
    sessions = [re.findall(r"\d\d", part) for part in plan[1].split("·")]
    assert [n for session in sessions for n in session] == sorted(minutes)
    assert all(sum(minutes[n] for n in session) <= int(plan[0]) for session in sessions)
    assert (
        f"{['', 'One', 'Two', 'Three', 'Four', 'Five', 'Six', 'Seven', 'Eight', 'Nine'][len(sessions)]} sessions"
        in page
    )
