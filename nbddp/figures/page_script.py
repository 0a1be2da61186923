"""Scripts that widgets bring along. HTML that a widget puts into a page runs no `<script>`, but an image's `onload`.
Where a page allows no scripts, the controls work without what these add."""

from __future__ import annotations

from functools import cache
from html import escape
from pathlib import Path

DOT = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA="  # loads at once, when its place is on the page
CONTROLS = Path(__file__).with_name("controls.js")  # names and roles of ipywidgets' controls


@cache
def on_page(within: str, *files: Path) -> str:
    """HTML that calls the function of each file with the element around it that `within` selects."""
    calls = "".join(f"({_function(file)})(root);" for file in files)
    call = f"const root = this.closest('{within}'); if (root) {{ {calls} }}"
    return f'<img hidden alt="" src="{DOT}" onload="{escape(call)}">'


def _function(file: Path) -> str:
    """The function, without the comments before it."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("//"))
