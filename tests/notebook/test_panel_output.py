"""The panel's pages of what the ranks print and of how long their steps take."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from nbddp.capabilities.panel import page
from nbddp.capabilities.panel import state as panel_state
from nbddp.capabilities.panel.output import ALL, Output
from nbddp.capabilities.panel.rows import Rank
from nbddp.capabilities.panel.state import PanelModel, State
from nbddp.capabilities.panel.view import View
from tests.kernels import Kernel, loaded
from tests.notebook.test_panel import asked, until

# -- widgets, without a kernel ---------------------------------------------------------------------


class Behind:
    """In the place of a session: its model, and commands that do nothing."""

    def __init__(self, state: State):
        self.errors: list[Exception] = []
        self.model = PanelModel(state, self.errors.append)

    def open(self, view: Any) -> Any:
        return self.model.watch(view)

    def show(self, control: str, value: Any) -> None:
        self.model.change(panel_state.showing, control, value)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def of_ranks(*ranks: int) -> tuple[Output, ...]:
    return tuple(Output(rank, (("stdout", f"line of {rank}"),)) for rank in ranks)


@pytest.fixture
def drawn() -> Iterator[tuple[View, Behind]]:
    """A view on a model of four ranks that have printed."""
    behind = Behind(panel_state.printed(State(), of_ranks(0, 1, 2, 3)))
    view = View(behind)  # type: ignore[arg-type]
    yield view, behind
    view.close()


def test_a_selected_rank_that_the_next_cell_does_not_have_gives_way_to_all(drawn: tuple[View, Behind]) -> None:
    view, behind = drawn
    view.shown["rank"].value = 3
    assert behind.model.state.showing.rank == 3
    behind.model.change(panel_state.printed, of_ranks(0, 1))
    assert (view.shown["rank"].value, behind.errors) == (ALL, [])
    behind.model.change(panel_state.said, "still drawn")
    assert "still drawn" in str([w.value for w, _ in view._parts])


def test_ranks_are_offered_by_their_numbers_and_a_choice_is_kept(drawn: tuple[View, Behind]) -> None:
    view, behind = drawn
    for ranks, chosen_now in (((0, 1), ALL), ((2, 3), ALL), ((1, 2, 3), 3)):
        behind.model.change(panel_state.printed, of_ranks(*ranks))
        assert [value for _, value in view.rank.options] == [ALL, *ranks]
        view.rank.value = view.whom.value if chosen_now == ALL else chosen_now
    behind.model.change(panel_state.printed, of_ranks(0, 1, 2, 3))
    assert view.rank.value == behind.model.state.showing.rank == 3
    rows = [Rank(r, "node 0", "cpu") for r in range(4)]
    behind.model.change(panel_state.seen, rows, "", 0)
    view.which.value, view.whom.value = 1, 3
    behind.model.change(panel_state.seen, rows[:2], "", 0)
    assert (view.which.value, view.whom.value) == (1, ALL)
    assert behind.errors == []


Sent = tuple[int, str]


def sent(view: View) -> tuple[list[Sent], dict[int, int]]:
    """What is sent of the blocks of Output from now on, by rank; and which widgets they are."""
    found: list[Sent] = []
    (blocks,) = (b for b in view._blocks if b._of is page.output)
    for rank, (_, *parts) in blocks._made.items():
        for part in parts:
            part.observe(lambda change, rank=rank: found.append((rank, change["new"])), "value")
    return found, {rank: id(made[0]) for rank, made in blocks._made.items()}


def test_of_what_ranks_print_only_the_part_of_the_rank_that_printed_is_sent(drawn: tuple[View, Behind]) -> None:
    view, behind = drawn
    found, made = sent(view)
    before = of_ranks(0, 1, 2, 3)
    longer = replace(before[2], lines=(*before[2].lines, ("stdout", "more")))
    behind.model.change(panel_state.printed, (*before[:2], longer, before[3]))
    assert [rank for rank, _ in found] == [2]
    assert "more" in found[0][1]
    behind.model.change(panel_state.seen, [Rank(r, "node 0", "cpu") for r in range(4)], "Cell In[1]", 3)
    behind.model.change(panel_state.said, "a notice")
    assert len(found) == 1
    assert sent(view)[1] == made, "the widgets stay, with their place and focus"
    assert behind.errors == []


def test_blocks_of_ranks_that_are_gone_are_closed(drawn: tuple[View, Behind]) -> None:
    view, behind = drawn
    _, before = sent(view)
    gone = {rank: made for b in view._blocks if b._of is page.output for rank, made in b._made.items()}
    behind.model.change(panel_state.printed, of_ranks(0, 2))
    assert sent(view)[1] == {rank: before[rank] for rank in (0, 2)}
    assert [made[1].comm is None for made in gone.values()] == [False, True, False, True]
    behind.model.change(panel_state.printed, ())
    assert sent(view)[1] == {}


# -- in a kernel -----------------------------------------------------------------------------------

TRAIN = """%%ddp --nproc 2
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group()
model = DDP(torch.nn.Linear(64, 64))
for step in range(6):
    model(torch.randn(8, 64)).sum().backward()
