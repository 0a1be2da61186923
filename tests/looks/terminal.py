"""The same cells in IPython in a terminal: a pty, whose bytes are drawn as a terminal draws them, by a browser."""

from __future__ import annotations

import html
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pexpect

from tests.browser.test_browser import FLAGS, PATIENCE, playing
from tests.looks.front_ends import LIVE, STRUCTURE, Look, browsers_path
from tests.looks.outputs import Output
from tests.looks.structure import Seen
from tests.notebook.test_terminals import environment

LINES, COLUMNS = 48, 120
CONTROL = re.compile(r"\x1b\[([\d;]*)([A-Za-z])|\x1b[][()?][^\x07\x1b]*\x07?|([\r\n])")
PROMPT = ("-m", "IPython", "--simple-prompt", "--no-banner", "--no-confirm-exit", "--no-autoindent")
# the colours 0 to 7 of a light and of a dark terminal, then its ink and its paper. They are the terminal's own choice;
# these are such that each can be read, as VS Code's terminal sees to by itself
INKS = {
    "light": ("#000000 #cd3131 #107c10 #949800 #0451a5 #bc05bc #0598bc #555555", "#1f1f1f", "#ffffff"),
    "dark": ("#000000 #f14c4c #23d18b #f5f543 #6cb6ff #d670d6 #29b8db #e5e5e5", "#cccccc", "#1e1e1e"),
}
DIM = {"light": "#5f5f5f", "dark": "#9a9a9a"}
Cell = tuple[str, str]  # a character and its style


class Drawn:
    """The rows that bytes leave on a terminal: \\r, \\n, cursor up, erase to the end and colours are obeyed."""

    def __init__(self) -> None:
        self.rows: list[list[Cell]] = [[]]
        self.row = self.column = 0
        self.style = ""

    def take(self, said: str) -> None:
        at = 0
        for found in CONTROL.finditer(said):
            self._put(said[at : found.start()])
            at = found.end()
            self._obey(found[1] or "", found[2] or "", found[3] or "")
        self._put(said[at:])

    def _obey(self, numbers: str, command: str, line: str) -> None:
        if line == "\r":
            self.column = 0
        elif line == "\n":
            self.row += 1
            self.rows += [[]] * (self.row == len(self.rows))
        elif command == "A":
            self.row = max(0, self.row - int(numbers or 1))
        elif command == "J" and not numbers:
            self.rows[self.row :] = [self.rows[self.row][: self.column]]
        elif command == "m":
            ends = "0" in (numbers or "0").replace("00", "0").split(";")
            self.style = "" if ends else f"{self.style};{numbers}".strip(";")

    def _put(self, text: str) -> None:
        row = self.rows[self.row]
        row += [(" ", "")] * (self.column - len(row))
        row[self.column : self.column + len(text)] = [(c, self.style) for c in text]
        self.column += len(text)

    def text(self) -> str:
        return "\n".join("".join(c for c, _ in row).rstrip() for row in self.rows).rstrip()

    def page(self, theme: str) -> str:
        """As HTML in a theme's colours."""
        inks, ink, paper = INKS[theme]
        rows = "\n".join(_row(row, inks.split(), theme) for row in self.rows).rstrip()
        look = f"margin: 0; padding: 10px; font: 13px/1.35 'DejaVu Sans Mono', monospace; color: {ink}; "
        look += f"width: {COLUMNS}ch; white-space: pre-wrap; word-break: break-all"
        return f'<body style="margin: 0; background: {paper}"><pre class="terminal" style="{look}">{rows}</pre>'


def _row(row: Sequence[Cell], inks: Sequence[str], theme: str) -> str:
    parts: list[str] = []
    for at, (_, style) in enumerate(row):
        if at and row[at - 1][1] == style:
            continue
        text = ""
        for c, other in row[at:]:
            if other != style:
                break
            text += c
        css = _css(style, inks, theme)
        parts.append(f'<span style="{css}">{html.escape(text)}</span>' if css else html.escape(text))
    return "".join(parts)


def _css(style: str, inks: Sequence[str], theme: str) -> str:
    codes = [int(n) for n in style.split(";") if n]
    colours = [inks[n % 10] for n in codes if n // 10 in (3, 9) and n % 10 < 8]
    css = [f"color: {colours[-1]}"] if colours else [f"color: {DIM[theme]}"] * (2 in codes)
    return "; ".join([*css, *(["font-weight: bold"] * (1 in codes)), *(["text-decoration: underline"] * (4 in codes))])


class Terminal:
    """IPython in a pty; each cell's bytes are kept apart."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.program = pexpect.spawn(
            sys.executable, list(PROMPT), env=environment(folder) | {"TERM": "xterm-256color"}, cwd=str(folder),
            dimensions=(LINES, COLUMNS), encoding="utf-8", timeout=2 * PATIENCE,
        )  # fmt: skip
        self.prompts = 0
        self.prompt()

    def prompt(self) -> str:
        self.prompts += 1
        self.program.expect(rf"In \[{self.prompts}\]: ")
        return str(self.program.before)

    def begin(self, output: Output) -> None:
        path = self.folder / f"{output.name}.cell"
        path.write_text(output.code, encoding="utf-8")
        line = f"_ = get_ipython().run_cell(open('{path.name}').read())"
        self.program.sendline(line)
        self.program.expect_exact(line + "\r\n")

    def until(self, pattern: str) -> str:
        self.program.expect(pattern, timeout=LIVE)
        return str(self.program.before) + str(self.program.after)

    def rest(self) -> str:
        """What comes in the next moment; it is still to be read."""
        self.program.expect(pexpect.TIMEOUT, timeout=0.3)
        return str(self.program.before)

    def close(self) -> None:
        self.program.close(force=True)


def run(terminal: Terminal, outputs: Sequence[Output], look: Callable[[str, str], None], say: Any, missed: Any) -> None:
    """Run every cell; look(name, bytes) while it runs, if it says so, and when it has ended."""
    for output in outputs:
        say(output.name)
        terminal.begin(output)
        said = ""
        if output.during:
            try:
                said = terminal.until(output.during)
            except pexpect.TIMEOUT:
                missed(f"{output.name}: {output.during!r} was not seen while it ran, but {terminal.program.before!r}")
            else:
                look(f"{output.name}-live", said + terminal.rest())
        if output.holds:
            (terminal.folder / f"seen-{output.name}").touch()
        if output.stop:
            terminal.program.sendintr()
        said += terminal.prompt()
        if not output.hidden:
            look(output.name, said)


@contextmanager
def painter(scale: float = 2) -> Iterator[Callable[[str, str, Look, Sequence[str]], None]]:
    """Draws bytes in each theme and gives the picture to a look."""
    chromium = browsers_path()
    with playing() as play:
        browser = play.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": 980, "height": 800}, device_scale_factor=scale)

        def paint(name: str, said: str, look: Look, themes: Sequence[str]) -> None:
            drawn = Drawn()
            drawn.take(said)
            for theme in themes:
                page.set_content(drawn.page(theme))
                found = page.locator("body").evaluate(STRUCTURE)
                seen = Seen([{"mime": "terminal", "tree": "pre", "text": drawn.text()}], found["texts"])
                look(theme, name, page.locator("pre").screenshot(), seen)

        yield paint
        browser.close()
