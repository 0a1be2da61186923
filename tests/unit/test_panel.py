"""The panel: what it plans, without a browser or a kernel, and what its commands do in a real kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbddp.capabilities.panel import page
from nbddp.capabilities.panel import state as panel_state
from nbddp.capabilities.panel.plan import DEFAULT, PanelPlan, considered, on_paper, plan_of
from nbddp.capabilities.panel.state import PanelModel, State
from nbddp.launch import options
from nbddp.launch.machine import Device, Node
from nbddp.launch.options import LaunchSpec
from nbddp.launch.topology import Topology
from nbddp.output.progress import STAGES, Progress, StageText
from nbddp.protocol import capability
from nbddp.protocol.pool_parts import PoolParts

CPU = [Node(0, "here", cores=8)]
GPUS = [Node(0, "here", tuple(Device(i, str(i)) for i in range(8)), cores=8)]
PLACE = PoolParts(None, capability.rows()).placed_on  # what every pool's panel plans with


# -- what is planned -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "machine", "cell", "torchrun"),
    [
        (PanelPlan(4), CPU, "%%ddp --nproc 4", "torchrun --standalone --nproc-per-node 4 train.py"),
        (PanelPlan(2, nnodes=2), CPU, "%%ddp --nproc 2 --nnodes 2", "--nnodes 2 --rdzv-backend c10d"),
        (
            PanelPlan(2, gpus_per_proc=4, visible="own"),
            GPUS,
            "%%ddp --nproc 2 --gpus-per-proc 4 --visible own",
            "torchrun",
        ),
        (PanelPlan(2, visible="own"), CPU, "%%ddp --nproc 2", "torchrun"),
        (PanelPlan(2, device="cpu"), GPUS, "%%ddp --nproc 2 --device cpu", "torchrun"),
        (PanelPlan(9, oversubscribe=True), GPUS, "%%ddp --nproc 9 --oversubscribe", "torchrun"),
        (PanelPlan(hosts="a,u@b"), CPU, "%%ddp --nproc 2 --hosts a,u@b", "--rdzv-endpoint a:29400"),
        (
            PanelPlan(hang_after="never", timeout="60", max_restarts=3),
            CPU,
            "%%ddp --nproc 2 --hang-after never --timeout 60 --max-restarts 3",
            "--max-restarts 3",
        ),
    ],
)
def test_a_plan_is_a_line_to_copy(plan: PanelPlan, machine: list[Node], cell: str, torchrun: str) -> None:
    found = considered(plan, machine)
    assert found.cell == cell
    assert torchrun in found.torchrun
    assert found.topology is not None
    spec = options.parse_cell(found.cell.removeprefix("%%ddp"))
    assert spec.nproc == plan.nproc
    assert spec.as_request("", 1).max_restarts == plan.max_restarts


@pytest.mark.parametrize(
    ("plan", "moved", "culprit", "says"),
    [
        (PanelPlan(4, gpus_per_proc=3), "gpus_per_proc", "gpus_per_proc", "12 GPUs, but there are 8; use --nproc 2"),
        (PanelPlan(4, gpus_per_proc=3), "nproc", "nproc", "use --nproc 2"),
        (PanelPlan(4, gpus_per_proc=3), "device", "nproc", "use --nproc 2"),
        (PanelPlan(nnodes=9), "nnodes", "nnodes", "9 simulated nodes cannot share 8 GPUs"),
        (PanelPlan(gpus_per_proc=2, device="cpu"), "device", "device", "contradict each other"),
        (PanelPlan(timeout="soon"), "timeout", "timeout", "'soon' is not a time in seconds"),
        (PanelPlan(hosts="a b"), "hosts", "hosts", "'a b' is not a host"),
    ],
)
def test_an_impossible_plan_is_explained_beside_the_control_that_causes_it(
    plan: PanelPlan, moved: str, culprit: str, says: str
) -> None:
    found = considered(plan, GPUS, moved)
    assert found.topology is None
    assert not found.cell
    assert found.culprit == culprit
    assert says in page.refusal(found, culprit).replace("&#x27;", "'")
    assert not any(page.refusal(found, other) for other in ("nproc", "visible", "max_restarts") if other != culprit)


def test_hosts_that_are_not_connected_have_the_gpus_that_the_plan_needs() -> None:
    found = considered(PanelPlan(hosts="a,b", gpus_per_proc=2), CPU)
    assert found.topology is not None
    assert [n.host for n in found.topology.nodes] == ["a", "b"]
    assert found.topology.gpus_per_proc == 2
    assert "when they are connected" in considered(PanelPlan(hosts="a,b"), CPU).note
    known = [replace(GPUS[0], host="a"), replace(GPUS[0], index=1, host="b")]
    with_gpus = considered(PanelPlan(hosts="a,b"), known).topology
    assert with_gpus is not None
    assert with_gpus.gpus_per_proc == 1


def test_a_standing_pool_sets_the_controls() -> None:
    placed = Topology.plan(CPU, nproc=3, nnodes=2)
    assert plan_of(LaunchSpec(visible="own"), placed) == PanelPlan(3, nnodes=2, visible="own")
    assert plan_of(LaunchSpec(nproc="auto"), None) == DEFAULT


# -- simulated GPUs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "cell", "says"),
    [
        (PanelPlan(simulate_gpus=" 4 "), "%%ddp --nproc 2 --simulate-gpus 4", "each owns 1 simulated GPU"),
        (
            PanelPlan(2, nnodes=2, simulate_gpus="4xA100-80GB", gpus_per_proc=2, visible="own"),
            "%%ddp --nproc 2 --nnodes 2 --simulate-gpus 4xA100-80GB --gpus-per-proc 2 --visible own",
            "each owns 2 simulated GPUs",
        ),
        (PanelPlan(simulate_gpus="0"), "%%ddp --nproc 2 --simulate-gpus 0", "on CPU"),
        (PanelPlan(hosts="a,b", simulate_gpus="2"), "%%ddp --nproc 2 --hosts a,b --simulate-gpus 2", "1 simulated GPU"),
    ],
)
def test_a_plan_has_the_gpus_that_it_simulates(plan: PanelPlan, cell: str, says: str) -> None:
    found = considered(plan, CPU, place=PLACE)
    assert found.cell == cell
    assert found.topology is not None
    assert says in found.topology.equation()
    simulates = "simulated GPU" in says
    shown = page.layout(found) + page.lines(found, "k")
    assert ("the GPUs are simulated: the CPU computes" in shown) is simulates
    assert ("the torchrun line is for real GPUs" in shown) is simulates
    assert "simulate" not in found.torchrun


@pytest.mark.parametrize(
    ("plan", "moved", "culprit", "says"),
    [
        (PanelPlan(simulate_gpus="4xA1000"), "nproc", "simulate_gpus", "no GPU 'A1000' is known; did you mean A100"),
        (PanelPlan(simulate_gpus="99"), "simulate_gpus", "simulate_gpus", "1 to 16 simulated GPUs, not 99"),
        (PanelPlan(4, simulate_gpus="2"), "simulate_gpus", "simulate_gpus", "use --nproc 2"),
        (PanelPlan(4, simulate_gpus="2"), "nproc", "nproc", "use --nproc 2"),
    ],
)
def test_gpus_that_cannot_be_simulated_are_explained_below_a_control(
    plan: PanelPlan, moved: str, culprit: str, says: str
) -> None:
    found = considered(plan, CPU, moved, PLACE)
    assert (found.topology, found.cell, found.culprit) == (None, "", culprit)
    assert says in page.refusal(found, culprit).replace("&#x27;", "'")


def test_an_empty_control_takes_simulated_gpus_from_a_pool() -> None:
    """The machine's own are planned with again; the line to copy needs no option for that."""
    spec = LaunchSpec(nproc=2, simulate_gpus="4xT4")
    standing = Topology.plan(PLACE(spec, GPUS), nproc=2)
    state = panel_state.known(State(place=PLACE), GPUS)
    state = panel_state.placed(state, standing, spec)
    assert state.plan.simulate_gpus == "4xT4"
    assert state.considered.topology == standing
    assert options.merged(state.plan.spec(), spec).simulate_gpus == "4xT4"
    assert "the torchrun line is for real GPUs" in state.describe()
    emptied = panel_state.moved(state, "simulate_gpus", "")
    assert options.merged(emptied.plan.spec(), spec).simulate_gpus is None
    assert emptied.considered.cell == "%%ddp --nproc 2"
    assert emptied.considered.topology == Topology.plan(GPUS, nproc=2)


