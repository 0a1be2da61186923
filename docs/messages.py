"""The page of messages: every sentence that nbddp can print, read from its sources.

A message is a text of three words or more in the code, wherever it is written: in a `raise`, a report, a note. What is
filled in is shown as `…`. Docstrings, help texts and parts that are code (HTML, patterns, SQL) are none.
"""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docs.assembly import REPOSITORY, ROOT
from tests.looks.outputs import OUTPUTS

PACKAGE = ROOT / "nbddp"
FILLED = "…"
LEAST = 3  # words
LEAST_OF_REPORTS = 2  # in folders whose sentences are joined from parts
REPORTS = ("deadlock/", "execution/", "protocol/")
WORD = re.compile(r"(?<![\w<\\])[A-Za-z][a-z]+(?![\w\\(=])")
NO_MESSAGE = re.compile(r"<[\w.…]+[ >]|</|\{\w+: |\\[dswb(]|\(\?|^\s*import |^\s*def |: var\(|px;|^[\w ]+: [\w-]+;")
LITERALS = (ast.Constant, ast.JoinedStr, ast.BinOp)
HELP = {"help", "description", "epilog", "usage", "metavar", "target"}
SKIPPED = ("figures/labextensions", "lessons/l", "grading/sandbox")  # a lesson's own texts are in the lesson
PARTS = {  # folder → heading; a capability's folder is its own heading
    "errors.py": "Errors",
    "launch": "Lines, options and layouts",
    "notebook": "Commands in the notebook",
    "pool": "The pool",
    "execution": "Reports of a run",
    "deadlock": "Deadlocks",
    "worker": "Ranks",
    "output": "Output",
    "agent": "The node agent",
    "protocol": "Reports of a run",
    "compat": "Private APIs of libraries",
    "analysis": "Recorded steps",
    "figures": "Figures",
    "grading": "Exercises and grading",
    "lessons": "Exercises and grading",
    "teach": "Exercises and grading",
}


@dataclass(frozen=True)
class Message:
    """text: with … for what is filled in. error: the class that is raised with it, or empty."""

    text: str
    error: str
    file: str
    line: int

    @property
    def part(self) -> str:
        first, *rest = self.file.split("/")
        if first == "capabilities" and len(rest) > 1:
            return rest[0].replace("_", " ").capitalize()
        return PARTS.get(first, "Other")

    def pattern(self) -> re.Pattern[str]:
        """What its text can be when it is filled in."""
        return re.compile(".*?".join(map(re.escape, self.text.split(FILLED))), re.DOTALL)


def text_of(node: ast.expr) -> str | None:
    """The text of a literal; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(_piece(value) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return None if left is None and right is None else (left or FILLED) + (right or FILLED)
    return None


def _piece(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else FILLED


def is_message(text: str, file: str) -> bool:
    least = LEAST_OF_REPORTS if file.startswith(REPORTS) else LEAST
    return len(WORD.findall(text)) >= least and " " in text.strip() and not NO_MESSAGE.search(text)


def texts(tree: ast.AST) -> Iterator[tuple[ast.expr, str, str]]:
    """Each outermost literal, its text, and the error that it is raised with; without those that stand alone, such as
    docstrings."""
    stack: list[tuple[ast.AST, str, bool]] = [(tree, "", False)]
    while stack:
        node, error, within = stack.pop()  # within: of a literal that has been seen
        if isinstance(node, ast.keyword) and node.arg in HELP:
            continue
        if isinstance(node, ast.Expr) and text_of(node.value) is not None:
            continue
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            called = node.exc.func
            error = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        elif isinstance(node, LITERALS) and not within and (text := text_of(node)) is not None:
            yield node, text, error
            within = True
        stack += [
            (child, error, within and not isinstance(child, ast.FormattedValue)) for child in ast.iter_child_nodes(node)
        ]


@functools.cache
def said(path: Path) -> tuple[tuple[int, str, str], ...]:
    """Line, text and error of each message of a file."""
    file = path.relative_to(PACKAGE).as_posix()
    found = texts(ast.parse(path.read_text(encoding="utf-8")))
    return tuple((node.lineno, text, error) for node, text, error in found if is_message(text, file))


@functools.cache
def messages() -> tuple[Message, ...]:
    """All, in the order of the files."""
    found: dict[tuple[str, str], Message] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        if file.startswith(SKIPPED):
            continue
        for line, text, error in said(path):
            message = Message(" ".join(text.split()), error, file, line)
            found.setdefault((message.part, message.text), message)
    return tuple(found.values())


CASES = ("error", "deadlock", "mismatch", "timeout", "stop", "died", "restarted", "mistake", "errors")  # of reports
REPORTS_INTRO = """\
# Reports

What the end of a cell looks like, with the cell. Tests compare these texts with real outputs in JupyterLab and in a
terminal; a number is shown as 0. [When something goes wrong](../when-something-goes-wrong.md) explains them, and
[messages](messages.md) has all other texts.
"""
TITLES = {"errors": "%ddp errors", "mistake": "A mistyped line", "died": "A worker dies", "error": "A rank raises"}


def reports_page() -> str:
    """Whole reports, from the outputs that `tests/looks` keeps."""
    cells = {output.name: output.code for output in OUTPUTS}
    parts = [REPORTS_INTRO]
    for name in CASES:
        kept = (ROOT / "tests/looks/kept/terminal" / f"{name}.txt").read_text(encoding="utf-8")
        text = textwrap.dedent("".join(line for line in kept.splitlines(keepends=True) if line.startswith(" ")))
        title = TITLES.get(name, name.capitalize())
        parts.append(f"## {title}\n\n```python\n{cells[name]}\n```\n\n```text\n{text.rstrip()}\n```\n")
    return "\n".join(parts)


INTRO = f"""\
# Messages

Every sentence that nbddp can print, sorted by the part of nbddp that prints it. `{FILLED}` stands for a value that
nbddp fills in. Search this page for a few words of your message that are not your own. nbddp joins
[reports](reports.md) from several of these texts.

The name in brackets is the [exception](python.md#exceptions) that nbddp raises with the message.
[When something goes wrong](../when-something-goes-wrong.md) explains reports. This page is generated from the
[sources]({REPOSITORY}).
"""


def page() -> str:
    parts: dict[str, list[Message]] = defaultdict(list)
    for message in messages():
        parts[message.part].append(message)
    ordered = sorted(parts, key=lambda part: (part == "Other", part))
    sorted_by_line = {part: sorted(found, key=lambda m: (m.file, m.line)) for part, found in parts.items()}
    return INTRO + "".join(f"\n## {part}\n\n" + "".join(map(_item, sorted_by_line[part])) for part in ordered)


def _item(message: Message) -> str:
    text = message.text.replace("`", "\u2019").strip()
    return f"- `{text}`{f' ({message.error})' if message.error else ''}\n"
