"""`breakpoint()` on ranks: all stop there and answer side by side, and who waits for them is not called stuck."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from nbddp.capabilities.debugger.messages import Stopped
from nbddp.capabilities.debugger.transcript import MOST, PROMPT, Transcripts
from nbddp.capabilities.panel import page
from nbddp.capabilities.panel import state as panel_state
from nbddp.capabilities.panel.rows import SeenRanks, doing_of
from nbddp.capabilities.panel.state import State
from nbddp.deadlock import proof
from nbddp.deadlock.positions import Position, position_of
from nbddp.errors import RankStatus
from nbddp.protocol.position import BlockingCall, CallHistory, PendingCollective, Whereabouts
from tests.kernels import FROM_BREAKPOINT, Kernel, loaded
from tests.notebook.test_panel import Balanced, asked, until

STOPPED = Whereabouts(user=("Cell In[3]", 4, "<module>"), stopped=True, token=(0,), waits="futex", bytes=0)
WAITS = replace(
    STOPPED, stopped=False, call=BlockingCall("all_reduce", "collective"), exact=True,
    pending=PendingCollective("0", (0, 1), 1, "all_reduce", "float[1]", backend="gloo"),
    past=CallHistory({"0": ((1, "all_reduce", "float[1]", None),)}, {"0": 1}, records=True),
)  # fmt: skip


def test_a_rank_that_is_stopped_is_at_work_and_no_deadlock_holds_who_waits_for_it() -> None:
    for _ in range(2):
        all_of: dict[int, Position] = {}
        for rank, facts in ((0, STOPPED), (1, WAITS)):
            before = position_of(rank, facts, None, 1.0)
            all_of[rank] = position_of(rank, facts, before, 1.0)
    assert (all_of[0].state, all_of[0].where) == (RankStatus.RUNNING, "cell line 4, stopped by breakpoint()")
    assert all_of[1].state == RankStatus.BLOCKED
    assert proof.diagnose(all_of) is None
    look = SeenRanks(frozenset({0, 1}), "Cell In[3]", frozenset({0, 1}), all_of)
    assert doing_of(0, look) == ("stopped", "cell line 4, stopped by breakpoint()")


def said(text: str, stopped: bool = True) -> Stopped:
    return Stopped(stopped, text, ("Cell In[3]", 4, "f") if stopped else None)


def test_a_transcript_has_lines_and_answers_of_each_rank() -> None:
    found = Transcripts()
    for rank in (0, 1):
        found.heard(rank, said("-> x = 1\n"))
    assert found.stopped == [0, 1]
    found.sent([1], "p x")
    assert found.talks[1].asked
    found.heard(1, said("7\n"))
    assert found.talks[1].answer == ("7",)
    assert found.talks[1].lines == ("-> x = 1", f"{PROMPT}p x", "7")
    assert found.talks[0].lines == ("-> x = 1",)
    assert found.talks[0].where == "cell line 4, in f"
    found.sent([0], "c")
    found.heard(0, said("", stopped=False))
    assert found.stopped == [1]
    told: list[Any] = []
    found.views["test"] = lambda rank, lines: told.append((rank, *lines))
    found.sent([1], "c")
    found.refused(1, "c")
    assert not found.talks[1].asked
    assert found.talks[1].lines[-2:] == (f"{PROMPT}c", "rank 1 continued before it read 'c'")
    assert told == [(1, "rank 1 continued before it read 'c'")]
    found.heard(1, said("line\n" * 2000))
    assert len(found.talks[1].lines) == MOST
    state = panel_state.talked(State(program="Cell In[3]"), [talk for _, talk in sorted(found.talks.items())])
    shown = "".join(block.head + block.text for block in page.talks(state))
    Balanced(shown)
    assert not page.no_talk(state)
    assert "● running" in shown
    assert "⏸ stopped, cell line 4, in f" in shown
    assert "ddp&gt; c" in shown
    after = "".join(block.head for block in page.talks(panel_state.seen(state, (), "", 0)))
    assert "running" not in after
    assert "stopped" not in after
    assert after.count("the cell has ended") == 2


# -- in a kernel -----------------------------------------------------------------------------------

CELL = """%%ddp --hang-after 1
import torch, torch.distributed as dist
dist.init_process_group()
rank = dist.get_rank()
def double(x):
    y = x * 2
    return y
work = dist.all_reduce(torch.ones(1), async_op=True) if rank == 1 else None
{breakpoint}
z = double(rank + 1)
if rank == 0: dist.all_reduce(torch.ones(1))
dist.barrier()
print('z is', z)
"""
DRIVE = """
import threading, time
from nbddp.capabilities.debugger.sender import send, transcripts_of
answers = []
def stopped(count):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        run = panel.pool.current
        if run is not None and len(transcripts_of(run).stopped) == count and not any(
                t.asked for t in transcripts_of(run).talks.values()):
            return run
        time.sleep(0.01)
    raise TimeoutError(count)
def drive(count, lines):
    try:
        for wait, rank, line in lines:
            run = stopped(count)
            time.sleep(wait)
            panel.session.debug(line, rank)
            while run is panel.pool.current and (
                    any(t.asked for t in transcripts_of(run).talks.values()) or not run.events.empty()):
                time.sleep(0.01)
            time.sleep(0.05)
            answers.append({r: t.answer for r, t in transcripts_of(run).talks.items()})
            states.append([(r.state, r.doing) for r in panel.state.ranks])
    except BaseException as e:
        answers.append(repr(e))
