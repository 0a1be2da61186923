"""Lesson 16: answers to its exercises, wrong and right."""

from __future__ import annotations

from tests.lessons.tables import Table, within

LAYERS = """
def column_then_row(x, up, down):
    import torch
    import torch.distributed as dist
    def summed(t):
        t = t.clone()
        dist.all_reduce(t)
        return t
    def function(forward, backward):
        class Made(torch.autograd.Function):
            @staticmethod
            def forward(ctx, t):
                return summed(t) if forward else t.view_as(t)
            @staticmethod
            def backward(ctx, g):
                return summed(g) if backward else g
        return Made.apply
    F, G = function(False, True), function(True, False)
"""


def body(text: str) -> str:
    return LAYERS + "\n".join("    " + line for line in text.strip("\n").splitlines())


COLUMN_THEN_ROW = Table("column_then_row", body, every=4, marker="mutants", nproc=4, wrong={
    "return torch.relu(F(x) @ up.T) @ down.T": "each rank has its own part of a sum",
    "return G(torch.relu(F(x) @ up.T) @ down.T) / dist.get_world_size()":
        "that is the sum divided by the world size",
    "return G(G(torch.relu(F(x) @ up.T) @ down.T))": "the world size × the sum",
    "return G(torch.relu(x @ up.T) @ down.T)":
        ("gradient of x[0][0], expected", "so all-reduce its gradient in backward"),
    "G = function(True, True)\nreturn G(torch.relu(F(x) @ up.T) @ down.T)":
        "the backward of your sum all-reduces again",
    "from torch.distributed.nn.functional import all_reduce\nreturn all_reduce(torch.relu(F(x) @ up.T) @ down.T)":
        "4 ranks: the outputs are right; rank 0: in the gradient of down[0][0], expected",
    "return G(torch.relu(F(x) @ up.T) @ down.T) * 4 / dist.get_world_size()": "3 ranks: rank 0",
    "return G(F(x) @ up.T @ down.T)": "compare relu(x @ up.T) @ down.T on this rank's parts",
    "return G((torch.relu(F(x) @ up.T) @ down.T).detach())": "has no graph",
    "return G(torch.relu(x.detach() @ up.T) @ down.T)": "x has no gradient",
    "return torch.relu(F(x) @ up.T)": "return an output of shape (3, 4)",
    "y = torch.relu(F(x) @ up.T) @ down.T\nreturn y if dist.get_rank() else G(y)": "deadlock: ",
}, right=[
    "return G(torch.relu(F(x) @ up.T) @ down.T)",
    "x = x * 1\nx.register_hook(summed)\ny = torch.relu(x @ up.T) @ down.T\ndist.all_reduce(y)\nreturn y",
])  # fmt: skip

GROUPS = "def groups_of(rank, data, tensor):\n    r, d, t = rank, data, tensor\n    row, column = r // t, r % t\n"
GROUPS += "    return "
ROW, COLUMN = "list(range(row * t, row * t + t))", "list(range(column, d * t, t))"
GROUPS_OF = Table("groups_of", within(GROUPS + "..."), nproc=4, wrong={
    f"{COLUMN}, {ROW}": "the two lists are swapped",
    ROW: "return a pair of lists of ranks",
    f"{ROW}[::-1], {COLUMN}": "in ascending order",
    f"{ROW}, list(range(column, 4, 2))": "check the list of the same shard",
}, right=[
    "[k for k in range(d * t) if k // t == row], [k for k in range(d * t) if k % t == column]",
])  # fmt: skip
