"""The numbers of a program in a loss's graph: a temperature, a margin, label smoothing, the weight of a further term.

The terms of a sum come first. The weight of the first may be a rank's share of the samples; those of the others are
parts of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from nbddp.capabilities.sanitizer.recording import FURTHER, WHOLE
from nbddp.compat.extra.torch import saved

NODES = 48  # of a graph that are looked through
TERMS = 8
NLL = ("NllLossBackward0", "NllLoss2DBackward0")
RESHAPES = (  # nodes which change no number
    "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1",
    "UnsqueezeBackward0", "CloneBackward0", "ToCopyBackward0", "AliasBackward0",
)  # fmt: skip
NUMBERS = {  # node → what it keeps of the program's numbers
    **dict.fromkeys((*NLL, "MseLossBackward0", "BinaryCrossEntropyWithLogitsBackward0"), ("reduction",)),
    "PowBackward0": ("exponent",),
    "SmoothL1LossBackward0": ("reduction", "beta"), "HuberLossBackward0": ("reduction", "delta"),
    "ClampBackward1": ("min", "max"), "ClampMinBackward0": ("min",), "ClampMaxBackward0": ("max",),
    "LeakyReluBackward0": ("negative_slope",), "SoftplusBackward0": ("beta", "threshold"),
    "MulBackward0": ("other",), "MulBackward1": ("other",), "DivBackward0": ("other",), "DivBackward1": ("other",),
}  # fmt: skip
Setting = tuple[str, float]
Term = tuple[Any, float]  # a node, and what it is multiplied by


def settings_below(root: Any) -> tuple[int, list[Setting]] | None:
    """A digest of the graph's form, and its numbers, each with a name. None if a number is unknown."""
    terms = _terms(root)
    if not terms or not terms[0][1]:
        return None
    terms, smoothing = _unsmoothed(terms)
    found: list[Setting] = [(WHOLE, terms[0][1])]
    found += [("label_smoothing", value) for value in smoothing]
    found += [(FURTHER, weight / terms[0][1]) for _, weight in terms[1:]]
    names: list[str] = []
    seen: set[Any] = set()
    waiting = [node for node, _ in terms]
    while waiting and len(seen) < NODES:
        node = waiting.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        name = type(node).__name__
        names.append(name)
        found += [(_said(name, kept), value) for kept in NUMBERS.get(name, ()) if (value := _number(node, kept)) != 0]
        waiting += [below for below, _ in node.next_functions]
    return zlib.crc32(" ".join([*names, str(len(terms))]).encode()), found


def _said(node: str, kept: str) -> str:
    """`a factor`, `a divisor`, `exponent`."""
    said = {"Mul": "a factor", "Div": "a divisor"}.get(node[:3], kept)
    return "reduction (1 is the mean, 2 the sum)" if said == "reduction" else said


def _number(node: Any, kept: str) -> float:
    """What a node keeps, if that is one number of the program; else 0. Nothing is read from a GPU."""
    value = saved(node, kept)
    if isinstance(value, torch.Tensor):
        own = value.numel() == 1 and not value.dim() and value.device.type == "cpu" and not value.requires_grad
        return float(value) if own else 0.0
    return float(value) if isinstance(value, (int, float)) else 0.0


def _terms(root: Any) -> list[Term]:
    """The terms of a sum, with their weights; none if a weight is no plain number, or there are many."""
    found: list[Term] = []
    waiting: list[Term] = [(root, 1.0)]
    for _ in range(NODES):
        if not waiting:
            return found if len(found) <= TERMS else []
        node, weight = waiting.pop(0)
        name = "" if node is None else type(node).__name__
        below = [] if node is None else [each for each, _ in node.next_functions]
        if name in RESHAPES or name in ("NegBackward0", "AddBackward0", "SubBackward0"):
            signs = [1.0, -float(saved(node, "alpha"))] if name == "SubBackward0" else [1.0] * len(below)
            signs = [-1.0] if name == "NegBackward0" else signs
            waiting += [(each, weight * sign) for each, sign in zip(below, signs, strict=True) if each is not None]
        elif name.startswith(("MulBackward", "DivBackward")) and sum(each is not None for each in below) == 1:
            factor = _number(node, "other")
            if not factor:
                found.append((node, weight))
                continue
            waiting += [(e, weight * factor if name[0] == "M" else weight / factor) for e in below if e is not None]
        elif node is not None:
            found.append((node, weight))
    return []


def _unsmoothed(terms: list[Term]) -> tuple[list[Term], list[float]]:
    """Cross entropies whose labels are smoothed as plain ones, and the smoothing of each cross entropy."""
    smoothing: list[float] = []
    left = list(terms)
    for node, weight in terms:
        if type(node).__name__ not in NLL or saved(node, "weight") is not None:
            continue
        source = next_node(node)
        even = next((term for term in left if _is_even(term[0], source)), None)
        share = 0.0 if even is None else even[1] * _classes(node, source) * _targets(node)
        if even is not None:
            left.remove(even)
            left[left.index((node, weight))] = (node, weight + share)
        smoothing.append(round(share / (weight + share), 6) if weight + share else 0.0)
    return left, smoothing


def next_node(node: Any, passes: Sequence[str] = RESHAPES) -> Any:
    """The next node that is none of `passes`."""
    for _ in range(8):
        node = next((each for each, _ in node.next_functions if each is not None), None)
        if type(node).__name__ not in passes:
            break
    return node


def _is_even(node: Any, source: Any) -> bool:
    """Whether a term is a sum, without ignored targets, of sums over all classes of the same logarithms."""
    for _ in range(8):
        if node is source or not type(node).__name__.startswith(("Sum", "MaskedFill", "Neg")):
            break
        node = next_node(node)
    return node is source and source is not None


def _classes(node: Any, source: Any) -> int:
    return int(saved(source, "result").shape[1 if type(node).__name__ == "NllLoss2DBackward0" else -1])


def _targets(node: Any) -> float:
    """How many targets, or how much weight of them, a mean is over; 1 for a sum."""
    weight = saved(node, "total_weight")
    return float(weight) if saved(node, "reduction") == 1 and weight.device.type == "cpu" else 1.0
