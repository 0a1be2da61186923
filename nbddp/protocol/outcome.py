"""How a rank left a run: its worker's report (`Outcome`), and the verdict (`TABLE`). Pure.

A row of the table joins the worker's report on the program, the end of its process, and what we had done by then. Only
a program that came to its end, or that exited with code 0 as torchrun counts success, has finished; an interrupt counts
as ours only on a rank that we had interrupted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from nbddp.errors import Raised, RankStatus
from nbddp.protocol.messages import MimeBundle
from nbddp.protocol.position import CalledFrom, Place

END, EXIT, RAISED, INTERRUPT = "end", "exit", "raised", "interrupt"  # how a program left

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


def verdict_of_one_shot(said: str, ours: str, verdict: RankStatus) -> RankStatus:
    """The verdict on a rank whose process ends with its program. Anything after our order to end is that end, unless
    the rank had come to its own."""
    return TERMINATED if ours == INTERRUPTED and said != "end" else verdict


@dataclass(frozen=True)
class GroupFacts:
    """A rank's process group after a run.

    run: the run in which the living default group was made (None: there is none); sequence: how many collectives it has
    seen. touched: whether the run had a group, or a part of one. inits: how many have begun in the run. aborted: NCCL's
    was aborted; cut: connections to a host that does not answer were shut.
    """

    run: int | None = None
    sequence: int = 0
    touched: bool = False
    inits: int = 0
    aborted: bool = False
    cut: bool = False


@dataclass(frozen=True)
class GroupExit:
    """A place (file, line, function) where a program ended a process group, and when; group: its name, empty for the
    default group; inits: how many inits of the run had begun."""

    group: str
    place: Place | None
    ended_ns: int
    inits: int


@dataclass(frozen=True)
class LostContext:
    """CUDA's own text of an error that has broken the process's context, and the variables that are lost with it."""

    why: str
    names: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()


@dataclass
class Outcome:
    """What a worker says at the end of a run: `nbddp_outcome`.

    left: how the program left: END, EXIT, RAISED, INTERRUPT; empty if the rank has not said. stage: "begin" or "end" if
        an error came before or after the program. ended_ns: when (nanoseconds since 1970).
    exit_code, exit_text: of SystemExit; what Python makes of its argument.
    chain: what ended the program, oldest exception first; call: the call of torch's that it came out of.
    error_file: the text of TORCHELASTIC_ERROR_FILE. traceback: what Python would print of `chain`, if it prints none.
    group, group_exits: of the process group. at_exit: how many functions of `atexit` wait for the worker's end.
    next_run: the run that a freed rank goes on with unasked.
    pages, next_inputs: what the cell asks of the front end: mimebundles to show; (text, whether it replaces the cell).
    unsaved: why, and to which path, output could not be written. nccl_handling: TORCH_NCCL_ASYNC_ERROR_HANDLING.
    parts: what parts of capabilities have found, by their names; part_errors: the name and error of each that failed.
    """

    run: int
    left: str = ""
    stage: str = ""
    ended_ns: int = 0
    exit_code: int | None = None
    exit_text: str | None = None
    chain: tuple[Raised, ...] = ()
    call: CalledFrom | None = None
    error_file: str = ""
    traceback: str = ""
    lost_context: LostContext | None = None
    group: GroupFacts | None = None
    group_exits: tuple[GroupExit, ...] = ()
    at_exit: int | None = None
    next_run: int | None = None
    pages: tuple[MimeBundle | str, ...] = ()
    next_inputs: tuple[tuple[str, bool], ...] = ()
    unsaved: tuple[str, str] | None = None
    nccl_handling: str = ""
    parts: dict[str, Any] = field(default_factory=dict)
    part_errors: tuple[tuple[str, str], ...] = ()

    @property
    def failed(self) -> bool:
        """Whether an error has ended the run on this rank."""
        return bool(self.chain)

    @property
    def remarks(self) -> bool:
        """Whether it says what a user should know however the run has ended (`pool.runs.notes`)."""
        return bool(self.parts or self.part_errors or self.nccl_handling or self.unsaved)

    def has_longer(self, characters: int, lines: int) -> bool:
        """Whether a message or a note of its exceptions has more than that."""
        texts = [text for link in within(self.chain) for text in (link.message, *link.notes)]
        return any(len(text) > characters or text.count("\n") >= lines for text in texts)


def within(chain: Iterable[Raised]) -> Iterator[Raised]:
    """Exceptions, and those in their groups."""
    for link in chain:
        yield link
        yield from within(itertools.chain(*link.group))


def exit_kind(outcome: Outcome) -> str:
    """The key of a worker's outcome in the table."""
    return "exit 0" if outcome.left == EXIT and outcome.exit_code == 0 else outcome.left


