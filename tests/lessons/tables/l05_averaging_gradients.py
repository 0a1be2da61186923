"""Lesson 05: answers to its exercises, wrong and right."""

from __future__ import annotations

from tests.lessons.tables import Table

AFTER = """
def average_gradients(model):
    import torch, torch.distributed as dist
    n = dist.get_world_size()
    for {each} in {all}:
        {body}
"""


def after(body: str, each: str = "p", over: str = "model.parameters()") -> str:
    return AFTER.format(each=each, all=over, body=body.replace("\n", "\n        "))


MEAN_OF = "dist.all_reduce(p.grad); p.grad /= n"
AVERAGE_PARAMETERS = "with torch.no_grad():\n    dist.all_reduce(p); p /= n"
ONE_FLAT = """
def average_gradients(model):
    import torch, torch.distributed as dist
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat.div_(dist.get_world_size())
    for g, piece in zip(grads, flat.split([g.numel() for g in grads])):
        g.copy_(piece.view_as(g))
"""
AVERAGE_GRADIENTS = Table("average_gradients", after, every=3, unwritten="nothing was exchanged", wrong={
    "dist.all_reduce(p.grad, async_op=True); p.grad /= n":
        "all_reduce was started with async_op=True and nothing waits for it: the answer differs from run to run",
    "dist.all_reduce(p.grad); p.grad /= 2":
        "on 1 rank: rank 0, layer 0.weight: yours is 0.50 × the reference: the sum is divided by 2, but the world",
    "dist.all_reduce(p.grad)":
        "layer 0.weight: yours is 2.00 × the reference: you summed but did not divide by the world size",
    AVERAGE_PARAMETERS: "own gradient: you averaged the parameters; average p.grad, not p",
    after(MEAN_OF, over="list(model.parameters())[:-1]"):
        "rank 0, layer 2.bias: yours is this rank's own gradient: 0.weight, 0.bias, 2.weight are right, but this",
    "dist.broadcast(p.grad, 0)": "all ranks have rank 0's gradient: broadcast copies",
    "p.grad.zero_()": "the gradient is all zeros",
    "p.grad /= n": "0.50 × this rank's own gradient: you divided but did not sum",
    MEAN_OF + "; p.grad /= n": "yours is 0.50 × the reference: you divided by",
    "dist.all_reduce(p.grad); dist.all_reduce(p.grad)": "4.00 × the reference: it was",
    "dist.all_reduce(p.grad, op=dist.ReduceOp.MAX)": "has the largest of the ranks'",
    "dist.all_reduce(p.grad, op=dist.ReduceOp.MIN)": "has the smallest of the ranks'",
    "dist.reduce(p.grad, 0)\nif dist.get_rank() == 0: p.grad /= n":
        "rank 1, layer 0.weight: only rank 0 has the mean; reduce leaves",
    MEAN_OF + "; p.grad.neg_()": "yours is -1.00 × the reference: the sign",
    "p.grad = None": "p.grad is None now",
    MEAN_OF + "\n" + AVERAGE_PARAMETERS: "gradients are right, but you averaged the parameters",
    MEAN_OF + "\np.data -= 0.1 * p.grad": "the second step, rank 0, layer 0.weight: yours",
    MEAN_OF + "\ndist.broadcast(p.data, 0)": "but the parameters were changed too",
    "if dist.get_rank() == 0: dist.all_reduce(p.grad)": "must call the same collectives",
    "raise NotImplementedError": "you have not written average_gradients yet",
    "dist.all_reduce(p.grad); p.grad /= 8":
        "0.25 × the reference: the sum is divided by 8, but the world size is 2: dist.get_world_size()",
    "dist.all_reduce(p.grad); p.grad /= dist.get_rank()": "did you divide by 0, for example by the rank",
    "dist.all_reduce(p.grad); p.grad /= dist.get_rank() + 1":
        "the ranks divide the sum by 1, 2; every rank must divide by the world size",
    MEAN_OF + "; p.grad.fill_(p.grad.mean())": "yours is the same number everywhere",
    "p.grad = dist.all_reduce(p.grad) / n": "in place and return None",
    "def average_gradients(model):\n    dist.barrier()": "not the names of %%ddp cells",
    "dist.all_reduce(p.grad.sum().item())": "takes a tensor, not a number or None",
    "dist.all_reduce(p.grad, op='mean')":
        "a rank raised TypeError: incompatible function arguments; an argument has a type that the function",
    after(MEAN_OF, over="sorted(model.parameters(), key=len, reverse=n * dist.get_rank())"):
        "all ranks call the same collectives in the same order",
    "dist.init_process_group()": "the check has made the process group; remove that call",
    "input()": "input() does not work on a rank",
    "g = p.grad.clone(); dist.all_reduce(g); g /= n": "the result was not put into p.grad",
    "p.grad /= 0 * p.grad": "is not finite",
}, right=[
    ONE_FLAT,
    "got = [torch.empty_like(p.grad) for _ in range(n)]; dist.all_gather(got, p.grad)\np.grad = sum(got) / n",
    "dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)",
])  # fmt: skip

HOOKS = """
def attach_averaging(model):
    import torch, torch.distributed as dist
    n = dist.get_world_size()
    def average(p):
        {body}
    for p in model.parameters():
        p.{register}(average)
"""


def hooks(body: str, register: str = "register_post_accumulate_grad_hook") -> str:
    return HOOKS.format(body=body, register=register)


ATTACH_AVERAGING = Table("attach_averaging", hooks, unwritten="this hook receives the parameter", wrong={
    "dist.all_reduce(p.data); p.data /= n":
        "rank 0, layer 0.weight: yours is this rank's own gradient: you averaged the parameters: this hook",
    "g = p.grad.clone(); dist.all_reduce(g); g /= n": "nothing was exchanged: is the",
    "dist.all_reduce(p.grad)": "2.00 × the reference: you summed but did not divide",
    "p.grad /= n": "you divided but did not sum",
    hooks(MEAN_OF).replace("average(p):", "average(_):"):
        "2.bias is right, but this layer is missing; use the parameter that the hook receives",
    "return p.grad / n": "hooks should return None; change p.grad in place instead",
    "[dist.all_reduce(p.grad) for _ in range(n + 1)]; p.grad /= n": "it was summed more",
    MEAN_OF + "; dist.all_reduce(p.data); p.data /= n": "gradients are right, but you averaged the parameters",
    hooks(MEAN_OF).replace("hook(average)", "hook(average(p))"): ".grad is None before backward",
}, right=[
    hooks("g = p.clone(); dist.all_reduce(g); return g / n", "register_hook"),
    "p.grad.div_(n); dist.all_reduce(p.grad)",
])  # fmt: skip
