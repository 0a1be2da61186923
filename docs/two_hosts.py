"""Draws two-hosts.png: which processes a pool on two hosts has, and what joins them. `python -m docs.two_hosts`."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from nbddp.figures.palette import FILLS, FRAME, INK, MUTED, PAPER, RC, TINTS

Point = tuple[float, float]
WIDTH, HEIGHT = 10.0, 4.6  # inches; a unit of the axes is an inch


class Sheet:
    """A figure on which boxes and arrows are put by inches from its lower left corner."""

    def __init__(self) -> None:
        self.figure = Figure(figsize=(WIDTH, HEIGHT), facecolor=PAPER)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_xlim(0, WIDTH)
        self.axes.set_ylim(0, HEIGHT)
        self.axes.axis("off")

    def box(self, x: float, y: float, width: float, height: float, fill: str, words: str, ink: str = INK) -> None:
        shape = FancyBboxPatch((x, y), width, height, "round,pad=0,rounding_size=0.06", fc=fill, ec=MUTED, lw=0.8)
        self.axes.add_patch(shape)
        self.axes.text(x + width / 2, y + height / 2, words, ha="center", va="center", size=9, color=ink)

    def frame(self, x: float, y: float, width: float, height: float, title: str) -> None:
        shape = FancyBboxPatch((x, y), width, height, "round,pad=0,rounding_size=0.1", fc=FRAME, ec=MUTED, lw=1.0)
        self.axes.add_patch(shape)
        self.axes.text(x + 0.12, y + height - 0.2, title, ha="left", va="center", size=10, weight="bold", color=INK)

    def arrow(self, start: Point, end: Point, color: str, style: str, bend: float = 0.0) -> None:
        self.axes.add_patch(
            FancyArrowPatch(
                start, end, arrowstyle="<|-|>", mutation_scale=9, lw=1.5, ls=style, color=color,
                connectionstyle=f"arc3,rad={bend}", shrinkA=1, shrinkB=1,
            )
        )  # fmt: skip

    def words(self, x: float, y: float, text: str, color: str, where: str = "center") -> None:
        self.axes.text(x, y, text, ha=where, va="center", size=8.6, color=color,
                       bbox={"fc": PAPER, "ec": "none", "pad": 0.4})  # fmt: skip


def draw() -> Figure:
    """The picture, with the words of README's table."""
    sheet = Sheet()
    sheet.frame(0.15, 0.95, 2.6, 3.5, "the notebook's machine")
    sheet.box(0.4, 3.35, 2.1, 0.62, TINTS[0], "kernel\n%%ddp, reports, Stop")
    sheet.box(0.4, 2.3, 2.1, 0.5, PAPER, "node agent")
    sheet.box(0.4, 1.2, 2.1, 0.62, PAPER, "controller\n(ipyparallel)")
    for number, (name, y) in enumerate((("nodea", 2.8), ("nodeb", 0.95))):
        sheet.frame(5.0, y, 4.85, 1.65, name)
        sheet.box(5.15, y + 0.92, 1.15, 0.42, PAPER, "node agent")
        sheet.box(8.85, y + 0.45, 0.85, 0.72, TINTS[3], "store\nand gate" if number == 0 else "gate")
        for i in range(2):
            sheet.box(6.55 + 1.1 * i, y + 0.45, 0.95, 0.72, FILLS[number], f"rank {2 * number + i}", PAPER)
    sheet.arrow((2.5, 3.72), (5.15, 3.95), FILLS[1], "-")
    sheet.arrow((2.5, 3.5), (5.15, 2.1), FILLS[1], "-")
    sheet.words(3.85, 4.05, "ssh, srun, mpiexec or a command", FILLS[1])
    sheet.arrow((2.5, 1.72), (6.55, 3.35), FILLS[0], "--")
    sheet.arrow((2.5, 1.4), (6.55, 1.55), FILLS[0], "--", 0.08)
    sheet.words(3.85, 1.08, "requests, output, values:\nCurveZMQ", FILLS[0])
    sheet.arrow((9.27, 3.25), (9.27, 2.12), FILLS[3], "-")
    sheet.words(9.2, 2.68, "signed", FILLS[3], "right")
    sheet.arrow((7.57, 3.25), (7.57, 2.12), FILLS[2], "-")
    sheet.words(7.5, 2.68, "gloo, NCCL", FILLS[2], "right")
    sheet.words(
        5.0, 0.5, "An agent starts on each host. Workers are forked from it and end with it. Open between machines: "
        "ssh (or what --via says),\nthe controller's ports, the gate of the store, which answers only signed "
        "connections, and the ports of gloo or NCCL.", MUTED,
    )  # fmt: skip
    return sheet.figure


if __name__ == "__main__":
    with mpl.rc_context(RC):
        draw().savefig(Path(__file__).parent / "two-hosts.png", dpi=192)
