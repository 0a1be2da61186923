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


def list_arrow(within: str) -> str:
    """Rules for lists in what `within` selects: the arrow that ipywidgets draws on them is black in each theme."""
    return (
        f"[data-jp-theme-light=false] {within} select {{background-image: "
        "url(\"data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 18 18'%3E"
        "%3Cpath d='M4.5 7 9 11.5 13.5 7' fill='none' stroke='%23e0e0e0' stroke-width='1.8'/%3E%3C/svg%3E\")} "
    )


def _function(file: Path) -> str:
    """The function, without the comments before it."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("//"))
