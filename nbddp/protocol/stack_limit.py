"""Which frames of a long stack are shown: a recursion has hundreds of the same."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

SAME = 2  # frames of one place that are shown, and the last one
OUTER, INNER = 100, 100  # frames in all


def kept_frames(places: Sequence[Hashable]) -> list[tuple[int, int]]:
    """(index, index after the last one that is left out behind it) of the frames at these places. Of a repeated place
    they are the first ones and the last one; of very many frames the two ends."""
    at: dict[Hashable, list[int]] = {}
    for i, place in enumerate(places):
        at.setdefault(place, []).append(i)
    kept = sorted({i for found in at.values() for i in (*found[:SAME], found[-1])})
    if len(kept) > OUTER + INNER:
        kept = [*kept[:OUTER], *kept[-INNER:]]
    return list(zip(kept, [*kept[1:], len(places)], strict=False))
