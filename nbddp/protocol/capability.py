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
class RankPart:
    """An object of a worker, which hears of its runs. Its methods are those of `nbddp.worker.parts.HOOKS`.

    - name: what `RankWorker.part` gives it under. target: (RankWorker) -> the object.
    - when: it is made. "start": when the worker starts. "hosts": before the first run with ranks on several hosts.
      "option:NAME": before the first run whose `RunSpec.options` ask for it. Or when somebody asks for it.
    """

    name: str
    target: Target
    when: str = "start"


@dataclass(frozen=True, kw_only=True)
class OnAgent:
    """What is added to node agents (`nbddp.agent.server`), on this machine and on hosts.

<<<<<<< HEAD
    - ops: what an agent may be asked for → (NodeAgent, Peer, Message) -> Message | None.
    - starts: kind of a process that it may start → (request) -> exit status.
    - warm: (NodeAgent) -> what else its event `warm` says.
    - begins: (NodeAgent) -> None, before the process of an agent beside its owner imports torch.
    - succeeds: (NodeAgent) -> the agent that its process becomes once this one has ended, or None.

    An agent is one thread, and forks: what is called here imports no torch and starts no thread.
    """

    ops: Mapping[str, Target] = field(default_factory=dict)
    starts: Mapping[str, Target] = field(default_factory=dict)
    warm: Target = ""
    begins: Target = ""
    succeeds: Target = ""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What a cell shows in the end if its line has an option.

    - option: a field of `LaunchSpec`; command: the line that shows the same later.
    - show: (Asked, the option's value, whether the cell failed) -> None. order: among what a cell shows, least first.
    """

    option: str
    show: Target
    command: str = ""
    order: int = 0


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
    """A row.

    - name: the folder's. names: of the package `nbddp`. methods: of `Pool`, as functions of a pool.
    - on_agent: what it adds to node agents. agents: () -> an `nbddp.agent.client.AgentSource`.
    - guard: (OpenStore, pid of the agent, pid of its owner) -> a `Served` of `nbddp.agent.store_host`.
    - waits: () -> what earlier kernels have left for the next one, each a `Waiting` of `nbddp.notebook.terminal`.

=======
>>>>>>> 71f06b1 (The worker's parts have class names that nothing else has)
    On a rank (`RankWorker` is that of `nbddp.worker.parts`):

    - rank: parts of a worker, in the order in which they hear that a run begins.
    - requests: op -> (RankWorker, buffers, **fields) -> buffers, carried out between programs by the main thread.
    - questions: op -> (RankWorker, **fields) -> JSON, answered by the control thread while the main thread works.
    """

    name: str
    commands: tuple[Command, ...] = ()
    part: PoolPart | None = None
    recorded: tuple[Recorded, ...] = ()
    names: Mapping[str, Target] = field(default_factory=dict)
    methods: Mapping[str, Target] = field(default_factory=dict)
    rank: tuple[RankPart, ...] = ()
    requests: Mapping[str, Target] = field(default_factory=dict)
    questions: Mapping[str, Target] = field(default_factory=dict)
    on_agent: OnAgent = OnAgent()
    agents: Target = ""
    guard: Target = ""
    waits: Target = ""


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
    return tuple(sorted((one for row in rows() for one in row.recorded), key=lambda one: one.order))


def pool_methods() -> type:
    """A class with the methods of all rows, for `Pool` to inherit from: no row can replace what `Pool` itself has."""
    return type("PoolMethods", (), {name: _Method(target) for row in rows() for name, target in row.methods.items()})
