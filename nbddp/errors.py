"""Everything nbddp raises, and how it looks in a notebook.

    NbddpError
    ├── BadInput            the request cannot be met; nothing was started, nothing is lost
    │   └── CellSyntaxError the cell does not compile; no rank has run it
    ├── CommandStopped      the user stopped a %ddp command; the message gives the pool's state
    ├── PoolError           the pool could not carry out a valid request
    │   ├── AgentFailed     the node agent did not start, or it ended
    │   │   └── SlurmRefused a command of Slurm failed
    │   └── PoolNotRunning  no pool is running
    └── RunFailed           a run failed on at least one rank
        ├── WorkerFailed    a rank raised, exited with an error code, died, or left a collective
        ├── RunStopped      the user stopped the run
        ├── RunHung         ranks waited for each other in a deadlock
        └── RunTimedOut     the run did not end before its --timeout

Messages are for the person at the notebook: what was asked, what is true, what
to type. They hold no ports, pids or times, because saved notebooks compare them;
such facts are attributes. Pure: imports nothing but the standard library.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

E = TypeVar("E", bound=BaseException)
PACKAGE = os.path.dirname(__file__) + os.sep


def in_colour() -> bool:
    """Whether to show tracebacks in colour: IPython's setting, unless NO_COLOR is set (https://no-color.org)."""
    shell = getattr(builtins, "get_ipython", lambda: None)()
    return str(getattr(shell, "colors", "")).lower() != "nocolor" and not os.environ.get("NO_COLOR")


def in_kernel() -> bool:
    """Whether errors go to a front end of a kernel, such as a notebook's.

    JupyterLab shows them on red: #fdd in its light theme, about #511f1b in the dark one. No colour has a contrast of
    4.5:1 on both (the best has 3.3:1), and so none is used there, only weight.
    """
    return getattr(getattr(builtins, "get_ipython", lambda: None)(), "kernel", None) is not None


def in_own_frames(error: E) -> E:
    """Have IPython show an error of another class without this package's frames, behind the user's own."""
    with contextlib.suppress(AttributeError):  # a class may refuse attributes
        error._render_traceback_ = _rendered  # type: ignore[attr-defined]
    return error


def _rendered() -> list[str]:
    """The traceback of the error that IPython shows. A function without state, because an error can be pickled."""
    error: BaseException | None = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if error is None:
        return []
    own, tb = None, error.__traceback__
    while tb is not None:
        own = own if tb.tb_frame.f_code.co_filename.startswith(PACKAGE) else tb
        tb = tb.tb_next
    if own is not None:
        own.tb_next = None
    shown: list[str] = builtins.get_ipython().InteractiveTB.structured_traceback(  # type: ignore[attr-defined]
        type(error), error, error.__traceback__
    )
    return shown


