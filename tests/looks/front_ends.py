"""A notebook of all outputs in JupyterLab or Notebook 7, in a browser: it is run as a reader runs it, and each cell is
looked at in both themes, some also while they run."""

from __future__ import annotations

import json
import re
import sys
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat

from tests.browser.test_browser import FLAGS, PATIENCE, SETTINGS, browsers, jupyterlab, playing, sync_api, until
from tests.looks.outputs import Output
from tests.looks.structure import Seen

FRONT_ENDS = {"lab": "jupyterlab", "notebook": "notebook"}
PAGES = {"lab": "doc/tree", "notebook": "notebooks"}
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
LIVE = 20.0  # seconds until what is to be seen while a cell runs
EXTENSIONS = Path(__file__).parents[2] / "nbddp/figures/labextensions"
BESIDE = [  # options of a server: the extension, as if this nbddp was installed there
    f"--LabServerApp.extra_labextensions_path={EXTENSIONS}",
    *(f"--{app}.expose_app_in_browser=True" for app in ("LabApp", "JupyterNotebookApp")),
]
SIZE = {"width": 1120, "height": 2400}  # CSS pixels; a cell that is higher would be cut
STRUCTURE = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
SWITCHED = """name => document.body.dataset.jpThemeName === name
    && getComputedStyle(document.body).getPropertyValue('--jp-layout-color0').trim() !== ''"""
# A run that is asked for without a kernel opens the dialog "Select Kernel", and an idle kernel is shown before there is
# a connection to it
CONNECTED = """() => {
    const context = window.jupyterapp.shell.currentWidget?.context?.sessionContext;
    return context?.isReady && context.session?.kernel?.connectionStatus === 'connected';
}"""
Look = Callable[[str, str, bytes, Seen], None]  # theme, name, picture, what is on it
FIGURE = "img.nbddp-picture:not(.widget-image)"


class Page:
    """A notebook that is open in a browser; `output.name` → its cell."""

    def __init__(self, page: Any, address: str, outputs: Sequence[Output], folder: Path):
        self.page, self.outputs, self.folder, self.theme = page, outputs, folder, ""
        self.address = address
        page.set_default_timeout(1000 * PATIENCE)
        page.goto(address)
        self.cells = page.locator(".jp-CodeCell")
        sync_api.expect(self.cells).to_have_count(len(outputs), timeout=1000 * PATIENCE)
        page.wait_for_function("window.jupyterapp !== undefined")
        page.wait_for_function(CONNECTED)
        page.locator("[data-status=idle], .jp-NotebookKernelStatus:has-text('Idle')").first.wait_for(state="attached")

    def command(self, name: str, **args: Any) -> None:
        self.page.evaluate("([name, args]) => window.jupyterapp.commands.execute(name, args)", [name, args])

    def wear(self, theme: str) -> None:
        """Have this theme, and wait until its colours are there."""
        if theme == self.theme:
            return
        self.command("apputils:change-theme", theme=THEMES[theme])
        self.page.wait_for_function(SWITCHED, arg=THEMES[theme])
        self.page.wait_for_timeout(300)  # colours of buttons and menus move to their new value
        self.theme = theme

    def select(self, number: int) -> Any:
        """The cell, active."""
        self.page.evaluate(
            "number => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = number }", number
        )
        return self.cells.nth(number)

    def begin(self, number: int) -> Any:
        """The cell, once its run has begun; a run that is asked for before the kernel is connected is lost."""
        cell = self.select(number)
        prompt = cell.locator(".jp-InputPrompt")
        before = prompt.inner_text()

        def begun() -> bool:
            self.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-cell') }")
            try:
                sync_api.expect(prompt).not_to_have_text(before or "[ ]:", timeout=3000)
            except AssertionError:
                return False
            return True

        until(begun, f"the run of {self.outputs[number].name}")
        return cell

    def ended(self, cell: Any) -> None:
        sync_api.expect(cell.locator(".jp-InputPrompt")).to_have_text(re.compile(r"\[\d+\]:"), timeout=1000 * PATIENCE)

    def close_dialogs(self) -> None:
        """With their last button: they are those of other extensions."""
        for dialog in self.page.locator(".jp-Dialog").all():
            dialog.locator(".jp-Dialog-button").last.click()
            dialog.wait_for(state="detached")

    def seen(self, cell: Any) -> tuple[bytes, Seen]:
        """The picture of a cell, and what is on it."""
        self.close_dialogs()
        self.page.mouse.move(1, 1)
        cell.scroll_into_view_if_needed()
        found = cell.locator(".jp-Cell-outputWrapper").evaluate(STRUCTURE)
        figures = cell.locator(FIGURE).evaluate_all("all => all.map(e => e.src)")
        drawn = b64decode(figures[0].partition(",")[2]) if figures else b""
        return cell.screenshot(animations="disabled"), Seen(found["outputs"], found["texts"], drawn)


