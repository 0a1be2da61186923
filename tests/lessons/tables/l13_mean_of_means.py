"""Lesson 13: answers to its exercises, wrong and right."""

from __future__ import annotations

from nbddp.lessons.framework.run_check import ALIKE
from tests.lessons.tables import Table

HEAD = """
import contextlib
def accumulate(model, micro_batches, loss_of):
    n = len(micro_batches)
"""


def body(text: str) -> str:
    return HEAD + "\n".join("    " + line for line in text.strip("\n").splitlines())


GUARDED = """
for i, (x, y) in enumerate(micro_batches):
    with {guard}:
        loss = loss_of(model(x), y){scale}
        loss.backward()
"""
LATER = "model.no_sync() if i + 1 < n else contextlib.nullcontext()"
ACCUMULATE = Table("accumulate", body, every=4, marker="mutants", nproc=4, wrong={
    "n = len(micro_batches)\nmodel.no_sync()\nfor x, y in micro_batches: (loss_of(model(x), y) / n).backward()":
        "they were exchanged 5 times: model.no_sync() was called and never entered; it is a context manager",
    GUARDED.format(guard=LATER, scale=" / n").replace("loss_of(model(x), y)", "loss_of(y, model(x))"):
        "loss_of takes the outputs, then the targets",
    GUARDED.format(guard=LATER, scale=""):
        "rank 0, 0.weight, 5 micro-batches: yours is 5.00 × the reference: you added up 5 micro-batches",
    GUARDED.format(guard="contextlib.nullcontext()", scale=" / n"):
        "right, but they were exchanged 5 times for 5 micro-batches, and once is enough",
    GUARDED.format(guard="model.no_sync()", scale=" / n"):
        "rank 0, 5 micro-batches: no gradients were exchanged, so every rank has its own",
    GUARDED.format(guard="model.no_sync() if i else contextlib.nullcontext()", scale=" / n"):
        "exchanged in micro-batch 1, and later ones are every rank's own",
    "for i, (x, y) in enumerate(micro_batches):\n    loss = loss_of(model(x), y) / n\n"
    "    with model.no_sync() if i + 1 < n else contextlib.nullcontext():\n        loss.backward()":
        "although no_sync was entered: DDP decides in forward",
    "import torch.distributed as dist\nw = dist.get_world_size()\n" + GUARDED.format(guard=LATER, scale=" / w"):
        "you divided by the world size, which DDP does itself",
    "import torch.distributed as dist\nw = dist.get_world_size()\n" + GUARDED.format(guard=LATER, scale=" / n / w"):
        "yours is 0.25 × the reference: you divided by the world size too",
    GUARDED.format(guard=LATER, scale=" / n / n"): "by the number of micro-batches twice",
    GUARDED.format(guard=LATER, scale=" / 5"):
        "rank 0, 0.weight, 3 micro-batches: yours is 0.60 × the reference; each micro-batch's loss counts 1/3",
    "for i, (x, y) in enumerate(micro_batches):\n    model.zero_grad()\n"
    "    with model.no_sync() if i + 1 < n else contextlib.nullcontext():\n"
    "        (loss_of(model(x), y) / n).backward()":
        "yours is of the last micro-batch alone",
    GUARDED.format(guard=LATER, scale=" / n").replace("model(x)", "model.module(x)"):
        "nothing went through DDP; call model(inputs)",
    "import torch\nx, y = (torch.cat(some) for some in zip(*micro_batches))\nloss_of(model(x), y).backward()":
        "5 micro-batches went through the model in 1 forward",
    "import torch.distributed as dist\nwith model.no_sync():\n    for x, y in micro_batches:\n"
    "        (loss_of(model(x), y) / n).backward()\nfor p in model.parameters():\n    dist.all_reduce(p.grad)\n"
    "    p.grad /= dist.get_world_size()":
        "the gradients are right, but DDP exchanged none of them",
    GUARDED.format(guard=LATER, scale=" / n") + "import torch\ntorch.optim.SGD(model.parameters(), lr=0.1).step()":
        "a parameter changed",
    GUARDED.format(guard=LATER, scale=" / n").replace("(micro_batches)", "(micro_batches[1:], 1)"):
        "yours differs from the reference by up to",
    GUARDED.format(guard=LATER, scale=" / n") + "model.zero_grad()": "has no gradient after",
    "sum(loss_of(model(x), y) / n for x, y in micro_batches).backward()":
        "up to 5 losses waited for backward() at a time",
    "with model.no_sync():\n    for x, y in micro_batches[:-1]: (loss_of(model(x), y) / n).backward()":
        "4 forwards, all inside no_sync, so no gradients were exchanged. The last micro-batch is missing",
    GUARDED.format(guard=LATER, scale=" / (n - 1 if i + 1 < n else n)"):
        "got 0.20 for the last and 0.25 for each before it",
    GUARDED.format(guard=LATER, scale=" / n") + "for p in model.parameters(): p.grad.zero_()":
        "set to zero after the last backward()",
    GUARDED.format(guard=LATER, scale=" / n") + "import torch.distributed as dist\n"
    "for p in model.parameters(): dist.all_reduce(p.grad)":
        "yours is 4.00 × the reference: you added up over the ranks",
}, right=[
    """
*early, last = micro_batches
with model.no_sync():
    for x, y in early:
        loss_of(model(x), y).div(n).backward()
loss_of(model(last[0]), last[1]).div(n).backward()
""",
    """
for i, (x, y) in enumerate(micro_batches):
    model.require_backward_grad_sync = i == n - 1
    loss_of(model(x), y).backward()
for p in model.parameters():
    p.grad.div_(n)
""",
])  # fmt: skip

