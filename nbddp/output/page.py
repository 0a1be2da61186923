"""What a page shows of a run in the place of plain text, while the cell runs and when it has ended. Pure.

A page that is loaded again during a run shows what was saved, and nothing moves on it any more. So whatever is shown
while a cell runs has a sentence about that. A script takes the sentence away on a page that hears of the run; where
scripts are removed, the sentence stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from nbddp.output.buffer import Display, RankOutput
from nbddp.protocol.outcome import RankExit

LIVE, GONE, FRESH = "nbddp-live", "nbddp-gone", "nbddp-fresh"  # CSS classes
NO_NEWS = 60  # seconds without an update after which a page reports it
NOT_LIVE = (
    "This view is not being updated. If you loaded the page again, or saved the notebook while the cell ran, the cell "
    "continues in the notebook kernel. Run %ddp attach in another cell: it shows the output and the report when the "
    "run has ended."
)
STYLE = (
    f".{LIVE}:not(.{FRESH}) progress {{display: none}} .{LIVE}.{FRESH} > .{GONE} {{display: none}} "
    f".{GONE} {{border-left: 3px solid currentColor; padding: 2px 8px; margin: 4px 0; white-space: normal}}"
)
# A page that was loaded after this was sent has not heard of the run. Two views of one output have one script each.
SCRIPT = """(() => {
  for (const root of document.querySelectorAll(".nbddp-live:not([data-heard])")) {
    root.dataset.heard = "1";
    const heard = Number(root.dataset.sent) > performance.timeOrigin;
    root.classList.toggle("nbddp-fresh", heard);
    if (heard) setTimeout(() => root.classList.remove("nbddp-fresh"), 1000 * Number(root.dataset.patience));
  }
})()"""
PLAIN = "white-space: pre-wrap; margin: 0; font-size: var(--jp-code-font-size, 13px); line-height: 1.3077"


@dataclass(frozen=True)
class OutputState:
    """What there is to be seen of a run. outputs: of the ranks that are shown; ended: how ranks have left; live: it
    goes on. below: what is said of it meanwhile."""

    outputs: Sequence[RankOutput]
    ended: Mapping[int, RankExit]
    live: bool = False
    below: tuple[str, ...] = ()


@dataclass(frozen=True)
class OutputPage:
    """HTML that shows a run's output. shows: whether a display is a part of it; others are displayed below."""

    html: str
    shows: Callable[[Display], bool]


def live(html: str, sent: float) -> str:
    """HTML that is shown while a cell runs, with the sentence for a page that hears no more of it. sent: time.time()
    when it is sent."""
    about = f'class="{LIVE}" data-sent="{1000 * sent:.0f}" data-patience="{NO_NEWS}"'
    gone = f'<p class="{GONE}">{escape(NOT_LIVE)}</p>'
    return f"<div {about}><style>{STYLE}</style>{gone}<script>{SCRIPT}</script>{html}</div>"


def plain(text: str) -> str:
    """Lines as they are."""
    return f'<pre style="{PLAIN}">{escape(text)}</pre>'