class NbddpError(Exception):
    """Base of all errors of this package.

    Example:

        try:
            pool.pull("nothing")
        except nbddp.NbddpError as error:
            print(error)
    """

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback through our own frames."""
        name, look = type(self).__name__, 1 if in_kernel() else 31  # bold, or red
        return [f"\x1b[{look}m{name}\x1b[0m: {self}" if in_colour() else f"{name}: {self}"]


class BadInput(NbddpError, ValueError):
    """The request cannot be met as typed. The pool and its state are unchanged. It is a ValueError, too.

    Example:

        try:
            nbddp.Pool(device="gpu")
        except nbddp.BadInput as error:
            print(error)
    """


class CellSyntaxError(BadInput):
    """A `%%ddp` cell does not compile; no rank has run it.

    Attributes: `cell` (str), `line` (int from 1, or None), `text` (str) and `pointer` (str, which marks the column).

    Example:

        try:
            get_ipython().run_cell_magic("ddp", "", "1 +")
        except nbddp.CellSyntaxError as error:
            print(error.line, error.text)
    """

    def __init__(self, message: str, *, cell: str, line: int | None, text: str, pointer: str):
        super().__init__(f"{message} (cell line {line}); no rank ran the cell")
        self.cell, self.line, self.text, self.pointer = cell, line, text, pointer

    def _render_traceback_(self) -> list[str]:
        where = [f"  {self.cell}, line {self.line}"]
        if self.text:
            where += [f"    {self.text}", f"    {self.pointer}"]
        return [*where, str(self)]


class CommandStopped(NbddpError):
    """The user stopped a `%ddp` command before it finished. The message describes the pool's state.

    Example:

        try:
            get_ipython().run_line_magic("ddp", "bench")
        except nbddp.CommandStopped as error:
            print(error)
    """


class PoolError(NbddpError, RuntimeError):
    """The pool could not carry out a valid request. `log` (str): the path of a log with details, or empty.

    Example:

        try:
            nbddp.Pool(nproc=2).pull("model")
        except nbddp.PoolError as error:
            print(error, error.log)
    """

    log = ""


class AgentFailed(PoolError):
    """The node agent did not start, or it ended: on this machine or on a host. `log` (str): the path of its log.

    Example:

        try:
            nbddp.Pool(hosts="nodea").start()
        except nbddp.AgentFailed as error:
            print(error, error.log)
    """

    def __init__(self, message: str, log: str = ""):
        super().__init__(message)
        self.log = log

    def _render_traceback_(self) -> list[str]:
        return [*super()._render_traceback_(), *([f"its log: {self.log}"] if self.log else [])]


class SlurmRefused(AgentFailed):
    """A command of Slurm failed. `said` (str): the reason that Slurm gave.

    Example:

        try:
            nbddp.Pool(slurm=nbddp.Slurm(nodes=2)).start()
        except nbddp.SlurmRefused as error:
            print(error.said)
    """

    def __init__(self, command: str, said: str):
        super().__init__(f"{command} says: {said}")
        self.said = said


class PoolNotRunning(PoolError):
    """No pool is running. A pool starts with `start()` or with its first run.

    Example:

        try:
            nbddp.Pool(nproc=2).status()
        except nbddp.PoolNotRunning as error:
            print(error)
    """


@dataclass(frozen=True)
class Frame:
    """One frame of a remote traceback. `context` holds (line number, text) around `line`; `values` holds (name, text):
    what the names of a user's frame held when it failed. left_out: how many frames after it are not told, of functions
    `of`: those of a recursion."""

    file: str
    line: int
    name: str
    user: bool
    context: tuple[tuple[int, str], ...] = ()
    values: tuple[tuple[str, str], ...] = ()
    left_out: int = 0
    of: tuple[str, ...] = ()


CELL = re.compile(r"^Cell In\[|ipykernel_\d+/\d+\.py$")  # of code on a rank, and sent from the notebook


def place(file: str, line: int, name: str) -> str:
    """`cell line 9`, `cell line 9, in train` or `model.py line 9, in forward`.

    Neither a cell's number nor a folder: a saved notebook's messages are compared, and both
    change from run to run. The traceback has them.
    """
    where = "cell" if CELL.search(file.replace("\\", "/")) else file.replace("\\", "/").rsplit("/", 1)[-1]
    return f"{where} line {line}{inside(name)}"


def inside(name: str) -> str:
    """`, in train`; empty for a program's own level, which IPython 7 and 8 call `<cell line: 3>`."""
    return "" if name == "<module>" or name.startswith("<cell line") else f", in {name}"


@dataclass(frozen=True)
class Raised:
    """One exception of a chain, outermost last; `relation` says how it follows from the one before. Of an
    ExceptionGroup `group` has a chain for each exception in it; `more` are left out, and `older` before this one."""

    type: str
    message: str
    frames: tuple[Frame, ...] = ()
    relation: str = ""
    notes: tuple[str, ...] = ()
    group: tuple[tuple[Raised, ...], ...] = ()
    more: int = 0
    older: int = 0


class RankStatus(str, Enum):
    """A rank's state before a run, during it and after it. Each member equals its text."""

    STARTING = "starting"  # its process has no connection to the pool yet
    IDLE = "idle"
    RUNNING = "running"
    BLOCKED = "blocked"  # in a call of torch's that waits for others
    SILENT = "silent"  # it does not answer
    UNKNOWN = "unknown"  # its answer was an error
    ABSENT = "absent"  # it does not take part in the run
    FINISHED = "finished"
    ENDED = "ended"  # its process too, with exit code 0
    FAILED = "failed"
    INTERRUPTED = "interrupted"  # and its variables are kept
    REPLACED = "replaced"
    DIED = "died"
    TERMINATED = "terminated"  # a script's rank, which had to end because another failed, or somebody stopped it

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class RankState:
    """How one rank ended a run, or where it was when the run was ended.

    `where` is the place in the user's code, such as `cell line 9`, or empty; `doing` is what the rank was waiting in,
    such as `waiting in all_reduce #14 for rank 1`; `lost` lists the names lost with a replaced process, `imports` those
    of them that were imported; `why` says why it was replaced; `fate` is `replaced` or what happened instead; `script`
    is true if the rank ran a script, whose processes end with it.
    """

    rank: int
    status: RankStatus
    where: str = ""
    detail: str = ""
    doing: str = ""
    lost: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    why: str = "could not be unblocked"
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
    """A run failed: base of WorkerFailed, RunStopped, RunHung and RunTimedOut.

    - `states`: one state per rank that took part. Each has `rank` (int), `status` (str, such as `failed`), `where`
      (str: the place in the user's code) and `doing` (str: the call it waited in).
    - `report` (str): the text that a notebook shows; `painted` (str): the same in colour.
    - `attempts` (tuple of str): under `max_restarts`, how each attempt ended.

    Example:

        try:
            pool.run_cell("1 / 0")
        except nbddp.RunFailed as error:
            print([state.status for state in error.states])
    """

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
    """The user stopped the run, with Stop in the notebook or with Ctrl+C.

    Example:

        try:
            pool.run_cell("import time; time.sleep(0.1)")
        except nbddp.RunStopped as error:
            print(error.report)
    """


