"""The composition of a gradient: a multiple of another one, or a sum of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from nbddp.lessons.framework.closeness import is_near

CLOSE = 1e-6  # relative, of float64
Gradients = Mapping[str, Sequence[float]]


def common_multiple(some: Gradients, of: Gradients) -> float | None:
    """c, if every gradient is c × that of `of`, with one c for all; else None."""
    found = combination([of], some)
    return None if found is None else found[0]


def combination(parts: Sequence[Gradients], whole: Gradients) -> list[float] | None:
    """What each of `parts` counts in `whole`, if that is a weighted sum of them; else None. The parts must be linearly
    independent."""
    if not parts:
        return None
    columns, row = np.array([flat(part, whole) for part in parts]).T, np.array(flat(whole, whole))
    if not np.isfinite(row).all():
        return None
    found, _, rank, _ = np.linalg.lstsq(columns, row, rcond=None)
    apart = np.abs(columns @ found - row).max()
    scale = max(np.abs(row).max(), CLOSE * np.abs(columns).max())
    return [float(c) for c in found] if rank == len(parts) and apart <= CLOSE * scale else None


def flat(some: Gradients, like: Gradients) -> list[float]:
    """All numbers in a row, in the order of the names of `like`."""
    return [number for name in like for number in some[name]]


def minus(one: Gradients, other: Gradients, times: float = 1.0) -> dict[str, list[float]]:
    """`times` × one - other."""
    return {n: [times * a - b for a, b in zip(one[n], other[n], strict=True)] for n in one}


def near(value: float, right: float) -> bool:
    return is_near(value, right, CLOSE)
