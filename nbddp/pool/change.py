"""What has to be done so that the living workers are those that are asked for, and what to say of it (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from nbddp.plan import environment
from nbddp.plan.topology import Topology, counted, rank_words


class Layout(NamedTuple):
    """Who runs where, and of how many devices each process knows (`--visible`)."""

    topology: Topology
    visible: str

    @property
    def size(self) -> int:
        return self.topology.world_size

    def devices(self, rank: int) -> tuple[object, str | None]:
        """A rank's devices, and CUDA_VISIBLE_DEVICES of its process."""
        worker = self.topology.workers[rank]
        return worker.devices, environment.visible_devices(worker, self.topology.nodes[worker.node], self.visible)


@dataclass(frozen=True)
class Change:
    """Ranks whose processes are to end, then ranks that are to get one, and a line for all that a user should know."""

    end: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def plan_change(old: Layout | None, new: Layout, living: Mapping[int, bool], fresh: bool = False) -> Change:
    """From `old` to `new`. living: rank → whether its process lives; one that has died is still there to be replaced.
    fresh: all processes are replaced. Of a first start, and of one that was asked for, there is nothing to tell."""
    died = {r for r, alive in living.items() if not alive}
    surplus = {r for r in living if r >= new.size}
    changed = _changed(old, new)
    end = set(living) if fresh else died | surplus | (changed & set(living))
    start = [r for r in range(new.size) if r not in living or r in end]
    notes = () if fresh or not living else tuple(_notes(living, died, changed, new.size))
    return Change(tuple(sorted(end)), tuple(start), notes)


def _changed(old: Layout | None, new: Layout) -> set[int]:
    """Ranks whose devices change: a process cannot leave a GPU it has touched."""
    if old is None:
        return set()
    return {r for r in range(min(old.size, new.size)) if old.devices(r) != new.devices(r)}


def _notes(living: Mapping[int, bool], died: set[int], changed: set[int], size: int) -> list[str]:
    notes = []
    kept = sorted(r for r in living if r < size and r not in died and r not in changed)
    if size != len(living):
        word = "grown" if size > len(living) else "shrunk"
        keep = "keep their" if len(kept) > 1 else "keeps its"
        state = f"; {rank_words(kept)} {keep} names" if kept else ""
        notes.append(f"pool {word} from {len(living)} to {counted(size, 'worker')}{state}")
    if changed:
        notes.append(f"{rank_words(sorted(changed))} restarted on other devices; names on them are gone")
    renewed = sorted(r for r in died if r < size)
    if renewed:
        notes.append(f"{rank_words(renewed)} {'are' if len(renewed) > 1 else 'is'} new and empty")
    return notes
