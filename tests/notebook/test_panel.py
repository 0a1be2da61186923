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

from nbddp.capabilities.panel import page
from nbddp.capabilities.panel import state as panel_state
from nbddp.capabilities.panel.plan import PanelPlan
from nbddp.capabilities.panel.state import State
from nbddp.output.progress import STAGES
from tests.kernels import Kernel, loaded
from tests.unit.test_panel import CPU

REDRAWN = 0.2  # seconds


@pytest.mark.parametrize("plan", [PanelPlan(8, nnodes=128), PanelPlan(64)])
def test_the_layout_redraws_in_time(plan: PanelPlan) -> None:
    state = panel_state.known(State(plan=replace(plan, nproc=1)), CPU)
    began = time.process_time()
    state = panel_state.moved(state, "nproc", plan.nproc)
    shown = page.layout(state.considered) + page.lines(state.considered, "k")
    assert time.process_time() - began < REDRAWN
    assert f"world size {plan.nproc * plan.nnodes}" in shown


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
    state = panel_state.known(State(plan=PanelPlan(hosts="<b>&\"'")), CPU)
    refused = page.start(panel_state.failed(state, "<i>", ["<u>"]))
    for shown in (
        page.layout(state.considered),
        page.lines(state.considered, "k"),
        page.heading(state),
        refused,
        page.refusal(state.considered, state.considered.culprit),
    ):
        Balanced(shown)
        assert not re.search(r"<[biu]>[&<]", shown)


# -- in a kernel -----------------------------------------------------------------------------------


def with_panel(kernel: Kernel) -> Kernel:
    """A kernel whose `panel` is the panel of its pool, which is not started."""
    done = kernel.run("import nbddp, json, threading\npanel = nbddp.Panel()._panel\nview = panel.view")
    assert done.ok, done.error
    until(kernel, "panel.state.machine", bool)
    return kernel


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """As `with_panel`, until a test starts the pool."""
    with loaded(str(tmp_path_factory.mktemp("panel"))) as kernel:
        yield with_panel(kernel)


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


def test_start_starts_what_is_planned_and_all_panels_show_it(new_kernel: Kernel) -> None:
    shown = with_panel(new_kernel)
    made = shown.run("view.controls['nproc'].value, view.controls['oversubscribe'].value = 2, False\n"
                     "more = [nbddp.Panel()._panel for _ in range(9)]\nviews = [p.view for p in more]\n"
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
    assert shown.run("%ddp start").ok
    until(shown, "panel.state.pool_words()", lambda words: words.startswith("ready"))
    for code in ("%ddp panel", "nbddp.Panel()", "from nbddp.notebook.magics import standing_pool; standing_pool()"):
        bundle, *understudy = shown.run(code).displays
        assert len(understudy) == ("standing_pool" not in code)
        assert {"text/plain", "text/html", "image/png", "application/vnd.jupyter.widget-view+json"} <= set(bundle)
        assert bundle["text/plain"].startswith("picture of the panel: ready: world size")
        assert re.search(r"picture of the panel, taken \d{4}-\d\d-\d\d \d\d:\d\d", bundle["text/html"])


def test_a_panel_is_not_shown_with_a_cell_that_has_ended_since_the_last_look(shown: Kernel) -> None:
    assert shown.run("%ddp start").ok
    until(shown, "panel.state.pool_words()", lambda words: words.startswith("ready"))
    late = ("from nbddp.capabilities.panel import state as panel_state\nwith panel.session.model.together():\n"
            "    panel.session.model.change(panel_state.seen, panel.state.ranks, 'Cell In[1]', 1)\n"
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


ON_GPUS = """%%ddp
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = DDP(torch.nn.Linear(2, 2).cuda())
for _ in range(4): model(torch.ones(1, 2).cuda()).sum().backward()
print(model.module.weight.grad.device)
dist.destroy_process_group()"""


def test_gpus_are_simulated_and_taken_away_by_their_control(shown: Kernel) -> None:
    typed = shown.run("view.controls['nproc'].value, view.controls['visible'].value = 2, 'all'\n"
                      "view.controls['oversubscribe'].value = False\n"
                      "view.controls['simulate_gpus'].value = '2'")  # fmt: skip
    assert typed.ok, typed.error
    assert asked(shown, "panel.state.considered.cell") == "%%ddp --nproc 2 --simulate-gpus 2"
    assert asked(shown, "panel.state.considered.topology.equation()").endswith("each owns 1 simulated GPU")
    assert shown.run("view.start.click()").ok
    assert asked(shown, "panel.state.pool_words()").endswith("each owns 1 simulated GPU")
    assert shown.run(ON_GPUS).text() == "rank 0 │ cuda:0\nrank 1 │ cuda:1\n"
    of_times = "Simulated GPUs: the CPU computes in their place, so the times are not a GPU's."
    until(shown, "panel.state.curve.last", lambda last: last >= 2)
    assert asked(shown, "panel.state.timing_note") == of_times
    assert shown.run("view.step.value = 1\nview.buttons['Show'].click()").ok
    until(shown, "panel.state.step and panel.state.step.words", lambda words: words and of_times in words)
    assert asked(shown, "view.controls['simulate_gpus'].value") == "2xT4"
    assert shown.run("view.controls['simulate_gpus'].value = ''").ok
    assert "--simulate-gpus" not in asked(shown, "panel.state.considered.cell")
    assert asked(shown, "panel.state.considered.topology.simulates_gpus") is False
    assert shown.run("view.start.click()").ok
    assert asked(shown, "panel.state.pool_words()").endswith("on CPU")
    assert shown.run("%%ddp\nimport torch; print(torch.cuda.is_available())").text() == "ranks 0–1 │ False\n"


BROKEN = """from dataclasses import replace
from nbddp.pool import start_requests
real = start_requests.worker
start_requests.worker = lambda *args, **more: replace(real(*args, **more), url_file="/nowhere")
view.controls["nproc"].value = 3
view.start.click()
start_requests.worker = real"""


def test_a_start_that_fails_shows_why_and_the_end_of_the_log_and_the_next_one_works(shown: Kernel) -> None:
    test_a_cell_that_changes_the_pool_changes_the_panel(shown)
    done = shown.run(BROKEN)
    assert done.ok, done.error
    failure, log = asked(shown, "[panel.state.failure, panel.state.log]")
    assert re.match(r"rank \d exited while starting", failure), failure
    assert log
    page_of_start = next(filter(None, asked(shown, "[w.value for w, f in view._parts if f.__name__ == 'start']")))
    assert f"✕ {html.escape(failure)}" in page_of_start
    assert f"<pre>{html.escape(chr(10).join(log))}</pre>" in page_of_start
    assert shown.run("view.controls['nproc'].value = 2\nview.start.click()").ok
    assert asked(shown, "[panel.state.failure, panel.state.pool_words()[:5]]") == ["", "ready"]
    assert asked(shown, "[w.value for w, f in view._parts if f.__name__ == 'start']") == [""]


OTHERS = """from ipywidgets.widgets.widget import _instances
others = nbddp.Panel(nbddp.Pool(2))._panel
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


@pytest.mark.panel
def test_when_the_kernel_restarts_picture_and_words_stay_and_no_process_does(cold_kernel: Kernel) -> None:
    """Under an open panel that has started a pool and draws it."""
    first = cold_kernel.run("%ddp panel")
    ident, _ = [c["transient"]["display_id"] for _, kind, c in first.messages if kind == "display_data"]
    assert cold_kernel.run("from nbddp.notebook.magics import standing_pool\nimport json, psutil\n"
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
