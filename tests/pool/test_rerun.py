"""Lessons as they are really used: every cell is run twice, and every exercise gets an answer in which one rank's
process is killed, and one that hangs.

Solved lessons are run. After a check that has cost names, the cells that its line names are run again, and the rest of
the lesson works. Some minutes for all, run by `-m lessons`; one is always run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernels import Kernel, Shown
from tests.lessons.answers import SOURCES, builder, is_ok

ALWAYS = ("01",)
LESSONS = [s if s.name[:2] in ALWAYS else pytest.param(s, marks=pytest.mark.lessons) for s in SOURCES]
CHECK = re.compile(r"^check\.(\w+)\((\w+)\)", re.M)
AGAIN = re.compile(r"In\[(\d+)\]")
KILLED = """
def killed(*args, **kwargs):
    import os, signal
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
check.{}(killed)
"""
HANGING = """
def hanging(*args, **kwargs):
    import torch.distributed as dist
    if dist.is_initialized() and dist.get_rank():
        dist.barrier()
check.{}(hanging)
"""


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel in which nothing has run, in an empty folder."""
    made = Kernel(cwd=str(tmp_path))
    yield made
    made.close()


def cells_of(source: Path) -> list[tuple[str, bool]]:
    """The code of the solved lesson, and whether a cell is to fail."""
    made = builder().solved(builder().parse(source.read_text(encoding="utf-8")))
    return [  # simulated GPUs may be refused on other systems alone
        (c.text, "raises-exception" in c.tags and "--simulate-gpus" not in c.text) for c in made if c.kind != "markdown"
    ]


@pytest.mark.more
@pytest.mark.parametrize("source", LESSONS, ids=lambda p: p.stem)
@pytest.mark.timeout(400)
def test_every_cell_may_be_run_twice(fresh: Kernel, source: Path) -> None:
    for code, fails in cells_of(source):
        for turn in ("first", "second"):
            shown = fresh.run(code)
            assert shown.ok != fails, f"{turn} run of\n{code}\n{shown.error or shown.text()}"
            if CHECK.search(code):
                assert is_ok(shown.outputs), f"{turn} run of {code}: {shown.text()}"


@pytest.mark.lessons
@pytest.mark.parametrize("source", LESSONS, ids=lambda p: p.stem)
@pytest.mark.timeout(400)
def test_after_a_killed_rank_or_a_hang_the_named_cells_bring_the_lesson_back(fresh: Kernel, source: Path) -> None:
    ran: dict[int, tuple[str, bool]] = {}

    def run(code: str, fails: bool) -> Shown:
        shown = fresh.run(code)
        ran[shown.number] = code, fails
        assert shown.ok != fails, f"{code}\n{shown.error or shown.text()}"
        return shown

    for code, fails in cells_of(source):
        run(code, fails)
        for name, _ in CHECK.findall(code):
            said = "\n".join(fresh.run(answer.format(name)).text() for answer in (HANGING, KILLED))
            for number in map(int, AGAIN.findall(said)):
                run(*ran[number])
            answered = run(code, fails).outputs
            assert is_ok(answered), f"{code}\nafter {said}\n{answered}"


@pytest.mark.more
def test_a_check_that_costs_names_says_which_and_which_cells_make_them(fresh: Kernel) -> None:
    assert fresh.run("%load_ext nbddp\nfrom nbddp.teach import check").ok
    fresh.run("%%ddp --nproc 2\nimport torch\nmodel = torch.nn.Linear(2, 2)")
    fresh.run("%%ddp\nprint('makes nothing')")
    fresh.run("%%ddp\nfor step in range(3): pass")
    said = fresh.run(KILLED.format("average_gradients")).text()
    assert "rank 1's process ended, and with it model, torch and step are gone: run In[2] and In[4] again\n" in said
    waits = "def waits(model):\n    import torch.distributed as dist\n    dist.get_rank() and dist.barrier()\n"
    said = fresh.run(f"{waits}check.average_gradients(waits)").text()
    assert "deadlock: " in said
    assert "gone" not in said, "freed ranks keep their names"


def test_these_tests_find_a_check_in_every_lesson() -> None:
    assert all(any(CHECK.search(code) for code, _ in cells_of(source)) for source in SOURCES)
