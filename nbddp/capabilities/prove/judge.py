"""The verdict on the numbers of a proof: equal within rounding, off by a factor with a known meaning, or not known.
Pure.

A parameter is equal if its gradients on N ranks and in one process differ by less than rounding can explain. The
narrowest floating type in which the step computes decides that. The difference is measured against the gradient's own
size, and against a part of the size of all gradients. A gradient that is zero but for rounding proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import sqrt

from nbddp.capabilities.prove.plan import TensorPair

# type → the largest relative difference that rounding explains, and the part of all gradients below which a parameter's
# own gradient is not looked at
ROUNDING = {"float64": (1e-9, 1e-3), "float32": (5e-4, 1e-2), "float16": (0.03, 1.0), "bfloat16": (0.06, 1.0)}
UPDATES = 0.01  # by which what an optimizer adds may be off: it amplifies rounding
MOVED = 1e-6  # the same, where a step without an optimizer moves parameters itself
FITS = 1e-3  # a factor is one of the table's if it is so close to it
GRADIENT, UPDATE = "gradient ", "update "


@dataclass(frozen=True)
class KnownFactor:
    """A factor of a known meaning. of: (number of ranks) -> the factor."""

    name: str
    of: Callable[[int], float]
    meaning: str


FACTORS = (
    KnownFactor(
        "1/N", lambda n: 1 / n,
        "the loss or the gradient is divided by the number of ranks, and DDP (or FSDP2) divides already. Remove "
        "that division",
    ),
    KnownFactor(
        "N", lambda n: float(n),
        "gradients are summed over the ranks and not averaged: a communication hook without a division, or an "
        "all_reduce of gradients that DDP has averaged already. Divide by the number of ranks, or remove the "
        "all_reduce",
    ),
    KnownFactor(
        "1/N²", lambda n: 1 / n**2,
        "the gradient is divided by the number of ranks, two times more often than by DDP. The step has a sum over "
        "the samples and one division, or two divisions. Remove them",
    ),
    KnownFactor(
        "N²", lambda n: float(n**2),
        "the gradient is multiplied by the number of ranks twice: it is summed where DDP averages, and also "
        "scaled. Remove both",
    ),
)  # fmt: skip


GROWS = (
    "the loss grows with the number of samples: a sum over them (reduction='sum'), or a division by a fixed number. "
    "DDP and FSDP2 average over the ranks, so N ranks make a step 1/N as large as one process with all samples. Use "
    "the mean, or multiply by the number of ranks if the sum is meant; a fixed number that is one rank's batch "
    "size is right"
)


@dataclass(frozen=True)
class Deviation:
    """How a set of parameters differs. factor: of N ranks to one process, by least squares; off: relative difference;
    constant: whether the factor alone explains it."""

    first: str
    count: int
    of: int
    factor: float
    off: float
    constant: bool
    spread: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """largest: the largest relative difference that was found; allowed: what rounding explains, in `dtype`. missing:
    parameters that have a gradient on one side alone."""

    dtype: str
    allowed: float
    largest: float
    apart: float
    tensors: int
    norm: float
    deviation: Deviation | None = None
    whole: Deviation | None = None
    missing: tuple[tuple[str, str], ...] = ()
    updates: Deviation | None = None

    @property
    def equal(self) -> bool:
        return self.deviation is None and not self.missing and self.updates is None and self.norm > 0


def narrowest(dtypes: Sequence[str], double: bool) -> str:
    """The floating type with the largest rounding that occurred; without a word of it the step's own."""
    known = [name for name in dtypes if name in ROUNDING] or ["float64" if double else "float32"]
    return max(known, key=lambda name: ROUNDING[name][0])


def compared(pairs: Sequence[TensorPair], dtype: str) -> Comparison:
    """The pairs of rank 0's copy, judged."""
    allowed, part = ROUNDING[dtype]
    missing = tuple((r.name, r.missing) for r in pairs if r.missing)
    measured = [r for r in pairs if not r.missing]
    gradients = [r for r in measured if r.name.startswith(GRADIENT)]
    updates = [r for r in measured if r.name.startswith(UPDATE)]
    judged = gradients or updates
    norm = sqrt(sum(r.square for r in judged))
    ranks_norm = sqrt(sum(r.own for r in judged))
    floor = max(norm, ranks_norm if norm == 0 else 0.0) * part
    limit = allowed if gradients else max(allowed, MOVED if dtype == "float64" else UPDATES)
    different = [r for r in judged if _off(r, floor) > limit or not r.finite]
    whole = _deviation(judged, judged, allowed) if different else None
    found = Comparison(
        dtype=dtype,
        allowed=limit,
        largest=max((_off(r, floor) for r in judged), default=0.0),
        apart=max((r.largest for r in judged), default=0.0),
        tensors=len(judged),
        norm=max(norm, ranks_norm),
        deviation=_deviation(different, judged, allowed) if different else None,
        whole=whole,
        missing=tuple(m for m in missing if m[0].startswith(GRADIENT) or not gradients),
        updates=None,
    )
    bits = all(r.spread == 0 for r in gradients)
    return found if different or not gradients else _with_updates(found, updates, allowed, bits)


def _with_updates(found: Comparison, updates: Sequence[TensorPair], allowed: float, bits: bool) -> Comparison:
    """Gradients are equal: what the optimizer has made of them is looked at, in float64 alone; or on ranks of
    gradients with equal bits."""
    if not updates or not (bits or found.dtype == "float64"):
        return found
    floor = sqrt(sum(r.square for r in updates))
    looked = updates if found.dtype == "float64" else [r for r in updates if r.spread > UPDATES]
    different = [r for r in looked if _off(r, floor) > UPDATES]
    if not different:
        return found
    return replace(found, updates=_deviation(different, updates, allowed))


def _off(row: TensorPair, floor: float) -> float:
    """How far rank 0 is from one process, or from another rank."""
    size = max(sqrt(row.square), floor)
    if size == 0:
        return row.spread if row.apart == 0 else sqrt(row.apart) / 1e-300
    return max(sqrt(row.apart), row.spread * sqrt(max(row.own, row.square))) / size


def _deviation(some: Sequence[TensorPair], of: Sequence[TensorPair], allowed: float) -> Deviation:
    dot, square = sum(r.dot for r in some), sum(r.square for r in some)
    own, apart = sum(r.own for r in some), sum(r.apart for r in some)
    factor = dot / square if square else float("inf")
    left = own - 2 * factor * dot + factor**2 * square if square else own
    off = sqrt(apart / square) if square else float("inf")
    # the sums lose half of the digits of what is left
    constant = bool(square and dot) and sqrt(max(left, 0.0) / (factor**2 * square)) <= max(10 * allowed, 1e-6)
    name = some[0].name.partition(" ")[2]
    return Deviation(name, len(some), len(of), factor, off, constant, max(r.spread for r in some))


def known_factor(deviation: Deviation, ranks: int) -> KnownFactor | None:
    """The row of the table that fits; None if the factor is not constant, or none fits."""
    if not deviation.constant:
        return None
    return next((row for row in FACTORS if abs(deviation.factor / row.of(ranks) - 1) <= FITS), None)
