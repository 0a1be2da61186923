"""Notes on how ranks ended a run, apart from what made it fail. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from nbddp.launch.topology import rank_words
from nbddp.protocol.outcome import ENDED, RankExit


def notes(ended: Sequence[RankExit]) -> list[str]:
    """What a user should know of the ranks' processes, however the run has ended."""
    said = [e.outcome for e in ended if e.outcome is not None]
    stale = {module for outcome in said for module in map(tuple, outcome.parts.get("stale_modules", ()))}
    handling = {outcome.nccl_handling for outcome in said if outcome.nccl_handling}
    return [note for note in (modules_note(stale), handling_note(handling), *parts_notes(ended)) if note]


def modules_note(found: Collection[tuple[str, str]]) -> str:
    """Which modules of the user's own are not what their files are now; empty if all are."""
    changed, moved = (sorted(name for name, how in found if how == kind) for kind in ("changed", "moved"))
    parts = [f"{', '.join(changed)} changed on disk"] * bool(changed)
    parts += [f"{', '.join(moved)} would now be imported from another folder"] * bool(moved)
    if not parts:
        return ""
    it = "it" if len(found) == 1 else "them"
    anew = f"reload {it} with importlib.reload in a %%ddp cell, or with --fresh"
    return f"{' and '.join(parts)} since the ranks imported {it}; {anew}"


def parts_notes(ended: Sequence[RankExit]) -> list[str]:
    """Which parts of capabilities have failed, on which ranks."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for e in ended:
        for failed in e.outcome.part_errors if e.outcome is not None else ():
            ranks.setdefault(failed, []).append(e.rank)
    return [
        f"{name} failed on {rank_words(some)} ({error}); the program itself is not affected"
        for (name, error), some in ranks.items()
    ]


def handling_note(found: Collection[str]) -> str:
    """That a program has had NCCL end its process when a collective fails; empty if none has."""
    if not found:
        return ""
    return (
        f"TORCH_NCCL_ASYNC_ERROR_HANDLING is {' and '.join(sorted(found))} in this program: NCCL then aborts "
        "a rank whose collective fails, and its variables are lost; with 2, the setting of %%ddp, the rank survives"
    )


def ended_note(ended: Sequence[RankExit]) -> str:
    """What a user should know of ranks whose processes ended well; empty if none did."""
    ranks = [e.rank for e in ended if e.status == ENDED]
    if not ranks:
        return ""
    its, new = ("its", "a new process") if len(ranks) == 1 else ("their", "new processes")
    return f"{rank_words(ranks)} exited with code 0; {its} variables are lost, and the next cell starts {new}"
