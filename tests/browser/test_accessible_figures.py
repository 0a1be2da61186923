"""Accessibility of figures and of output by rank by axe-core: roles, names, contrast and keys, in both themes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.browser import test_documents as documents
from tests.browser import test_output_by_rank as by_rank
from tests.browser.test_accessibility import FOUND, NAMELESS, add_axe, serious
from tests.browser.test_browser import sync_api


@pytest.mark.skipif(FOUND is None, reason="to test with axe-core: pip install axe-playwright-python")
@pytest.mark.parametrize("name", documents.DRAWN)
def test_axe_finds_nothing_serious_on_figures(browser: Any, name: str) -> None:
    """With a part's numbers pinned, the text open, and of timings another step."""
    for theme in documents.THEMES:
        seen = documents.opened(browser, documents.LAB + documents.html(name), 900, theme)
        add_axe(seen)
        if name == "timings":
            documents.column(seen, 0).click()
            sync_api.expect(seen.locator(documents.HEAD)).to_contain_text("step 0 of")
        part = seen.locator("[data-i]").nth(1)
        part.focus()
        seen.keyboard.press("Enter")
        seen.locator("summary").click()
        found = serious(seen.locator(".nbddp-figure"))
        assert not found, (theme, found)
        assert not seen.locator(".nbddp-figure").evaluate(NAMELESS)
        seen.close()


COLOURED = "".join(
    f"\x1b[{ink}m{i}\x1b[0m \x1b[{ink + 10}mon it\x1b[0m\n" for i, ink in enumerate([*range(30, 38)] * 6)
)
WIDE = "<table><tr>" + "<td>a wide column</td>" * 40 + "</tr></table>"


@pytest.mark.skipif(FOUND is None, reason="to test with axe-core: pip install axe-playwright-python")
def test_axe_finds_nothing_serious_on_output_by_rank(browser: Any, tmp_path: Path) -> None:
    """With a terminal's colours and a table wider than the page, in each view."""
    outs = by_rank.outputs(tmp_path, 3, 50)
    for out in outs:
        out.take("stream", {"name": "stdout", "text": COLOURED})
        out.take("display_data", {"data": {"text/html": WIDE, "text/plain": "a table"}, "metadata": {}})
    made = by_rank.html(outs, failed=1)
    for theme in documents.THEMES:
        seen = documents.opened(browser, made, 900, theme)
        add_axe(seen)
        for tab in seen.locator(by_rank.TAB).all():
            tab.click()
            found = serious(seen.locator(by_rank.ROOT))
            assert not found, (theme, tab.text_content(), found)
        assert not seen.locator(by_rank.ROOT).evaluate(NAMELESS)
        seen.close()
