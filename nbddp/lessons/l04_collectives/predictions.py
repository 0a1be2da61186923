"""Lesson 04's questions."""

from __future__ import annotations

from nbddp.lessons.framework.question import Question

QUESTIONS = (
    Question(
        "received_by_rank_2",
        "Rank 0 sends its number to rank 2. What does rank 2 print?",
        came="1",
        because="recv writes rank 0's number into got.",
        seen=r"rank 2 +│ has 1\n",
    ),
    Question(
        "broadcast_on_rank_3",
        "What does rank 3 have after the broadcast?",
        came="1",
        because="Every rank gets rank 0's number.",
        seen=r"rank 3 +│ broadcast 1,",
    ),
    Question(
        "reduce_on_rank_3",
        "And what does rank 3 have after the reduce?",
        came="1000",
        because="Only rank 0 gets the sum, 1111. The others keep what they had.",
        seen=r"rank 3 +│ broadcast 1, reduce 1000",
    ),
    Question(
        "all_to_all_on_rank_1",
        "What does rank 1 have after the all-to-all?",
        came="1, 11, 21, 31",
        options=("10, 11, 12, 13", "1, 11, 21, 31", "0, 10, 20, 30", "only 11"),
        because="It gets piece 1 of every rank.",
        seen=r"rank 1 +│ all-to-all \[1, 11, 21, 31\]",
    ),
    Question(
        "reduce_scatter_on_rank_1",
        "What does rank 1 have after the reduce-scatter?",
        came="64",
        because="It gets the sum of every rank's piece 1: 1 + 11 + 21 + 31.",
        seen=r"rank 1 .* reduce-scatter 64 ",
    ),
    Question(
        "ranks_with_all_after_gather",
        "Four ranks gather to rank 0. How many ranks have all four tensors then?",
        came="1",
        because="gather leaves them on rank 0 only; all-gather leaves them on every rank.",
        explored=True,
    ),
    Question(
        "reduce_scatter_then_all_gather",
        "A reduce-scatter, then an all-gather of its results. Which collective leaves the same on every rank?",
        came="all-reduce",
        options=("all-to-all", "all-reduce", "reduce", "gather"),
        because="The reduce-scatter sums each piece on one rank, and the all-gather gives every rank all sums.",
        explored=True,
    ),
    Question(
        "all_send_first",
        "Every rank sends first, then receives. What happens?",
        came="all ranks wait for each other",
        options=(
            "every rank gets its left neighbour's number",
            "all ranks wait for each other",
            "only rank 0 waits",
            "one rank raises an exception at once",
        ),
        seen=r"deadlock",
        fails=r"RunHung: deadlock",
    ),
    Question(
        "passed_to_rank_0",
        "Each rank passes its number to the right. What does rank 0 have at the end?",
        came="1000",
        because="Rank 0's left neighbour is rank 3.",
        seen=r"rank 0 +│ has 1000\n",
    ),
    Question(
        "steps_to_the_first_chunk",
        "Four ranks: after how many steps is the first chunk complete?",
        came="3",
        because="Each step adds the part of one more rank, and a chunk begins with one part.",
        explored=True,
    ),
    Question(
        "chunks_short_of_a_part",
        "Four ranks have 16 chunks. The adding stops one step early. How many chunks lack a part at the end?",
        came="16",
        because="The second half copies the incomplete chunks to all ranks. The ranks agree, and all are wrong.",
        explored=True,
        seen=r"wrong: 16 of 16 chunks are incomplete",
    ),
    Question(
        "sent_in_the_ring",
        "Gradients of 400 MB on 64 ranks. How much does each rank send in the ring?",
        came="about 800 MB",
        options=("about 12 MB", "about 400 MB", "about 800 MB", "about 25 GB"),
        because="2 · 63 chunks of 400 / 64 MB.",
        seen=r"64 +788 MB",
    ),
    Question(
        "sent_by_rank_0",
        "And how much does rank 0 send in a reduce followed by a broadcast by hand?",
        came="about 25 GB",
        options=("about 12 MB", "about 400 MB", "about 800 MB", "about 25 GB"),
        because="It sends 400 MB to each of 63 ranks.",
        seen=r"64 .* 25200 MB",
    ),
)
