"""Lesson 15: answers to its exercises, wrong and right."""

from __future__ import annotations

from tests.lessons.tables import Table, within

RIGHT_STEP = """
momentum.mul_(0.9).add_(scattered(gradients) / n)
write(gathered(values[mine] - lr * momentum))
"""
STEP = """
def sharded_step(parameters, momentum, lr):
    import torch
    import torch.distributed as dist
    from torch.nn.functional import pad
    rank, n, size = dist.get_rank(), dist.get_world_size(), len(momentum)
    def flat(tensors):
        joined = torch.cat([t.flatten() for t in tensors])
        return pad(joined, (0, size * n - len(joined)))
    def scattered(given):
        dist.reduce_scatter_tensor(got := torch.empty(size), given)
        return got
    def gathered(own):
        dist.all_gather_into_tensor(whole := torch.empty(size * n), own)
        return whole
    def write(whole):
        sizes = [p.numel() for p in parameters]
        for p, piece in zip(parameters, whole[:sum(sizes)].split(sizes)):
            p.data.copy_(piece.view_as(p))
    gradients, values = flat([p.grad for p in parameters]), flat([p.detach() for p in parameters])
    mine = slice(rank * size, (rank + 1) * size)
"""


def step(text: str) -> str:
    return STEP + "\n".join("    " + line for line in text.strip("\n").splitlines())


def changed(*pairs: tuple[str, str], source: str = "") -> str:
    made = source or step(RIGHT_STEP)
    for old, new in pairs:
        assert old in made
        made = made.replace(old, new)
    return made


SHARDED_STEP = Table("sharded_step", step, every=4, marker="mutants", nproc=4, wrong={
    changed((" / n)", ")")): "that is the step of summed gradients",
    changed(("scattered(gradients) / n", "gradients[mine]")): "its own gradient only;",
    changed(("scattered(gradients)", "gradients[mine]")): "its own gradient only, divided by the world size",
    changed((" / n)", " / n / n)")): "divided by the world size twice",
    changed((" / n)", " / 4)")): "3 ranks, 25 numbers: after step 1 of 3",
    "momentum.mul_(0.9).add_(scattered(gradients) / n)\nvalues[mine] -= lr * momentum\nwrite(values)":
        "all-gather the shards",
    "momentum = 0.9 * momentum + scattered(gradients) / n\nwrite(gathered(values[mine] - lr * momentum))":
        ("after step 2 of 3, rank 0, number 0 of parameters[0]", "momentum is lost between steps"),
    changed(("- lr", "+ lr")): "has the wrong sign",
    changed((".mul_(0.9)", "")): "the old momentum is not reduced",
    changed(("scattered(gradients) / n", "0.1 * scattered(gradients) / n")): "here the gradient has weight 0.1",
    "new = scattered(gradients) / n\nwrite(gathered(values[mine] - lr * momentum))\nmomentum.mul_(0.9).add_(new)":
        "from before this gradient",
    changed(("lr * ", "")): "the learning rate is missing",
    changed(("return pad(joined, (0, size * n - len(joined)))", "return joined")):
        "reduce_scatter_tensor: the input has 25 numbers and the output 7; on 4 ranks the input has 4 × as many",
    changed(("scattered(gradients)", "all_reduced()"), ("    gradients, values", "    def all_reduced():\n"
    "        dist.all_reduce(gradients)\n        return gradients[mine]\n    gradients, values")):
        "right, but all_reduce was called: reduce-scatter",
    changed(("    momentum.mul_", "    scattered(gradients)\n    momentum.mul_")):
        "a rank gave 56 numbers to reduce_scatter_tensor in a step, where 28 are enough",
    changed(("got := torch.empty(size), given", "got := torch.empty(size), given, dist.ReduceOp.MIN"), (" / n)",
    ")")):
        "the smallest gradients of all ranks",
    changed(("p.data.copy_(piece.view_as(p))", "p = piece.view_as(p)")): "no parameter changed",
    changed(("own)\n", "own, async_op=True)\n")): "nothing waits for it",
    "for p in parameters: p -= lr * p.grad": "a leaf Variable that requires grad",
    "import os\nif rank == 1: os._exit(3)": "rank 1",
}, right=[
    RIGHT_STEP,
    changed(("torch.empty(size), given)", "torch.empty(size), given, op=dist.ReduceOp.AVG)"), (" / n)", ")")),
    """
got, parts = torch.empty(size), [torch.empty(size) for _ in range(n)]
dist.reduce_scatter(got, list((gradients / n).split(size)))
momentum.mul_(0.9).add_(got)
dist.all_gather(parts, values[mine] - lr * momentum)
write(torch.cat(parts))
""",
    changed(("p.data.copy_(piece.view_as(p))", "p.data = piece.view_as(p).clone()")),
])  # fmt: skip

