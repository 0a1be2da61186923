"""Lesson 14: loss scales against GradScaler itself, what torch does with DTensors, and the checks on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nbddp
from nbddp.lessons.l14_precision.figure import draw_loss_scale
from nbddp.lessons.l14_precision.plan import SHARDED, groups, shard
from nbddp.lessons.l14_precision.simulation import ALONE, AVERAGED, RANKS, STEPS, WHERE, gradient, scaled
from nbddp.teach import check
from tests.lessons.answers import Mutant, defined, exercise, solution

NPROC = 4


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("first", [12, 18])
def test_scales_are_those_of_gradscaler(where: str, first: int) -> None:
    """Four of them, on gradients in float16 that each rank has multiplied by its own scale."""
    made = scaled(where, first, 3)
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(RANKS)]
    optimizers = [torch.optim.SGD([w], lr=2.0**-20) for w in weights]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**first, growth_interval=3) for _ in range(RANKS)]
    for number, step in enumerate(made.steps, start=1):
        scales = [scaler.scale(torch.ones(1)) for scaler in scalers]
        assert [s.item() for s in scales] == [2.0**e for e in step.scales]
        mean = sum(s.item() for s in scales) / RANKS
        parts = [torch.tensor(2.0 ** gradient(r, number) * (scales[r].item() if where == AVERAGED else mean)).half()
                 for r in range(RANKS)]  # fmt: skip
        before = [w.item() for w in weights]
        for r in range(RANKS):
            seen = parts[r].float() if where == ALONE else torch.stack(parts).float().max()
            weights[r].grad = seen.reshape(1)
            scalers[r].step(optimizers[r])
            scalers[r].update()
        assert tuple(b == w.item() for b, w in zip(before, weights, strict=True)) == step.skipped


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("step", [0, 3, STEPS])
def test_every_step_of_every_rank_is_a_cell(where: str, step: int) -> None:
    made = scaled(where, 18, 4, step)
    shown = draw_loss_scale(made)
    (axes,) = shown.figure.axes
    assert len(axes.patches) == RANKS * STEPS
    infs = [t for t in axes.texts if t.get_text() == "inf"]
    dashes = [t for t in axes.texts if t.get_text() == "–"]
    assert len(infs) == sum(sum(s.overflowed) for s in made.steps)
    assert len(infs) + len(dashes) == sum(sum(s.skipped) for s in made.steps)
    assert all(t.get_fontsize() >= 6.5 for t in axes.texts)
    assert shown.words == made.words()


# -- what torch does -------------------------------------------------------------------------


def on_dtensors() -> dict[str, Any]:
    """A GradScaler's decision when only rank 1's shard has an inf, and torch's norm on a mesh of 2 × 2."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group()
    rank, net = dist.get_rank(), torch.nn.Linear(2, 4)
    fully_shard(net, mesh=init_device_mesh("cpu", (4,)))
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024)
    scaler.scale(net(torch.ones(1, 2)).sum()).backward()
    if rank == 1:
        net.weight.grad.to_local().fill_(torch.inf)
    before = net.weight.to_local().detach().clone()
    scaler.step(optimizer)
    scaler.update()
    skipped = torch.equal(before, net.weight.to_local())
    dist.destroy_process_group()
    return {"skipped": skipped, "scale": scaler.get_scale()}


@pytest.mark.more
def test_a_gradscaler_that_meets_dtensors_asks_all_ranks(pool: nbddp.Pool) -> None:
    assert list(pool.run(on_dtensors)) == [{"skipped": True, "scale": 512.0}] * 4


# -- step_together ---------------------------------------------------------------------------

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


