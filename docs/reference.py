"""Pages that are generated: commands and options from nbddp's own grammar, Python from docstrings, messages."""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Callable, Iterable
from textwrap import dedent
from typing import Any

import nbddp
from docs import messages
from docs.assembly import ROOT
from nbddp import errors
from nbddp.figures.result import Result
from nbddp.launch.options import cell_parser
from nbddp.notebook.commands import command_parser, known

TERMINAL = "python -m nbddp"
OPTIONS = "options.md"


# -- the grammar ----------------------------------------------------------------------------------


def actions(group: argparse._ArgumentGroup) -> list[argparse.Action]:
    return [a for a in group._group_actions if a.dest != "help" and a.help != argparse.SUPPRESS]


def typed(action: argparse.Action) -> str:
    """How an argument is written, with its value: `-n N`, `--nproc N`."""
    name = str(action.metavar or action.dest)
    value = "|".join(map(str, action.choices)) if action.choices else name
    if not action.option_strings:
        return f"`{value}`"
    if action.nargs == 0:
        return ", ".join(f"`{flag}`" for flag in action.option_strings)
    shown = f"[{value}]" if action.nargs == "?" else value
    return ", ".join(f"`{flag} {shown}`" for flag in action.option_strings)


def cell(text: str) -> str:
    """Text as a cell of a table; names of variables and placeholders are no HTML."""
    return text.replace("%%", "%").replace("|", "\\|").replace("<", "&lt;").replace("{what}", "cell")


def table(rows: Iterable[argparse.Action]) -> str:
    lines = [f"| {typed(a).replace('|', chr(92) + '|')} | {cell(a.help or '')} |" for a in rows]
    return "\n".join(["| type | effect |", "|---|---|", *lines, ""])


def options_page() -> str:
    """Options of a `%%ddp` line, by group."""
    parser = cell_parser()
    parts = [f"# Options of `%%ddp`\n\n{parser.description} `%%ddp --help` prints this list in a notebook.\n"]
    for group in parser._action_groups:
        if found := actions(group):
            parts.append(f"## {str(group.title).capitalize()}\n\n{table(found)}")
    return "\n".join(parts)


def commands_page(prog: str, title: str, words: str) -> str:
    parts = [f"# {title}\n\n{words}\n"]
    parts += [command_text(name, prog) for name in known(prog)]
    return "\n".join(parts)


def command_text(name: str, prog: str) -> str:
    """A command: what it does, its line, its arguments. Groups that a cell's line has too are linked."""
    parser = command_parser(name, prog)
    shared = {str(g.title): {a.dest for a in actions(g)} for g in cell_parser()._action_groups}
    usage = parser.format_usage()
    parts = [f"## `{prog} {name}`\n\n{cell(known()[name].help).capitalize()}.\n", f"```text\n{usage}\n```\n"]
    cells = []
    for group in parser._action_groups:
        found, title = actions(group), str(group.title)
        if len(found) > 1 and {a.dest for a in found} <= shared.get(title, set()):
            cells.append(f"[{title}]({OPTIONS}#{title.lower().replace(' ', '-')})")
        elif found:
            parts.append(table(found))
    return "\n".join([*parts, f"It takes these options of a cell, too: {', '.join(cells)}.\n" if cells else ""])


# -- Python ---------------------------------------------------------------------------------------


EXAMPLE = re.compile(r"^Example:\n\n((?: {4}.*\n?|\n)+)", re.M)


def markdown(doc: str) -> str:
    """A docstring as Markdown: examples are fenced, names in braces are no roles."""
    text = EXAMPLE.sub(lambda found: f"Example:\n\n```python\n{dedent(found[1]).strip()}\n```\n", inspect.cleandoc(doc))
    return re.sub(r"(?m)(^ *>>> .*\n?(?:^(?! *$).*\n?)*)", lambda found: f"```pycon\n{found[1].rstrip()}\n```\n", text)


def signature(thing: Any, method: bool = False) -> str:
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return ""
    given = list(found.parameters.values())[method:]
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in given]
    return str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def returned(method: Any) -> str:
    """A paragraph with a link to the class of the value, if it has its own text on the page."""
    words = str(getattr(method, "__annotations__", {}).get("return", ""))
    found = re.search(r"\b(\w+Result|RankValues)\b", words)
    if not found:
        return ""
    name = found[1] if found[1].endswith("Result") else f"nbddp.{found[1]}"
    return f"Returns {{py:class}}`{name}`.\n\n"


def described(kind: str, name: str, doc: str, shape: str = "", inner: str = "") -> str:
    fence = ":" * (3 if not inner else 4)
    return f"{fence}{{py:{kind}}} {name}{shape}\n\n{doc}\n\n{inner}{fence}\n\n"


