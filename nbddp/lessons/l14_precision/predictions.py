"""Lesson 14's questions."""

from __future__ import annotations

from nbddp.lessons.framework.question import Question

QUESTIONS = (
    Question(
        "small_gradient",
        "What is a gradient of 1e-8 in float16?",
        options=("about 1e-8", "0", "6.1e-05, the smallest normal number", "inf"),
        came="0",
        because="It lies below the smallest number that float16 has; bfloat16 has the range of float32.",
        seen=r"1e-08 is 0e\+00 in float16 and 1e-08 in bfloat16",
    ),
    Question(
        "overflow_under_ddp",
        "In step 2 the gradients of rank 1 overflow, those of the other ranks do not. Which ranks skip it under DDP?",
        options=("rank 1", "all ranks", "no rank: the average is finite", "all ranks except rank 1"),
        came="all ranks",
        because="The mean of the ranks' gradients is inf on every rank, so each finds it by itself.",
        seen=r"ranks 0–3 │ step 1 taken, next scale 1024\n.*step 2 skipped, next scale 512",
    ),
    Question(
        "overflow_in_a_shard",
        "The third of eight numbers overflows, and each of four ranks has two of them and a GradScaler. Which ranks "
        "skip the step?",
        options=("rank 1", "all ranks", "no rank"),
        came="rank 1",
        because="Numbers 3 and 4 are rank 1's shard, and no other rank has seen the inf.",
        seen=r"rank 1 +│ step 1 taken, next scale 1024\n.*step 2 skipped",
    ),
    Question(
        "alone",
        "Rank 1 alone has halved its scale. Its shard is a sum of gradients to which each rank has applied its own "
        "scale. What does rank 1 get when it divides by its own scale?",
        options=("the right gradient", "a gradient that is too large", "a gradient that is too small"),
        came="a gradient that is too large",
        because="The other ranks have multiplied by a larger scale than rank 1 divides by. It overflows more easily, "
        "too, and halves its scale again.",
        explored=True,
        seen=r"unscales its gradients to [\d.,]+ × their true size",
    ),
    Question(
        "clip_first",
        "Each rank clips its own gradient to norm 1, then the ranks average. What is the norm of the average?",
        options=("1", "less than 1", "more than 1"),
        came="less than 1",
        because="Vectors of length 1 that point in different directions have a shorter mean.",
        seen=r"clip, then average: \(0\.50, 0\.50\), norm 0\.71",
    ),
    Question(
        "over_all_ranks",
        "Ranks 0 and 1 hold a layer together, ranks 2 and 3 hold it again. Squares are summed over all four ranks. "
        "What is the result?",
        options=("right", "√2 times too large", "2 times too large", "4 times too large"),
        came="√2 times too large",
        because="Each square counts twice, and the norm is the root of their sum.",
        seen=r"over all four ranks 1\.41",
    ),
)
