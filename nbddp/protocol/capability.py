"""A capability's additions to the program: a row of the table `nbddp.capabilities`, and how the core reads it.

A row is plain data. Its targets are texts, "module:name", and `load` imports one when it is first needed. So a row
costs nothing until then, and without a row nothing of its folder is known.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, make_dataclass
from inspect import Parameter, Signature, signature
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from nbddp.errors import BadInput

TABLE = "nbddp.capabilities"
Target = str
FieldValues = dict[str, Any]  # arguments for a dataclass: each field has a type of its own
Call = TypeVar("Call", bound=Callable[..., Any])
P = ParamSpec("P")
T = TypeVar("T")


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
    names: str = ""


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of `%%ddp`, of `%ddp start`, `restart` and `run`, and of calls in Python: a field of `LaunchSpec`.

    - name, default: the field's. annotation: the argument's in Python; python: whether there is one.
    - of: what it describes, `pool` or `run`. keeps: a line without it keeps the running pool's value.
    - on: the lines that take it: `cell`, `start` (and restart; only for a pool's options), `script`, `terminal` for
      `python -m nbddp run`, and `torchrun` for torchrun's own command line.
    - flags: as typed, if not as `name` has it. into: the option that this one is a part of.
    - after: its place in `--help`, where not below the one before it in its row. group: the title there, if not of the
      option above it.
    - help: {what} is the cell, or what else the line runs. An option without help is not typed: its parts make its
      value.
    - excludes: a name that options share of which one alone can be typed.
    - type: (text) -> value, raises ArgumentTypeError; empty: the text. choices: all values; offers: for Tab, as
      `launch.options.Parser` has it, or what names them.
    - const: the value of a flag without one; with a metavar or choices, of a flag behind which nothing is typed.
    - repeats: each one that is typed adds to a tuple.
    - value: (what is typed, by name) -> the field's value, raises BadInput; called if it or a part is typed.
    - given: (argument) -> the field's value, in Python.
    - merge: (spec, spec of the running pool) -> value; called if either has one.
    - workers: where it has workers run, on `hosts` or as `engines` of a cluster; empty: it does not decide that.
    - exported: what is said of a script or job that is exported where a pool or a cell has a value for it.
    - to_ranks: whether the ranks learn if it holds; of a pool's option, its value.
    - shows: (Asked, value) -> what is displayed when the run has ended. of_failed: also if it failed. later: the
      command that shows the same of the last run. terminal: (pool, value) -> what `python -m nbddp run` says then.
    """

    name: str
    annotation: str = "str | None"
    default: Any = None
    python: bool = True
    of: str = "pool"
    keeps: bool = True
    on: tuple[str, ...] = ("cell", "start", "script", "terminal")
    flags: tuple[str, ...] = ()
    into: str = ""
    group: str = ""
    after: str = ""
    help: str = ""
    excludes: str = ""
    metavar: str = ""
    type: Target = ""
    choices: tuple[str, ...] = ()
    offers: tuple[str, ...] | Target = ()
    const: Any = None
    repeats: bool = False
    value: Target = ""
    given: Target = ""
    merge: Target = ""
    workers: str = ""
    exported: str = ""
    to_ranks: bool = False
    shows: Target = ""
    of_failed: bool = False
    later: str = ""
    terminal: Target = ""


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """An object of a worker, which hears of its runs. Its methods are those of `nbddp.worker.parts.HOOKS`.

    - name: its key in `RankWorker.parts`. target: (RankWorker) -> the object, or None if it hears of no run.
    - when: it is made. "start": when the worker starts; "pool:NAME": then, if the pool has this option. "hosts": before
      the first run with ranks on several hosts. "option:NAME": before the first run whose `RunSpec.options` ask for it.
      Or when somebody asks for it.
    - hears: an option: begin and end of those runs alone whose `RunSpec.options` ask for it.
    - sleeps: it hears of no run until it has something to do, and calls `WorkerParts.wake`.
    """

    name: str
    target: Target
    when: str = "start"
    hears: str = ""
    sleeps: bool = False


