"""Cells in real terminals: IPython at its prompt, a file that IPython runs, `jupyter console`, and no terminal at all.

A terminal is a pty whose bytes are kept. What can only be seen while a cell runs is looked for in the bytes, what stays
in the rows that they leave (`rows`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pexpect
import pytest

from nbddp.errors import RunTimedOut
from nbddp.output import screens
from nbddp.output.progress import Region, fit
from nbddp.output.screens import can_draw, size_of
from nbddp.pool.pool import WorkerPool
from tests import warm
from tests.kernels import FROM_BREAKPOINT

PATIENCE = 60.0  # seconds that something may take on busy cores
SIZE = (40, 90)  # lines and columns
BAR = """
import time
from tqdm.auto import tqdm
for i in tqdm(range(6), desc='epoch'): time.sleep(0.15)
print('through')
"""
SLIDER = """
import ipywidgets
ipywidgets.IntSlider(3, description='depth')
"""
HANG = """
import torch, torch.distributed as dist, os
dist.init_process_group('gloo')
dist.barrier() if os.environ['RANK'] == '0' else dist.all_reduce(torch.ones(1))
"""
DEADLOCK = "waiting in barrier #1 for rank 1"
CONTROL = re.compile(r"\x1b\[(\d*)([A-Za-z])|\x1b[][()][^\x07\x1b]*\x07?|([\r\n])")


def rows(said: str) -> list[str]:
    """What a terminal shows of these bytes: \\r, \\n, cursor up and erase to the end are obeyed, colours left out."""
    lines, row, column = [""], 0, 0
    at = 0
    for found in [*CONTROL.finditer(said), None]:
        text = said[at : found.start() if found else len(said)]
        lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
        column += len(text)
        if found is None:
            break
        at, (count, command, line) = found.end(), found.groups()
        if line == "\r":
            column = 0
        elif line == "\n":
            row, column = row + 1, 0
            lines += [""] * (row == len(lines))
        elif command == "A":
            row -= int(count or 1)
        elif command == "J" and not count:
            lines[row:] = [lines[row][:column]]
    return [line.rstrip() for line in lines]


def environment(folder: Path) -> dict[str, str]:
    """That of a program in a terminal, for whose agent a fork of the template waits."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env |= {"TERM": "xterm", "IPYTHONDIR": str(folder / "ipython"), "COLUMNS": "", "LINES": ""}
    warm.ready(env, folder=str(folder))
    return env


class Terminal:
    """A program in a pty. `said`: all that it has written."""

    def __init__(self, folder: Path, *words: str):
        for name, body in (("bar", BAR), ("slider", SLIDER), ("hang", HANG), ("steps", STEPS), ("last", LAST)):
            (folder / name).write_text(body, encoding="utf-8")
        self.program = pexpect.spawn(
            sys.executable, list(words), env=environment(folder), cwd=str(folder), dimensions=SIZE,
            encoding="utf-8", timeout=PATIENCE,
        )  # fmt: skip
        self.said = ""
        self.prompts = 0

    def until(self, pattern: str) -> str:
        """Read until this comes; what came meanwhile."""
        self.program.expect(pattern)
        came = str(self.program.before) + str(self.program.after)
        self.said += came
        return came

    def prompt(self) -> str:
        """Wait for the next prompt."""
        self.prompts += 1
        return self.until(rf"In \[{self.prompts}\]: ")

    def type(self, line: str) -> str:
        """Run a line; what it wrote until the next prompt."""
        self.program.send(line + "\r")
        return self.prompt()

    def begin(self, name: str) -> None:
        """Begin to run the body of this name on every rank."""
        self.program.send(f"get_ipython().run_cell_magic('ddp', '', open('{name}').read())\r")

    def cell(self, name: str, options: str = "") -> str:
        """Run the body of this name on every rank; what that wrote."""
        return self.type(f"get_ipython().run_cell_magic('ddp', '{options}', open('{name}').read())")

    def close(self) -> None:
        self.program.close(force=True)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def opens(*words: str) -> Terminal:
        made.append(Terminal(tmp_path, *words))
        return made[-1]

    yield opens
    for terminal in made:
        terminal.close()


