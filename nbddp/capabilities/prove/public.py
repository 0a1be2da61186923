"""`nbddp.Pool.prove`: whether N ranks take the step of one process, as text and data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbddp.capabilities.prove import command
from nbddp.capabilities.prove.command import TIMEOUT
from nbddp.capabilities.prove.proof import Proof, Verdict
from nbddp.figures.result import Result, Row

if TYPE_CHECKING:
    from nbddp.pool.pool import WorkerPool

MEASURED = ("largest", "allowed", "factor", "off")  # which may be infinite where nothing was compared


@dataclass(frozen=True, eq=False, repr=False)
class ProofResult(Result[Proof]):
    """Whether N ranks take the same training step as one process with all their batches.

    `proven` is True if they do. The fields of `to_dict()`, of which `to_frame()` has a row without the lists:

    - `verdict` (str): `proven`, `differs` or `not known`; `headline` (str): the verdict as a sentence.
    - `step` (str), `ranks`, `samples` (int): what was compared; `dtype` (str): the number format of the comparison.
    - `largest`, `allowed` (float): the largest relative difference of a gradient, and what rounding explains.
    - `first` (str): the first parameter that differs, or empty.
    - `factor`, `off` (float): all gradients of N ranks as a multiple of those of one process, and their relative
      distance. None if they are equal.
    - `cause` (str): the known cause of the difference; empty if none is known.
    - `batches`: name → samples on each rank. `told`: how the copies differ from the program. `unseen`: what a proof
      cannot show.
    """

    @property
    def proven(self) -> bool:
        """Whether N ranks take the same step as one process."""
        return self._found.proven

    @property
    def verdict(self) -> Verdict:
        """`proven`, `differs` or `not known`."""
        return self._found.verdict

    def _draw(self) -> Proof:
        return self._found

    def _data(self) -> Row:
        data = self._found.to_dict()
        return {**data, **{n: x if (x := data[n]) is not None and math.isfinite(x) else None for n in MEASURED}}

    def _rows(self) -> Sequence[Row]:
        return [{name: value for name, value in self._data().items() if not isinstance(value, dict | list)}]


def prove(
    pool: WorkerPool,
    step: str,
    *args: str,
    batch: Sequence[str] = (),
    timeout: float = TIMEOUT,
    progress: Callable[[str], None] | None = None,
) -> ProofResult:
    """Test whether N ranks with their batches take the same training step as one process with all of these.

    - step (str): name of a function on the ranks that does forward and backward.
    - args (str): names on the ranks that it is called with.
    - batch (several str): names of the batches. Default: the arguments that differ between ranks.
    - timeout (float): seconds for each attempt (default 300).
    - progress (function of str): called with a line on each attempt. Default: none.

    Works on copies: nothing on the ranks changes. Raises PoolNotRunning, or BadInput if the step cannot be run so.

    Example:

        pool.run(train)
        pool.run_cell(SETUP)  # defines step, model, x and y
        assert pool.prove("step", "model", "x", "y").proven
    """
    found = command.prove(pool, step, *args, batch=batch, timeout=timeout, progress=progress or (lambda text: None))
    return ProofResult(found, *pool.marks("compare"))
