"""Accessibility of the figures by axe-core: roles, names, contrast and keys, in both themes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser import test_documents as documents
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
