"""Lesson 10's questions."""

from __future__ import annotations

from nbddp.lessons.framework.question import Question

QUESTIONS = (
    Question(
        "ranks_that_keep_names",
        "On which ranks does the name `kept` exist in the second attempt?",
        options=("all ranks", "all ranks but rank 2", "no rank"),
        came="no rank",
        because="A restart ends the processes of all ranks and starts new ones.",
        seen=r"ranks 0–3 │ attempt 1 · the earlier name is gone",
    ),
    Question(
        "better_interval",
        "Which interval between checkpoints is better then?",
        options=("four steps", "eight steps, with half as many files to write", "both lose the same"),
        came="four steps",
        because="An attempt of seven steps never reaches a checkpoint after eight.",
        explored=True,
        seen=r"steps per checkpoint: 8 [\s\S]*no attempt reaches a checkpoint",
    ),
    Question(
        "second_attempt_starts",
        "With which step does the second attempt begin? (The first step is 0.)",
        came="5",
        because="The last checkpoint was written after step 4.",
        seen=r"attempt 1: begins with step 5",
    ),
    Question(
        "steps_done_twice",
        "Which steps are done twice?",
        options=("none", "4 to 6", "5 and 6", "5 to 7"),
        came="5 and 6",
        because="They were done after the checkpoint and before the failure.",
        seen=r"attempt 1: begins with step 5",
    ),
)
