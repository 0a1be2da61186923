"""The page of a run's output in a real browser: as JupyterLab shows it while a cell runs, when it has ended, after the
page is loaded again, trusted or not, and as nbconvert writes it. In both themes, on narrow and wide pages, by keys."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import nbformat
import pytest

from nbddp.capabilities.by_rank.tabs import page as drawn
from nbddp.errors import Raised, RankStatus
from nbddp.output.buffer import RankOutput
from nbddp.output.layout import Print, flat
from nbddp.output.page import NOT_LIVE, OutputState, live
from nbddp.protocol.outcome import Outcome, RankExit
from tests.browser.test_browser import PATIENCE, SETTINGS, converted, jupyterlab, places, sync_api
from tests.looks.front_ends import BESIDE, CONNECTED, STRUCTURE, SWITCHED, THEMES
from tests.looks.structure import Seen

SIZES = ((900, 900), (1400, 900))
ROOT, TAB = ".nbddp-tabs", ".nbddp-tabs [role=tab]"
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
# Run below the test's own folder: the file ends the cell
CELL = """%%ddp --nproc 4
import os, time
rank = int(os.environ['RANK'])
for i in range(60): print('step', i, 'on rank', rank, flush=True)
while not os.path.exists('go'): print('waiting', time.time(), flush=True); time.sleep(0.1)
print('the end')"""


def outputs(folder: Path, ranks: int, lines: int, *, alike: bool = False) -> list[RankOutput]:
    outs = [RankOutput(rank, folder, held=False) for rank in range(ranks)]
    for out in outs:
        word = "" if alike else f" of rank {out.rank}"
        text = "".join(f"step {i} has a loss{word} " + "." * (i % 9) * 20 + "\n" for i in range(lines))
        out.take("stream", {"name": "stdout", "text": text})
    return outs


def html(outs: list[RankOutput], failed: int = -1, *, running: bool = False, words: str = "running: ranks 0–3") -> str:
    error = RankExit(failed, RankStatus.FAILED, 0.0, Outcome(1, chain=(Raised("ValueError", "no labels"),)))
    found = drawn(OutputState(outs, {failed: error}, running, (words,)))
    assert found is not None
    return found.html


def pictured(folder: Path, ranks: int) -> list[RankOutput]:
    outs = outputs(folder, ranks, 1)
    for out in outs:
        data = {
            "text/plain": "a picture",
            "image/png": PNG,
            "text/html": f'<table><tr><td>{out.rank}</table><img src="data:image/png;base64,{PNG}">',
        }
        out.take("display_data", {"data": data, "metadata": {}})
    return outs


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    opened = browser.new_page(viewport={"width": 900, "height": 900})
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.set_default_timeout(1000 * PATIENCE)
    yield opened
    opened.close()
    assert errors == []


def keep(page: Any, name: str) -> None:
    """Set NBDDP_LOOKS to a folder to keep pictures."""
    if folder := os.environ.get("NBDDP_LOOKS"):
        page.screenshot(path=f"{folder}/by-rank-{name}.png")


def tab(page: Any, name: str) -> Any:
    return page.get_by_role("tab", name=name, exact=True)


def seen(page: Any) -> list[str]:
    """The first words of the panes that are shown."""
    names = page.locator(".nbddp-rank .nbddp-name")
    return [n.inner_text().partition(" · ")[0] for n in names.all() if n.is_visible()]


# -- the tabs, on a page of their own ----------------------------------------------------------------


def test_each_tab_shows_its_ranks_and_their_names_stay_in_view(page: Any, tmp_path: Path) -> None:
    page.set_content(html(outputs(tmp_path, 4, 60), failed=2))
    names = [t.inner_text() for t in page.locator(TAB).all()]
    assert names == ["all", "differences", "side by side", "rank 0", "rank 1", "rank 2 ✗", "rank 3"]
    assert seen(page) == ["rank 0", "rank 1", "rank 2", "rank 3"]
    body = page.locator(".nbddp-body")
    top = body.bounding_box()["y"]
    body.evaluate("e => { e.scrollTop = 700; e.scrollLeft = 300 }")
    name = page.locator(".nbddp-rank .nbddp-name").first.bounding_box()
    assert abs(name["y"] - top) < 2, "sticks to the top"
    assert abs(name["x"] - body.bounding_box()["x"]) < 2, "and to the left"
    tab(page, "rank 2 · 60 lines · raised ValueError: no labels").click()
    assert seen(page) == ["rank 2"]
    tab(page, "lines that differ between ranks").click()
    assert seen(page) == []
    sync_api.expect(page.locator(".nbddp-differs pre").first).to_be_visible()
    tab(page, "ranks side by side").click()
    assert len({round(p.bounding_box()["y"]) for p in page.locator(".nbddp-rank").all()}) == 1
    assert len({round(p.bounding_box()["x"]) for p in page.locator(".nbddp-rank").all()}) == 4


@pytest.mark.parametrize("ranks", [2, 64])
@pytest.mark.parametrize("width", [900, 1400])
def test_the_view_has_one_height_live_and_in_the_end_and_nothing_leaves_the_page(
    page: Any, tmp_path: Path, ranks: int, width: int
) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    heights = set()
    for count, running in ((60, True), (300, True), (300, False)):
        page.set_content(html(outputs(tmp_path / str(count), ranks, count), running=running))
        heights.add(page.locator(ROOT).bounding_box()["height"])
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        strip = page.locator(".nbddp-strip").bounding_box()
        for t in page.locator(TAB).all()[:3]:  # the others of 64 ranks may be scrolled to
            assert t.bounding_box()["y"] + t.bounding_box()["height"] <= strip["y"] + strip["height"] + 1
    assert len(heights) == 1
    assert page.locator(".nbddp-body").bounding_box()["height"] > 250
    keep(page, f"{ranks}-{width}")


def test_keys_choose_tabs_scroll_and_search(page: Any, tmp_path: Path) -> None:
    page.set_content(html(outputs(tmp_path, 3, 60)))
    page.keyboard.press("Tab")
    for key, view in (("ArrowRight", "differences"), ("End", "rank"), ("ArrowRight", "all"), ("ArrowLeft", "rank")):
        page.keyboard.press(key)
        sync_api.expect(page.locator(ROOT)).to_have_attribute("data-view", view)
    assert page.locator(f"{TAB}[aria-selected=true]").inner_text() == "rank 2"
    assert page.locator("[role=tab][tabindex='0']").count() == 1
    page.keyboard.press("Tab")
    page.keyboard.type("STEP 4")
    sync_api.expect(page.get_by_role("status")).to_have_text("33 lines")
    assert page.locator(".nbddp-rank mark:visible").count() == 11
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "nbddp-body"
    page.get_by_role("searchbox").fill("")
    page.keyboard.press("Tab")
    page.keyboard.press("End")
    page.wait_for_function("document.querySelector('.nbddp-body').scrollTop > 0")


def test_a_search_shows_text_as_it_is(page: Any, tmp_path: Path) -> None:
    (out,) = outputs(tmp_path, 1, 60)
    out.take("stream", {"name": "stderr", "text": "a <b> & &amp; c\n"})
    page.set_content(html([out]))
    for word in ("<b> & &amp;", "&amp;", "a <"):
        page.get_by_role("searchbox").fill(word)
        assert page.locator(".nbddp-rank pre").inner_text() == "a <b> & &amp; c"
        assert page.locator(".nbddp-rank pre i mark").inner_text() == word
    page.get_by_role("searchbox").fill("")
    assert len(page.locator(".nbddp-rank pre").inner_text().splitlines()) == 61


def test_pictures_and_tables_stand_side_by_side(page: Any, tmp_path: Path) -> None:
    page.set_content(html(pictured(tmp_path, 3)))
    sync_api.expect(page.locator(ROOT)).to_have_attribute("data-view", "side")
    boxes = [i.bounding_box() for i in page.locator(".nbddp-rich table").all()]
    assert len({round(b["y"]) for b in boxes}) == 1
    assert len({round(b["x"]) for b in boxes}) == 3


AREA = "<div id=area><div><div id=place></div></div></div>"
REPLACE = """([html, more]) => {
  let place = document.querySelector('#place');
  if (more) document.querySelector('#area').append(place = document.createElement('div'));
  place.innerHTML = html;
  for (const old of place.querySelectorAll('script')) {
    const made = document.createElement('script');
    made.textContent = old.textContent;
    old.replaceWith(made);
  }
}"""


def test_tab_search_scroll_and_focus_are_kept_over_updates_and_the_end(page: Any, tmp_path: Path) -> None:
    page.set_content(AREA)
    now = page.evaluate("Date.now()") / 1000 + 5
    outs = outputs(tmp_path, 4, 100)
    page.evaluate(REPLACE, [live(html(outs, running=True), now)])
    tab(page, "rank 2 · 100 lines").click()
    page.locator(".nbddp-body").evaluate("e => e.scrollTop = 200")
    page.wait_for_function("window.nbddpTabs[0].state.tops['rank 2']?.[1] === 200")
    page.get_by_role("searchbox").focus()
    page.keyboard.type("loss of")
    page.keyboard.press("ArrowLeft")
    for running in (True, True, False):
        shown = html(outputs(tmp_path, 4, 100) if running else outs, running=running)
        page.evaluate(REPLACE, [live(shown, now) if running else shown, not running])
        assert page.locator(ROOT).locator("visible=true").count() == 1
        if not running:
            page.evaluate("document.querySelector('#place').innerHTML = ''")
            page.evaluate("new Promise(done => setTimeout(done))")  # what a lost focus leads to
        assert page.locator(f"{TAB}[aria-selected=true]").inner_text() == "rank 2"
        assert page.get_by_role("searchbox").input_value() == "loss of"
        assert page.evaluate("[document.activeElement.type, document.activeElement.selectionStart]") == ["search", 6]
        assert page.locator(".nbddp-body").evaluate("e => e.scrollTop") == 200
    assert page.evaluate("window.nbddpTabs.length") == 1


def test_at_the_end_of_a_tab_the_newest_lines_stay_in_view(page: Any, tmp_path: Path) -> None:
    page.set_content(AREA)
    for i, count in enumerate((80, 120)):
        page.evaluate(REPLACE, [live(html(outputs(tmp_path / str(i), 2, count), running=True), time.time() + 60)])
        if not i:
            page.get_by_role("tab", name="rank 1").click()
        at = page.locator(".nbddp-body").evaluate("e => [e.scrollTop + e.clientHeight, e.scrollHeight]")
        assert at[0] >= at[1] - 4


@pytest.mark.parametrize("seconds", [60, -60], ids=["it hears of the run", "it was loaded later"])
def test_a_page_that_was_loaded_after_the_view_was_sent_says_what_to_do(
    page: Any, tmp_path: Path, seconds: float
) -> None:
    page.goto("about:blank")
    sent = page.evaluate("performance.timeOrigin") / 1000 + seconds
    bar = live("<progress></progress>", sent)
    page.set_content(live(html(outputs(tmp_path, 2, 60), running=True, words="running: rank 0"), sent) + bar)
    old = seconds < 0
    assert [g.is_visible() for g in page.locator(".nbddp-gone").all()] == [old, old]
    assert page.locator("progress").is_visible() != old, "no bar looks alive"
    assert page.locator(".nbddp-foot").is_visible() != old
    assert page.locator(".nbddp-rank").first.is_visible()


def test_on_paper_all_ranks_are_printed(page: Any, tmp_path: Path) -> None:
    dark = "color-scheme: dark; background: #111111; --jp-ui-font-color1: #ffffff; --jp-layout-color0: #111111"
    made = html(outputs(tmp_path, 3, 60))
    page.set_content(f'<body data-jp-theme-light="false" style="{dark}">{made}</body>')
    page.get_by_role("tab", name="rank 1").click()
    page.emulate_media(media="print")
    lines = page.locator(".nbddp-lines > pre").first
    assert lines.evaluate("e => getComputedStyle(e).color") == "rgb(26, 26, 26)", "dark on paper in a dark theme, too"
    assert all(pane.is_visible() for pane in page.locator(".nbddp-rank").all())
    assert page.locator(ROOT).bounding_box()["height"] > 3 * 60 * 15
    assert not page.locator(".nbddp-head").is_visible()


# -- saved notebooks ---------------------------------------------------------------------------------


def book(shown: str, text: str = "rank 0 │ the text", name: str = "") -> Any:
    output = nbformat.v4.new_output("display_data", {"text/html": shown, "text/plain": text})
    return nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(name, outputs=[output])],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    )


def with_figures(folder: Path, ranks: int) -> Any:
    """A cell whose ranks have displayed what only an application shows, and which has then failed."""
    outs = outputs(folder, ranks, 20)
    for out in outs:
        figure = {"application/vnd.plotly.v1+json": {}, "text/plain": f"figure of rank {out.rank}"}
        out.take("display_data", {"data": figure, "metadata": {}})
    found = drawn(OutputState(outs, {}))
    assert found is not None
    text, more = flat(outs, found.shows)
    kept = [nbformat.v4.new_output("display_data", {"text/plain": text, "text/html": found.html})]
    for piece in more:
        kept.append(
            nbformat.v4.new_output("stream", name=piece.stream, text=piece.text)
            if isinstance(piece, Print)
            else nbformat.v4.new_output("display_data", piece.data, metadata=piece.metadata)
        )
    kept.append(nbformat.v4.new_output("error", ename="RunFailed", evalue="all", traceback=["RunFailed: rank 1"]))
    return nbformat.v4.new_code_cell("%%ddp", outputs=kept, execution_count=1)


def figures_follow(page: Any, cell: Any) -> None:
    """A rank's tab has that rank's figures alone, below it, and what is not of ranks stays. Side by side, so are they,
    and in the other views one is below the other."""
    tabs, figures = cell.get_by_role("tab"), {"side by side": [0, 1, 2], "rank 1": [1], "all": [0, 1, 2], "rank 2": [2]}
    for name, ranks in figures.items():
        tabs.filter(has_text=re.compile(f"^{name}$")).click()
        shown = cell.locator("pre", has_text=re.compile(r"^\s*(rank \d │ )?figure of rank \d\s*$"))
        said = [p.inner_text().strip() for p in shown.all() if p.is_visible()]
        assert sorted({int(words[-1]) for words in said}) == ranks, (name, said)
        assert len(said) == 2 * len(ranks), "the line with the rank, and its figure"
        places = [p.bounding_box() for p in shown.all() if p.is_visible()][::2]
        across, down = ([round(place[side]) for place in places] for side in "xy")
        beside, below = (across, down) if name == "side by side" else (down, across)
        assert sorted(set(beside)) == beside, name
        assert len(set(below)) == 1, name
        failure = cell.get_by_text("RunFailed: rank 1")
        sync_api.expect(failure).to_be_visible()
        assert failure.bounding_box()["y"] > max(place["y"] for place in places)


def test_figures_that_follow_the_view_are_those_of_the_tab(page: Any, tmp_path: Path) -> None:
    made = book("<p>no tabs</p>")
    made.cells += [with_figures(tmp_path, 3)]
    nbformat.write(made, tmp_path / "saved.ipynb")
    page.route(re.compile("^http"), lambda route: route.abort())
    page.goto(converted(tmp_path / "saved.ipynb"))
    figures_follow(page, page.locator(".jp-Cell").last)


@pytest.mark.parametrize("theme", [pytest.param("light", marks=pytest.mark.looks), "dark"])
def test_what_nbconvert_writes_has_tabs_without_a_kernel_or_a_network(page: Any, tmp_path: Path, theme: str) -> None:
    nbformat.write(book(html(outputs(tmp_path, 4, 60), failed=1)), tmp_path / "saved.ipynb")
    page.route(re.compile("^http"), lambda route: route.abort())
    page.goto(converted(tmp_path / "saved.ipynb", theme))
    page.get_by_role("tab", name="rank 1").click()
    assert seen(page) == ["rank 1"]
    assert_readable(page.locator(ROOT))
    keep(page, f"nbconvert-{theme}")


def assert_readable(root: Any) -> None:
    found = Seen([], root.evaluate(STRUCTURE)["texts"])
    assert found.texts
    assert not found.too_faint()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A JupyterLab with one notebook that it trusts, one that it does not, and one to be run."""
    base = tmp_path_factory.mktemp("lab")
    folder = base / "books"
    folder.mkdir()
    for name in ("trusted", "strange"):
        made = book(html(outputs(base / name, 4, 60), failed=1), name=name)
        made.cells += book(html(pictured(base / f"{name}-rich", 3)), name=f"{name}-rich").cells
        running = live(html(outputs(base / f"{name}-live", 4, 60), running=True), time.time())
        made.cells += book(running, name=f"{name}-live").cells
        made.cells += [with_figures(base / f"{name}-below", 3)]
        nbformat.write(made, folder / f"{name}.ipynb")
    trust = [sys.executable, "-m", "jupyter", "trust", str(folder / "trusted.ipynb")]
    subprocess.run(trust, env=os.environ | places(base), check=True, capture_output=True)
    cells = [nbformat.v4.new_code_cell(source) for source in ("%load_ext nbddp", CELL, "%ddp attach")]
    kernelspec = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernelspec), folder / "running.ipynb")
    with jupyterlab(base, folder, SETTINGS, more=BESIDE) as server:
        yield server


