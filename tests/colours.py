"""How well a colour is read on another, also on a dark page."""

from __future__ import annotations

HUES = ((-0.574, 1.43, 0.144), (0.426, 0.43, 0.144), (0.426, 1.43, -0.856))  # hue-rotate(180deg) of CSS filters


def contrast(a: str, b: str) -> float:
    """WCAG 2 contrast ratio of two `#rrggbb` colours, from 1 to 21."""
    high, low = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in _parts(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def in_the_dark(colour: str, behind: str) -> str:
    """What `RULE` makes of a `#rrggbb` colour on a page whose colour is `behind`."""
    inverted = [1 - part for part in _parts(colour)]
    turned = [min(1.0, max(0.0, sum(a * b for a, b in zip(row, inverted, strict=True)))) for row in HUES]
    mixed = [1 - (1 - a) * (1 - b) for a, b in zip(turned, _parts(behind), strict=True)]
    return "#" + "".join(f"{round(255 * part):02x}" for part in mixed)


def _parts(colour: str) -> list[float]:
    return [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
