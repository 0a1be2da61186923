"""The quiet line under an ordinary run: observations of the ranks about their optimizers, and its text. Pure.

Every statement needs evidence from all ranks: gradients that differed at each look, and parameters that differ. Where
something is not known, nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nbddp.launch.topology import rank_words

APART = 1e-3  # of the larger norm: gradients of other samples are further apart, rounding is not
NAMED = 2  # parameters


@dataclass(frozen=True)
class Look:
    """Before an optimizer step: its number, sums of absolute gradients, a checksum of the parameters."""

    step: int = 0
    gradients: tuple[float, ...] = ()
    parameters: int = 0


@dataclass(frozen=True)
class SeenOptimizer:
    """An optimizer that moves parameters of DDP models, on one rank.

    likeness: a checksum of its class and its parameters' shapes. steps: how many it took; buckets: sent meanwhile.
    bare: steps before which DDP sent none; past: those of them before which DDP's forward was not called either. quiet:
    since the first bare step only DDP has called collectives, and not all exchanges came before. beside: parameters
    with a gradient that no DDP model exchanges. left, beside_left: checksums when the program had ended; None if not
    known.
    """

    likeness: int = 0
    steps: int = 0
    buckets: int = 0
    bare: int = 0
    past: int = 0
    quiet: bool = False
    bare_looks: tuple[Look, ...] = ()
    left: int | None = None
    beside: tuple[str, ...] = ()
    shapes: int = 0
    beside_looks: tuple[Look, ...] = ()
    beside_left: int | None = None


@dataclass(frozen=True)
class RankHints:
    """What one rank has seen in a run. world: how many ranks there are. alone: a library with which the rank trains by
    itself."""

    world: int = 0
    optimizers: tuple[SeenOptimizer, ...] = ()
    alone: str = ""


def line(found: Mapping[int, RankHints], option: str = "%%ddp --sanitize") -> str:
    """The most serious finding, and the option that shows more; empty if there is none, or one is in doubt."""
    ranks = sorted(found)
    counts = {len(each.optimizers) for each in found.values()}
    if len(ranks) < 2 or {each.world for each in found.values()} != {len(ranks)} or len(counts) > 1:
        return ""
    if {each.alone for each in found.values()} == {"accelerate"}:
        return alone(len(ranks))
    alike = [
        seen
        for seen in zip(*(found[rank].optimizers for rank in ranks), strict=True)
        if len({each.likeness for each in seen}) == 1
    ]
    said = [say(seen) for say in (not_exchanged, beside_ddp) for seen in alike]
    said += [other_steps(ranks, seen) for seen in alike]
    first = next(filter(None, said), "")
    return first and f"{first}; {option} shows where"


def alone(world: int) -> str:
    """accelerate, and Transformers' Trainer, take the environment's ranks for a group only where they see a GPU."""
    return (
        f"accelerate has num_processes 1 on each of {world} ranks, so it averages no gradients across ranks; "
        "to train one model on the CPU, write Accelerator(cpu=True), or use_cpu=True in TrainingArguments"
    )


def not_exchanged(seen: Sequence[SeenOptimizer]) -> str:
    """Steps by gradients that DDP has not exchanged."""
    steps, bare = ({getattr(each, name) for each in seen} for name in ("steps", "bare"))
    if len(steps) > 1 or len(bare) > 1 or not all(each.quiet for each in seen):
        return ""
    if not _drifted([each.bare_looks for each in seen], [each.left for each in seen]):
        return ""
    before = f"{seen[0].bare} of {seen[0].steps} optimizer steps"
    if all(each.past == each.bare for each in seen):
        return f"DDP's forward was not called before {before}, so no gradients were exchanged, and its replicas differ"
    return f"DDP exchanged no gradients before {before}, and its replicas differ"


def beside_ddp(seen: Sequence[SeenOptimizer]) -> str:
    """Parameters that an optimizer moves and no DDP model exchanges."""
    first = seen[0]
    if not first.beside or len({(each.steps, each.shapes) for each in seen}) > 1:
        return ""
    if not _drifted([each.beside_looks for each in seen], [each.beside_left for each in seen]):
        return ""
    count, more = len(first.beside), ", …" * (len(first.beside) > NAMED)
    what, they = ("a parameter", "it differs") if count == 1 else (f"{count} parameters", "they differ")
    names = ", ".join(first.beside[:NAMED]) + more
    return f"DDP's optimizer also moves {what} that DDP does not exchange ({names}), and {they} between ranks"


def other_steps(ranks: Sequence[int], seen: Sequence[SeenOptimizer]) -> str:
    """Ranks that took other numbers of steps after equal exchanges."""
    steps = [each.steps for each in seen]
    if len(set(steps)) == 1 or len({each.buckets for each in seen}) > 1 or not seen[0].buckets:
        return ""
    left = {each.left for each in seen}
    if None in left or len(left) == 1:
        return ""
    fewest, most = min(steps), max(steps)
    few, many = ([r for r, n in zip(ranks, steps, strict=True) if n == number] for number in (fewest, most))
    return (
        f"the ranks took different numbers of optimizer steps ({fewest} on {rank_words(few)}, {most} on "
        f"{rank_words(many)}), and DDP's replicas differ"
    )


def _drifted(looks: Sequence[Sequence[Look]], left: Sequence[int | None]) -> bool:
    """Whether gradients differed at each look, and the parameters before each but the first, and in the end."""
    if not all(looks) or len({tuple(look.step for look in own) for own in looks}) > 1:
        return False
    together = list(zip(*looks, strict=True))
    if not all(_apart([look.gradients for look in each]) for each in together):
        return False
    states = [{look.parameters for look in each} for each in together[1:]]
    if None not in left:
        states.append({each for each in left if each is not None})
    return bool(states) and all(len(each) > 1 for each in states)


def _apart(sums: Sequence[tuple[float, ...]]) -> bool:
    """Whether a gradient's sum differs between ranks by more than rounding."""
    if len({len(own) for own in sums}) > 1:
        return False
    return any(max(own) - min(own) > APART * max(own) for own in zip(*sums, strict=True))
