"""The panel: what it plans, without a browser or a kernel, and what its commands do in a real kernel."""

from __future__ import annotations

import html
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import psutil
import pytest

from nbddp.base.share import STAGES, Share, Step
from nbddp.panel import page, words
from nbddp.panel import state as rules
from nbddp.panel.plan import DEFAULT, Plan, considered, plan_of
from nbddp.panel.state import Model, State
from nbddp.plan import options
from nbddp.plan.machine import Device, Node
from nbddp.plan.options import LaunchSpec
from nbddp.plan.topology import Topology
from tests.kernels import Kernel, loaded

CPU = [Node(0, "here", cores=8)]
GPUS = [Node(0, "here", tuple(Device(i, str(i)) for i in range(8)), cores=8)]
REDRAWN = 0.2  # seconds


# -- what is planned -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "machine", "cell", "torchrun"),
    [
        (Plan(4), CPU, "%%ddp --nproc 4", "torchrun --standalone --nproc-per-node 4 train.py"),
        (Plan(2, nnodes=2), CPU, "%%ddp --nproc 2 --nnodes 2", "--nnodes 2 --rdzv-backend c10d"),
        (Plan(2, gpus_per_proc=4, visible="own"), GPUS, "%%ddp --nproc 2 --gpus-per-proc 4 --visible own", "torchrun"),
        (Plan(2, visible="own"), CPU, "%%ddp --nproc 2", "torchrun"),
        (Plan(2, device="cpu"), GPUS, "%%ddp --nproc 2 --device cpu", "torchrun"),
        (Plan(9, oversubscribe=True), GPUS, "%%ddp --nproc 9 --oversubscribe", "torchrun"),
        (Plan(hosts="a,u@b"), CPU, "%%ddp --nproc 2 --hosts a,u@b", "--rdzv-endpoint a:29400"),
        (Plan(hang_after="never", timeout="60", max_restarts=3), CPU,
         "%%ddp --nproc 2 --hang-after never --timeout 60 --max-restarts 3", "--max-restarts 3"),
    ],
)  # fmt: skip
def test_a_plan_is_a_line_to_copy(plan: Plan, machine: list[Node], cell: str, torchrun: str) -> None:
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
        (Plan(4, gpus_per_proc=3), "gpus_per_proc", "gpus_per_proc", "12 GPUs, but there are 8; use --nproc 2"),
        (Plan(4, gpus_per_proc=3), "nproc", "nproc", "use --nproc 2"),
        (Plan(4, gpus_per_proc=3), "device", "nproc", "use --nproc 2"),
        (Plan(nnodes=9), "nnodes", "nnodes", "9 simulated nodes cannot share 8 GPUs"),
        (Plan(gpus_per_proc=2, device="cpu"), "device", "device", "contradict each other"),
        (Plan(timeout="soon"), "timeout", "timeout", "'soon' is not a time in seconds"),
        (Plan(hosts="a b"), "hosts", "hosts", "'a b' is not a host"),
    ],
)
def test_an_impossible_plan_is_explained_beside_the_control_that_causes_it(
    plan: Plan, moved: str, culprit: str, says: str
) -> None:
    found = considered(plan, GPUS, moved)
    assert found.topology is None
    assert not found.cell
    assert found.culprit == culprit
    assert says in page.refusal(found, culprit).replace("&#x27;", "'")
    assert not any(page.refusal(found, other) for other in ("nproc", "visible", "max_restarts") if other != culprit)


def test_hosts_that_are_not_connected_have_the_gpus_that_the_plan_needs() -> None:
    found = considered(Plan(hosts="a,b", gpus_per_proc=2), CPU)
    assert found.topology is not None
    assert [n.host for n in found.topology.nodes] == ["a", "b"]
    assert found.topology.gpus_per_proc == 2
    assert "when they are connected" in considered(Plan(hosts="a,b"), CPU).note
    known = [replace(GPUS[0], host="a"), replace(GPUS[0], index=1, host="b")]
    with_gpus = considered(Plan(hosts="a,b"), known).topology
    assert with_gpus is not None
    assert with_gpus.gpus_per_proc == 1