@dataclass(frozen=True, kw_only=True)
class OnAgent:
    """What is added to node agents (`nbddp.agent.server`), on this machine and on hosts.

    - ops: what an agent may be asked for → (NodeAgent, Peer, Message) -> Message | None.
    - starts: kind of a process that it may start → (request) -> exit status.
    - spawns: (request) -> whether a process is spawned where it could be forked.
    - warm: (NodeAgent) -> what else its event `warm` says. gpus: (environment) -> its `devices`, `links` and `untold`.
    - begins: (NodeAgent) -> None, before the process of an agent beside its owner imports torch.
    - succeeds: (NodeAgent) -> the agent that its process becomes once this one has ended, or None.

    An agent is one thread, and forks: what is called here imports no torch and starts no thread.
    """

    ops: Mapping[str, Target] = field(default_factory=dict)
    starts: Mapping[str, Target] = field(default_factory=dict)
    spawns: Target = ""
    warm: Target = ""
    gpus: Target = ""
    begins: Target = ""
    succeeds: Target = ""


@dataclass(frozen=True, kw_only=True)
class PoolPart:
    """What a capability keeps in the notebook for each pool; `protocol.pool_parts` makes it and says what it may do.

    - target: called with the `PoolState`, which it does not keep alive.
    - when: what makes it. `shell`: the magics are loaded; `start`: workers are planned; `option:NAME`: they are, with
      this option; `run`: a program runs; `field:NAME`: one whose `Request` has this field; `died`: a process
      ended in a run; `late`: a rank prints when none runs. Without any of these the first message does, or whoever
      asks for it.
    - messages: types of messages of ranks that it hears.
    - asked: fields of a `Request`: it hears launch, begin and end of those runs alone that have one. None: of all.
    """

    target: Target
    when: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Who may reach what ranks meet by; both sides, since neither guards anything alone.

    - store: (OpenStore, pid of the agent, pid of its owner) -> a `Served` of `nbddp.agent.store_host`.
    - rank: () -> a `RankGuard` of `nbddp.worker.rank_guard`.
    """

    store: Target
    rank: Target


class DetachedResource(Protocol):
    """What an earlier kernel has left for the next one, such as a process or nodes. words: what it is, and how `prog`
    ends it by its name; end: what is said of its end."""

    @property
    def name(self) -> str: ...
    def describe(self, prog: str) -> str: ...
    def end(self) -> str: ...


@dataclass(frozen=True)
class Advice:
    """said: a pattern that an exception's message has. target: asked then, (Cause, Topology) -> a line, or empty."""

    said: str
    target: Target


@dataclass(frozen=True, kw_only=True)
class Capability:
    """A row.

    - name: the folder's. names: of the package `nbddp`. methods: of every pool, as functions of a `WorkerPool`; public:
      what `nbddp.Pool` has in the place of such a method, or besides.
    - on_agent: what it adds to node agents. agents: () -> an `nbddp.agent.client.AgentSource`.
    - guard: who may reach what ranks meet by; one row has it.
    - probes: private API of `%ddp doctor` -> () -> None, tested by `%ddp doctor`; raises if it fails.
    - sources: option of a pool -> (PoolState) -> a `HostSource` of `nbddp.pool.host_source`, which has the nodes of a
      pool for which the option is said. Of several the last row's is taken.
    - advice: what else the report of a failed run says in its last line.
    - offers: () -> lines on where else workers could be, once they have started on this machine.
    - waits: () -> the `DetachedResource`s of earlier kernels.
    - main: () -> exit status of `python -m nbddp`. terminal: its handlers of the commands that every pool has.

    On a rank (`RankWorker` is that of `nbddp.worker.parts`):

    - rank: parts of a worker, in the order in which they hear that a run begins.
    - requests: op -> (RankWorker, buffers, **fields) -> buffers, carried out between programs by the main thread.
    - questions: op -> (RankWorker, **fields) -> JSON, answered by the control thread while the main thread works.
    """

    name: str
    commands: tuple[Command, ...] = ()
    part: PoolPart | None = None
    options: tuple[Option, ...] = ()
    names: Mapping[str, Target] = field(default_factory=dict)
    methods: Mapping[str, Target] = field(default_factory=dict)
    public: Mapping[str, Target] = field(default_factory=dict)
    rank: tuple[RankPart, ...] = ()
    requests: Mapping[str, Target] = field(default_factory=dict)
    questions: Mapping[str, Target] = field(default_factory=dict)
    on_agent: OnAgent = OnAgent()
    agents: Target = ""
    guard: Guard | None = None
    probes: Mapping[str, Target] = field(default_factory=dict)
    sources: Mapping[str, Target] = field(default_factory=dict)
    advice: Advice | None = None
    offers: Target = ""
    waits: Target = ""
    main: Target = ""
    terminal: Mapping[str, Target] = field(default_factory=dict)


