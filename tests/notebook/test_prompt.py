"""The prompt for stopped ranks where no panel is open, and the one after a failure: tables for the pure part, and a
real kernel whose input requests are answered. Terminals are in test_terminals."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from nbddp.capabilities.debugger.on_rank import Debugger, completions
from tests.kernels import FROM_BREAKPOINT, Kernel, Shown, loaded
from tests.pool.faults import RECORDS


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("p rank_", ["rank_of"]),
        ("rank.re", ["rank.real"]),
        ("x = wor", ["word"]),
        ("rank ", []),
        ("", []),
        ("word", []),
    ],
)
def test_names_of_the_frame_complete_the_last_word(text: str, found: list[str]) -> None:
    assert completions(text, {"rank": 1, "rank_of": 2, "word": "", "__builtins__": {}}) == found


def test_an_answer_that_comes_as_soon_as_a_rank_has_said_that_it_stopped_is_taken() -> None:
    taken = list[bool]()
    debugger = Debugger(lambda said: taken.append(debugger.line("n")), lambda file: True, str)
    got = queue.SimpleQueue[str]()
    threading.Thread(target=lambda: got.put(debugger.wait("", ("program.py", 1))), daemon=True).start()
    assert (got.get(timeout=10), taken, debugger.stopped) == ("n", [True], False)


# -- in a kernel that is answered ------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with loaded(str(tmp_path_factory.mktemp("prompt"))) as kernel:
        assert kernel.run("%ddp start --nproc 2").ok
        yield kernel


def talk(kernel: Kernel, code: str, lines: Sequence[str]) -> tuple[Shown, list[str]]:
    """Run a cell and answer its questions with these lines; what it showed, and what it asked."""
    cell, asked = str(kernel.client.execute(code, allow_stdin=True)), list[str]()
    for line in lines:
        asked.append(next_question(kernel))
        kernel.client.input(line)
    done = kernel.collect(cell)
    with pytest.raises(queue.Empty):
        asked.append(kernel.client.get_stdin_msg(timeout=0.2)["content"]["prompt"])
    return done, asked


def next_question(kernel: Kernel) -> str:
    prompt: str = kernel.client.get_stdin_msg(timeout=60)["content"]["prompt"]
    return prompt


TOGETHER = """%%ddp --hang-after 0.5
import os, torch, torch.distributed as dist
dist.init_process_group()
rank = dist.get_rank()
def double(x):
    y = x * 2
    return y
