"""Colours that stay apart for colour-blind eyes (Paul Tol's "bright", darkened where text is white). Text on a fill has
a contrast of 4.5:1 at least (WCAG 2)."""

from __future__ import annotations

INK, MUTED, PAPER, FRAME = "#1a1a1a", "#595959", "#ffffff", "#f4f4f4"
FAINT = "#b0b0b0"  # for lines; never for text
FILLS = ("#33608c", "#9c4a00", "#1f6f2b", "#8f2d6b")  # one per node, in turn; white text is readable on each
TINTS = ("#dbe6f2", "#f6e3cf", "#dcefdd", "#f2dcec")  # of FILLS, for dark text
FORWARD, BACKWARD, OPTIMIZER = FILLS[0], FILLS[2], FILLS[3]  # a step's phases
MOVES, WAITS = "#f0c9a0", "#fbeede"  # communication: on its way or exposed; waiting for another rank
RC = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
}
