"""Lesson 02's questions."""

from __future__ import annotations

from nbddp.lessons.framework.question import Question

QUESTIONS = (
    Question(
        "local_rank",
        "What is rank 2's local rank?",
        came="0",
        because="It is the first process on node 1: local ranks begin again at 0 on every node.",
        seen=r"rank 2 of 4 · local rank 0 of 2 on node 1",
    ),
    Question(
        "global_rank_as_device",
        "Two nodes with four GPUs each, one process per GPU, and every rank takes cuda:RANK. Which ranks start?",
        options=("all of them", "only rank 0", "ranks 0–3", "none of them"),
        came="ranks 0–3",
        because="Each node has cuda:0 to cuda:3 only. Ranks 4–7 ask for GPUs that node 1 does not have.",
        explored=True,
        seen=r"cuda:RANK: ranks 4–7 cannot start",
    ),
    Question(
        "own_gpu",
        "One process per GPU on the same two nodes. Which GPU of its node does rank 6 own?",
        came="2",
        because="Rank 6 is local rank 2 on node 1.",
        seen=r"rank 6 \(local rank 2\) on GPU 2",
    ),
    Question(
        "world_size",
        "The same two nodes with two GPUs per process. What is the world size?",
        came="4",
        because="The world size counts processes, not GPUs.",
        seen=r"world size 4",
    ),
)