print('the end of', dist.get_rank())
"""


@pytest.fixture(scope="module")
def panel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel with a panel, after a cell that has trained and printed."""
    with loaded(str(tmp_path_factory.mktemp("panel"))) as kernel:
        done = kernel.run("import nbddp, json\npanel = nbddp.Panel()._panel\nview = panel.view")
        assert done.ok, done.error
        yield kernel


@pytest.fixture
def trained(panel: Kernel) -> Kernel:
    """That kernel after a cell in which two ranks have trained and printed."""
    seen = "[[o.rank for o in panel.state.outputs], panel.state.curve.last]"
    if asked(panel, seen) != [[0, 1], 5]:
        done = panel.run(TRAIN)
        assert done.ok, done.error
        until(panel, seen, lambda found: found == [[0, 1], 5])
    return panel


def test_a_cell_that_was_over_before_a_look_has_its_output_and_its_steps(panel: Kernel) -> None:
    done = panel.run(TRAIN)
    whole = [[r, [["stdout", f"the end of {r}"]]] for r in (0, 1)]
    until(panel, "[[o.rank, o.lines] for o in panel.state.outputs]", lambda found: found == whole)
    until(panel, "panel.state.curve.last", lambda last: last == 5)
    until(panel, "panel.state.notice", lambda notice: notice == f"Cell In[{done.number}] ended on all ranks")


def test_a_step_that_is_selected_shows_its_timeline(trained: Kernel) -> None:
    assert trained.run("view.step.value = 4\nview.buttons['Show'].click()").ok
    until(trained, "panel.state.step and panel.state.step.words", lambda words: "step 4 of Linear" in (words or ""))
    assert trained.run("view.step.value = 99\nview.buttons['Show'].click()").ok
    until(trained, "panel.state.notice", lambda notice: "step 99 is not recorded on ranks 0–1" in notice)


def test_a_saved_notebook_has_the_curve_and_the_chosen_step(trained: Kernel) -> None:
    """With the next cell after they have changed. The panel itself, which would lose the focus, is not shown anew."""
    first = trained.run("whole = nbddp.Panel()\nwhole")
    whole, after = [c for _, kind, c in first.messages if kind == "display_data"]
    assert "step 5: " in after["data"]["text/html"], "the curve"
    drawn = "import time\nwhile panel.state.step is None or panel.state.step.number != 2: time.sleep(0.05)"
    assert trained.run(f"view.step.value = 2\nview.buttons['Show'].click()\n{drawn}").ok
    found: dict[str, str] = {}

    def renewed() -> bool:
        updates = [c for _, kind, c in trained.run("1").messages if kind == "update_display_data"]
        found.update({c["transient"]["display_id"]: c["data"].get("text/html", "") for c in updates})
        return after["transient"]["display_id"] in found

    assert renewed()
    assert "step 2 of Linear" in found[after["transient"]["display_id"]]
    assert whole["transient"]["display_id"] not in found
    found.clear()
    assert not any(renewed() for _ in range(2)), "once for each change"
    assert trained.run("%%ddp\n1").ok
    until(trained, "panel.state.curve.drawn", lambda drawn: drawn is False)
    assert asked(trained, "'step 2 of Linear' in whole._panel._of_last_run()"), "a run without steps takes nothing away"
    ends = trained.run("whole._panel._last()")
    updates = {c["transient"]["display_id"]: c["data"] for _, kind, c in ends.messages if kind == "update_display_data"}
    last = updates[whole["transient"]["display_id"]]
    assert set(last) == {"text/plain", "text/html", "image/png"}, "no widgets, which are gone"
    assert 'class="nbddp-picture' in last["text/html"]
    assert "step 2 of Linear" in last["text/html"]


