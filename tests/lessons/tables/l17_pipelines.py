"""Lesson 17: answers to its exercises, wrong and right."""

from __future__ import annotations

from tests.lessons.tables import Table, within

LIST = "def schedule_1f1b(stage, stages, micro_batches):\n    m, ahead = micro_batches, min(stages - 1 - stage, "
LIST += "micro_batches)\n    "
BODY = """steps = [("F", i) for i in range(ahead)]
    for i in range(ahead, m):
        steps += [("F", i), ("B", i - ahead)]
    return steps + [("B", i) for i in range(m - ahead, m)]
"""
SCHEDULE_1F1B = Table("schedule_1f1b", within(LIST + "..."), nproc=4, wrong={
    "return [(k, i) for k in 'FB' for i in range(m)]":
        "4 stages, 8 micro-batches: stage 0 holds 8 micro-batches at a time, 4 under 1F1B: that is GPipe",
    "return [(k, i) for i in range(m) for k in 'FB']":
        "takes 96 ticks (a forward 1, a backward 2), and 1F1B takes 33: stage 0 has at most 1 micro-batch",
    "ahead = min(stage, m)\n    " + BODY: "deadlock: stage 0 waits for stage 1 before B0",
    "ahead = max(ahead - 1, 0)\n    " + BODY: "has at most 3 micro-batches in progress",
    "ahead = min(stages - 1, m)\n    " + BODY: "stage 1 holds 4 micro-batches at a time, 3",
    "ahead = stages - 1 - stage\n    " + BODY:
        "schedule_1f1b(0, 4, 2) has F2; 2 micro-batches are numbered from 0 to 1",
    BODY.replace(' + [("B", i) for i in range(m - ahead, m)]', ""):
        "lacks B5: every micro-batch needs its backward pass on every stage",
    BODY.replace('[("F", i), ("B", i - ahead)]', '[("B", i - ahead), ("F", i)]'):
        "stage 3 does B0 before its own F0; a backward pass needs its forward pass",
    "return [(k, i + 1) for k in 'FB' for i in range(m)]": "has F8; 8 micro-batches are",
    "return [f'F{i}' for i in range(m)]": "has the step 'F0'; a step is a pair (\"F\", i)",
    "return [('F', 0)] * m": "lacks F1: every micro-batch needs its forward pass",
    "return 'F0 B0'": "return a list of steps such as",
    "if stage: return []": "schedule_1f1b(0, 4, 8) is None; here the function ends",
    "return steps": "schedule_1f1b(0, 4, 8) raised NameError",
}, right=[
    BODY,
    """steps, f, b = [], 0, 0
    while b < m:
        if f < m and f - b < stages - stage:
            steps.append(("F", f)); f += 1
        else:
            steps.append(["B", b]); b += 1
    return steps
""",
])  # fmt: skip

HEAD = """
def run_stage(steps, stage, inputs, targets, loss_of, shape):
    import torch, torch.distributed as dist
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    count = sum(kind == "F" for kind, _ in steps)
    kept, sends, total = {}, [], 0.0
"""
LOOP = """
    for kind, i in steps:
        if kind == "F":
            x = torch.empty(shape)
            if rank == 0: x = inputs[i]
            else: dist.recv(x, rank - 1); x.requires_grad_()
            y = stage(x)
            if rank == last: y = loss_of(y, targets[i]) / count; total += y.item()
            else: sends.append(dist.isend(y.detach(), rank + 1))
            kept[i] = x, y
        else:
            (x, y), gradient = kept.pop(i), None
            if rank < last: dist.recv(gradient := torch.empty(shape), rank + 1)
            y.backward(gradient)
            if rank: sends.append(dist.isend(x.grad, rank - 1))
    for send in sends: send.wait()
    return total
"""


def changed(*pairs: tuple[str, str]) -> str:
    """The right answer with something replaced."""
    text = LOOP
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return HEAD + text


BLOCKING = (("sends.append(dist.isend(y.detach(), rank + 1))", "dist.send(y.detach(), rank + 1)"),
            ("sends.append(dist.isend(x.grad, rank - 1))", "dist.send(x.grad, rank - 1)"))  # fmt: skip
