"""Lesson 02: nodes, processes and GPUs, and the device of each rank by its local or by its global rank."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Choice, Explorer, Slider
from nbddp.lessons.l02_ranks_and_devices.figure import draw_placement
from nbddp.lessons.l02_ranks_and_devices.simulation import GLOBAL, LOCAL, simulate_layout

layout = Explorer(
    __doc__,
    simulate_layout,
    draw_placement,
    Slider("nodes", "nodes", 1, 4, at=(1, 2)),
    Slider("gpus", "GPUs per node", 1, 8, at=(4, 4)),
    Slider("per_process", "GPUs per process", 1, 8, at=(1, 1)),
    Choice("by", "device taken by", (LOCAL, GLOBAL), at=(LOCAL, GLOBAL)),
    begins={"nodes": 2},
)
