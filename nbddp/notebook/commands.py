"""The commands of `%ddp` and `python -m nbddp`: a typed line → a `CommandLine`; help and completion.

Each command is declared once: those of every pool in `OWN`, the others in the rows of capabilities. Pure: no IPython,
no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from nbddp.errors import BadInput
from nbddp.launch.options import (
    START,
    HelpAsked,
    LaunchSpec,
    Parser,
    bindable,
    launch_spec,
    nearest,
    one_rank,
    pool_options,
    rank_set,
    split_line,
)
from nbddp.protocol.capability import Command, load, rows

if TYPE_CHECKING:
    from nbddp.agent.client import AgentClient
    from nbddp.notebook.history import CellHistory
    from nbddp.pool.pool import WorkerPool

__all__ = ["Asked", "CommandLine", "HelpAsked", "Parser", "overview", "parse_command"]

NOTEBOOK = "%ddp"
HELP = ("help", "-h", "--help")
# fmt: off
OWN = (
    Command(
        name="start",
        help="start the pool without running a cell",
        grammar="nbddp.launch.options:pool_options", parse="nbddp.notebook.commands:parse_pool_options",
        notebook="nbddp.notebook.pool_commands:start",
    ),
    Command(
        name="stop", of_pool=True,
        help="stop all workers of the pool, and the warm process",
        notebook="nbddp.notebook.pool_commands:stop",
    ),
    Command(
        name="restart", of_pool=True,
        help="replace the worker processes; ranks keep their numbers, all variables are lost",
        grammar="nbddp.notebook.commands:restart_arguments", parse="nbddp.notebook.commands:parse_pool_options",
        notebook="nbddp.notebook.pool_commands:restart",
    ),
    Command(
        name="log",
        help="print a rank's full output of the last run, or its path",
        grammar="nbddp.notebook.commands:log_arguments", notebook="nbddp.notebook.pool_commands:log",
    ),
    Command(
        name="help",
        help="show this text",
        notebook="nbddp.notebook.pool_commands:show_help",
    ),
)
# fmt: on


@dataclass(frozen=True)
class CommandLine:
    """What a line requests: a command and its arguments by name. launch: what it says of the pool and of a run.
    notes: what else to say about it. agents: in a terminal those of the pools that it is about; raises BadInput."""

    command: Command
    args: dict[str, Any]
    launch: LaunchSpec = field(default_factory=LaunchSpec)
    notes: tuple[str, ...] = ()
    agents: Callable[[], list[AgentClient]] = list

    @property
    def name(self) -> str:
        return self.command.name


class Asked(Protocol):
    """The notebook that has asked, as a handler sees it."""

    shell: Any
    pool: WorkerPool
    history: CellHistory

    def progress(self) -> AbstractContextManager[Callable[[str], None]]:
        """Where lines of progress are shown, and gone in the end."""
        ...

    def start_workers(self, change: Callable[[Callable[[str], None]], Iterable[str]]) -> None:
        """Start workers by `change`, which gets the place for progress and returns what to say."""
        ...

    def tell_shortcomings(self) -> None:
        """Print what does not work here, unless that was said."""
        ...

    def number(self) -> int:
        """The n of this cell's In[n]."""
        ...

    def where(self) -> str:
        """The front end's name of this cell; empty if it has none."""
        ...

    def run(self, spec: LaunchSpec) -> None:
        """Run a program as a cell runs, and show what it has recorded."""
        ...


@functools.cache
def known(prog: str = NOTEBOOK) -> Mapping[str, Command]:
    """Name → command, in the order of the list."""
    handlers = {name: target for row in rows() for name, target in row.terminal.items()}
    found = [replace(own, terminal=handlers.get(own.name, "")) for own in OWN]
    for command in (command for row in rows() for command in row.commands):
        before = [other.name for other in found]
        last = before.index(command.after) + 1 if command.after in before else len(found) - 1
        found.insert(last if command.after else 0, command)
    return {command.name: command for command in found if prog == NOTEBOOK or command.terminal}


def names_arguments(parser: Parser) -> None:
    parser.add_argument("names", nargs="+", type=bindable, metavar="NAME")
    ranks_option(parser)


def ranks_option(parser: Parser) -> None:
    parser.add_argument("--ranks", type=rank_set, metavar="SET", help="only these ranks")


def restart_arguments(parser: Parser) -> None:
    pool_options(parser)
    ranks_option(parser)


def log_arguments(parser: Parser) -> None:
    parser.add_argument("--rank", type=one_rank, metavar="R", help="print the full output of this rank")


def parse_pool_options(command: Command, parser: Parser, words: Sequence[str]) -> CommandLine:
    space = parser.parse_strictly(words)
    return CommandLine(command, vars(space), launch_spec(space, START))


def command_parser(name: str, prog: str = NOTEBOOK) -> Parser:
    """The grammar of one command. Its `prog` tells where it is typed."""
    command = known()[name]
    parser = Parser(prog=f"{prog} {name}", description=command.help)
    if command.grammar:
        load(command.grammar)(parser)
    if command.of_pool and prog != NOTEBOOK:
        parser.add_argument("pool", nargs="?", default="", help="the pool's id, if several pools are running")
    return parser


def overview(prog: str = NOTEBOOK) -> str:
    """All commands, a line each."""
    commands = known(prog)
    width = max(map(len, commands))
    lines = [f"  {prog} {name:<{width}}  {command.help}" for name, command in commands.items()]
    if prog == NOTEBOOK:
        lines.insert(0, f"  %%ddp {'':<{width}} run the cell on every rank; %ddp --help lists its options")
    return "\n".join([*lines, "", f"{prog} SUBCOMMAND --help shows its options."])


def unpasted(words: list[str], commands: Mapping[str, Command]) -> list[str]:
    """The words as `%ddp` has them, if they are another program's line."""
    if not words or words[0] in commands:
        return words
    readings = (load(command.pasted)(words) for command in commands.values() if command.pasted)
    return next((found for found in readings if found is not None), words)


def parse_command(line: str | Sequence[str], prog: str = NOTEBOOK) -> CommandLine:
    """A `%ddp` line (or a terminal's words) → CommandLine. Raises as `parse_cell` does."""
    commands = known(prog)
    words = unpasted(split_line(line, prog) if isinstance(line, str) else list(line), commands)
    if not words or words[0] in HELP:
        return CommandLine(known()["help"], {"options": bool(words)})
    name, *rest = words
    if name not in commands:
        near = nearest(name, commands)
        advice = f"did you mean {prog} {near}?" if near else f"{prog} lists them"
        raise BadInput(f"{prog} has no subcommand {name!r}; {advice}")
    command = commands[name]
    parser = command_parser(name, prog)
    if command.parse:
        found: CommandLine = load(command.parse)(command, parser, rest)
        return found
    return CommandLine(command, vars(parser.parse_strictly(rest)))
