"""Lesson 05's questions."""

from __future__ import annotations

from nbddp.lessons.framework.question import Question

QUESTIONS = (
    Question(
        "mean_of_four",
        "How does the mean of the four gradients compare with the gradient of one process with all 32 samples?",
        came="it is equal",
        options=("it is equal", "it is a quarter of it", "it is four times as large", "it is close, but not equal"),
        because="The mean of four means over equally many samples is the mean over all samples.",
        seen=r"mean of all (-?[\d.]+), one process with all the data \1\n",
    ),
    Question(
        "distance_without_exchange",
        "All ranks start equal and do not exchange gradients. What happens to the distance between them?",
        came="it grows, then stays about the same",
        options=("it stays 0", "it grows, then stays about the same", "it grows without end"),
        because="Each rank converges to the line that fits its own shard, and stays there.",
        explored=True,
        seen=r"start equal and drift apart",
    ),
    Question(
        "distance_from_own_starts",
        "Each rank starts with its own parameters, and gradients are averaged. What happens to the distance?",
        came="it stays as it was",
        options=("it falls to 0", "it stays as it was", "it grows"),
        because="All ranks take the same step, so the differences between them remain.",
        explored=True,
    ),
    Question(
        "summed_gradients",
        "All ranks start equal, and gradients are summed but not divided. What do you notice?",
        came="nothing: the ranks are equal and the loss falls",
        options=(
            "the loss rises",
            "the ranks drift apart",
            "nothing: the ranks are equal and the loss falls",
        ),
        because="A sum is a mean with a learning rate that is as many times larger as there are ranks.",
        explored=True,
    ),
    Question(
        "equal_after_the_hook",
        "Are the ranks' parameters equal after these five steps?",
        came="no",
        options=("yes", "no"),
        seen=r"net differs: 4 of 4 tensors",
    ),
    Question(
        "ddp_and_one_process",
        "Each rank makes its model with its own seed. How does DDP compare with one process from rank 0's seed?",
        came="equal, but for rounding",
        options=(
            "equal, but for rounding",
            "the mean of four separate trainings",
            "different on every rank",
        ),
        because="DDP broadcasts rank 0's parameters when it is constructed, and averages gradients in every backward.",
        seen=r"equal to one process: True",
    ),
)
