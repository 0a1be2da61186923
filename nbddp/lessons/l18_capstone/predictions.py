"""Lesson 18's questions."""

from __future__ import annotations

from nbddp.lessons.framework.question import Question

QUESTIONS = (
    Question(
        "forgotten_optimizer",
        "A checkpoint has weights and step, but not the optimizer's state. A rank fails, and training continues. Which "
        "line of the rubric finds that?",
        options=("warm-up", "evaluation", "checkpoint", "none: the loss falls as before"),
        came="checkpoint",
        because="AdamW begins again with empty averages, so it takes other steps than without the failure. The loss "
        "still falls.",
        seen=r"not met: checkpoint$",
        explored=True,
    ),
    Question(
        "found_on_one_rank",
        "You try a program with each of the eight mistakes on one rank, with a failure in step 35. How many mistakes "
        "does the rubric find?",
        came="3",
        because="Both mistakes in the checkpoint, and the second warm-up, need a restart but no second rank. The other "
        "five change nothing on one rank.",
        explored=True,
    ),
    Question(
        "lines_of_losses",
        'Two ranks take 60 steps. How many lines that begin with "step" do they print, if the rubric is met?',
        came="6",
        because="A line after every 10 steps, and only rank 0 prints.",
        seen=r"(?s)(step \d+: loss.*){6}",
    ),
    Question(
        "safe_steps",
        "A checkpoint is written after every 10 steps, and rank 1 is killed in step 35. How many steps are safe?",
        came="30",
        because="Steps 30 to 34 were done after the last checkpoint.",
        seen=r"exit status 1 · step 10 step 20 step 30$",
    ),
    Question(
        "goes_on",
        "The program starts again in the same folder. Which is the first loss that it prints?",
        options=("that after step 10", "that after step 31", "that after step 40"),
        came="that after step 40",
        because="It continues at step 30, and the next line is due after 40 steps.",
        seen=r"exit status 0 · step 40 step 50 step 60 test",
    ),
    Question(
        "buckets_of_a_tenth",
        "The gradients take 404 KiB, and a bucket closes when it has 0.1 MiB or more. How many buckets are there?",
        came="4",
        because="0.1 MiB are 102 KiB. Each bucket also takes the gradient that brings it over the limit, so three have "
        "about 130 KiB, and the last one has the rest.",
        seen=r"4 buckets, 404 KiB",
    ),
)
