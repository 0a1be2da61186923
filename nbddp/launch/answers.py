"""What a parser answers, in nbddp's own sentences: its help, and what is wrong with an option.

argparse's own texts and layout differ between versions of Python, and no page could list them. Pure.
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence

WIDEST = 78  # of a usage line; a longer one has [options] for all of them
COLUMN = 24  # where the texts of a help begin
LEAST = 30  # characters of such a text's line
ARGUMENTS = "arguments"


def usage(parser: argparse.ArgumentParser) -> str:
    """How a line is written: `%ddp push [--ranks SET] NAME …`."""
    if parser.usage:
        return parser.usage.replace("%%", "%")
    options = [f"[{'|'.join(a.option_strings[:1])}{value_of(a)}]" for a in parser._actions if _is_option(a)]
    values = [written(action) for action in parser._actions if not action.option_strings]
    full = " ".join([parser.prog, *options, *values])
    return full if len(full) <= WIDEST else " ".join([parser.prog, "[options]", *values])


def _is_option(action: argparse.Action) -> bool:
    return bool(action.option_strings) and action.dest != "help"


def written(action: argparse.Action) -> str:
    """How a value is written: `N`, `[N]` if it may be missing, `NAME …` if there may be several."""
    value = str(action.metavar or "|".join(map(str, action.choices or ())) or action.dest)
    match action.nargs:
        case "?" | argparse.REMAINDER:
            return f"[{value}]"
        case "*":
            return f"[{value} …]"
        case "+":
            return f"{value} …"
    return value


def value_of(action: argparse.Action) -> str:
    """What is typed behind an option: ` N`, or nothing."""
    return "" if action.nargs == 0 else f" {written(action)}"


def help_text(parser: argparse.ArgumentParser) -> str:
    parts = [f"usage: {usage(parser)}\n"]
    if parser.description:
        parts.append(f"{textwrap.fill(parser.description.strip(), _width())}\n")
    parts += [f"{title}:\n{''.join(map(_entry, actions))}" for title, actions in _groups(parser).items()]
    if parser.epilog:
        parts.append(f"{parser.epilog.strip()}\n")
    return "\n".join(parts)


def _groups(parser: argparse.ArgumentParser) -> dict[str, list[argparse.Action]]:
    """Title → arguments and options, arguments first."""
    found: dict[str, list[argparse.Action]] = defaultdict(list)
    for action in sorted(parser._actions, key=lambda action: bool(action.option_strings)):
        if action.help != argparse.SUPPRESS:
            found[vars(action)["container"].title if action.option_strings else ARGUMENTS].append(action)
    return found


def _width() -> int:
    return shutil.get_terminal_size().columns - 2


def _entry(action: argparse.Action) -> str:
    """An argument or option with its text, which begins in one column."""
    flags = ", ".join(action.option_strings)
    head = f"  {flags}{value_of(action)}" if flags else f"  {written(action)}"
    text = (action.help or "").replace("%%", "%")
    lines = textwrap.wrap(text, max(LEAST, _width() - COLUMN))
    if not lines:
        return f"{head}\n"
    first = f"{head:<{COLUMN}}{lines.pop(0)}" if len(head) <= COLUMN - 2 else head
    return "\n".join([first, *(" " * COLUMN + line for line in lines), ""])


def missing(parser: argparse.ArgumentParser) -> str:
    """The answer to a line that ends too early."""
    needed = [a for a in parser._actions if a.required and a.nargs in (None, "+")]
    names = " and ".join(str(action.metavar or action.dest) for action in needed)
    return f"{parser.prog} needs {names or 'more arguments'}; write it as {usage(parser).splitlines()[0]}"


def wrong(parser: argparse.ArgumentParser, words: Sequence[str], option: str, unread: bool) -> str:
    """The answer to an option whose value is missing, cannot be read (`unread`, or none of its choices), or is one too
    many."""
    action = next(action for action in parser._actions if option in action.option_strings)
    way = f"write it as {option}{value_of(action)}"
    if action.nargs == 0:
        return f"{parser.prog} {option} takes no value; {way}"
    given = [*_values(words, action)]
    if unread and given:
        return f"{parser.prog} {option} cannot read {given[-1]!r}; {way}"
    unknown = [value for value in given if action.choices and value not in action.choices]
    if unknown:
        return f"{parser.prog} {option}: {unknown[0]!r} is not one of its values; {way}"
    return f"{parser.prog} {option} needs a value; {way}"


def _values(words: Sequence[str], action: argparse.Action) -> Iterator[str]:
    """What is typed behind an option, each time."""
    for number, word in enumerate(words):
        flag, sign, value = word.partition("=")
        if flag in action.option_strings:
            after = words[number + 1 : number + 2]
            yield from [value] if sign else [each for each in after if not each.startswith("-")]
