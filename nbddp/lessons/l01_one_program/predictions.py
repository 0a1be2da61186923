"""Lesson 01's questions."""

from __future__ import annotations

from nbddp.lessons.framework.question import Question

QUESTIONS = (
    Question(
        "lines",
        "Four processes run the next cell. How many lines does it print?",
        came="4",
        because="Each process runs the print, with its own rank.",
        seen=r"rank 0 of 4\n.*rank 1 of 4\n.*rank 2 of 4\n.*rank 3 of 4",
    ),
    Question(
        "count_on_rank_2",
        "What does rank 2 print?",
        came="30",
        because="Rank 2 goes through the loop three times, and no other process changes its count.",
        seen=r"rank 2 │ 30",
    ),
    Question(
        "count_after_the_kernel",
        "What is count on the ranks now?",
        came="10, 20, 30 and 40",
        options=("the kernel's, on every rank", "10, 20, 30 and 40", "undefined: a NameError"),
        because="The kernel is another process. Its count is not theirs.",
        seen=r"(?s)10.*20.*30.*40",
    ),
    Question(
        "ranks_that_fail",
        "Which ranks fail?",
        came="rank 3",
        options=("none", "rank 3", "ranks 0–2", "all of them"),
        because="Rank 3 never assigned secret; that the others did does not help it.",
        seen=r"rank 3 raised NameError",
        fails=r"WorkerFailed: rank 3 raised NameError: name 'secret'",
    ),
    Question(
        "first_after",
        "One rank is slow and there is no barrier. Which line can be the last on the terminal?",
        came="any rank's after",
        options=("only the slow rank's after", "only the highest rank's after", "any rank's after"),
        because="A rank may take any time: only the order of each rank's own two lines is certain.",
        explored=True,
        seen=r"certain: each rank's before comes before its own after, nothing else",
    ),
    Question(
        "orders",
        "Four ranks, and a barrier after the work. In how many orders can the eight lines appear?",
        came="576",
        options=("24", "576", "2520", "40320"),
        because="4! orders of the first four lines times 4! of the last four. Without the barrier: 8! / 2⁴ = 2520.",
        explored=True,
    ),
    Question(
        "lines_of_the_sum",
        "How many lines does the next cell print in all?",
        came="5",
        because="Every rank prints its share, and rank 0 prints the sum as well.",
        seen=r"(?s)the sum of .* is 28.*my share was \[6, 7\]",
    ),
)
