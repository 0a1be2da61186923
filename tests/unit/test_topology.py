"""What `%ddp topology` says is true: of recorded machines, of this one, and of layouts that are only planned."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.analysis.placement import PATHS, bus_words, describe, planned
from nbddp.capabilities.topology.boxes import Box, columns, layout_boxes
from nbddp.capabilities.topology.command import planned_layout
from nbddp.capabilities.topology.figure import LOOKS, look
from nbddp.errors import BadInput
from nbddp.figures.palette import FILLS, FRAME, PAPER
from nbddp.launch.machine import Device, Interface, Node, Numa
from nbddp.launch.topology import Topology, topology_of
from nbddp.notebook import commands
from tests.colours import contrast


def cpu(cores: int, numa: int, **asked: Any) -> Topology:
    each = cores // max(1, numa)
    nodes = tuple(Numa(i, tuple(range(i * each, (i + 1) * each))) for i in range(numa))
    return Topology.plan([Node(0, "h", (), cores, numa=nodes, interface=Interface("lo", loopback=True))], **asked)


def test_what_an_older_agent_described_can_still_be_read() -> None:
    placed = Topology.plan([Node(0, "h", (Device(0, "0", "a"),), 4)])
    data = asdict(placed)
    for name in ("planned", "links", "numa", "interface", "untold"):
        del data["nodes"][0][name]
    del data["nodes"][0]["devices"][0]["numa"]
    assert topology_of(data) == placed


@pytest.mark.parametrize(
    ("bus", "words"),
    [("00000000:19:00.0", "19:00.0"), ("0000:19:00.0", "19:00.0"), ("00010002:DB:00.0", "10002:db:00.0"), ("", "")],
)
def test_bus_ids_are_written_as_lspci_writes_them(bus: str, words: str) -> None:
    assert bus_words(bus) == words


def test_words_of_a_cpu_machine_are_the_same_on_every_laptop_and_its_picture_is_not() -> None:
    for asked in ({"nproc": 4}, {"nproc": 2, "nnodes": 2}):
        small, large = cpu(2, 1, **asked), cpu(128, 2, **asked)
        assert describe(small) == describe(large)
        assert "core" not in describe(small)
        texts = [[b.text for b in layout_boxes(p).boxes if b.kind == "numa"] for p in (small, large)]
        assert texts == [["cores 0–1"] * small.nnodes, ["cores 0–63", "cores 64–127"] * large.nnodes]


# -- planned layouts --------------------------------------------------------------------------


def asked(line: str, prog: str = "%ddp") -> Topology | None:
    return planned_layout(commands.parse_command(line if prog == "%ddp" else line.split(), prog))


def test_a_planned_layout_follows_from_numbers_alone() -> None:
    placed = asked("topology --nnodes 2 --gpus-per-node 4 --gpus-per-proc 2")
    assert placed is not None
    assert describe(placed).splitlines() == [
        "world size 4 = 2 planned nodes × 2 processes; each owns 2 GPUs",
        "node 0 (planned), 4 GPUs: rank 0 (local rank 0) on GPUs 0, 1; rank 1 (local rank 1) on GPUs 2, 3",
        "node 1 (planned), 4 GPUs: rank 2 (local rank 0) on GPUs 0, 1; rank 3 (local rank 1) on GPUs 2, 3",
    ]
    assert asked("topology") is None


@pytest.mark.parametrize(
    ("line", "equation"),
    [
        ("--nnodes 3", "world size 6 = 3 planned nodes × 2 processes; on CPU"),
        ("--gpus-per-node 8", "world size 8 = 1 planned node × 8 processes; each owns 1 GPU"),
        ("--gpus-per-node 8 --nproc 3", "world size 3 = 1 planned node × 3 processes; each owns 1 GPU"),
        ("--gpus-per-node 8 -n gpu", "world size 8 = 1 planned node × 8 processes; each owns 1 GPU"),
        ("--gpus-per-node 2 --nproc 4 --oversubscribe", "world size 4 = 1 planned node × 4 processes; GPUs are shared"),
        ("--nproc 4", "world size 4 = 1 planned node × 4 processes; on CPU"),
        ("--nnodes 12500 --gpus-per-node 8",
         "world size 100000 = 12500 planned nodes × 8 processes; each owns 1 GPU"),
    ],
)  # fmt: skip
def test_planned_layouts_state_their_equation(line: str, equation: str) -> None:
    placed = asked(f"topology {line}")
    assert placed is not None
    assert placed.equation() == equation
    assert len(layout_boxes(placed).boxes) < 200


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("--gpus-per-node 4 --gpus-per-proc 8", "use --gpus-per-proc 4"),
        ("--gpus-per-node 4 --gpus-per-proc 2 --nproc 3", "each need 6 GPUs, but there are 4; use --nproc 2"),
        ("--nnodes 2 --gpus-per-node 4 --nproc 5", "each node has 4; use --nproc 4, or add --oversubscribe"),
        ("--gpus-per-proc 2", "add --gpus-per-node 2 or more"),
        ("--nproc cpu --gpus-per-node 2", "use --nproc 2"),
        ("--nproc gpu", "use --nproc 2"),
        ("--nproc auto", "use --nproc 2"),
        ("--nnodes 0", "'0' is not a positive whole number; use 1 or more"),
        ("--gpus-per-node x", "'x' is not a positive whole number"),
        ("--nnodes 1000000000", "use --nnodes 50000 or fewer"),
        ("--gpus-per-node 1000000000", "at most 256 processes or GPUs, not 1000000000; use smaller numbers"),
        ("--nproc 1000000000", "use smaller numbers"),
        ("--gpus-per-nod 4", "did you mean --gpus-per-node?"),
    ],
)
def test_impossible_layouts_are_refused_with_what_to_type(line: str, advice: str) -> None:
    with pytest.raises(BadInput) as caught:
        asked(f"topology {line}")
    assert advice in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pool_and_a_plan_contradict_each_other() -> None:
    with pytest.raises(BadInput, match="a pool or a planned layout, not both"):
        asked("topology --nnodes 2 abc", "python -m nbddp")


@given(
    st.integers(1, 6), st.integers(0, 9), st.none() | st.integers(1, 9), st.none() | st.integers(1, 9), st.booleans()
)
def test_every_plan_places_each_gpu_or_refuses(
    nnodes: int, gpus: int, per_proc: int | None, nproc: int | None, share: bool
) -> None:
    try:
        placed = planned(nnodes=nnodes, gpus_per_node=gpus, gpus_per_proc=per_proc, nproc=nproc, oversubscribe=share)
    except BadInput:
        assert (per_proc and (not gpus or per_proc * (nproc or 1) > gpus)) or (nproc or 0) > gpus > 0
        return
    assert (placed.nnodes, placed.planned) == (nnodes, True)
    for node in placed.nodes:
        owned = [d.index for w in placed.on_node(node.index) for d in w.devices]
        assert [w.local_rank for w in placed.on_node(node.index)] == list(range(placed.nproc_per_node))
        idle = [i for i, ranks in placed.owners(node.index).items() if not ranks]
        assert sorted({*owned, *idle}) == list(range(gpus))
        assert placed.oversubscribed == (len(owned) > gpus > 0) or share


def test_text_of_every_box_is_readable_on_its_fill() -> None:
    for kind, its in LOOKS.items():
        fills = FILLS if kind == "process" else (PAPER, FRAME) if its.fill == "none" else (its.fill,)
        for node, fill in enumerate(fills):
            shown = look(Box(kind, 0, 0, 1, 1, node=node))
            assert min(contrast(shown.title, fill), contrast(shown.text, fill)) >= 4.5, kind
            if shown.title == PAPER:
                assert shown.fill in FILLS


def test_closer_links_are_darker() -> None:
    fills = [contrast(LOOKS[kind].fill, "#000000") for kind in ("NV", *PATHS)]
    assert fills == sorted(set(fills))


def test_idle_and_shared_gpus_differ_without_colour() -> None:
    assert LOOKS["idle"].dashed
    assert LOOKS["shared"].line > LOOKS["gpu"].line
    assert not LOOKS["gpu"].dashed


def test_rows_are_about_equally_long() -> None:
    assert [columns(n, 4) for n in (0, 1, 4, 5, 6, 8, 16)] == [0, 1, 4, 3, 3, 4, 4]
