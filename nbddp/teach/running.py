"""Running a learner's function on ranks, so that it cannot hang the notebook, and wording what stopped it.

The pool is the notebook's own, with all names on its ranks; where there is none yet, two workers are started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nbddp.errors import BadInput, Cause, RunHung, RunStopped, RunTimedOut, WorkerFailed
from nbddp.options import LaunchSpec
from nbddp.pool.pool import Pool
from nbddp.run.report import ended
from nbddp.run.screen import Screen
from nbddp.teach.answer import Wrong
from nbddp.values import RankValues

DEADLINE = 20.0  # seconds a check's run may take
HANG_AFTER = 1.0  # seconds a deadlock stands before it is told
WORKERS = LaunchSpec(nproc=2, device="cpu")  # where no pool stands; two ranks communicate, and a CPU is everywhere

_given: list[Pool] = []
_own: list[Pool] = []


@contextmanager
def on(pool: Pool) -> Iterator[Pool]:
    """Checks run on `pool` inside this block: for tests, and to grade outside a notebook."""
    _given.append(pool)
    try:
        yield pool
    finally:
        _given.pop()


def pool(at_least: int = 1) -> Pool:
    """The pool on which checks run now, started. Raises Wrong if it has fewer than `at_least` ranks."""
    found = _given[-1] if _given else _standing()
    if not found.running:
        found.ensure(WORKERS if at_least <= 2 else LaunchSpec(nproc=at_least, device="cpu"))
    if found.world_size < at_least:
        raise Wrong(
            f"this check needs {at_least} ranks and the pool has {found.world_size}; "
            f"%ddp start --nproc {at_least} makes them"
        )
    return found


def _standing() -> Pool:
    from nbddp.magics import standing_pool

    found = standing_pool()
    if found is not None:
        return found
    if not _own:
        _own.append(Pool())
    return _own[0]


def on_ranks(
    function: Callable[..., Any],
    *args: Any,
    ranks: Sequence[int] | None = None,
    at_least: int = 1,
    deadline: float | None = None,
    hang_after: float | None = HANG_AFTER,
    screen: Screen | None = None,
) -> RankValues:
    """`function(*args)` on every rank (or `ranks`) of the pool; the values.

    What the function prints is shown. Raises Wrong with the learner's line if it raises, hangs, takes longer than
    `deadline` seconds (DEADLINE), ends its process, or cannot be sent. hang_after: as `Pool.call` has it.
    """
    limit = DEADLINE if deadline is None else deadline
    workers = pool(at_least)
    try:
        found = workers.call(function, args, ranks=ranks, screen=screen, hang_after=hang_after, timeout=limit)
    except WorkerFailed as failed:
        raise Wrong(failure_words(failed.cause)) from failed
    except RunHung as hung:
        raise Wrong(str(hung)) from hung
    except RunTimedOut as late:
        raise Wrong(f"no answer after {limit:g} s: a loop that does not end, or a wait that is never over?") from late
    except RunStopped as stopped:
        raise Wrong("stopped before there was an answer") from stopped
    except BadInput as unsent:
        raise Wrong(str(unsent)) from unsent
    left = sorted(set(range(workers.world_size) if ranks is None else ranks) - set(found.ranks))
    if left:
        raise Wrong(f"rank {left[0]} left by sys.exit() and brought no answer; return it instead")
    return found


def failure_words(cause: Cause) -> str:
    """`rank 1 raised ValueError: text (line 3, in average)`: the innermost place in the learner's own code."""
    if cause.kind == "died":
        return f"rank {cause.rank} {ended(cause.code)}"
    if cause.kind == "exit":
        return f"rank {cause.rank} left by sys.exit({cause.code!r}) and brought no answer; return it instead"
    last = cause.chain[-1]
    place = next((f" (line {f.line}, in {f.name})" for f in reversed(last.frames) if f.user), "")
    message = last.message.splitlines()[0] if last.message else ""
    return f"rank {cause.rank} raised {last.type}{': ' * bool(message)}{message}{place}"
