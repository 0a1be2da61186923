"""How a program left its cell on this rank: the worker's half of the table in `protocol.outcome`.

It holds observations, without a verdict: that the program ended, raised, was interrupted or exited with
a code; the call of torch's that the exception came out of; and where the program had ended a process group, which its
peers may have been using.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nbddp.compat.clock import clock
from nbddp.deadlock.on_rank import position
from nbddp.errors import Raised
from nbddp.protocol.outcome import EXIT, INTERRUPT, RAISED, GroupExit, Outcome
from nbddp.protocol.position import CalledFrom
from nbddp.worker import failure

LONGEST = 1 << 20  # characters of an error file that travel


@dataclass(frozen=True)
class Way:
    """How a program left, as `Outcome` has it; for SystemExit with the process's exit code and what it says."""

    left: str
    exit_code: int | None = None
    exit_text: str | None = None


def how(error: BaseException) -> Way:
    """How a program that ended by `error` left."""
    kind = type(error)  # not isinstance, which asks the object, whose class is the program's own code
    if issubclass(kind, SystemExit):
        return exit_of(vars(SystemExit)["code"].__get__(error))
    return Way(INTERRUPT if issubclass(kind, KeyboardInterrupt | asyncio.CancelledError) else RAISED)


def call_of(
    error: BaseException, names: dict[str, str], since_ns: int, known: position.KnownEntries | None = None
) -> CalledFrom | None:
    """The call of torch's that `error` came out of (`calls.came_from`), or one before it in its chain. Python raises an
    interrupt at its next check, which may be outside the interrupted call."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and not any(current is e for e in seen):
        found = position.came_from(failure.traceback_of(current), names, since_ns, known)
        if found is not None:
            return found
        seen.append(current)
        current, _ = failure.before(current)
    return None


def error_file() -> str:
    """What `@record` has written, or another error handler; empty if nothing."""
    try:
        with open(os.environ.get("TORCHELASTIC_ERROR_FILE", ""), encoding="utf-8", errors="replace") as file:
            return file.read(LONGEST)
    except OSError:
        return ""


def exit_of(code: object) -> Way:
    """What Python makes of `sys.exit(code)`: a process's exit code has eight bits, and anything but a number is
    written to stderr and gives 1."""
    if code is None:
        return Way(EXIT, 0)
    if isinstance(code, int):
        return Way(EXIT, int(code) & 0xFF if -(2**63) <= code < 2**63 else 0xFF)
    return Way(EXIT, 1, failure.readable(code))


def unworded(said: Outcome, error: BaseException | None, why: BaseException) -> Outcome:
    """What is left of an outcome that could not be made or sent because of `why`: that the rank failed, and by what."""
    reason = f"(the report of this rank is incomplete because of {failure.type_name(why)}: {failure.message(why)})"
    message = reason if error is None else f"{failure.message(error)}\n{reason}"
    chain = (Raised(failure.type_name(why if error is None else error), message),)
    return Outcome(said.run, RAISED, said.stage, said.ended_ns, chain=chain, unsaved=said.unsaved)


class GroupExits:
    """Where this rank has ended process groups in the current run.

    names: gives the file of each cell → `Cell In[n]`. dropping: whether nbddp itself ends a group at the moment, one
    of an earlier run. inits: how many inits of the run have begun.
    """

    def __init__(
        self,
        names: Callable[[], dict[str, str]],
        dropping: Callable[[], bool] = lambda: False,
        inits: Callable[[], int] = lambda: 0,
    ) -> None:
        self._names, self._dropping, self._inits = names, dropping, inits
        self.seen: list[GroupExit] = []  # a run begins with none

    def install(self) -> None:
        """Note every `destroy_process_group`; once, when the worker starts."""
        import torch.distributed as dist

        if not dist.is_available():
            return
        original = dist.destroy_process_group

        @functools.wraps(original)
        def destroy_process_group(group: Any = None, *args: Any, **kwargs: Any) -> Any:
            if dist.is_initialized() and not self._dropping():
                name = "" if group is None or group is dist.group.WORLD else getattr(group, "group_name", "")
                place = position.user_place(sys._getframe(), self._names())
                self.seen.append(GroupExit(name, place, clock.time_ns(), self._inits()))
            return original(group, *args, **kwargs)

        dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = destroy_process_group
