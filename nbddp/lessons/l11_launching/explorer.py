"""Lesson 11: a layout and its commands: the torchrun line of each node, and a batch script for Slurm."""

from __future__ import annotations

from nbddp.capabilities.export.torchrun_line import C10D, SRUN, STATIC
from nbddp.lessons.framework.explorer import Choice, Explorer, Slider
from nbddp.lessons.l11_launching.figure import draw_launching
from nbddp.lessons.l11_launching.simulation import GLOO, NCCL, plan_launch

launch = Explorer(
    __doc__,
    plan_launch,
    draw_launching,
    Slider("nodes", "nodes", 1, 4, at=(1, 2)),
    Slider("processes", "processes per node", 1, 8, at=(2, 4)),
    Choice("backend", "backend", (NCCL, GLOO), at=(GLOO, NCCL)),
    Choice("rendezvous", "rendezvous", (C10D, STATIC, SRUN), at=(C10D, STATIC)),
    begins={"nodes": 2},
)
