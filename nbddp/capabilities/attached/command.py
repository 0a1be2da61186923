"""How a pool comes to the engines of a cluster that already runs, and what it refuses to do with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nbddp.agent.stop import uninterrupted
from nbddp.capabilities.attached.clusters import find
from nbddp.capabilities.attached.nodes import LOOK_SECONDS, AttachedCluster, by_host
from nbddp.errors import BadInput, PoolNotRunning
from nbddp.launch.options import LaunchSpec
from nbddp.launch.topology import counted
from nbddp.pool.worker_group import WorkerGroup


def check(group: WorkerGroup) -> None:
    """Raises PoolNotRunning if the cluster is gone."""
    if group.joined is not None and group.joined.lost:
        raise PoolNotRunning(f"the pool has ended, because {group.joined.lost}; {group.joined.again()}")


def warm(group: WorkerGroup, spec: LaunchSpec, progress: Callable[[str], None]) -> list[str]:
    """Have the engines of the cluster that is asked for as nodes; what the start is to say. Raises BadInput for what
    cannot be on one."""
    _refuse(spec)
    if group.joined is not None:
        return []
    try:
        return _join(group, spec, progress)
    except BaseException:
        with uninterrupted():
            group.part()
        raise


def _refuse(spec: LaunchSpec) -> None:
    if spec.fresh:
        raise BadInput(
            f"--fresh replaces processes, but nbddp cannot replace the engines of cluster {spec.cluster}; %reset -f "
            "in a %%ddp cell clears their names, and restarting the cluster gives new engines"
        )
    places = {"--hosts": spec.hosts, "--slurm": spec.slurm, "--nnodes": spec.nnodes or spec.elastic}
    for option, asked in places.items():
        if asked:
            raise BadInput(f"the nodes of a cluster are its engines' hosts; leave out {option} or --cluster")


def _join(group: WorkerGroup, spec: LaunchSpec, progress: Callable[[str], None]) -> list[str]:
    """Connect to the cluster, and look at its engines."""
    from IPython.paths import get_ipython_dir

    joined = AttachedCluster(find(str(spec.cluster), Path(get_ipython_dir())), group.nodes[0].agent.pool_id)
    group.meet(joined)
    engines = joined.look(progress)
    hosts = by_host(engines)
    if isinstance(spec.nproc, int):
        hosts = [own[: spec.nproc] for own in hosts]
    facts = joined.evaluate({own[0].id: "facts()" for own in hosts}, LOOK_SECONDS)
    group.join(joined, [(own, facts[own[0].id]) for own in hosts])
    chosen = [engine for own in hosts for engine in own]
    return [*joined.differences(chosen), *joined.promises(chosen)]


def engines_each(group: WorkerGroup) -> int:
    """How many engines each host has. Raises BadInput where they have different numbers of them."""
    counts = {len(node.engines): node.name for node in group.engines}
    if len(counts) > 1:
        words = " and ".join(f"{name} has {counted(n, 'engine')}" for n, name in counts.items())
        raise BadInput(f"{words}; set how many to use on each host with --nproc {min(counts)}")
    return next(iter(counts))


def refuse_renewal(group: WorkerGroup, asked: str) -> None:
    """Raises BadInput where the ranks' processes are not ours."""
    if group.joined is not None:
        name = group.joined.cluster.name
        raise BadInput(
            f"{asked} replaces the ranks' processes, but nbddp cannot replace the engines of cluster {name}; restart "
            f"the cluster, then %ddp stop and %ddp start --cluster {name}"
        )