LATE = """import threading
drawn, real = [], panel.session._take_step
panel.session._take_step = lambda recording, number: drawn.append(number) or real(recording, number)
with panel.session._draws:  # a step is just being drawn
    for number in (1, 2, 4, 3): panel.session.select(number)"""


def test_of_steps_that_are_selected_while_one_is_drawn_the_last_is_drawn(trained: Kernel) -> None:
    done = trained.run(LATE)
    assert done.ok, done.error
    until(trained, "[panel.state.notice, drawn]", lambda found: found == ["step 3 of Linear", [3]])
    until(trained, "[t.name for t in threading.enumerate()].count('nbddp-step')", lambda drawing: drawing == 0)
    assert asked(trained, "drawn") == [3]
    assert trained.run("panel.session._take_step = real").ok


def test_a_click_on_the_curve_selects_a_step_in_all_panels(trained: Kernel) -> None:
    """The slider that lies over the curve gets it; what the model says moves it and asks for nothing."""
    assert trained.run("beside = nbddp.Panel()._panel.view\nview.slider.value = 2").ok
    until(trained, "panel.state.step and panel.state.step.number", lambda number: number == 2)
    seen = "[[v.slider.min, v.slider.max, v.slider.value, v.step.value] for v in (view, beside)]"
    until(trained, seen, lambda found: found == [[0, 5, 2, 2]] * 2)
    assert trained.run("beside.close()").ok


def test_rank_search_and_differences_are_the_same_in_all_panels(trained: Kernel) -> None:
    code = "other = nbddp.Panel()._panel.view\nview.shown['rank'].value = 1\nother.shown['search'].value = 'end'\n"
    assert trained.run(code).ok
    assert (
        asked(trained, "[[v.shown['rank'].value, v.shown['search'].value] for v in (view, other)]") == [[1, "end"]] * 2
    )


TEN = """import random, threading, traceback
views = [view, *(nbddp.Panel()._panel.view for _ in range(9))]
said = []

def move():
    "Each time another panel, and another of its controls."
    luck = random.Random(7)
    chosen = {"nproc": (1, 3), "nnodes": (1, 2), "device": ("cpu", "auto"), "timeout": ("", "soon", "60"),
              "hosts": ("a,b", "a b", ""), "oversubscribe": (True, False), "max_restarts": (0, 2)}
    for n in range(80):
        at = views[n % 10]
        kind = n % 4
        if kind == 0:
            name = luck.choice(list(chosen))
            at.controls[name].value = luck.choice(chosen[name])
        elif kind == 1:
            at.shown["search"].value = luck.choice(("", "end", "0"))
        elif kind == 2:
            at.shown["differences"].value = not at.shown["differences"].value
        elif at.slider.layout.display == "":
            at.slider.value = luck.randint(at.slider.min, at.slider.max)
        time.sleep(0.02)

def act():
    try:
        move()
        said.append("done")
    except BaseException:
        said.append(traceback.format_exc())

def tree(widget):
    yield widget
    for child in getattr(widget, "children", ()):
        yield from tree(child)

def seen(at):
    "All that a reader sees of a panel; its own key apart, and the choices that are each panel's own."
    own = (at.which, at.whom, at.tabs, at.line, at.step)
    return [[type(w).__name__, str(w.value).replace(at._key + "-", "")] for w in tree(at.widget)
            if hasattr(w, "value") and w not in own]

actor = threading.Thread(target=act)
actor.start()"""


