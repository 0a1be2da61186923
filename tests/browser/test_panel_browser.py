"""The panel in real front ends, in a real browser: a pool is started, watched, stopped and debugged with the mouse.

One notebook in JupyterLab and one in Notebook 7 are always opened; how all pages look in both themes and two widths,
and how soon the buttons act, by `-m panel`. Set NBDDP_PICTURES to a folder to keep the pictures.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.browser.test_browser import PATIENCE, browsers, sync_api, until
from tests.looks.front_ends import STRUCTURE, THEMES, Page, opened
from tests.looks.outputs import Output
from tests.looks.structure import Seen

TRAIN = """%%ddp
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group()
model = DDP(torch.nn.Linear(64, 64))
for step in range(100_000):
    if dist.get_rank() == 1: time.sleep(0.02)
    model(torch.randn(8, 64)).sum().backward()
    if step % 10 == 0: print('step', step, 'on', dist.get_rank())"""
HANG = """%%ddp --nproc 4 --hang-after never
import time, torch, torch.distributed as dist
dist.init_process_group()
if dist.get_rank() == 3: time.sleep(1000)
dist.all_reduce(torch.ones(1))"""
BREAK = """%%ddp
import os
rank = int(os.environ['RANK'])
breakpoint()
print('the end')"""
EXPLORE = "from nbddp.teach import explore\nexplore.layout()"
CELLS = (Output("load", "%load_ext nbddp"), Output("panel", "%ddp panel"), Output("train", TRAIN),
         Output("hang", HANG), Output("break", BREAK), Output("explore", EXPLORE))  # fmt: skip
PAGES = ("Launch", "Ranks", "Output", "Timings", "Debugger")
WIDTHS = (900, 1400)
START = re.compile(r"Start \d+ workers?|Resize to \d+ workers?")


class Panel:
    """The panel on a page."""

    def __init__(self, page: Page):
        self.page = page
        for number in (0, 1):
            page.ended(page.begin(number))
        page.close_dialogs()
        self.at = page.page.locator(".nbddp-panel").first
        self.expect = sync_api.expect(self.at)
        sync_api.expect.set_options(timeout=1000 * PATIENCE)
        self.says("world size 2 = 1 node × 2 processes")

    def says(self, text: str) -> None:
        sync_api.expect(self.at).to_contain_text(text)

    def press(self, name: str | re.Pattern[str]) -> None:
        self.at.get_by_role("button", name=name, exact=True).click()

    def turn_to(self, name: str) -> None:
        """Show a page, and see that it is announced as the active one."""
        tab = self.at.get_by_role("tab", name=name, exact=True)
        tab.click()
        sync_api.expect(self.at.get_by_role("tabpanel", name=name)).to_be_visible()
        sync_api.expect(tab).to_have_attribute("aria-selected", "true")
        sync_api.expect(self.at.get_by_role("tab", selected=True)).to_have_count(1)

    def start(self) -> None:
        self.press(START)

    def fill(self, label: str, text: str) -> None:
        self.at.get_by_label(label, exact=True).fill(text)
        self.at.get_by_label(label, exact=True).press("Tab")


@contextmanager
def panel(front: str, base: Path, python: str = "", scale: float = 1, kernel: str = "") -> Iterator[Panel]:
    if not browsers():
        pytest.skip("to test in a browser: apt-get install chromium, or playwright install chromium")
    with opened(front, CELLS, base, scale=scale, kernel=kernel, **({"python": python} if python else {})) as page:
        yield Panel(page)


def go_through(shown: Panel) -> None:
    """Start, watch, stop: all with the mouse, and cells meanwhile."""
    page = shown.page
    shown.start()
    shown.says("ready: world size 2")
    shown.turn_to("Ranks")
    act(shown, Stop=False, Free=False, Stacks=True, Restart=True)
    cell = page.begin(2)
    shown.says("◂ slowest")
    act(shown, Stop=True, Stacks=True, Restart=True)
    assert contrasted_red(shown.at.get_by_role("button", name="Stop").evaluate(COLOURS))
    answers_belong_to_their_page(shown)
    first = shown.at.locator("table.strip").inner_text()
    until(lambda: shown.at.locator("table.strip").inner_text() != first, "another look")
    assert shown.at.locator("tr.slowest th").inner_text() == "1"
    click_on_a_step(shown)
    keep_the_place(shown)
    read_out = said_in(shown)
    shown.turn_to("Ranks")
    shown.press("Stop")
    page.ended(cell)
    until(lambda: "stopped by the user" in read_out(), "the notice in the element that is read out")


def act(shown: Panel, **buttons: bool) -> None:
    """Whether buttons are shown as those that would do something."""
    for name, acts in buttons.items():
        button = shown.at.get_by_role("button", name=name, exact=True)
        (sync_api.expect(button).to_be_enabled if acts else sync_api.expect(button).to_be_disabled)()


COLOURS = "e => [getComputedStyle(e).backgroundColor, getComputedStyle(e).color]"


def contrasted_red(colours: Sequence[str]) -> bool:
    behind, ink = ([int(n) for n in re.findall(r"\d+", colour)[:3]] for colour in colours)
    return behind[0] > 2 * max(behind[1:]) and min(ink) > 240


def answers_belong_to_their_page(shown: Panel) -> None:
    """And can be closed."""
    shown.press("Stacks")
    shown.says("stacks of all ranks")
    shown.says("Cell In[3], line ")
    shown.turn_to("Output")
    sync_api.expect(shown.at).not_to_contain_text("stacks of all ranks")
    shown.turn_to("Ranks")
    shown.says("stacks of all ranks")
    shown.press("Close")
    sync_api.expect(shown.at).not_to_contain_text("stacks of all ranks")
    sync_api.expect(shown.at.get_by_role("button", name="Close")).to_be_hidden()


def dock(page: Page) -> None:
    """A button shows the panel beside the notebook, where it lives as well."""
    page.page.locator(".jp-NotebookPanel .nbddp-dock").click()
    page.page.get_by_role("button", name="Run Once").click()  # the test's notebook is one that nobody trusts
    docked = page.page.locator(".jp-LinkedOutputView .nbddp-panel")
    sync_api.expect(docked).to_be_visible()
    sync_api.expect(docked.locator(".nbddp-dock")).to_be_hidden()
    docked.get_by_role("tab", name="Ranks").click()
    sync_api.expect(docked.get_by_role("tabpanel", name="Ranks")).to_be_visible()


def debug(shown: Panel) -> None:
    """Free a hang and step ranks that stop, with the mouse."""
    page = shown.page
    cell = page.begin(3)
    shown.says("in all_reduce #1 for rank 3")
    shown.press("Stop")
    page.ended(cell)
    shown.says("stopped by the user")
    cell = page.begin(4)
    shown.turn_to("Debugger")
    sync_api.expect(shown.at.locator(".head small", has_text="⏸ stopped")).to_have_count(4)
    use_the_line(shown)
    shown.press("Continue")
    page.ended(cell)
    sync_api.expect(cell.locator(".jp-OutputArea").first).to_contain_text("the end")


def use_the_line(shown: Panel) -> None:
    """Of the debugger, as in a terminal: Enter, history, completion; above it the source and the variables."""
    line, region = (
        shown.at.get_by_label("line", exact=True),
        lambda rank: shown.at.get_by_role("region", name=f"rank {rank}"),
    )

    def asked() -> bool:
        """The front end may make the panel anew meanwhile, for its picture of the pool of four: then once more."""
        line.fill("p rank * 11")
        line.press("Enter")
        try:
            sync_api.expect(region(3)).to_contain_text("33", timeout=5000)
        except AssertionError:
            return False
        return True

    until(asked, "the answers to a line")
    for rank in range(4):
        sync_api.expect(region(rank)).to_contain_text(str(rank * 11))
    sync_api.expect(line).to_have_value("")
    sync_api.expect(line).to_be_focused()
    line.press("ArrowUp")
    sync_api.expect(line).to_have_value("p rank * 11")
    line.press("ArrowDown")
    sync_api.expect(line).to_have_value("")
    line.fill("p ran")
    line.press("Tab")
    sync_api.expect(shown.at.locator(".nbddp-names")).to_contain_text("rank")
    sync_api.expect(shown.at.locator(".nbddp-names")).to_contain_text("range")
    line.fill("p os.envir")
    line.press("Tab")
    sync_api.expect(line).to_have_value("p os.environ")
    line.fill("")
    for rank in range(4):
        source = shown.at.get_by_role("list", name=f"source of rank {rank}")
        assert len(source.get_by_role("listitem").all()) == 5
        assert source.locator("[aria-current]").inner_text() == "print('the end')"
        values = shown.at.get_by_role("table", name=f"variables of rank {rank}")
        sync_api.expect(values.get_by_role("row", name="rank", exact=False)).to_have_text(f"rank{rank}")
    texts = shown.at.locator(".talks .scrolls")
    assert (
        texts.first.evaluate("e => e.firstElementChild.getBoundingClientRect().top - e.getBoundingClientRect().top")
        < 12
    )


PLACE = "e => [e.scrollTop, e === document.activeElement, e.isConnected]"


def keep_the_place(shown: Panel) -> None:
    """While the ranks print: what a reader has scrolled to and where the focus is."""
    shown.turn_to("Output")
    scrolls = shown.at.locator(".scrolls").first
    until(lambda: scrolls.evaluate("e => e.scrollHeight - e.clientHeight > 100"), "more lines than there is room for")
    held = scrolls.element_handle()
    held.evaluate("e => { e.focus(); e.scrollTop = -60 }")
    before = scrolls.inner_text()
    until(lambda: scrolls.inner_text() != before, "more lines")
    place, focused, stays = held.evaluate(PLACE)  # counted from the end, where the lines come
    assert place <= -60
    assert focused
    assert stays
    assert (held.get_attribute("role"), held.get_attribute("aria-label")) == ("region", "rank 0")


def said_in(shown: Panel) -> Callable[[], str]:
    """What is in the element that a reader's software hears, which is the same for all notices."""
    found = shown.at.locator("[role=status]")
    assert found.count() == 2, "the heading and the notice, and no other"
    held = found.last.element_handle()
    return lambda: str(held.evaluate("e => e.isConnected ? e.innerText : ''"))


