"""How a report looks: plain, or with weight and colour, as IPython's own tracebacks have them.

Only the sixteen colours that a front end chooses itself are used, so a report follows the theme of a notebook or a
terminal. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from pygments import highlight
from pygments.formatters import TerminalFormatter
from pygments.lexers import PythonLexer
from pygments.token import Keyword, Operator, String, Token

# bold in the colour of other text: JupyterLab's bold red cannot be read on the dark red of an error in its dark theme
BOLD, RESET = "\x1b[1m", "\x1b[0m"
# yellow, cyan and white cannot be read on white, so they are not used
SCHEME = {Token: ("", ""), Keyword: ("blue", "blue"), Operator.Word: ("blue", "blue"), String: ("magenta", "magenta")}


class Plain:
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


class Coloured(Plain):
    """ANSI escape sequences."""

    def headline(self, text: str) -> str:
        return f"{BOLD}{text}{RESET}"

    def place(self, text: str) -> str:
        return f"\x1b[32m{text}{RESET}"

    def mark(self, text: str) -> str:
        return f"{BOLD}{text}{RESET}"

    def quiet(self, text: str) -> str:
        return f"\x1b[2m{text}{RESET}"

    def code(self, lines: Sequence[str]) -> list[str]:
        lexer = PythonLexer(stripnl=False, ensurenl=False)
        found = highlight("\n".join(lines), lexer, TerminalFormatter(colorscheme=SCHEME)).split("\n")
        return found if len(found) == len(lines) else list(lines)


PLAIN, COLOURED = Plain(), Coloured()
