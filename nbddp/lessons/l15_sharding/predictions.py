"""Lesson 15's questions."""

from __future__ import annotations

from nbddp.lessons.framework.question import Question

QUESTIONS = (
    Question(
        "zero_stage_3",
        "A model of 7.5 · 10⁹ parameters, Adam in mixed precision, 64 GPUs. What does a rank hold at stage 3?",
        options=("120 GB", "31.4 GB", "16.6 GB", "1.88 GB"),
        came="1.88 GB",
        because="Stage 3 shards all 16 bytes per parameter: 120 GB over 64 ranks.",
        explored=True,
        seen=r"stage 3, FSDP: 1\.88 GB per rank",
    ),
    Question(
        "bytes_moved",
        "DDP all-reduces the gradients. ZeRO-2 reduce-scatters the gradients and all-gathers the parameters, in the "
        "same dtype. Who moves more bytes in a step?",
        options=("DDP", "ZeRO-2", "both the same"),
        came="both the same",
        because="A ring all-reduce is a reduce-scatter followed by an all-gather.",
        seen=r"stages 1 and 2: 1\.00 ×",
    ),
    Question(
        "times_gathered",
        "Stage 3 by hand, three layers, one training step. How often is layer 0 gathered?",
        came="2",
        because="Once for forward, and once more for backward, since it was freed in between.",
        seen=r"gather 0 · gather 1 · gather 2 · gather 2 · reduce-scatter 2 · gather 1 · .* · gather 0",
    ),
    Question(
        "layers_in_full",
        "Four layers, an all-gather takes as long as a layer's forward, and each layer is gathered one layer ahead. "
        "How many layers does a rank hold in full at most?",
        came="2",
        because="The layer that is computed and the one that is gathered meanwhile.",
        explored=True,
        seen=r"prefetch 1 layer ahead(?:.*\n)+?rank 0: .*at most 2 layers of 4 in full",
    ),
    Question(
        "rows_of_the_momentum",
        "The next cell trains a block on four ranks with fully_shard and Adam. A weight has 64 rows. How many rows of "
        "its momentum does a rank keep?",
        came="16",
        because="Adam creates its state for what the rank holds of the parameter: a quarter of the rows.",
        seen=r"of its momentum \(16, 32\)",
    ),
    Question(
        "read_again",
        "Training stops after 3 steps on four ranks with 2 samples per rank and step. The checkpoint stores the step, "
        "3. Training resumes at step 3 on two ranks, again with 2 samples per rank. How many samples are read again?",
        came="12",
        because="24 samples were read, and 3 steps of two ranks are 12.",
        seen=r"24 samples were read; 3 steps of 2 ranks are 12, so 12 would be read again",
    ),
)
