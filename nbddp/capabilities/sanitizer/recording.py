"""The record of one rank while a program ran under `--sanitize`: plain data of bounded size. Pure.

`at` orders what happened on a rank; `place` is an index into `RankRecord.places`. A sample is a flat list. For
each sampled tensor it has the dot product with fixed weights and the norm, of at most 512 elements.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

NO_TENSOR = 12321.0  # the norm in a sample where there is no tensor, as a gradient that is None
BESIDE = -1  # the number of what an optimizer moves and no model knows
WHOLE, FURTHER = "the weight of the loss", "the weight of a further term"  # numbers of a loss's graph
MOST = 2000  # facts of a kind that are kept
Sample = list[float]


class Place(NamedTuple):
    """A line of the program. text: the source line. through: the library that the program called there, if that called
    on."""

    file: str
    line: int
    function: str
    text: str
    through: str = ""

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}" if self.line else "an unknown line"


NOWHERE = Place("", 0, "", "")


@dataclass
class ModelFacts:
    """A model that replicates or shards: made by `place`, or before the cell. names: of the parameters it exchanges;
    order: a digest of all names in their order. ignored: names that it was set to ignore. hook: its communication
    hook. start: a sample of the parameters when it was made, or first seen. ends: a sample of each tensor when the
    program ended: parameters first, then buffers. buffers: samples at some steps. held_buffers: names of those that it
    had when it was made. drops: names of its dropout modules. own_buffers: samples of buffers that modules of the
    program have, called own_names, at its first training forwards; read_buffers: those that the loss depends on. moved:
    what became of its parameters' dtype or device. numbers: those of its modules, as a dropout's share, with the number
    of the training forward at which they were looked at."""

    number: int
    kind: str
    title: str
    group: tuple[int, ...]
    place: int
    made_before: bool
    names: list[str] = field(default_factory=list)
    order: int = 0
    ignored: list[str] = field(default_factory=list)
    broadcasts: bool = True
    joins: bool = False
    hook: str = ""
    hook_place: int = 0
    start: Sample = field(default_factory=list)
    start_names: list[str] = field(default_factory=list)
    ends: Sample = field(default_factory=list)
    end_names: list[str] = field(default_factory=list)
    parameters: int = 0
    buffers: list[Sample] = field(default_factory=list)
    buffer_steps: list[int] = field(default_factory=list)
    buffer_names: list[str] = field(default_factory=list)
    held_buffers: list[str] = field(default_factory=list)
    drops: list[str] = field(default_factory=list)
    own_names: list[str] = field(default_factory=list)
    own_buffers: list[Sample] = field(default_factory=list)
    read_buffers: list[str] = field(default_factory=list)
    moved: str = ""
    moved_place: int = 0
    numbers: list[tuple[int, dict[str, float]]] = field(default_factory=list)


@dataclass
class Forward:
    """A call of the model. armed: whether its backward will exchange. batch: digest of the input, 0 if unknown;
    size: of its first dimension. random: digest of the generator before; drew: whether the forward used it.
    training: with gradients; mode: `module.training`. others: modules within it in the other mode, where that was
    looked at. out: digest of the first outputs, 0 if unknown."""

    model: int
    at: int
    place: int
    training: bool
    armed: bool
    autocast: str = ""
    batch: int = 0
    size: int = 0
    random: int = 0
    drew: bool = False
    mode: bool = True
    others: tuple[str, ...] | None = None
    out: int = 0


@dataclass
class Past:
    """A training forward of a module of the model, past it. module: its class. used: whether backward came to it.
    values: the model's first parameters before the first, second, fourth such forward, if no optimizer has stepped."""

    model: int
    at: int
    place: int
    module: str
    used: bool = False
    values: Sample = field(default_factory=list)


@dataclass
class Backward:
    """A backward through the model's output. flag: `require_backward_grad_sync` when it began; armed: as its forward
    was. grads: a sample once the exchange is through. kept: the sum of some gradients' sizes that were there before;
    None if unknown."""

    model: int
    at: int
    place: int
    armed: bool
    flag: bool
    ended: int = 0
    grads: Sample = field(default_factory=list)
    kept: float | None = None


@dataclass
class Part:
    """The parameters of one model in an optimizer's step (BESIDE: of none). names: of those in the samples grads and
    after. earlier: of those in before, which are the ones of the step before."""

    model: int
    names: list[str]
    earlier: list[str] = field(default_factory=list)
    before: Sample = field(default_factory=list)
    grads: Sample = field(default_factory=list)
    after: Sample = field(default_factory=list)


@dataclass
class OptimizerStep:
    """An optimizer's step. hyper: its numbers, by group and name. sequences: model → number of collectives that its
    group has begun. within: whether a backward ran then."""

    optimizer: int
    number: int
    at: int
    place: int
    parts: list[Part] = field(default_factory=list)
    hyper: list[tuple[str, object]] = field(default_factory=list)
    sequences: dict[int, int] = field(default_factory=dict)
    within: bool = False


@dataclass
class OutsideParameter:
    """A parameter with a gradient that an optimizer of the model's moves and the model does not exchange. why: `added`
    or `replaced` within the model, `unfrozen`, `ignored`, or `outside` of it."""

    model: int
    optimizer: int
    name: str
    why: str
    place: int
    at: int