BACKGROUNDS = "all => all.map(e => getComputedStyle(e).backgroundColor)"


def click_on_a_step(shown: Panel) -> None:
    """While the cell trains: a click on the curve shows the timeline of the step there, and an arrow key that of the
    next one."""
    shown.turn_to("Timings")
    shown.says("exposed communication")
    curve = shown.at.locator(".nbddp-steps .noUi-base")
    until(lambda: last_step(shown) > 20, "some steps")
    box = until(curve.bounding_box, "the curve")
    before = last_step(shown)
    shown.page.page.mouse.click(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"])
    shown.at.locator(".nbddp-pane [data-i]").first.wait_for()
    selected = int(shown.at.get_by_label("step", exact=True).input_value())
    assert 0.4 * before <= selected <= 0.6 * last_step(shown)
    shown.says(f"step {selected} of ")
    for _ in range(3):  # after the click, without a look elsewhere; the cell runs
        shown.page.page.keyboard.press("ArrowRight")
    sync_api.expect(shown.at.get_by_label("step", exact=True)).to_have_value(str(selected + 3))
    shown.says(f"step {selected + 3} of ")
    point_at(shown)
    marker = shown.at.get_by_role("slider", name="step of the curve").bounding_box()
    assert marker["width"] >= 2
    assert marker["height"] > 100
    over = shown.at.locator(".nbddp-steps, .nbddp-steps :not(.noUi-handle, .noUi-handle *)")
    assert set(over.evaluate_all(BACKGROUNDS)) == {"rgba(0, 0, 0, 0)"}, "the slider covers the curve"


def point_at(shown: Panel) -> None:
    """A card says what a step was, of the curve where the pointer is or the keyboard's slider stands, and of a bar of
    the drawing that a click has chosen."""
    curve, slider = shown.at.locator(".nbddp-plot"), shown.at.get_by_role("slider", name="step of the curve")
    card = curve.locator(".nbddp-step-card")
    box = curve.bounding_box()
    shown.page.page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 50)
    sync_api.expect(card).to_contain_text(re.compile(r"step \d+: .* of it exposed communication"))
    assert 0.15 * last_step(shown) <= int(card.inner_text().split()[1].strip(":")) <= 0.3 * last_step(shown)
    shown.page.page.mouse.move(1, 1)
    chosen = int(shown.at.get_by_label("step", exact=True).input_value())
    slider.focus()
    shown.page.page.keyboard.press("ArrowLeft")
    shown.says(f"step {chosen - 1} of ")
    sync_api.expect(card).to_contain_text(re.compile(r"step \d+: .* of it exposed communication"))
    sync_api.expect(slider).to_have_attribute("aria-valuetext", re.compile("^step "))
    shown.page.page.keyboard.press("ArrowRight")
    shown.says(f"step {chosen} of ")  # and so the bars are those that stay
    bar = shown.at.locator(".nbddp-pane [data-i]").nth(1)
    bar.focus()
    sync_api.expect(shown.at.locator(".nbddp-pane .nbddp-card")).to_have_text(bar.get_attribute("aria-label"))
    slider.focus()


