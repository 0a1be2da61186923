"""How outputs look: structure and contrast in JupyterLab, Notebook 7 and a terminal, in both themes.

Some outputs in JupyterLab are always looked at, all of them in every front end by `-m looks`. `python -m tests.looks`
makes pictures of what was seen.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from nbddp.analysis.placement import planned
from nbddp.capabilities.topology.figure import draw_topology
from nbddp.figures.palette import FILLS, FRAME, INK, MUTED, PAPER, TINTS
from nbddp.figures.table import Table
from nbddp.output.progress import Progress
from nbddp.output.screens import bar_of
from tests.browser.test_browser import browsers
from tests.colours import contrast, in_the_dark
from tests.looks.__main__ import DOCS, FRONT_ENDS, GALLERY, Keeper, look_at
from tests.looks.front_ends import STRUCTURE, THEMES
from tests.looks.outputs import NAMES, OUTPUTS, chosen
from tests.looks.structure import LEAST, Seen, kept, steady

SOME = ("folded", "differs", "bar", "error", "planned")
DARK = ("#111111", "#1f1f1f")  # the pages of JupyterLab and VS Code


def seen(front: str, names: tuple[str, ...]) -> Keeper:
    """What a front end shows of these outputs, compared."""
    if not browsers():
        pytest.skip("to test in a browser: apt-get install chromium, or playwright install chromium")
    keeper = Keeper(front, None)
    look_at(front, list(chosen(names)), [*THEMES], keeper, scale=1)
    return keeper


@pytest.mark.looks
@pytest.mark.timeout(300)
def test_outputs_in_jupyterlab_are_as_kept_and_can_be_read_in_both_themes() -> None:
    keeper = seen("lab", SOME)
    assert not keeper.found, "\n".join(keeper.found)
    assert keeper.least >= LEAST


@pytest.mark.looks
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("front", FRONT_ENDS)
def test_all_outputs_are_as_kept_and_can_be_read_in_both_themes(front: str) -> None:
    if front == "notebook" and find_spec("notebook") is None:
        pytest.skip("pip install 'notebook>=7'")
    keeper = seen(front, NAMES)
    assert not keeper.found, "\n".join(keeper.found)


def test_every_output_is_kept_for_notebooks_and_terminals_and_no_other() -> None:
    for front in ("lab", "terminal"):
        assert {p.stem for p in kept(front, "").parent.glob("*.txt")} == {
            o.name for o in OUTPUTS if not o.hidden and not o.loose
        }


def test_each_picture_of_the_gallery_is_there_has_alternative_text_and_is_shown() -> None:
    shown = re.findall(r"!\[(.*?)\]\((.*?)\)", (DOCS / "gallery.md").read_text(encoding="utf-8"))
    assert all(words.strip() for words, _ in shown), shown
    assert all((DOCS / path).is_file() for _, path in shown)
    drawn = {f"looks/{name}-{place}.png" for place, names in GALLERY.items() for name in names}
    assert drawn == {path for _, path in shown if path.startswith("looks/")}
    assert drawn == {f"looks/{path.name}" for path in (DOCS / "looks").glob("*.png")}


PAIRS = [(i, p) for i in (INK, MUTED) for p in (PAPER, FRAME)]
PAIRS += [*((PAPER, fill) for fill in FILLS), *((INK, tint) for tint in TINTS)]


@pytest.mark.parametrize(("ink", "paper"), PAIRS)
def test_inks_of_figures_can_be_read_on_their_paper_in_light_and_in_the_dark(ink: str, paper: str) -> None:
    assert contrast(ink, paper) >= LEAST
    for behind in DARK:
        assert contrast(in_the_dark(ink, behind), in_the_dark(paper, behind)) >= LEAST


# -- VS Code, as far as a page can stand for it --------------------------------------------------

VS_CODE = {  # the class of its page, and the colours that it gives: editor background and foreground
    "vscode-light": ("#ffffff", "#3b3b3b"),
    "vscode-dark": ("#1f1f1f", "#cccccc"),
    "vscode-high-contrast": ("#000000", "#ffffff"),
    "vscode-high-contrast vscode-high-contrast-light": ("#ffffff", "#292929"),
}
VS_PAGE = """<html style="--vscode-editor-background: {0}; --vscode-editor-foreground: {1}">
<body class="{2}" style="background: {0}; color: {1}">{3}</body></html>"""


def test_in_vs_codes_themes_outputs_can_be_read_and_pictures_follow(browser: Any) -> None:
    """VS Code shows the HTML of a bundle, on a page of its own with its theme's class and colours."""
    drawn = draw_topology(planned(nnodes=2, gpus_per_node=4, gpus_per_proc=2))
    live = drawn._repr_mimebundle_()[0]["text/html"]
    assert drawn.figure, "taken by somebody, so that its picture is shown"
    figure = drawn._repr_mimebundle_()[0]["text/html"]
    table = Table(("rank", "memory"), [(0, "73 MiB")])._repr_html_()
    parts = figure + table + bar_of(Progress("all_reduce of 64 KiB", 3, 9)) + bar_of("starting 4 workers")
    filters, inks = [], []
    page = browser.new_page()
    for name, colours in VS_CODE.items():
        page.set_content(VS_PAGE.format(*colours, name, live))
        node = page.locator(".nbddp-svg text", has_text="node 0").first
        inks.append(node.evaluate("e => getComputedStyle(e).fill"))
        page.set_content(VS_PAGE.format(*colours, name, parts))
        found = page.locator("body").evaluate(STRUCTURE)["texts"]
        assert len(found) == 7
        assert not Seen([], found).too_faint()
        filters.append(page.locator("img").evaluate("e => getComputedStyle(e).filter"))
        bar = page.get_by_role("progressbar", name="nbddp: all_reduce of 64 KiB (3 of 9) …")
        assert bar.evaluate("e => e.position") == pytest.approx(1 / 3)
    dark = "invert(1) hue-rotate(180deg)"
    assert filters == ["none", dark, dark, "none"]
    assert inks == ["rgb(26, 26, 26)", "rgb(232, 232, 232)", "rgb(232, 232, 232)", "rgb(26, 26, 26)"]


