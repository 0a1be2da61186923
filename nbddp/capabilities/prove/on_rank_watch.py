"""Watches a step that runs in a copy: precision, random numbers, batch statistics, and collectives that cut gradients.
Dropout is switched off.

`Watch` sees each operator of torch by its dispatch, and thus also what no module tells of, such as a call of
`torch.nn.functional.batch_norm`.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from nbddp.capabilities.prove.plan import SeenFacts
from nbddp.compat import torch as torch_compat

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
ATTENTION = "scaled_dot_product"  # random by its dropout alone, and that is off
CUTS = ("all_gather", "all_gather_into_tensor", "all_gather_object", "gather", "all_gather_single")


class WatchedStep:
    """As `SeenFacts`, while it is being found."""

    def __init__(self) -> None:
        self.dtypes: set[str] = set()
        self.random: set[str] = set()
        self.statistics: set[str] = set()
        self.dropout: set[str] = set()
        self.cuts: set[str] = set()
        self.hooks: set[str] = set()
        self.backwards = 0

    def count(self) -> None:
        self.backwards += 1

    def facts(self) -> SeenFacts:
        names = ("dtypes", "random", "statistics", "dropout", "cuts", "hooks")
        found: dict[str, Any] = {name: tuple(sorted(getattr(self, name))) for name in names}
        return SeenFacts(**found, backwards=self.backwards)


def watching(seen: WatchedStep) -> AbstractContextManager[Any]:
    """While this is open, operators are seen."""
    import torch

    watch: AbstractContextManager[Any] = torch_compat.watch_operators(
        lambda func, args, found: _note(seen, torch, func, args, found)
    )
    return watch


def _note(seen: WatchedStep, torch: Any, func: Any, args: Any, found: Any) -> None:
    name = func.__name__.partition(".")[0]
    if torch.Tag.nondeterministic_seeded in func.tags and ATTENTION not in name:
        seen.random.add(f"torch.{name.rstrip('_')}")
    if "batch_norm" in name and "backward" not in name and _computes_statistics(args):
        seen.statistics.add("batch_norm")
    for value in found if isinstance(found, list | tuple) else (found,):
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1:
            seen.dtypes.add(str(value.dtype).removeprefix("torch."))


def _computes_statistics(args: Any) -> bool:
    flags = [a for a in args if isinstance(a, bool)]
    return not flags or flags[0]


def random_states() -> tuple[Any, ...]:
    """Of generators that are not torch's."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), repr(numpy.random.get_state()) if numpy is not None else None


def without_dropout(seen: WatchedStep, modules: list[Any]) -> None:
    """Have no dropout in this process; what would have been is noted."""
    import torch
    from torch.nn import functional

    def plain(name: str) -> Callable[..., Any]:
        @functools.wraps(getattr(functional, name))
        def same(
            input: Any,  # noqa: A002 - torch's name
            p: float = 0.5,
            training: bool = name != "feature_alpha_dropout",
            *a: Any,
            **k: Any,
        ) -> Any:
            if training and p > 0:
                seen.dropout.add(f"{name}, p={p:g}")
            return input

        return same

    for name in DROPOUTS:
        setattr(functional, name, plain(name))
    attention = functional.scaled_dot_product_attention

    def attend(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *a: Any, **k: Any
    ) -> Any:
        if dropout_p > 0:
            seen.dropout.add(f"scaled_dot_product_attention, p={dropout_p:g}")
        return attention(query, key, value, attn_mask, 0.0, *a, **k)

    functional.scaled_dot_product_attention = attend
    for module in modules:
        if isinstance(module, torch.nn.RNNBase) and module.training and module.dropout > 0:
            seen.dropout.add(f"{type(module).__name__}, p={module.dropout:g}")
            module.dropout = 0.0


def note_cuts(seen: WatchedStep) -> None:
    """Note calls of collectives whose results carry no gradient."""
    import torch.distributed as dist

    def noted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.cuts.add(name)
            return original(*args, **kwargs)

        return call

    for name in CUTS:
        if hasattr(dist, name):
            setattr(dist, name, noted(name, getattr(dist, name)))


def count_backwards(seen: WatchedStep) -> None:
    """Count calls of backward: a step that makes one per sample makes more of them with more samples."""
    import torch

    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        seen.count()
        return original(*args, **kwargs)

    torch.autograd.backward = backward


def maybe(seen: WatchedStep, watch: bool) -> AbstractContextManager[Any]:
    return watching(seen) if watch else nullcontext()
