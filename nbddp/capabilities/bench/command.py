"""`%ddp bench` and `Pool.bench`: a benchmark of collectives, size by size, so that it can be watched and stopped."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nbddp.analysis.answers import unpacked
from nbddp.analysis.quantities import size as size_words
from nbddp.analysis.wait_time import BUS_FACTOR
from nbddp.capabilities.bench.result import Measured
from nbddp.errors import BadInput
from nbddp.launch.machine import Device, Node
from nbddp.launch.options import Parser, nearest, positive, quantity
from nbddp.launch.topology import Topology, counted
from nbddp.launch.units import amount
from nbddp.notebook.commands import Asked, CommandLine
from nbddp.output.progress import Progress

if TYPE_CHECKING:
    from nbddp.pool.pool import WorkerPool

SMALLEST, LARGEST, FACTOR = 1 << 10, 64 << 20, 4
REPEAT, WARMUP = 12, 3  # measurements of each size, and calls before them


def sizes_between(smallest: int = SMALLEST, largest: int = LARGEST, factor: int = FACTOR) -> list[int]:
    """Bytes from the smallest to the largest, each `factor` times the one before. Raises BadInput."""
    if smallest < 1 or largest < smallest:
        raise BadInput(
            f"there are no sizes from {smallest} to {largest} bytes; give the smaller one first, as in --min 1KiB "
            "--max 64MiB"
        )
    if factor < 2:
        raise BadInput(f"--factor {factor} does not increase the size; use 2 or more")
    found = [smallest]
    while found[-1] * factor <= largest:
        found.append(found[-1] * factor)
    return found


def bench(
    pool: WorkerPool,
    collective: str | Sequence[str] = "all_reduce",
    sizes: Sequence[int] | None = None,
    *,
    repeat: int = REPEAT,
    warmup: int = WARMUP,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Measured]:
    """Measure collectives of `sizes` bytes (default: 1 KiB to 64 MiB), as nccl-tests does
    (`nbddp.capabilities.bench.on_rank`).

    The ranks meet in a process group of nbddp's own: the program's groups count none of it. progress: called with a
    line before each size. `measured` keeps the results. Raises BadInput for impossible sizes or counts.
    """
    names = [collective] if isinstance(collective, str) else list(collective)
    gpus = own_gpus(pool.placed(), pool.group.visible)
    found = _measure(pool, gpus, names, sizes_between() if sizes is None else sizes, repeat, warmup, progress)
    new = {(m.collective, m.ranks, m.bytes) for m in found}
    pool.measured = [m for m in pool.measured if (m.collective, m.ranks, m.bytes) not in new] + found
    return found


def _measure(
    pool: WorkerPool,
    devices: Sequence[int | None],
    collectives: Sequence[str],
    wanted: Sequence[int],
    repeat: int,
    warmup: int,
    progress: Callable[[str], None],
) -> list[Measured]:
    """devices: each rank's own GPU as it sees it; None for all: on CPU."""

    ranks = len(devices)
    for name in collectives:
        if name not in BUS_FACTOR:
            raise BadInput(f"there is no collective {name!r}; use {', '.join(BUS_FACTOR)}")
    if ranks < 2:
        raise BadInput("a collective needs at least two ranks; %ddp start --nproc 2 starts them")
    if repeat < 1 or warmup < 1:
        raise BadInput(
            "each size needs at least one measurement and one warm-up call; use --repeat 1 --warmup 1 or more"
        )
    pool.answers("bench", part="open", devices=list(devices))
    found: list[Measured] = []
    todo = [(c, s) for c in collectives for s in wanted]
    try:
        for i, (name, size) in enumerate(todo):
            progress(Progress(f"{name} of {size_words(size)} on {counted(ranks, 'rank')}", i, len(todo)))
            answers = pool.answers("bench", part="measure", collective=name, size=size, repeat=repeat, warmup=warmup)
            nbytes, seconds, wrong = unpacked(answers)[0]
            one = Measured(name, nbytes, ranks, seconds, wrong)
            if one.bytes not in [m.bytes for m in found if m.collective == name]:  # tiny sizes round to the same
                found.append(one)
    except KeyboardInterrupt:  # Stop between two runs
        pool.answers("bench", part="close")
        raise
    pool.answers("bench", part="close")
    return found


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


def arguments(parser: Parser) -> None:
    parser.offers = {"collectives": tuple(BUS_FACTOR)}
    add = parser.add_argument
    add("collectives", nargs="*", type=_collective, metavar="COLLECTIVE",
        help=f"{', '.join(BUS_FACTOR)}; default: all_reduce")  # fmt: skip
    add("--min", dest="smallest", type=quantity(amount), default=SMALLEST, metavar="SIZE", help="smallest size "
        "(default 1KiB)")  # fmt: skip
    add("--max", dest="largest", type=quantity(amount), default=LARGEST, metavar="SIZE", help="largest size "
        "(default 64MiB)")  # fmt: skip
    add("--factor", type=positive, default=FACTOR, metavar="K", help="ratio of one size to the previous one "
        f"(default {FACTOR})")  # fmt: skip
    add(
        "--repeat",
        type=positive,
        default=REPEAT,
        metavar="N",
        help=f"measurements per size (default {REPEAT}; fewer if a call is slow)",
    )
    add("--warmup", type=positive, default=WARMUP, metavar="N", help="calls before the first measurement "
        f"(default {WARMUP})")  # fmt: skip


def _collective(text: str) -> str:
    if text not in BUS_FACTOR:
        near = nearest(text, BUS_FACTOR)
        advice = f"did you mean {near}?" if near else f"use {', '.join(BUS_FACTOR)}"
        raise argparse.ArgumentTypeError(f"there is no collective {text!r}; {advice}")
    return text


def show(asked: Asked, line: CommandLine) -> Any:
    from nbddp.capabilities.bench.figure import draw_bench

    args = line.args
    wanted = sizes_between(args["smallest"], args["largest"], args["factor"])
    with asked.progress() as progress:
        found = bench(
            asked.pool, args["collectives"] or ["all_reduce"], wanted, repeat=args["repeat"], warmup=args["warmup"],
            progress=progress,
        )  # fmt: skip
    return draw_bench(found)
