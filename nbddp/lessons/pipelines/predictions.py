"""Lesson 17's questions."""

from __future__ import annotations

from nbddp.lessons.question import Question

QUESTIONS = (
    Question(
        "sent_back",
        "The loss is known on rank 3. What does rank 3 send back to rank 2, so that rank 2 can run its backward pass?",
        options=(
            "the loss",
            "the gradients of rank 3's parameters",
            "the gradient of the loss with respect to rank 3's input",
            "nothing: autograd goes back through recv",
        ),
        came="the gradient of the loss with respect to rank 3's input",
        because="Rank 3's input is rank 2's output, and y.backward(gradient) goes on from there. It has the shape of "
        "the activations.",
        seen=r"ranks 1–3 │ .*sent back \(24, 16\)",
    ),
    Question(
        "one_micro_batch",
        "One batch goes through four stages and back. For which share of the time is a stage idle?",
        options=("0 %", "25 %", "50 %", "75 %"),
        came="75 %",
        because="While one of the four stages works, the other three wait.",
        explored=True,
    ),
    Question(
        "a_quarter",
        "Now the batch is cut. How many micro-batches does it take, at the least, until four stages are idle for no "
        "more than a quarter of the time?",
        came="9",
        because="(p − 1)/(m + p − 1) is 3/12 for m = 9.",
        explored=True,
    ),
    Question(
        "what_1f1b_saves",
        "GPipe does all forward passes, then all backward passes. 1F1B starts each backward pass as early as possible. "
        "What does 1F1B have less of?",
        options=("idle time", "activations in memory", "both", "messages"),
        came="activations in memory",
        because="The bubble is the same. A stage holds at most as many micro-batches as there are stages from it to "
        "the end, however many there are in all.",
        explored=True,
    ),
    Question(
        "blocking_1f1b",
        "The same program works off the lists of 1F1B, with send and recv as before. What happens?",
        options=("it runs, as under GPipe", "it deadlocks", "it runs, and some gradients are wrong"),
        came="it deadlocks",
        because="Rank 0 sends an activation to rank 1 while rank 1 sends a gradient to rank 0, and neither receives.",
        seen=r"(?i)deadlock",
        fails=r"RunHung: deadlock",
    ),
)