def in_lab(browser: Any, server: Any, name: str, width: int = 1400) -> Any:
    page = browser.new_page(viewport={"width": width, "height": 2000})
    page.set_default_timeout(1000 * PATIENCE)
    page.goto(f"{server['url']}doc/tree/{name}.ipynb?token={server['token']}")
    page.locator(".jp-OutputArea details").first.wait_for(state="attached")
    page.locator("body[data-jp-theme-name]").wait_for(state="attached")
    return page


def test_jupyterlab_has_tabs_in_both_themes_on_narrow_and_wide_pages(browser: Any, saved: Any) -> None:
    page = in_lab(browser, saved, "trusted")
    for (width, _), theme in product(SIZES, THEMES):
        page.set_viewport_size({"width": width, "height": 2000})
        page.evaluate("theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", THEMES[theme])
        page.wait_for_function(SWITCHED, arg=THEMES[theme])
        roots = page.locator(ROOT)
        sync_api.expect(roots).to_have_count(4)
        for root in roots.all():
            area = root.locator("xpath=ancestor::*[contains(@class, 'jp-OutputArea-output')]")
            assert area.evaluate("e => e.scrollWidth <= e.clientWidth + 1")
            assert_readable(root)
        keep(page, f"lab-{width}-{theme}")
    sync_api.expect(page.locator(".nbddp-gone")).to_be_visible()
    strip = page.locator(".nbddp-strip").first
    strip.get_by_role("tab", name="all ranks").click()
    for key, name in (("ArrowRight", "differences"), ("End", "rank 3"), ("Home", "all")):
        page.keyboard.press(key)
        sync_api.expect(strip.locator("[aria-selected=true]")).to_have_text(name)
    figures_follow(page, page.locator(".jp-CodeCell").last)
    page.close()