def process(code: int | None) -> str:
    """How a process ended, as the table has it. code: as Python gives it; None if nobody saw it."""
    if code is None:
        return "lost"
    return "signal" if code < 0 else "exit" if code else "exit 0"


@dataclass(frozen=True)
class ProcessExit:
    """How a rank's process ended.

    code: as Python gives it; None if nobody saw it, and `lost` may say why. peak_kib: the most memory it held.
    last_words: the end of its log. overrun: which limit of a sandbox ended it. pool_ended: it ended with its pool
    (True), or why that ended. seen_ns: when it was heard of (nanoseconds since 1970).
    """

    code: int | None = None
    peak_kib: int = 0
    last_words: str = ""
    overrun: str = ""
    lost: str = ""
    pool_ended: bool | str = False
    seen_ns: int | None = None


@dataclass(frozen=True)
class RankExit:
    """How one rank ended the run: the verdict, and when it was known (monotonic).

    outcome: what the worker said; None if its process ended before. process: how that ended, also if it did so after
    the outcome. whole: a digest of the outcome's chain, if texts in it were cut.
    """

    rank: int
    status: RankStatus
    at: float
    outcome: Outcome | None = None
    process: ProcessExit | None = None
    buffers: list[bytes] = field(default_factory=list)
    whole: str = ""

    @property
    def well(self) -> bool:
        return self.status in WELL

    @property
    def code(self) -> int | None:
        """The exit code of its process, if that is known to have ended."""
        return self.process.code if self.process is not None else None

    @property
    def pool_ended(self) -> bool | str:
        """Whether the pool's end has ended the rank; or why the pool ended."""
        return self.process.pool_ended if self.process is not None and self.outcome is None else False

    @property
    def chain(self) -> tuple[Raised, ...]:
        """The remote exceptions."""
        return self.outcome.chain if self.outcome is not None else ()

    @property
    def group(self) -> GroupFacts | None:
        return self.outcome.group if self.outcome is not None else None

    @property
    def call(self) -> CalledFrom | None:
        return self.outcome.call if self.outcome is not None else None

    @property
    def exit_code(self) -> int | None:
        """Of SystemExit."""
        return self.outcome.exit_code if self.outcome is not None else None

    @property
    def ended_ns(self) -> int:
        """When its program ended; 0 if the worker has not said."""
        return self.outcome.ended_ns if self.outcome is not None else 0

    @property
    def lost_context(self) -> LostContext | None:
        return self.outcome.lost_context if self.outcome is not None else None

    @property
    def said_interrupt(self) -> bool:
        """Whether an interrupt has ended the program."""
        return self.outcome is not None and exit_kind(self.outcome) == INTERRUPT

    @property
    def own_interrupt(self) -> bool:
        """Whether an interrupt that we have not sent has failed the rank."""
        return self.status == FAILED and self.said_interrupt

    def raised_as(self, other: RankExit) -> bool:
        """Whether both ranks say that they have raised the same, or nothing."""
        return (self.whole or self.chain) == (other.whole or other.chain)
