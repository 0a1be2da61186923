"""A benchmark of collectives on a pool: size by size, so that it can be watched and stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nbddp.analysis.quantities import size as size_words
from nbddp.analysis.wait_time import BUS_FACTOR
from nbddp.capabilities.bench.result import Measured
from nbddp.errors import BadInput
from nbddp.launch.topology import counted
from nbddp.output.progress import Progress

SMALLEST, LARGEST, FACTOR = 1 << 10, 64 << 20, 4
Ask = Callable[[dict[str, Any]], dict[int, Any]]  # fields of a request → rank's answer


def sizes(smallest: int = SMALLEST, largest: int = LARGEST, factor: int = FACTOR) -> list[int]:
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
    ask: Ask,
    devices: Sequence[int | None],
    collectives: Sequence[str],
    wanted: Sequence[int],
    repeat: int,
    warmup: int,
    progress: Callable[[str], None],
) -> list[Measured]:
    """What `Pool.bench` does. devices: each rank's own GPU as it sees it; None for all: on CPU."""
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
    ask({"part": "open", "devices": list(devices)})
    found: list[Measured] = []
    todo = [(c, s) for c in collectives for s in wanted]
    try:
        for i, (name, size) in enumerate(todo):
            progress(Progress(f"{name} of {size_words(size)} on {counted(ranks, 'rank')}", i, len(todo)))
            answer = ask({"part": "measure", "collective": name, "size": size, "repeat": repeat, "warmup": warmup})[0]
            one = Measured(name, answer["bytes"], ranks, tuple(answer["seconds"]), answer["wrong"])
            if one.bytes not in [m.bytes for m in found if m.collective == name]:  # tiny sizes round to the same
                found.append(one)
    except KeyboardInterrupt:  # Stop between two runs
        ask({"part": "close"})
        raise
    ask({"part": "close"})
    return found
