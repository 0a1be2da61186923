"""What went wrong in a run, in words: made here once, for the error, the log and the panel alike. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence

from nbddp.errors import Cause, Frame, Raised, RankState
from nbddp.topology import rank_words


def headline(cause: Cause) -> str:
    """`rank 2 raised ValueError: bad batch (cell line 9)`; one line, the same in every run."""
    who = f"rank {cause.rank}"
    if cause.kind == "died":
        return f"{who} {ended(cause.code)}"
    place = place_of(cause.chain[-1].frames) if cause.chain else ""
    where = f" ({place})" if place else ""
    if cause.kind == "exit":
        return f"{who} exited with code {cause.code}{where}"
    last = cause.chain[-1]
    message = f": {last.message.splitlines()[0]}" if last.message else ""
    return f"{who} raised {last.type}{message}{where}"


def ended(code: int | str | None) -> str:
    """How a process ended, by its wait status as Python gives it (negative: a signal)."""
    if isinstance(code, int) and code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = "; the kernel's out-of-memory killer is the usual cause" if name == "SIGKILL" else ""
        return f"died: killed by {name}{hint}"
    return f"died: its process ended with exit code {code}"


def place_of(frames: Sequence[Frame]) -> str:
    """The user's innermost place, as `place` words it."""
    for frame in reversed(frames):
        if frame.user:
            return place(frame.file, frame.line, frame.name)
    return ""


def place(file: str, line: int, name: str) -> str:
    """`cell line 9`, `cell line 9, in train` or `model.py line 9, in forward`.

    Neither a cell's number nor a folder: a saved notebook's messages are compared, and both
    change from run to run. The traceback has them.
    """
    where = "cell" if file.startswith("Cell In[") else file.replace("\\", "/").rsplit("/", 1)[-1]
    inside = "" if name == "<module>" else f", in {name}"
    return f"{where} line {line}{inside}"


def traceback_text(chain: Sequence[Raised]) -> str:
    """The remote traceback: user frames with their source, runs of library frames in one line each."""
    parts = []
    for raised in chain:
        if raised.relation:
            joint = {
                "direct cause": "The above exception was the direct cause of the following exception:",
                "while handling": "During handling of the above exception, another exception occurred:",
            }[raised.relation]
            parts.append(f"\n{joint}\n")
        parts += frames_text(raised.frames)
        parts.append(f"{raised.type}: {raised.message}" if raised.message else raised.type)
        parts += raised.notes
    return "\n".join(parts)


def frames_text(frames: Iterable[Frame]) -> list[str]:
    lines: list[str] = []
    folded: list[Frame] = []
    for frame in frames:
        if not frame.user:
            folded.append(frame)
            continue
        lines += _folded(folded)
        folded = []
        inside = "" if frame.name == "<module>" else f", in {frame.name}"
        lines.append(f"{frame.file}, line {frame.line}{inside}")
        for number, text in frame.context:
            arrow = "---->" if number == frame.line else "     "
            lines.append(f"{arrow} {number:>4} {text}")
    return lines + _folded(folded)


def _folded(frames: list[Frame]) -> list[str]:
    if not frames:
        return []
    last = frames[-1]
    where = last.file.replace("\\", "/").split("site-packages/")[-1].split("lib/")[-1]
    count = f"{len(frames)} frames, the last" if len(frames) > 1 else "1 frame"
    return [f"  … {count} in {where}, {last.name}"]


def states_text(states: Sequence[RankState]) -> list[str]:
    """One line per group of ranks in the same state, in rank order."""
    groups: dict[str, list[int]] = {}
    for state in states:
        groups.setdefault(state_words(state), []).append(state.rank)
    return [f"  {rank_words(ranks)}: {words}" for words, ranks in groups.items()]


def state_words(state: RankState) -> str:
    where = f" at {state.where}" if state.where else ""
    words = {
        "finished": "finished the cell",
        "failed": f"failed too{where}",
        "interrupted": f"still running{where}; interrupted, names are kept",
        "replaced": f"still running{where}; an interrupt did not free it, so it is replaced; names are gone",
        "died": "died",
        "running": f"still running{where}",
    }[state.status]
    return f"{words}: {state.detail}" if state.detail else words


def failure_text(cause: Cause, others: Sequence[RankState], *, dropped: bool, whole_log: str) -> str:
    """The report of a failed run: the cause, then a line for every other rank, then what to type."""
    lines = []
    if cause.chain:
        lines += [f"rank {cause.rank} failed first:", "", traceback_text(cause.chain), ""]
    lines.append(headline(cause))
    lines += states_text(others)
    if dropped:
        lines.append("The process group has been ended; a cell that uses one calls init_process_group again.")
    if cause.kind == "died":
        lines.append(f"Its last words are in {whole_log}; it starts anew, empty, with the next cell.")
    return "\n".join(lines)


def stopped_text(states: Sequence[RankState], *, dropped: bool) -> str:
    """The report of a run that the user stopped."""
    lines = ["stopped by the user", *states_text(states)]
    if dropped:
        lines.append("The process group has been ended; a cell that uses one calls init_process_group again.")
    return "\n".join(lines)
