"""Lesson 03: four processes on two nodes look for each other; who has arrived, and who waits for whom."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Choice, Explorer, Steps
from nbddp.lessons.l03_finding_each_other.figure import arrivals
from nbddp.lessons.l03_finding_each_other.simulation import FAULTS, NOTHING, OWN, arrival

arrived = Explorer(
    __doc__,
    arrival,
    arrivals,
    Steps("arrived", "processes started", 1, 4, at=(4, 4)),
    Choice("last_first", "who starts first", (("node 0", False), ("the last node", True)), at=(False, False)),
    Choice("fault", "mistake", FAULTS, at=(NOTHING, OWN)),
)
