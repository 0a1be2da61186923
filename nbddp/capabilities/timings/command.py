"""What is asked of all ranks at once, when no cell runs: their recordings, traces, memory, values and collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from nbddp.analysis.clocks import ClockOffset, Ping, aligned, clock
from nbddp.analysis.origin import origin
from nbddp.analysis.steps import Recording, step_from
from nbddp.capabilities.bench import command as bench_command
from nbddp.capabilities.bench.result import Measured
from nbddp.capabilities.collectives.from_flight_recorder import cell_from, untraced_program
from nbddp.capabilities.collectives.program import Breakdown
from nbddp.capabilities.compare import command as compare_command
from nbddp.capabilities.compare.report import Report
from nbddp.capabilities.memory.parts import RankMemory
from nbddp.capabilities.memory.sizes import NameSize, Sizes, report_of_sizes
from nbddp.capabilities.memory.timeline import Allocations, of_rank
from nbddp.capabilities.trace.merge import Collective, Merged, RankTrace, merge
from nbddp.errors import BadInput
from nbddp.execution.protocols import IdleRanks
from nbddp.execution.values import check_ranks
from nbddp.launch.machine import Device, Node
from nbddp.launch.topology import Topology, rank_words
from nbddp.protocol import pickling
from nbddp.protocol.run_spec import Question

UNSEEN = (
    "under TORCH_DISTRIBUTED_DEBUG=DETAIL torch does not record the groups of collectives that C++ calls (of FSDP, "
    "tensor parallel or DDP's constructor); type %ddp start --debug off and run the cell again"
)
RECORDED_BY = {"DDP's reducer", "end of backward"}  # seams without which nothing is recorded


def timings(ranks: IdleRanks) -> Recording:
    """What `Pool.timings` does."""
    found = _unpacked(ranks.answers("timings"))
    if not any(f["steps"] for f in found.values()):
        missing = ranks.ask(0, Question.of("seams")) or []
        if not RECORDED_BY.isdisjoint(missing):
            raise BadInput("steps cannot be recorded with this torch; %ddp doctor shows what is missing")
        raise BadInput("no DDP step has been recorded; train a DistributedDataParallel model in a %%ddp cell first")
    newest = max(found.values(), key=lambda f: f["run"])
    of_it = {r: f for r, f in found.items() if f["steps"] and f["run"] == newest["run"]}
    recording = Recording(
        {r: [step_from(s) for s in f["steps"]] for r, f in of_it.items()},
        model=newest["model"],
        missing=sorted(set(found) - set(of_it)),
        origin=origin(newest["run"], newest["cell"], ranks.newest()),
    )
    return aligned(recording, clocks(ranks))


def collectives(ranks: IdleRanks) -> Breakdown:
    """What `Pool.collectives` does."""
    answered = _unpacked(ranks.answers("together"))
    found = {r: f if f and f["run"] is not None else None for r, f in answered.items()}
    if not any(found.values()):
        if any(answered.values()):
            raise BadInput(f"no collective has been recorded, because {UNSEEN}")
        raise BadInput("no collective has been recorded; call some in a %%ddp cell first")
    newest = max((f for f in found.values() if f), key=lambda f: f["run"])
    of_it = {r: f for r, f in found.items() if f and f["run"] == newest["run"]}
    by_rank = clocks(ranks)
    cells = {r: cell_from(f, by_rank.get(r, ClockOffset())) for r, f in of_it.items()}
    shown = untraced_program(
        cells, sorted(set(found) - set(of_it)), origin(newest["run"], newest["cell"], ranks.newest())
    )
    more = [f"Not all of its collectives were recorded: {UNSEEN}"] if any(f["unseen"] for f in of_it.values()) else []
    return replace(shown, notes=[*shown.notes, *more])


def trace(ranks: IdleRanks) -> Merged:
    """What `Pool.trace` does."""
    found = _unpacked(ranks.answers("trace"))
    places = ranks.placed().workers
    traces = {
        r: RankTrace(
            t["events"],
            t["base"],
            t["shift"],
            t["pid"],
            places[r].node,
            [Collective(**c) for c in t["collectives"]],
            t["waits"],
        )
        for r, t in found.items()
        if "events" in t
    }
    why = {r: t["why"] for r, t in found.items() if t.get("why")}
    if not traces and why:
        raise BadInput(f"no rank has a trace; rank {min(why)}: {why[min(why)]}")
    if not traces:
        raise BadInput("no cell has been traced on these workers; %%ddp --trace traces one")
    merged = merge(traces, clocks(ranks))
    merged.missing, merged.why = sorted(set(found) - set(traces)), why
    return merged


def clocks(ranks: IdleRanks) -> dict[int, ClockOffset]:
    """Each rank's clock against rank 0's; empty where all ranks are on one machine, which has one clock."""
    if len({n.host for n in ranks.placed().nodes}) < 2:
        return {}
    pings = _unpacked(ranks.answers("clocks"))[0]
    return {0: ClockOffset(), **{r: clock([Ping(*p) for p in some]) for r, some in pings.items()}}


def memory(ranks: IdleRanks) -> list[RankMemory]:
    """What `Pool.memory` does."""
    found = _unpacked(ranks.answers("memory"))
    if not any(found.values()):
        raise BadInput("no rank has a module or an optimizer; create them in a %%ddp cell first")
    steps: list[tuple[int, int | None]] = [f["trained"] for f in found.values() if f and f["trained"]]
    run, cell = max(steps, default=(0, None), key=lambda step: step[0])
    trained = origin(run, cell, ranks.newest()) if run else None
    return [RankMemory(rank=r, **{**f, "trained": trained}) for r, f in found.items() if f]


def sizes(ranks: IdleRanks, names: Sequence[str], of: Sequence[int] | None) -> Sizes:
    """What `Pool.sizes` does."""
    chosen = check_ranks(of, ranks.placed().world_size, "--ranks")
    found = _unpacked(ranks.answers("named_memory", chosen, names=list(names)))
    held = {n: {r: NameSize(**of_rank[n]) for r, of_rank in found.items() if of_rank[n]} for n in dict.fromkeys(names)}
    for name, there in held.items():
        if not there:
            raise BadInput(f"{name!r} is not defined on {rank_words(chosen)}; assign it in a %%ddp cell")
        if not any(h.tensors for h in there.values()):
            raise BadInput(
                f"{name!r} holds a value of type {next(iter(there.values())).type}, without tensors; name a tensor, an "
                "array, a module, an optimizer, or a dict or list of them"
            )
    return report_of_sizes(held)


def allocations(ranks: IdleRanks, step: int | None, whole: bool) -> Allocations:
    """What `Pool.allocations` does."""
    found = _unpacked(ranks.answers("allocations", part="steps"))
    there = {r: f for r, f in found.items() if f}
    if not there:
        raise BadInput("no allocations have been recorded on these workers; %%ddp --memory records a cell's")
    newest = max(there.values(), key=lambda f: f["run"])
    missing = {r: _why_none(found[r], newest) for r in found}
    missing = {r: why for r, why in missing.items() if why}
    having = [r for r in found if r not in missing]
    if not having:
        raise BadInput(f"no rank has a record of its allocations; rank {min(missing)}: {missing[min(missing)]}")
    steps = sorted(set.intersection(*(set(there[r]["steps"]) for r in having)))
    number = None if whole else _step_of({r: there[r]["steps"] for r in having}, steps, step)
    answers = _unpacked(ranks.answers("allocations", having, part="step", step=number))
    return Allocations(
        [of_rank(r, answers[r]) for r in having], number, steps, newest["model"], missing,
        origin(newest["run"], newest["cell"], ranks.newest()),
    )  # fmt: skip


def _why_none(found: dict[str, Any] | None, newest: dict[str, Any]) -> str:
    """Why a rank has nothing of the newest recording; empty if it has."""
    if found is None or found["run"] != newest["run"]:
        return "it took no part"
    return str(found["why"])


def _step_of(peaks: dict[int, dict[int, int]], steps: Sequence[int], asked: int | None) -> int | None:
    """The step that was asked for, or the one with the highest peak; None if none is on every rank."""
    if asked is None:
        return max(steps, key=lambda n: max(of[n] for of in peaks.values()), default=None)
    if asked not in steps:
        have = f"steps {steps[0]} to {steps[-1]} are recorded on every rank" if steps else "no step is on every rank"
        raise BadInput(f"there is no step {asked}; {have}; --step all shows the whole cell")
    return asked


def compare(ranks: IdleRanks, names: Sequence[str], of: Sequence[int] | None) -> Report:
    """What `Pool.compare` does."""
    chosen = check_ranks(of, ranks.placed().world_size, "--ranks")

    def ask(some: Sequence[int], fields: dict[str, Any], buffers: Sequence[bytes] = ()) -> dict[int, Any]:
        return ranks.answers("compare", some, buffers, **fields)

    return compare_command.compare(names, chosen, ask)


def bench(
    ranks: IdleRanks,
    devices: Sequence[int | None],
    names: Sequence[str],
    sizes: Sequence[int] | None,
    repeat: int,
    warmup: int,
    progress: Callable[[str], None],
) -> list[Measured]:
    """What `Pool.bench` does. devices: as `own_gpus` has them."""

    def ask(fields: dict[str, Any]) -> dict[int, Any]:
        return _unpacked(ranks.answers("bench", **fields))

    return bench_command.bench(
        ask, devices, names, bench_command.sizes() if sizes is None else sizes, repeat, warmup, progress
    )


def own_gpus(placed: Topology, visible: str) -> list[int | None]:
    """The index of each rank's first GPU as the rank sees it; all None on CPU, and where ranks share GPUs, which NCCL
    does not allow before 2.30.

    A simulated node shows its ranks its own GPUs alone, which CUDA counts from 0 there.
    """
    if placed.oversubscribed or not all(w.devices for w in placed.workers):
        return [None] * placed.world_size
    if visible == "own":
        return [0] * placed.world_size
    return [_position(w.devices[0], placed.nodes[w.node]) for w in placed.workers]


def _position(device: Device, node: Node) -> int:
    """Of a GPU among those that the ranks of its node see."""
    return [d.index for d in node.devices].index(device.index) if node.simulated else device.index


def _unpacked(answers: dict[int, list[Any]]) -> dict[int, Any]:
    return {r: pickling.unpack(buffers[0]) for r, buffers in answers.items()}
