"""Messages between notebook and ranks about a proof: the values that a step reaches, the task of the copies, and their
results. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LATE, UNFIT = "TimeLimit", "CannotJoin"  # kinds of an answer: the time limit came, or batches cannot be joined


@dataclass(frozen=True)
class BatchFacts:
    """A value that may be a batch. counted: path → entries of a mask, or of targets, that count."""

    samples: int
    digest: str
    argument: bool
    counted: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StepFacts:
    """What a rank knows of a step before it runs. refused: why it cannot. numbers: whole numbers that it uses. peers:
    ranks that hold parts of one model with this one, by tensor parallelism."""

    missing: tuple[str, ...] = ()
    refused: str = ""
    batches: dict[str, BatchFacts] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    loaders: tuple[str, ...] = ()
    peers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What copies are to do.

    - ones: name → its value in one process. size: samples of each rank that are used, 0: all.
    - leaders: of each rank the one whose batch stands for its own: ranks that hold parts of one model have the same.
    - same: every rank gets rank 0's batch, and one process gets all of these; once: it gets one.
    - turned: one process gets the batches in another order.
    - evaluated: BatchNorm uses running statistics. watch: operators are seen. seconds: time limit.
    """

    step: str
    args: tuple[str, ...] = ()
    batches: tuple[str, ...] = ()
    ones: Mapping[str, int] = field(default_factory=dict)
    leaders: tuple[int, ...] = ()
    double: bool = True
    watch: bool = True
    size: int = 0
    same: bool = False
    once: bool = False
    turned: bool = False
    evaluated: bool = False
    seconds: float = 300.0


@dataclass(frozen=True)
class SeenFacts:
    """What a step did. dtypes: floating types of its tensors; random: what drew random numbers; statistics: of a batch;
    dropout, precision: what was switched off; cuts: collectives that cut gradients; hooks: of DDP; backwards: calls."""

    dtypes: tuple[str, ...] = ()
    random: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()
    dropout: tuple[str, ...] = ()
    cuts: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    precision: tuple[str, ...] = ()
    backwards: int = 0


@dataclass(frozen=True)
class TensorPair:
    """A gradient, or an update, of N ranks and of one process: sums from which those of several follow.

    - missing: which side lacks it, `ranks` or `one`, or `shape`. spread: how far the ranks' own are apart, as a part.
    - dot: of both; own, square: of the ranks' and of one process's with itself; apart: squared distance.
    """

    name: str
    missing: str = ""
    spread: float = 0.0
    dot: float = 0.0
    square: float = 0.0
    own: float = 0.0
    apart: float = 0.0
    largest: float = 0.0
    finite: bool = True


@dataclass(frozen=True)
class OneProcess:
    """The results of the process with all batches. sizes: samples of each rank."""

    error: str = ""
    sizes: tuple[int, ...] = ()
    seen: SeenFacts = SeenFacts()


@dataclass(frozen=True)
class CopyAnswer:
    """What a rank's copy has found. before: parameters that differed between the ranks before the step; alone:
    gradients that this rank has and another has not. one, pairs: rank 0's alone."""

    error: str = ""
    kind: str = ""
    before: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    seen: SeenFacts = SeenFacts()
    one: OneProcess | None = None
    pairs: tuple[TensorPair, ...] = ()


@dataclass(frozen=True)
class CopyState:
    """Of a rank's copy: `none`, `runs` or `done`, and then its answer."""

    state: str
    answer: CopyAnswer | None = None
