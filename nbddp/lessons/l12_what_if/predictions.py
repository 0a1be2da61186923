"""Lesson 12's questions."""

from __future__ import annotations

from nbddp.lessons.framework.question import Question

QUESTIONS = (
    Question(
        "same_batch_on_64_nodes",
        "The step above exchanges 1.6 MB of gradients and computes for some hundred milliseconds. How much longer is "
        "it forecast to be on 64 nodes, with the same batch per rank?",
        options=("hardly longer", "about 6 times as long", "about 64 times as long"),
        came="hardly longer",
        because="The exchange takes a few milliseconds even on 64 nodes, most of them hidden behind backward.",
        seen=r"(?m)^ +64 +128 +\S+ m?s +\S+ [mµ]s +(9\d|100) %",
    ),
    Question(
        "grows_with_nodes",
        "More nodes, the same batch per rank: which part of a ring all-reduce grows without limit?",
        options=("the latencies", "the bytes that a rank sends", "both", "neither"),
        came="the latencies",
        because="There are 2(n − 1) messages one after another, but a rank never sends more than twice the buffer.",
    ),
    Question(
        "share_of_computing",
        "For what share of the step do the GPUs compute?",
        options=("15 %", "45 %", "75 %", "95 %"),
        came="45 %",
        because="They compute for 164 ms and wait for gradients for 198 ms.",
        explored=True,
        seen=r"164 ms computing, 198 ms waiting for gradients; efficiency 45 %",
    ),
    Question(
        "helps_most",
        "Which change raises that share most?",
        options=("half the latency", "ten times the parameters", "eight micro-batches per exchange"),
        came="eight micro-batches per exchange",
        because="They are eight times the computation for one exchange: 87 %.",
        explored=True,
    ),
    Question(
        "bytes_of_half",
        "How many bytes does the hook send?",
        came="100100",
        because="A float16 has two bytes.",
        seen=r"bytes sent: 100100 instead of 200200",
    ),
    Question(
        "hooked_gradients",
        "What gradients do the ranks have after backward?",
        options=(
            "the same on all ranks, and those of plain DDP",
            "the same on all ranks, but not those of plain DDP",
            "different ones on each rank",
        ),
        came="the same on all ranks, but not those of plain DDP",
        because="Every rank receives the same sum of rounded numbers.",
        seen=r"the same on all ranks: True[\s\S]*the same as before: False",
    ),
)
