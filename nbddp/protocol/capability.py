"""What a capability adds to the program: a row of the table `nbddp.capabilities`, and how the core reads it.

A row is plain data. Its targets are texts, "module:name", and `load` imports one when it is first needed: so a row
costs nothing until then, and without a row nothing of its folder is known. Standard library alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TABLE = "nbddp.capabilities"
Target = str


@dataclass(frozen=True, kw_only=True)
class Command:
    """A subcommand of `%ddp`, and of `python -m nbddp` if it has a handler there. `CommandLine`, `Asked` and `Parser`
    are those of `nbddp.notebook.commands`.

    - help: one line for the list of commands; after: the command that it follows there, empty for the first place.
    - notebook: (Asked, CommandLine) -> what the cell displays, or None.
    - terminal: (CommandLine) -> exit status, or None.
    - grammar: (Parser) -> None adds the arguments. of_pool: in a terminal the last one is the id of a pool.
    - parse: (Command, Parser, words) -> CommandLine, where the values of the arguments are not all.
    - pasted: (words) -> words of `%ddp`, for a line of another program that is pasted behind `%ddp`.
    - complete: (Parser, line) -> words that may come next, or None where IPython is to complete.
    - names: whose names are completed, `notebook` or `ranks`.
    """

    name: str
    help: str
    after: str = ""
    notebook: Target
    terminal: Target = ""
    grammar: Target = ""
    of_pool: bool = False
    parse: Target = ""
    pasted: Target = ""
    complete: Target = ""
    names: str = ""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What a cell shows in the end if its line has an option.

    - option: a field of `LaunchSpec`; command: the line that shows the same later.
    - show: (Asked, the option's value, whether the cell failed) -> None.
    """

    option: str
    show: Target
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class PoolPart:
    """What a capability keeps in the notebook for each pool; `protocol.pool_parts` makes it and says what it may do.

    - target: called with the `PoolState`, which it does not keep alive.
    - when: what makes it. `shell`: the magics are loaded; `start`: workers start; `run`: a program runs. Without any of
      these the first message does, or whoever asks for it.
    - messages: types of messages of ranks that it hears.
    """

    target: Target
    when: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Capability:
    """A row. name: the folder's. names: of the package `nbddp`. methods: of `Pool`, as functions of a pool."""

    name: str
    commands: tuple[Command, ...] = ()
    part: PoolPart | None = None
    recorded: tuple[Recorded, ...] = ()
    names: Mapping[str, Target] = field(default_factory=dict)
    methods: Mapping[str, Target] = field(default_factory=dict)


def load(target: Target) -> Any:
    """What a target names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


@functools.cache
def rows() -> tuple[Capability, ...]:
    """The table; empty where there is none."""
    if importlib.util.find_spec(TABLE) is None:
        return ()
    found: tuple[Capability, ...] = importlib.import_module(TABLE).ROWS
    return found


class _Method:
    """A method that is imported when somebody first looks at it, on the class or on an object."""

    def __init__(self, target: Target):
        self.target = target

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return load(self.target).__get__(owner, kind)


@functools.cache
def recorded() -> tuple[Recorded, ...]:
    """Of all rows."""
    return tuple(one for row in rows() for one in row.recorded)


def pool_methods() -> type:
    """A class with the methods of all rows, for `Pool` to inherit from: no row can replace what `Pool` itself has."""
    return type("PoolMethods", (), {name: _Method(target) for row in rows() for name, target in row.methods.items()})
