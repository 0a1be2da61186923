"""How a report looks: plain, with weight, or with weight and colour.

In a terminal it has colours, as IPython's own tracebacks: of the sixteen that the terminal chooses itself. In a
notebook it has weight alone: no colour can be read on an error's background in light and in dark (`errors.in_kernel`).
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# bold in the colour of other text: JupyterLab's bold red cannot be read on the dark red of an error in its dark theme
BOLD, RESET = "\x1b[1m", "\x1b[0m"
# of pygments's tokens, by name; yellow, cyan and white cannot be read on white, so they are not used
IN_COLOUR = {"Keyword": "blue", "Operator.Word": "blue", "String": "magenta"}
IN_WEIGHT = {"Keyword": "**", "Operator.Word": "**"}


class PlainStyle:
    """Text as it is."""

    def headline(self, text: str) -> str:
        """What failed, where and why."""
        return text

    def place(self, text: str) -> str:
        """A file and a line."""
        return text

    def mark(self, text: str) -> str:
        """The arrow and the number of the line that failed."""
        return text

    def quiet(self, text: str) -> str:
        """What few need."""
        return text

    def code(self, lines: Sequence[str]) -> list[str]:
        """Lines of a Python program that follow each other."""
        return list(lines)


class Weighted(PlainStyle):
    """Bold headline, marks and keywords, by ANSI escape sequences."""

    scheme = IN_WEIGHT

    def headline(self, text: str) -> str:
        return f"{BOLD}{text}{RESET}"

    def mark(self, text: str) -> str:
        return f"{BOLD}{text}{RESET}"

    def code(self, lines: Sequence[str]) -> list[str]:
        from pygments import highlight
        from pygments.formatters import TerminalFormatter
        from pygments.lexers import PythonLexer
        from pygments.token import Token, string_to_tokentype

        scheme: dict[Any, tuple[str, str]] = {Token: ("", "")}
        scheme |= {string_to_tokentype(name): (colour, colour) for name, colour in self.scheme.items()}
        lexer = PythonLexer(stripnl=False, ensurenl=False)
        found = highlight("\n".join(lines), lexer, TerminalFormatter(colorscheme=scheme)).split("\n")
        return found if len(found) == len(lines) else list(lines)


class Coloured(Weighted):
    """Colours too."""

    scheme = IN_COLOUR

    def place(self, text: str) -> str:
        return f"\x1b[32m{text}{RESET}"

    def quiet(self, text: str) -> str:
        return f"\x1b[2m{text}{RESET}"


PLAIN, WEIGHTED, COLOURED = PlainStyle(), Weighted(), Coloured()
