"""The panel's pages of what the ranks print and of how long their steps take."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from nbddp.analysis.steps import Bucket, Recording, Step
from nbddp.capabilities.panel import curves, document, page
from nbddp.capabilities.panel import state as panel_state
from nbddp.capabilities.panel.meters import PastRun
from nbddp.capabilities.panel.output import ALL, LEAST, MOST, Output, Showing, chosen, outputs
from nbddp.capabilities.panel.rows import Pace
from nbddp.capabilities.panel.state import State, Timeline
from nbddp.capabilities.timings.analysis import analysed
from nbddp.capabilities.timings.document import step_document, words
from nbddp.capabilities.timings.text import table
from nbddp.figures.document.sheet import ACROSS
from nbddp.output.buffer import RankOutput
from tests.notebook.test_panel import Balanced

LINES = {0: ("start", "loss 0.5", "end"), 1: ("start", "loss 0.7", "end", "end"), 2: ("start", "Loss 0.5", "end")}
FOUND = tuple(Output(r, tuple(("stdout", line) for line in lines)) for r, lines in LINES.items())


@pytest.mark.parametrize(
    ("showing", "seen"),
    [
        (Showing(), {r: [*lines] for r, lines in LINES.items()}),
        (Showing(rank=1), {1: [*LINES[1]]}),
        (Showing(search="LOSS"), {0: ["loss 0.5"], 1: ["loss 0.7"], 2: ["Loss 0.5"]}),
        (Showing(differences=True), {0: ["loss 0.5"], 1: ["loss 0.7", "end"], 2: ["Loss 0.5"]}),
        (Showing(rank=1, search="0.7", differences=True), {1: ["loss 0.7"]}),
        (Showing(search="nowhere"), {0: [], 1: [], 2: []}),
    ],
)
def test_a_search_and_only_differences_choose_lines(showing: Showing, seen: dict[int, Sequence[str]]) -> None:
    found = chosen(FOUND, showing)
    assert {out.rank: [text for _, text in out.lines] for out, _ in found} == seen
    assert all(hidden == len(LINES[out.rank]) - len(out.lines) for out, hidden in found)


def test_what_one_rank_alone_has_printed_is_no_difference_to_itself() -> None:
    ((out, hidden),) = chosen(FOUND[:1], Showing(differences=True))
    assert (len(out.lines), hidden) == (3, 0)


def test_outputs_are_bounded_and_have_what_moves(tmp_path: Path) -> None:
    made = []
    for rank in range(64):
        out = RankOutput(rank, tmp_path)
        out.take("stream", {"name": "stdout", "text": "".join(f"line {i}\n" for i in range(99)) + "half"})
        made.append(out)
    found = outputs(made)
    assert {len(out.lines) for out in found} == {max(LEAST, MOST // 64)}
    assert found[5].lines[-1] == ("stdout", "half")
    assert found[5].moving == ("half",)
    for out in made:
        out.close()


def test_the_page_marks_what_was_searched_and_escapes_what_was_printed() -> None:
    state = panel_state.printed(State(), (Output(0, (("stderr", "<b>oh</b> no"),), ("50%|██",)),))
    state = panel_state.showing(state, "search", "OH")
    (block,), moving = page.output(state), page.moving(state)
    for shown in (block.head, block.text, moving):
        Balanced(shown)
    assert "stderr│ &lt;b&gt;<mark>oh</mark>&lt;/b&gt; no" in block.text
    assert "setAttribute('aria-label', 'rank 0')" in block.text
    assert "50%|██" in moving
    assert "nothing has been printed" in page.no_output(State())
    assert state.showing.rank == ALL


def test_a_rank_that_is_gone_is_not_shown_alone() -> None:
    state = panel_state.showing(panel_state.showing(panel_state.printed(State(), FOUND), "rank", 2), "search", "loss")
    assert panel_state.printed(state, FOUND).showing == Showing(2, "loss")
    assert panel_state.printed(state, FOUND[:2]).showing == Showing(ALL, "loss")


def test_what_is_in_progress_keeps_its_room_until_the_next_run() -> None:
    """So that nothing below it moves when a bar comes to its end."""
    state = panel_state.printed(State(), (Output(0, (), ("50%", "1%")), Output(1, (), ("60%",))), 7)
    high = 'style="min-height: 4.2em"'
    assert high in page.moving(state)
    state = panel_state.printed(state, (Output(0, (("stdout", "end"),)), Output(1)), 7)
    assert high in page.moving(state)
    assert "<td>" not in page.moving(state)
    assert page.moving(panel_state.printed(state, (Output(0), Output(1)), 8)) == ""


def test_what_is_read_out_is_in_an_element_that_stays_and_only_once() -> None:
    """The element around the HTML, which gets its role when the text is there."""
    state = panel_state.said(panel_state.began(State()), "said")
    for shown in (page.heading(state), page.notice(state)):
        assert shown.count("onload=\"this.parentElement?.setAttribute('role', 'status')\"") == 1
        Balanced(shown)
    everything = "".join((page.heading(state), page.notice(state), page.start(state), page.running(state)))
    assert 'role="status"' not in everything
    assert "aria-live" not in everything


def paces(count: int, seconds: float, exposed: float) -> list[Pace]:
    return [Pace(n, n * 10**9, n * 10**9 + round(seconds * 1e9), round(exposed * 1e9)) for n in range(count)]


def test_a_curve_has_the_slowest_rank_and_the_longest_wait_of_each_step() -> None:
    found = curves.curve({0: paces(5, 0.02, 0.01), 1: paces(4, 0.03, 0.001)})
    assert (found.first, found.last) == (0, 3)
    assert found.points[-1] == (3, pytest.approx(0.03), pytest.approx(0.01))
    assert curves.curve({}) == curves.curve({0: paces(3, 1, 0), 1: ()}) == curves.Curve()
    long = curves.curve({0: paces(5000, 0.02, 0.0)})
    assert len(long.points) <= curves.POINTS
    assert long.points[-1][0] == 4999


def test_the_drawing_stays_within_its_box_and_says_itself_in_words() -> None:
    found = curves.curve({0: [*paces(40, 0.02, 0.01), Pace(40, 41 * 10**9, 99 * 10**9, 0)]})
    assert curves.top(found) == pytest.approx(0.05)
    shown = page.curves(panel_state.timed(State(), 1, found))
    Balanced(shown)
    lines = re.findall(r'<path class="line [^"]*" d="M([^"]*)"', shown)
    assert len(lines) == 2
    for x, y in (map(float, place.split()) for line in lines for place in line.split("L")):
        assert 0 <= x <= ACROSS
        assert 0 <= y <= document.HEIGHT
    assert 'role="img" aria-label="Step time and exposed communication up to step 40' in shown
    assert re.findall(r">(\d+ ms)</text>", shown) == ["20 ms", "40 ms"]
    assert "[40,&quot;step 40: 58.0 s, 0 ms of it exposed communication&quot;]" in shown
    assert "step 40: 58.0 s, 0 ms of it exposed communication" in page.newest(panel_state.timed(State(), 1, found))
    assert "<small>of a slow machine</small>" in page.legend(panel_state.timed(State(), 1, found, "of a slow machine"))
    for nothing in (page.curves(State()), page.legend(State())):
        assert nothing == ""


def test_without_a_step_what_is_said_is_of_the_cell_and_of_those_before() -> None:
    assert "no DDP steps yet" in page.newest(State())
    before = panel_state.ended(State(), PastRun(1, "Cell In[1]", 40, 0.02, 0.01, 1.0), False)
    assert "the last cell had no DDP steps; those of earlier cells are below" in page.newest(before)
    running = panel_state.seen(before, (), "Cell In[2]", 1.0)
    assert "no DDP steps so far in this cell; those of earlier" in page.newest(running)


def test_another_run_has_no_step_selected() -> None:
    step = Timeline(2, "words", html="<pre>words</pre>")
    state = panel_state.selected(panel_state.timed(State(), 1, curves.Curve(0, 3)), step)
    assert panel_state.timed(state, 1, curves.Curve(0, 4)).step is not None
    assert panel_state.timed(state, 2, curves.Curve(0, 1)).step is None
    assert page.timeline(state) == "<pre>words</pre>"


def recording(numbers: Sequence[int]) -> Recording:
    """Two ranks' steps of 60 ms with a bucket each."""

    def step(rank: int, number: int) -> Step:
        at = number * 10**8 + rank * 10**6
        bucket = Bucket(0, 1 << 20, at + 2 * 10**7, at + 2 * 10**7, at + 4 * 10**7)
        phases = (at, at + 10**7), (at + 10**7, at + 3 * 10**7, at + 4 * 10**7), (at + 4 * 10**7, at + 6 * 10**7)
        return Step(number, *phases, (bucket,))

    return Recording({rank: [step(rank, number) for number in numbers] for rank in range(2)}, model="Net")


def test_a_saved_notebook_has_the_curve_and_the_chosen_step() -> None:
    assert document.kept(State()) == ""
    state = panel_state.timed(State(), 1, curves.curve({0: paces(40, 0.02, 0.01), 1: paces(40, 0.03, 0.001)}), "a note")
    alone = document.kept(state)
    assert alone.count('class="nbddp-view"') == 1
    assert alone.count('class="nbddp-part"') == 40
    assert "step 17: 30.0 ms, 10.0 ms of it exposed communication" in alone
    assert "a note" in alone
    view = analysed(recording(range(40)), 5)
    step = Timeline(5, words(view), step_document(view), (table(view),))
    both = document.kept(panel_state.selected(state, step))
    assert both.count('class="nbddp-view"') == 2, "curves once"
    one = analysed(recording([5]), 5)
    step = Timeline(5, words(one), step_document(one), (table(one),))
    assert document.kept(panel_state.selected(state, step)).count('class="nbddp-view"') == 2
    assert "step 5 of" in both
    assert len(both) < 400_000
