"""`%ddp lint`: mistakes that the source of a data-parallel program shows, of files and of cells that ran."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict, cast

from nbddp.capabilities.lint import report, sources
from nbddp.capabilities.lint.linting import LintResult, chosen, lint, rule_named
from nbddp.capabilities.lint.rules import RULES
from nbddp.capabilities.lint.sources import Cell, ProgramText
from nbddp.errors import BadInput
from nbddp.execution.cell_text import headed
from nbddp.launch.options import Parser, taken
from nbddp.notebook.commands import Asked, CommandLine
from nbddp.protocol.capability import Command

NOTEBOOK = "%ddp lint"
CELLS = re.compile(r"In\[([^\[\]]*)\]")
TEXT, JSON, SARIF = "text", "json", "sarif"


class LintArguments(TypedDict):
    """What a line has, as `arguments` reads it."""

    files: list[str]
    format: str
    select: list[str]
    ignore: list[str]
    explain: str | None
    list_rules: bool


def arguments(parser: Parser) -> None:
    notebook = parser.prog == NOTEBOOK
    parser.offers = {"files": (".py", ".ipynb"), **dict.fromkeys(("select", "ignore", "explain"), tuple(RULES))}
    cells = ", or cells that ran, such as In[3] or In[3-5] (default: all %%%%ddp cells that ran)"
    add = parser.add_argument
    add("files", nargs="*", metavar="FILE",
        help=f"scripts, notebooks or folders{cells if notebook else '; - is stdin'}")  # fmt: skip
    add("--format", choices=(TEXT, JSON, SARIF), default=TEXT, help="format of the findings (default text)")
    add("--select", action="append", default=[], metavar="RULE", help="only this rule; repeatable, or with commas")
    add(
        "--ignore",
        action="append",
        default=[],
        metavar="RULE",
        help="all rules except this one; repeatable, or with commas",
    )
    add("--explain", metavar="RULE", help="explain a rule, with examples")
    add("--list-rules", action="store_true", help="list the rules")


def parse(command: Command, parser: Parser, words: Sequence[str]) -> CommandLine:
    """Files and options in any order: argparse takes files from one place alone."""
    files: list[str] = []
    options: list[str] = []
    left = list(words)
    while left:
        is_option = left[0].startswith("-") and left[0] != "-"
        count = taken(parser, left) if is_option else 1
        (options if is_option else files).extend(left[:count])
        left = left[count:]
    return CommandLine(command, vars(parser.parse_strictly([*options, *files])))


@dataclass(frozen=True)
class ShownFindings:
    """What a cell shows: HTML in a notebook, else text."""

    outcome: LintResult

    def __repr__(self) -> str:
        return report.as_text(self.outcome)

    def _repr_html_(self) -> str:
        return report.as_html(self.outcome)


def in_notebook(asked: Asked, line: CommandLine) -> ShownFindings | None:
    args = cast(LintArguments, line.args)
    if _told_of_rules(args):
        return None
    found: list[ProgramText] = []
    unread: list[str] = []
    if args["files"]:
        for name in args["files"]:
            cells = CELLS.fullmatch(name)
            if cells:
                found += sources.of_cells(_cells(asked, name, cells[1]))
            elif name == "-":
                raise BadInput("a notebook has no stdin to read; name a file, or cells such as In[3]")
            else:
                _read(name, found, unread)
    else:
        found = sources.of_cells(_all_that_ran(asked))
    outcome = _linted(args, found, unread)
    if args["format"] == TEXT:
        return ShownFindings(outcome)
    print(_written(args["format"], outcome))
    return None


def _all_that_ran(asked: Asked) -> list[Cell]:
    """Each `%%ddp` cell as it ran last, also those that failed: a cell that hung is one to read."""
    raw = asked.shell.history_manager.input_hist_raw
    ran = [(one.number, one.line, one.body) for one in asked.history.every() if one.line is not None]
    if not ran:
        raise BadInput("no %%ddp cell has run; name a file, or cells such as In[3]")
    return [
        Cell(f"In[{number}]", headed("".join(raw[number : number + 1]), line, body, body)) for number, line, body in ran
    ]


def _cells(asked: Asked, name: str, numbers: str) -> list[Cell]:
    """What IPython's history has of these numbers, such as `3`, `3-5`, `3,7` or `~1/4`."""
    words = numbers.replace(",", " ")
    try:
        ran = list(asked.shell.history_manager.get_range_by_str(words, raw=True)) if words.strip() else []
    except (ValueError, TypeError):
        ran = []
    cells = [Cell(f"In[{number}]", text) for _, number, text in ran if text.strip()]
    if not cells:
        raise BadInput(f"{name!r} is not a cell that ran; write it as In[3], or In[3-5] for several")
    return cells


def in_terminal(line: CommandLine) -> int:
    """Exit status: 0; 1 with findings; 2 if something cannot be read."""
    args = cast(LintArguments, line.args)
    if _told_of_rules(args):
        return 0
    if not args["files"]:
        raise BadInput("there is no file; name scripts, notebooks or folders, or - for stdin")
    found: list[ProgramText] = []
    unread: list[str] = []
    for name in args["files"]:
        if name == "-":
            found += sources.of_script(sys.stdin.read(), "<stdin>")
        elif CELLS.fullmatch(name):
            raise BadInput(f"{name!r} is a cell of a running notebook; run %ddp lint there, or name a file here")
        else:
            _read(name, found, unread)
    outcome = _linted(args, found, unread)
    print(_written(args["format"], outcome))
    return 2 if outcome.unread else int(bool(outcome.findings))


def _told_of_rules(args: LintArguments) -> bool:
    if args["explain"]:
        print(report.explained(rule_named(args["explain"])))
    elif args["list_rules"]:
        print(report.listed(list(RULES.values())))
    return bool(args["explain"] or args["list_rules"])


def _read(name: str, found: list[ProgramText], unread: list[str]) -> None:
    """A file, or those of a folder: what cannot be read there is not in the way of the others."""
    files = sources.files_of(name)
    for path in files:
        try:
            found += sources.of_file(path, str(path))
        except BadInput as e:
            unread.append(str(e))


def _linted(args: LintArguments, found: Sequence[ProgramText], unread: Sequence[str]) -> LintResult:
    select, ignore = (
        [one for text in texts for one in text.split(",") if one] for texts in (args["select"], args["ignore"])
    )
    return lint(found, chosen(select, ignore), unread)


def _written(form: str, outcome: LintResult) -> str:
    if form == SARIF:
        from nbddp import __version__

        return report.as_sarif(outcome, __version__)
    return report.as_json(outcome) if form == JSON else report.as_text(outcome)
