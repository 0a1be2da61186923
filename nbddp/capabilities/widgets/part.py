"""The widgets of one pool's ranks: what they say, what stays of them, and what their readers do."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from nbddp.capabilities.widgets import mirrors
from nbddp.capabilities.widgets.state import Widgets, may_end_bar
from nbddp.output.layout import BAR

if TYPE_CHECKING:
    from nbddp.execution.execution import Execution
    from nbddp.pool.state import PoolState


class WidgetsPart:
    def __init__(self, pool: PoolState):
        self._pool, self._widgets = pool, Widgets(self._send)
        self._settled: list[dict[str, Any]] = []  # of the run that is on
        self.display_words, self.display_over = self._widgets.words, self._widgets.is_over

    def message(self, rank: int, kind: str, content: dict[str, Any], buffers: Sequence[Any]) -> bool:
        self._widgets.take(rank, kind, content, buffers)
        return may_end_bar(kind, content)

    def run_begins(self, run: Execution) -> None:
        self._widgets.begin()

    def display_left(self, data: dict[str, Any], rich: bool) -> dict[str, Any]:
        self._settled.append(data)
        return self._widgets.settled(data, mirrors.reflect if rich and mirrors.can_reflect() else None)

    def run_ended(self, run: Execution) -> None:
        settled, self._settled = self._settled, []
        self._widgets.drop_bars(settled)

    def ranks_ended(self, ranks: Collection[int]) -> None:
        self._widgets.forget(ranks)

    def _send(self, rank: int, ident: str, data: dict[str, Any], buffers: Sequence[bytes]) -> None:
        """What a front end has sent to a widget. Of a rank that has ended the widget stays as it was."""
        with suppress(ReferenceError):  # the pool has ended
            if self._widgets.has(ident) and (wire := self._pool.group.wire) is not None:
                wire.tell_kernel(rank, "comm_msg", {"comm_id": ident, "data": data}, buffers, _print_of_callback)


def _print_of_callback(rank: int, kind: str, content: dict[str, Any]) -> None:
    """What a widget's callback prints on a rank; where a callback's print in the notebook itself would go."""
    if kind == "stream":
        out = sys.stderr if content["name"] == "stderr" else sys.stdout
        print(*(f"rank {rank}{BAR}{line}" for line in content["text"].splitlines()), sep="\n", file=out, flush=True)
    elif kind == "error":
        print(f"rank {rank}{BAR}{content['ename']}: {content['evalue']}", file=sys.stderr, flush=True)
