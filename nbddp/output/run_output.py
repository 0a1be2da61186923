"""The output of a run's ranks: stored for each, shown as it arrives, and final when the run has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from nbddp.launch.topology import rank_words
from nbddp.output.buffer import RankOutput
from nbddp.output.page import OutputPage, OutputState
from nbddp.output.screens import NullScreen, Screen
from nbddp.protocol.codec import Json
from nbddp.protocol.messages import STREAMS, JupyterMessage, MimeBundle
from nbddp.protocol.outcome import RankExit
from nbddp.protocol.pool_parts import PoolParts

FILES_HELD = 256  # ranks whose output files stay open while a run goes on
SHOWING = ("display_data", "update_display_data", "execute_result")
PRINTED = ("stream", STREAMS, *SHOWING, "clear_output")


class RankOutputs(Mapping[int, RankOutput]):
    """Rank → all that it printed, made when somebody asks for it: most ranks of most cells print nothing. `made`: what
    has been, in any thread."""

    def __init__(self, ranks: Sequence[int], make: Callable[[int], RankOutput]):
        self._ranks, self._make = dict.fromkeys(ranks), make
        self.made: dict[int, RankOutput] = {}

    def __getitem__(self, rank: int) -> RankOutput:
        if rank not in self._ranks:
            raise KeyError(rank)
        return self.made.get(rank) or self.made.setdefault(rank, self._make(rank))  # one for all threads

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)


class RunOutput:
    """Of one run. `outputs`: those of its ranks; `shown`: ranks whose output is shown, on `screen`."""

    def __init__(
        self, ranks: Sequence[int], show: Sequence[int] | None, logs: Path, most: int, parts: PoolParts, screen: Screen
    ):
        """show: None for all ranks. logs: the folder that output is written into; most: bytes of each rank's that are
        kept."""
        self._parts, self.screen, self.logs, self.most = parts, screen, logs, most
        self.ended: Mapping[int, RankExit] = {}
        screen.shown_by(self.page)
        self.outputs = RankOutputs(ranks, self._output_of)
        self.shown = [r for r in ranks if show is None or r in show]
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext  # each line that is shown
        self.held: Callable[[], bool] = lambda: False  # whether nothing may be drawn below what is shown

    def hide(self, ranks: Sequence[int]) -> None:
        """Do not show the output of these either; before the run begins."""
        self.shown[:] = [r for r in self.shown if r not in ranks]

    def _output_of(self, rank: int) -> RankOutput:
        out = RankOutput(rank, self.logs, most=self.most, held=len(self.outputs) <= FILES_HELD)
        out.said = self._words
        return out

    @property
    def seen(self) -> list[RankOutput]:
        """What is shown, of ranks that have printed something."""
        made = self.outputs.made
        return [made[r] for r in self.shown if r in made] if made else []

    @contextmanager
    def without_screen(self) -> Iterator[None]:
        """Meanwhile nothing is shown."""
        screen, self.screen = self.screen, NullScreen()
        try:
            yield
        finally:
            self.screen = screen

    def refresh(self, status: Callable[[], str]) -> float | None:
        """As the screen's."""
        return None if self.held() else self.screen.refresh(self.seen, status)

    # -- as it comes -----------------------------------------------------------------------------

    def take(self, rank: int, kind: str, content: Json) -> None:
        for stream, line in self.outputs[rank].take(kind, content):
            if rank in self.shown:
                self._show_line(rank, stream, line)
        if kind in SHOWING:
            self._end_views(rank, 1)

    def take_comm(self, rank: int, kind: str, message: JupyterMessage) -> None:
        """What a rank's comm says."""
        may_be_over = self._parts.hear(rank, kind, message["content"], message["buffers"])
        self.outputs[rank].take(kind, message["content"])  # what an Output widget takes in
        if may_be_over:
            self._end_views(rank)

    def traceback(self, rank: int, text: str) -> None:
        """What Python would have written to stderr at a program's end. Where the report shows the first failure's
        traceback by itself, it goes to the files alone."""
        if self.screen.shows_reports():
            self.outputs[rank].keep("stderr", text)
        else:
            self.take(rank, "stream", {"name": "stderr", "text": text})

    def _show_line(self, rank: int, stream: str, line: str) -> None:
        with self.around():
            self.screen.line(rank, stream, line)

    def _words(self, data: MimeBundle) -> str | None:
        """The current text of a display, if it may change by itself."""
        return next((said for words in self._parts.display_words if (said := words(data)) is not None), None)

    def _end_views(self, rank: int, newest: int = 0) -> None:
        """A bar that is over is a line like any other; one that was closed is gone. newest: look at so many alone."""
        out = self.outputs[rank]
        for shown in [v for v in out.views[-newest:] if any(over(v.data) for over in self._parts.display_over)]:
            out.views.remove(shown)
            if rank in self.shown:
                shown.told = True
                for line in (self._words(shown.data) or "").splitlines():
                    self._show_line(rank, "stdout", line)

    # -- in the end ------------------------------------------------------------------------------

    def page(self, live: bool, below: Sequence[str] = ()) -> OutputPage | None:
        """What a page shows in the place of text; None: nothing else. below: what is said of the run meanwhile."""
        if not self.outputs.made:
            return None
        state = OutputState([self.outputs[r] for r in self.shown], self.ended, live, tuple(below))
        return next((page for draw in self._parts.output_pages if (page := draw(state)) is not None), None)

    def finish(self) -> None:
        """Show what stays, and close the files."""
        try:
            self._settle_views()
            self.screen.finish(self.seen)
        finally:
            for out in [*self.outputs.made.values()]:
                out.close()

    def _settle_views(self) -> None:
        """What stays of the widgets that were shown."""
        for rank, out in [*self.outputs.made.items()]:
            if not out.silent:
                rich = rank in self.shown and self.screen.rich
                out.settle(lambda data, rich=rich: self._left(data, rich))  # type: ignore[misc]

    def _left(self, data: MimeBundle, rich: bool) -> MimeBundle:
        found = (left for leaves in self._parts.display_left if (left := leaves(data, rich)) is not None)
        return next(found, {"text/plain": str(data.get("text/plain", ""))})

    def show_again(self, screen: Screen) -> None:
        """Show what has stayed once more."""
        screen.shown_by(self.page)
        screen.finish(self.seen)

    def unwritten(self, ended: Mapping[int, RankExit]) -> str:
        """Where output could not be written down, and why; empty where it could."""
        failed = {r: (o.why, str(o.log)) for r, o in [*self.outputs.made.items()] if o.why}
        failed |= {r: e.outcome.unsaved for r, e in ended.items() if e.outcome is not None and e.outcome.unsaved}
        if not failed:
            return ""
        why, path = failed[min(failed)]
        return f"output of {rank_words(failed)} could not be saved: {why} ({path}); the cell itself continued"
