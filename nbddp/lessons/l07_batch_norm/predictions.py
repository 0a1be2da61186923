"""Lesson 07's questions."""

from __future__ import annotations

from nbddp.lessons.framework.question import Question

QUESTIONS = (
    Question(
        "outputs_of_the_whole_batch",
        "Are the outputs of batch norm under DDP those of one process with the whole batch?",
        options=("yes, on every rank", "yes, but only on rank 0", "no"),
        came="no",
        because="Each rank normalizes with the four samples it has.",
        seen=r"outputs differ by up to 0\.92",
    ),
    Question(
        "worse_number_of_samples",
        "With how many samples per rank are a rank's own statistics further off?",
        options=("2", "32", "equally far with both"),
        came="2",
        because="A mean of few samples is mostly noise.",
        explored=True,
    ),
    Question(
        "averaged_variances",
        "The ranks read different kinds of data. How does the mean of their variances compare with that of the whole?",
        options=("it is smaller", "it is equal", "it is larger"),
        came="it is smaller",
        because="It leaves out the distance between the ranks' means.",
        explored=True,
        seen=r"mean of the variances: 0\.96, 47 % less than",
    ),
    Question(
        "sync_batch_norm_on_a_cpu",
        "What does the next cell do on a CPU?",
        options=(
            "it converts the model and runs",
            "it raises an error when it converts the model",
            "it converts the model and raises an error in forward",
        ),
        came="it converts the model and raises an error in forward",
        because="SyncBatchNorm supports only GPUs and a few other accelerators.",
        seen=r"SyncBatchNorm\n[\s\S]*expected input tensor to be on GPU",
        fails=r"SyncBatchNorm expected input tensor to be on GPU",
    ),
    Question(
        "gradient_on_rank_3",
        "What gradient does autograd compute on rank 3?",
        came="4",
        because="It is the gradient of rank 3's own loss. Autograd does not see the all-reduce.",
        seen=r"rank 3 │ total 4, gradient 4",
    ),
    Question(
        "running_mean_after_the_next_forward",
        "Which running mean do the ranks have after the second forward?",
        options=("each rank its own", "the mean of all ranks'", "rank 0's"),
        came="rank 0's",
        because="DDP copies rank 0's buffers to all ranks before a forward.",
        seen=r"rank 0 │ running mean (\S+), after the next forward \1\n(?:.*after the next forward \1\n?){3}",
    ),
)
