"""What a command line answers is nbddp's own, on every version of Python: no text and no layout of argparse's."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from nbddp.errors import BadInput
from nbddp.launch import answers
from nbddp.launch.options import HelpAsked, Parser, cell_parser
from nbddp.notebook.commands import command_parser, known
from nbddp.teach import grade


def parsers() -> dict[str, Parser]:
    found = {name: command_parser(name) for name in known()}
    return {"cell": cell_parser(), "grade": grade.parser(), **found}


PARSERS = parsers()


def refused(parser: Parser, *words: str) -> str:
    with pytest.raises(BadInput) as caught:
        parser.parse_strictly(words)
    return str(caught.value)


def slips(parser: Parser) -> Iterator[tuple[argparse.Action, str, str]]:
    """Each option with a slip: it, what is typed, and what the answer ends with."""
    for action in parser._actions:
        for option in action.option_strings if action.dest != "help" else ():
            if action.nargs == 0 and option.startswith("--"):
                yield action, f"{option}=1", " takes no value; write it as --"
            elif action.nargs != "?" and action.nargs != 0:
                yield action, option, " needs a value; write it as "
            if action.choices:
                yield action, f"{option}=no-such", ": 'no-such' is not one of its values; write it as "


@pytest.mark.parametrize("name", PARSERS)
def test_each_slip_in_an_option_is_answered_by_nbddp(name: str) -> None:
    parser = PARSERS[name]
    for _, typed, answer in slips(parser):
        found = refused(parser, typed)
        assert found.startswith(f"{parser.prog} -"), found
        assert answer in found, found


def test_a_line_that_ends_too_early_is_answered_with_a_whole_one() -> None:
    assert refused(command_parser("push")) == "%ddp push needs NAME; write it as %ddp push [--ranks SET] NAME …"
    assert refused(command_parser("run"), "--keep") == (
        "%ddp run needs SCRIPT; write it as %ddp run [options] SCRIPT [arguments]"
    )


HELP = """\
usage: %ddp push [--ranks SET] NAME …

copy variables from the notebook to every rank

arguments:
  NAME …

options:
  -h, --help            show this text
  --ranks SET           only these ranks
"""


def test_help_has_one_form_on_every_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(HelpAsked) as asked:
        command_parser("push").parse_strictly(["-h"])
    assert asked.value.text == HELP


@pytest.mark.parametrize("name", PARSERS)
def test_help_shows_each_option_once_and_fits_in_a_terminal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parser = PARSERS[name]
    text = parser.format_help().removesuffix(parser.epilog or "")
    heads = [line.split("  ")[1] for line in text.splitlines() if line.startswith("  -")]
    assert sorted(heads) == sorted(
        f"{', '.join(a.option_strings)}{answers.value_of(a)}" for a in parser._actions if a.option_strings
    )
    assert [line for line in text.splitlines() if line.startswith(" " * answers.COLUMN) and len(line) > 78] == []
