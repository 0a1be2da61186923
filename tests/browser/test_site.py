"""The site is built without a warning, its search works offline, and figures follow the theme. Needs `.[docs]`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.places import ROOT

pytestmark = pytest.mark.more
pytest.importorskip("sphinx", reason="pip install -e '.[docs]'")
pytest.importorskip("myst_nb", reason="pip install -e '.[docs]'")
HTML = ROOT / "build" / "docs" / "html"
ASKED = re.compile(r"predict\.(?!summary\b)\w+\(")
SEARCHES = {  # what is typed → a page among the first three found
    "conda": "how-to/use-a-conda-environment.html",
    "free GPU memory": "how-to/stop-and-free-memory.html",
    "VS Code": "how-to/use-vs-code.html",
    "nproc": "reference/options.html",
    "timings": "reference/python.html#nbddp.Pool.timings",
    "waiting in all_reduce": "reference/messages.html",
    "NBDDP_RUNTIME_DIR": "reference/configuration.html",
    "no IPython profile has a cluster of this name": "reference/messages.html",
}


@pytest.fixture(scope="module")
def html() -> Path:
    built = subprocess.run([sys.executable, "-m", "docs"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "WARNING" not in built.stderr
    return HTML


@pytest.mark.parametrize("typed", SEARCHES)
def test_a_search_finds_its_page_offline(html: Path, browser: Any, typed: str) -> None:
    page = browser.new_page(offline=True)
    page.goto(f"file://{html}/search.html?q={typed.replace(' ', '+')}")
    page.locator("#search-results li a").first.wait_for()
    found = page.eval_on_selector_all("#search-results li a", "all => all.slice(0, 3).map(each => each.href)")
    assert any(SEARCHES[typed] in address for address in found), found
    page.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_figures_follow_the_theme_and_no_page_is_wider_than_a_phone(html: Path, browser: Any, theme: str) -> None:
    page = browser.new_page(color_scheme=theme, viewport={"width": 400, "height": 800}, offline=True)
    for name in ("lessons/05-averaging-gradients", "gallery", "index", "reference/options"):
        page.goto(f"file://{html}/{name}.html")
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), name
    page.goto(f"file://{html}/lessons/05-averaging-gradients.html")
    shown = page.locator("img.nbddp-picture").first.evaluate("image => getComputedStyle(image).filter")
    assert ("invert" in shown) == (theme == "dark")
    page.goto(f"file://{html}/lessons/08-buckets-and-overlap.html")
    sizes = page.locator(".nbddp-keys img").evaluate_all("all => all.map(each => each.clientHeight)")
    assert set(sizes) == {12}, "the theme puts no room around the pictures of a legend"
    page.close()


LIGHTNESS = (
    "(e) => getComputedStyle(e).color.match(/[\\d.]+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 3"
)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_texts_of_outputs_are_readable_in_both_themes(html: Path, browser: Any, theme: str) -> None:
    page = browser.new_page(color_scheme=theme, viewport={"width": 1400, "height": 800}, offline=True)
    page.goto(f"file://{html}/lessons/05-averaging-gradients.html")
    for text in (page.get_by_text("✓ ok").first, page.get_by_text("The figure as text").first):
        assert (text.evaluate(LIGHTNESS) > 128) == (theme == "dark")
    page.close()


def test_no_code_in_a_sentence_is_wider_than_a_phone(html: Path, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 400, "height": 800}, offline=True)
    for name in ("simulated-gpus-and-an-h100", "reference/messages", "lessons/10-failure-checkpoint-restart"):
        page.goto(f"file://{html}/{name}.html")
        widest = page.eval_on_selector_all(
            ".bd-article p code, .bd-article li code",
            "all => Math.max(...all.map(e => e.getBoundingClientRect().right))",
        )
        assert widest <= 400, name
    page.close()


def test_every_question_and_every_exercise_has_its_answer_folded_below(html: Path) -> None:
    for path in sorted((ROOT / "notebooks/solutions").glob("*.ipynb")):
        cells = nbformat.read(path, 4).cells
        page = (html / f"lessons/{path.stem}.html").read_text(encoding="utf-8")
        asked = sum(len(ASKED.findall(c.source)) for c in cells if "prediction" in c.metadata.get("tags", ()))
        solved = sum("solution" in c.metadata.get("tags", ()) for c in cells)
        assert page.count("<summary><b>Answer</b>") == asked > 0, path.stem
        assert page.count("Solution (when you have tried)") == 2 * solved > 0, path.stem  # of a fold, open and closed
