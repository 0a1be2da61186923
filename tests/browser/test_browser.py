"""The explorers in a real JupyterLab, in a real browser, by keyboard alone.

A server of the test's own (loopback, a port that the system chooses, a token, folders of its own) opens a small
notebook with the explorers' cells of lessons 02, 04 and 07. Nothing is clicked: cells are run, and sliders, lists and
buttons are reached and moved by keys. What is waited for is what the page shows, never a time.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbconvert import HTMLExporter

from nbddp.lessons.framework.explorer import Steps
from nbddp.teach import explore
from tests.lessons.answers import NOTEBOOKS, builder, cells

sync_api = pytest.importorskip("playwright.sync_api", reason="to test in a browser: pip install playwright")
pytest.importorskip("jupyterlab", reason="to test in a browser: pip install jupyterlab")

# A shell without windows opens a page in a fifth of the time that the whole browser takes
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ["--no-sandbox", "--disable-dev-shm-usage"]  # a container's root, and its small /dev/shm
PATIENCE = 60.0  # seconds that something may take on busy cores
EXPLORED = {"02": "explore.layout(", "04": "explore.ring(", "07": "explore.statistics("}  # by lesson
QUESTIONS = (
    "from nbddp.teach import predict\npredict.global_rank_as_device()",
    "predict.local_rank()",
    "print('what the lesson shows')",
)
EXPLORERS = len(EXPLORED)  # one in a cell
TABS = 60  # more than there are places to stop at between the notebook and its last control
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},
}


PLAYING: list[Any] = []


@contextmanager
def playing() -> Iterator[Any]:
    """Playwright, of which a process may have one: within the block of another it is the same."""
    if PLAYING:
        yield PLAYING[0]
        return
    with sync_api.sync_playwright() as play:
        PLAYING.append(play)
        try:
            yield play
        finally:
            PLAYING.clear()


@functools.cache
def browsers() -> tuple[str, ...]:
    """Chromium as the system has it, or else as playwright has installed it."""
    found = [path for path in map(shutil.which, NAMES) if path and starts(path)]
    with playing() as play:
        own = play.chromium.executable_path
    return (*found, *([own] if Path(own).exists() else []))


def starts(path: str) -> bool:
    """Whether it is a browser: on some systems the name is a script that says where to get one."""
    said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=PATIENCE, check=False)
    return said.returncode == 0 and "Chrom" in said.stdout


# -- the server ------------------------------------------------------------------------------


def until(true: Callable[[], Any], what: str) -> Any:
    """What `true` returns when it is something. Raises AssertionError where that takes too long."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if found := true():
            return found
        time.sleep(0.05)
    raise AssertionError(f"{what} has not come in {PATIENCE:.0f} s")


def served(runtime: Path, process: subprocess.Popen[bytes], log: Path) -> Any:
    """The server's address and token when it listens, as it has written them for Jupyter's own tools."""

    def told() -> Any:
        assert process.poll() is None, log.read_text()
        for path in runtime.glob("jpserver-*.json"):
            try:
                return json.loads(path.read_text())
            except json.JSONDecodeError:  # half written
                return None
        return None

    return until(told, "JupyterLab")


@contextmanager
def jupyterlab(
    base: Path,
    folder: Path,
    settings: Mapping[str, object] = SETTINGS,
    *,
    module: str = "jupyterlab",
    python: str = sys.executable,
    more: Sequence[str] = (),
) -> Iterator[Any]:
    """Address and token of a JupyterLab over `folder` that knows nothing of the user's: all it keeps is in `base`.

    module: or of this front end; python: the interpreter that has it; more: options of its own.
    """
    for name, values in settings.items():
        set_to(base, name, values)
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | places(base)
    env |= {"JUPYTERLAB_SETTINGS_DIR": str(base / "settings"), "JUPYTER_TOKEN": secrets.token_hex(16)}
    env["PYTHONPATH"] = os.pathsep.join([str(NOTEBOOKS.parent), *filter(None, [env.get("PYTHONPATH")])])
    command = [python, "-m", module, "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1"]
    command += ["--ServerApp.port=0", f"--ServerApp.root_dir={folder}", "--LabApp.extension_manager=readonly", *more]
    log = base / "log"
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, env=env, cwd=folder) as process:
        try:
            yield served(base / "_RUNTIME_DIR", process, log)
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE / 3)
            except subprocess.TimeoutExpired:  # a server that is stopped while it starts a kernel may wait for ever;
                process.kill()  # the kernel ends by itself, without its parent


def converted(saved: Path, theme: str = "light") -> str:
    """The address of the page that nbconvert makes of a notebook, beside it."""
    written = saved.with_suffix(".html")
    written.write_text(HTMLExporter(theme=theme).from_filename(str(saved))[0], encoding="utf-8")
    return written.as_uri()


