"""Text with a terminal's colours as HTML: each colour in a shade that can be read on a light and on a dark page. Pure.

Colours and attributes hold until the line ends. Other escape sequences and control characters, which a page would show
as text or not at all, are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import escape

CONTROL = re.compile(
    r"\x1b\[(?P<look>[\d;:]*)m"
    r"|\x1b\[[0-?]*[ -/]*[@-~]?|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"
    r"|\x1b[()*+][0-9A-Z]|\x1b[@-_]?|[\x00-\x08\x0b-\x1f\x7f]"
)
LEVELS = (0, 95, 135, 175, 215, 255)  # of the 6 × 6 × 6 colours of a terminal
STRONG = 0.6  # of a colour's strongest part: one that is stronger counts
CLASS = "nbddp-c"
INKS = (  # light and dark page: of text, and behind it
    ("#1a1a1a", "#c8c8c8", "#dedede", "#3a3a3a"), ("#b3261e", "#ff9a90", "#f9dcd9", "#55231f"),
    ("#1b6e2c", "#86d993", "#d5efda", "#1d4426"), ("#755500", "#e6c35c", "#f3e6bd", "#483a12"),
    ("#1f5fa8", "#93c0f5", "#d8e6f8", "#203a5a"), ("#8a3a8f", "#e3a9e6", "#f1dcf2", "#4a2a4c"),
    ("#0b6570", "#72d2dc", "#d0eef1", "#154248"), ("#555555", "#ececec", "#ececec", "#444444"),
)  # fmt: skip


@dataclass(frozen=True)
class TextStyle:
    """Of text: colours from 0 to 7, or None; classes of HTML for the rest."""

    ink: int | None = None
    behind: int | None = None
    bold: bool = False
    italic: bool = False
    underlined: bool = False
    inverse: bool = False

    def classes(self) -> str:
        ink, behind = (self.behind, self.ink) if self.inverse else (self.ink, self.behind)
        if self.inverse and behind is None:
            behind = 7
        names = (
            f"f{ink}" * (ink is not None), f"b{behind}" * (behind is not None), "w" * self.bold, "i" * self.italic,
            "u" * self.underlined,
        )  # fmt: skip
        return " ".join(CLASS + name for name in names if name)


PLAIN = TextStyle()
SWITCHES = {
    1: {"bold": True}, 3: {"italic": True}, 4: {"underlined": True}, 7: {"inverse": True}, 22: {"bold": False},
    23: {"italic": False}, 24: {"underlined": False}, 27: {"inverse": False},
}  # fmt: skip


def html(text: str) -> str:
    """A line as HTML."""
    if "\x1b" not in text and text.isprintable():
        return escape(text, quote=False)
    look, at, found = PLAIN, 0, []
    for control in CONTROL.finditer(text):
        found.append(_span(text[at : control.start()], look))
        at = control.end()
        if control["look"] is not None:
            look = changed(look, control["look"])
    return "".join([*found, _span(text[at:], look)])


def plain(text: str) -> str:
    """A line without what a terminal would not show."""
    return CONTROL.sub("", text)


def rules() -> str:
    """CSS of the classes."""
    more = f".{CLASS}w{{font-weight:700}}.{CLASS}i{{font-style:italic}}.{CLASS}u{{text-decoration:underline}}"
    return "".join(_rules(i, *shades) for i, shades in enumerate(INKS)) + more


def _rules(i: int, ink: str, lit: str, tint: str, shade: str) -> str:
    return (
        f".{CLASS}f{i}{{color:{ink};color:light-dark({ink},{lit})}}"
        f".{CLASS}b{i}{{background:{tint};background:light-dark({tint},{shade})}}"
    )


def _span(text: str, look: TextStyle) -> str:
    said, classes = escape(text, quote=False), look.classes()
    return f'<span class="{classes}">{said}</span>' if said and classes else said


def changed(look: TextStyle, codes: str) -> TextStyle:
    """The look after a sequence of these numbers (SGR)."""
    numbers = iter([int(n) if n else 0 for n in re.split("[;:]", codes)])
    for n in numbers:
        if n == 0:
            look = PLAIN
        elif n in SWITCHES:
            look = replace(look, **SWITCHES[n])
        elif n in (38, 48):
            colour = _of_many(numbers)
            look = replace(look, ink=colour) if n == 38 else replace(look, behind=colour)
        elif n in (39, 49):
            look = replace(look, ink=None) if n == 39 else replace(look, behind=None)
        elif 30 <= n < 38 or 90 <= n < 98:
            look = replace(look, ink=n % 10)
        elif 40 <= n < 48 or 100 <= n < 108:
            look = replace(look, behind=n % 10)
    return look


def _of_many(numbers: Iterator[int]) -> int | None:
    """Of 256 colours, or of all, which of the eight comes nearest."""
    kind = next(numbers, 0)
    if kind == 2:
        return _nearest(*(next(numbers, 0) for _ in range(3)))
    n = next(numbers, 0) if kind == 5 else -1
    if n < 0:
        return None
    if n < 16:
        return n % 8
    if n > 231:
        return 7 if n > 243 else 0
    return _nearest(*(LEVELS[(n - 16) // by % 6] for by in (36, 6, 1)))


def _nearest(red: int, green: int, blue: int) -> int:
    least = STRONG * max(red, green, blue, 80)
    return (red > least) + 2 * (green > least) + 4 * (blue > least)
