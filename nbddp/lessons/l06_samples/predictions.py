"""Lesson 06's questions."""

from __future__ import annotations

from nbddp.lessons.framework.question import Question

QUESTIONS = (
    Question(
        "samples_per_rank",
        "Ten samples, four ranks, padding: how many samples does each rank read?",
        came="3",
        because="Ten is rounded up to twelve, the next multiple of four.",
        seen=r"drop_last=False \[0, 4, 8\]",
    ),
    Question(
        "samples_dropped",
        "With drop_last=True: how many of the ten samples does no rank read?",
        came="2",
        because="Ten is rounded down to eight. Samples 8 and 9 are dropped.",
        seen=r"(?s)drop_last=True  \[0, 4\].*drop_last=True  \[3, 7\]",
    ),
    Question(
        "second_epoch_without_set_epoch",
        "Without set_epoch, what does a rank read in the second epoch?",
        came="the same samples in the same order",
        options=(
            "the same samples in the same order",
            "the same samples in another order",
            "other samples",
        ),
        because="The seed of the shuffle is seed + epoch, and the sampler's epoch stays 0.",
        explored=True,
        seen=r"without set_epoch every epoch repeats epoch 0: the same samples, in the same order",
    ),
    Question(
        "samples_never_read",
        "Ten samples, four ranks, drop_last=True, no set_epoch: how many samples are never read in any epoch?",
        came="2",
        because="Every epoch drops the same two.",
        explored=True,
        seen=r"samples 2, 6 are never read",
    ),
    Question(
        "read_by_rank_2_in_epoch_1",
        "Ten samples, four ranks, padding: what does rank 2 read in epoch 1 after set_epoch(1)?",
        came="1, 9, 5",
        options=("7, 0, 4", "2, 6", "1, 9, 5", "2, 3, 6"),
        seen=r"rank 2 +│ .*\n +│ epoch 1 after set_epoch\(1\): \[1, 9, 5\]",
    ),
    Question(
        "accuracy_of_four_ranks",
        "What accuracy do four ranks measure?",
        came="0.667",
        options=("0.800", "0.833", "0.667", "0.600"),
        because="The two wrong samples are counted twice: 8 of 12.",
        seen=r"world size 4: 0\.667",
    ),
    Question(
        "world_sizes_with_the_right_accuracy",
        "Which of the world sizes 1 to 8 measure the right accuracy, 0.800?",
        came="1, 2 and 5",
        options=("all", "1 only", "1, 2, 4 and 8", "1, 2 and 5"),
        because="Ten samples divide evenly among them, so nothing is padded.",
        seen=r"1: 0\.8.*\n.*2: 0\.8.*\n.*3: 0\.6.*\n.*4: 0\.6.*\n.*5: 0\.8.*\n.*6: 0\.6.*\n.*7: 0\.7.*\n.*8: 0\.7",
    ),
    Question(
        "stream_on_rank_1",
        "What does rank 1 read from the stream?",
        came="1, 5, 9, 13, 17",
        options=("0, 1, 2, … 19", "1, 5, 9, 13, 17", "5, 6, 7, 8, 9", "1, 3, 5, … 19"),
        because="It starts at 1 and skips what the other three ranks read.",
        seen=r"rank 1 +│ \[1, 5, 9, 13, 17\]",
    ),
)
