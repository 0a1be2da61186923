"""What has to travel to measure how far replicas are apart: a plan in pieces, pure arithmetic.

Only tensors that are known to differ take part, and of equal ranks only the lowest. The reference
rank's bytes are read in pieces of at most PIECE bytes, and each is given to the ranks that
differ; they answer with one number per tensor. All in all at most LIMIT bytes are read: what does not
fit is left out whole, so that no difference is told that was measured on a part only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

PIECE = 1 << 24  # bytes; a multiple of every dtype's size
LIMIT = 1 << 28  # bytes per comparison


@dataclass(frozen=True)
class Wanted:
    """A tensor to be measured: `bytes` of `reference` are to be seen by the ranks `others`."""

    name: str
    path: str
    reference: int
    others: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class ByteRange:
    """Bytes `start` to `stop` of one tensor."""

    wanted: Wanted
    start: int
    stop: int


def within(wanted: Iterable[Wanted], limit: int = LIMIT) -> list[Wanted]:
    """Those that fit into `limit` bytes one after the other; one that does not is passed over."""
    found, left = [], limit
    for w in wanted:
        if 0 < w.bytes <= left:
            found.append(w)
            left -= w.bytes
    return found


def pieces(wanted: Sequence[Wanted], piece: int = PIECE) -> Iterator[list[ByteRange]]:
    """Batches of spans of at most `piece` bytes, in each the same reference and others: every byte of each tensor
    once."""
    batch: list[ByteRange] = []
    room = piece
    for w in sorted(wanted, key=_meeting):  # stable: the given order within those that meet
        if batch and _meeting(batch[0].wanted) != _meeting(w):
            yield batch
            batch, room = [], piece
        for span in _spans(w, piece):
            if span.stop - span.start > room:
                yield batch
                batch, room = [], piece
            batch.append(span)
            room -= span.stop - span.start
    if batch:
        yield batch


def _meeting(w: Wanted) -> tuple[int, tuple[int, ...]]:
    return w.reference, w.others


def _spans(w: Wanted, piece: int) -> Iterator[ByteRange]:
    for start in range(0, w.bytes, piece):
        yield ByteRange(w, start, min(start + piece, w.bytes))
