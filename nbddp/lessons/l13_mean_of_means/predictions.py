"""Lesson 13's questions."""

from __future__ import annotations

from nbddp.lessons.framework.question import Question

QUESTIONS = (
    Question(
        "token_weights",
        "Each rank takes the mean over its own batch, and DDP averages. How does the one token of rank 0 compare with "
        "a token of rank 3, which has six?",
        options=(
            "both count the same",
            "it counts 6 times as much",
            "it counts a sixth as much",
            "it counts 4 times as much",
        ),
        came="it counts 6 times as much",
        because="Each rank has weight 1/4 in DDP's average, and a rank's tokens share that: 1/4 against 1/24.",
        seen=r"tokens here: 1, each counts 1/4;[\s\S]*tokens here: 6, each counts 1/24;",
    ),
    Question(
        "after_no_sync",
        "What does DDP exchange in the first backward() after no_sync?",
        options=(
            "the gradients of that micro-batch",
            "the sum of all gradients since the last exchange",
            "the gradients of the micro-batches inside no_sync",
        ),
        came="the sum of all gradients since the last exchange",
        because="DDP fills its buckets from .grad, to which every backward() has added.",
        seen=r"afterwards +\[(0\.125(, )?){8}\]",
    ),
    Question(
        "own_tokens",
        "Each rank divides its summed losses by its own number of tokens, and DDP averages. When does every token of "
        "the step count the same?",
        options=(
            "always",
            "if all ranks have the same number of tokens",
            "only if all micro-batches have the same number of tokens",
            "never",
        ),
        came="if all ranks have the same number of tokens",
        because="The divisor is right within a rank, however its micro-batches differ. DDP gives all ranks "
        "the same weight, so their numbers of tokens must be equal.",
        explored=True,
    ),
    Question(
        "larger_batch",
        "Four ranks use 32 samples per step instead of 8, and a quarter of the steps. With which learning rate does "
        "the loss come closest to that of one process with 0.025?",
        options=("0.025", "0.05", "0.1"),
        came="0.1",
        because="A quarter of the steps, each four times as long: the linear scaling rule.",
        seen=r"1 × 8 .* loss 0\.11\n[\s\S]*rate +0\.1: loss 0\.12",
    ),
    Question(
        "warm_up",
        "16 times the batch and 16 times the learning rate, in 32 steps. Is the final loss lower if the first 8 "
        "steps are shorter?",
        options=("yes", "no, it is higher", "it makes no difference"),
        came="yes",
        because="At the beginning the gradient changes too fast for a step of that length: the loss rises at once.",
        seen=r"at once: .* in the end 0\.59\n[\s\S]*warm-up: .* in the end 0\.20",
    ),
)
