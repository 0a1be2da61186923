"""The changes that make the running workers match a request, and the message about them (pure)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nbddp.launch import torchrun_env
from nbddp.launch.topology import Topology, counted, rank_words
from nbddp.protocol.request import Request


class RankLayout(NamedTuple):
    """Who runs where, and of how many devices each process knows (`--visible`)."""

    topology: Topology
    visible: str

    @property
    def size(self) -> int:
        return self.topology.world_size

    def devices(self, rank: int) -> tuple[object, str | None]:
        """A rank's devices, and CUDA_VISIBLE_DEVICES of its process."""
        worker = self.topology.workers[rank]
        return worker.devices, torchrun_env.visible_devices(worker, self.topology.nodes[worker.node], self.visible)

    def host(self, rank: int) -> str:
        """The machine on which a rank's process is, by name."""
        return self.topology.nodes[self.topology.workers[rank].node].host


@dataclass(frozen=True)
class Change:
    """Ranks whose processes are to end, then ranks that are to get one, and a line for all that a user should know."""

    end: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class EnvChange:
    """What a line changes in the environment of a pool's processes.

    wanted: variables that workers are to have besides the notebook's; names: what of that changes. at_import: of these,
    what is read while torch is imported; imported: the variables with which it is imported then. renews: whether it
    takes new workers; asks: else what is asked of those that live. notes: what to say of it.
    """

    wanted: Mapping[str, str] = field(default_factory=dict)
    names: Sequence[str] = ()
    at_import: Sequence[str] = ()
    imported: Mapping[str, str] = field(default_factory=dict)
    renews: bool = False
    notes: Sequence[str] = ()
    asks: Request | None = None


def plan_change(old: RankLayout | None, new: RankLayout, living: Mapping[int, bool], fresh: bool = False) -> Change:
    """From `old` to `new`. living: rank → whether its process lives; one that has died is still there to be replaced.
    fresh: all processes are replaced. Of a first start, and of one that was asked for, there is nothing to tell."""
    died = {r for r, alive in living.items() if not alive}
    surplus = {r for r in living if r >= new.size}
    moved, changed = _moved(old, new), _changed(old, new)
    end = set(living) if fresh else died | surplus | ((moved | changed) & set(living))
    start = [r for r in range(new.size) if r not in living or r in end]
    notes = () if fresh or not living else tuple(_notes(living, died, moved, changed - moved, new.size))
    return Change(tuple(sorted(end)), tuple(start), notes)


def _moved(old: RankLayout | None, new: RankLayout) -> set[int]:
    """Ranks that are to be on another machine; simulated nodes are all this one."""
    if old is None or old.topology.simulated or new.topology.simulated:
        return set()
    return {r for r in range(min(old.size, new.size)) if old.host(r) != new.host(r)}


def _changed(old: RankLayout | None, new: RankLayout) -> set[int]:
    """Ranks whose devices change: a process cannot leave a GPU it has touched."""
    if old is None:
        return set()
    return {r for r in range(min(old.size, new.size)) if old.devices(r) != new.devices(r)}


def _their(ranks: Collection[int]) -> str:
    return "their" if len(ranks) > 1 else "its"


def _notes(living: Mapping[int, bool], died: set[int], moved: set[int], changed: set[int], size: int) -> list[str]:
    notes = []
    kept = sorted(r for r in living if r < size and r not in died | moved | changed)
    if size != len(living):
        word = "grown" if size > len(living) else "shrunk"
        state = f"; {rank_words(kept)} {'keep' if len(kept) > 1 else 'keeps'} {_their(kept)} variables" if kept else ""
        notes.append(f"pool {word} from {len(living)} to {counted(size, 'worker')}{state}")
    if moved:
        notes.append(f"{rank_words(sorted(moved))} restarted on another host; {_their(moved)} variables are lost")
    if changed:
        notes.append(f"{rank_words(sorted(changed))} restarted on other devices; {_their(changed)} variables are lost")
    renewed = sorted(r for r in died if r < size)
    if renewed:
        notes.append(f"{rank_words(renewed)} {'are' if len(renewed) > 1 else 'is'} new and empty")
    return notes


# -- after a command that was stopped ---------------------------------------------------------------

# The state in which a stopped command has left the pool, as text. Pure: compares two snapshots.

NEXT = "the next %ddp start or %%ddp cell"


@dataclass(frozen=True)
class PoolSnapshot:
    """What there is of a pool. workers: rank → pid of the living. group_broken: its process group is to be ended."""

    running: bool
    workers: Mapping[int, int]
    world_size: int
    group_broken: bool


def changed(before: PoolSnapshot, now: PoolSnapshot) -> str:
    """`the pool is unchanged`, or what is different: which ranks have lost their variables, and what comes next.

    Workers that were begun beyond the pool's size are none of its ranks: the next cell ends them, or takes them over.
    """
    if not now.running:
        return "the pool has stopped" if before.running else "there is no pool"
    if not now.world_size:
        return f"the pool is incomplete; {NEXT} completes it"
    lost = sorted(r for r, pid in before.workers.items() if now.workers.get(r) != pid)
    kept = sorted(set(before.workers) - set(lost))
    parts = []
    if lost:
        parts.append(f"variables on {rank_words(lost)} are lost")
    if lost and kept:
        parts.append(f"{rank_words(kept)} {'keep their' if len(kept) > 1 else 'keeps its'} variables")
    absent = sorted(set(range(now.world_size)) - set(now.workers))
    if absent:
        parts.append(f"{NEXT} restarts {rank_words(absent)}")
    if now.group_broken and not before.group_broken and not lost:
        parts.append("the process group is closed, and all variables are kept")
    return "; ".join(parts) or "the pool is unchanged"