RUN_STAGE = Table("run_stage", every=4, marker="mutants", nproc=4, wrong={
    changed(*BLOCKING):
        ("1F1B, 4 ranks, 6 micro-batches: deadlock: rank 0 waits in send to rank 1", "Start sends with isend, "
        "keep what it returns, and wait for all of"),
    changed(*((a, b.replace("dist.send", "dist.isend") + ".wait()") for a, b in BLOCKING)):
        "Start sends with isend, keep what it returns, and wait for all of them at the end",
    changed(("            y = stage(x)\n", ""), ("            if rank == 0: x",
            "            y = stage(x)\n            if rank == 0: x")):
        "GPipe, 4 ranks",
    changed(("if rank: sends", "if rank > 1: sends")):
        "ranks 1–3 finished: every send needs its recv on the other side",
    changed(("dist.recv(x, rank - 1)", "dist.recv(x, rank + 1)")):
        "names a rank that does not exist; the ranks are 0 to 3, and a stage's neighbours are rank - 1",
    changed(("; x.requires_grad_()", "")): "unless x.requires_grad_() was called before",
    changed((" / count; total += y.item()", "; total += y.item() / count")):
        "GPipe, 4 ranks, 3 micro-batches: rank 3, 0.weight: yours is 3.00 × the gradient of one process: you added",
    changed(("y.backward(gradient)", "y.backward(None if rank == last else gradient / count)")):
        "rank 2, 0.weight: yours is 0.33 × the gradient of one process: you divided by the number of micro-batches",
    changed(("y.backward(gradient)", "stage.zero_grad(); y.backward(gradient)")):
        "yours is of the last micro-batch alone",
    changed(("    return total", "    for p in stage.parameters(): p.grad = p.grad * 0\n    return total")):
        "they were set to zero after the last backward pass",
    changed(("isend(x.grad,", "isend(x.detach(),")): "rank 2, 0.weight: yours differs",
    changed(("kept.pop(i), None", "list(kept.values())[-1], None")):
        "GPipe, 4 ranks, 3 micro-batches: rank 3 raised RuntimeError: Trying to backward through the graph a "
        "second time; each micro-batch goes backward once; keep them apart",
    changed(("in steps:", "in sorted(steps, key=lambda s: s[0] == 'B'):")):
        "1F1B, 4 ranks, 6 micro-batches: rank 0 did F0–F5 B0–B5, its steps were F0–F3 B0 F4 B1",
    changed(("inputs[i]", "torch.cat(inputs)")): "ranks",
    changed(("    return total", "")): "but run_stage returned None on the last stage",
    changed(("total += y.item()", "total += y.item() * count")):
        "returned the sum of the micro-batches' losses; return their mean",
    changed(("    for send in sends: send.wait()\n", "")): "a send ends when its Work object is deleted",
    changed(("    for send", "    dist.barrier(); dist.all_reduce(torch.ones(1))\n    for send")):
        "the gradients are right, but all_reduce was called",
    changed(("if rank == 0: x = inputs[i]", "count = len(inputs)\n            if rank == 0: x = inputs[i]")):
        "inputs are on the first stage only",
    changed(("y.backward(gradient)", "y.backward()")): "only the last stage has a loss; the",
    changed(("            y.backward(gradient)\n            if rank: sends.append(dist.isend(x.grad, rank - 1))\n", ""),
            ("            if rank < last: dist.recv(gradient := torch.empty(shape), rank + 1)\n", "")):
        "and no backward pass: call backward() on what the forward pass made",
    changed(("loss_of(y, targets[i])", "loss_of(targets[i], y)")): "the wrong arguments or the",
    changed(("if rank < last: dist", "if rank < 3: dist")):
        "1F1B, 3 ranks, 5 micro-batches: a send or recv names a rank that does not exist",
    changed(("y.backward(gradient)", "y.backward(None if rank == last else torch.ones_like(y))")):
        "rank 3's are right, so a wrong tensor came",
}, right=[
    changed(("torch.empty(shape)\n", "torch.empty(shape, requires_grad=rank > 0)\n"), ("; x.requires_grad_()", "")),
    changed(("total += y.item()", "total = total + y.detach()")),
    changed(("sends.append(dist.isend(x.grad, rank - 1))", "dist.send(x.grad, rank - 1)")),
])  # fmt: skip