def check_bar(said: str, ranks: int = 2) -> None:
    """The bars of all ranks moved, and each is there once in the end, whole."""
    left = [row for row in rows(said) if "epoch" in row and "import" not in row]
    for rank in range(ranks):
        moved = set(re.findall(rf"rank {rank} │ epoch: +(\d+)%\|", said))
        assert {"0", "100"} < moved, said
        assert len([row for row in left if row.startswith(f"rank {rank} │ epoch: 100%|██████████| 6/6 [")]) == 1, left
        assert f"rank {rank} │ through" in rows(said)
    assert len(left) == ranks, left


PROMPT = ("-m", "IPython", "--simple-prompt", "--no-banner", "--no-confirm-exit")
CONSOLE = ("-m", "jupyter_console", "--simple-prompt", "--no-confirm-exit")
no_console = pytest.mark.skipif(find_spec("jupyter_console") is None, reason="pip install jupyter-console")
BOTH = pytest.mark.parametrize(
    "words", [PROMPT, pytest.param(CONSOLE, marks=[no_console, pytest.mark.looks])], ids=["ipython", "console"]
)


@BOTH
def test_at_a_prompt_all_that_moves_is_seen_and_nothing_of_it_stays(opened: Any, words: tuple[str, ...]) -> None:
    terminal = opened(*words)
    terminal.prompt()
    terminal.type("%load_ext nbddp")
    started = terminal.type("%ddp start --nproc 2")
    assert "nbddp: starting 2 workers …" in started
    assert "nbddp:" not in "\n".join(rows(started)), "what was waited for is gone"
    assert "world size 2 = 1 node × 2 processes; on CPU" in rows(started)
    check_bar(terminal.cell("bar"))
    assert {f"rank {r} Out │ depth: 3" for r in (0, 1)} <= set(rows(terminal.cell("slider")))
    hang = terminal.cell("hang", "--hang-after 2")
    assert re.search(rf"running: rank 0 \([^)]*{DEADLOCK}", " ".join(hang.split())), hang
    assert not [row for row in rows(hang) if row.startswith("running:")], "where silent ranks are is gone"
    assert "deadlock" in hang
    figure = rows(terminal.type("%ddp topology"))
    assert any(row.startswith("node 0, CPU: rank 0 (local rank 0) on cpu") for row in figure)
    for line, told in (("%%ddp --help", "usage: %%ddp [options]"), ("%%ddp --nproc 2", "world size 2 = 1 node")):
        if words == PROMPT:
            for row in (line, ""):  # two empty rows end a cell
                terminal.program.send(f"{row}\r")
                terminal.until(r"\.\.\.: ")
            line = ""
        assert told in terminal.type(line)


STEPS = """
import os
rank = int(os.environ['RANK'])
scale_of_rank = 40 + rank
breakpoint()
doubled = 2 * rank + 2
print('doubled is', doubled)
"""
LAST = "here = 1\nbreakpoint()\n"


@BOTH
@pytest.mark.more
def test_at_a_prompt_ranks_that_stop_are_stepped_together(opened: Any, words: tuple[str, ...]) -> None:
    terminal = opened(*words)
    terminal.prompt()
    terminal.type("%load_ext nbddp")
    terminal.type("%ddp start --nproc 2")
    terminal.begin("steps")
    said = ""
    for line in (*FROM_BREAKPOINT, "p rank", "n", "@1 p doubled", "c"):
        said += terminal.until(r"ranks 0–1 ddp> ")
        terminal.program.send(f"{line}\r")
    said += terminal.prompt()
    shown = rows(said)
    for row in ("rank 0 │ 0", "rank 1 │ 1", "ranks 0–1 │ > Cell In[3] line 7", "rank 1 │ 4", "rank 0 │ doubled is 2"):
        assert row in shown, shown
    assert "rank 0 │ 2" not in shown, "a line for rank 1 goes to no other"
    terminal.begin("steps")
    terminal.until(r"ranks 0–1 ddp> ")
    terminal.program.sendintr()
    assert "stopped by the user" in terminal.prompt()
    terminal.type("get_ipython().run_cell_magic('ddp', '', 'made = 1 / 0')")
    terminal.program.send("%ddp debug\r")
    for line in ("p made", "q"):
        said = terminal.until(r"rank \d post-mortem> ")
        terminal.program.send(f"{line}\r")
    assert "NameError: name 'made' is not defined" in said
    terminal.prompt()


