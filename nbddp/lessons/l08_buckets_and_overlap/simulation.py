"""Lesson 08's explorer: which gradients share a bucket, and when the buckets move if the link carries one at a time.

The packing is torch's `compute_bucket_assignment_by_size` (reducer.cpp), as DDP calls it after its first exchange. It
is for gradients of one dtype on one device: DDP packs each such kind by itself. The time of a bucket is the α–β model
of `nbddp.capabilities.forecast.cost` for a ring. Pure: imports only trace/ and what that may.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from nbddp.analysis.quantities import duration, percent, size
from nbddp.analysis.steps import Bucket, Recording, Span, Step, communication, exposed, hidden, length
from nbddp.analysis.wait_time import typical
from nbddp.capabilities.forecast.cost import COSTS, Link, seconds
from nbddp.capabilities.timings.text import parameters
from nbddp.errors import BadInput
from nbddp.launch.topology import counted

MIB = 1 << 20
FIRST, CAP = MIB, 25 * MIB  # bytes: where DDP closes its first bucket, and the others, if nobody says
DEFAULT = "default"
LINKS = {  # round numbers, to reckon with
    "10 Gb/s Ethernet": Link(30e-6, 1.25e9),
    "100 Gb/s InfiniBand": Link(5e-6, 12.5e9),
    "NVLink": Link(5e-6, 150e9),
}
FLOAT = 4  # bytes


def limits(cap_mb: float | str = DEFAULT) -> tuple[int, int]:
    """Bytes at which the first bucket closes, and at which the others do. A `bucket_cap_mb` that is given holds
    for the first too."""
    if cap_mb == DEFAULT:
        return FIRST, CAP
    return int(float(cap_mb) * MIB), int(float(cap_mb) * MIB)


def pack(sizes: Sequence[int], first: int = FIRST, cap: int = CAP) -> list[list[int]]:
    """Positions of the gradients in each bucket. sizes: bytes, in the order in which gradients come.

    A bucket closes with the gradient that brings it to its limit or over it, so it may be larger than that.
    """
    made: list[list[int]] = [[]]
    held, limit = 0, first
    for i, count in enumerate(sizes):
        made[-1].append(i)
        held += count
        if held >= limit:
            made.append([])
            held, limit = 0, cap
    return [some for some in made if some]


@dataclass(frozen=True)
class Packed:
    """Gradients in the order in which they come, and their buckets (positions). bytes: one number per gradient."""

    names: tuple[str, ...]
    bytes: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...]
    cap_mb: float | str

    def size(self, bucket: int) -> int:
        """Bytes of a bucket."""
        return sum(self.bytes[i] for i in self.buckets[bucket])

    def sizes(self) -> list[int]:
        """Bytes of each bucket."""
        return [self.size(k) for k in range(len(self.buckets))]

    def rule(self) -> str:
        """`bucket_cap_mb=4`, or what holds where nobody says."""
        said = "25 (default; the first bucket 1)" if self.cap_mb == DEFAULT else f"{float(self.cap_mb):g}"
        return f"bucket_cap_mb {said}"

    def describe(self) -> str:
        """One line per bucket."""
        lines = [f"{counted(len(self.names), 'gradient')}, {size(sum(self.bytes))}; {self.rule()}"]
        for k, some in enumerate(self.buckets):
            lines.append(f"  bucket {k}: {parameters([self.names[i] for i in some])}, {size(self.size(k))}")
        return "\n".join(lines)


def packed(model: Sequence[tuple[str, int]], cap_mb: float | str = DEFAULT) -> Packed:
    """The buckets of a model. model: name and bytes of each parameter in the order of `named_parameters()`; their
    gradients come from the last to the first."""
    came = list(reversed(model))
    first, cap = limits(cap_mb)
    buckets = pack([count for _, count in came], first, cap)
    return Packed(tuple(n for n, _ in came), tuple(c for _, c in came), tuple(map(tuple, buckets)), cap_mb)


def linear_layers(layers: int, width: int) -> list[tuple[str, int]]:
    """Name and bytes of the parameters of `layers` square float32 layers in a Sequential."""
    kinds = (("weight", width * width), ("bias", width))
    return [(f"{i}.{kind}", count * FLOAT) for i in range(layers) for kind, count in kinds]


def timeline(some: Packed, backward: float, ranks: int, link: Link) -> Step:
    """The exchange on paper, in nanoseconds from the beginning of backward, which takes `backward` seconds.

    A gradient's time is in proportion to its bytes. A bucket is sent when its last gradient is there; the link
    carries one bucket at a time, in order, so `ready` ≤ `sent` and what is between is the queue.
    """
    whole = sum(some.bytes)
    there = [at / whole * backward for at in accumulate(some.bytes)]
    made, free = [], 0.0
    for k, members in enumerate(some.buckets):
        ready = there[members[-1]]
        start = max(ready, free)
        free = start + seconds("ring", "all_reduce", ranks, some.size(k), link)
        names = tuple(some.names[i] for i in members)
        made.append(Bucket(k, some.size(k), _ns(ready), _ns(start), _ns(free), names))
    end = _ns(backward)
    return Step(0, (0, 0), (0, end, max(end, _ns(free))), None, tuple(made))


def _ns(time: float) -> int:
    return round(time * 1e9)


@dataclass(frozen=True)
class BucketExchange:
    """Packed gradients and their exchange, on paper or as it was; `what` says which, in a few words. sent: the number
    of buckets that have been exchanged so far; None: all."""

    packed: Packed
    step: Step
    what: str
    sent: int | None = None

    @property
    def so_far(self) -> tuple[Bucket, ...]:
        return self.step.buckets[: self.sent]

    @property
    def is_whole(self) -> bool:
        return len(self.so_far) == len(self.step.buckets)

    @property
    def now(self) -> int:
        """Nanoseconds from the beginning of backward until the last bucket so far has been exchanged."""
        return self.so_far[-1].done if self.so_far else self.step.backward[0]

    @property
    def backward(self) -> Span:
        """Nanoseconds: when gradients began to come, and when the last was there."""
        return self.step.backward[:2]

    def sentence(self) -> str:
        """How much of the exchange the step had to wait for."""
        whole = length(communication(self.step))
        start, end = self.backward
        said = (
            f"{self.what}: backward {duration((end - start) / 1e9)}, all-reduce {duration(whole / 1e9)}, "
            f"{percent(hidden(self.step) / whole) if whole else '0 %'} hidden behind backward and "
            f"{duration(exposed(self.step) / 1e9)} exposed"
        )
        return f"{said}; the last bucket alone takes {duration(self.last / 1e9)}"

    @property
    def last(self) -> int:
        """Nanoseconds of the last bucket, which nothing can hide: it is sent when backward is over."""
        bucket = self.step.buckets[-1]
        return bucket.done - bucket.sent

    def describe(self) -> str:
        return f"{self.packed.describe()}\n{self.sentence() if self.is_whole else self.progress()}"

    def progress(self) -> str:
        """What has been exchanged so far."""
        begun = duration((self.now - self.backward[0]) / 1e9)
        return (
            f"{self.what}: {len(self.so_far)} of {counted(len(self.step.buckets), 'bucket')} exchanged, {begun} after "
            "backward began"
        )


def exchange(
    layers: int, width: int, cap_mb: float | str, backward: int, ranks: int, link: str, sent: int | None = None
) -> BucketExchange:
    """The explorer's question. backward: milliseconds; link: a name in LINKS; sent: buckets exchanged so far."""
    some = packed(linear_layers(layers, width), cap_mb)
    step = timeline(some, backward / 1e3, ranks, LINKS[link])
    return BucketExchange(some, step, f"{counted(ranks, 'rank')}, {link}", sent)


