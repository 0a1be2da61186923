"""Output of ranks while no cell runs, from threads and processes that survive their cell.

It is kept beside the log of the cell that was run last (`%ddp log`), and is shown under the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nbddp.output.buffer import RankOutput
from nbddp.output.layout import Print, block
from nbddp.protocol.codec import Json
from nbddp.protocol.messages import STREAMS

if TYPE_CHECKING:
    from nbddp.execution.execution import Execution
    from nbddp.pool.state import PoolState

NAME = "background"
BEFORE, IN, SINCE = (f"-- printed {when} --" for when in ("before this cell", "in this cell", "since this cell ended"))
KINDS = ("stream", STREAMS)


class BackgroundPart:
    """`_outputs`: what ranks have printed since it was shown last, by the cell that has started who printed it; None
    where that is not known."""

    def __init__(self, pool: PoolState):
        self._outputs: dict[tuple[int | None, int], RankOutput] = {}
        self._lock = threading.Lock()

    def printed_late(self, run: Execution, rank: int, kind: str, content: Json) -> None:
        if kind not in KINDS:
            return
        cell = content.get("cell")
        with self._lock:
            if (cell, rank) not in self._outputs:
                name = f"rank{rank}.later{'' if cell is None else f'-In{cell}'}.log"
                logs, most = run.display.logs, run.display.most
                self._outputs[cell, rank] = RankOutput(rank, logs, name, most, held=False)
            self._outputs[cell, rank].take(kind, content)

    def run_ended(self, run: Execution) -> None:
        """Show what its ranks have printed before, in the order of cells; what is not known is the last."""
        if not run.request.is_numbered:
            return
        with self._lock:
            found = {key: self._outputs.pop(key) for key in [*self._outputs] if key[1] in run.display.shown}
        for cell in sorted({cell for cell, _ in found}, key=lambda cell: (cell is None, cell)):
            outputs = [found[key] for key in sorted(key for key in found if key[0] == cell)]
            for out in outputs:
                out.close()
                run.kept.setdefault(NAME, {}).setdefault(out.rank, []).append(out.log)
            run.display.screen.say(describe(cell, outputs))

    def log_text(self, run: Execution, rank: int, text: str) -> str:
        log = run.outputs[rank].log
        since = _text(sorted(log.parent.glob(f"{log.stem}.later*.log")))
        before = _text(run.kept.get(NAME, {}).get(rank, ()))
        if before:
            before = _ended(f"{BEFORE}\n{before}") + (f"{IN}\n" if text else "")
        return before + (f"{_ended(text)}{SINCE}\n{since}" if since else text)


def describe(cell: int | None, outputs: Sequence[RankOutput]) -> str:
    what = "" if cell is None else f" by threads or processes of Cell In[{cell}]"
    rows = "".join(piece.text for piece in block(outputs) if isinstance(piece, Print))
    return f"printed between cells{what}:\n{rows}".rstrip("\n")


def _text(paths: Iterable[Path]) -> str:
    return "".join(path.read_text(errors="replace") for path in paths if path.exists())


def _ended(text: str) -> str:
    return text if text.endswith("\n") or not text else f"{text}\n"
