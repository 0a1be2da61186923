"""The colours of drawings, by kind of part: each for a light and for a dark page. Text has 4.5:1 on its fill."""

from __future__ import annotations

from dataclasses import dataclass

from nbddp.figures.palette import BACKWARD, FILLS, FORWARD, INK, MOVES, MUTED, OPTIMIZER, TINTS, WAITS

WHITE, NIGHT = "#ffffff", "#10161c"  # inks on strong fills: on a light page, on a dark one
BRIGHT, PALE = "#e8e8e8", "#b4b4b4"  # inks on a dark page: text, small print


@dataclass(frozen=True)
class Colour:
    """On a light page, and on a dark one."""

    light: str
    dark: str

    def css(self, name: str) -> str:
        """A declaration; browsers without `light-dark()` take the first."""
        return f"{name}:{self.light};{name}:light-dark({self.light},{self.dark})"


@dataclass(frozen=True)
class Fill:
    """A kind of bar. ink: of its label; edge: its outline; hatched: a strip of lines along its lower edge, so that
    kinds differ without colours. A label never lies on the strip."""

    fill: Colour
    ink: Colour
    edge: Colour | None = None
    hatched: bool = False


INKS = {"ink": Colour(INK, BRIGHT), "muted": Colour(MUTED, PALE)}
GRID = Colour("#d8d8d8", "#454545")
FRAME = Colour("#767676", "#8c8c8c")  # 3:1 on both pages
STRONG, SOFT = Colour(WHITE, NIGHT), INKS["ink"]
LIT = ("#86b6e3", "#e9a35c", "#74c483", "#dd8fc0")  # FILLS on a dark page
SHADE = ("#22384d", "#4d361f", "#21422a", "#4a2a40")  # TINTS on a dark page
SERIES = tuple(Colour(fill, lit) for fill, lit in zip(FILLS, LIT, strict=True))
AREAS = tuple(Colour(tint, shade) for tint, shade in zip(TINTS, SHADE, strict=True))


def _strong(light: str, hatched: bool = False) -> Fill:
    return Fill(Colour(light, LIT[FILLS.index(light)]), STRONG, hatched=hatched)


def dashes(number: int) -> int:
    """Of the line with this number, which of the dashes."""
    return (number + number // len(FILLS)) % len(FILLS)


KINDS: dict[str, Fill] = {
    "forward": _strong(FORWARD),
    "backward": _strong(BACKWARD),
    "optimizer": _strong(OPTIMIZER),
    "waits": Fill(Colour(WAITS, "#3d3226"), SOFT, FRAME),
    "moves": Fill(Colour(MOVES, "#70481b"), SOFT, FRAME, hatched=True),
    "lost": Fill(Colour("#ffffff00", "#ffffff00"), SOFT, FRAME, hatched=True),
    "blue": _strong(FILLS[0]),
    "brown": _strong(FILLS[1]),
    "green": _strong(FILLS[2]),
    "purple": _strong(FILLS[3]),
    "tint": Fill(AREAS[0], SOFT, FRAME),
    "tan": Fill(AREAS[1], SOFT, FRAME),
    "mint": Fill(AREAS[2], SOFT, FRAME),
    "paper": Fill(Colour("#ffffff", "#14181c"), SOFT, FRAME),
    "none": Fill(Colour("#ffffff00", "#ffffff00"), SOFT, FRAME),
}
