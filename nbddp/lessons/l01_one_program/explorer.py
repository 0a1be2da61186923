"""Lesson 01: two prints on every rank, and the order in which a terminal may show them."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Choice, Explorer, Slider
from nbddp.lessons.l01_one_program.figure import prints
from nbddp.lessons.l01_one_program.simulation import NOBODY, printing

order = Explorer(
    __doc__,
    printing,
    prints,
    Slider("ranks", "ranks", 2, 4, at=(2, 4)),
    Choice("slow", "slow rank", (("none", NOBODY), ("0", 0), ("1", 1), ("2", 2), ("3", 3)), at=(NOBODY, 1)),
    Choice("barrier", "barrier after the work", (("no", False), ("yes", True)), at=(True, False)),
)
