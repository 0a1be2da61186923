"""Whether a number of a learner's is the right one, but for rounding. Pure."""

from __future__ import annotations


def is_near(value: float, right: float, within: float) -> bool:
    """Whether they are at most `within` apart, or `within` of `right` where that is larger. NaN is near to nothing."""
    return abs(value - right) <= within * max(1.0, abs(right))
