"""axe-core on the panel, an explorer, a question and outputs, in JupyterLab and Notebook 7 and both themes; and what it
cannot see: names of all controls, sizes of targets, the ring of the focus, 200 % zoom.

axe-core (MPL-2.0) is a test's tool alone; the package `axe-playwright-python` has it as a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from nbddp.capabilities.panel.state import PAGES
from nbddp.lessons.framework.explorer import Explorer
from nbddp.teach import explore
from tests.browser.test_browser import browsers, sync_api, until
from tests.browser.test_panel_browser import TRAIN, Panel
from tests.colours import contrast
from tests.looks.front_ends import THEMES, Page, opened
from tests.looks.outputs import Output

FOUND = find_spec("axe_playwright_python")
CELLS = (
    Output("load", "%load_ext nbddp"), Output("panel", "%ddp panel"), Output("train", TRAIN),
    Output("prints", "%%ddp\nprint('here')"), Output("fails", "%%ddp\n1 / 0"),
    Output("explorer", "from nbddp.teach import explore, predict\nexplore.buckets()"),
    Output("question", "predict.global_rank_as_device()"), Output("status", "%ddp status"),
    Output("long", "%%ddp\nfor i in range(60): print('step', i, 'on', dist.get_rank())"),
    Output("timings", "%ddp timings"),
)  # fmt: skip
SERIOUS = ("serious", "critical")
AXE = """async element => (await axe.run(element, {resultTypes: ['violations']})).violations.flatMap(
    v => v.nodes.map(n => [v.impact, v.id, n.html.slice(0, 160), n.failureSummary.slice(0, 300)]))"""
NAMELESS = """root => [...root.querySelectorAll('button, select, input, [role=slider], [contenteditable=true]')]
    .filter(e => e.offsetParent !== null && !(e.ariaLabel || e.labels?.[0]?.innerText.trim() || e.textContent.trim()))
    .map(e => e.outerHTML.slice(0, 200))"""
# A line's button stands in a sentence, whose height it has (WCAG 2.5.8 exempts it).
# Of a slider, what takes the pointer may be larger than what is seen; in the panel's curves the whole plot takes it
SMALL = """root => [...root.querySelectorAll(
    'button:not(.nbddp-place), select, input:not([type=checkbox], [type=radio]), [role=slider]')]
    .filter(e => e.offsetParent !== null && !e.closest('.nbddp-steps')).flatMap(e => {
      const r = e.getBoundingClientRect();
      e.scrollIntoViewIfNeeded?.();
      const hit = (dx, dy) => { const box = e.getBoundingClientRect();
        const at = document.elementFromPoint((box.left + box.right) / 2 + dx, (box.top + box.bottom) / 2 + dy);
        return at !== null && e.contains(at); };
      const sides = [[-11, 0], [11, 0], [0, -11], [0, 11]];
      const small = e.matches('[role=slider]') ? !sides.every((to) => hit(...to)) : r.width < 24 || r.height < 24;
      return small ? [[r.width, r.height, e.outerHTML.slice(0, 120)]] : [];
    })"""
RING = "e => { const s = getComputedStyle(e); return [s.outlineStyle, parseFloat(s.outlineWidth), s.outlineColor]; }"
BEHIND = "() => getComputedStyle(document.body).getPropertyValue('--jp-layout-color0').trim()"


def serious(element: Any) -> list[Any]:
    """What axe finds in an element that is serious or worse."""
    return [found for found in element.evaluate(AXE) if found[0] in SERIOUS]


def add_axe(page: Any) -> None:
    assert FOUND is not None
    assert FOUND.origin is not None
    page.evaluate(Path(FOUND.origin).with_name("axe.min.js").read_text(encoding="utf-8"))


def hex_of(colour: str) -> str:
    """`rgb(1, 2, 3)` or `rgba(…)` as #010203; a colour that is hexadecimal already, with all digits."""
    if colour.startswith("#"):
        return colour if len(colour) == 7 else "#" + "".join(2 * c for c in colour[1:])
    if colour in ("white", "black"):
        return {"white": "#ffffff", "black": "#000000"}[colour]
    red, green, blue, *_ = (float(part) for part in colour.partition("(")[2].rstrip(")").split(","))
    return f"#{int(red):02x}{int(green):02x}{int(blue):02x}"


def ring(page: Page, element: Any, away: str = "Shift+Tab", back: str = "Tab") -> None:
    """What the keyboard has focused has a ring of 2 px, 3 : 1 to the page. away, back: keys between it and what is
    beside it. That is no editor of a cell, which takes Tab as text."""
    element.focus()
    page.page.keyboard.press(away)
    page.page.keyboard.press(back)
    assert element.evaluate("e => e === document.activeElement"), "the keys came back to it"
    style, width, colour = element.evaluate(RING)
    assert (style, width >= 2) == ("solid", True), (style, width)
    assert contrast(hex_of(colour), hex_of(page.page.evaluate(BEHIND))) >= 3