def burst():
    run = stopped(2)
    send(run, [0, 1], "c")
    for _ in range(50):
        send(run, [0, 1], "p 1")
        time.sleep(0.002)
states, drivers = [], []
def driven(count, lines):
    for before in drivers:  # its last answer may come when its cell has ended
        before.join(60)
    answers.clear(), states.clear()
    drivers[:] = [threading.Thread(target=drive, args=(count, lines), daemon=True)]
    drivers[0].start()
"""


@pytest.fixture(scope="module")
def panel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with loaded(str(tmp_path_factory.mktemp("panel"))) as kernel:
        code = "%ddp start --nproc 2\nimport nbddp, json\npanel = nbddp.Panel()._panel\nview = panel.view\n"
        done = kernel.run(code + DRIVE)
        assert done.ok, done.error
        yield kernel


def test_all_ranks_stop_answer_side_by_side_and_step_together(panel: Kernel) -> None:
    lines = [(0, None, "p rank"), (0, None, "step"), (0, None, "step"), (0, 1, "p y"), (0, None, "return"),
             (0, None, "next"), (0, None, "continue")]  # fmt: skip
    assert panel.run(f"driven(2, {[*((0, None, line) for line in FROM_BREAKPOINT), *lines]})").ok
    done = panel.run(CELL.format(breakpoint="breakpoint()"))
    assert done.ok, done.error
    assert [done.text().count(f"rank {r} │ z is {2 * (r + 1)}") for r in (0, 1)] == [1, 1]
    before = len(FROM_BREAKPOINT)
    found = until(panel, "answers", lambda found: len(found) == before + len(lines))[before:]
    assert found[0] == {"0": ["0"], "1": ["1"]}
    assert found[2]["0"][-1] == "-> return y"
    assert found[3]["1"] == ["4"]
    assert found[4]["0"][0] == "--Return--"
    assert "line 11" in found[5]["1"][0]
    until(panel, "[t.stopped for t in panel.state.talks]", lambda stopped: stopped == [False, False])


def test_ranks_that_wait_for_a_stopped_one_are_not_called_stuck(panel: Kernel) -> None:
    """Four times as long as a deadlock may last."""
    assert panel.run("driven(1, [(2.0, None, 'p rank'), (0, None, 'c')])").ok
    done = panel.run(CELL.format(breakpoint="if rank == 0: breakpoint()").replace("--hang-after 1", "--hang-after 0.5"))
    assert done.ok, done.error
    states = asked(panel, "states")
    assert [state for state, _ in states[0]] == ["stopped", "waiting"]
    assert "for rank 0" in states[0][1][1]


def test_a_breakpoint_at_the_end_of_a_cell_stops_all_ranks(panel: Kernel) -> None:
    assert panel.run("driven(2, [(0, None, 'p x'), (0, None, 'c')])").ok
    done = panel.run("%%ddp\nx = 5\nbreakpoint()")
    assert done.ok, done.error
    assert until(panel, "answers", lambda found: len(found) == 2)[0] == {"0": ["5"], "1": ["5"]}


def test_lines_that_come_when_a_rank_has_gone_on_are_said_to_be_unread(panel: Kernel) -> None:
    assert panel.run("threading.Thread(target=burst, daemon=True).start()").ok
    assert panel.run("%%ddp\nimport time\nbreakpoint()\ntime.sleep(0.5)").ok
    said = asked(panel, "{r: t.lines for r, t in transcripts_of(panel.pool.last_run).talks.items()}")
    for rank, lines in said.items():
        assert f"rank {rank} continued before it read 'p 1'" in lines, lines


def test_stop_ends_a_cell_whose_ranks_are_stopped(panel: Kernel) -> None:
    began = time.monotonic()
    code = "def end():\n    stopped(2)\n    panel.session.stop()\nthreading.Thread(target=end, daemon=True).start()"
    assert panel.run(code).ok
    done = panel.run("%%ddp\nkept = 1\nbreakpoint()\nkept = 2")
    assert "stopped by the user" in done.error
    assert time.monotonic() - began < 30
    assert panel.run("%%ddp -o kept\nkept").ok
    assert asked(panel, "[kept[0], kept[1]]") == [1, 1]


def test_the_post_mortem_of_a_rank_that_failed_is_in_the_panel(panel: Kernel) -> None:
    assert not panel.run("%%ddp\nimport os\nbad = int(os.environ['RANK'])\n1 / (1 - bad)").ok
    panel.run("view.buttons['Post-mortem'].click()")
    until(panel, "panel.state.detail", lambda detail: "bad = 1" in detail)


def test_what_a_button_shows_stays_when_the_panel_then_notices_the_end_of_the_cell(panel: Kernel) -> None:
    code = (
        "try: panel.pool.run_cell('bad = 2; 1 / 0')\nexcept nbddp.WorkerFailed: pass\n"
        "unseen = panel.session._over != panel.pool.last_run.number\nview.buttons['Post-mortem'].click()"
    )
    assert panel.run(code).ok
    assert asked(panel, "unseen")
    until(panel, "panel.session._over == panel.pool.last_run.number", bool)
    assert "bad = 2" in asked(panel, "panel.state.detail")


def test_a_breakpoint_that_nobody_would_hear_raises_and_says_where_it_stops(panel: Kernel) -> None:
    assert panel.run("panel.close()").ok
    done = panel.run("%%ddp\nbreakpoint()")
    assert not done.ok
    assert "or %ddp panel, breakpoint() opens one" in done.error
    assert panel.run("panel = nbddp.Panel()._panel\nview = panel.view").ok
