"""Widgets that programs make on ranks: bars of tqdm and controls that the reader moves, in a kernel and a browser."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import ipywidgets
import nbformat
import pytest
from ipywidgets.embed import dependency_state

from nbddp.capabilities.widgets.part import WidgetModel, Widgets, apart
from nbddp.output.buffer import VIEW
from tests.kernels import Kernel, Shown

BAR = """%%ddp --ranks 0,1
import time
from tqdm.auto import tqdm
for i in tqdm(range(8), desc='epoch'):
    time.sleep(0.1)
    for _ in tqdm(range(2), desc='step', leave=False): pass
print('through')
"""
SLIDER = """%%ddp --ranks 0,1
import ipywidgets
depth, label = ipywidgets.IntSlider(3, description='depth'), ipywidgets.Label('not moved')
def moved(change):
    label.value = f"depth is {change['new']}"
    print('moved to', change['new'])
depth.observe(moved, 'value')
display(ipywidgets.VBox([depth, label]))
"""
WHOLE = r"(?:rank {}|ranks 0–1) │ epoch: 100%\|██████████\| 8/8 \[\S+, +\S+it/s\]"


# -- in words --------------------------------------------------------------------------------------


def told(widget: Any) -> tuple[Widgets, dict[str, Any]]:
    """The store as the messages of this widget, and of all that it names, make it; and the widget's mimebundle."""
    store = Widgets()
    for one, made in dependency_state([widget], drop_defaults=False).items():
        state, paths, buffers = apart(made["state"])
        data = {"state": state, "buffer_paths": paths}
        store.take(0, "comm_open", {"comm_id": one, "target_name": "jupyter.widget", "data": data}, buffers)
    return store, {"text/plain": "repr", VIEW: {"model_id": widget.model_id}}


@pytest.fixture
def _no_widgets() -> Iterator[None]:
    yield
    for _ in range(100):  # a comm that was made before ipykernel came into this process is unknown to its manager
        with suppress(KeyError):
            ipywidgets.Widget.close_all()
            return