def test_a_breakpoint_at_the_end_of_a_cell_opens_the_prompt(opened: Any) -> None:
    terminal = opened(*PROMPT)
    terminal.prompt()
    terminal.type("%load_ext nbddp")
    terminal.type("%ddp start --nproc 2")
    terminal.begin("last")
    said = terminal.until(r"ranks 0–1 ddp> ")
    terminal.program.send("c\r")
    assert FROM_BREAKPOINT or "ranks 0–1 │ --Return--" in rows(said)
    assert "-> breakpoint()" in said
    terminal.prompt()


@pytest.mark.more
def test_ipythons_own_prompt_line_completes_names_of_the_stopped_ranks(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMPT_TOOLKIT_NO_CPR", "1")  # this terminal does not say where its cursor is
    terminal = opened("-m", "IPython", "--no-banner", "--no-confirm-exit", "--colors=NoColor")
    for number, line in enumerate(("%load_ext nbddp", "%ddp start --nproc 2"), 1):
        terminal.until(rf"In \[{number}\]:")
        terminal.program.send(f"{line}\r")
    terminal.until(r"In \[3\]:")
    terminal.begin("steps")
    terminal.until("ranks 0–1 ddp>")
    terminal.program.send("p scale_o\t")
    terminal.until("f_rank")
    terminal.program.send("\r")
    terminal.until("rank 1 │ 41")
    terminal.until("ranks 0–1 ddp>")
    terminal.program.send("\x03")
    terminal.until("stopped by the user")
    terminal.until(r"In \[4\]:")


FILE = """%load_ext nbddp
%ddp start --nproc 2
get_ipython().run_cell_magic('ddp', '', open('bar').read())
get_ipython().run_cell_magic('ddp', '', 'print("a later cell")')
"""


def test_a_file_that_ipython_runs_moves_in_a_terminal(opened: Any, tmp_path: Path) -> None:
    (tmp_path / "cells.ipy").write_text(FILE, encoding="utf-8")
    terminal = opened("-m", "IPython", "cells.ipy")
    said = terminal.until(pexpect.EOF)
    check_bar(said)
    assert "rank 0 │ a later cell" in rows(said)


def test_without_a_terminal_bars_are_lines_and_nothing_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "cells.ipy").write_text(FILE, encoding="utf-8")
    (tmp_path / "bar").write_text(BAR, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "cells.ipy"], env=environment(tmp_path), cwd=tmp_path,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, check=True,
    )  # fmt: skip
    said = done.stdout[done.stdout.index("world size") :]
    assert "\x1b" not in said
    assert len(re.findall(r"rank \d │ epoch: 100%\|█{10}\| 6/6 \[", said)) == said.count("epoch") == 2
    assert {"rank 0 │ a later cell", "rank 1 │ a later cell"} <= set(said.splitlines())


def test_without_a_terminal_a_long_silence_is_told(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(screens, "TELL_AFTER", 0.5)
    with pytest.raises(RunTimedOut):
        pool.run_cell("import time\ntime.sleep(60)", timeout=6, screen=screens.Terminal())
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "running: ranks 0–1 (cell line 2) · 1 s"
    assert 2 <= len(told) <= 4, "each time after twice as long"


# -- the rows that are drawn again -------------------------------------------------------------


class Kept(list[str]):
    """A stream that keeps what is written."""

    def write(self, text: str) -> None:
        self.append(text)

    def flush(self) -> None:
        pass


def test_rows_are_cut_to_the_terminal_and_taken_back() -> None:
    kept = Kept(["before\n"])
    region = Region(lambda: kept, lambda: (20, 6))
    region.draw([f"row {n} of many that is long" for n in range(9)])
    assert rows("".join(kept)) == ["before", *[f"row {n} of many that…" for n in range(3)], "… 6 more lines"]
    region.draw(["short"])
    assert rows("".join(kept)) == ["before", "short"]
    drawn = len(kept)
    region.draw(["short"])
    assert len(kept) == drawn, "nothing new is not drawn"
    region.clear()
    assert rows("".join(kept)) == ["before", ""]


def test_a_row_counts_what_a_terminal_shows() -> None:
    assert fit("日本語の長い行", 8) == "日本語…"
    assert fit("\x1b[31mred\x1b[0m\r", 20) == "[31mred[0m"
    assert fit("cafe\u0301", 4) == "cafe\u0301"
    assert size_of(None) == (80, 24)
    assert not can_draw(Kept())
