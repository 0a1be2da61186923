"""Lesson 09: answers to its exercises, wrong and right."""

from __future__ import annotations

from tests.lessons.tables import Table, within

MISSING = """
def missing_ranks(log):
    n = {r: len(c) for r, c in log.items()}; lo, hi = min(n.values()), max(n.values())
"""
EVEN = "    if lo == hi: return None\n    return "
MISSING_RANKS = Table("missing_ranks", within(MISSING + "..."), wrong={
    EVEN + "lo + 1, sorted(r for r in n if n[r] > lo)": "the ranks that they wait for",
    "    return lo + 1, sorted(r for r in n if n[r] == lo)": "no rank is missing",
    "def missing_ranks(log):\n    return len(log[0]), []": "the ranks are not",
    EVEN + "lo + 1, [r for r in n if n[r] == lo]": "sort the ranks",
    EVEN + "log[max(n, key=n.get)][lo], [r for r in n if n[r] == lo]": "not its name",
    EVEN + "lo + 1, {r for r in n if n[r] == lo}": "expected [3, [2]], got [3, {2}]",
}, right=[
    EVEN + "(lo + 1, [r for r in sorted(n) if n[r] == lo])",
    """
def missing_ranks(log):
    for number in range(1, 1 + max(map(len, log.values()))):
        gone = [rank for rank in sorted(log) if len(log[rank]) < number]
        if gone:
            return [number, gone]
""",
])  # fmt: skip

HEAD = """
import torch, torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.functional import mse_loss
def step(model, optimizer, batch):
    optimizer.zero_grad()
    mse_loss(model(batch[0]), batch[1]).backward()
    optimizer.step()
def agreed(value, op):
    count = torch.tensor(value)
    dist.all_reduce(count, op=op)
    return int(count)
def train_uneven(model, optimizer, batches):
    rank, world = dist.get_rank(), dist.get_world_size()
"""


def train(body: str) -> str:
    return HEAD + "".join(f"    {line}\n" for line in body.strip().split("\n"))


EACH = "for b in batches{}: step(model, optimizer, b)"
HANGS = "with 3 batches on rank 0, 2 on rank 1: deadlock: rank 0 waits in backward, all_reduce #"
TRAIN_UNEVEN = Table("train_uneven", train, every=3, unwritten=HANGS, wrong={
    EACH.format(""): HANGS,
    "n = agreed(len(batches), dist.ReduceOp.SUM) // world\n" + EACH.format("[:n]"):
        "with 2 batches on rank 0, 4 on rank 1: deadlock: rank 1 waits in backward",
    "...": "no step was taken",
    "model = model.module\n" + EACH.format(""): "end with different parameters",
    EACH.format("[:1]"): "only 1 of the 2 batches that every rank has was used",
    EACH.format("[:2]"): "with 3 batches on ranks 0–1: only 2 of the 3 batches",
    "n = torch.tensor(len(batches))\ndist.broadcast(n, 0)\n"
    "for i in range(int(n)): step(model, optimizer, batches[i])":
        "rank 1 raised IndexError",
    EACH.format("") + "\ndist.barrier()": "deadlock: ",
    "with model.no_sync():\n    " + EACH.format("") + "\nfor p in model.parameters():\n"
    "    dist.all_reduce(p.data)\n    p.data /= world":
        "DDP averages gradients in every step",
    "with model.no_sync():\n    " + EACH.format("") + "\nfor p in model.parameters(): dist.broadcast(p.data, 0)":
        "rank 0 alone would get these parameters",
    "n = agreed(len(batches), dist.ReduceOp.MIN)\noptimizer.param_groups[0]['lr'] *= world\n" + EACH.format("[:n]"):
        "all ranks agree, but not on the result of averaged gradients",
    "n = agreed(len(batches), dist.ReduceOp.MIN)\noptimizer.zero_grad = lambda: None\n" + EACH.format("[:n]"):
        "optimizer.zero_grad() is missing",
    HEAD + "    pass\ndef train_uneven(): pass": "raised TypeError: train_uneven() takes 0",
}, right=[
    "n = agreed(len(batches), dist.ReduceOp.MIN)\n" + EACH.format("[:n]"),
    "all_of = [None] * world\ndist.all_gather_object(all_of, len(batches))\n" + EACH.format("[:min(all_of)]"),
    "for b in batches:\n    if not agreed(1, dist.ReduceOp.MIN): break\n    step(model, optimizer, b)\n"
    "else:\n    agreed(0, dist.ReduceOp.MIN)",
    "with Join([model]):\n    " + EACH.format(""),
    "with Join([model], divide_by_initial_world_size=False):\n    " + EACH.format(""),
    "n = agreed(len(batches), dist.ReduceOp.MAX)\n"
    "for i in range(n): step(model, optimizer, batches[i % len(batches)])",
    "n = agreed(len(batches), dist.ReduceOp.MAX)\n"
    "for i in range(n): step(model, optimizer, batches[min(i, len(batches) - 1)])",
])  # fmt: skip
