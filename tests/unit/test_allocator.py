"""The allocator of simulated GPUs gives the counters that an H100 gave for the same requests: tests/data."""

from __future__ import annotations

import itertools
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from nbddp.capabilities.simulated_gpus.on_rank.allocator import Allocator, Block, Full
from tests.gpu import compare

RECORD = compare.read(Path(__file__).parents[1] / "data/h100-torch-2.11.json.gz")


class Held:
    """A tensor of so many bytes."""

    def __init__(self, allocator: Allocator, size: int):
        self.allocator, self.block = allocator, allocator.take(size) if size else None

    def __del__(self) -> None:
        if self.block is not None:
            self.allocator.give(self.block)


def only_blocks(step: str) -> bool:
    """Whether a step of a script asks for bytes, returns them, or resets counters, and nothing else."""
    return (
        step == "" or any(step.startswith(word) for word in ("del ", "torch.cuda.")) or "= B(" in step or "[B(" in step
    )


def counters(one: Allocator) -> list[int]:
    one.settle()
    b = one.both
    now = [b.allocated_bytes.now, b.reserved_bytes.now, b.allocated_bytes.peak, b.reserved_bytes.peak]
    return [*now, b.requested_bytes.now, b.allocation.now, b.segment.now, b.inactive_split_bytes.now]


def do(step: str, one: Allocator, names: dict[str, Any]) -> None:
    if "reset_" in step:
        for count in vars(one.both).values():
            count.peak = count.now
    elif "empty_cache" in step:
        one.release()
    else:
        exec(step, names)


SCRIPTS = [n for n, said in RECORD["sequences"].items() if all(only_blocks(row[0]) for row in said["rows"])]


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) >= 10


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_counter_is_the_h100s(name: str) -> None:
    one = Allocator(lambda size: True)
    names: dict[str, Any] = {"B": lambda size: Held(one, size)}
    for step, *real in RECORD["sequences"][name]["rows"][1:]:
        do(step, one, names)
        assert (step, counters(one)) == (step, real[:8])


def test_every_byte_of_a_segment_is_in_one_block() -> None:
    one, held, dice = Allocator(lambda size: True), [], random.Random(1)
    for _ in range(5000):
        if held and dice.random() < 0.5:
            one.give(held.pop(dice.randrange(len(held))))
        else:
            held.append(
                one.take(dice.choice((1, 700, 70_000, 1 << 20, 3 << 20, 12 << 20, 33 << 20)), dice.choice((0, 7)))
            )
    chains = one.segments()
    assert sum(block.size for chain in chains for block in chain) == one.both.reserved_bytes.now
    assert sum(block.size for block in held) == one.both.allocated_bytes.now
    for chain in chains:
        places = [(block.address, block.address + block.size) for block in chain]
        assert all(end == start for (_, end), (start, _) in itertools.pairwise(places))
        assert not any(not a.used and not b.used for a, b in itertools.pairwise(chain)), "free neighbours"
    for block in held:
        one.give(block)
    one.release()
    assert counters(one)[:2] == [0, 0]
    assert one.segments() == []


def test_what_does_not_fit_is_refused_after_the_cache_was_returned() -> None:
    one = Allocator(lambda size: one.both.reserved_bytes.now + size <= 100 << 20)
    first = one.take(60 << 20)
    one.give(first)
    second = one.take(90 << 20)  # the first segment is returned for it
    assert (one.retries, one.failures, one.both.reserved_bytes.now) == (1, 0, 90 << 20)
    with pytest.raises(Full) as full:
        one.take(11 << 20)
    assert full.value.asked == 12 << 20
    assert (one.retries, one.failures, one.both.allocated_bytes.now) == (2, 1, second.size)


def test_blocks_are_given_back_by_any_thread_and_within_a_request() -> None:
    one = Allocator(lambda size: bool(one.give(held.pop()) or True) if held else True)
    held: list[Block] = []

    def work() -> None:
        for n in range(2000):
            block = one.take(512 * (n % 50 + 1))
            (held.append if n % 7 == 0 else one.give)(block)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for block in held:
        one.give(block)
    assert counters(one)[0] == counters(one)[5] == 0
