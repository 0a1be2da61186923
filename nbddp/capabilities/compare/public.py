"""`nbddp.Pool.compare`: whether the ranks' copies of names are equal, as a table, text and data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbddp.capabilities.compare import command
from nbddp.figures.result import Result, Row
from nbddp.figures.table import Table

if TYPE_CHECKING:
    from nbddp.pool.pool import WorkerPool


@dataclass(frozen=True, eq=False, repr=False)
class CompareResult(Result[command.Report]):
    """How the ranks' copies of names differ. `equal` is True if none does.

    `to_dict()` has `equal` (bool), `names` (a list of dicts of `name`, `equal` and `text`), and `differences`, a list
    of rows. `to_frame()` has the rows, one per value that differs. The fields of a row:

    - `name`; `path`: within it; `type`: such as `float32 [3, 4]`; `why`: how the kinds differ, or empty.
    - `classes`: a list of lists of ranks that agree.
    - `largest`: the largest absolute difference; None where it was not measured or is not a number.
    """

    _columns = ("name", "path", "type", "why", "classes", "largest")

    @property
    def equal(self) -> bool:
        """Whether every name is equal on all ranks."""
        return self._found.equal

    def _draw(self) -> Table:
        return self._found

    def _data(self) -> Row:
        names = [{"name": c.name, "equal": c.equal, "text": c.describe()} for c in self._found.compared]
        return {"equal": self.equal, "names": names, "differences": self._rows()}

    def _rows(self) -> Sequence[Row]:
        return [
            {
                "name": c.name, "path": d.path, "type": d.leaf.words, "why": d.why,
                "classes": [list(ranks) for ranks in d.classes],
                "largest": d.largest if d.largest is not None and math.isfinite(d.largest) else None,
            }
            for c in self._found.compared for d in c.differences()
        ]  # fmt: skip


def compare(pool: WorkerPool, *names: str, ranks: Sequence[int] | None = None) -> CompareResult:
    """Compare the ranks' copies of names: tensors, modules, optimizers, numbers, or containers of them.

    - names (str): names on the ranks. ranks (several int): which ranks (default: all).

    Ranks send digests. For tensors that differ one rank sends its bytes too, up to 256 MiB in all. No process group is
    used. Raises PoolNotRunning, or BadInput for a name that no rank has or that holds nothing to compare.

    Example:

        pool.run_cell("import os; rank = int(os.environ['RANK'])")
        assert not pool.compare("rank").equal
    """
    return CompareResult(command.compare(pool, *names, ranks=ranks), *pool.marks("compare"))
