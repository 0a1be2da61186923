"""What may come next on a `%%ddp` or `%ddp` line, which ends at the cursor. Pure."""

from __future__ import annotations

from nbddp.launch.options import cell_parser, complete
from nbddp.notebook.commands import command_parser, known, unpasted
from nbddp.protocol.capability import Command, load


def complete_cell(line: str) -> list[str]:
    """Options of a `%%ddp` line."""
    return complete(cell_parser(), line)


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
    if command is None:
        return []
    parser = command_parser(command.name)
    if command.complete:
        found: list[str] | None = load(command.complete)(parser, rest)
        return found
    return complete(parser, rest)