def test_a_standing_pool_sets_the_controls() -> None:
    placed = Topology.plan(CPU, nproc=3, nnodes=2)
    assert plan_of(LaunchSpec(visible="own"), placed) == Plan(3, nnodes=2, visible="own")
    assert plan_of(LaunchSpec(nproc="auto"), None) == DEFAULT


@pytest.mark.parametrize("plan", [Plan(8, nnodes=128), Plan(64)])
def test_the_layout_redraws_in_time(plan: Plan) -> None:
    state = rules.known(State(plan=replace(plan, nproc=1)), CPU)
    began = time.process_time()
    state = rules.moved(state, "nproc", plan.nproc)
    shown = page.layout(state.considered) + page.lines(state.considered, "k")
    assert time.process_time() - began < REDRAWN
    assert f"world size {plan.nproc * plan.nnodes}" in shown


# -- the state -------------------------------------------------------------------------------------


def test_a_start_ends_what_the_last_look_said_to_run() -> None:
    """No look is taken while a pool starts, and a start begins only while no cell runs."""
    state = rules.began(rules.seen(rules.known(State(), CPU), (), "Cell In[3]", 2))
    now = Topology.plan(CPU, nproc=2)
    assert rules.started(state, now, LaunchSpec(nproc=2), []).pool_words() == f"ready: {now.equation()}"


def test_a_start_goes_through_its_stages_and_may_fail() -> None:
    state = rules.began(rules.known(State(), CPU))
    assert not state.may_start
    seen = []
    for text in (Step("x", "agent"), Step("x", "controller"), Step("starting the controller", "engines"),
                 "importing torch in", Share("engines registered", 3, 4, "engines")):  # fmt: skip
        state = rules.reached(state, text)
        assert state.stage is not None
        seen.append(state.stage.part)
    assert seen == ["agent", "controller", "engines", "engines", "engines"], "by the value, whatever the words"
    assert state.pool_words() == "starting: engines registered (3 of 4) …"
    assert 'aria-current="step">▸ engines' in page.start(state)
    failed = rules.failed(state, "rank 0 ended", [f"line {i}" for i in range(99)])
    assert failed.may_start
    assert "✕ rank 0 ended" in page.start(failed)
    assert failed.log[-1] == "line 98"
    assert len(failed.log) == rules.LOG
    placed = Topology.plan(CPU, nproc=4)
    assert rules.started(state, placed, LaunchSpec(), ["a note"]).notice.endswith("a note")
    assert STAGES[-1] in rules.started(state, placed, LaunchSpec(), []).notice


HOSTS = [replace(GPUS[0], host="a"), replace(GPUS[0], index=1, host="b")]


@pytest.mark.parametrize(
    ("spec", "machine", "topology", "plan", "cell"),
    [
        (LaunchSpec(visible="own"), CPU, Topology.plan(CPU, nproc=3, nnodes=2), Plan(3, nnodes=2, visible="own"),
         "%%ddp --nproc 3 --nnodes 2"),
        (LaunchSpec(gpus_per_proc=4), GPUS, Topology.plan(GPUS, nproc=2, gpus_per_proc=4), Plan(2, gpus_per_proc=4),
         "%%ddp --nproc 2 --gpus-per-proc 4"),
        (LaunchSpec(device="cpu"), GPUS, Topology.plan(GPUS, nproc=3, device="cpu"), Plan(3, device="cpu"),
         "%%ddp --nproc 3 --device cpu"),
        (LaunchSpec(oversubscribe=True, visible="own"), GPUS, Topology.plan(GPUS, nproc=9, oversubscribe=True),
         Plan(9, oversubscribe=True, visible="own"), "%%ddp --nproc 9 --visible own --oversubscribe"),
        (LaunchSpec(hosts="a,b"), HOSTS, Topology.plan(HOSTS, nproc=2, nnodes=2), Plan(2, nnodes=2, hosts="a,b"),
         "%%ddp --nproc 2 --hosts a,b"),
    ],
)  # fmt: skip
def test_what_is_planned_begins_at_the_pool_that_a_cell_has_made(
    spec: LaunchSpec, machine: list[Node], topology: Topology, plan: Plan, cell: str
) -> None:
    state = rules.moved(rules.moved(rules.known(State(), machine), "nproc", 5), "timeout", "60")
    state = rules.placed(state, topology, spec)
    assert state.plan == replace(plan, timeout="60"), "what a cell alone has is left as it was"
    assert state.considered.cell == f"{cell} --timeout 60"
    assert state.considered.topology == topology
    moved = rules.moved(state, "nproc", 1)
    assert rules.placed(moved, topology, spec).plan.nproc == 1
    assert rules.placed(moved, None, spec).plan.nproc == 1
    assert rules.placed(moved, topology, replace(spec, hosts=None, device="cpu")).plan.device == "cpu"