def last_step(shown: Panel) -> int:
    """The newest step of the curve."""
    return int(json.loads(shown.at.locator(".nbddp-curve").get_attribute("data-steps"))[-1][0])


def change_plan(shown: Panel) -> None:
    """The layout follows, and what is impossible is explained beside its control."""
    shown.turn_to("Launch")
    shown.fill("nodes", "3")
    shown.says("world size 12 = 3 simulated nodes × 4 processes")
    sync_api.expect(shown.at.get_by_label("Cell", exact=True)).to_have_value("%%ddp --nproc 4 --nnodes 3")
    sync_api.expect(shown.at.get_by_role("button", name="Resize to 12 workers")).to_be_visible()
    shown.press("Copy the line for Cell")
    shown.fill("cell timeout (s)", "")
    field = shown.at.get_by_label("cell timeout (s)", exact=True)
    field.press("ControlOrMeta+v")
    sync_api.expect(field).to_have_value("%%ddp --nproc 4 --nnodes 3")
    shown.fill("cell timeout (s)", "soon")
    sync_api.expect(shown.at.get_by_role("alert")).to_contain_text("'soon' is not a time in seconds")
    shown.fill("cell timeout (s)", "")


def reopen(page: Page) -> None:
    """The kernel is shut down and the notebook saved and opened again: the picture is there, with words for who does
    not see it."""
    page.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.sessionContext.shutdown()")
    picture = page.page.locator(".jp-OutputArea img.nbddp-picture").first
    sync_api.expect(picture).to_be_visible()
    page.command("docmanager:save")
    page.page.wait_for_function("() => !window.jupyterapp.shell.currentWidget.context.model.dirty")
    page.page.reload()
    sync_api.expect(picture).to_be_visible()
    assert "world size 4" in str(picture.get_attribute("alt"))
    part = page.page.locator(".jp-OutputArea .nbddp-svg [data-i]").nth(1)
    part.focus()
    sync_api.expect(page.page.locator(".nbddp-card").first).to_have_text(part.get_attribute("aria-label"))


