"""`%ddp draw_bench`: collectives timed as nccl-tests does, on real ranks, every result checked."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.analysis.wait_time import BUS_FACTOR
from nbddp.capabilities.bench.command import own_gpus, sizes_between
from nbddp.capabilities.bench.figure import draw_bench, table
from nbddp.capabilities.bench.result import Measured
from nbddp.launch.machine import Device, Node
from nbddp.launch.topology import Topology
from nbddp.launch.units import amount
from nbddp.output.progress import Progress


@pytest.mark.parametrize(
    ("asked", "visible", "devices"),
    [
        ({}, "all", [0, 1, 2, 3]),
        ({"gpus_per_proc": 2}, "all", [0, 2]),
        ({"gpus_per_proc": 2}, "own", [0, 0]),
        ({"nproc": 8, "oversubscribe": True}, "own", [None] * 8),
        ({"device": "cpu", "nproc": 2}, "all", [None, None]),
        ({"nnodes": 2}, "all", [0, 1, 0, 1]),  # a simulated node hides the GPUs of the other
    ],
)
def test_ranks_measure_on_gpus_of_their_own_or_all_on_cpu(
    asked: dict[str, Any], visible: str, devices: list[int | None]
) -> None:
    host = Node(0, "h", tuple(Device(i, str(i)) for i in range(4)), 8)
    assert own_gpus(Topology.plan([host], **asked), visible) == devices


@given(st.integers(1, 1000), st.integers(1, 10**9), st.integers(2, 16))
def test_sizes_grow_by_the_factor_up_to_the_largest(smallest: int, extra: int, factor: int) -> None:
    found = sizes_between(smallest, smallest + extra, factor)
    assert found[0] == smallest
    assert all(b == a * factor for a, b in itertools.pairwise(found))
    assert found[-1] <= smallest + extra < found[-1] * factor


@pytest.mark.parametrize(
    ("text", "value"), [("64MiB", 64 << 20), ("4k", 4000), ("1KB", 1000), ("1000", 1000), ("0.5 GiB", 1 << 29)]
)
def test_sizes_as_typed(text: str, value: int) -> None:
    assert amount(text) == value


def test_table_has_numbers_for_those_who_count_on() -> None:
    found = table([Measured("all_reduce", 1 << 20, 4, (0.002, 0.001, 0.003)), Measured("reduce", 1000, 4, (1e-5,))])
    assert found["median"] == [0.002, 1e-5]
    assert found["bus"] == [1.5 * (1 << 20) / 0.002, 1000 / 1e-5]
    assert len(found) == 2
    assert next(iter(found))["size"] == 1 << 20
    assert "all_reduce   1.0 MiB  2.00 ms" in repr(found)
    assert "<td" in found._repr_html_()
    with pytest.raises(KeyError, match="there is no column speed; the columns are collective, size"):
        found["speed"]


@pytest.mark.parametrize("count", [1, 9])
def test_figure_says_itself(count: int) -> None:
    made = [Measured(c, 1 << k, 4, (k * 1e-4, k * 2e-4)) for c in list(BUS_FACTOR)[:count] for k in range(10, 20)]
    shown = draw_bench(made)
    assert shown.png().startswith(b"\x89PNG")
    assert "every element of every result was correct" in shown.words
    assert repr(shown.table) in shown.words
    assert shown.measured == made
    with pytest.raises(ValueError, match="nothing was measured"):
        draw_bench([])


def test_bar_fills() -> None:
    assert Progress("x", 0, 4) == "░" * 24 + " 0/4  x"
    assert Progress("x", 3, 4) == "█" * 18 + "░" * 6 + " 3/4  x"