breakpoint()
z = double(rank + 1)
dist.barrier()
print('z is', z)"""


def test_a_breakpoint_asks_for_lines_for_all_ranks_and_steps_them_together(kernel: Kernel) -> None:
    lines = ["p rank", "p 1 + 1", "s", "s", "@1 p y", "@9 n", "@x", "@1", "p x", "@all", "r", "n", "n", "c"]
    done, asked = talk(kernel, TOGETHER, [*FROM_BREAKPOINT, *lines])
    assert done.ok, done.error
    said = re.sub(r"Cell In\[\d+\]", "Cell In[3]", done.text())
    first = ("line 8", "breakpoint()") if FROM_BREAKPOINT else ("line 9", "z = double(rank + 1)")
    assert said.startswith("ranks 0–1 │ > Cell In[3] {}\n          │ -> {}\na line goes to all".format(*first))
    shown = [
        "rank 0 │ 0\nrank 1 │ 1\n", "ranks 0–1 │ 2\n", "ranks 0–1 │ > Cell In[3] line 6, in double\n",
        "ranks 0–1 │ > Cell In[3] line 7, in double\n", "rank 1 │ 4\n",
        "rank 9 cannot take a line; stopped in the debugger: ranks 0–1\n", "@x names no ranks", "rank 1 │ 2\n",
        "ranks 0–1 │ --Return--\n", "rank 0 │ z is 2\nrank 1 │ z is 4\n",
    ]  # fmt: skip
    places = [said.index(text) for text in shown]
    assert places == sorted(places), said
    assert [a.removesuffix("ddp> ") for a in asked] == [
        *["ranks 0–1 "] * (8 + len(FROM_BREAKPOINT)), *["rank 1 "] * 2, *["ranks 0–1 "] * 4
    ]  # fmt: skip


def test_who_waits_for_a_stopped_rank_is_named_and_no_deadlock_is_reported(kernel: Kernel) -> None:
    cell = str(kernel.client.execute(TOGETHER, allow_stdin=True))
    for line in (*FROM_BREAKPOINT, "@1 n", "@1 n"):
        assert next_question(kernel) == "ranks 0–1 ddp> "
        kernel.client.input(line)
    assert next_question(kernel) == "rank 0 ddp> "
    time.sleep(1.5)  # three times as long as a deadlock may take
    kernel.client.input("n")
    assert next_question(kernel) == "rank 0 ddp> "
    kernel.client.input("n")
    assert next_question(kernel) == "ranks 0–1 ddp> "
    kernel.client.input("c")
    done = kernel.collect(cell)
    assert done.ok, done.error
    waits = r".*waiting in barrier #1 for rank 0" if RECORDS else "in barrier"
    assert re.search(rf"rank 1: cell line 10, {waits}\n", done.text())
    assert "deadlock" not in done.text() + done.error


@pytest.mark.parametrize("how", ["q", "\x04", "interrupt"])
def test_the_cell_is_ended_as_by_stop_and_names_are_kept(kernel: Kernel, how: str) -> None:
    cell = str(kernel.client.execute(f"%%ddp\nkept = {how!r}\nbreakpoint()\nkept = 2", allow_stdin=True))
    assert next_question(kernel) == "ranks 0–1 ddp> "
    if how == "interrupt":
        kernel.interrupt()
    else:
        kernel.client.input(how)
    done = kernel.collect(cell)
    assert "stopped by the user" in done.error
    assert f"ranks 0–1: cell line {3 if FROM_BREAKPOINT else 4}, stopped by breakpoint()" in done.error
    if how == "interrupt":
        kernel.client.input("c")  # an answer that comes too late is nobody's
    assert f"Out │ {how!r}" in kernel.run("%%ddp\nkept").text()


def test_a_breakpoint_in_a_loop_asks_again_and_output_of_the_ranks_goes_on(kernel: Kernel) -> None:
    code = "%%ddp\nimport os, time\nfor i in range(2):\n    breakpoint()\n    print('round', i)\ntime.sleep(0.1)"
    done, asked = talk(kernel, code, ["p i", "c", "p i", "c"])
    assert done.ok, done.error
    assert len(asked) == 4
    assert "ranks 0–1 │ round 0\n          │ round 1\n" in done.text()


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("x = 1\nbreakpoint()", 3),
        ("x = 1\nif x:\n    breakpoint()\n# end", 4),
        ("import asyncio\nx = 1\nawait asyncio.sleep(0)\nbreakpoint()", 5),
    ],
)
def test_a_breakpoint_at_the_end_of_a_cell_stops_there(kernel: Kernel, code: str, line: int) -> None:
    done, asked = talk(kernel, f"%%ddp\n{code}", ["p x", "'__return__' in globals()", "c"])
    assert done.ok, done.error
    assert len(asked) == 3
    said = [*([] if FROM_BREAKPOINT else ["--Return--"]), f"> Cell In[{done.number}] line {line}", "-> breakpoint()\n"]
    assert "ranks 0–1 │ " + "\n          │ ".join(said) in done.text()
    assert "ranks 0–1 │ 1\n" in done.text()
    assert "ranks 0–1 │ False\n" in done.text()


def test_a_breakpoint_before_the_last_statement_stops_once(kernel: Kernel) -> None:
    lines = [*FROM_BREAKPOINT, "n"]
    done, asked = talk(kernel, "%%ddp\nbreakpoint()\nx = 2", lines)
    assert done.ok, done.error
    assert len(asked) == len(lines)
    assert "--Return--" not in done.text()


def test_only_ranks_that_stop_are_asked_for(kernel: Kernel) -> None:
    done, asked = talk(kernel, "%%ddp\nimport os\nif os.environ['RANK'] == '1': breakpoint()\nprint('end')", ["c"])
    assert done.ok, done.error
    assert asked == ["rank 1 ddp> "]


def test_a_rank_that_dies_closes_the_prompt(kernel: Kernel) -> None:
    dies = "import os, time\nif os.environ['RANK'] == '1':\n    time.sleep(2.5)\n    os.kill(os.getpid(), 9)\n"
    cell = str(kernel.client.execute(f"%%ddp\n{dies}breakpoint()\n1", allow_stdin=True))
    assert next_question(kernel) == "rank 0 ddp> "
    done = kernel.collect(cell)
    assert done.evalue.startswith("rank 1 died"), done.error
    assert kernel.run("%%ddp\n1").ok


FAILS = """%%ddp
import os
scale = [1, 2]
def step(x):
    y = 2 * x
    return 1 / (y - 2)
step(int(os.environ['RANK']))"""


def test_after_a_failure_the_prompt_is_on_the_rank_that_failed(kernel: Kernel) -> None:
    assert not kernel.run(FAILS).ok
    lines = ["p y", "y - 2", "u", "p scale[1]", "scale[7]", "w", "q"]
    for command in ("%ddp debug", "%debug"):
        done, asked = talk(kernel, command, lines)
        assert done.ok, done.error
        assert asked == ["rank 1 post-mortem> "] * len(lines)
        *_, place, oldest = done.text().split("h for help, q to leave\n")[1].rstrip().rsplit("\n", 2)
        assert "y was 2; its value was released with the frame" in done.text()
        assert "\n2\nIndexError: list index out of range\n> cell line 7: step(" in done.text()
        assert oldest.startswith("  cell line 6, in step: return 1 / (y - 2)"), place


def test_under_pdb_on_a_failure_opens_the_prompt(kernel: Kernel) -> None:
    assert kernel.run("%pdb on").ok
    try:
        done, asked = talk(kernel, FAILS, ["p y", "q"])
        assert asked == ["rank 1 post-mortem> "] * 2
        assert done.text().endswith("h for help, q to leave\n2\n")
        assert done.evalue.startswith("rank 1 raised ZeroDivisionError")
        assert "nbddp/" not in done.text()
    finally:
        assert kernel.run("%pdb off").ok


def test_stop_leaves_the_prompt_after_a_failure(kernel: Kernel) -> None:
    assert not kernel.run("%%ddp\n1 / 0").ok
    cell = str(kernel.client.execute("%ddp debug", allow_stdin=True))
    next_question(kernel)
    kernel.interrupt()
    assert kernel.collect(cell).ok
    assert kernel.run("1").ok


def test_without_a_failure_there_is_nothing_to_debug(kernel: Kernel) -> None:
    assert kernel.run("%%ddp\n1").ok
    assert "breakpoint() in a %%ddp cell stops its ranks" in kernel.run("%ddp debug").error


def test_where_nobody_types_a_breakpoint_raises_and_says_what_to_do(kernel: Kernel) -> None:
    done = kernel.run("%%ddp\nbreakpoint()")
    assert "breakpoint() opens one for all ranks" in done.error
    assert not kernel.run("%%ddp\nx = 1 / 0").ok
    assert "----> " in kernel.run("%ddp debug").text()
