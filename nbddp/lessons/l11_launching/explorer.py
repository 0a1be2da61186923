"""Lesson 11: a layout, and what starts it: the torchrun line of each node, and a batch script for Slurm."""

from __future__ import annotations

from nbddp.capabilities.export.torchrun_line import C10D, SRUN, STATIC
from nbddp.lessons.framework.explorer import Choice, Explorer, Slider
from nbddp.lessons.l11_launching.figure import draw_launching
from nbddp.lessons.l11_launching.simulation import GLOO, NCCL, plan_launch


def launch() -> Explorer:
    """Lesson 11: a layout, and what starts it: the torchrun line of each node, and a batch script for Slurm."""
    return Explorer(
        lambda **chosen: draw_launching(plan_launch(**chosen)),
        (
            Slider("nodes", "nodes", 1, 4),
            Slider("processes", "processes per node", 1, 8),
            Choice("backend", "backend", (NCCL, GLOO)),
            Choice("rendezvous", "rendezvous", (C10D, STATIC, SRUN)),
        ),
        (
            {"nodes": 1, "processes": 2, "backend": GLOO, "rendezvous": C10D},
            {"nodes": 2, "processes": 4, "backend": NCCL, "rendezvous": STATIC},
        ),
    )