def look_at_panel(shown: Panel) -> None:
    for name in PAGES:
        shown.turn_to(name)
        until(lambda: not shown.at.evaluate(NAMELESS), f"names of all controls of {name}")
        assert not shown.at.evaluate(SMALL), name
        found = serious(shown.at)
        assert not found, (name, shown.page.theme, found)


def zoomed(shown: Panel) -> None:
    """At 200 %, half the CSS pixels: no page sticks out."""
    shown.page.page.set_viewport_size({"width": 640, "height": 900})
    for name in PAGES:
        shown.turn_to(name)
        assert shown.at.evaluate("e => e.scrollWidth <= e.clientWidth + 1"), name
    shown.page.page.set_viewport_size({"width": 1120, "height": 2400})


def run_all(shown: Panel) -> Sequence[Any]:
    """The cells after the panel; one that trains for ever is stopped with the panel."""
    shown.start()
    shown.says("ready: world size 2")
    cell = shown.page.begin(2)
    shown.turn_to("Timings")
    shown.says("exposed communication")
    until(lambda: shown.at.locator(".meters svg").count(), "a curve of the memory")
    shown.turn_to("Ranks")
    shown.press("Stop")
    shown.page.ended(cell)
    cells = []
    for number in range(3, len(CELLS)):  # one by one: a cell that fails has the front end forget those behind it
        cells.append(shown.page.begin(number))
        shown.page.ended(cells[-1])
    shown.turn_to("Timings")
    sync_api.expect(shown.at.get_by_role("table", name="runs so far", exact=False)).to_be_visible()
    return [cell, *cells]


EXPLORERS = sorted(name for name in dir(explore) if isinstance(getattr(explore, name), Explorer))


@pytest.mark.looks
@pytest.mark.timeout(600)
@pytest.mark.skipif(FOUND is None, reason="to test with axe-core: pip install axe-playwright-python")
def test_axe_finds_nothing_serious_on_any_explorer(tmp_path: Path) -> None:
    if not browsers():
        pytest.skip("to test in a browser: apt-get install chromium, or playwright install chromium")
    cells = [Output("import", "from nbddp.teach import explore"), *(Output(n, f"explore.{n}()") for n in EXPLORERS)]
    found = []
    with opened("lab", cells, tmp_path, scale=1) as page:
        add_axe(page.page)
        for number in range(len(cells)):
            page.ended(page.begin(number))
        for theme, (number, name) in product(THEMES, enumerate(EXPLORERS, 1)):
            page.wear(theme)
            shown = page.select(number).locator(".jp-Cell-outputWrapper")
            shown.scroll_into_view_if_needed()
            bad = {"axe": serious(shown), "nameless": shown.evaluate(NAMELESS), "small": shown.evaluate(SMALL)}
            found += [(name, theme, kind, some) for kind, some in bad.items() if some]
    assert not found, found


@pytest.mark.timeout(300)
@pytest.mark.skipif(FOUND is None, reason="to test with axe-core: pip install axe-playwright-python")
@pytest.mark.parametrize("front", ["lab", pytest.param("notebook", marks=pytest.mark.looks)])
def test_axe_finds_nothing_serious_on_panel_explorers_questions_and_outputs(tmp_path: Path, front: str) -> None:
    if not browsers():
        pytest.skip("to test in a browser: apt-get install chromium, or playwright install chromium")
    with opened(front, CELLS, tmp_path, scale=1) as page:
        shown = Panel(page)
        add_axe(page.page)
        cells = run_all(shown)
        for theme in THEMES:
            page.wear(theme)
            look_at_panel(shown)
            for output, cell in zip(CELLS[2:], cells, strict=True):
                found = serious(cell.locator(".jp-Cell-outputWrapper"))
                assert not found, (output.name, theme, found)
                assert not cell.locator(".jp-Cell-outputWrapper").evaluate(NAMELESS), output.name
                assert not cell.locator(".jp-Cell-outputWrapper").evaluate(SMALL), output.name
            ring(page, shown.at.get_by_role("tab", selected=True))
            for control in cells[3].get_by_role("slider").all():
                ring(page, control, "Tab", "Shift+Tab")
        shown.turn_to("Debugger")
        ring(page, shown.at.get_by_label("line", exact=True))
        group = cells[4].get_by_role("radiogroup")
        assert "rank" in str(group.get_attribute("aria-label"))
        zoomed(shown)
