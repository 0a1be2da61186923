"""Which source a pool's nodes come from, and what one on this machine makes of what others have."""

from __future__ import annotations

import pytest

import nbddp
from nbddp.launch.options import LaunchSpec
from nbddp.pool.host_source import kind_of
from nbddp.pool.pool import WorkerPool


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        ({}, "HostSource"),
        ({"nproc": 2, "nnodes": 2}, "HostSource"),
        ({"elastic": (1, 2)}, "RemoteNodes"),
        ({"hosts": "nodea"}, "RemoteNodes"),
        ({"hosts": "nodea", "elastic": (1, 2)}, "RemoteNodes"),
        ({"slurm": nbddp.Slurm()}, "SlurmNodes"),
        ({"slurm": nbddp.Slurm(), "elastic": (1, 2)}, "SlurmNodes"),
        ({"cluster": "stock"}, "ClusterEngines"),
        ({"cluster": "stock", "slurm": nbddp.Slurm(), "hosts": "nodea"}, "ClusterEngines"),
    ],
)
def test_what_is_asked_for_decides_where_nodes_come_from(asked: dict[str, object], kind: str) -> None:
    assert getattr(kind_of(LaunchSpec(**asked)), "__name__", "") == kind  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"sync": True}, "--sync is for other hosts; add --hosts, or remove --sync"),
        ({"interface": "eth0"}, "--interface eth0 is for other hosts; add --hosts, or remove --interface eth0"),
        ({"cluster": "stock", "sync": True}, "--sync is for other hosts; add --hosts, or remove --sync"),
        ({"cluster": "stock", "slurm": nbddp.Slurm()}, "remove --slurm or --cluster"),
        ({"cluster": "stock", "hosts": "nodea"}, "remove --hosts or --cluster"),
        ({"cluster": "stock", "elastic": (1, 2)}, "remove --nnodes or --cluster"),
        ({"cluster": "stock", "fresh": True}, "--fresh replaces processes, but nbddp cannot replace the engines"),
        ({"cluster": "stock", "env": (("A", "1"),)}, "keep the environment that they have; set A where the cluster"),
    ],
)
def test_what_cannot_be_there_is_refused(asked: dict[str, object], words: str) -> None:
    pool = WorkerPool()
    try:
        with pytest.raises(nbddp.BadInput, match=words):
            pool.ensure(LaunchSpec(**asked))  # type: ignore[arg-type]
        assert not pool.running
    finally:
        pool.close()


def test_a_pool_of_this_machine_takes_on_nodes_that_come_and_go_and_leaves_them() -> None:
    with WorkerPool(1) as pool:
        with pytest.raises(nbddp.BadInput, match="fixed number of nodes; start it with --nnodes 1:2"):
            pool.scale(2)
        pool.ensure(LaunchSpec(nproc=1, elastic=(1, 2)))
        assert pool.scale(2) == ["the pool has 2 nodes, world size 2; variables on all workers are lost"]
        assert pool.ensure(LaunchSpec(nproc=1, nnodes=1))
        with pytest.raises(nbddp.BadInput, match="fixed number of nodes"):
            pool.scale(2)
        with pytest.raises(nbddp.BadInput, match="the pool runs on this machine; %ddp stop ends it, then --hosts b st"):
            pool.ensure(LaunchSpec(hosts="b"))


def test_a_line_that_is_refused_leaves_the_nodes_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with WorkerPool(nproc=1, nnodes=(1, 2)) as pool:
        pool.scale(2)
        with monkeypatch.context() as patched:
            patched.setattr(pool.group, "match", lambda *a, **k: pytest.fail("it starts them"))
            with pytest.raises(nbddp.BadInput, match=r"memory|workers"):
                pool.ensure(LaunchSpec(nproc=100_000, nnodes=1))
        assert pool.ensure(LaunchSpec()) == []
        assert pool.world_size == 2