def test_simulated_gpus_are_drawn_before_the_machine_is_known() -> None:
    drawn = on_paper(PanelPlan(2, nnodes=2, simulate_gpus="4"), PLACE)
    assert drawn is not None
    assert drawn.equation() == "world size 4 = 2 planned nodes × 2 processes; each owns 1 simulated GPU"
    assert on_paper(PanelPlan(8, simulate_gpus="4"), PLACE) is None


def test_idle_gpus_are_said_to_be_simulated() -> None:
    assert "simulated GPU 2, 3 idle" in page.layout(considered(PanelPlan(simulate_gpus="4"), CPU, place=PLACE))
    assert " · GPU 2, 3, 4, 5, 6, 7 idle" in page.layout(considered(PanelPlan(), GPUS))


def test_without_the_capability_the_panel_plans_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = {name: option for name, option in options.known().items() if name != "simulate_gpus"}
    monkeypatch.setattr(options, "known", lambda: rest)
    assert PanelPlan(3).spec().simulate_gpus is None


# -- the state -------------------------------------------------------------------------------------


def test_a_start_ends_what_the_last_look_said_to_run() -> None:
    """No look is taken while a pool starts, and a start begins only while no cell runs."""
    state = panel_state.began(panel_state.seen(panel_state.known(State(), CPU), (), "Cell In[3]", 2))
    now = Topology.plan(CPU, nproc=2)
    assert panel_state.started(state, now, LaunchSpec(nproc=2), []).pool_words() == f"ready: {now.equation()}"


