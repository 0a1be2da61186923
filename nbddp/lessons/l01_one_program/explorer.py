"""Lesson 01: two prints on every rank, and the order in which a terminal may show them."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Choice, Explorer, Slider
from nbddp.lessons.l01_one_program.figure import prints
from nbddp.lessons.l01_one_program.simulation import NOBODY, printing


def order() -> Explorer:
    """Lesson 01: two prints on every rank, and the order in which a terminal may show them."""
    return Explorer(
        lambda **chosen: prints(printing(**chosen)),
        (
            Slider("ranks", "ranks", 2, 4),
            Choice("slow", "slow rank", (("none", NOBODY), ("0", 0), ("1", 1), ("2", 2), ("3", 3))),
            Choice("barrier", "barrier after the work", (("no", False), ("yes", True))),
        ),
        (
            {"ranks": 2, "slow": NOBODY, "barrier": True},  # the simplest: two lines, then two lines
            {"ranks": 4, "slow": 1, "barrier": False},
        ),
    )
