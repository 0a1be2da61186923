"""The panel: what it plans, without a browser or a kernel, and what its commands do in a real kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbddp.capabilities.panel import page
from nbddp.capabilities.panel import state as panel_state
from nbddp.capabilities.panel.plan import DEFAULT, PanelPlan, considered, plan_of
from nbddp.capabilities.panel.state import PanelModel, State
from nbddp.launch import options
from nbddp.launch.machine import Device, Node
from nbddp.launch.options import LaunchSpec
from nbddp.launch.topology import Topology
from nbddp.output.progress import STAGES, Progress, StageText

CPU = [Node(0, "here", cores=8)]
GPUS = [Node(0, "here", tuple(Device(i, str(i)) for i in range(8)), cores=8)]


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
    assert spec.request("", 1).max_restarts == plan.max_restarts


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
    assert "looking at this machine" in page.layout(state.considered)
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