W = ipywidgets
SAID = {
    "a bar": (lambda: W.FloatProgress(3, max=8, description="epoch"), "epoch|███▊      |", True),
    "a bar that has begun": (lambda: W.IntProgress(0, max=8), "|          |", True),
    "a bar without an end": (
        lambda: W.HBox([W.HTML(""), W.FloatProgress(1, max=1, layout={"width": "20px"}), W.HTML("7it [00:01]")]),
        "7it [00:01]", True,
    ),
    "tqdm's row": (
        lambda: W.HBox([W.HTML("a&lt;b:\u2007\u200750%"), W.FloatProgress(1, max=2), W.HTML("\u20071/2 [00:00]")]),
        "a<b:  50%|█████     | 1/2 [00:00]", True,
    ),
    "two rows": (lambda: W.VBox([W.Label("one"), W.IntProgress(1, max=1)]), "one\n|██████████|", True),
    "a slider": (lambda: W.IntSlider(3, description="depth"), "depth: 3", False),
    "a range": (lambda: W.IntRangeSlider(value=(2, 5), description="from"), "from: 2 – 5", False),
    "a list": (lambda: W.Dropdown(options=["sgd", "adam"], index=1, description="by"), "by: adam", False),
    "a button": (lambda: W.Button(description="go"), "[go]", False),
    "a picture": (lambda: W.Image(value=b"\x89PNG"), "[Image]", False),
    "what was printed": (
        lambda: W.Output(outputs=({"output_type": "stream", "name": "stdout", "text": "line\n"},)), "line", False,
    ),
    "text alone": (lambda: W.HTML("<b>bold</b> &amp; plain"), "bold & plain", False),
    "a bar with a control": (lambda: W.HBox([W.IntProgress(1, max=1), W.Button(description="stop")]),
                             "|██████████|[stop]", False),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
@pytest.mark.usefixtures("_no_widgets")
def test_a_widget_is_said_in_words(name: str) -> None:
    make, words, is_bar = SAID[name]
    store, bundle = told(make())
    assert store.describe(bundle) == words
    assert store.is_bar(bundle) == is_bar
    assert store.settled(bundle, None) == {"text/plain": words}, "where no widget can be shown"


def test_bytes_in_a_state_travel_as_buffers() -> None:
    state = {"value": b"abc", "data": {"x": [1, memoryview(b"de")]}, "name": "n"}
    left, paths, buffers = apart(state)
    assert left == {"value": None, "data": {"x": [1, None]}, "name": "n"}
    assert dict(zip(map(tuple, paths), buffers, strict=True)) == {("value",): b"abc", ("data", "x", 1): b"de"}
    store = Widgets()
    data = {"state": left, "buffer_paths": paths}
    store.take(0, "comm_open", {"comm_id": "a", "target_name": "jupyter.widget", "data": data}, buffers)
    seen: list[WidgetModel] = []

    class Made:
        def close(self) -> None: ...
        def pass_on(self, data: Any, buffers: Any) -> None: ...

    store.settled({VIEW: {"model_id": "a"}}, lambda model, answer: (seen.append(model), Made())[1])
    assert seen[0].state == {"value": b"abc", "data": {"x": [1, b"de"]}, "name": "n"}


# -- messages ----------------------------------------------------------------------------------------


def live(shown: Shown) -> list[str]:
    """What the live view has said, one text after the other."""
    return [c["data"]["text/plain"] for _, kind, c in shown.messages if kind == "update_display_data"]


def test_bars_move_on_each_rank_and_are_whole_in_the_block(four: Kernel) -> None:
    shown = four.run(BAR)
    assert shown.ok, shown.error
    for rank in (0, 1):
        moved = {found for text in live(shown) for found in re.findall(rf"rank {rank} │ epoch: +(\d+)%", text)}
        assert len(moved) > 2, "it moves while it runs: four updates a second"
        assert len(re.findall(WHOLE.format(rank), shown.text())) == 1
    assert shown.text().count("epoch") == 2
    assert "step" not in shown.text(), "a bar that is not left is gone"
    assert "0%|  " not in shown.text()
    assert shown.displays == [], "nothing needs a kernel: text alone"
    assert not [kind for _, kind, _ in shown.messages if kind.startswith("comm_")]
    assert live(shown)[-1] == ""


def test_a_bar_that_fails_stays_where_it_was(four: Kernel) -> None:
    shown = four.run("%%ddp --ranks 0\nfrom tqdm.auto import tqdm\nfor i in tqdm(range(4)):\n    if i == 2: 1 / 0")
    assert not shown.ok
    assert re.search(r"rank 0 │  50%\|█████     \| 2/4 \[", shown.text())


def heard(kernel: Kernel, wanted: Any, kind: str) -> dict[str, Any]:
    """The next message of this kind for which `wanted` is true."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        message = kernel.client.get_iopub_msg(timeout=30)
        if message["msg_type"] == kind and wanted(message["content"]):
            return message["content"]  # type: ignore[no-any-return]
    raise AssertionError(f"no {kind}")


def test_a_control_is_the_notebooks_too_and_moves_the_ranks(four: Kernel) -> None:
    shown = four.run(SLIDER)
    assert shown.ok, shown.error
    opened = {c["comm_id"]: c["data"]["state"] for _, kind, c in shown.messages if kind == "comm_open"}
    views = [bundle[VIEW]["model_id"] for bundle in shown.displays]
    assert len(views) == 2
    assert set(views) <= set(opened), "the front end knows it"
    assert all(bundle["text/plain"] == "depth: 3\nnot moved" for bundle in shown.displays)
    assert "rank 0 │ depth: 3\n       │ not moved\n" in shown.text(), "a page without the kernel has this alone"
    ident, label = (child.removeprefix("IPY_MODEL_") for child in opened[views[1]]["children"])
    update = {"method": "update", "state": {"value": 7}, "buffer_paths": []}
    four.client.shell_channel.send(four.client.session.msg("comm_msg", {"comm_id": ident, "data": update}))
    changed = heard(four, lambda c: c["comm_id"] == label, "comm_msg")
    assert changed["data"]["state"] == {"value": "depth is 7"}
    assert "rank 1 │ moved to 7" in heard(four, lambda c: "moved" in c["text"], "stream")["text"]
    now = four.run("%%ddp --ranks 0,1\ndepth.value, label.value").text().splitlines()
    assert now == ["rank 0 Out │ (3, 'not moved')", "rank 1 Out │ (7, 'depth is 7')"]
    known = four.ask(four.client.comm_info, "jupyter.widget")["comms"]
    assert set(opened) <= set(known), "a page that is loaded again asks for these"
    gone = four.run("%%ddp --ranks 1\ndepth.close()")
    closed = [c["comm_id"] for _, kind, c in gone.messages if kind == "comm_close"]
    assert closed == [ident]


# -- in a browser ------------------------------------------------------------------------------------


def book() -> Any:
    source = ["%load_ext nbddp\n%ddp start --nproc 2", BAR, SLIDER]
    cells = [nbformat.v4.new_code_cell(text) for text in source]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})


@pytest.mark.looks
def test_in_jupyterlab_bars_move_and_all_is_there_after_a_reload(tmp_path: Path) -> None:
    browser_of = pytest.importorskip(
        "tests.browser.test_browser", reason="to test in a browser: pip install playwright"
    )
    found = browser_of.browsers()
    if not found:
        pytest.skip("to test in a browser: apt-get install chromium, or playwright install chromium")
    sync_api = browser_of.sync_api
    with browser_of.lab(tmp_path, book(), "widgets.ipynb") as address, browser_of.playing() as play:
        browser = play.chromium.launch(executable_path=found[0], args=browser_of.FLAGS)
        page = browser.new_page(viewport={"width": 1000, "height": 900})
        patience = 1000 * browser_of.PATIENCE
        page.set_default_timeout(patience)
        sync_api.expect.set_options(timeout=patience)
        page.goto(address)
        cells = page.locator(".jp-CodeCell")
        sync_api.expect(cells).to_have_count(3)
        page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
        page.wait_for_function("document.querySelector('.jp-Notebook')?.contains(document.activeElement)")
        for number, shows in enumerate(("world size 2", "epoch", "depth")):
            cell = cells.nth(number)
            browser_of.until(lambda cell=cell: browser_of.begun(page, cell), "the run of a cell")
            sync_api.expect(cell.locator(".jp-OutputArea").first).to_contain_text(shows)
            if shows == "epoch":
                sync_api.expect(cell).to_contain_text(re.compile(r"rank 1 │ epoch: +[2-8]\d%\|[█▏▎▍▌▋▊▉]+ +\|"))
            page.keyboard.press("ArrowDown")
        for again in (False, True):
            if again:
                page.keyboard.press("Control+s")
                page.locator(".jp-mod-dirty").wait_for(state="detached")
                page.reload()
                page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
            for rank in (0, 1):
                sync_api.expect(cells.nth(1)).to_contain_text(re.compile(WHOLE.format(rank)))
            sync_api.expect(cells.nth(1).locator(".jp-OutputArea").first).not_to_contain_text(re.compile("0%.*0/8"))
            sync_api.expect(cells.nth(2).locator(".widget-slider")).to_have_count(2)
            sync_api.expect(page.get_by_text("model not found")).to_have_count(0)
            slider = cells.nth(2).get_by_role("slider").nth(1)
            slider.focus()
            slider.press("ArrowRight")
            sync_api.expect(cells.nth(2)).to_contain_text(f"depth is {4 + again}")
        browser.close()