REST = "def rest_of_epoch(order, seen, rank, world_size):\n    n, r, s = world_size, rank, seen\n    return "
REST_OF_EPOCH = Table("rest_of_epoch", within(REST + "..."), nproc=4, wrong={
    "order[r::n][s:]": "counts the samples of all ranks together, not those of each",
    "order[r::n][s // n:]": "right only if the world size divides seen",
    "order[r::n][-(-s // n):]": "that rounds up",
    "order[r::n]": "restarts the epoch",
    "order[s:]": "every rank reads all remaining samples",
    "list(range(s + r, len(order), n))": "those are positions in order",
    "order[s:][r * -(-(len(order) - s) // n):(r + 1) * -(-(len(order) - s) // n)]": "has a block",
    "order[s:s + (len(order) - s) // n * n][r::n]": "the last samples are not read",
    "(order[s:] + (order[s:] * n)[:-(len(order) - s) % n])[r::n]": "as DistributedSampler does",
    "order[:s][r::n]": "those samples were read already",
    "order[s + r]": "return a list of samples",
    "order[s + r / n::n]": "slice indices must be integers",
    "import torch.distributed as d\n" + REST + "order[s + d.get_rank()::d.get_world_size()]":
        "the arguments contain everything",
    "order[s:][::-1][r::n]": "samples number 0 are",
}, right=[
    "order[s:][r::n]",
    "[v for i, v in enumerate(order[s:]) if i % n == r]",
    "order[s + n - 1 - r::n]",
])  # fmt: skip

BYTES = "def bytes_per_rank(stage, parameters, ranks):\n    p, n = parameters, ranks\n    return "
SUM = " + ".join(f"{{{i}}} * p // (n if stage >= {{{i + 3}}} else 1)" for i in range(3))
BYTES_PER_RANK = Table("bytes_per_rank", within(BYTES + "..."), nproc=4, wrong={
    SUM.format(2, 2, 8, 3, 2, 1): "keeps a float32 copy",
    "'16 GB'": "return a number of bytes",
    "(4 + 12 / n) * p if stage == 2 else " + SUM.format(2, 2, 12, 3, 2, 1): "those are the bytes of stage 1",
    "(" + SUM.format(2, 2, 12, 3, 2, 1) + ") / 1e9": "that is in GB; return bytes",
    "(" + SUM.format(2, 2, 12, 3, 2, 1) + ") / 2**30": "that is in GiB",
    "12 * p, 2 * p, 2 * p": "the sum of the parts",
    "def bytes_per_rank(stage, p, n):\n    if stage: return 16 * p // n": "ends without a value",
    "import torch.distributed as d\n" + BYTES + "16 * p // d.get_world_size()": "the arguments contain everything",
}, right=[
    "2 * p / n ** (stage > 2) + 2 * p / n ** (stage > 1) + 12 * p / n ** (stage > 0)",
    "{0: 16 * p, 1: 4 * p + 12 * p // n, 2: 2 * p + 14 * p // n, 3: 16 * p // n}[stage]",
])  # fmt: skip