def begin_anew(page: Page, number: int) -> Any:
    """Begin a cell that a kernel before this one has run: a new kernel may give it the same number."""
    page.select(number)
    page.command("notebook:clear-cell-output")
    return page.begin(number)


def debug_without_a_panel(page: Page) -> None:
    """A breakpoint opens the box that `input()` opens, and Stop ends the cell that waits there."""
    page.ended(begin_anew(page, 0))
    cell = begin_anew(page, 4)
    box = cell.locator(".jp-Stdin-input").last
    box.fill("p rank * 7")
    box.press("Enter")
    sync_api.expect(cell).to_contain_text("rank 1 │ 7")
    box.wait_for()
    page.command("notebook:interrupt-kernel")
    page.ended(cell)
    sync_api.expect(cell.locator(".jp-OutputArea").first).to_contain_text("stopped by the user")


def reopen_without_kernel(page: Page) -> None:
    """The page is closed before the kernel ends, which can take nothing back: what stands for the panel is seen."""
    understudy, panel = page.page.locator(".nbddp-understudy"), page.page.locator(".nbddp-panel").first
    page.ended(begin_anew(page, 1))
    panel.wait_for()
    sync_api.expect(understudy).to_be_hidden()
    page.command("docmanager:save")
    page.page.wait_for_function("() => !window.jupyterapp.shell.currentWidget.context.model.dirty")
    kernel = page.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.sessionContext.session.kernel.id")
    page.page.goto("about:blank")
    server, _, token = page.address.partition("doc/tree/")
    ended = page.page.request.delete(f"{server}api/kernels/{kernel}?{token.partition('?')[2]}")
    assert ended.ok, ended.text()
    page.page.goto(page.address)
    sync_api.expect(understudy).to_be_visible()
    sync_api.expect(page.page.get_by_text("model not found")).to_be_hidden()
    assert "world size" in str(understudy.get_attribute("aria-label"))
    if folder := os.environ.get("NBDDP_PICTURES", ""):
        for theme in THEMES:
            page.wear(theme)
            page.cells.nth(1).screenshot(path=Path(folder) / f"panel-without-kernel-{theme}.png")