@dataclass(frozen=True)
class StepComparison:
    """A step as it was recorded, and the same on paper."""

    measured: BucketExchange
    foretold: BucketExchange

    @property
    def same_buckets(self) -> bool:
        """Whether DDP's buckets are the packer's, byte for byte."""
        return [b.bytes for b in self.measured.step.buckets] == self.foretold.packed.sizes()

    def describe(self) -> str:
        same = "DDP's buckets are the same." if self.same_buckets else "DDP's buckets differ."
        return "\n".join(
            [self.foretold.packed.describe(), same, self.measured.sentence(), self.foretold.sentence(), WHY_APART]
        )


WHY_APART = "On paper, backward and the link do not slow each other. On a CPU they share the cores."


def beside(recording: Recording, model: Sequence[tuple[str, int]], cap_mb: float | str) -> StepComparison:
    """The median step of a recording on its lowest rank, beside the packer's. The packer has the same backward, and the
    speed that the link had in that step. Raises BadInput where no step with an exchange is recorded."""
    number = typical(recording)
    step = None if number is None else recording.step(number)[min(recording.ranks)]
    if step is None or not step.buckets:
        raise BadInput("no exchange of gradients is recorded on every rank; run a cell that trains a DDP model first")
    some, ranks = packed(model, cap_mb), len(recording.ranks)
    start, end, _ = step.backward
    moved = length(communication(step)) / 1e9
    _, share = COSTS["ring"]["all_reduce"](ranks)
    link = Link(0.0, share * sum(b.bytes for b in step.buckets) / moved if moved else float("inf"))
    paper = timeline(some, (end - start) / 1e9, ranks, link)
    return StepComparison(
        BucketExchange(some, step.shifted(-start), f"recorded on rank {min(recording.ranks)}"),
        BucketExchange(some, paper, "on paper"),
    )


def edges(some: Packed) -> list[tuple[int, int]]:
    """Where each gradient lies in the buckets' bytes, from 0: (first, one past the last)."""
    return list(pairwise([0, *accumulate(some.bytes)]))
