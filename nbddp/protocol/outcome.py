"""How a rank left a run: every way is a row of one table, with its own verdict. Pure.

A row joins what the worker says of the program (`worker.exit_info`), how its process ended if it did, and what we had
done to it by then. Only a program that came to its end, or that exited with code 0 as torchrun counts success, has
finished; an interrupt counts as ours only on a rank that we had interrupted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbddp.errors import Frame, Raised, RankStatus
from nbddp.launch.topology import rank_words

FINISHED, ENDED, FAILED = RankStatus.FINISHED, RankStatus.ENDED, RankStatus.FAILED
INTERRUPTED, DIED, REPLACED = RankStatus.INTERRUPTED, RankStatus.DIED, RankStatus.REPLACED
TERMINATED = RankStatus.TERMINATED
WELL = (FINISHED, ENDED)  # as torchrun has it: exit code 0
GONE = (ENDED, DIED, REPLACED)  # the process, and all names on it
PROGRAM, REQUEST = "program", "request"
ANY = "any"


@dataclass(frozen=True)
class OutcomeRule:
    """said: "end", "exit 0", "exit" (another code), "raised", "interrupt" or "" (nothing). process: "lives", "exit 0",
    "exit", "signal" or "lost" (nobody saw its end). ours: what we had done: "", "interrupted" or "replaced". runs: a
    "program", or a "request" such as a pull, which has an answer to give."""

    said: str
    process: str
    ours: str
    runs: str
    verdict: RankStatus

    def fits(self, *seen: str) -> bool:
        return all(
            mine in (ANY, other)
            for mine, other in zip((self.said, self.process, self.ours, self.runs), seen, strict=True)
        )


TABLE = (
    OutcomeRule("end", "lives", ANY, ANY, FINISHED),
    OutcomeRule("exit 0", "lives", ANY, PROGRAM, FINISHED),
    OutcomeRule("exit 0", "lives", "", REQUEST, FAILED),
    OutcomeRule("exit 0", "lives", INTERRUPTED, REQUEST, INTERRUPTED),
    OutcomeRule("exit 0", "lives", REPLACED, REQUEST, INTERRUPTED),
    OutcomeRule("exit", "lives", "", ANY, FAILED),
    OutcomeRule("exit", "lives", INTERRUPTED, ANY, INTERRUPTED),
    OutcomeRule("exit", "lives", REPLACED, ANY, INTERRUPTED),
    OutcomeRule("raised", "lives", "", ANY, FAILED),
    OutcomeRule("raised", "lives", INTERRUPTED, ANY, INTERRUPTED),  # the error is how a freed call ends
    OutcomeRule("raised", "lives", REPLACED, ANY, INTERRUPTED),
    OutcomeRule("interrupt", "lives", "", ANY, FAILED),  # the program's own: KeyboardInterrupt, SIGINT, CancelledError
    OutcomeRule("interrupt", "lives", INTERRUPTED, ANY, INTERRUPTED),
    OutcomeRule("interrupt", "lives", REPLACED, ANY, INTERRUPTED),
    OutcomeRule("", "exit 0", "", PROGRAM, ENDED),  # os._exit(0)
    OutcomeRule("", "exit 0", INTERRUPTED, PROGRAM, ENDED),
    OutcomeRule("", "exit 0", "", REQUEST, DIED),
    OutcomeRule("", "exit 0", INTERRUPTED, REQUEST, DIED),
    OutcomeRule("", "exit", "", ANY, DIED),
    OutcomeRule("", "exit", INTERRUPTED, ANY, DIED),
    OutcomeRule("", "signal", "", ANY, DIED),
    OutcomeRule("", "signal", INTERRUPTED, ANY, DIED),
    OutcomeRule("", "lost", ANY, ANY, DIED),  # its host is gone: that it was to end has not reached it
    OutcomeRule("", "exit 0", REPLACED, ANY, REPLACED),
    OutcomeRule("", "exit", REPLACED, ANY, REPLACED),
    OutcomeRule("", "signal", REPLACED, ANY, REPLACED),
)


def verdict(said: str, process: str, ours: str, runs: str) -> RankStatus:
    """The verdict of the row that fits; a way that the table does not know is a failure."""
    return next((row.verdict for row in TABLE if row.fits(said, process, ours, runs)), FAILED)


def verdict_of_script(said: str, ours: str, verdict: RankStatus) -> RankStatus:
    """The verdict on a rank whose process ends with its program: whatever comes after we have told it to end is that
    end, unless it had come to its own."""
    return TERMINATED if ours == INTERRUPTED and said != "end" else verdict


def said(content: dict[str, Any]) -> str:
    """What a worker's outcome says, as the table has it."""
    left = str(content.get("left", ""))
    return "exit 0" if left == "exit" and content.get("exit") == 0 else left