CONTROLS = {  # some that Tab comes to
    "Launch": {"workers per node", "nodes", "hosts", "device", "restarts", "Cell", "torchrun"},
    "Ranks": {"Stop", "Free", "Stacks", "which ranks Restart restarts", "Restart", "Shut down"},
    "Output": {"all ranks", "search", "only differences"},
    "Timings": {"step", "Show"},
    "Debugger": {"Next", "Step in", "Out", "Continue", "Post-mortem", "line", "which ranks get the line", "Send"},
}


def reach_by_keys(shown: Panel) -> None:
    """Every control of every page has a name, and Tab comes to it."""
    for name in reversed(PAGES):
        shown.turn_to(name)
        until(lambda name=name: set(shown.at.evaluate(NAMED)) >= CONTROLS[name], name)  # type: ignore[misc]
        names = shown.at.evaluate(NAMED)
        assert all(names), (name, names)
        shown.at.get_by_role("tab", selected=True).focus()
        seen = set()
        for _ in range(len(names) + 2):
            shown.page.page.keyboard.press("Tab")
            seen.add(shown.page.page.evaluate(FOCUSED))
        assert CONTROLS[name] <= seen, name
        assert set(names) - {*PAGES, "Dock"} <= seen, name


NAME = """(e => (e.getAttribute('aria-label') || e.labels?.[0]?.innerText || e.innerText.trim() || e.title).trim())"""
NAMED = f"""panel => Array.from(panel.querySelectorAll('input, select, button, [role=slider], [tabindex="0"]'))
    .filter(e => e.offsetParent !== null && e.tagName !== 'SELECT').map({NAME})
    .concat(Array.from(panel.querySelectorAll('select')).filter(e => e.offsetParent !== null)
    .map(e => e.labels?.[0]?.innerText || e.title))"""
FOCUSED = f"""() => document.activeElement.tagName === 'SELECT'
    ? document.activeElement.labels?.[0]?.innerText || document.activeElement.title : {NAME}(document.activeElement)"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("all_of_it", [False, pytest.param(True, marks=pytest.mark.panel)])
def test_a_pool_is_started_watched_stopped_and_debugged_with_the_mouse_in_jupyterlab(
    tmp_path: Path, all_of_it: bool
) -> None:
    errors: list[str] = []
    with panel("lab", tmp_path) as shown:
        shown.page.page.on("pageerror", lambda error: errors.append(str(error)))
        if all_of_it:
            reach_by_keys(shown)
        go_through(shown)
        debug(shown)
        change_plan(shown)
        dock(shown.page)
        assert not errors
        if all_of_it:
            reopen(shown.page)
            debug_without_a_panel(shown.page)
            reopen_without_kernel(shown.page)


@pytest.mark.timeout(400)
@pytest.mark.panel
@pytest.mark.parametrize("all_of_it", [False, True])
def test_the_same_in_notebook_7(tmp_path: Path, all_of_it: bool) -> None:
    python = os.environ.get("NBDDP_NOTEBOOK_PYTHON", "")  # an interpreter that has it, if this one has not
    if find_spec("notebook") is None and not python:
        pytest.skip("pip install 'notebook>=7'")
    with panel("notebook", tmp_path, python) as shown:
        go_through(shown)
        if all_of_it:
            debug(shown)
            change_plan(shown)
        move_a_slider(shown.page)


def move_a_slider(page: Page) -> None:
    """An explorer's, by keys: the front end takes none of them for its cells."""
    cell = page.begin(5)
    slider = cell.get_by_role("slider").first
    value = slider.get_attribute("aria-valuemin")
    for key, moved in (("Home", False), ("End", True), ("Home", False), ("ArrowRight", True), ("ArrowLeft", False)):
        slider.press(key)
        assert (slider.get_attribute("aria-valuenow") != value) is moved, key
        assert slider.evaluate("e => e === document.activeElement")


