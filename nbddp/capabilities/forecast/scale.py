"""The duration of a training step on more ranks: the recorded computation, and the communication that the α–β model
predicts. Buckets follow one after another beside backward; what of them lasts longer than backward adds to the step.

What is assumed is written where it is used and told with every forecast: `Forecast.assumed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from nbddp.analysis.steps import Recording, Step
from nbddp.analysis.wait_time import typical
from nbddp.capabilities.bench.result import Measured
from nbddp.capabilities.forecast.cost import Link, LinkFit, better, fit, hierarchical, seconds, together
from nbddp.launch.topology import counted

MOST_NODES = 1024


@dataclass(frozen=True)
class Profile:
    """What one rank does in a step; seconds. before: forward and loss; backward: the gradients' computation; after: the
    optimizer. buckets: (seconds after the begin of backward at which it was ready, bytes), in the order sent.

    ranks: on how many it was recorded; measured: how long the step took there.
    """

    before: float
    backward: float
    after: float
    buckets: tuple[tuple[float, int], ...]
    ranks: int
    measured: float

    @property
    def compute(self) -> float:
        return self.before + self.backward + self.after

    def divided(self, by: float) -> Profile:
        """With a batch that is smaller by this factor. Forward, backward and the buckets' times shrink with it; the
        optimizer, which does not see the batch, stays."""
        buckets = tuple((ready / by, count) for ready, count in self.buckets)
        return replace(self, before=self.before / by, backward=self.backward / by, buckets=buckets)


def profile(recording: Recording, number: int) -> Profile:
    """Step `number` as its slowest rank took it, from which all others would wait in any case.

    A bucket counts as ready when its last rank had it. Raises KeyError if a rank does not have the step.
    """
    steps = recording.step(number)
    slowest = max(steps.values(), key=_compute)
    begin, end, done = slowest.backward
    ready: dict[int, tuple[int, int]] = {}
    for step in steps.values():
        for b in step.buckets:
            # from each rank's own begin of backward: when it began does not depend on the others' buckets
            at = min(b.ready, step.backward[1]) - step.backward[0]
            ready[b.index] = (max(at, ready.get(b.index, (0, 0))[0]), b.bytes)
    buckets = sorted((min(at, end - begin) / 1e9, count) for at, count in ready.values())
    return Profile(
        (begin - slowest.forward[0]) / 1e9, (end - begin) / 1e9, (slowest.end - done) / 1e9, tuple(buckets),
        len(steps), max(s.duration for s in steps.values()) / 1e9,
    )  # fmt: skip


def _compute(step: Step) -> int:
    """Nanoseconds of a step in which it does not wait for buckets after its gradients."""
    return step.duration - (step.backward[2] - step.backward[1])


@dataclass(frozen=True)
class Predicted:
    """A step on `ranks` ranks; seconds. exposed: what backward does not hide of `communication`.
    efficiency: of all ranks' time the share that one rank alone would need for the same work."""

    nodes: int
    ranks: int
    compute: float
    communication: float
    exposed: float
    efficiency: float

    @property
    def step(self) -> float:
        return self.compute + self.exposed


def predict(
    what: Profile, ranks: int, cost: Callable[[float], float], *, nodes: int = 1, strong: bool = False,
    overlapped: bool = True,
) -> Predicted:  # fmt: skip
    """The step on `ranks` ranks, where an all-reduce of so many bytes takes `cost(bytes)` seconds.

    weak scaling: every rank keeps its batch. strong: the batch of all ranks together stays as recorded, so that each
    has what.ranks / ranks of it. overlapped False: communication needs the cores that compute, so that
    none of it is hidden.
    """
    here = what.divided(ranks / what.ranks) if strong else what
    end = 0.0
    for ready, count in here.buckets:
        end = max(end, ready if overlapped else here.backward) + cost(count)
    exposed = max(0.0, end - here.backward) if here.buckets else 0.0
    alone = what.divided(1 / what.ranks).compute / ranks if strong else what.compute
    communication = sum(cost(count) for _, count in here.buckets)
    step = here.compute + exposed
    return Predicted(nodes, ranks, here.compute, communication, exposed, alone / step if step > 0 else 1.0)


@dataclass(frozen=True)
class Forecast:
    """A recorded step carried on to more nodes. `weak` and `strong` have one Predicted per number of ranks, ascending:
    first those within a node, then whole nodes. `extrapolated_from` is the largest world size on which
    collectives were measured: what lies beyond is extrapolated.

    decided: whether the algorithm follows from what was measured or was asked for; why: which of them.
    left_out: world sizes that were measured but do not fit beside the recorded one.
    here: the model's own answer for the step that was recorded. about: whether weak or strong scaling was asked for.
    """

    model: str
    number: int
    profile: Profile
    fits: tuple[LinkFit, ...]
    left_out: tuple[int, ...]
    chosen: LinkFit
    decided: bool
    why: str
    intra: Link
    inter: Link
    ranks_per_node: int
    here: Predicted
    weak: tuple[Predicted, ...]
    strong: tuple[Predicted, ...]
    about: str
    extrapolated_from: int
    assumed: tuple[str, ...]

    @property
    def algorithm(self) -> str:
        return self.chosen.algorithm

    @property
    def told(self) -> tuple[Predicted, ...]:
        """The scaling that was asked for."""
        return self.strong if self.about == "strong" else self.weak

    def whole_nodes(self, some: Sequence[Predicted]) -> list[Predicted]:
        return [p for p in some if p.ranks == p.nodes * self.ranks_per_node]

    def knee(self) -> Predicted | None:
        """The first number of nodes on which more than half of the step is exposed communication."""
        return next((p for p in self.whole_nodes(self.told) if p.exposed > p.step / 2), None)