def load(target: Target) -> Any:
    """What a target names; a module without a name behind it."""
    module, _, name = target.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


@functools.cache
def rows() -> tuple[Capability, ...]:
    """The table; empty where there is none."""
    if importlib.util.find_spec(TABLE) is None:
        return ()
    found: tuple[Capability, ...] = importlib.import_module(TABLE).ROWS
    return found


def public_names() -> Mapping[str, Target]:
    """What rows add to the package `nbddp`, and its public packages."""
    packages = importlib.import_module(TABLE).PACKAGES if rows() else {}
    return {**{name: target for row in rows() for name, target in row.names.items()}, **packages}


def guard_row() -> Guard | None:
    """The guard, if a row has one."""
    return next((row.guard for row in rows() if row.guard is not None), None)


class _Method:
    """A method that is imported when somebody first looks at it, on the class or on an object."""

    def __init__(self, target: Target):
        self.target = target

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return load(self.target).__get__(owner, kind)


def pool_methods() -> type:
    """A class with the methods of all rows, for `WorkerPool` to inherit from: no row can replace what that itself
    has."""
    return type("PoolMethods", (), {name: _Method(target) for row in rows() for name, target in row.methods.items()})


class Method(Generic[P, T]):
    """A method of `nbddp.Pool` from a function of its `WorkerPool`, imported when somebody first looks at it."""

    def __init__(self, function: Callable[Concatenate[Any, P], T] | Target):
        self.function = function

    def __get__(self, owner: Any, kind: Any = None) -> Callable[P, T]:
        function: Any = load(self.function) if isinstance(self.function, Target) else self.function
        method: Callable[P, T] = function if owner is None else function.__get__(owner._pool)
        return method


def public_methods() -> type:
    """A class with the methods that `nbddp.Pool` has of all rows, to inherit from."""
    targets = {name: target for row in rows() for name, target in {**row.methods, **row.public}.items()}
    return type("PublicMethods", (), {name: Method(target) for name, target in targets.items()})


@functools.cache
def added_options(of: str) -> tuple[Option, ...]:
    """The fields that rows add to what is said of a `pool` or of a `run`."""
    return tuple(option for row in rows() for option in row.options if option.of == of and not option.into)


def told_to_ranks(spec: object) -> dict[str, object]:
    """The options that a pool's workers get when they start: those of its options that hold, as plain data."""
    told = {option.name: getattr(spec, option.name) for option in added_options("pool") if option.to_ranks}
    return {name: value for name, value in told.items() if value}


def option_fields(of: str) -> type:
    """A dataclass with these fields, for `LaunchSpec` and `Request` to inherit from."""
    fields = [(one.name, one.annotation, field(default=one.default)) for one in added_options(of)]
    return make_dataclass(f"{of.title()}Fields", fields, frozen=True, kw_only=True)


def given(call: str, of: str, said: Mapping[str, object]) -> FieldValues:
    """Values of fields, from the arguments of a call in Python. Raises TypeError for one that no row has, and BadInput
    for a value that is none of its choices."""
    known = {option.name: option for option in added_options(of) if option.python}
    for name, value in said.items():
        if name not in known:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
        if known[name].choices and value not in (None, *known[name].choices):
            raise BadInput(f"{name}={value!r} is not one of {', '.join(known[name].choices)}")
    return {n: load(known[n].given)(value) if known[n].given else value for n, value in said.items()}


def with_options(of: str) -> Callable[[Call], Call]:
    """Decorates a call whose `**options` are `given`: its signature, which Tab and `?` show, has them by name."""

    def decorate(call: Call) -> Call:
        shape = signature(call)
        own = [each for each in shape.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
        more = [
            Parameter(o.name, Parameter.KEYWORD_ONLY, default=None if o.given else o.default, annotation=o.annotation)
            for o in added_options(of) if o.python
        ]  # fmt: skip
        vars(call)["__signature__"] = Signature([*own, *more], return_annotation=shape.return_annotation)
        return call

    return decorate
