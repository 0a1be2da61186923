"""What the copies of ranks are to do, as the notebook asks it of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Plan:
    """ones: name → its value in one process. size: samples of each rank that are used, 0: all. same: every rank gets
    rank 0's batch; once: and so does one process. evaluated: BatchNorm uses running statistics. watch: operators are seen. seconds: time limit."""

    step: str
    args: tuple[str, ...] = ()
    batches: tuple[str, ...] = ()
    ones: Mapping[str, int] = field(default_factory=dict)
    double: bool = True
    watch: bool = True
    size: int = 0
    same: bool = False
    once: bool = False
    evaluated: bool = False
    seconds: float = 300.0
