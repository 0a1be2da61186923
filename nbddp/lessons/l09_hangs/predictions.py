"""Lesson 09's questions."""

from __future__ import annotations

from nbddp.lessons.framework.question import Question
from nbddp.lessons.l09_hangs.simulation import ALONE, CROSSED, MAXIMUM, SHAPES

QUESTIONS = (
    Question(
        "ranks_that_finish",
        "Which ranks reach the end of the next cell?",
        options=("all ranks", "ranks 0, 1 and 3", "rank 2", "none"),
        came="rank 2",
        because="The others wait in all_reduce for rank 2, which never calls it.",
        seen=r"ranks 0–1, 3 wait in all_reduce #1 .*; rank 2 has finished the cell",
        fails=r"RunHung: deadlock: .*all_reduce #1",
    ),
    Question(
        "end_with_a_slow_rank",
        "How does the next cell end, with --hang-after 1?",
        options=("with a deadlock report after one second", "with an error on rank 2", "normally, after three seconds"),
        came="normally, after three seconds",
        because="Rank 2 was running, so it could still arrive.",
        seen=r"ranks 0–3 Out │ 4",
    ),
    Question(
        "waits_for_whom",
        "Who waits for whom?",
        options=("rank 1 waits for the others", "the others wait for rank 1", "every rank waits for another one"),
        came="every rank waits for another one",
        because="Rank 1 waits in barrier for the others, and they wait in all_reduce for rank 1.",
        seen=r"collective #1 differs between ranks: all_reduce on ranks 0, 2–3 .*, barrier on rank 1",
        fails=r"RunHung: deadlock: collective #1 differs",
    ),
    Question(
        "waits_when_rank_0_is_alone",
        f"Which ranks wait forever in {ALONE!r}?",
        options=("rank 0", "all ranks but rank 0", "all ranks"),
        came="rank 0",
        because="The others have no call left in which they would wait.",
        explored=True,
    ),
    Question(
        "waits_in_the_ring",
        f"Which ranks wait forever in {CROSSED!r}?",
        options=("none", "rank 0", "all ranks but rank 0", "all ranks"),
        came="all ranks",
        because="No rank sends before it has received.",
        explored=True,
    ),
    Question(
        "wrong_but_finishes",
        "Which program finishes although it is wrong?",
        options=(ALONE, SHAPES, MAXIMUM, CROSSED),
        came=MAXIMUM,
        because="The ranks meet in the same collective, and nothing compares the reduce operations.",
        explored=True,
    ),
    Question(
        "numbers_with_one_max",
        "What does the cell do?",
        options=(
            "it hangs",
            "it raises an error on rank 3",
            "rank 3 gets other numbers than ranks 0–2",
            "all ranks get the same wrong numbers",
        ),
        came="all ranks get the same wrong numbers",
        because="Each piece of the tensor was reduced by several ranks in turn, and then sent to all.",
        seen=r"ranks 0–3 Out │ \[6\.0, 10\.0, 12\.0, 15\.0,",
    ),
    Question(
        "debug_mode_and_one_max",
        "What does the debug mode report?",
        options=("nothing", "that the reduce operations differ", "that the results differ"),
        came="nothing",
        because="It compares shapes and types, but not the reduce operation.",
        seen=r"^\s*ranks 0–3 Out │ \[.*\]\s*$",
    ),
    Question(
        "ranks_with_an_error",
        "Which ranks raise an error?",
        options=("rank 3", "ranks 0–2", "all ranks"),
        came="all ranks",
        because="The ranks compare their calls before they make them.",
        seen=r"ranks 0–3 │ CollectiveMismatch",
    ),
)
