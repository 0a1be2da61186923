"""What tests of pages share: a Chromium of their own, and in it one context, for each costs half a second of a core."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


class Pages:
    """Opens pages in one context of a browser; a page with options of its own has a context of its own too."""

    def __init__(self, browser: Any):
        self._browser, self._context = browser, browser.new_context()
        self.new_context = browser.new_context

    def new_page(self, viewport: Any = None, **options: Any) -> Any:
        if options:
            return self._browser.new_page(viewport=viewport, **options)
        page = self._context.new_page()
        if viewport:
            page.set_viewport_size(viewport)
        return page


@pytest.fixture(scope="package")
def browser() -> Iterator[Pages]:
    from tests.browser.test_browser import FLAGS, browsers, playing  # which skips where there is no playwright

    found = browsers()
    if not found:
        pytest.skip("to test in a browser: apt-get install chromium, or playwright install chromium")
    with playing() as play:
        opened = play.chromium.launch(executable_path=found[0], args=FLAGS)
        yield Pages(opened)
        opened.close()
