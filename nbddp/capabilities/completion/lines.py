"""Possible continuations of a `%%ddp` or `%ddp` line that ends at the cursor: commands, options and values. Pure."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from nbddp.launch.options import Parser, cell_parser, option_of, taken
from nbddp.notebook.commands import command_parser, known, unpasted
from nbddp.protocol.capability import Command, load

MODULE = {"-m", "--module"}  # behind these stands no file


def complete_cell(line: str) -> list[str]:
    """Options of a `%%ddp` line."""
    return complete(cell_parser(), line) or []


def command_of(line: str) -> tuple[Command | None, str]:
    """The command that a line begins with, and the line behind it."""
    name, *rest = unpasted(line.split(), known()) or [""]
    return known().get(name), " ".join(rest) + " " * line.endswith(" ")


def complete_command(line: str) -> list[str] | None:
    """Commands, or what may follow the one already typed. None: IPython is to complete."""
    words = line.split()
    if not words or (len(words) == 1 and not line.endswith(" ")):
        return [name for name in known() if name.startswith(words[0] if words else "")]
    command, rest = command_of(line)
    return [] if command is None else complete(command_parser(command.name), rest)


def at_cursor(line: str) -> tuple[str, list[str]]:
    """The word that is being typed, which may be empty, and those before it."""
    words = line.split()
    return ("", words) if not words or line.endswith(" ") else (words[-1], words[:-1])


def complete(parser: Parser, line: str) -> list[str] | None:
    """What may be the word that is being typed. None: IPython knows more of a script's own words, and of its path."""
    current, before = at_cursor(line)
    runs = any(action.nargs == argparse.REMAINDER for action in parser._actions)
    if runs and _names_script(parser, before):
        return None
    last = option_of(parser, before[-1]) if before and "--" not in before else None
    if last is not None and last.nargs is None:
        return _values(parser, last, current)
    found: list[str] = []
    if not current.startswith("-") and not MODULE & {*before}:
        words = [word for a in parser._actions if not a.option_strings for word in _values(parser, a, current)]
        found += [word for word in words if word not in before]
    if "--" not in before:
        may = _values(parser, last, current) if last is not None and last.nargs == "?" else []
        found += [*may, *(o for o in parser.long_options() if o.startswith(current) and "_" not in o)]
    return found or ([] if not runs else None)


def _names_script(parser: Parser, words: Sequence[str]) -> bool:
    """Whether one of these is the script, behind which all words are its own."""
    while words and words[0].startswith("-"):
        words = words[taken(parser, words) :]
    return bool(words)


def _values(parser: Parser, action: argparse.Action, current: str) -> list[str]:
    """Values of an argument that begin so."""
    given = action.choices or parser.offers.get(action.dest, ())
    offered = tuple(load(given) if isinstance(given, str) else given)
    if offered and offered[0].startswith((".", "/", "*")):
        return _files(current, offered)
    return [word for word in offered if word.startswith(current)]


def _files(current: str, ends: tuple[str, ...]) -> list[str]:
    """Files that end so (`*`: as they like), and folders, whose path begins so."""
    folder, _, begun = current.rpartition("/")
    place = Path(folder or ("/" if current.startswith("/") else "."))
    if not place.is_dir():
        return []
    head = f"{folder}/" if "/" in current else ""
    found = [p for p in sorted(place.iterdir()) if p.name.startswith(begun) and (begun or not p.name.startswith("."))]
    some = [p for p in found if p.is_dir() or p.suffix in ends or "*" in ends]
    named = [f"{head}{p.name}/" if p.is_dir() else f"{head}{p.name}" for p in some]
    return [name.replace(" ", "\\ ") for name in named]
