"""Lesson 14: answers to its exercises, wrong and right."""

from __future__ import annotations

from tests.lessons.tables import Table

STEP = """
import torch
import torch.distributed as dist
def step_together(optimizer, scale):
    params = optimizer.param_groups[0]["params"]
    grads = [p.grad for p in params if p.grad is not None]
    found = torch.tensor(float(not all(torch.isfinite(g).all() for g in grads)))
{ask}
    if {found}:
        return {less}
    for g in grads:
        {unscale}
    optimizer.step()
    return {same}
"""


def step(ask: str = "dist.all_reduce(found)", found: str = "found > 0", less: str = "scale / 2",
         unscale: str = "g /= scale", same: str = "scale") -> str:  # fmt: skip
    return STEP.format(ask=f"    {ask}", found=found, less=less, unscale=unscale, same=same)


STEP_TOGETHER = Table("step_together", step, every=4, marker="mutants", nproc=4, wrong={
    "dist.all_reduce(found, dist.ReduceOp.MIN)": "parameters are now inf or nan",
    "dist.reduce(found, 0)": "took it: the shards are now out of step",
    "if found: dist.all_reduce(found)": "deadlock: ",
    "dist.all_reduce(found, async_op=True)": "nothing waits for it",
    step().replace("not all(torch.isfinite(g).all()", "any(torch.isinf(g).any()"):
        "step 4, scale 512: rank 0 found inf or nan, and the step was taken: parameters are now inf or nan",
    step().replace("for g in grads)))", "for g in grads[:1])))"): "step 2, scale",
    step(unscale="pass"):
        "step 1, scale 1024: rank 0: the parameters moved by 1.02e+03 × the right step: the gradients were not",
    step(unscale="g *= scale"): "the gradients were multiplied by scale",
    step(unscale="g /= scale ** 2"): "the gradients were divided by scale twice",
    "for t in (found, *grads): dist.all_reduce(t)":
        "the parameters moved, but not by this rank's own unscaled gradients",
    step(unscale="return scale"): "no rank found inf or nan, and ranks 0–3 did not take",
    step().replace("    optimizer.step()", "    optimizer.step(); optimizer.step()"): "moved",
    step(less="None"): "rank 0 returned None and not the scale for the next step",
    step(less="scale"): "so all ranks halve the scale to 512; rank 0 returned 1024",
    step("own = bool(found); dist.all_reduce(found)", less="scale / (1 + own)"):
        "rank 0 returned 1024, and rank 3 512: from here on ranks scale their losses differently",
    step(same="2 * scale"): "no rank found inf or nan, so the scale stays 1024",
    step(found="found > 9"): "parameters are now inf or nan",
    "[torch.nan_to_num_(g, 0, 0, 0) for g in grads]; found *= 0": "took the step any",
}, right=[
    step(),
    step("dist.all_reduce(found, dist.ReduceOp.MAX)", "found.item() == 1", "torch.tensor(0.5 * scale)"),
    step("found = torch.stack([torch.isfinite(g).all() for g in grads]).all().int(); dist.all_reduce(found, "
    "dist.ReduceOp.MIN)", "not found"),
])  # fmt: skip

REDUCE = "dist.all_reduce(whole, group=shard_group)"
CLIP = """
import torch
import torch.distributed as dist
def clip_global_norm(sharded, replicated, max_norm, shard_group):
    shards = [p.grad for p in sharded if p.grad is not None]
    copies = [p.grad for p in replicated if p.grad is not None]
    whole, copied = (sum((g ** 2).sum() for g in some) for some in (shards, copies))
{norm}
    factor = {factor}
    for g in {those}:
        g *= factor
    return {back}
"""


def clip(norm: str = f"{REDUCE}; norm = (whole + copied) ** 0.5", factor: str = "min(1, max_norm / norm)",
         those: str = "shards + copies", back: str = "norm") -> str:  # fmt: skip
    return CLIP.format(norm=f"    {norm}", factor=factor, those=those, back=back)


CLIP_GLOBAL_NORM = Table("clip_global_norm", clip, every=4, marker="mutants", nproc=4, wrong={
    "norm = (whole + copied) ** 0.5":
        "mesh of 2 × 2, rank 0, max_norm 1: expected a norm of 10.559, got 5.050; that is the norm of what",
    "dist.all_reduce(whole); norm = (whole + copied) ** 0.5":
        "the sum went over all ranks, so every shard counts once for each replica: all_reduce within shard_group",
    "whole += copied; " + REDUCE + "; norm = whole ** 0.5":
        "were added before the all_reduce, so they count once per shard: add them after",
    "whole += copied; dist.all_reduce(whole); norm = whole ** 0.5": "everything was summed over all ranks",
    "whole = (whole + copied) ** 0.5; " + REDUCE + "; norm = whole": "the root was taken before the sum",
    REDUCE + "; norm = whole + copied": "that is the square of the norm: the root is missing",
    REDUCE + "; norm = whole ** 0.5": "the replicated ones belong to it too",
    "norm = copied ** 0.5": "that is the norm of the replicated gradients alone",
    "dist.all_reduce(whole, dist.ReduceOp.MAX, group=shard_group); norm = (whole + copied) ** 0.5":
        "that is the largest of the ranks' norms",
    "dist.all_reduce(whole, dist.ReduceOp.AVG, group=shard_group); norm = (whole + copied) ** 0.5":
        "that is the average of the ranks' squares; they add up",
    REDUCE + "; norm = whole ** 0.5 + copied ** 0.5": "norms of parts do not add up",
    clip(factor="max_norm / norm"):
        "max_norm 100: the norm is right; expected unchanged gradients, got gradients × 9.470; the norm is below "
        "max_norm, and clipping never increases a gradient",
    clip(factor="1"): "the norm is right; expected gradients × 0.095, got unchanged gradients",
    clip(those="shards"): "not all replicated gradients were scaled by 0.095",
    clip(those="copies"): "not all sharded gradients were scaled by 0.095",
    clip().replace("g *= factor", "g.clamp_(-max_norm, max_norm)"): "scaled by the same factor",
    clip(back="norm * factor"): "that is the norm after clipping",
    clip(back="None"): "return the norm before clipping, not None",
    clip().replace(" if p.grad is not None]", "]"): "raised TypeError",
    clip().replace("p.grad for", "p for"): "a parameter changed; only gradients are clipped",
    f"if dist.get_rank() == 1: return\n    {REDUCE}; norm = (whole + copied) ** 0.5": "deadlock: rank 0",
}, right=[
    clip(),
    clip(factor="(max_norm / (norm + 1e-6)).clamp(max=1)"),
    "parts = torch.stack([whole, copied / dist.get_world_size(shard_group)]); dist.all_reduce(parts, "
    "group=shard_group); norm = float(parts.sum()) ** 0.5",
])  # fmt: skip
