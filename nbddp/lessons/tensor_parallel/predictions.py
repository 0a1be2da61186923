"""Lesson 16's questions."""

from __future__ import annotations

from nbddp.lessons.question import Question

QUESTIONS = (
    Question(
        "sum_or_side_by_side",
        "Two layers: the first is split by columns, the second by rows. What makes the whole output of the second?",
        options=("an all-gather: parts side by side", "an all-reduce: parts added up", "nothing, each rank has it"),
        came="an all-reduce: parts added up",
        because="Each rank has multiplied some of the hidden values only, so it has one part of every sum.",
        seen=r"added up they are the output: True",
    ),
    Question(
        "whose_gradient",
        "All ranks compute the same loss from the whole output. Which gradient is wrong if nothing is exchanged in "
        "backward?",
        options=("that of x", "that of up", "that of down", "none of them"),
        came="that of x",
        because="Every rank's columns used x, and each rank knows the part of its own columns alone.",
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
)
