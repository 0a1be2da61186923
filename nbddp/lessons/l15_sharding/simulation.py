"""Lesson 15's first explorer: the bytes of a model's states on each rank, by the stage of ZeRO.

The closed forms of Rajbhandari, Rasley, Ruwase and He, "ZeRO: Memory optimizations toward training trillion parameter
models", SC 2020, section 3 and figure 1. With mixed precision Adam keeps, per parameter, 2 bytes of itself, 2 of its
gradient, and 12 of the optimizer; those are a float32 copy, momentum and variance. Stage 1 shards the optimizer's,
stage 2 the gradients too, stage 3 the parameters too. In float32 it is 4, 4 and 8: no copy is needed. Activations,
buffers and what the allocator keeps are not in it. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from nbddp.analysis.quantities import amount
from nbddp.launch.topology import counted

PRECISIONS = {"mixed": (2, 2, 12), "float32": (4, 4, 8)}  # bytes per parameter: itself, its gradient, optimizer state
STAGES = (0, 1, 2, 3)
PARTS = ("parameters", "gradients", "optimizer state")
SHARDED_FROM = (3, 2, 1)  # the stage from which each of them is
NAMES = {0: "stage 0, DDP", 1: "stage 1", 2: "stage 2", 3: "stage 3, FSDP"}
MEMORY = 80e9  # bytes of a GPU, to compare with


@dataclass(frozen=True)
class MemoryShare:
    """Bytes that one rank holds."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def parts(self) -> tuple[float, float, float]:
        """As PARTS has them."""
        return self.parameters, self.gradients, self.optimizer

    @property
    def total(self) -> float:
        return sum(self.parts)


def share(stage: int, parameters: int, ranks: int, precision: str = "mixed") -> MemoryShare:
    """What a rank holds of a model at a stage of ZeRO, 0 to 3; precision: a key of PRECISIONS."""
    whole = [each * parameters for each in PRECISIONS[precision]]
    return MemoryShare(*(of / ranks if stage >= first else of for of, first in zip(whole, SHARDED_FROM, strict=True)))


@dataclass(frozen=True)
class Stages:
    """All stages side by side. parameters: of the model; ranks: among which it is sharded."""

    parameters: int
    ranks: int
    precision: str

    @property
    def shares(self) -> tuple[MemoryShare, ...]:
        """One per stage, 0 to 3."""
        return tuple(share(s, self.parameters, self.ranks, self.precision) for s in STAGES)

    def head(self) -> str:
        each = PRECISIONS[self.precision]
        added = f"{' + '.join(map(str, each))} = {sum(each)}"
        model = f"{billions(self.parameters)} parameters, Adam, {self.precision}"
        return f"{model}: {added} bytes each; {counted(self.ranks, 'rank')}"

    def verdict(self) -> str:
        """From which stage on it fits."""
        room = f"{MEMORY / 1e9:.0f} GB"
        if self.ranks == 1:
            return "one rank has nothing to shard: all stages are the same"
        fits = [s for s, of in zip(STAGES, self.shares, strict=True) if of.total <= MEMORY]
        if not fits:
            return f"no stage fits in {room}: more ranks, or tensor and pipeline parallel as well"
        if fits[0] == 0:
            return f"all stages fit in {room}, before activations: DDP will do"
        return f"fits in {room} from stage {fits[0]} on, before activations"

    def describe(self) -> str:
        lines = [self.head()]
        for stage, of in zip(STAGES, self.shares, strict=True):
            parts = ", ".join(f"{n} {amount(b)}" for n, b in zip(PARTS, of.parts, strict=True))
            lines.append(f"{NAMES[stage]}: {amount(of.total)} per rank: {parts}")
        return "\n".join([*lines, self.verdict()])


def stages(billion: float = 7.5, ranks: int = 64, precision: str = "mixed") -> Stages:
    """billion: how many 10⁹ parameters the model has."""
    return Stages(round(billion * 1e9), ranks, precision)


def billions(parameters: int) -> str:
    """`7.5 B`."""
    return f"{parameters / 1e9:g} B"
