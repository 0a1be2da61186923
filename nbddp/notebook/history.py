"""The history of this notebook: its `%%ddp` cells, and the values that `%ddp push` sent."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nbddp.errors import BadInput


@dataclass(frozen=True)
class Ran:
    """A `%%ddp` cell or a `%ddp push` of this notebook. line: None for values; where: the front end's name of the
    cell, if it has one."""

    number: int
    line: str | None
    body: str = ""
    pushed: Mapping[str, Any] | None = None
    ranks: tuple[int, ...] | None = None
    where: str = ""
    ok: bool = True

    def beside(self, other: Ran) -> bool:
        """Whether both are pushes of one run of a cell."""
        both = self.pushed is not None and other.pushed is not None
        return both and bool(self.where) and (self.where, self.number) == (other.where, other.number)

    def replaces(self, old: Ran) -> bool:
        """Whether this push is an older one again: of a cell that runs again, or of the same names."""
        if self.pushed is None or old.pushed is None or self.where != old.where:
            return False
        same = (self.pushed.keys(), self.ranks) == (old.pushed.keys(), old.ranks)
        return same or (bool(self.where) and self.number != old.number)


class CellHistory(list[Ran]):
    """What has run, in the order of the notebook: a cell that ran again stands where it ran first. A cell is appended,
    however many have run; values are pushed. They are kept of the newest push of a cell alone, since they may be
    large."""

    def push(self, ran: Ran) -> None:
        replaced = [i for i, old in enumerate(self) if ran.replaces(old)]
        beside = [i + 1 for i, old in enumerate(self) if ran.beside(old)]
        at = replaced[0] if replaced else beside[-1] if beside else len(self)
        self[:] = [old for old in self if not ran.replaces(old)]
        self.insert(at, ran)

    def chosen(self, numbers: Collection[int] | None) -> list[Ran]:
        """The cells that ended well, each as it ran last; or those of these `In[n]`, with the values that were pushed.
        Raises BadInput for a number of none."""
        if numbers is not None:
            known = {ran.number for ran in self if ran.line is not None}
            missing = sorted(set(numbers) - known)
            if missing:
                have = ", ".join(f"In[{n}]" for n in sorted(known)) or "none yet"
                raise BadInput(f"In[{missing[0]}] is not a %%ddp cell that ran; those that ran are {have}")
            return [ran for ran in self if ran.line is None or ran.number in numbers]
        return _latest(ran for ran in self if ran.ok)

    def every(self) -> list[Ran]:
        """All cells and pushes, each as it ran last, also those that failed: they may have made names before."""
        return _latest(self)


def _latest(ran: Iterable[Ran]) -> list[Ran]:
    """Each cell as it ran last, where it ran first."""
    found = {id(one) if one.pushed is not None else one.where or (one.line, one.body): one for one in ran}
    return list(found.values())
