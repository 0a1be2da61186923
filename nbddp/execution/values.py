"""The values that ranks return: one per rank, shown side by side."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

from nbddp.errors import in_own_frames
from nbddp.launch.topology import rank_words
from nbddp.protocol import pickling
from nbddp.protocol.outcome import RankExit
from nbddp.protocol.pickling import NotSent, describe

__all__ = ["NotSent", "RankValues"]


Value = TypeVar("Value", covariant=True)  # what a user's program gives: it may be anything


class RankValues(Sequence[Value]):
    """One value from each rank. `values[2]` is rank 2's, and iteration gives them in order of rank.

    A program gets them from `Pool.run`, `Pool.pull` and `%%ddp -o NAME`, and makes none. Where only some ranks ran, the
    others have no value: `ranks` says which have one. A value that could not be sent is a `nbddp.NotSent`.

    Example:

        values: nbddp.RankValues[int] = pool.run(abs, -3)
        assert [2 * value for value in values] == [6] * pool.world_size
    """

    def __init__(self, values: Mapping[int, Value]):
        self._values = dict(sorted(values.items()))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have a value (tuple of int), ascending."""
        return tuple(self._values)

    def by_rank(self) -> dict[int, Value]:
        """The values as a dict: rank → value, of the ranks that ran.

        Example:

            assert pool.call(abs, (-3,), ranks=[1]).by_rank() == {1: 3}
        """
        return dict(self._values)

    def count(self, value: Any) -> int:
        """Return on how many ranks the value equals `value` (any type).

        Example:

            assert pool.run(abs, -3).count(3) == pool.world_size
        """
        return sum(held is value or held == value for held in self)

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Value]:
        return iter(self._values.values())

    @overload
    def __getitem__(self, rank: int) -> Value: ...
    @overload
    def __getitem__(self, rank: slice) -> list[Value]: ...
    def __getitem__(self, rank: int | slice) -> Any:
        if isinstance(rank, slice):
            return list(self._values.values())[rank]
        try:
            rank = operator.index(rank)
        except TypeError:
            wrong = TypeError(f"RankValues takes a rank or a slice, not {type(rank).__name__}")
            raise in_own_frames(wrong) from None
        found = rank + max(self._values, default=-1) + 1 if rank < 0 else rank
        if found not in self._values:
            have = f"{rank_words(self._values)} {'has' if len(self) == 1 else 'have'}" if self else "no rank has"
            raise in_own_frames(IndexError(f"rank {rank} has no value here; {have}"))
        return self._values[found]

    def __reversed__(self) -> Iterator[Value]:
        return reversed(self._values.values())  # Sequence's own counts from len() and stumbles over gaps

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """Return the first rank whose value equals `value`.

        - value (any type). start, stop (int): only ranks from `start` and below `stop`. Default: all.

        Raises ValueError if no rank has the value.

        Example:

            pool.run_cell("import os; rank = int(os.environ['RANK'])")
            assert pool.pull("rank")["rank"].index(1) == 1
        """
        for rank, held in self._values.items():
            if start <= rank and (stop is None or rank < stop) and (held is value or held == value):
                return rank
        raise in_own_frames(ValueError(f"no rank has the value {describe(value)}"))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RankValues):
            return self._values == other._values
        return list(self) == other

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """A row per rank; equal texts in one row."""
        rows: dict[str, list[int]] = {}
        for rank, value in self._values.items():
            rows.setdefault(describe(value), []).append(rank)
        labels = {text: rank_words(ranks) for text, ranks in rows.items()}
        width = max(map(len, labels.values()), default=0)
        lines = []
        for text, label in labels.items():
            for i, line in enumerate(text.splitlines() or [""]):
                lines.append(f"{label if i == 0 else '':<{width}} │ {line}")
        return "\n".join(lines)


NO_VALUES: RankValues[Any] = RankValues({})


def answered(ended: Mapping[int, RankExit], read: Callable[[bytes], Any] = pickling.unpack) -> RankValues[Any]:
    """One value from each rank that sent one."""
    return RankValues({r: read(e.buffers[0]) for r, e in ended.items() if e.buffers})
