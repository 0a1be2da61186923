"""Lesson 02: nodes, processes and GPUs, and what each rank gets by its local or by its global rank."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Choice, Explorer, Slider
from nbddp.lessons.l02_ranks_and_devices.figure import draw_placement
from nbddp.lessons.l02_ranks_and_devices.simulation import GLOBAL, LOCAL, simulate_layout


def layout() -> Explorer:
    """Lesson 02: nodes, processes and GPUs, and what each rank gets by its local or by its global rank."""
    return Explorer(
        lambda **chosen: draw_placement(simulate_layout(**chosen)),
        (
            Slider("nodes", "nodes", 1, 4),
            Slider("gpus", "GPUs per node", 1, 8),
            Slider("per_process", "GPUs per process", 1, 8),
            Choice("by", "device taken by", (LOCAL, GLOBAL)),
        ),
        (
            {"nodes": 1, "gpus": 4, "per_process": 1, "by": LOCAL},
            {"nodes": 2, "gpus": 4, "per_process": 1, "by": GLOBAL},
        ),
    )