class RunHung(RunFailed):
    """A deadlock: ranks waited for ranks that could never arrive. They have been unblocked.

    Example:

        try:
            pool.run_cell("import os; print(os.getpid())", hang_after=2.0)
        except nbddp.RunHung as error:
            print([state.doing for state in error.states])
    """


class RunTimedOut(RunFailed):
    """The run was stopped because it did not finish within `timeout` seconds.

    Example:

        try:
            pool.run_cell("import time; time.sleep(60)", timeout=0.5)
        except nbddp.RunTimedOut as error:
            print(error.states)
    """


@dataclass
class Cause:
    """What happened on the rank that failed first.

    `kind` is "raised", "exit" (SystemExit with a code), "died" (the process ended) or "left" (it raised nothing, but
    its peers were still in a collective; `left` says how). `stage` is "begin" or "end" if the worker failed before or
    after the program, not the program itself.

    Of a process that died: `lost` says why nobody saw its end; `taken`: who took its host away; `device`, `peak_kib`:
    where it ran, and the most memory it held; `last_words`: the end of its log; `overrun`: which limit
    of a sandbox ended it. `advice`: what capabilities say of it besides.
    """

    rank: int
    node: int
    kind: str
    chain: tuple[Raised, ...] = ()
    code: int | str | None = None
    log: str = ""
    left: Left | None = None
    stage: str = ""
    lost: str = ""
    taken: str = ""
    device: str = ""
    peak_kib: int = 0
    last_words: str = ""
    overrun: str = ""
    advice: str = ""


class WorkerFailed(RunFailed):
    """A rank failed: the one that failed first, or the one that left a collective and so made its peers fail.

    - `rank`, `node` (int): of that rank. `exception_type`, `exception_message` (str): empty if it raised nothing.
    - `cause`: details, with the remote traceback. `states`, `report`: as RunFailed has them.
    - `logs` (dict of int to str): rank → path of its full output.

    Example:

        try:
            pool.run_cell("import os; 1 / (1 - int(os.environ['RANK']))")
        except nbddp.WorkerFailed as error:
            assert (error.rank, error.exception_type) == (1, "ZeroDivisionError")
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


# -- numbers and sets in words --------------------------------------------------------------------------


def listed(texts: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else "".join(texts)


def counted(n: int, noun: str) -> str:
    """`1 node`, `2 nodes`, `2 processes`, `2 batches`."""
    plural = noun + ("es" if noun.endswith(("s", "ch")) else "s")
    return f"{n} {noun if n == 1 else plural}"


def spans(numbers: Iterable[int]) -> str:
    """`0, 2–3`: a set of numbers as a person writes it."""
    found: list[list[int]] = []
    for n in sorted(set(numbers)):
        if found and found[-1][1] == n - 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in found)


def several(noun: str, numbers: Iterable[int]) -> str:
    """`GPU 2`, `GPUs 0–3`, `cores 0, 2–3`."""
    distinct = set(numbers)
    return f"{noun}{'s' * (len(distinct) != 1)} {spans(distinct)}"


def rank_words(ranks: Iterable[int]) -> str:
    """`rank 2`, `ranks 0–3`, `ranks 0, 2–3`: a set of ranks as a person writes it."""
    return several("rank", ranks)


def warn_deprecated(old: str, instead: str, gone_in: str, stacklevel: int = 3) -> None:
    """Warn the program that uses `old`, a public name that works for one release more (docs/stability.md).

    instead: what to write; gone_in: the first version without `old`.

    stacklevel: as `warnings.warn` counts it from here; 3 is the caller of the function that calls this one.

    Example: `warn_deprecated("pool.group", "use pool.topology()", "0.3")`.
    """
    text = f"{old} is deprecated, and nbddp {gone_in} will not have it; {instead}"
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel)