WRONG_STEPS = [
    Mutant("alone", step("pass"), "step 2, scale 1024: rank 3 found inf or nan, rank 3 skipped the step and ranks 0–2 "
           "took it: the shards are now out of step; combine the ranks' findings"),
    Mutant("minimum", step("dist.all_reduce(found, dist.ReduceOp.MIN)"), "parameters are now inf or nan"),
    Mutant("product", step("dist.all_reduce(found, dist.ReduceOp.PRODUCT)"), "parameters are now inf or nan"),
    Mutant("rank 0's", step("dist.broadcast(found, 0)"), "rank 3 found inf or nan, and the step was taken"),
    Mutant("reduced to rank 0", step("dist.reduce(found, 0)"), "took it: the shards are now out of step"),
    Mutant("only if found", step("if found: dist.all_reduce(found)"), "deadlock: "),
    Mutant("not waited", step("dist.all_reduce(found, async_op=True)"), "nothing waits for it"),
    Mutant("only inf", step().replace("not all(torch.isfinite(g).all()", "any(torch.isinf(g).any()"),
           "step 4, scale 512: rank 0 found inf or nan, and the step was taken: parameters are now inf or nan"),
    Mutant("only the first", step().replace("for g in grads)))", "for g in grads[:1])))"), "step 2, scale"),
    Mutant("not unscaled", step(unscale="pass"),
           "step 1, scale 1024: rank 0: the parameters moved by 1.02e+03 × the right step: the gradients were not"),
    Mutant("multiplied", step(unscale="g *= scale"), "the gradients were multiplied by scale"),
    Mutant("unscaled twice", step(unscale="g /= scale ** 2"), "the gradients were divided by scale twice"),
    Mutant("gradients averaged", step("for t in (found, *grads): dist.all_reduce(t)"),
           "the parameters moved, but not by this rank's own unscaled gradients"),
    Mutant("never steps", step(unscale="return scale"), "no rank found inf or nan, and ranks 0–3 did not take"),
    Mutant("twice", step().replace("    optimizer.step()", "    optimizer.step(); optimizer.step()"), "moved"),
    Mutant("nothing back", step(less="None"), "rank 0 returned None and not the scale for the next step"),
    Mutant("scale kept", step(less="scale"), "so all ranks halve the scale to 512; rank 0 returned 1024"),
    Mutant("scale halved by who found it", step("own = bool(found); dist.all_reduce(found)", less="scale / (1 + own)"),
           "rank 0 returned 1024, and rank 3 512: from here on ranks scale their losses differently"),
    Mutant("scale grows", step(same="2 * scale"), "no rank found inf or nan, so the scale stays 1024"),
    Mutant("steps all the same", step(found="found > 9"), "parameters are now inf or nan"),
    Mutant("nan to zero", step("[torch.nan_to_num_(g, 0, 0, 0) for g in grads]; found *= 0"), "took the step any"),
    Mutant("unwritten", "def step_together(optimizer, scale):\n    ...", "still to be written"),
    Mutant("raises", step("dist.all_reduce(3)"), "a collective takes a tensor, not a number or None"),
    Mutant("dies", step("import os; os._exit(3)"), "3"),
    Mutant("hangs", step("while True: pass"), "no answer after"),
]  # fmt: skip
RIGHT_STEPS = [
    step(),
    step("dist.all_reduce(found, dist.ReduceOp.MAX)", "found.item() == 1", "torch.tensor(0.5 * scale)"),
    step("found = torch.stack([torch.isfinite(g).all() for g in grads]).all().int(); "
         "dist.all_reduce(found, dist.ReduceOp.MIN)", "not found"),
]  # fmt: skip