def places(base: Path) -> dict[str, str]:
    """Jupyter's own folders, within `base`."""
    return {f"JUPYTER{n}": str(base / n) for n in ("_RUNTIME_DIR", "_CONFIG_DIR", "_DATA_DIR", "LAB_WORKSPACES_DIR")}


def set_to(base: Path, name: str, values: object) -> None:
    """A setting of JupyterLab; it holds from the next time that a page is loaded."""
    path = base / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


@contextmanager
def lab(base: Path, book: Any, name: str) -> Iterator[str]:
    """The address of this notebook in a JupyterLab of its own, in a new folder `base`."""
    folder = base / "lessons"
    folder.mkdir()
    nbformat.write(book, folder / name)
    with jupyterlab(base, folder) as server:
        yield f"{server['url']}doc/tree/{name}?token={server['token']}"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The explorers' address."""
    book = builder().notebook([c for n, call in EXPLORED.items() for c in cells(n) if call in c.text])
    book.cells += [nbformat.v4.new_code_cell(text) for text in QUESTIONS]
    with lab(tmp_path_factory.mktemp("lab"), book, "explorers.ipynb") as opened:
        yield opened


# -- the page --------------------------------------------------------------------------------


def begun(page: Any, cell: Any) -> bool:
    """Run the active cell, which is this one; whether it has begun. JupyterLab shows an idle kernel before it has a
    connection to it, and a run that is asked for in between is lost without a word."""
    page.keyboard.press("Control+Enter")
    try:
        sync_api.expect(cell.locator(".jp-InputPrompt")).not_to_have_text("[ ]:", timeout=3000)
    except AssertionError:
        return False
    return True


class Notebook:
    """The open notebook; tests go through it from top to bottom, as Tab does. `errors`: what the page complained of."""

    def __init__(self, page: Any, address: str):
        self.page, self.errors = page, []
        page.set_default_timeout(1000 * PATIENCE)
        sync_api.expect.set_options(timeout=1000 * PATIENCE)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda said: said.type == "error" and self.errors.append(said.text))
        page.goto(address)
        self.cells = page.locator(".jp-CodeCell")
        sync_api.expect(self.cells).to_have_count(EXPLORERS + len(QUESTIONS))
        page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()  # before, a run would be lost
        page.wait_for_function("document.querySelector('.jp-Notebook')?.contains(document.activeElement)")

    def run(self) -> None:
        """Run all cells, wait for their explorers, and go back to the first cell."""
        for cell in self.cells.all()[:EXPLORERS]:
            until(lambda cell=cell: begun(self.page, cell), "the run of a cell")
            sync_api.expect(cell.locator("img.widget-image")).to_be_visible()
            self.page.keyboard.press("ArrowDown")
        for _ in range(EXPLORERS):
            self.page.keyboard.press("ArrowUp")

    def reach(self, target: Any) -> None:
        """Press Tab until the target, which is further down, has the focus."""
        for _ in range(TABS):
            if target.evaluate("e => e === document.activeElement"):
                return
            self.page.keyboard.press("Tab")
        raise AssertionError(f"{target} cannot be reached by Tab")

    def shows(self, number: int, wanted: Any) -> None:
        """Wait until the cell's explorer has these words, and their picture."""
        cell = self.cells.nth(number)
        sync_api.expect(cell.locator(".widget-html pre")).to_have_text(wanted.words)
        seen = "async e => Array.from(new Uint8Array(await (await fetch(e.src)).arrayBuffer()))"
        picture = cell.locator("img.widget-image")
        until(lambda: bytes(picture.evaluate(seen)) == wanted.png(), "the picture")


@pytest.fixture(scope="module")
def notebook(address: str) -> Iterator[Notebook]:
    found = browsers()
    if not found:
        pytest.skip("to test in a browser: apt-get install chromium, or playwright install chromium")
    with playing() as play:
        browser = play.chromium.launch(executable_path=found[0], args=FLAGS)
        opened = Notebook(browser.new_page(viewport={"width": 1280, "height": 1500}), address)
        opened.run()
        yield opened
        browser.close()


@pytest.mark.looks
def test_sliders_and_lists_move_by_keys_and_change_picture_and_words(notebook: Notebook) -> None:
    layout = explore.layout()
    chosen = dict(layout.begins)
    notebook.shows(0, layout.show(**chosen))
    more = chosen["nodes"] + 1
    for place, (name, key, value) in enumerate(
        [("nodes", "ArrowRight", more), ("gpus", "End", layout.controls[1].high), ("per_process", "ArrowRight", 2)]
    ):
        notebook.reach(notebook.cells.nth(0).get_by_role("slider").nth(place))
        notebook.page.keyboard.press(key)
        chosen[name] = value
        notebook.shows(0, layout.show(**chosen))
    notebook.reach(notebook.cells.nth(0).locator("select"))
    for key in ("Space", "ArrowDown", "Enter"):
        notebook.page.keyboard.press(key)
    notebook.shows(0, layout.show(**{**chosen, "by": "global rank"}))
    said = notebook.cells.nth(0).get_by_text("Tab goes from control to control")
    sync_api.expect(said).to_contain_text("Space opens a list")


