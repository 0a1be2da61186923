"""Displays as a part of a page: HTML and pictures. Whatever needs an application, such as a widget, is displayed by
itself, and so is HTML that would break the page around it. Pure."""

from __future__ import annotations

import re
from html import escape
from html.parser import HTMLParser
from urllib.parse import quote

from nbddp.output.buffer import Display
from nbddp.protocol.messages import MimeBundle

VOID = frozenset(("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"))
OPTIONAL = frozenset(  # may lack an end
    ("p", "li", "dt", "dd", "option", "optgroup", "thead", "tbody", "tfoot", "tr", "td", "th", "colgroup")
)
PICTURES = ("image/png", "image/jpeg", "image/gif", "image/webp")
HARMLESS = ("application/json", "application/pdf")  # a notebook shows what else the bundle has
BEGUN = re.compile("<[a-zA-Z/!?]")  # a tag or a comment: the reader holds it until its end comes
FIT = "max-width: 100%; height: auto"


def embedded(display: Display) -> str | None:
    """The display as HTML, or None."""
    data = display.data
    if applied(data):
        return None
    if "text/html" in data:
        html = str(data["text/html"])
        return html if is_whole(html) else None
    alt = escape(str(data.get("text/plain", "")))
    if "image/svg+xml" in data:
        return _image(f"data:image/svg+xml,{quote(str(data['image/svg+xml']))}", alt)
    for kind in PICTURES:
        if kind in data:
            return _image(f"data:{kind};base64,{''.join(str(data[kind]).split())}", alt)
    return None


def applied(data: MimeBundle) -> bool:
    """Whether it is for an application, such as a widget's or Plotly's."""
    return any(kind.startswith("application/") and kind not in HARMLESS for kind in data)


def _image(source: str, alt: str) -> str:
    return f'<img alt="{alt}" style="{FIT}" src="{source}">'


def is_whole(html: str) -> bool:
    """Whether every element that begins in it ends in it, and no other does."""
    reader = _Reader()
    reader.feed(html)
    return reader.whole and not reader.inside() and BEGUN.match(reader.rawdata) is None


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.whole = True

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in ("html", "head", "body"):  # of a page of its own
            self.whole = False
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        """`<g/>` ends itself in a drawing alone, where nothing depends on it."""

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        while self.open and self.open[-1] != tag and self.open[-1] in OPTIONAL:
            self.open.pop()
        if self.open and self.open[-1] == tag:
            self.open.pop()
        else:
            self.whole = False

    def inside(self) -> bool:
        """Whether something is open that needs an end."""
        return any(tag not in OPTIONAL for tag in self.open)