def doublings(most: int) -> list[int]:
    """1, 2, 4, … and `most` itself."""
    return sorted({1 << k for k in range(most.bit_length())} | {most})


def forecast(
    recording: Recording,
    measured: Sequence[Measured],
    *,
    inter_node: float | None = None,
    intra_node: float | None = None,
    latency: float | None = None,
    ranks_per_node: int | None = None,
    nodes: int = MOST_NODES,
    strong: bool = False,
    algorithm: str | None = None,
    world_size: int | None = None,
) -> Forecast:
    """The recording's typical step on 1, 2, 4, … `nodes` nodes.

    inter_node, intra_node: bytes per second of a node's link to others, and of a rank's within a node; latency:
    seconds of a message between nodes. What is not given is as measured here. world_size: on which collectives were
    surely measured; default: as recorded. Raises ValueError if nothing can be
    fitted to `measured`, or the recording has no step that every rank took.
    """
    number = typical(recording)
    if number is None:
        raise ValueError("no step was recorded on every rank")
    what = profile(recording, number)
    used = together(measured, world_size or what.ranks)
    fits = fit(used)
    chosen, decided, why = _chosen(fits, algorithm)
    left_out = tuple(sorted({m.ranks for m in measured} - {m.ranks for m in used}))
    found = chosen.link
    per_node = ranks_per_node or what.ranks
    intra = Link(found.latency, intra_node or found.bandwidth)
    inter = Link(found.latency if latency is None else latency, inter_node or found.bandwidth)
    links = Links(chosen.algorithm, per_node, intra, inter)
    here = predict(what, what.ranks, replace(links, intra=found).within(what.ranks))
    return Forecast(
        recording.model, number, what, tuple(fits.values()), left_out, chosen, decided, why, intra, inter, per_node,
        here, links.scaled(what, nodes, False), links.scaled(what, nodes, True), "strong" if strong else "weak",
        max(chosen.ranks), _assumed(what, per_node, inter_node, latency),
    )  # fmt: skip


def _chosen(fits: Mapping[str, LinkFit], asked: str | None) -> tuple[LinkFit, bool, str]:
    """The fit to forecast with, whether it is decided, and why this one."""
    if asked is not None:
        return fits[asked], True, "as requested"
    return *better(fits), "which fits better"


@dataclass(frozen=True)
class Links:
    """What an all-reduce takes within a node of `per_node` ranks, and between nodes."""

    algorithm: str
    per_node: int
    intra: Link
    inter: Link

    def within(self, ranks: int) -> Callable[[float], float]:
        return lambda count: seconds(self.algorithm, "all_reduce", ranks, count, self.intra)

    def between(self, nodes: int) -> Callable[[float], float]:
        return lambda count: hierarchical(count, nodes, self.per_node, self.intra, self.inter, self.algorithm)

    def scaled(self, what: Profile, nodes: int, strong: bool) -> tuple[Predicted, ...]:
        """The step on 1, 2, 4, … ranks of a node, and on 1, 2, 4, … `nodes` whole ones."""
        within = [r for r in doublings(self.per_node) if r < self.per_node]
        inside = [predict(what, r, self.within(r), strong=strong) for r in within]
        whole = [predict(what, k * self.per_node, self.between(k), nodes=k, strong=strong) for k in doublings(nodes)]
        return (*inside, *whole)


def _assumed(what: Profile, per_node: int, inter_node: float | None, latency: float | None) -> tuple[str, ...]:
    """What the forecast takes for granted, a sentence each."""
    lines = [
        f"Each node has the same hardware as this machine and runs {counted(per_node, 'rank')}. Computation takes as "
        f"long as recorded on {what.ranks}: the ranks shared this machine's cores, caches and memory, and transfers "
        "slowed backward.",
        "Buckets are exchanged one after another, each when it is ready on the slowest rank. Nothing else uses the "
        "network, and no rank is slower than the slowest recorded one.",
        "An all-reduce is a reduce-scatter within nodes, an all-reduce between nodes over one link per node, and an "
        "all-gather within nodes.",
    ]
    alike = [name for name, given in (("bandwidth", inter_node), ("latency", latency)) if given is None]
    if alike:
        options = {"bandwidth": "--inter-node 25GB/s", "latency": "--latency 10us"}
        typed = " ".join(options[name] for name in alike)
        verb, others = ("are", "other values") if len(alike) > 1 else ("is", "another value")
        lines.append(
            f"Between nodes, {' and '.join(alike)} {verb} as measured within this node; {typed} sets {others}."
        )
    lines.append(
        "With weak scaling, every rank keeps its batch. With strong scaling, the global batch of the recorded "
        f"{counted(what.ranks, 'rank')} stays the same and is divided evenly. Forward and backward shrink with a "
        "rank's share of it; the optimizer does not."
    )
    return tuple(lines)
