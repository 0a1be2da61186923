"""Everything nbddp raises, and how it looks in a notebook.

    NbddpError
    ├── BadInput            asked for something that cannot be; nothing was started, nothing lost
    │   └── CellSyntaxError the cell does not compile; no rank has run it
    ├── CommandStopped      the user stopped a %ddp command; says what the pool is like now
    ├── PoolError           the pool of workers could not do its part
    │   ├── AgentFailed     the node agent did not start, or went away
    │   └── PoolNotRunning  there is no pool to do this with
    └── RunFailed           a run did not end well on every rank
        ├── WorkerFailed    a rank raised, exited with a code, died, or left a collective
        ├── RunStopped      the user stopped the run
        ├── RunHung         ranks waited for each other in a way that could not end
        └── RunTimedOut     the run did not end before its --timeout

Messages are for the person at the notebook: what was asked, what is true, what
to type. They hold no ports, pids or times, because saved notebooks compare them;
such facts are attributes. Pure: imports nothing but the standard library.
"""

from __future__ import annotations

import builtins
import os
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


def in_colour() -> bool:
    """Whether IPython shows tracebacks in colour here, and nobody has said NO_COLOR (https://no-color.org)."""
    shell = getattr(builtins, "get_ipython", lambda: None)()
    return str(getattr(shell, "colors", "")).lower() != "nocolor" and not os.environ.get("NO_COLOR")


class NbddpError(Exception):
    """Base of all errors of this package."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback through our own frames."""
        name = type(self).__name__
        return [f"\x1b[31m{name}\x1b[0m: {self}" if in_colour() else f"{name}: {self}"]


class BadInput(NbddpError, ValueError):
    """The request cannot be met as typed. The pool and its state are untouched."""


class CellSyntaxError(BadInput):
    """The cell does not compile. `cell`, `line` (1-based) and `text` say where."""

    def __init__(self, message: str, *, cell: str, line: int | None, text: str, pointer: str):
        super().__init__(f"{message} (cell line {line}); no rank has run the cell")
        self.cell, self.line, self.text, self.pointer = cell, line, text, pointer

    def _render_traceback_(self) -> list[str]:
        where = [f"  {self.cell}, line {self.line}"]
        if self.text:
            where += [f"    {self.text}", f"    {self.pointer}"]
        return [*where, str(self)]


class CommandStopped(NbddpError):
    """The user stopped a command before it had done its work."""


class PoolError(NbddpError, RuntimeError):
    """The pool could not do what a valid request needs."""


class AgentFailed(PoolError):
    """The node agent could not be started, or ended. `log` is the path of its log."""

    def __init__(self, message: str, log: str = ""):
        super().__init__(message)
        self.log = log

    def _render_traceback_(self) -> list[str]:
        return [*super()._render_traceback_(), *([f"its log: {self.log}"] if self.log else [])]


class PoolNotRunning(PoolError):
    """There is no pool (any more)."""


@dataclass(frozen=True)
class Frame:
    """One frame of a remote traceback. `context` holds (line number, text) around `line`; `values`: (name, words), what
    names of a user's frame held when it failed."""

    file: str
    line: int
    name: str
    user: bool
    context: tuple[tuple[int, str], ...] = ()
    values: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Raised:
    """One exception of a chain, outermost last; `relation` says how it follows from the one before."""

    type: str
    message: str
    frames: tuple[Frame, ...] = ()
    relation: str = ""
    notes: tuple[str, ...] = ()


class RankStatus(str, Enum):
    """What a rank is like, while a run lasts and after it. Equal to its own text."""

    RUNNING = "running"
    BLOCKED = "blocked"  # in a call of torch's that waits for others
    SILENT = "silent"  # it does not answer
    UNKNOWN = "unknown"  # its answer was an error
    ABSENT = "absent"  # it takes no part in the run
    FINISHED = "finished"
    ENDED = "ended"  # its process too, with exit code 0
    FAILED = "failed"
    INTERRUPTED = "interrupted"  # and its names are kept
    REPLACED = "replaced"
    DIED = "died"
    TERMINATED = "terminated"  # a script's rank, which had to end because another failed, or somebody stopped it

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class RankState:
    """How one rank ended a run, or where it was when the run was ended.

    `where` is the user's own place, such as `cell line 9`, or empty; `doing` what it was waiting in,
    such as `waiting in all_reduce #14 for rank 1`; `lost` the names that went with a replaced process, `imports` those
    of them that were imported, `why` it is replaced; `fate` is what became of it where it is not. `script`: whether it
    ran a script, whose processes end with it.
    """

    rank: int
    status: RankStatus
    where: str = ""
    detail: str = ""
    doing: str = ""
    lost: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    why: str = "could not be freed"
    fate: str = "replaced"
    script: bool = False


@dataclass(frozen=True)
class Waiting:
    """Ranks that waited in the same call at the same place, such as `all_reduce #3` at `cell line 5`."""

    ranks: tuple[int, ...]
    call: str
    place: str


@dataclass(frozen=True)
class Left:
    """How a rank left the collective that its peers were in. how: "destroyed" (it ended the process group, at `place`)
    or "ended" (its process ended, with exit code `code`)."""

    rank: int
    how: str
    place: Frame | None = None
    code: int | None = None
    waiting: Waiting | None = None


class RunFailed(NbddpError):
    """A run did not end well. `states` has one RankState per rank that took part; `report` is what a notebook shows,
    and `painted` the same in colours; `attempts` says, under `--max-restarts`, what ended each attempt."""

    attempts: tuple[str, ...] = ()
    painted = ""

    def __init__(self, message: str, *, states: tuple[RankState, ...] = (), report: str = ""):
        super().__init__(message)
        self.states = states
        self.report = report

    def _render_traceback_(self) -> list[str]:
        text = self.painted if self.painted and in_colour() else self.report
        return [text] if text else super()._render_traceback_()


class RunStopped(RunFailed):
    """The user stopped the run (the kernel's interrupt)."""


class RunHung(RunFailed):
    """A deadlock: ranks waited for ranks that could not come. They have been freed."""


class RunTimedOut(RunFailed):
    """The run was ended because it had not finished within `--timeout` seconds."""


@dataclass
class Cause:
    """What happened on the rank that failed first.

    `kind` is "raised", "exit" (SystemExit with a code), "died" (the process ended) or "left" (it raised nothing, but
    its peers were still in a collective: `left` says how). `stage` is "begin" or "end" if it was not the program that
    failed but the worker before or after it.
    """

    rank: int
    node: int
    kind: str
    chain: tuple[Raised, ...] = ()
    code: int | str | None = None
    log: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    left: Left | None = None
    stage: str = ""


class WorkerFailed(RunFailed):
    """A rank failed; the first in time is the one that is named, or the one whose leaving made its peers fail.

    Attributes: `rank`, `node`, `exception_type`, `exception_message`, `cause` (with the
    remote traceback), `states` of all ranks, `logs` (rank → path of its whole output).
    """

    def __init__(
        self,
        message: str,
        *,
        cause: Cause,
        states: tuple[RankState, ...],
        report: str,
        logs: dict[int, str],
    ):
        super().__init__(message, states=states, report=report)
        self.cause, self.rank, self.node, self.logs = cause, cause.rank, cause.node, logs
        last = cause.chain[-1] if cause.chain else None
        self.exception_type = last.type if last else ""
        self.exception_message = last.message if last else ""
