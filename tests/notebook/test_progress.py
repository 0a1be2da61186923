"""Progress: a bar on a page, words elsewhere, and nothing of it in a saved notebook."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from nbddp.output.page import NOT_LIVE
from nbddp.output.progress import Progress
from nbddp.output.screens import Notebook, Terminal, bar_of
from tests.kernels import Kernel, Shown

LATE = """%%ddp
import os, signal, time
if os.environ['RANK'] == '1':
    raise ValueError('no')
signal.signal(signal.SIGINT, signal.SIG_IGN)
time.sleep(0.8 + 0.3)"""
HUNG = """%%ddp --hang-after 0.3
import signal, time, torch, torch.distributed as dist
dist.init_process_group()
signal.signal(signal.SIGINT, signal.SIG_IGN)
try:
    if dist.get_rank() != 1: dist.all_reduce(torch.ones(1))
finally:
    time.sleep(0.5)"""
EMPTY = {"text/plain": ""}
CHECK = """from nbddp.teach import check
def share_of(items, rank, world_size): return items[rank::world_size]
check.share_of(share_of)"""


def progress(shown: Shown) -> list[dict[str, Any]]:
    """The bundles of progress that came while a cell ran."""
    updates = [c["data"] for _, kind, c in shown.messages if kind == "update_display_data"]
    return [data for data in updates if "<progress" in data.get("text/html", "")]


def test_a_bar_is_as_full_as_its_share_and_labelled_with_its_words() -> None:
    assert 'max="9" value="3"' in bar_of(Progress("all_reduce of 64 KiB", 3, 9))
    assert "all_reduce of 64 KiB (3 of 9) …" in bar_of(Progress("all_reduce of 64 KiB", 3, 9))
    assert re.search(
        r"<label [^>]*><progress style=[^>]*></progress><span>nbddp: a &lt;b&gt; …</span></label>", bar_of("a <b>")
    )


def test_progress_stays_until_there_is_something_else_to_see() -> None:
    said: list[dict[str, Any]] = []
    screen = Notebook(SimpleNamespace(display_pub=SimpleNamespace(publish=lambda data, **how: said.append(data))))
    screen.progress("checking")
    screen.start()
    screen.refresh([], "running: rank 0")
    assert [data["text/plain"] for data in said] == ["", "nbddp: checking …"]
    screen.line(0, "stdout", "a line")
    screen.refresh([], "running: rank 0")
    assert said[-1]["text/plain"] == "rank 0 │ a line"
    assert ">rank 0 │ a line</pre>" in said[-1]["text/html"]
    screen.finish([])
    assert said[-1] == EMPTY


def test_whatever_is_shown_meanwhile_says_what_to_do_where_it_is_no_longer_updated() -> None:
    said: list[dict[str, Any]] = []
    screen = Notebook(SimpleNamespace(display_pub=SimpleNamespace(publish=lambda data, **how: said.append(data))))
    screen.progress("checking")
    screen.line(0, "stdout", "a line")
    screen.refresh([], lambda: "running: rank 0")
    screen.ends("rank 1 failed; freeing rank 0")
    screen.finish([])
    assert [NOT_LIVE in data.get("text/html", "") for data in said] == [False, True, True, True, False]
    assert "%ddp attach" in NOT_LIVE


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (LATE, "rank 1 raised ValueError: no (cell line 4); interrupting ranks 0, 2–3 …"),
        (LATE.replace("raise", "print('a line')\n    raise"), "rank 1 │ a line\nnbddp: rank 1 raised ValueError: no"),
        (HUNG, "deadlock: ranks 0, 2–3 wait in all_reduce #1"),
    ],
    ids=["failed", "after a line", "hung"],
)
def test_what_ends_a_run_is_seen_before_the_last_rank_has_ended_it(four: Kernel, code: str, words: str) -> None:
    shown = four.run(code)
    assert not shown.ok
    seen = [at for at, _, c in shown.messages if words in (c.get("data") or {}).get("text/plain", "")]
    assert seen, [c["data"] for _, kind, c in shown.messages if kind == "update_display_data"]
    error = next(at for at, kind, _ in shown.messages if kind == "error")
    assert error - seen[0] > 0.3
    assert not [o for o in shown.displays if "nbddp:" in str(o)], "it does not stay"


def test_below_what_is_printed_in_a_terminal_stands_what_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    drawn: list[list[str]] = []
    region = SimpleNamespace(draw=drawn.append, clear=lambda: drawn.append([]), wrapped=lambda text: [text])
    screen = Terminal(region)  # type: ignore[arg-type]
    screen.start()
    screen.ends("rank 1 failed; unblocking rank 0")
    screen.line(1, "stdout", "a line")
    screen.refresh([], lambda: "running: rank 0")
    assert drawn[-1] == ["nbddp: rank 1 failed; unblocking rank 0 …"]
    screen.start()
    screen.refresh([], lambda: "running: rank 0")
    assert capsys.readouterr().out == "rank 1 │ a line\n"


@pytest.mark.parametrize(
    ("code", "share", "words"),
    [
        ("%ddp bench all_reduce --min 1KiB --max 16KiB --repeat 1 --warmup 1", "3", "all_reduce of 1.0 KiB on 4 ranks"),
        (CHECK, "", "checking share_of"),
        ("%ddp start --nproc 4 --nnodes 2", "", "starting"),
    ],
    ids=["bench", "check", "pool"],
)
def test_long_work_has_a_bar_that_is_gone_in_the_end(four: Kernel, code: str, share: str, words: str) -> None:
    shown = four.run(code)
    assert shown.ok, shown.error
    bars = progress(shown)
    assert any(words in bar["text/plain"] and words in bar["text/html"] for bar in bars), bars
    assert all((f'max="{share}"' in bar["text/html"]) == bool(share) for bar in bars)
    kept = [o for o in shown.outputs if "data" in o]
    assert [o["data"] for o in kept if not o["data"].get("text/plain")] == [EMPTY], "one empty display, as of every run"