SUM = "loss_sum(model(x), y)"
RIGHT = f"{SUM} * world / everyone"
TOKENS = """
import contextlib
import torch
import torch.distributed as dist
def token_weighted_backward(model, micro_batches, loss_sum):
    n, world = len(micro_batches), dist.get_world_size()
    own = sum((t != -100).sum() for _, t in micro_batches)
    everyone = own.clone()
    dist.all_reduce(everyone)
    for i, (x, y) in enumerate(micro_batches):
        with {guard}:
            loss = {loss}
            loss.backward()
{end}"""


def tokens(loss: str, guard: str = LATER, end: str = "") -> str:
    return TOKENS.format(loss=loss, guard=guard, end=end)


MANY = "rank 0, 82 tokens on 4 ranks: "
TOKEN_WEIGHTED = Table("token_weighted_backward", tokens, every=4, marker="mutants", nproc=4, wrong={
    f"{SUM} / (y != -100).sum().clamp(min=1) / n":
        MANY + "every micro-batch counts the same, however many tokens it has: that is the mean of means",
    f"{SUM} / (y != -100).sum().clamp(min=1)":
        MANY + "every micro-batch counts the same, however many tokens it has, and the means were added up",
    f"{SUM} / own": "so a rank with few tokens counts as much as one with many",
    f"{SUM} * world / own": "all_reduce their number before you divide",
    f"{SUM} / everyone": "DDP divides the sum over ranks by the world size",
    f"{RIGHT} * world": "by the world size once too often",
    SUM: MANY + "the sum over tokens was not divided by their number",
    tokens(RIGHT).replace("(t != -100).sum()", "torch.tensor(t.numel())"):
        MANY + "padding was counted: a target of -100 is not a token",
    tokens(f"{SUM} / everyone").replace("(t != -100).sum()", "torch.tensor(t.numel())"):
        "padding was counted, but a target of -100 is not a token; and DDP's",
    f"{RIGHT} / n": "needs no such division",
    f"(model.zero_grad(), {RIGHT})[1]": "only the last micro-batches count",
    tokens(RIGHT, end="    [p.grad.zero_() for p in model.parameters()]"):
        "they were set to zero after the last backward()",
    f"{SUM} * 4 / everyone": "rank 0, 55 tokens on 3 ranks: you multiply by 4, and the world size is 3",
    tokens(RIGHT).replace("all_reduce(everyone", "all_reduce(everyone, dist.ReduceOp.MAX"):
        "expected a weight of 1/82, 0.012, for every token, got 0.037 for every token",
    f"{RIGHT} * (0.5 if i == 0 else 1)":
        "got 0.0122 in rank 0's micro-batch 2 and 0.0061 in rank 0's micro-batch 1",
    f"{RIGHT} * (0 / (i * y.sum()))": "rank 0: a gradient is nan",
    tokens(RIGHT, "contextlib.nullcontext()"):
        "the gradients are right, but they were exchanged 3 times for 3 micro-batches, and once is enough",
    tokens(RIGHT, "model.no_sync()"): "rank 0, 3 micro-batches: no gradients were exchanged",
    tokens(RIGHT, "model.no_sync() if i else contextlib.nullcontext()"):
        "gradients were exchanged in micro-batch 1, and later ones are every rank's own",
    tokens(f"(loss if i else 0) + {RIGHT}").replace("            loss.backward()", "") + "    loss.backward()\n":
        "right, but up to 3 losses waited for backward() at a time",
    tokens(RIGHT, end="    model.zero_grad()"): "rank 0: 0.weight has no gradient",
    "loss_sum(y, model(x))": "loss_sum takes the outputs first, then the targets",
    tokens(RIGHT).replace("    dist.all_reduce(everyone)", "    if dist.get_rank(): dist.all_reduce(everyone)"):
        ALIKE,
}, right=[
    RIGHT,
    tokens(f"{SUM} / everyone").replace("all_reduce(everyone)", "all_reduce(everyone := everyone.double(), "
    "dist.ReduceOp.AVG)"),
    tokens(SUM, end="    for p in model.parameters(): p.grad *= world / everyone"),
    tokens(RIGHT).replace("everyone = own.clone()", "everyone = torch.tensor(float(own))"),
])  # fmt: skip

K, RAMP = "ranks * batch * micro_batches / base_batch", "base + base * (k - 1) * step / warmup"
RATE = """
def learning_rate(step, warmup, base, base_batch, ranks, batch, micro_batches):
    k = {k}
    if step >= warmup:
        return base * k
    return {ramp}
"""


def rate(k: str = K, ramp: str = RAMP) -> str:
    return RATE.format(k=k, ramp=ramp)


LEARNING_RATE = Table("learning_rate", rate, nproc=4, wrong={
    "1": "expected 1.375, got 0.5; that is the learning rate of the small batch",
    rate(ramp=RAMP.replace("warmup", "(warmup + 1)")):
        "step 1 of a warm-up of 4 steps is 1/4 of the way from 0.5 to 4.0",
    rate().replace("step >= warmup", "step > warmup"): "ZeroDivisionError",
    rate("1", "'four'"): "a learning rate is a number",
}, right=[
    rate(),
    rate(ramp="base * (1 - step / warmup) + base * k * step / warmup"),
    rate().replace("step >= warmup", "warmup <= step").replace("ranks * batch", "batch * ranks"),
    """
def learning_rate(step, warmup, base, small, ranks, batch, micro):
    done = min(1, step / warmup) if warmup else 1
    return base + (base * ranks * batch * micro / small - base) * done
""",
])  # fmt: skip
