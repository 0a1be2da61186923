"""Lesson 16: ranks on a mesh of data × tensor, and over which links each side exchanges."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Choice, Explorer
from nbddp.lessons.l16_tensor_parallel.figure import draw_mesh
from nbddp.lessons.l16_tensor_parallel.simulation import DATA, TENSOR, build_mesh

mesh = Explorer(
    __doc__,
    build_mesh,
    draw_mesh,
    Choice("nodes", "nodes", (1, 2, 4), at=(2, 2)),
    Choice("gpus", "GPUs per node", (2, 4, 8), at=(2, 2)),
    Choice("tensor", "tensor ranks", (1, 2, 4, 8), at=(1, 2)),
    Choice("inner", "side by side", (TENSOR, DATA), at=(TENSOR, TENSOR)),
    begins={"gpus": 4, "tensor": 4},
)