def test_a_start_goes_through_its_stages_and_may_fail() -> None:
    state = panel_state.began(panel_state.known(State(), CPU))
    assert not state.may_start
    seen = []
    for text in (StageText("x", "agent"), StageText("x", "controller"), StageText("starting the controller", "engines"),
                 "importing torch in", Progress("engines registered", 3, 4, "engines")):  # fmt: skip
        state = panel_state.reached(state, text)
        assert state.stage is not None
        seen.append(state.stage.part)
    assert seen == ["agent", "controller", "engines", "engines", "engines"], "by the value, whatever the words"
    assert state.pool_words() == "starting: engines registered (3 of 4) …"
    assert 'aria-current="step">▸ engines' in page.start(state)
    failed = panel_state.failed(state, "rank 0 ended", [f"line {i}" for i in range(99)])
    assert failed.may_start
    assert "✕ rank 0 ended" in page.start(failed)
    assert failed.log[-1] == "line 98"
    assert len(failed.log) == panel_state.LOG
    placed = Topology.plan(CPU, nproc=4)
    assert panel_state.started(state, placed, LaunchSpec(), ["a note"]).notice.endswith("a note")
    assert STAGES[-1] in panel_state.started(state, placed, LaunchSpec(), []).notice


HOSTS = [replace(GPUS[0], host="a"), replace(GPUS[0], index=1, host="b")]


