"""Lesson 18: answers to its exercises, wrong and right."""

from __future__ import annotations

from tests.lessons.answers import builder, cells
from tests.lessons.tables import Table

(SOLUTION,) = (s for s in builder().solutions(cells("18")) if "def capstone" in s)


def changed(*pairs: tuple[str, str]) -> str:
    """The solution with something replaced."""
    text = str(SOLUTION)
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text


CLIP = "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
SHARE = "t[rank::world_size]"
SAVED = 'torch.save(state, path + ".new")\n                os.replace(path + ".new", path)'
CAPSTONE = Table("capstone", verified="16 of 16 points, on real ranks", every=99, marker="mutants", nproc=4, wrong={
    changed(("DDP(model)", "model")):
        "✗ 0/2 the same weights on all ranks: ranks 1–3 and rank 0 end with different weights; train DDP(model)",
    changed((SHARE, "t")):
        "✗ 0/3 trains as one process with the whole batch does: step 0: the ranks' forward passes had 48 rows in a",
    changed((SHARE, "t[:3]")): "the weights are not those of one process; each rank takes its",
    changed((SHARE, "t[rank::4]")):
        "✗ 0/2 runs on any number of ranks, as torchrun may start it: on 3 ranks: step 0: the ranks' forward passe",
    changed(("with torch.autocast(device.type, dtype=torch.bfloat16):", "if True:")):
        "✗ 0/1 forward passes in bfloat16: the model is called outside torch.autocast(device.type, dtype=",
    changed(("torch.bfloat16", "torch.float16")): "autocast's dtype is float16",
    changed((CLIP, "")): "✗ 0/1 gradients clipped: a step was taken with gradients of norm",
    changed(("(), 1.0)", "(), 0.5)")): "clip once, after backward() has averaged the gradients",
    changed((" * min(1, (step + 1) / 10)", "")):
        "✗ 0/1 the learning rate warms up: rank 0, step 0, learning rate: expected 0.001, got 0.01",
    changed(("            if rank == 0:\n", "            print('done')\n            if rank == 0:\n")):
        "✗ 0/1 only rank 0 logs, and logs the loss of the whole batch: ranks 1–3 printed too",
    changed(("            dist.all_reduce(mean)\n", "            mean *= world_size\n")):
        "loss printed, loss of the whole batch: ",
    changed(("step {step + 1}:", "step {step}:")): "steps that rank 0 named: expected 10, 20, got 9, 19",
    changed(("print(f", "str(f")): "that rank 0 printed: expected 2, one every 10 steps, got 0",
    changed(("return (sums[0] / sums[1]).item()", "return loss.item()")):
        "✗ 0/2 unbiased evaluation: rank 0, returned loss: expected",
    changed(("[loss.item() * rows, rows]", "[loss.item(), 1]")): "sum losses × rows and rows over",
    changed(("return (sums[0]", "(sums[0]")): "rank 0 returned None; return the mean loss over",
    changed((SAVED, "pass")): "no file in folder after 13 steps; write a checkpoint after every 10",
    changed(('optimizer.load_state_dict(state["optimizer"])', "pass")):
        "✗ 0/3 continues from its checkpoint: the final weights differ from the undisturbed run",
    changed(('first = state["step"]', "pass")): "rank 0 continued at step 0; the last checkpoint",
    changed(('"step": step + 1', '"step": step')): "rank 0 continued at step 9; the last",
    changed((SAVED, "torch.save(state, path)")): "the checkpoint is written over the last good one",
    changed(('"model": model.state_dict()', '"model": parallel.state_dict()')):
        "✗ 0/3 continues from its checkpoint: restarted: a rank raised RuntimeError: Error(s) in loading",
    changed(("    for step in range", "    raise ValueError('no idea')\n    for step in range")):
        "0 of 16 points | ✗ 0/2 the same weights on all ranks: a rank raised ValueError: no idea",
    changed(("    return (sums", "    if rank == 0:\n        dist.all_reduce(sums)\n    return (sums")):
        "0 of 16 points | ✗ 0/2 the same weights on all ranks: deadlock: rank 0 waits in all_reduce",
    changed(("loss_of(parallel, batch", "loss_of(model, batch")): "train DDP(model), called as a func",
})  # fmt: skip
