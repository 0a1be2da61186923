"""Colours that stay apart for colour-blind eyes (Paul Tol's "bright", darkened where text is white), and
the contrast of WCAG 2: text on a fill must reach 4.5:1."""

from __future__ import annotations

INK, MUTED, PAPER, FRAME = "#1a1a1a", "#595959", "#ffffff", "#f4f4f4"
FAINT = "#b0b0b0"  # for lines; never for text
FILLS = ("#33608c", "#9c4a00", "#1f6f2b", "#8f2d6b")  # one per node, in turn; white text is readable on each
TINTS = ("#dbe6f2", "#f6e3cf", "#dcefdd", "#f2dcec")  # of FILLS, for dark text
RC = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
}


def contrast(a: str, b: str) -> float:
    """WCAG 2 contrast ratio of two `#rrggbb` colours, from 1 to 21."""
    high, low = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
