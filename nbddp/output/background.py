"""What ranks print when no cell runs: by threads and processes that a cell has started and its end has not ended.

It is kept beside the log of the cell that was run last (`%ddp log`), and is shown under the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from nbddp.output.buffer import RankOutput
from nbddp.output.layout import Print, block
from nbddp.output.log_file import LIMIT
from nbddp.protocol.codec import Json
from nbddp.protocol.messages import STREAMS

BEFORE, IN, SINCE = (f"-- printed {when} --" for when in ("before this cell", "in this cell", "since this cell ended"))
KINDS = ("stream", STREAMS)


def whole_log(log: Path, earlier: Sequence[Path]) -> str:
    """What a rank has printed in a run, before it (the files that were shown under it) and since; empty if nothing."""
    texts = [_text(earlier), _text([log]), _text(later_files(log))]
    if texts[0]:
        texts[0] = _ended(f"{BEFORE}\n{texts[0]}") + (f"{IN}\n" if texts[1] else "")
    if texts[2]:
        texts[1:] = [_ended(texts[1]), f"{SINCE}\n{texts[2]}"]
    return "".join(texts)


def later_files(log: Path) -> list[Path]:
    """What a rank has printed since the run whose log this is."""
    return sorted(log.parent.glob(f"{log.stem}.later*.log"))


def _text(paths: Sequence[Path]) -> str:
    return "".join(path.read_text(errors="replace") for path in paths if path.exists())


def _ended(text: str) -> str:
    return text if text.endswith("\n") or not text else f"{text}\n"


@dataclass(frozen=True)
class BackgroundRows:
    """What ranks have printed since a cell ended. cell: who has started what printed it; None if that is not known."""

    cell: int | None
    outputs: Sequence[RankOutput]

    def words(self) -> str:
        what = "" if self.cell is None else f" by threads or processes of Cell In[{self.cell}]"
        rows = "".join(piece.text for piece in block(self.outputs) if isinstance(piece, Print))
        return f"printed between cells{what}:\n{rows}".rstrip("\n")


class BackgroundOutput:
    """Takes text in any thread. `follow` says whose logs it is kept with."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._most = LIMIT
        self._outputs: dict[tuple[int | None, int], RankOutput] = {}
        self._lock = threading.Lock()

    def follow(self, folder: Path, most: int) -> None:
        """A run begins that has its logs there. most: bytes of a rank's output that are kept."""
        with self._lock:
            self._folder, self._most = folder, most

    def take(self, rank: int, kind: str, content: Json) -> None:
        """Take in a message of a rank's, if it is text."""
        with self._lock:
            if kind not in KINDS or self._folder is None:
                return
            cell = content.get("cell")
            if (cell, rank) not in self._outputs:
                name = f"rank{rank}.later{'' if cell is None else f'-In{cell}'}.log"
                self._outputs[cell, rank] = RankOutput(rank, self._folder, name, self._most, held=False)
            self._outputs[cell, rank].take(kind, content)

    def collect(self, ranks: Collection[int]) -> list[BackgroundRows]:
        """What these ranks have printed since it was asked last, by the cell that it comes from; what is not known is
        the last."""
        with self._lock:
            found = {key: out for key, out in self._outputs.items() if key[1] in ranks}
            for key in found:
                self._outputs.pop(key).close()
        cells = sorted({cell for cell, _ in found}, key=lambda cell: (cell is None, cell))
        return [
            BackgroundRows(cell, [out for (of, _), out in sorted(found.items(), key=_rank) if of == cell])
            for cell in cells
        ]


def _rank(row: tuple[tuple[int | None, int], RankOutput]) -> int:
    return row[0][1]
