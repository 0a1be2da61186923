"""What tests of pages share: a Chromium of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from tests.browser.test_browser import FLAGS, browsers, sync_api  # which skips where there is no playwright

    found = browsers()
    if not found:
        pytest.skip("to test in a browser: apt-get install chromium, or playwright install chromium")
    with sync_api.sync_playwright() as play:
        opened = play.chromium.launch(executable_path=found[0], args=FLAGS)
        yield opened
        opened.close()