SVG = '<svg width="200" height="90"><title>a curve</title><style>.faint {{ fill: {0} }}</style>{1}</svg>'
TEXTS = (
    '<text x="5" y="20" class="faint">faint</text><text x="5" y="40" fill="#1a1a1a">dark</text>'
    '<text x="5" y="60" fill="#1a1a1a" fill-opacity="0.4">pale</text><text x="5" y="80" fill="none">outline</text>'
    '<rect x="100" width="90" height="30" fill="#33608c"/><text x="110" y="20" fill="#ffffff">on a bar</text>'
    '<text x="110" y="60" fill="#ffffff">beside it</text><rect x="100" y="40" width="90" height="30" fill="#000000"/>'
)


def test_text_in_a_drawing_is_looked_at_in_the_colour_that_fills_it(browser: Any) -> None:
    page = browser.new_page()
    page.set_content(f'<body style="color: #000000">{SVG.format("#b0b0b0", TEXTS)}</body>')
    found = {t["text"]: t["ratio"] for t in page.locator("body").evaluate(STRUCTURE)["texts"]}
    assert set(found) == {"faint", "dark", "pale", "on a bar", "beside it"}
    assert found["on a bar"] == pytest.approx(contrast("#ffffff", "#33608c"), rel=0.01)
    assert found["beside it"] == pytest.approx(1), "what is drawn later is over it"
    assert found["faint"] == pytest.approx(contrast("#b0b0b0", "#ffffff"), rel=0.01)
    assert found["dark"] > 15
    assert found["pale"] < LEAST


# -- that the comparison would find something --------------------------------------------------


def of(text: str, tree: str = "pre", ratio: float = 7.0) -> Seen:
    said: dict[str, Any] = {"text": "a", "where": "pre", "ink": (0, 0, 0), "behind": (9, 9, 9), "ratio": ratio}
    return Seen([{"mime": "text/plain", "tree": tree, "text": text}], [said])


def found(shown: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("tests.looks.structure.KEPT", tmp_path)
    Keeper("lab", None, keep=True).look("light", "folded", b"", of("ranks 0–3 │ the sum is 6.0"))
    keeper = Keeper("lab", None)
    keeper.look("light", "folded", b"", shown)
    return keeper.found


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        (of("ranks 0–1 │ the sum is 12.5"), ""),
        (of("ranks 0–3 │ the product is 6.0"), "differs from"),
        (of("ranks 0–3 │ the sum is 6.0", "div(pre)"), "differs from"),
        (of("ranks 0–3 │ the sum is 6.0", ratio=4.4), "contrast 4.40:1"),
    ],
    ids=["other numbers", "other words", "other elements", "faint"],
)
def test_what_changes_is_found_and_numbers_may_change(
    shown: Seen, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = found(shown, tmp_path, monkeypatch)
    assert len(lines) == bool(why)
    assert all(why in line for line in lines)


def test_what_differs_from_run_to_run_is_left_out() -> None:
    said = "It took 12.3 ms, 412 µs or 1,234 s; 272 MiB in /root/.cache/nbddp/a.log: 4 █████▌    |"
    assert list(steady(said)) == ["It took 0 U, 0 U or 0 U; 0 U in PATH: 0 █ |"]
    assert len({o.name for o in OUTPUTS}) == len(OUTPUTS)
