"""A rank's record of losses that are means over counted targets, read from the graph that backward runs through.

From the loss down to a sum over counted targets, the graph holds every number that multiplies or divides it. So the
weight of one target is known, whoever computed it. It may be a mean that leaves labels out, or a masked sum over a
count. The program may have corrected it by the counts of all ranks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from nbddp.capabilities.sanitizer import on_rank_digest as digest
from nbddp.capabilities.sanitizer.recording import FURTHER, WHOLE, CalledFunction, CountedLoss
from nbddp.compat.extra.torch import has_hooks, saved
from nbddp.worker.gpus import capturing

KEPT = 400  # losses that are looked at
WEIGHED = 32  # losses whose weights of classes and settings are looked at
NODES = 48  # of a graph that are looked through
AT_ONCE = 4  # counted sums of one loss, and as many of all elements
ELEMENTWISE = (
    "MseLossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0", "BinaryCrossEntropyBackward0",
    "BinaryCrossEntropyWithLogitsBackward0",
)  # fmt: skip
NLL = ("NllLossBackward0", "NllLoss2DBackward0")
RESHAPES = (  # nodes which change no number
    "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1",
    "UnsqueezeBackward0", "CloneBackward0", "ToCopyBackward0", "AliasBackward0",
)  # fmt: skip
PASSES = (*RESHAPES, "NegBackward0")  # nodes which change neither the size of a number nor a sum
MEAN, SUM, EACH = 1, 2, 0  # `reduction` in torch's graph
Numbers = tuple[Any, ...]


class Losses:
    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder
        self.weighed = 0

    def install(self) -> None:
        self.recorder.wrap(torch.Tensor, "backward", self._from, graphs=True)

    def _from(self, original: Any) -> Any:
        compiling = torch.compiler.is_compiling

        def backward(loss: Any, gradient: Any = None, *args: Any, **kwargs: Any) -> Any:
            if compiling() or not self.recorder.on:
                return original(loss, gradient, *args, **kwargs)
            self._called()
            facts = self._look(loss, gradient) if len(self.recorder.record.losses) < KEPT else None
            found = original(loss, gradient, *args, **kwargs)
            for fact in facts or ():
                fact.ended = self.recorder.tick()
            return found

        return backward

    @digest.safely
    def _called(self) -> None:
        recorder = self.recorder
        recorder.keep(recorder.record.calls, CalledFunction("backward", recorder.tick(), recorder.place(2)))

    @digest.safely
    def _look(self, loss: Any, gradient: Any) -> list[CountedLoss]:
        if loss.numel() != 1 or has_hooks(loss) or capturing():
            return []
        weight = () if gradient is None else (_number(gradient),)
        at, place, facts = self.recorder.tick(), self.recorder.place(2), []
        try:
            self._note_weights(loss.grad_fn, place)
            found = counted(loss.grad_fn, weight)
        except (RuntimeError, AttributeError):  # a graph that was let go of, or whose node holds other fields
            return []
        numbers = {bool(form): -1 for form, *_ in found}
        for form, whole, count, odd, times, over in found:
            numbers[bool(form)] += 1
            fact = CountedLoss(at, place, numbers[bool(form)], form, whole)
            for name, value in (("count", count), ("odd", odd)):
                self.recorder.later(fact, name, value)
            for factors, values in ((fact.times, times), (fact.over, over)):
                for value in values:
                    self.recorder.later(factors, "append", value)
            self.recorder.record.losses.append(fact)
            facts.append(fact)
        return facts

    def _note_weights(self, node: Any, place: int) -> None:
        """The weights of classes in a loss, which are to be the same everywhere."""
        if self.weighed == WEIGHED:
            return
        self.weighed += 1
        settings = settings_below(node)
        if settings is not None:
            fact = CalledFunction("loss settings", self.recorder.tick(), place, settings)
            self.recorder.keep(self.recorder.record.calls, fact)
        for name, weights in list(weights_below(node))[:AT_ONCE]:
            fact = CalledFunction(name, self.recorder.tick(), place, [])
            if self.recorder.keep(self.recorder.record.calls, fact):
                self.recorder.later(fact.detail, "extend", digest.sample([weights]))

    def close(self) -> None:
        pass


def _number(value: Any) -> Any:
    """A number, or a tensor of one element that no one changes."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().reshape(())
    return float(value) if value.device.type == "cpu" else value.clone()


