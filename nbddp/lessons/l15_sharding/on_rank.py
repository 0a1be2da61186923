"""A rank's part of lesson 15's check: steps of an optimizer whose state is sharded, and their collectives.

Imports torch only inside functions.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict

from nbddp.deadlock.on_rank.call_log import COLLECTIVES
from nbddp.lessons.framework.async_work import Misused, waited

SHAPES = ((3, 5), (5,), (5,))
LR = 0.1
SCATTER, GATHER = "reduce_scatter_tensor", "all_gather_into_tensor"


class Stepped(TypedDict):
    """By step: all parameters, flat, and for each collective its name and how many numbers this rank gave to it."""

    after: list[list[float]]
    called: list[list[tuple[str, int]]]


def stepped(
    function: Callable[..., Any], begin: Sequence[float], gradients: Sequence[Sequence[Sequence[float]]]
) -> Stepped:
    """What `function(parameters, momentum, lr)` does in one step after another.

    begin: all parameters, flat; gradients: by step, by rank, flat. Raises Misused.
    """
    import torch
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    parameters = [torch.nn.Parameter(p) for p in _cut(begin)]
    momentum = torch.zeros(-(-len(begin) // world_size))
    after, called = [], []
    for by_rank in gradients:
        for p, gradient in zip(parameters, _cut(by_rank[rank]), strict=True):
            p.grad = gradient
        with _noted(world_size) as calls, waited(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*an autograd kernel was not registered")
            warnings.filterwarnings("ignore", category=FutureWarning)  # torch 2.13 has newer names for both collectives
            function(list(parameters), momentum, LR)
        for p, shape in zip(parameters, SHAPES, strict=True):
            if tuple(p.shape) != shape:
                raise Misused(
                    f"a parameter of shape {shape} has shape {tuple(p.shape)} after the step: keep the shapes"
                )
        after.append(torch.cat([p.detach().flatten() for p in parameters]).tolist())
        called.append(list(calls))
    return {"after": after, "called": called}


def _cut(flat: Sequence[float]) -> list[Any]:
    """A flat list as tensors of SHAPES."""
    import torch

    sizes = [torch.Size(s).numel() for s in SHAPES]
    return [t.clone().view(s) for t, s in zip(torch.tensor(flat).split(sizes), SHAPES, strict=True)]


@contextmanager
def _noted(world_size: int) -> Iterator[list[tuple[str, int]]]:
    """The collectives that are called in the block. What does not fit together is refused before gloo sees it, whose
    own words differ from run to run."""
    import torch.distributed as dist

    calls: list[tuple[str, int]] = []

    def noted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        called = COLLECTIVES[name][0]

        @functools.wraps(original)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            if called in (SCATTER, GATHER) and len(args) > 1:
                _fits(called, args[0], args[1], world_size)
            given = args[1] if COLLECTIVES[name][1] == 1 and len(args) > 1 else args[0] if args else ()
            calls.append((called, _numbers(given)))
            return original(group, *args, **kwargs)

        return call

    kind = dist.ProcessGroup
    originals = {n: vars(kind)[n] for n in COLLECTIVES if n in vars(kind) and n != "barrier"}
    for name in originals:
        setattr(kind, name, noted(name, getattr(kind, name)))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(kind, name, original)


def _numbers(given: Any) -> int:
    """How many numbers a tensor has, or tensors in lists."""
    if isinstance(given, list | tuple):
        return sum(map(_numbers, given))
    return given.numel() if callable(getattr(given, "numel", None)) else 0


def _fits(called: str, output: Any, given: Any, world_size: int) -> None:
    whole, part = (given, output) if called == SCATTER else (output, given)
    words = ("input", "output") if called == SCATTER else ("output", "input")
    if whole.numel() != world_size * part.numel():
        raise Misused(
            f"{called}: the {words[0]} has {whole.numel()} numbers and the {words[1]} {part.numel()}; on {world_size} "
            f"ranks the {words[0]} has {world_size} × as many. Pad the flat tensor with zeros to a multiple of the "
            "world size"
        )
    if whole.dtype != part.dtype:
        raise Misused(f"{called}: the input is {given.dtype} and the output {output.dtype}; give both one dtype")