def process(code: int | None) -> str:
    """How a process ended, as the table has it. code: as Python gives it; None if nobody saw it."""
    if code is None:
        return "lost"
    return "signal" if code < 0 else "exit" if code else "exit 0"


@dataclass
class RankExit:
    """How one rank ended the run: the verdict, when it was known (monotonic), and what the worker said. code: of its
    process, also if that ended after its program; gone_ns: when (nanoseconds since 1970)."""

    rank: int
    status: RankStatus
    at: float
    content: dict[str, Any] = field(default_factory=dict)
    buffers: list[bytes] = field(default_factory=list)
    code: int | None = None
    gone_ns: int | None = None

    @property
    def well(self) -> bool:
        return self.status in WELL

    @property
    def own_interrupt(self) -> bool:
        """Whether an interrupt that we have not sent has failed the rank."""
        return self.status == FAILED and said(self.content) == "interrupt"

    def raised_as(self, other: RankExit) -> bool:
        """Whether both ranks say that they have raised the same, or nothing."""
        mine, its = (e.content.get("whole", e.content.get("chain")) for e in (self, other))
        return bool(mine == its)

    @property
    def chain(self) -> tuple[Raised, ...]:
        """The remote exceptions as values."""
        return _chain(self.content.get("chain", ()))


def _chain(links: Iterable[dict[str, Any]]) -> tuple[Raised, ...]:
    return tuple(
        Raised(
            type=link["type"],
            message=link["message"],
            relation=link["relation"],
            notes=tuple(link["notes"]),
            frames=tuple(map(_frame, link["frames"])),
            group=tuple(map(_chain, link.get("group", ()))),
            more=link.get("more", 0),
            older=link.get("older", 0),
        )
        for link in links
    )


def _frame(f: dict[str, Any]) -> Frame:
    context, values = ([tuple(pair) for pair in f.get(part, ())] for part in ("context", "values"))
    left_out = f.get("left_out", 0), tuple(f.get("of", ()))
    return Frame(f["file"], f["line"], f["name"], f["user"], tuple(context), tuple(values), *left_out)


def modules_note(ended: Sequence[RankExit]) -> str:
    """Which modules of the user's own are not what their files are now; empty if all are."""
    found = {(name, how) for e in ended for name, how in e.content.get("modules", ())}
    changed, moved = (sorted(name for name, how in found if how == kind) for kind in ("changed", "moved"))
    parts = [f"{', '.join(changed)} changed on disk"] * bool(changed)
    parts += [f"{', '.join(moved)} would now be imported from another folder"] * bool(moved)
    if not parts:
        return ""
    it = "it" if len(found) == 1 else "them"
    anew = f"importlib.reload in a %%ddp cell, or --fresh, reloads {it}"
    return f"{' and '.join(parts)} since the ranks imported {it}; {anew}"


def handling_note(ended: Sequence[RankExit]) -> str:
    """That a program has had NCCL end its process when a collective fails; empty if none has."""
    found = sorted({e.content["handling"] for e in ended if e.content.get("handling")})
    if not found:
        return ""
    return (
        f"TORCH_NCCL_ASYNC_ERROR_HANDLING is {' and '.join(found)} in this program: NCCL then ends a rank whose "
        "collective fails, and its names are lost; with 2, which %%ddp sets, the rank survives"
    )


def note(ended: Sequence[RankExit]) -> str:
    """What a user should know of ranks whose processes ended well; empty if none did."""
    ranks = [e.rank for e in ended if e.status == ENDED]
    if not ranks:
        return ""
    its, new, it = ("its process", "a new, empty one", "it")
    if len(ranks) > 1:
        its, new, it = ("their processes", "new, empty ones", "them")
    return f"{rank_words(ranks)} ended {its} with exit code 0; names on {it} are gone, and the next cell starts {new}"


NOTES = (modules_note, handling_note)