@pytest.mark.looks
def test_buttons_take_the_next_step_and_the_one_before(notebook: Notebook) -> None:
    ring = explore.ring()
    start = ring.begins
    notebook.shows(1, ring.show(**start))
    for name, key, further in [("next", "Enter", 1), ("next", "Space", 2), ("back", "Space", 1)]:
        button = notebook.cells.nth(1).get_by_role("button", name=name, exact=True)
        notebook.reach(button)
        notebook.page.keyboard.press(key)
        notebook.shows(1, ring.show(**{**start, "step": start["step"] + further}))
        sync_api.expect(button).to_be_focused()


@pytest.mark.looks
def test_play_takes_one_step_after_another_to_the_last(notebook: Notebook) -> None:
    ring, cell = explore.ring(), notebook.cells.nth(1)
    start, last = ring.begins, max(c.high for c in ring.controls if isinstance(c, Steps))
    first = cell.locator(".widget-html pre").inner_text()
    play = cell.locator(".widget-play button").first
    play.focus()
    notebook.page.keyboard.press("Enter")
    sync_api.expect(cell.locator(".widget-html pre")).not_to_have_text(first)
    notebook.shows(1, ring.show(**{**start, "step": last}))


@pytest.mark.looks
def test_labels_are_not_cut_and_controls_stand_in_line(notebook: Notebook) -> None:
    for number in range(EXPLORERS):
        labels = notebook.cells.nth(number).locator(".widget-vbox .widget-label:not(.widget-html .widget-label)").all()
        assert len(labels) >= 3
        assert not [e for e in labels if e.evaluate("e => e.scrollWidth > e.clientWidth")]
        ends = {round(box["x"] + box["width"]) for box in (e.bounding_box() for e in labels) if box}
        assert len(ends) == 1, "labels end on one line"
        assert all(e.get_attribute("title") in (None, e.inner_text()) for e in labels)


@pytest.mark.looks
def test_a_prediction_is_chosen_and_typed_by_keys_and_compared_when_the_next_cell_has_run(notebook: Notebook) -> None:
    chosen, typed, after = (notebook.cells.nth(EXPLORERS + i) for i in range(3))
    for cell in (chosen, typed):
        cell.locator(".jp-InputPrompt").click()
        until(lambda cell=cell: begun(notebook.page, cell), "the run of a cell")
    radio = chosen.get_by_role("radio", name="all of them")
    radio.focus()
    notebook.page.keyboard.press("Space")
    sync_api.expect(chosen).to_contain_text("You predicted: all of them. Now run the next cell.")
    box = typed.get_by_role("textbox").last
    box.fill("nonsense")
    box.press("Enter")
    sync_api.expect(typed).to_contain_text("Type a number, for example 8.")
    box.fill("0")
    box.press("Enter")
    sync_api.expect(typed).to_contain_text("You predicted: 0. Now run the next cell.")
    sync_api.expect(after).not_to_contain_text("you predicted")
    after.locator(".jp-InputPrompt").click()
    until(lambda: begun(notebook.page, after), "the run of a cell")
    sync_api.expect(after).to_contain_text("✓ 0, as you predicted")
    sync_api.expect(typed).to_contain_text("✓ 0, as you predicted")
    sync_api.expect(after).not_to_contain_text("ranks 0–3")
    button = after.get_by_role("button", name="Compare with what came")
    button.focus()
    notebook.page.keyboard.press("Enter")
    sync_api.expect(after).to_contain_text("✗ ranks 0–3; you predicted all of them")
    if os.environ.get("SHOTS"):
        notebook.page.screenshot(path=os.environ["SHOTS"])


@pytest.mark.looks
def test_the_page_complains_of_nothing(notebook: Notebook) -> None:
    assert not notebook.errors


@pytest.mark.looks
def test_pictures_have_alternative_text_and_follow_a_dark_theme_while_it_is_on(notebook: Notebook) -> None:
    """The theme's mark on the page is set as JupyterLab sets it; what the page makes of it is asked of the browser."""
    picture = notebook.cells.nth(0).locator("img.widget-image")
    assert str(picture.get_attribute("alt")).startswith("world size")
    found = []
    for light in ("false", "true"):
        notebook.page.evaluate("light => document.body.dataset.jpThemeLight = light", light)
        found.append(picture.evaluate("e => getComputedStyle(e).filter"))
    assert found == ["invert(1) hue-rotate(180deg)", "none"]
