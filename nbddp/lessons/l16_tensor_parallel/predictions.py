"""Lesson 16's questions."""

from __future__ import annotations

from nbddp.lessons.framework.question import Question

QUESTIONS = (
    Question(
        "sum_or_side_by_side",
        "Two layers: the first is split by columns, the second by rows. How do the ranks get the whole output "
        "of the second?",
        options=("an all-gather: parts side by side", "an all-reduce: parts added up", "nothing, each rank has it"),
        came="an all-reduce: parts added up",
        because="Each rank has multiplied only some of the hidden values, so it has one part of every sum.",
        seen=r"added up they are the output: True",
    ),
    Question(
        "whose_gradient",
        "All ranks compute the same loss from the whole output. Which gradient is wrong if nothing is exchanged in "
        "backward?",
        options=("that of x", "that of up", "that of down", "none of them"),
        came="that of x",
        because="Every rank's columns used x, and each rank has only the part from its own columns.",
        seen=r"right without any exchange in backward: up True, down True, x False",
    ),
    Question(
        "same_samples",
        "A 2 × 2 mesh, data × tensor, tensor ranks side by side. Which ranks see the same samples as rank 2?",
        options=("rank 0", "rank 1", "rank 3"),
        came="rank 3",
        because="Ranks 2 and 3 are one tensor group: same samples, different shards.",
        explored=True,
        seen=r"tensor groups \(same samples, other shards\): 0, 1 · 2, 3",
    ),
    Question(
        "kept_of_up",
        "On the 2 × 2 mesh, up has the shape (32, 16). Tensor parallelism splits it, then FSDP shards each part. What "
        "shape does a rank keep?",
        options=("(32, 16)", "(16, 16)", "(16, 8)", "(8, 16)"),
        came="(8, 16)",
        because="The tensor group splits the 32 rows into halves, and the data group shards each half by rows again.",
        seen=r"up, down cut to \(16, 16\) \(16, 16\) · of up kept \(8, 16\)",
    ),
)