def test_before_the_devices_are_known_nothing_can_be_started() -> None:
    state = rules.moved(State(), "nproc", 4)
    assert not state.may_start
    assert "looking at this machine" in page.layout(state.considered)
    assert rules.known(state, CPU).may_start


def test_views_are_told_of_what_changes_and_of_nothing_else() -> None:
    model, told = Model(rules.known(State(), CPU)), []
    leave = model.watch(lambda before, now: told.append(now.plan.nproc))
    model.change(rules.moved, "nproc", 3)
    model.change(rules.moved, "nproc", 3)
    model.change(rules.placed, None, LaunchSpec())
    leave()
    model.change(rules.moved, "nproc", 5)
    assert told == [3]
    assert not model.watched


def test_a_view_that_raises_is_reported_once_and_stops_neither_others_nor_who_changed_the_state() -> None:
    errors: list[Exception] = []
    model, told = Model(rules.known(State(), CPU), errors.append), []

    def bad(before: State, now: State) -> None:
        if now.plan.nnodes == 2:
            raise KeyError("another")
        raise ValueError(now.plan.nproc)

    model.watch(bad)
    model.watch(lambda before, now: told.append(now.plan.nproc))
    for nproc in (3, 4):
        model.change(rules.moved, "nproc", nproc)
    assert told == [3, 4]
    assert [repr(e) for e in errors] == ["ValueError(3)"]
    model.change(rules.moved, "nnodes", 2)
    assert [type(e) for e in errors] == [ValueError, KeyError]


class Balanced(HTMLParser):
    """Sees that every element that is opened is closed."""

    VOID = ("input", "br", "img", "progress")

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in self.VOID or self.open.pop() == tag


def test_what_users_type_is_text_on_the_page() -> None:
    state = rules.known(State(plan=Plan(hosts="<b>&\"'")), CPU)
    for shown in (page.layout(state.considered), page.lines(state.considered, "k"), page.heading(state), page.start(
        rules.failed(state, "<i>", ["<u>"])), page.refusal(state.considered, state.considered.culprit)):  # fmt: skip
        Balanced(shown)
        assert not re.search(r"<[biu]>[&<]", shown)


def test_words_say_what_the_panel_shows() -> None:
    state = rules.known(State(plan=Plan(4, nnodes=2)), CPU)
    said = words.words(state)
    assert said.startswith("no workers are running\nplanned:\n  world size 8 = 2 simulated nodes × 4 processes; on CPU")
    assert "%%ddp --nproc 4 --nnodes 2" in said
    assert "not possible: --gpus-per-proc 2" in words.words(rules.moved(state, "gpus_per_proc", 2))


# -- in a kernel -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel whose `panel` is the panel of its pool, which is not started."""
    with loaded(str(tmp_path_factory.mktemp("panel"))) as kernel:
        done = kernel.run("import nbddp, json, threading\npanel = nbddp.Panel()\nview = panel.view")
        assert done.ok, done.error
        until(kernel, "panel.state.machine", bool)
        yield kernel


def asked(kernel: Kernel, expression: str) -> Any:
    """The value of an expression in the kernel."""
    done = kernel.run(f"print(json.dumps({expression}, default=str))")
    assert done.ok, done.error
    return json.loads(done.text())


