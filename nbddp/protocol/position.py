"""The position of a rank as its worker reports it: the answers to the questions `where` and `stack`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

Place = tuple[str, int, str]  # file, line, function
StackRow = tuple[str, int, str, bool]  # a place, and whether it is in the user's code
Channel = tuple[str, str, int, int, int]  # "s" or "r" (a send or a receive), group, source, destination, tag
PastCall = tuple[int, str, str, int | None]  # a collective's number in its group, operation, tensors, root


@dataclass(frozen=True)
class CalledFrom:
    """The call of torch's that an exception came out of; group, sequence: of a collective, if they are known."""

    op: str
    kind: str
    peer: int | None = None
    group: str = ""
    sequence: int = 0


@dataclass(frozen=True)
class BlockingCall:
    """The call of torch's that a thread is in; ranks are global.

    note: which store it waits for; missing: ranks of its `world` that no pool has. made: of a new group a name for all
    subgroups, its number, its ranks. A send or receive is the `nth` on its `channel` in a group of `members`.
    """

    op: str
    kind: str
    peer: int | None = None
    note: str = ""
    world: int = 0
    missing: tuple[int, ...] = ()
    made: tuple[str, int, tuple[int, ...]] | None = None
    channel: Channel | None = None
    nth: int = 0
    members: tuple[int, ...] = ()


@dataclass(frozen=True)
class PendingCollective:
    """The collective that is waited for; of a send or receive only its group. default, named: whether the group is the
    default one, and what its program calls it. nth, made_at: which of the groups of these ranks and this name it is, in
    the order in which they were made, and where; 0 if it is the only one. seen: that it is not done is evident. epoch:
    the run and the number of the init that its group is of."""

    group: str
    ranks: tuple[int, ...]
    sequence: int
    op: str
    what: str = ""
    backend: str = ""
    root: int | None = None
    default: bool = True
    named: str = ""
    seen: bool = False
    epoch: tuple[int, int] = (0, 0)
    nth: int = 0
    made_at: Place | None = None


@dataclass(frozen=True)
class CallHistory:
    """What a rank is known to have called. history: group → its collectives; latest: group → the number of its last;
    blind: groups of which the recorder has missed some; records: whether it was seen to record anything; channels: how
    many calls each has had."""

    history: dict[str, tuple[PastCall, ...]] = field(default_factory=dict)
    latest: dict[str, int] = field(default_factory=dict)
    blind: tuple[str, ...] = ()
    records: bool = False
    channels: tuple[tuple[Channel, int], ...] = ()


@dataclass(frozen=True)
class Whereabouts:
    """The answer to `where` or `stack`.

    idle: its main thread has ended its run; begun: and that was the run which is asked for. user: the user's line.
    exact: it is known which collective `pending` is. waits: in what, as `threads.waits` has it; cpu: the process's, in
    seconds; bytes: that it has moved, None if not known. children: how many, and their CPU time in ticks; child_waits:
    what they wait for, and what would help. also: name, call and place of other threads in calls that block.
    token: differs once anything has moved. thread: it is another than the main thread. acts: what else may call.
    past: where it was asked for, as `names` (assigned by cells), `imports` and `stack`, outermost first.
    interrupted: the program has had an interrupt; over: it has ended. stopped: it waits in its debugger.
    why: what kept it from saying more; failed: from saying anything (not sent).
    """

    idle: bool = False
    begun: bool = True
    user: Place | None = None
    call: BlockingCall | None = None
    pending: PendingCollective | None = None
    exact: bool = False
    waits: str = ""
    cpu: float = 0.0
    bytes: int | None = None
    children: tuple[int, int] = (0, 0)
    child_waits: tuple[tuple[str, str], ...] = ()
    also: tuple[tuple[str, str, Place | None], ...] = ()
    token: tuple[int, ...] = ()
    thread: bool = False
    acts: tuple[str, ...] = ()
    inits: int = 0
    groups: int = 0
    past: CallHistory | None = None
    names: tuple[str, ...] | None = None
    imports: tuple[str, ...] | None = None
    stack: tuple[StackRow, ...] = ()
    interrupted: bool = False
    over: bool = False
    stopped: bool = False
    why: str = ""
    failed: str = ""


# -- which frames of a long stack are shown: a recursion has hundreds of the same ---------------------

SAME = 2  # frames of one place that are shown, and the last one
OUTER, INNER = 100, 100  # frames in all


def kept_frames(places: Sequence[Hashable]) -> list[tuple[int, int]]:
    """(index, index after the last one that is left out behind it) of the frames at these places. Of a repeated place
    they are the first ones and the last one; of very many frames the two ends."""
    at: dict[Hashable, list[int]] = {}
    for i, place in enumerate(places):
        at.setdefault(place, []).append(i)
    kept = sorted({i for found in at.values() for i in (*found[:SAME], found[-1])})
    if len(kept) > OUTER + INNER:
        kept = [*kept[:OUTER], *kept[-INNER:]]
    return list(zip(kept, [*kept[1:], len(places)], strict=False))
