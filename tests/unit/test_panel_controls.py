"""Which of the panel's buttons act, what Start will do, and what is drawn of a run's memory and of runs before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from nbddp.capabilities.debugger.transcript import Talk
from nbddp.capabilities.panel import meters, page
from nbddp.capabilities.panel import state as panel_state
from nbddp.capabilities.panel.curves import Curve, cut, top
from nbddp.capabilities.panel.plan import PanelPlan
from nbddp.capabilities.panel.rows import Rank, Use
from nbddp.capabilities.panel.state import State, start_label, why_off
from nbddp.errors import BadInput
from nbddp.launch.options import LaunchSpec
from nbddp.launch.topology import Topology
from nbddp.lessons.framework.explorer import Choice, Explorer, Slider, Steps
from nbddp.teach import explore
from tests.unit.test_panel import CPU

EMPTY = panel_state.known(State(plan=PanelPlan(2)), CPU)
POOL = panel_state.placed(EMPTY, Topology.plan(CPU, nproc=2), LaunchSpec())
RUNS = replace(POOL, program="Cell In[3]", ranks=(Rank(0, "node 0", "cpu", "running"),))
BLOCKED = replace(RUNS, ranks=(Rank(0, "node 0", "cpu", "waiting"),))
DEBUGS = replace(RUNS, talks=(Talk(0, stopped=True),))


@pytest.mark.parametrize(
    ("state", "acts"),
    [
        (EMPTY, {"Start"}),
        (POOL, {"Stacks", "Restart", "Shut down"}),
        (replace(POOL, has_failed=True), {"Stacks", "Restart", "Shut down", "Post-mortem"}),
        (RUNS, {"Stop", "Stacks", "Restart", "Shut down"}),
        (BLOCKED, {"Stop", "Free", "Stacks", "Restart", "Shut down"}),
        (DEBUGS, {"Stop", "Stacks", "Restart", "Shut down", "Next", "Step in", "Out", "Continue", "Send"}),
        (replace(POOL, ranks=(Rank(0, "node 0", "cpu", "dead"),)), {"Start", "Stacks", "Restart", "Shut down"}),
    ],
    ids=["no pool", "ready", "failed", "runs", "blocked", "debugs", "a dead rank"],
)
def test_a_button_acts_where_it_would_do_something(state: State, acts: set[str]) -> None:
    assert {name for name, why in why_off(state).items() if not why} == acts


def test_start_is_named_by_what_it_will_do() -> None:
    assert start_label(EMPTY) == "Start 2 workers"
    assert start_label(POOL) == "Start 2 workers"
    assert start_label(panel_state.moved(POOL, "nproc", 3)) == "Resize to 3 workers"
    assert start_label(panel_state.moved(POOL, "visible", "own")) == "Change the pool"


def test_a_long_run_keeps_as_many_samples_as_can_be_drawn_and_another_run_begins_anew() -> None:
    found: tuple[meters.Sample, ...] = ()
    for at in range(2000):
        found = meters.sampled(found, meters.sample(float(at), [Use(0.0, memory=at), Use(0.0, memory=2 * at, gpu=50)]))
    assert len(found) <= meters.SAMPLES
    assert (found[-1].memory, found[-1].gpu) == (2 * int(found[-1].at), 50)
    assert found[-1].at > 1900
    assert meters.sampled(found, meters.Sample(1.0)) == (meters.Sample(1.0),)
    shown = page.meters(State(meters=found))
    assert shown.count("<svg") == 2
    assert "GPU utilisation" in shown
    assert "GPU" not in page.meters(State(meters=tuple(replace(s, gpu=None) for s in found)))


def test_runs_are_kept_to_compare_with() -> None:
    curve = Curve(1, 3, ((1, 0.1, 0.05), (2, 0.2, 0.1), (3, 0.3, 0.2)))
    state = State()
    for number in range(1, 12):
        run = meters.past(number, f"Cell In[{number}]", curve, [meters.Sample(1.0, memory=1 << 20)])
        state = panel_state.ended(state, run, has_failed=False)
    assert [run.number for run in state.past] == [*range(4, 12)]
    assert page.past(state).index("Cell In[11]") < page.past(state).index("Cell In[4]")
    assert "200 ms" in page.past(state)
    assert panel_state.ended(state, meters.past(12, "f", Curve(), []), has_failed=True).past == state.past


def test_steps_longer_than_the_scale_are_marked() -> None:
    points = tuple((n, 9.0 if n == 40 else 0.1, 0.05) for n in range(1, 101))
    state = State(curve=Curve(1, 100, points))
    assert cut(state.curve, top(state.curve)) == [(40, 9.0)]
    assert "step 40: 9.00 s" in page.curves(state)
    assert page.curves(state).count("▲") == 1
    assert "▲ 1 step longer than the scale" in page.legend(state)
    even = State(curve=Curve(1, 100, tuple((n, 0.1, 0.05) for n, *_ in points)))
    assert "▲" not in page.legend(even)


def test_an_answer_is_of_a_page_and_a_step_that_is_wanted_is_not_moved_back() -> None:
    answered = panel_state.said(State(), "stacks of all ranks", "many lines", panel_state.RANKS)
    assert (answered.page, answered.detail) == ("Ranks", "many lines")
    gone = panel_state.said(answered, "")
    assert (gone.page, gone.detail, gone.notice) == ("", "", "")
    wanted = panel_state.wants(State(run=1), 7)
    drawn = panel_state.selected(wanted, panel_state.Timeline(5, ""))
    assert drawn.wanted == 7
    assert panel_state.timed(drawn, 1, Curve()).wanted == 7
    assert panel_state.timed(drawn, 2, Curve()).wanted == -1


EXPLORERS = [name for name in dir(explore) if isinstance(getattr(explore, name), Explorer)]
STEPPED = [name for name in EXPLORERS if any(isinstance(c, Steps) for c in getattr(explore, name).controls)]


def values(control: Slider | Choice) -> list[Any]:
    if isinstance(control, Choice):
        return [o[1] if isinstance(o, tuple) else o for o in control.options]
    return [*range(control.low, control.high + 1, control.step)]


@pytest.mark.parametrize("name", EXPLORERS)
def test_every_control_of_an_explorer_changes_something_where_it_begins(name: str) -> None:
    explorer = getattr(explore, name)
    for control in explorer.controls:
        settings = [{**explorer.begins, control.name: value} for value in values(control)]
        said, drawn = (differ(show, settings) for show in (words_of(explorer), picture_of(explorer)))
        assert next(said, None) or next(drawn, None), control.name


def words_of(explorer: Explorer) -> Callable[..., object]:
    return lambda **setting: explorer.simulate(**setting).describe()


def picture_of(explorer: Explorer) -> Callable[..., object]:
    return lambda **setting: explorer.show(**setting).png()


def differ(shown: Callable[..., object], settings: Sequence[dict[str, Any]]) -> Iterator[bool]:
    """True as soon as two of them are shown differently."""
    first: list[object] = []
    for setting in settings:
        with contextlib.suppress(BadInput):  # a sentence is no change
            found = shown(**setting)
            if first and found != first[0]:
                yield True
            first.append(found)


@pytest.mark.parametrize("name", STEPPED)
def test_every_move_of_an_explorer_changes_something(name: str) -> None:
    explorer = getattr(explore, name)
    (steps,) = [c for c in explorer.controls if isinstance(c, Steps)]
    for setting in (*explorer.settings, explorer.begins):
        most = steps.most(explorer.simulate(**setting))
        shown = [explorer.simulate(**{**setting, steps.name: n}) for n in range(steps.low, most + 1)]
        texts = [found.describe() for found in shown]
        assert all(a != b for a, b in pairwise(texts)), setting
        assert most < steps.high or steps.moves is None or name == "pipeline"