def until(kernel: Kernel, expression: str, true: Callable[[Any], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while not true(value := asked(kernel, expression)):
        assert time.monotonic() < end, value
        time.sleep(0.1)
    return value


def test_start_starts_what_is_planned_and_all_panels_show_it(shown: Kernel) -> None:
    made = shown.run("more = [nbddp.Panel() for _ in range(9)]\nviews = [p.view for p in more]\n"
                     "views[3].controls['nnodes'].value = 2")  # fmt: skip
    assert made.ok, made.error
    assert asked(shown, "[v.controls['nnodes'].value for v in [view, *views]]") == [2] * 10
    assert asked(shown, "panel.state.considered.cell") == "%%ddp --nproc 2 --nnodes 2"
    done = shown.run("seen = []\nstop = panel.session.model.watch(lambda before, now: seen.append(now.stage))\n"
                     "view.start.click()")  # fmt: skip
    assert done.ok, done.error
    assert asked(shown, "panel.state.pool_words()") == ("ready: world size 4 = 2 simulated nodes × 2 processes; on CPU")
    parts = asked(shown, "[s.part for s in seen if s]")
    assert [*dict.fromkeys(parts), asked(shown, "panel.state.notice").partition(":")[0]] == [*STAGES]
    assert asked(shown, "[s.text() for s in seen if s][-1]") == "devices assigned (on CPU)"
    assert shown.run("%%ddp\nimport os; print(os.environ['GROUP_RANK'])").ok


def test_a_panel_is_a_picture_and_words_and_widgets_in_one_output(shown: Kernel) -> None:
    until(shown, "panel.state.pool_words()", lambda words: words.startswith("ready"))  # the cell before has ended
    for code in ("%ddp panel", "nbddp.Panel()", "from nbddp.front.magics import standing_pool; standing_pool()"):
        bundle, *understudy = shown.run(code).displays
        assert len(understudy) == ("standing_pool" not in code)
        assert {"text/plain", "text/html", "image/png", "application/vnd.jupyter.widget-view+json"} <= set(bundle)
        assert bundle["text/plain"].startswith("ready: world size")


def test_a_panel_is_not_shown_with_a_cell_that_has_ended_since_the_last_look(shown: Kernel) -> None:
    late = ("from nbddp.panel import state as rules\nwith panel.session.model.together():\n"
            "    panel.session.model.change(rules.seen, panel.state.ranks, 'Cell In[1]', 1)\n"
            "    print(panel.state.pool_words(), repr(panel).splitlines()[0], sep='\\n')\n"
            "    print(panel.state.pool_words())")  # fmt: skip
    done = shown.run(late)
    assert done.ok, done.error
    seen, *said = done.text().splitlines()
    assert seen.startswith("Cell In[1] is running")
    assert [line.partition(": world size")[0] for line in said] == ["ready", "ready"]


def test_a_saved_panel_has_the_picture_of_the_pool_as_the_next_cell_finds_it(shown: Kernel) -> None:
    first = shown.run("%ddp panel")
    ident, _ = [c["transient"]["display_id"] for _, kind, c in first.messages if kind == "display_data"]
    found: list[str] = []

    def run(code: str) -> None:
        updates = [c for _, kind, c in shown.run(code).messages if kind == "update_display_data"]
        found.extend(c["data"]["text/plain"] for c in updates if c["transient"]["display_id"] == ident)

    run("%%ddp --nproc 3 --nnodes 1\n1")
    end = time.monotonic() + 30
    while not found and time.monotonic() < end:
        run("import time; time.sleep(0.2)")
    run("1")
    assert len(found) == 1, "a picture is renewed once for each change"
    assert "world size 3 =" in found[0]


def test_what_is_seen_once_the_widgets_are_gone_is_made_of_css_alone(shown: Kernel) -> None:
    """Where CSS is removed nothing of it is seen, as the output before has the picture."""
    _, understudy = shown.run("%ddp panel").displays
    found = re.sub(r"<style>.*?</style>", "", understudy["text/html"], flags=re.S)
    assert re.sub(r"<[^>]*>", "", found) == understudy["text/plain"] == ""
    assert "world size" in found
    Balanced(understudy["text/html"])


def test_a_pool_that_has_not_started_has_its_repr(shown: Kernel) -> None:
    (bundle,) = shown.run("nbddp.Pool(2)").displays
    assert set(bundle) == {"text/plain"}


def test_a_cell_that_changes_the_pool_changes_the_panel(shown: Kernel) -> None:
    assert shown.run("%%ddp --nproc 1 --nnodes 1\n1").ok
    until(shown, "panel.state.pool_words()", lambda words: "world size 1 =" in words)


def test_start_keeps_a_pool_that_a_cell_has_made_with_options(shown: Kernel) -> None:
    assert shown.run("%%ddp --nproc 2 --nnodes 1 --visible own --oversubscribe\nkept = 1").ok
    until(shown, "panel.state.considered.cell", lambda cell: cell == "%%ddp --nproc 2 --oversubscribe")
    assert asked(shown, "[view.controls[n].value for n in ('nproc', 'visible', 'oversubscribe')]") == [2, "own", True]
    assert shown.run("view.start.click()").ok
    done = shown.run("%%ddp\nprint(kept)")
    assert done.ok, done.error


BROKEN = """from nbddp.pool import requests
real = requests.worker
requests.worker = lambda *args, **more: {**real(*args, **more), "url_file": "/nowhere"}
view.controls["nproc"].value = 3
view.start.click()
requests.worker = real"""


def test_a_start_that_fails_shows_why_and_the_end_of_the_log_and_the_next_one_works(shown: Kernel) -> None:
    done = shown.run(BROKEN)
    assert done.ok, done.error
    failure, log = asked(shown, "[panel.state.failure, panel.state.log]")
    assert re.match(r"rank \d ended while starting", failure), failure
    assert log
    page_of_start = next(filter(None, asked(shown, "[w.value for w, f in view._parts if f.__name__ == 'start']")))
    assert f"✕ {html.escape(failure)}" in page_of_start
    assert f"<pre>{html.escape(chr(10).join(log))}</pre>" in page_of_start
    assert shown.run("view.controls['nproc'].value = 2\nview.start.click()").ok
    assert asked(shown, "[panel.state.failure, panel.state.pool_words()[:5]]") == ["", "ready"]
    assert asked(shown, "[w.value for w, f in view._parts if f.__name__ == 'start']") == [""]


OTHERS = """from ipywidgets.widgets.widget import _instances
others = nbddp.Panel(nbddp.Pool(2))
def tree(one):
    return [one.model_id, *(i for child in getattr(one, "children", ()) for i in tree(child))]
made = tree(others.view.widget)
before = [i in _instances for i in made]
others.close()"""


def test_panels_that_are_closed_leave_nothing(shown: Kernel) -> None:
    from_here = "sum(t.name == 'nbddp-panel' for t in threading.enumerate())"
    assert asked(shown, from_here) == 1
    done = shown.run(OTHERS)
    assert done.ok, done.error
    assert asked(shown, "[len(made) > 30, all(before), [i in _instances for i in made].count(True)]") == [True, True, 0]
    until(shown, from_here, lambda count: count == 1)


def test_when_the_kernel_restarts_picture_and_words_stay_and_no_process_does(cold_kernel: Kernel) -> None:
    """Under an open panel that has started a pool and draws it."""
    first = cold_kernel.run("%ddp panel")
    ident, _ = [c["transient"]["display_id"] for _, kind, c in first.messages if kind == "display_data"]
    assert cold_kernel.run("from nbddp.front.magics import standing_pool\nimport json, psutil\n"
                          "standing_pool().start()").ok  # fmt: skip
    below = asked(cold_kernel, "[[p.pid, p.create_time()] for p in psutil.Process().children(recursive=True)]")
    assert len(below) > 3
    cold_kernel.client.shutdown(restart=True)
    end, last = time.monotonic() + 60, None
    while last is None and time.monotonic() < end:
        message = cold_kernel.client.get_iopub_msg(timeout=60)
        content = message["content"]
        if message["msg_type"] == "update_display_data" and content["transient"]["display_id"] == ident:
            last = content["data"]
    assert last is not None
    assert set(last) == {"text/plain", "text/html", "image/png"}
    while (left := [p for p in map(living, below) if p is not None]) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left


def living(known: Sequence[Any]) -> psutil.Process | None:
    """The process of this pid and start time, if it runs."""
    pid, began = known
    try:
        process = psutil.Process(pid)
        return process if process.create_time() == began and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None