def run(
    page: Page, themes: Sequence[str], look: Look, say: Callable[[str], None], missed: Callable[[str], None]
) -> None:
    """Run every cell, and look at each: while it runs, if it says so, and when all have ended.

    missed: gets a line for what was not seen while it ran.
    """
    page.wear(themes[0])
    for number, output in enumerate(page.outputs):
        say(output.name)
        for again, theme in enumerate(themes):
            if again and not (output.during and not (output.holds or output.stop)):
                break
            page.wear(theme)
            if again and output.after:
                page.ended(page.begin(next(n for n, o in enumerate(page.outputs) if o.name == output.after)))
            cell = page.begin(number)
            if output.during:
                _during(page, cell, output, themes if output.holds or output.stop else [theme], look, missed)
            page.ended(cell)
    shown = [(n, o) for n, o in enumerate(page.outputs) if not o.hidden]
    for theme in themes:
        page.wear(theme)
        for number, output in shown:
            say(f"{output.name}, {theme}")
            look(theme, output.name, *page.seen(page.select(number)))


def _during(
    page: Page, cell: Any, output: Output, themes: Sequence[str], look: Look, missed: Callable[[str], None]
) -> None:
    """Look at a cell while it runs, then let it end."""
    shown = cell.locator(".jp-OutputArea").first
    try:
        sync_api.expect(shown).to_contain_text(re.compile(output.during), timeout=1000 * LIVE)
    except AssertionError:
        missed(f"{output.name}: {output.during!r} was not seen while it ran, but {shown.inner_text()!r}")
    for theme in themes:
        page.wear(theme)
        look(theme, f"{output.name}-live", *page.seen(cell))
    if output.holds:
        (page.folder / f"seen-{output.name}").touch()
    if output.stop:
        page.command("notebook:interrupt-kernel")


def book(outputs: Sequence[Output]) -> Any:
    return nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(o.code) for o in outputs],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    )


@contextmanager
def opened(
    front: str,
    outputs: Sequence[Output],
    base: Path,
    *,
    python: str = sys.executable,
    scale: float = 2,
    kernel: str = "",
) -> Iterator[Page]:
    """The notebook of these outputs in a front end of its own, in a new folder `base`.

    python: the interpreter that has the front end; scale: pixels of a picture to one of the page's; kernel: the
    interpreter that cells run in, if it is another one.
    """
    if kernel:
        spec = {"argv": [kernel, "-m", "ipykernel_launcher", "-f", "{connection_file}"], "display_name": "Python 3"}
        place = base / "_DATA_DIR" / "kernels" / "python3"  # found before JupyterLab's own
        place.mkdir(parents=True)
        (place / "kernel.json").write_text(json.dumps({**spec, "language": "python"}))
    folder = base / "books"
    folder.mkdir(parents=True)
    name = "outputs.ipynb"
    nbformat.write(book(outputs), folder / name)
    module, chromium = FRONT_ENDS[front], browsers_path()
    with jupyterlab(base, folder, SETTINGS, module=module, python=python, more=BESIDE) as server:
        address = f"{server['url']}{PAGES[front]}/{name}?token={server['token']}"
        with playing() as play:
            browser = play.chromium.launch(executable_path=chromium, args=FLAGS)
            page = browser.new_page(viewport=SIZE, device_scale_factor=scale)
            yield Page(page, address, outputs, folder)
            browser.close()


def browsers_path() -> str:
    found = browsers()
    if not found:
        raise SystemExit("there is no Chromium: apt-get install chromium, or playwright install chromium")
    return found[0]
