"""Lesson 03's questions."""

from __future__ import annotations

from nbddp.lessons.framework.question import Question

QUESTIONS = (
    Question(
        "variables_that_differ",
        "Four processes on two nodes. Which of MASTER_ADDR, WORLD_SIZE and RANK differ from process to process?",
        came="only RANK",
        options=("only RANK", "RANK and MASTER_ADDR", "RANK and WORLD_SIZE", "all three"),
        because="All processes share one meeting point and one world size. Only the rank tells them apart.",
        seen=r"(?s)=localhost WORLD_SIZE=4 RANK=0.*=localhost WORLD_SIZE=4 RANK=3",
    ),
    Question(
        "late_key",
        "Rank 3 sets its key a second after the others. What do ranks 0–2 find?",
        came="all four keys",
        options=("their own three keys", "all four keys", "nothing: get raises KeyError for rank 3's key"),
        because="get of rank 3's key waits until rank 3 has set it.",
        seen=r"ranks 0–3 │ found: \[0, 1, 2, 3\]",
    ),
    Question(
        "backends_from_pip",
        "Which of gloo and MPI does a torch from pip install have?",
        came="gloo only",
        options=("both", "gloo only", "MPI only", "neither"),
        because="MPI must be there when torch is built, so only a torch built from source has it.",
        seen=r"gloo: True, MPI: False",
    ),
    Question(
        "three_of_four",
        "Three of four processes have started. How many of them return from init_process_group?",
        came="0",
        because="Each waits until WORLD_SIZE processes are there.",
        explored=True,
    ),
    Question(
        "localhost_everywhere",
        "Two nodes, and MASTER_ADDR is localhost for all four processes. Which return from init_process_group?",
        came="none",
        options=("all", "ranks 0 and 1", "none"),
        because="Ranks 2 and 3 find no store on their own node, and ranks 0 and 1 wait for them.",
        explored=True,
        seen=r"all 4 have started but cannot meet",
    ),
    Question(
        "role_rank",
        "On how many of the four processes does ROLE_RANK differ from RANK?",
        came="0",
        because="All four have the same role, default, so they are numbered in it as in the job.",
        seen=r"(?s)RANK 0 of 4.*ROLE_RANK 0 of 4.*RANK 3 of 4.*ROLE_RANK 3 of 4",
    ),
    Question(
        "local_rank_differs",
        "And on how many does LOCAL_RANK differ from RANK?",
        came="2",
        because="Ranks 2 and 3 are local ranks 0 and 1 of node 1.",
        seen=r"(?s)RANK 1 of 4 · LOCAL_RANK 1 of 2.*RANK 2 of 4 · LOCAL_RANK 0 of 2.*RANK 3 of 4 · LOCAL_RANK 1 of 2",
    ),
)
