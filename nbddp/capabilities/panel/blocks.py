"""What ranks say, side by side: a block of widgets for each rank, of which only what has changed is sent.

The block that scrolls and has the keyboard's focus is a widget of its own and stays while its text is replaced, so a
reader keeps the place and the focus while ranks print. It decides nothing: `page` says what is in a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nbddp.capabilities.panel.page import RankBlock
from nbddp.capabilities.panel.state import State


class Blocks:
    """A block for each rank of which `blocks` has something to say; `widget` has them all."""

    def __init__(self, w: Any, blocks: Callable[[State], Sequence[RankBlock]]):
        self._w, self._of = w, blocks
        self._made: dict[int, Any] = {}  # rank → its widgets: all, the head, the text
        self.widget = w.Box()
        self.widget.add_class("outputs")

    def draw(self, state: State) -> None:
        wanted = self._of(state)
        for block in wanted:
            made = self._made.get(block.rank) or self._make()
            self._made[block.rank] = made
            for widget, text in ((made[1], block.head), (made[2], block.text)):
                if widget.value != text:
                    widget.value = text
        ranks = [block.rank for block in wanted]
        gone = [self._made.pop(rank)[0] for rank in sorted(self._made.keys() - ranks)]
        shown = tuple(self._made[rank][0] for rank in ranks)
        if self.widget.children != shown:
            self.widget.children = shown
        for block in gone:
            close(block)

    def _make(self) -> tuple[Any, Any, Any]:
        w = self._w
        head, text = w.HTML(), w.HTML()
        keys = {"tabbable": True} if "tabbable" in w.Box.class_trait_names() else {}  # ipywidgets 8
        scrolls = w.Box([text], **keys)  # with a tooltip it would have no view: the front end looks for a description
        scrolls.add_class("scrolls")
        return w.VBox([head, scrolls]), head, text


def close(widget: Any) -> None:
    """Let go of a widget and of all in it."""
    for child in getattr(widget, "children", ()):
        close(child)
    widget.close()
