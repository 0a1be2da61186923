"""What stopped an exercise on several ranks, worded so that the line is the same in every run.

Where all ranks fail alike, which of them is the first in time is by chance, and gloo's own messages hold addresses:
neither is told.
"""

from __future__ import annotations

from nbddp.errors import Cause, WorkerFailed
from nbddp.teach.answer import Wrong


def stopped_words(wrong: Wrong) -> str:
    """The line for a Wrong that `on_ranks` has raised."""
    cause = wrong.__cause__
    return failed_words(cause.cause) if isinstance(cause, WorkerFailed) else str(wrong)


def failed_words(cause: Cause) -> str:
    """`a rank raised IndexError: list index out of range (line 3, in ring_all_reduce)`."""
    if cause.kind == "exit":
        return "a rank left by sys.exit() and brought no answer; return instead"
    if cause.kind != "raised" or not cause.chain:
        return "a rank's process ended, as it does when a tensor arrives that is larger than its buffer"
    last = cause.chain[-1]
    if "gloo" in last.message:
        return "the connection between two ranks broke, as it does when tensors of different sizes meet"
    message = last.message.splitlines()[0] if last.message else ""
    place = next((f" (line {f.line}, in {f.name})" for f in reversed(last.frames) if f.user), "")
    return f"a rank raised {last.type}{': ' * bool(message)}{message}{place}"