AT_ONCE = 2.0  # seconds from a click to the page, on busy cores
CLICK = """async ([panel, name, words]) => {
    const notice = () => panel.querySelector('.notice').innerText;
    const button = Array.from(panel.querySelectorAll('button')).find(b => b.innerText.trim() === name);
    const began = performance.now();
    button.click();
    while (!notice().includes(words) && performance.now() - began < 20000) await new Promise(r => setTimeout(r, 2));
    return performance.now() - began;
}"""
SAYS = (("Post-mortem", "no rank has failed"), ("Continue", "no rank waits in a debugger"))


@pytest.mark.panel
@pytest.mark.timeout(300)
def test_buttons_act_while_a_cell_runs(tmp_path: Path) -> None:
    """With the ipykernel of NBDDP_KERNEL_PYTHON, an interpreter; `.ci/panel` runs this with several. Times from a click
    to the page are written to the file NBDDP_FIGURES."""
    with panel("lab", tmp_path, kernel=os.environ.get("NBDDP_KERNEL_PYTHON", "")) as shown:
        shown.start()
        shown.says("ready: world size 2")
        cell = shown.page.begin(2)
        shown.turn_to("Debugger")
        shown.says("Cell In[3] is running")
        took = [shown.page.page.evaluate(CLICK, [shown.at.element_handle(), *SAYS[i % 2]]) for i in range(20)]
        if path := os.environ.get("NBDDP_FIGURES", ""):
            Path(path).write_text(json.dumps(took))
        assert max(took) < 1000 * AT_ONCE, took
        shown.turn_to("Ranks")
        shown.press("Stop")
        shown.page.ended(cell)
        shown.says("stopped by the user")
        cell = shown.page.begin(4)
        shown.turn_to("Debugger")
        sync_api.expect(shown.at.locator(".head small", has_text="⏸ stopped")).to_have_count(2)
        shown.press("Continue")
        shown.page.ended(cell)
        sync_api.expect(cell.locator(".jp-OutputArea").first).to_contain_text("the end")


@pytest.mark.panel
@pytest.mark.timeout(600)
def test_every_page_can_be_read_in_both_themes_and_fits_two_widths(tmp_path: Path) -> None:
    """Text has contrast, nothing is cut at the side, and nothing moves while the numbers change."""
    pictures = os.environ.get("NBDDP_PICTURES", "")
    with panel("lab", tmp_path) as shown:
        shown.fill("workers per node", "4")
        shown.start()
        shown.says("ready: world size 4")
        shown.page.begin(2)
        shown.turn_to("Timings")
        shown.says("exposed communication")
        click_on_a_step(shown)
        shown.at.locator(".nbddp-pane .nbddp-svg").first.wait_for()
        for width in WIDTHS:
            shown.page.page.set_viewport_size({"width": width, "height": 1200})
            for name in PAGES:
                shown.turn_to(name)
                shown.page.page.wait_for_timeout(600)  # one look
                steady(shown)
                for theme in THEMES:
                    shown.page.wear(theme)
                    found = shown.at.evaluate(STRUCTURE)
                    assert not Seen(found["outputs"], found["texts"]).too_faint(), (name, theme)
                    if pictures:
                        Path(pictures).mkdir(exist_ok=True, parents=True)
                        shown.at.screenshot(path=Path(pictures) / f"panel-{name.lower()}-{width}-{theme}.png")


def steady(shown: Panel) -> None:
    """Nothing sticks out at the side, and over two seconds no control changes its place."""
    assert shown.at.evaluate("e => e.scrollWidth <= e.clientWidth + 1")
    buttons = shown.at.locator("button:visible")

    def places() -> Sequence[Any]:
        return [b.bounding_box() for b in buttons.all()]

    before = places()
    shown.page.page.wait_for_timeout(2000)
    assert places() == before
