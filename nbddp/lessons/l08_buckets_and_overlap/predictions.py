"""Lesson 08's questions."""

from __future__ import annotations

from nbddp.lessons.framework.question import Question

QUESTIONS = (
    Question(
        "buckets_in_the_first_step",
        "How many buckets does DDP use in the first step?",
        came="1",
        because="DDP has not seen yet in which order gradients become ready.",
        seen=r"'first step': '8404992'",
    ),
    Question(
        "buckets_from_then_on",
        "And from the second step on, when DDP knows the order?",
        came="2",
        because="The first closes at 1 MiB, with the last layer's weight. The other 7 MiB fit into the second.",
        seen=r"'then': '1050624, 7354368'",
    ),
    Question(
        "second_bucket_sent",
        "When does DDP send bucket 1, the large one?",
        options=(
            "when the first 1 MiB of it is ready",
            "as soon as bucket 0 has moved",
            "at the end of backward",
        ),
        came="at the end of backward",
        because="It holds the gradients of the first layer, which backward reaches last.",
    ),
    Question(
        "optimizer_starts",
        "When does the optimizer start?",
        options=("when backward's computation is over", "when bucket 0 has moved", "when all buckets have moved"),
        came="when all buckets have moved",
        because="It needs the averaged gradients of all parameters.",
    ),
    Question(
        "share_hidden_by_small_buckets",
        "How much of the exchange does backward hide with bucket_cap_mb=4?",
        options=("14 %", "50 %", "88 %", "100 %"),
        came="88 %",
        because="Seven of eight buckets are sent while backward computes. With the default it is 14 %.",
        explored=True,
        seen=r"all-reduce 5\.26 ms, 88 % hidden",
    ),
    Question(
        "never_hidden_bucket",
        "Which bucket can never be hidden?",
        options=("the first", "the largest", "the last"),
        came="the last",
        because="It is sent when backward is over.",
        explored=True,
        seen=r"658 µs exposed; the last bucket alone takes 658 µs",
    ),
    Question(
        "buckets_with_a_given_25",
        "How many buckets are there with bucket_cap_mb=25?",
        came="1",
        because="A cap that is passed also applies to the first bucket, and the model has 8 MiB.",
        seen=r"bucket_cap_mb 25 · 8404992\n",
    ),
    Question(
        "buckets_with_3",
        "How many are there with bucket_cap_mb=3?",
        came="3",
        because="Three layers fill a bucket, and the last bucket has two.",
        seen=r"bucket_cap_mb 3 · 3151872, 3151872, 2101248\n",
    ),
    Question(
        "same_on_paper",
        "What will the recording and the packer agree on?",
        options=("the buckets", "the times", "the buckets and the times"),
        came="the buckets",
        because="On a CPU, backward and gloo share the cores, which the model on paper does not know.",
        seen=r"DDP's buckets are the same\.",
    ),
    Question(
        "long_bars",
        "On which rank do the buckets look long?",
        options=("rank 0", "rank 1, the late one", "both ranks"),
        came="rank 0",
        because="A bar begins when the rank sends its bucket. Rank 0 sends early and waits.",
        seen=r"rank 1 starts all buckets last[\s\S]*cause: between steps",
    ),
    Question(
        "all_reduces_in_the_trace",
        "How many all-reduces will the trace have?",
        came="16",
        because="The first step has one bucket, the five others have three each.",
        seen=r"all_reduce +ranks 0–1 +16 ",
    ),
    Question(
        "called_last_by_rank_1",
        "How many of these 12 does rank 1 call last?",
        came="12",
        because="It is late at the start of the step, so it is late with every bucket.",
        seen=r"from the third step on 12 · rank 1 calls last in 12",
    ),
)