@dataclass
class Pass:
    """An iteration over a data loader. rows, batches: digests. models: those that were trained meanwhile.
    random_before: (worker, number, generator, digest before) of fetches that drew random numbers. waits: seconds for
    each batch. order: digest of the indices that the sampler gave; total: how many those of all ranks are. content:
    digest of what the data set holds, 0 if unknown. sizes: batches' rows; shapes: of a row of their first tensor.
    epoch: of the sampler, or of an iterable data set. whole: whether it came to its end. classes, statistics, lists:
    what a data set holds of those, at a loader's first pass."""

    loader: int
    number: int
    at: int
    place: int
    sampler: str = ""
    replicas: int | None = None
    rank: int | None = None
    seed: int | None = None
    epoch: int | None = None
    shuffles: bool = False
    order: int | None = None
    length: int | None = None
    content: int = 0
    total: int | None = None
    workers: int = 0
    keeps_workers: bool = False
    iterable: bool = False
    batches: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    random_before: list[tuple[int, int, str, int]] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    ended: int = 0
    whole: bool = False
    classes: dict[str, tuple[int, int]] = field(default_factory=dict)
    statistics: dict[str, list[float]] = field(default_factory=dict)
    lists: dict[str, tuple[int, int]] = field(default_factory=dict)
    models: set[int] = field(default_factory=set)


@dataclass
class CalledFunction:
    """Something the program called. what: its name; detail: what matters of it."""

    what: str
    at: int
    place: int
    detail: object = None


@dataclass
class GroupCall:
    """A collective that Python called in a group of these ranks."""

    group: tuple[int, ...]
    name: str
    op: str
    shape: str
    at: int
    place: int

    @property
    def numel(self) -> int:
        return prod(int(each) for each in self.shape.partition("[")[2].rstrip("]").split(",") if each)


@dataclass
class HookCall:
    """A bucket that went through the program's communication hook: samples before and after."""

    model: int
    at: int
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)


@dataclass
class HeldParameters:
    """Which parameters of a model an optimizer moves. groups: name → number of the first of its groups that has
    the same numbers as the parameter's."""

    optimizer: int
    model: int
    groups: dict[str, int] = field(default_factory=dict)


@dataclass
class HandAveraged:
    """An optimizer's step, before which the program has all-reduced the gradients of all its parameters over a group.
    shapes: a digest; values: of the first parameters."""

    optimizer: int
    place: int
    group: tuple[int, ...]
    shapes: int
    number: int
    values: Sample = field(default_factory=list)


@dataclass
class ShardedStep:
    """A step of ZeroRedundancyOptimizer whose parameters are of no model. names, grads: of its first parameters.
    hooked: whether the program has hooks that run before it."""

    optimizer: int
    place: int
    group: tuple[int, ...]
    names: list[str]
    at: int
    hooked: bool
    grads: Sample = field(default_factory=list)


@dataclass
class BesideModule:
    """A module without gradients that the program calls beside its models. values: samples of its tensors, at its
    first, second, fourth call and so on. modes: the mode of each call, of one for which it matters; at most 16. loaded:
    whether the program has loaded a state into it, or into a part of it, after its first call."""

    title: str
    place: int
    names: list[str]
    calls: int = 0
    values: list[Sample] = field(default_factory=list)
    modes: list[bool] = field(default_factory=list)
    loaded: bool = False


@dataclass
class DrawnTensor:
    """Random numbers that the program drew by the own generator of torch or numpy (`by`). value: a digest."""

    at: int
    place: int
    shape: tuple[int, ...]
    by: str = "torch"
    value: int = 0


@dataclass
class HostRead:
    """A line that waits for a GPU in training. count: how often; steps: at how many optimizer steps. waits: seconds
    that the first ones took, of a real GPU; seconds: from the first one to the last."""

    name: str
    place: int
    count: int = 0
    steps: int = 0
    last_step: int = -1
    since: float = 0.0
    seconds: float = 0.0
    simulated: bool = False
    waits: list[float] = field(default_factory=list)


@dataclass
class CountedLoss:
    """A sum over counted targets in a loss that backward ran from, or over all elements. index: of the sum among those
    of its sort within the loss. form: how they are counted, empty if all are; count: of `whole` targets. odd: numbers
    of a mask that are no 0 or 1. times, over: what multiplies and divides the sum. ended: `at` when backward had
    returned."""

    at: int
    place: int
    index: int
    form: str
    whole: int
    count: float = 0.0
    odd: float = 0.0
    times: list[float] = field(default_factory=list)
    over: list[float] = field(default_factory=list)
    ended: int = 0

    @property
    def weight(self) -> float:
        """Of one counted target; 0 if unknown."""
        over = prod(self.over)
        return prod(self.times) / over if over else 0.0


@dataclass
class RankRecord:
    """All of one rank. ended: how the program ended, empty if well. dropped: kind of fact → how many were not kept.
    lost: why more was not recorded, empty if all was."""

    rank: int
    run: int
    cell: int | None = None
    host: str = ""
    ended: str = ""
    places: list[Place] = field(default_factory=lambda: [NOWHERE])
    models: list[ModelFacts] = field(default_factory=list)
    forwards: list[Forward] = field(default_factory=list)
    past: list[Past] = field(default_factory=list)
    backwards: list[Backward] = field(default_factory=list)
    steps: list[OptimizerStep] = field(default_factory=list)
    step_counts: dict[int, int] = field(default_factory=dict)
    outside: list[OutsideParameter] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    calls: list[CalledFunction] = field(default_factory=list)
    collectives: list[GroupCall] = field(default_factory=list)
    hooks: list[HookCall] = field(default_factory=list)
    losses: list[CountedLoss] = field(default_factory=list)
    drawn: list[DrawnTensor] = field(default_factory=list)
    held: list[HeldParameters] = field(default_factory=list)
    averaged: list[HandAveraged] = field(default_factory=list)
    sharded: list[ShardedStep] = field(default_factory=list)
    beside: list[BesideModule] = field(default_factory=list)
    reads: list[HostRead] = field(default_factory=list)
    settings: dict[str, object] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    lost: str = ""

    def at(self, place: int) -> Place:
        return self.places[place]
