"""The meaning of a learner's exception in an exercise, if Python's or torch's own message does not state it.

Pure: imports only the standard library.
"""

from __future__ import annotations

import re

PLAIN = (
    (
        r"name '.*' is not defined",
        "the function knows its arguments and what is imported or defined inside it, not the names of %%ddp cells",
    ),
    (
        r"unsupported operand.*'NoneType'.*",
        "something is None there: all_reduce and its like change their tensor in place and return None",
    ),
    (
        r"Expected parameter `tensor` of type torch.Tensor",
        "a collective takes a tensor, not a number or None; .grad is None before backward",
    ),
    (r"Tensor post accumulate grad hooks should return None", "change p.grad in place instead"),
    (r"trying to initialize the default process group twice", "the check has made the process group; remove that call"),
    (r"Default process group has not been initialized", "the check has made one and needs it; do not end it"),
    (r"EOF when reading a line", "input() does not work on a rank; use the arguments"),
    (r".*forward\(\) missing 1 required positional argument", "an autograd Function is called by its .apply"),
    (r"a leaf Variable that requires grad is being used in an in-place operation", "make a new tensor, such as x - m"),
)
SHORT = (
    (
        r"incompatible function arguments",
        "an argument has a type that the function does not take, such as a word where dist.ReduceOp.SUM is meant",
    ),
    (
        r"Invalid rank",
        "num_replicas is the world size and rank this process's own; without them, DistributedSampler finds both",
    ),
)


def explained(message: str) -> str:
    """The message, and what it means if that is known. Of a message that is long, or another one on each rank, only
    the part that tells is left."""
    for pattern, means in PLAIN:
        if re.search(pattern, message):
            return f"{message.rstrip('.!')}; {means}"
    for pattern, means in SHORT:
        found = re.search(pattern, message)
        if found:
            return f"{found.group()}; {means}"
    return message