def test_ten_panels_show_the_same_after_each_has_moved_something_while_a_cell_ran(panel: Kernel) -> None:
    done = panel.run("import time\n" + TEN)
    assert done.ok, done.error
    slow = TRAIN.replace("range(6)", "range(150)").replace("model(", "time.sleep(0.02); model(")
    assert panel.run(slow).ok
    assert panel.run("actor.join()").ok
    assert asked(panel, "said") == ["done"]
    assert asked(panel, "len(seen(view))") > 25
    until(panel, "[t.name for t in threading.enumerate()].count('nbddp-step')", lambda drawing: drawing == 0)
    differ = "[[n, a, b] for n, v in enumerate(views[1:], 1) for a, b in zip(seen(view), seen(v)) if a != b]"
    until(panel, differ, lambda found: not found, seconds=20)
    assert panel.run("[v.close() for v in views[1:]]").ok


GOES_ON = """import threading, time
from nbddp.capabilities.debugger import sender
def go_on():
    while (run := panel.pool.current) is None or len(sender.transcripts_of(run).stopped) < 2: time.sleep(0.01)
    send = sender.send
    def sends_and_comes_back_late(*line):
        sender.send = send
        send(*line)
        while panel.session._over != run.number: time.sleep(0.01)
    sender.send = sends_and_comes_back_late
    panel.session.debug("c")
threading.Thread(target=go_on, daemon=True).start()"""


def test_fewer_ranks_than_the_selected_one_leave_the_panel_and_the_cell_as_they_are(panel: Kernel) -> None:
    assert panel.run("view.tabs.value = 'Ranks'\n%ddp status").ok  # where the end of a cell is said
    assert panel.run("%%ddp --nproc 3\nprint(1)").ok
    until(panel, "[value for _, value in view.shown['rank'].options]", lambda offered: 2 in offered)
    assert panel.run("view.shown['rank'].value = 2").ok
    assert panel.run(GOES_ON).ok
    done = panel.run("%%ddp --nproc 2\nprint('before')\nbreakpoint()\nprint('after')")
    assert done.ok, done.error
    assert "after" in done.text()
    until(
        panel, "[line[1] for o in panel.state.outputs for line in o.lines[-1:]]", lambda found: found == ["after"] * 2
    )
    until(panel, "[view.shown['rank'].value, panel.state.showing.rank]", lambda found: found == [ALL, ALL])
    until(panel, "str([w.value for w, _ in view._parts])", lambda shown: "ended on all ranks" in shown)
    assert asked(panel, "[t.name for t in threading.enumerate()].count('nbddp-panel')") == 1


BAR = """%%ddp
import time
from tqdm.auto import tqdm
for step in tqdm(range(100), desc='epoch'):
    time.sleep(0.02)
print('the end')"""


def test_a_bar_of_tqdm_moves_in_the_page_and_ends_among_the_lines(panel: Kernel) -> None:
    """A widget's bar, as `tqdm.auto` chooses it in a notebook; in words, as the page has them."""
    code = "view.shown['rank'].value = -1\npages = []\nfrom nbddp.capabilities.panel import page\n"
    code += "leave = panel.session.model.watch(lambda before, now: pages.append([page.moving(now), now.room]))"
    assert panel.run(code).ok
    done = panel.run(BAR)
    assert done.ok, done.error
    until(
        panel, "[[t for _, t in o.lines[-1:]] for o in panel.state.outputs]", lambda found: found == [["the end"]] * 2
    )
    moving = [(text, room) for text, room in asked(panel, "(leave(), pages)[1]") if "epoch" in text]
    shares = {int(found) for text, _ in moving for found in re.findall(r"epoch: *(\d+)%", text)}
    assert len(shares) > 2, moving[-1:]
    assert any(room == 2 and 'scope="row">0' in text and 'scope="row">1' in text for text, room in moving)
