"""`nbddp.Pool.findings`: the silent mistakes of a run, as text and data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbddp.capabilities.sanitizer import command
from nbddp.capabilities.sanitizer.findings import Finding, SanitizerFindings
from nbddp.figures.result import Result, Row

if TYPE_CHECKING:
    from nbddp.pool.pool import WorkerPool


@dataclass(frozen=True, eq=False, repr=False)
class FindingsResult(Result[SanitizerFindings]):
    """The findings of the sanitizer in a run. `len()` is the number of findings; without findings the result is false.

    The fields of `to_dict()`:

    - `findings`, `silenced`: lists of findings, most serious first; those that the program or the call silenced.
    - `ranks`, `steps` (int): how many ranks and optimizer steps were recorded.

    The fields of a finding, of which `to_frame()` has a row for each:

    - `kind` (str): such as `past-ddp`; `degree` (str): results are `wrong`, may be (`doubtful`), or are right (`slow`).
    - `what`, `matters`, `cure` (str): the mistake, what it changes, and the line that repairs it (empty: not known).
    - `file`, `line`, `text`: the program's line; 0 and empty if it is not known.
    - `ranks`: a list of int; `evidence`: a list of str with ranks, steps and numbers.
    - `cause_known` (bool): False if only the effect was seen. `ruled_out`: causes that were looked for and not seen.
    - `silenced` (str): what silenced it, or empty.
    """

    _columns = (
        "kind", "degree", "what", "matters", "cure", "file", "line", "text", "ranks", "evidence", "cause_known",
        "ruled_out", "silenced",
    )  # fmt: skip

    def __len__(self) -> int:
        return len(self._found)

    def __bool__(self) -> bool:
        return bool(self._found)

    def _draw(self) -> SanitizerFindings:
        return self._found

    def _captions(self) -> Sequence[str]:
        return [note for note in self.notes if note not in self._found.notes]

    def _data(self) -> Row:
        found = self._found
        return {
            "findings": self._rows(), "silenced": [_row(one) for one in found.silenced],
            "ranks": found.ranks, "steps": found.steps,
        }  # fmt: skip

    def _rows(self) -> Sequence[Row]:
        return [_row(one) for one in self._found.found]


def _row(one: Finding) -> Row:
    return {
        "kind": one.kind, "degree": one.degree, "what": one.what, "matters": one.matters, "cure": one.cure,
        "file": one.place.file, "line": one.place.line, "text": one.place.text, "ranks": list(one.ranks),
        "evidence": list(one.evidence), "cause_known": one.cause_known, "ruled_out": list(one.ruled_out),
        "silenced": one.silenced,
    }  # fmt: skip


def findings(pool: WorkerPool, *, allow: Sequence[str] = (), same_input: bool = False) -> FindingsResult:
    """The silent mistakes of the last run with `sanitize=True`, most serious first.

    - allow (several str): kinds that are silenced (default: none).
    - same_input (bool): the ranks are to see the same input, as in tensor parallelism (default False).

    Raises PoolNotRunning, or BadInput if no run was under `sanitize`, or `allow` has an unknown kind.

    Example:

        pool.run_cell("import torch; model = torch.nn.Linear(4, 2)", sanitize=True)
        for finding in pool.findings().to_dict()["findings"]:
            print(finding["kind"], finding["file"], finding["line"])
    """
    found = command.findings(pool, allow=allow, same_input=same_input)
    simulated, notes = pool.marks("compare")
    return FindingsResult(found, simulated, (*found.notes, *notes))