@pytest.mark.parametrize(
    ("spec", "machine", "topology", "plan", "cell"),
    [
        (
            LaunchSpec(visible="own"),
            CPU,
            Topology.plan(CPU, nproc=3, nnodes=2),
            PanelPlan(3, nnodes=2, visible="own"),
            "%%ddp --nproc 3 --nnodes 2",
        ),
        (
            LaunchSpec(gpus_per_proc=4),
            GPUS,
            Topology.plan(GPUS, nproc=2, gpus_per_proc=4),
            PanelPlan(2, gpus_per_proc=4),
            "%%ddp --nproc 2 --gpus-per-proc 4",
        ),
        (
            LaunchSpec(device="cpu"),
            GPUS,
            Topology.plan(GPUS, nproc=3, device="cpu"),
            PanelPlan(3, device="cpu"),
            "%%ddp --nproc 3 --device cpu",
        ),
        (
            LaunchSpec(oversubscribe=True, visible="own"),
            GPUS,
            Topology.plan(GPUS, nproc=9, oversubscribe=True),
            PanelPlan(9, oversubscribe=True, visible="own"),
            "%%ddp --nproc 9 --visible own --oversubscribe",
        ),
        (
            LaunchSpec(hosts="a,b"),
            HOSTS,
            Topology.plan(HOSTS, nproc=2, nnodes=2),
            PanelPlan(2, nnodes=2, hosts="a,b"),
            "%%ddp --nproc 2 --hosts a,b",
        ),
    ],
)
def test_what_is_planned_begins_at_the_pool_that_a_cell_has_made(
    spec: LaunchSpec, machine: list[Node], topology: Topology, plan: PanelPlan, cell: str
) -> None:
    state = panel_state.moved(panel_state.moved(panel_state.known(State(), machine), "nproc", 5), "timeout", "60")
    state = panel_state.placed(state, topology, spec)
    assert state.plan == replace(plan, timeout="60"), "what a cell alone has is left as it was"
    assert state.considered.cell == f"{cell} --timeout 60"
    assert state.considered.topology == topology
    moved = panel_state.moved(state, "nproc", 1)
    assert panel_state.placed(moved, topology, spec).plan.nproc == 1
    assert panel_state.placed(moved, None, spec).plan.nproc == 1
    assert panel_state.placed(moved, topology, replace(spec, hosts=None, device="cpu")).plan.device == "cpu"


def test_before_the_devices_are_known_nothing_can_be_started() -> None:
    state = panel_state.moved(State(), "nproc", 4)
    assert not state.may_start
    assert "checking this machine" in page.layout(state.considered)
    assert panel_state.known(state, CPU).may_start


def test_views_are_told_of_what_changes_and_of_nothing_else() -> None:
    model, told = PanelModel(panel_state.known(State(), CPU)), []
    leave = model.watch(lambda before, now: told.append(now.plan.nproc))
    model.change(panel_state.moved, "nproc", 3)
    model.change(panel_state.moved, "nproc", 3)
    model.change(panel_state.placed, None, LaunchSpec())
    leave()
    model.change(panel_state.moved, "nproc", 5)
    assert told == [3]
    assert not model.watched


def test_a_view_that_raises_is_reported_once_and_stops_neither_others_nor_who_changed_the_state() -> None:
    errors: list[Exception] = []
    model, told = PanelModel(panel_state.known(State(), CPU), errors.append), []

    def bad(before: State, now: State) -> None:
        if now.plan.nnodes == 2:
            raise KeyError("another")
        raise ValueError(now.plan.nproc)

    model.watch(bad)
    model.watch(lambda before, now: told.append(now.plan.nproc))
    for nproc in (3, 4):
        model.change(panel_state.moved, "nproc", nproc)
    assert told == [3, 4]
    assert [repr(e) for e in errors] == ["ValueError(3)"]
    model.change(panel_state.moved, "nnodes", 2)
    assert [type(e) for e in errors] == [ValueError, KeyError]


def test_words_say_what_the_panel_shows() -> None:
    state = panel_state.known(State(plan=PanelPlan(4, nnodes=2)), CPU)
    said = state.describe()
    assert said.startswith("no workers are running\nplanned:\n  world size 8 = 2 simulated nodes × 4 processes; on CPU")
    assert "%%ddp --nproc 4 --nnodes 2" in said
    assert "not possible: --gpus-per-proc 2" in panel_state.moved(state, "gpus_per_proc", 2).describe()