@pytest.mark.looks
def test_jupyterlab_shows_folds_of_a_notebook_that_it_does_not_trust(browser: Any, saved: Any) -> None:
    page = in_lab(browser, saved, "strange")
    outs = page.locator(".jp-OutputArea-output")
    folds = outs.nth(0).locator("details")
    assert [f.locator("summary").inner_text() for f in folds.all()] == [
        "rank 0 · 60 lines", "rank 1 · 60 lines · raised ValueError: no labels", "rank 2 · 60 lines",
        "rank 3 · 60 lines", "differences",
    ]  # fmt: skip
    assert folds.nth(0).locator("pre").bounding_box() is not None
    assert outs.nth(0).bounding_box()["height"] < 600, "the lines scroll"
    folds.nth(1).locator("summary").click()
    sync_api.expect(folds.nth(1).locator("pre")).to_be_visible()
    assert "const " not in outs.nth(0).inner_text()
    sync_api.expect(outs.nth(2)).to_contain_text(NOT_LIVE)
    keep(page, "lab-strange")
    page.close()


# -- a cell that runs --------------------------------------------------------------------------------


def test_a_running_cell_has_the_view_that_stays_and_a_page_that_is_loaded_again_says_so(
    browser: Any, saved: Any
) -> None:
    folder = Path(saved["root_dir"])
    page = browser.new_page(viewport={"width": 1100, "height": 1600})
    page.set_default_timeout(1000 * PATIENCE)
    page.goto(f"{saved['url']}doc/tree/running.ipynb?token={saved['token']}")
    page.wait_for_function("window.jupyterapp !== undefined")
    page.wait_for_function(CONNECTED)
    _run(page, 0)
    sync_api.expect(page.locator(".jp-InputPrompt").first).to_have_text("[1]:")
    _run(page, 1)
    shown = page.locator(ROOT)
    shown.wait_for()
    height = page.evaluate("document.querySelector('.nbddp-tabs').offsetHeight")
    below = "e => e.parentElement.getBoundingClientRect().bottom - e.getBoundingClientRect().bottom"
    assert page.locator(".nbddp-foot").first.evaluate(below) <= 2, "nothing is empty below the last line"
    assert not page.locator(".nbddp-gone").is_visible()
    page.get_by_role("tab", name="rank 2").click()
    mark = page.evaluate("document.querySelector('.nbddp-tabs').marked = Date.now()")
    page.wait_for_function("document.querySelector('.nbddp-tabs')?.marked === undefined")
    sync_api.expect(page.locator(f"{TAB}[aria-selected=true]")).to_have_text("rank 2")
    assert mark
    assert 1 <= _updates(page, 3) / 3 <= 5
    # when it has been saved; a cell that runs changes the notebook again at once
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    text = json.loads((folder / "running.ipynb").read_text())["cells"][1]["outputs"]
    assert any("nbddp-live" in str(o) for o in text)

    page.reload()
    page.locator(ROOT).wait_for()
    sync_api.expect(page.locator(".nbddp-gone")).to_be_visible()
    keep(page, "reloaded")
    page.wait_for_function(CONNECTED)
    page.evaluate("window.jupyterapp.shell.currentWidget.content.activeCellIndex = 2")
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-cell') }")
    (folder / "go").touch()
    last = page.locator(".jp-CodeCell").nth(2)
    sync_api.expect(last.locator(ROOT)).to_be_visible()
    sync_api.expect(last.locator(".nbddp-rank").first).to_contain_text("the end")
    assert last.locator(ROOT).bounding_box()["height"] == height
    assert last.locator(".nbddp-gone").count() == 0
    keep(page, "attached")
    page.close()


def _run(page: Any, number: int) -> None:
    page.evaluate("number => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = number }", number)
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-cell') }")


def _updates(page: Any, seconds: float) -> int:
    """How often the view is replaced meanwhile."""
    return int(
        page.evaluate(
            """seconds => new Promise(done => {
        let count = 0;
        const watch = new MutationObserver(all => { for (const one of all) for (const e of one.addedNodes)
            if (e.nodeType === 1 && (e.matches('.nbddp-live') || e.querySelector('.nbddp-live'))) count += 1; });
        watch.observe(document.body, {childList: true, subtree: true});
        setTimeout(() => { watch.disconnect(); done(count); }, 1000 * seconds);
    })""",
            seconds,
        )
    )