def counted(node: Any, times: Numbers) -> list[tuple[str, int, Any, Any, Numbers, Numbers]]:
    """Sums over counted targets below a loss. Of each: its form, all targets, and how many count. Then how many of the
    mask's numbers are neither 0 nor 1, and what multiplies and divides the sum. Sums of all elements have no form."""
    found: list[tuple[str, int, Any, Any, Numbers, Numbers]] = []
    waiting: list[tuple[Any, Numbers, Numbers]] = [(node, times, ())]
    for _ in range(NODES):
        if not waiting or sum(bool(each[0]) for each in found) == AT_ONCE:
            break
        node, times, over = waiting.pop()
        name = "" if node is None else type(node).__name__
        if name in NLL:
            if saved(node, "weight") is None and saved(node, "reduction") != EACH:
                mean = saved(node, "reduction") == MEAN
                count = saved(node, "total_weight").clone() if mean else _labels(node)
                form = f"cross entropy with ignore_index={_ignored(node)}"
                found.append((form, saved(node, "target").numel(), count, 0, times, (*over, count) if mean else over))
        elif name == "SumBackward0" or name == "MeanBackward0":
            whole = math.prod(saved(node, "self_sym_sizes"))
            some = _masked(next_node(node, PASSES), whole) or ("", whole, 0)
            if some[0] or len(found) < 2 * AT_ONCE:
                divides = over if name == "SumBackward0" else (*over, whole)
                found.append((some[0], whole, some[1], some[2], times, divides))
        elif name in ELEMENTWISE and saved(node, "reduction") != EACH and len(found) < 2 * AT_ONCE:
            whole = saved(node, "self").numel()
            found.append(("", whole, whole, 0, times, (*over, whole) if saved(node, "reduction") == MEAN else over))
        elif (step := _scaled(node, name)) is not None:
            waiting += [(below, (*times, *step[0]), (*over, *step[1])) for below, _ in node.next_functions]
    return found


def weights_below(node: Any) -> Iterator[tuple[str, Any]]:
    """Weights of classes in the losses that a graph begins with: the argument's name, and the tensor."""
    waiting, names = [node], {**dict.fromkeys(NLL, "weight"), "BinaryCrossEntropyWithLogitsBackward0": "pos_weight"}
    for _ in range(NODES):
        node = waiting.pop(0) if waiting else None
        if node is None:
            return
        kind = type(node).__name__
        if kind not in names:
            waiting += [below for below, _ in node.next_functions if below is not None]
        elif isinstance(weights := saved(node, names[kind]), torch.Tensor):
            yield names[kind], weights.detach()


def _scaled(node: Any, name: str) -> tuple[Numbers, Numbers] | None:
    """What a node multiplies and divides what is below it by; None if it does other things."""
    if name in PASSES:
        return (), ()
    if name in ("AddBackward0", "SubBackward0"):
        return ((), ()) if saved(node, "alpha") == 1 else None
    if name in ("MulBackward0", "MulBackward1", "DivBackward0", "DivBackward1"):
        other = _factor(node)
        if other is not None and (not isinstance(other, torch.Tensor) or other.numel() == 1):
            return ((_number(other),), ()) if name.startswith("Mul") else ((), (_number(other),))
    return None


def _factor(node: Any) -> Any:
    """The operand of a product that has no gradient; None if both or neither have one."""
    other = saved(node, "other")
    if other is None and type(node).__name__ == "MulBackward0":
        other = saved(node, "self")
    return None if getattr(other, "requires_grad", False) else other


def _masked(node: Any, whole: int) -> tuple[str, Any, Any] | None:
    """What a sum has of a mask: its form, how many count, and how many of its numbers are no 0 or 1. Losses that an
    index selects are left out: they may be the hardest of the batch."""
    name = type(node).__name__
    if name in NLL and saved(node, "reduction") == EACH and saved(node, "weight") is None:
        return f"cross entropy with ignore_index={_ignored(node)}", _labels(node), 0
    mask = {"MulBackward0": "factor", "MaskedFillBackward0": "mask", "WhereBackward0": "condition"}
    if name not in mask:
        return None
    given = _factor(node) if name == "MulBackward0" else saved(node, mask[name])
    if not isinstance(given, torch.Tensor) or given.numel() != whole or whole < 2:
        return None
    ones = (given.detach() != 0).sum()
    odd = ((given.detach() != 0) & (given.detach() != 1)).sum()
    left_out = name == "MaskedFillBackward0" or (name == "WhereBackward0" and node.next_functions[0][0] is None)
    return "masked losses", whole - ones if left_out else ones, odd


def _labels(node: Any) -> Any:
    return (saved(node, "target") != _ignored(node)).sum()


def _ignored(node: Any) -> int:
    number = int(saved(node, "ignore_index"))
    return number - (1 << 64) if number >= 1 << 63 else number


# -- the program's numbers in the graph ------------------------------------------------------------
#
# A temperature, a margin, label smoothing, the weight of a further term. The terms of a sum come first. The weight of
# the first may be a rank's share of the samples; those of the others are parts of it.

TERMS = 8
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
        found += [
            (_said(name, kept), value) for kept in NUMBERS.get(name, ()) if (value := _kept_number(node, kept)) != 0
        ]
        waiting += [below for below, _ in node.next_functions]
    return zlib.crc32(" ".join([*names, str(len(terms))]).encode()), found


def _said(node: str, kept: str) -> str:
    """`a factor`, `a divisor`, `exponent`."""
    said = {"Mul": "a factor", "Div": "a divisor"}.get(node[:3], kept)
    return "reduction (1 is the mean, 2 the sum)" if said == "reduction" else said


def _kept_number(node: Any, kept: str) -> float:
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
            factor = _kept_number(node, "other")
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
