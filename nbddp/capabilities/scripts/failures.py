"""The ranks that failed in a run as torchrun has them: exit code, error file, and its summary (torch/distributed/
elastic/multiprocessing/errors). Pure.

A rank that nbddp ended because another had failed is none of them.
"""

from __future__ import annotations

import datetime
import functools
import signal
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nbddp.execution import report
from nbddp.figures.table import Table
from nbddp.protocol import outcome
from nbddp.protocol.outcome import RankExit

NOT_AVAILABLE = "<N/A>"
ADVICE = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
WIDEST = 60


@dataclass(frozen=True)
class Failure:
    """exitcode: negative for a signal. error_file: its path, or `<N/A>`; `message` is its content's, or says how the
    process ended. timestamp: seconds since 1970; at_ns: the same more exactly. exception: such as `ValueError: bad
    batch`; empty if none was raised.
    """

    rank: int
    local_rank: int
    host: str
    pid: int
    exitcode: int
    error_file: str
    message: str | dict[str, Any]
    timestamp: int
    exception: str = ""
    at_ns: int = 0

    @property
    def signal_name(self) -> str:
        try:
            return signal.Signals(-self.exitcode).name if self.exitcode < 0 else ""
        except ValueError:
            return NOT_AVAILABLE

    @property
    def words(self) -> str:
        """How it ended, in one line."""
        ended = f"killed by {self.signal_name}" if self.signal_name else f"exited with {self.exitcode}"
        raised = "" if self.exception.startswith("SystemExit") else self.exception
        first, *more = (raised or ended).split("\n", 1)
        return f"{first} …" if more else first

    def as_dict(self) -> dict[str, object]:
        found = {**asdict(self), "signal": self.signal_name}
        del found["at_ns"]
        return found


class Failures(dict[int, dict[str, object]]):
    """What `%ddp errors` gives: rank → its failure as a dict. A cell that ends with it shows a table. name: of what
    ran."""

    def __init__(self, name: str, failures: Mapping[int, Failure]) -> None:
        super().__init__({rank: failure.as_dict() for rank, failure in failures.items()})
        self._name = name
        columns = ("rank", "host", "pid", "error", "exit code", "error file")
        rows = [(f.rank, f.host, f.pid, f.words, f.exitcode, f.error_file) for f in failures.values()]
        self._table = Table(columns, rows, f"ranks that failed in {name}", {"error file": _path})

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self._table) if self else f"no rank failed in {self._name}")

    def _repr_html_(self) -> str | None:
        return self._table._repr_html_() if self else None


def _path(file: str) -> str:
    return "none" if file == NOT_AVAILABLE else file


@dataclass(frozen=True)
class Seat:
    """Where a rank was: what `Failure` says of it."""

    local_rank: int
    host: str
    pid: int


def found_in(
    ended: Mapping[int, RankExit], seats: Mapping[int, Seat], files: Mapping[int, tuple[str, dict[str, Any]]]
) -> dict[int, Failure]:
    """Rank → its failure. files: rank → the path of its error file and its content, where it has written one."""
    bad = [e for _, e in sorted(ended.items()) if e.status in (outcome.FAILED, outcome.DIED)]
    return {e.rank: _failure(e, seats[e.rank], *files.get(e.rank, ("", {}))) for e in bad}


def _failure(ended: RankExit, seat: Seat, path: str, content: dict[str, Any]) -> Failure:
    code, at_ns = exitcode(ended), ended.ended_ns or (ended.process and ended.process.seen_ns) or 0
    at = at_ns // 10**9
    message, last = content.get("message"), ended.chain[-1] if ended.chain else None
    if isinstance(message, dict):
        at = int((message.get("extraInfo") or {}).get("timestamp", at))
    elif message is not None:
        at = int(content.get("timestamp", at))
    said = message or _ended_words(code, seat.pid)
    raised = "\n".join([f"{last.type}: {last.message}".removesuffix(": "), *report.group_text(last)]) if last else ""
    file = path if content else NOT_AVAILABLE
    return Failure(ended.rank, seat.local_rank, seat.host, seat.pid, code, file, said, at, raised, at_ns)


def exitcode(ended: RankExit) -> int:
    """With which a process under torchrun would have ended."""
    if ended.status == outcome.DIED:
        return ended.code if isinstance(ended.code, int) else 1
    if ended.exit_code is not None:
        return ended.exit_code
    return -signal.SIGINT if ended.said_interrupt else 1


def _ended_words(code: int, pid: int) -> str:
    if code >= 0:
        return ADVICE
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = NOT_AVAILABLE
    return f"Signal {-code} ({name}) received by PID {pid}"


def summary(name: str, failures: Mapping[int, Failure]) -> str:
    """torchrun's ChildFailedError. name: of the script. failures: as `found_in` gives them, one at least."""
    root = min(failures.values(), key=lambda f: (f.timestamp, f.at_ns))
    blocks = {f.rank: _block(i, f) for i, f in enumerate(failures.values())}
    title = f"{name} FAILED"
    width = min(WIDEST, max(len(line) for text in (title, *blocks.values()) for line in text.split("\n")))
    others = "\n".join(text for rank, text in blocks.items() if rank != root.rank) or "  <NO_OTHER_FAILURES>"
    edge, line = "=" * width, "-" * width
    return "\n".join(
        [edge, title, line, "Failures:", others, line, "Root Cause (first observed failure):", blocks[root.rank], edge]
    )


def _block(index: int, failure: Failure) -> str:
    said = failure.message
    if isinstance(said, dict):
        said = str((said.get("extraInfo") or {}).get("py_callstack", said.get("message", NOT_AVAILABLE)))
        said = said.replace("\n", "\n  ")
    name = f" ({failure.signal_name})" if failure.signal_name not in ("", NOT_AVAILABLE) else ""
    time = datetime.datetime.fromtimestamp(failure.timestamp).isoformat(sep="_")
    return "\n".join(
        [
            f"[{index}]:",
            f"  time      : {time}",
            f"  host      : {failure.host}",
            f"  rank      : {failure.rank} (local_rank: {failure.local_rank})",
            f"  exitcode  : {failure.exitcode} (pid: {failure.pid}) {name}",
            f"  error_file: {failure.error_file}",
            f"  traceback : {said}",
        ]
    )


@functools.cache
def host_name(name: str, here: bool) -> str:
    """A rank's host as torchrun names it. The first time the name service may be asked."""
    return socket.getfqdn() if here else name
