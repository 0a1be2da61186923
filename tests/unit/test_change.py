"""What is to be done so that a pool becomes what is asked for: a table, and what holds of every change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.capabilities.slurm.commands import Slurm
from nbddp.launch import options
from nbddp.launch.machine import Device, Node
from nbddp.launch.options import LaunchSpec
from nbddp.launch.topology import Topology
from nbddp.pool.change import Change, RankLayout, plan_change

GPUS = Node(0, "h", tuple(Device(i, str(i), uuid=f"GPU-{i}") for i in range(4)), cores=8)
CPU = Node(0, "h", cores=8)


def on_cpu(n: int) -> RankLayout:
    return RankLayout(Topology.plan([CPU], nproc=n), "all")


def on_gpus(n: int, visible: str = "all", each: int = 1) -> RankLayout:
    return RankLayout(Topology.plan([GPUS], nproc=n, gpus_per_proc=each), visible)


def on_hosts(each: int) -> RankLayout:
    return RankLayout(Topology.plan([Node(0, "a"), Node(1, "b")], nproc=each, nnodes=2), "all")


def simulated(nnodes: int) -> RankLayout:
    return RankLayout(Topology.plan([CPU], nproc=1, nnodes=nnodes), "all")


def all_of(n: int, *dead: int) -> dict[int, bool]:
    return {r: r not in dead for r in range(n)}


GROWN = "pool grown from 2 to 4 workers; ranks 0–1 keep their variables"
SHRUNK = "pool shrunk from 4 to 2 workers; ranks 0–1 keep their variables"
TABLE: dict[str, tuple[RankLayout | None, RankLayout, dict[int, bool], bool, Change]] = {
    "a first start": (None, on_cpu(2), {}, False, Change(start=(0, 1))),
    "nothing": (on_cpu(2), on_cpu(2), all_of(2), False, Change()),
    "grow": (on_cpu(2), on_cpu(4), all_of(2), False, Change(start=(2, 3), notes=(GROWN,))),
    "shrink": (on_cpu(4), on_cpu(2), all_of(4), False, Change(end=(2, 3), notes=(SHRUNK,))),
    "to one": (
        on_cpu(3), on_cpu(1), all_of(3), False,
        Change(end=(1, 2), notes=("pool shrunk from 3 to 1 worker; rank 0 keeps its variables",)),
    ),
    "one has died": (on_cpu(2), on_cpu(2), all_of(2, 1), False, Change((1,), (1,), ("rank 1 is new and empty",))),
    "all have died": (
        on_cpu(2), on_cpu(2), all_of(2, 0, 1), False, Change((0, 1), (0, 1), ("ranks 0–1 are new and empty",)),
    ),
    "one has died that is not needed": (
        on_cpu(3), on_cpu(2), all_of(3, 2), False,
        Change(end=(2,), notes=("pool shrunk from 3 to 2 workers; ranks 0–1 keep their variables",)),
    ),
    "fresh": (on_cpu(2), on_cpu(2), all_of(2), True, Change((0, 1), (0, 1))),
    "fresh and more": (on_cpu(2), on_cpu(3), all_of(2), True, Change((0, 1), (0, 1, 2))),
    "one that was ended": (on_cpu(2), on_cpu(2), {0: True}, False, Change((), (1,), (
        "pool grown from 1 to 2 workers; rank 0 keeps its variables",))),
    "from CPU to GPUs": (on_cpu(2), on_gpus(2), all_of(2), False, Change((0, 1), (0, 1), (
        "ranks 0–1 restarted on other devices; their variables are lost",))),
    "each its own": (on_gpus(2), on_gpus(2, "own"), all_of(2), False, Change((0, 1), (0, 1), (
        "ranks 0–1 restarted on other devices; their variables are lost",))),
    "more GPUs each": (on_gpus(2), on_gpus(2, each=2), all_of(2), False, Change((0, 1), (0, 1), (
        "ranks 0–1 restarted on other devices; their variables are lost",))),
    "more on each host": (on_hosts(1), on_hosts(2), all_of(2), False, Change((1,), (1, 2, 3), (
        "pool grown from 2 to 4 workers; rank 0 keeps its variables",
        "rank 1 restarted on another host; its variables are lost"))),
    "more simulated nodes": (on_cpu(2), simulated(2), all_of(2), False, Change()),
    "more GPUs in all": (on_gpus(2), on_gpus(4), all_of(2), False, Change(start=(2, 3), notes=(GROWN,))),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_change(name: str) -> None:
    old, new, living, fresh, change = TABLE[name]
    assert plan_change(old, new, living, fresh) == change


LAYOUTS = st.one_of(
    st.builds(on_cpu, st.integers(1, 6)),
    st.builds(on_gpus, st.integers(1, 4), st.sampled_from(["all", "own"])),
)


@given(LAYOUTS, LAYOUTS, st.data())
def test_after_any_change_each_rank_has_one_living_process_on_its_devices(
    old: RankLayout, new: RankLayout, data: Any
) -> None:
    living = data.draw(st.dictionaries(st.integers(0, old.size - 1), st.booleans()))
    change = plan_change(old, new, living, data.draw(st.booleans()))
    stay = set(living) - set(change.end)
    assert set(change.end) <= set(living)
    assert sorted([*stay, *change.start]) == list(range(new.size))
    assert all(living[r] and old.devices(r) == new.devices(r) for r in stay)


SET = {"NCCL_DEBUG": "INFO"}
STANDS = LaunchSpec(nproc=4, nnodes=2, gpus_per_proc=1, visible="own", hosts="a,b", env=(*SET.items(),), fresh=True)


@pytest.mark.parametrize(
    ("said", "running", "came"),
    [
        ({}, None, LaunchSpec()),
        ({}, STANDS, replace(STANDS, fresh=False)),
        ({"nproc": 2}, STANDS, replace(STANDS, nproc=2, nnodes=None, fresh=False)),
        ({"nnodes": 3}, STANDS, replace(STANDS, nproc=None, nnodes=3, fresh=False)),
        ({"elastic": (1, 4)}, STANDS, replace(STANDS, elastic=(1, 4), fresh=False)),
        ({"visible": "all"}, STANDS, replace(STANDS, visible="all", fresh=False)),
        ({"keep_warm": 0.0}, replace(STANDS, keep_warm=60.0), replace(STANDS, keep_warm=0.0, fresh=False)),
        ({"env": (("NCCL_DEBUG", None),)}, STANDS, replace(STANDS, env=(), fresh=False)),
        ({"ranks": (0,)}, replace(STANDS, ranks=(1,)), replace(STANDS, ranks=(0,), fresh=False)),
        ({"hosts": "c"}, LaunchSpec(cluster="x"), LaunchSpec(hosts="c")),
        ({"slurm": Slurm()}, LaunchSpec(slurm=Slurm(nodes=2)), LaunchSpec(slurm=Slurm(nodes=2))),
    ],
)
def test_what_a_line_does_not_say_stays_as_it_is(
    said: dict[str, Any], running: LaunchSpec | None, came: LaunchSpec
) -> None:
    assert options.merged(LaunchSpec(**said), running) == came


@pytest.mark.parametrize(("spec", "visible"), [({}, "all"), ({"oversubscribe": True}, "own"), ({"visible": "x"}, "x")])
def test_which_gpus_a_worker_sees(spec: dict[str, Any], visible: str) -> None:
    assert options.visible_gpus(LaunchSpec(**spec)) == visible
