"""Lesson 12's first explorer: a step of data-parallel training on paper, and the effect of changing one part.

The machine is made up, but of a usual size. Its nodes have GPUS GPUs each, joined by a fast link, and one link to the
other nodes. A GPU computes at RATE; a micro-batch has TOKENS tokens per GPU. A token costs 2 operations per parameter
in forward and 4 in backward (Kaplan et al., "Scaling laws for neural language models", 2020). Gradients are ready
evenly over the last backward, in buckets of DDP's usual 25 MiB, and are exchanged by the α–β model of
`nbddp.capabilities.forecast.cost`; how much of that backward hides is for `nbddp.capabilities.forecast.scale.predict`
to say. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nbddp.analysis.quantities import amount, duration, percent
from nbddp.capabilities.forecast.cost import Link, hierarchical
from nbddp.capabilities.forecast.scale import Predicted, Profile, doublings, predict
from nbddp.launch.topology import counted
from nbddp.launch.units import delay, speed
from nbddp.lessons.l08_buckets_and_overlap.simulation import CAP

GPUS = 8  # per node
RATE = 150e12  # operations per second of a GPU, sustained
TOKENS = 4096  # of a micro-batch, per GPU
OPERATIONS = (2, 4)  # per parameter and token: forward, backward
GRADIENT = 2  # bytes per parameter
WITHIN = Link(3e-6, 300e9)  # between GPUs of a node
MOST_NODES = 64
MODELS = {"10 M": 10**7, "100 M": 10**8, "1 B": 10**9, "10 B": 10**10}  # parameters
SPEEDS = ("10Gb/s", "25Gb/s", "100Gb/s", "200Gb/s", "400Gb/s", "1600Gb/s")
DELAYS = ("1us", "5us", "10us", "50us", "250us")
GOOD, POOR = 0.9, 0.5  # efficiencies worth a word


@dataclass(frozen=True)
class WhatIf:
    """A step. between: the link of a node to the others; micro_batches: how many a rank takes before the exchange.

    what: the computation, whose `backward` is that of the last micro-batch; chosen: the step on `nodes` nodes;
    curve: the steps on 1, 2, 4, … nodes; waits: seconds of `chosen.communication` that are latency; exchange: (start,
    end) of the spans in which the network is busy, in seconds from the begin of the step.
    """

    nodes: int
    between: Link
    parameters: int
    micro_batches: int
    what: Profile
    chosen: Predicted
    curve: tuple[Predicted, ...]
    waits: float
    exchange: tuple[tuple[float, float], ...]

    @property
    def gradients(self) -> int:
        """Bytes that each rank hands over."""
        return GRADIENT * self.parameters

    def passes(self) -> list[tuple[str, float, float]]:
        """("forward" or "backward", start, end) of every micro-batch, in seconds."""
        forward, backward = _passes(self.parameters)
        each = forward + backward
        found = []
        for i in range(self.micro_batches):
            found.append(("forward", i * each, i * each + forward))
            found.append(("backward", i * each + forward, (i + 1) * each))
        return found

    def describe(self) -> str:
        return "\n".join((self._setting(), self._step(), self._communication(), self.verdict()))

    def _setting(self) -> str:
        return (
            f"{counted(self.nodes, 'node')} of {GPUS} GPUs: {self.chosen.ranks} ranks; gradients of "
            f"{amount(self.gradients)} in {counted(len(self.what.buckets), 'bucket')}, exchanged once for "
            f"{micro_batches(self.micro_batches)} "
            f"({tokens(TOKENS * self.micro_batches * self.chosen.ranks)} tokens of all ranks)"
        )

    def _step(self) -> str:
        return (
            f"step {duration(self.chosen.step)}: {duration(self.chosen.compute)} computing, "
            f"{duration(self.chosen.exposed)} waiting for gradients; efficiency {percent(self.chosen.efficiency)}"
        )

    def _communication(self) -> str:
        all_of_it = self.chosen.communication
        hidden = 1 - self.chosen.exposed / all_of_it
        return (
            f"the exchange takes {duration(all_of_it)}, {percent(self.waits / all_of_it)} of it latency; "
            f"{percent(hidden)} is hidden behind the last backward ({duration(self.what.backward)})"
        )

    def verdict(self) -> str:
        """What limits the step, and what would help."""
        if self.chosen.efficiency >= GOOD:
            return "the ranks compute nearly all the time: a faster network would make no difference"
        if 2 * self.waits > self.chosen.communication:
            fewer = "fewer and larger buckets, or " if len(self.what.buckets) > 1 else ""
            helps = f"{fewer}more micro-batches per exchange help"
            return f"latency limits the step: {helps}; more bandwidth does not"
        much = "most of the step is waiting" if self.chosen.efficiency < POOR else "bandwidth limits the step"
        return f"{much}: a faster link, fewer bytes (a comm hook), or more micro-batches per exchange help"


def simulate_what_if(
    nodes: int = 8, link: str = "200Gb/s", latency: str = "10us", model: str = "1 B", micro_batches: int = 1
) -> WhatIf:
    """link, latency: a node's to the others, with units; model: a key of MODELS."""
    parameters, between = MODELS[model], Link(delay(latency), speed(link))
    what = profile(parameters, micro_batches)

    def on(some: int, inter: Link, intra: Link = WITHIN) -> Predicted:
        return predict(what, some * GPUS, _cost(some, intra, inter), nodes=some)

    chosen = on(nodes, between)
    moving = on(nodes, Link(0.0, between.bandwidth), Link(0.0, WITHIN.bandwidth)).communication
    return WhatIf(
        nodes, between, parameters, micro_batches, what, chosen,
        tuple(on(n, between) for n in doublings(MOST_NODES)), chosen.communication - moving,
        _spans(what, _cost(nodes, WITHIN, between)),
    )  # fmt: skip


def profile(parameters: int, micro_batches: int) -> Profile:
    """A rank's step, recorded nowhere: buckets are ready evenly over the last backward."""
    forward, backward = _passes(parameters)
    left, sizes = GRADIENT * parameters, []
    while left > 0:
        sizes.append(min(CAP, left))
        left -= CAP
    done, buckets = 0, []
    for size in sizes:
        done += size
        buckets.append((backward * done / (GRADIENT * parameters), size))
    before = (micro_batches - 1) * (forward + backward) + forward
    return Profile(before, backward, 0.0, tuple(buckets), 1, before + backward)


def _passes(parameters: int) -> tuple[float, float]:
    """Seconds of a micro-batch's forward and backward."""
    forward, backward = (n * parameters * TOKENS / RATE for n in OPERATIONS)
    return forward, backward


def _cost(nodes: int, intra: Link, inter: Link) -> Callable[[float], float]:
    return lambda count: hierarchical(count, nodes, GPUS, intra, inter)


def _spans(what: Profile, cost: Callable[[float], float]) -> tuple[tuple[float, float], ...]:
    """When the network is busy: buckets one after another, those without a pause between them as one span."""
    found: list[tuple[float, float]] = []
    for ready, count in what.buckets:
        at = what.before + ready
        if found and at <= found[-1][1]:
            found[-1] = (found[-1][0], found[-1][1] + cost(count))
        else:
            found.append((at, at + cost(count)))
    return tuple(found)


def micro_batches(count: int) -> str:
    """`1 micro-batch`, `4 micro-batches`."""
    return f"{count} micro-batch{'es' * (count != 1)}"


def tokens(count: int) -> str:
    """`262 thousand`, `4.2 million`."""
    return f"{count / 1e6:.1f} million" if count >= 1e6 else f"{count / 1e3:.0f} thousand"