@pytest.mark.every(4, "mutants")
@pytest.mark.parametrize("mutant", WRONG_STEPS, ids=str)
def test_wrong_steps_are_told_why(pool: nbddp.Pool, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    if mutant.name == "hangs":
        monkeypatch.setattr("nbddp.lessons.framework.run_check.DEADLINE", 2.0)
    mutant.meets(check.step_together)


def test_right_steps_pass(pool: nbddp.Pool) -> None:
    assert check.step_together(solution("14", "step_together"))
    for source in RIGHT_STEPS:
        assert check.step_together(defined(source, "step_together")), source
    assert "still to be written" in check.step_together(exercise("14", "step_together")).line


# -- clip_global_norm ------------------------------------------------------------------------

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
REDUCE = "dist.all_reduce(whole, group=shard_group)"


def clip(norm: str = f"{REDUCE}; norm = (whole + copied) ** 0.5", factor: str = "min(1, max_norm / norm)",
         those: str = "shards + copies", back: str = "norm") -> str:  # fmt: skip
    return CLIP.format(norm=f"    {norm}", factor=factor, those=those, back=back)


WRONG_CLIPS = [
    Mutant("own", clip("norm = (whole + copied) ** 0.5"),
           "mesh of 2 × 2, rank 0, max_norm 1: expected a norm of 10.559, got 5.050; that is the norm of what"),
    Mutant("over all ranks", clip("dist.all_reduce(whole); norm = (whole + copied) ** 0.5"),
           "the sum went over all ranks, so every shard counts once for each replica: all_reduce within shard_group"),
    Mutant("copies too", clip("whole += copied; " + REDUCE + "; norm = whole ** 0.5"),
           "were added before the all_reduce, so they count once per shard: add them after"),
    Mutant("all over all", clip("whole += copied; dist.all_reduce(whole); norm = whole ** 0.5"),
           "everything was summed over all ranks"),
    Mutant("root first", clip("whole = (whole + copied) ** 0.5; " + REDUCE + "; norm = whole"),
           "the root was taken before the sum"),
    Mutant("no root", clip(REDUCE + "; norm = whole + copied"), "that is the square of the norm: the root is missing"),
    Mutant("sharded alone", clip(REDUCE + "; norm = whole ** 0.5"), "the replicated ones belong to it too"),
    Mutant("replicated alone", clip("norm = copied ** 0.5"), "that is the norm of the replicated gradients alone"),
    Mutant("largest", clip("dist.all_reduce(whole, dist.ReduceOp.MAX, group=shard_group); "
                           "norm = (whole + copied) ** 0.5"), "that is the largest of the ranks' norms"),
    Mutant("mean", clip("dist.all_reduce(whole, dist.ReduceOp.AVG, group=shard_group); "
                        "norm = (whole + copied) ** 0.5"), "that is the average of the ranks' squares; they add up"),
    Mutant("norms added", clip(REDUCE + "; norm = whole ** 0.5 + copied ** 0.5"), "norms of parts do not add up"),
    Mutant("enlarged", clip(factor="max_norm / norm"), "max_norm 100: the norm is right; expected unchanged gradients, "
           "got gradients × 9.470; the norm is below max_norm, and clipping never increases a gradient"),
    Mutant("not clipped", clip(factor="1"), "the norm is right; expected gradients × 0.095, got unchanged gradients"),
    Mutant("copies left out", clip(those="shards"), "not all replicated gradients were scaled by 0.095"),
    Mutant("shards left out", clip(those="copies"), "not all sharded gradients were scaled by 0.095"),
    Mutant("not in place", clip().replace("g *= factor", "g = g * factor"), "got unchanged gradients"),
    Mutant("by value", clip().replace("g *= factor", "g.clamp_(-max_norm, max_norm)"), "scaled by the same factor"),
    Mutant("norm after", clip(back="norm * factor"), "that is the norm after clipping"),
    Mutant("nothing back", clip(back="None"), "return the norm before clipping, not None"),
    Mutant("torch's own", "import torch\ndef clip_global_norm(sharded, replicated, max_norm, shard_group):\n    return "
           "torch.nn.utils.clip_grad_norm_(sharded + replicated, max_norm)", "the norm of what this rank holds"),
    Mutant("None not looked for", clip().replace(" if p.grad is not None]", "]"), "raised TypeError"),
    Mutant("parameters", clip().replace("p.grad for", "p for"), "a parameter changed; only gradients are clipped"),
    Mutant("one rank leaves", clip(f"if dist.get_rank() == 1: return\n    {REDUCE}; norm = (whole + copied) ** 0.5"),
           "deadlock: rank 0"),
    Mutant("unwritten", "def clip_global_norm(sharded, replicated, max_norm, shard_group):\n    ...", "to be written"),
]  # fmt: skip
RIGHT_CLIPS = [
    clip(),
    clip(factor="(max_norm / (norm + 1e-6)).clamp(max=1)"),
    clip("parts = torch.stack([whole, copied / dist.get_world_size(shard_group)]); "
         "dist.all_reduce(parts, group=shard_group); norm = float(parts.sum()) ** 0.5"),
]  # fmt: skip


@pytest.mark.every(4, "mutants")
@pytest.mark.parametrize("mutant", WRONG_CLIPS, ids=str)
def test_wrong_norms_are_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    mutant.meets(check.clip_global_norm)


def test_right_norms_pass(pool: nbddp.Pool) -> None:
    assert check.clip_global_norm(solution("14", "clip_global_norm"))
    for source in RIGHT_CLIPS:
        assert check.clip_global_norm(defined(source, "clip_global_norm")), source
    assert "still to be written" in check.clip_global_norm(exercise("14", "clip_global_norm")).line


def test_two_ranks_are_enough(two: nbddp.Pool) -> None:
    with check.on(two):
        assert check.clip_global_norm(solution("14", "clip_global_norm"))
        assert check.step_together(solution("14", "step_together"))


@given(st.integers(1, 9))
def test_shards_are_those_of_tensor_split(shards: int) -> None:
    for values in SHARDED:
        theirs = [part.tolist() for part in torch.tensor(values).tensor_split(shards)]
        assert [shard(values, shards, i) for i in range(shards)] == theirs
    assert groups(4, 2) == [[0, 1], [2, 3]]
