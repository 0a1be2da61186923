"""The button below a written trace hands the file to Perfetto's page, and says what keeps it from that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nbddp.capabilities.trace.merge import Merged
from nbddp.capabilities.trace.written import VIEWER, written
from tests.browser.test_browser import sync_api

HERE = "http://notebook.test/"
READER = """<script>
  onmessage = e => {
    if (e.data === 'PING') return e.source.postMessage('PONG', '*');
    const {buffer, title, fileName} = e.data.perfetto;
    window.got = [new TextDecoder().decode(buffer), title, fileName];
  };
</script>"""


def html_of(folder: Path) -> tuple[str, dict[str, Any]]:
    merged = Merged({"traceEvents": []}, [0, 1], 0, 0)
    made = written(merged, folder / "step.json")
    return made._repr_mimebundle_()[0]["text/html"].replace(folder.as_posix() + "/", ""), merged.data


def opened(browser: Any, html: str, file: bytes | None, reader: bool = True) -> Any:
    """A page with this HTML, beside a file or none; without a reader there is no network beyond it."""
    context = browser.new_context()
    context.route(HERE, lambda route: route.fulfill(body=html, content_type="text/html"))
    context.route(
        f"{HERE}step.json",
        lambda route: route.fulfill(status=404) if file is None else route.fulfill(body=file),
    )
    context.route(
        f"{VIEWER}/**",
        lambda route: route.fulfill(body=READER, content_type="text/html") if reader else route.abort(),
    )
    page = context.new_page()
    page.goto(HERE)
    return page


def test_the_button_opens_the_file_in_perfetto(browser: Any, tmp_path: Path) -> None:
    html, data = html_of(tmp_path)
    page = opened(browser, html, (tmp_path / "step.json").read_bytes())
    with page.context.expect_page() as opening:
        page.get_by_role("button", name="Open in Perfetto").click()
    viewer = opening.value
    viewer.wait_for_function("window.got")
    content, title, name = viewer.evaluate("window.got")
    assert viewer.url.startswith(VIEWER)
    assert json.loads(content) == data
    assert (title, name) == ("step.json", "step.json")
    sync_api.expect(page.get_by_role("status")).to_have_text(" Perfetto has the file.")
    page.context.close()


@pytest.mark.parametrize(("file", "reader", "said"), [(None, True, "(404)"), (b"{}", False, "it needs a network")])
def test_what_cannot_be_opened_says_why(
    browser: Any, tmp_path: Path, file: bytes | None, reader: bool, said: str
) -> None:
    page = opened(browser, html_of(tmp_path)[0].replace("PATIENCE = 30", "PATIENCE = 0.5"), file, reader)
    page.get_by_role("button", name="Open in Perfetto").click()
    status = page.get_by_role("status")
    sync_api.expect(status).to_contain_text(said)
    sync_api.expect(status).to_contain_text("Download the file")
    page.context.close()


def test_without_a_script_there_are_the_file_and_the_address(tmp_path: Path) -> None:
    before, _, _ = html_of(tmp_path)[0].partition("<script>")
    assert "<button" not in before
    assert 'href="step.json" download' in before
    assert f'href="{VIEWER}"' in before