def members(kind: type, only: str = "") -> str:
    """Public methods and properties that have a docstring; or the one of that name."""
    parts = []
    for name in sorted(n for n in dir(kind) if not n.startswith("_") and only in ("", n)):
        value = inspect.getattr_static(kind, name)
        shown = getattr(kind, name)
        if isinstance(value, property) and value.__doc__:
            parts.append(described("property", name, markdown(value.__doc__)))
        elif callable(shown) and shown.__doc__ and not isinstance(shown, type):
            text, example, code = markdown(f"{inspect.cleandoc(shown.__doc__)}\n").partition("Example:\n")
            doc = f"{text}{returned(shown)}{example}{code}"
            parts.append(described("method", name, doc, signature(shown, method=True)))
    return "".join(parts)


def python_page() -> str:
    """All names of the package, in three groups."""
    first = ["Pool", "RankValues", "Panel"]
    found = {name: getattr(nbddp, name) for name in [*first, *sorted({*nbddp.__all__}.difference(first))]}
    raised = {name: kind for name, kind in found.items() if isinstance(kind, type) and issubclass(kind, Exception)}
    parts = ["# Python\n\nWhat `import nbddp` offers. [The lessons](../lessons/index.md) show `nbddp.teach`.\n"]
    for name, thing in found.items():
        if name not in raised:
            kind = "class" if isinstance(thing, type) else "function"
            inner = members(thing) if isinstance(thing, type) else ""
            text = described(kind, f"nbddp.{name}", markdown(thing.__doc__ or ""), signature(thing), inner)
            parts.append(f"\n## {name}\n\n{text}")
        if name == "export":
            parts += [part_of_export(each) for each in thing.__all__]
    parts.append(results_text())
    parts.append("\n## Exceptions\n\n")
    parts.append(f"```text\n{tree()}\n```\n\n")
    for name, error in raised.items():
        parts.append(described("exception", f"nbddp.{name}", markdown(error.__doc__ or "")))
    return "".join(parts)


def part_of_export(name: str) -> str:
    """A class or function of `nbddp.export`; its constants are in the text of the module."""
    thing = getattr(nbddp.export, name)
    if not callable(thing):
        return ""
    kind = "class" if isinstance(thing, type) else "function"
    return described(kind, f"nbddp.export.{name}", markdown(thing.__doc__ or ""), signature(thing))


def results() -> list[type]:
    """The classes of the values that methods of `nbddp.Pool` return."""
    found: dict[str, type] = {}
    for name in dir(nbddp.Pool):
        method = getattr(nbddp.Pool, name)
        words = str(getattr(method, "__annotations__", {}).get("return", ""))
        for word in re.findall(r"\w+Result", words):
            found[word] = method.__globals__[word]
    return [found[name] for name in sorted(found)]


def results_text() -> str:
    """`Result`, and the data of each kind of it."""
    parts = ["\n## Results\n\nMethods of a pool return these. `Result` is the base of all.\n\n"]
    parts.append(described("class", "Result", markdown(Result.__doc__ or ""), inner=members(Result)))
    inherited = {*vars(Result)}
    for kind in results():
        own = "".join(members(kind, name) for name in sorted({*vars(kind)} - inherited))
        parts.append(described("class", kind.__name__, markdown(kind.__doc__ or ""), inner=own))
    return "".join(parts)


def tree() -> str:
    """The exceptions as a tree, as the module's docstring draws it."""
    lines = (errors.__doc__ or "").splitlines()
    return "\n".join(line[4:] for line in lines if line.startswith("    "))


GLOSSARY = re.compile(r"(?ms)^## Glossary\n(.*?)(?=^## |\Z)")


def glossary_page() -> str:
    """The terms of all lessons, in the order of the alphabet, each with its lesson."""
    found = []
    for path in sorted((ROOT / "notebooks/solutions").glob("*.ipynb")):
        book = json.loads(path.read_text(encoding="utf-8"))
        texts = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "markdown"]
        items = [item for text in texts for part in GLOSSARY.findall(text) for item in re.split(r"(?m)^- ", part)[1:]]
        found += [(" ".join(item.split()), path.name) for item in items]
    lines = [f"- {item} ([{name[:2]}]({name}))" for item, name in sorted(found, key=lambda row: row[0].lower())]
    return "# Glossary\n\nThe terms of the lessons; a number is the lesson that explains it.\n\n" + "\n".join(lines)


PAGES: dict[str, Callable[[], str]] = {
    "reference/options.md": options_page,
    "reference/commands.md": lambda: commands_page(
        "%ddp", "Subcommands of `%ddp`", "Each takes `--help`. [Commands](../commands.md) shows them by task."
    ),
    "reference/terminal.md": lambda: commands_page(
        TERMINAL, "Commands in a terminal", "[Scripts](../scripts.md#from-a-terminal) explains `run` and `torchrun`."
    ),
    "reference/python.md": python_page,
    "reference/messages.md": messages.page,
    "lessons/glossary.md": glossary_page,
    "reference/reports.md": messages.reports_page,
}
