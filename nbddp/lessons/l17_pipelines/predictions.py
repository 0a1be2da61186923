"""Lesson 17's questions."""

from __future__ import annotations

from nbddp.lessons.framework.question import Question

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
        because="Rank 3's input is rank 2's output, and y.backward(gradient) continues from there. It has the shape of "
        "the activations.",
        seen=r"ranks 1–3 │ .*sent back \(24, 16\)",
    ),
    Question(
        "one_micro_batch",
        "One batch goes through four stages and back. For what share of the time is a stage idle?",
        options=("0 %", "25 %", "50 %", "75 %"),
        came="75 %",
        because="While one of the four stages works, the other three wait.",
        explored=True,
    ),
    Question(
        "a_quarter",
        "Now the batch is split. What is the smallest number of micro-batches with which four stages are idle for no "
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
        "The same program runs the lists of 1F1B, with send and recv as before. What happens?",
        options=("it runs, as under GPipe", "it deadlocks", "it runs, and some gradients are wrong"),
        came="it deadlocks",
        because="Rank 0 sends an activation to rank 1 while rank 1 sends a gradient to rank 0, and neither receives.",
        seen=r"(?i)deadlock",
        fails=r"RunHung: deadlock",
    ),
    Question(
        "schedules_of_torch",
        "PyTorch's ScheduleGPipe and Schedule1F1B run the same stages and the same batch. What happens?",
        options=(
            "both run, and give the gradients of one process",
            "both run, and their gradients differ",
            "Schedule1F1B deadlocks, as the blocking sends did",
        ),
        came="both run, and give the gradients of one process",
        because="They compute the same sums in a different order, and start their sends without blocking.",
        seen=r"ScheduleGPipe: gradients of one process: True[\s\S]*Schedule1F1B: gradients of one process: True",
    ),
)
