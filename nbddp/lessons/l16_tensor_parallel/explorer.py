"""Lesson 16: ranks on a mesh of data × tensor, and over which links each side exchanges."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Choice, Explorer
from nbddp.lessons.l16_tensor_parallel.figure import draw_mesh
from nbddp.lessons.l16_tensor_parallel.simulation import DATA, TENSOR, build_mesh


def mesh() -> Explorer:
    """Lesson 16: ranks on a mesh of data × tensor, and over which links each side exchanges."""
    return Explorer(
        lambda **chosen: draw_mesh(build_mesh(**chosen)),
        (
            Choice("nodes", "nodes", (1, 2, 4)),
            Choice("gpus", "GPUs per node", (2, 4, 8)),
            Choice("tensor", "tensor ranks", (1, 2, 4, 8)),
            Choice("inner", "side by side", (TENSOR, DATA)),
        ),
        (
            {"nodes": 2, "gpus": 2, "tensor": 1, "inner": TENSOR},
            {"nodes": 2, "gpus": 2, "tensor": 2, "inner": TENSOR},
        ),
    )
