"""Recorded training steps as plain data, and the cell that they come from. All times are nanoseconds of one clock.

Intervals of time: their union, what two have in common, and how much communication backward hides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

Span = tuple[int, int]
Place = tuple[int, int]  # the n of an In[n], and a line of it


@dataclass(frozen=True)
class Bucket:
    """One gradient bucket of one step on one rank.

    ready: its last gradient was there; sent: the collective was handed to the process group;
    done: its result was there, never after the step's backward. `names` are the parameters in it, `bytes` the size
    of the buffer. queued: the backend begins with it once it is through with the bucket before.
    """

    index: int
    bytes: int
    ready: int
    sent: int
    done: int
    names: tuple[str, ...] = ()
    queued: bool = False


@dataclass(frozen=True)
class Step:
    """One training step of one DDP model on one rank.

    forward: (start, end). backward: (start, end of the gradients' computation, end with all buckets done); where the
    program ends backward itself, the second is when it begins to, since what it does until then overlaps the buckets.
    optimizer: (start, end), or None if no optimizer stepped. `synced` is False inside no_sync. `rebuilt`: an
    exchange after which DDP rebuilds its buckets, the first; `rebuilds`: the step whose forward does that, for which
    the ranks wait for each other there. loader: when torch's data loaders made batches since the step before. queued:
    nanoseconds that the rank's thread has waited for a core since it began, as of the two ends of backward; None if
    unknown. inputs: elements of the tensors that forward got; None if it got none that are known. called: of phases
    that a cell's line has asked for: name, the n of its In[n], line.
    """

    number: int
    forward: Span
    backward: tuple[int, int, int]
    optimizer: Span | None = None
    buckets: tuple[Bucket, ...] = ()
    synced: bool = True
    rebuilt: bool = False
    rebuilds: bool = False
    loader: tuple[Span, ...] = ()
    queued: tuple[int, int] | None = None
    inputs: int | None = None
    called: tuple[tuple[str, int, int], ...] = ()

    @property
    def start(self) -> int:
        return self.forward[0]

    @property
    def end(self) -> int:
        return self.optimizer[1] if self.optimizer else self.backward[2]

    @property
    def duration(self) -> int:
        return self.end - self.start

    def shifted(self, offset: int) -> Step:
        """The same on a clock that is `offset` ahead."""
        a, b, c = self.backward
        return Step(
            self.number,
            (self.forward[0] + offset, self.forward[1] + offset),
            (a + offset, b + offset, c + offset),
            self.optimizer and (self.optimizer[0] + offset, self.optimizer[1] + offset),
            tuple(replace(x, ready=x.ready + offset, sent=x.sent + offset, done=x.done + offset) for x in self.buckets),
            self.synced,
            self.rebuilt,
            self.rebuilds,
            tuple((start + offset, end + offset) for start, end in self.loader),
            self.queued,
            self.inputs,
            self.called,
        )

    def line_of(self, phase: str) -> Place | None:
        """The line that asked for `forward`, `backward` or `optimizer`; None if unknown."""
        return next(((cell, line) for name, cell, line in self.called if name == phase), None)


# -- where a recording comes from: what is shown must not pass for the last cell's ---------------------


@dataclass(frozen=True)
class Origin:
    """cell: the n of the In[n] that recorded, None for a function that `Pool.call` ran. last: that of the last cell,
    which recorded nothing; None where this is not so."""

    cell: int | None
    last: int | None = None


def origin(run: int, cell: int | None, last: tuple[int, int] | None) -> Origin | None:
    """Where run number `run` of cell `cell` stands beside the last cell's (run, cell); None if it is that one."""
    if cell is None:
        return Origin(None)
    return None if last is None or last[0] == run else Origin(cell, last[1])


def whence(found: Origin | None) -> str:
    """` from In[3]`, to be put after what was recorded; nothing if it is the last cell's.

    Only a notebook numbers its cells; in a script all have the same number, which says nothing.
    """
    if found is None:
        return ""
    if found.cell is None:
        return " from a function that Pool.call ran"
    return " from an earlier cell" if found.cell == found.last else f" from In[{found.cell}]"


def none_since(found: Origin | None) -> str:
    """`the last cell, In[5], recorded none`; empty where that is not so."""
    if found is None or found.last is None:
        return ""
    named = "the last cell" if found.last == found.cell else f"the last cell, In[{found.last}],"
    return f"{named} recorded none"


def recorded_from(what: str, found: Origin | None) -> str:
    """`step 3 of Net from In[3]; the last cell, In[5], recorded none`; `what` alone if it is the last cell's."""
    since = none_since(found)
    return f"{what}{whence(found)}" + (f"; {since}" if since else "")


# -- a recording -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recording:
    """The steps of one run. `steps[rank]` in the order they were taken; `residual` is the error of the clocks'
    alignment in nanoseconds (0 on one machine, which has one clock). missing: ranks that have nothing of that
    run. origin: where the run stands, if it is not the last cell's."""

    steps: Mapping[int, Sequence[Step]]
    residual: int = 0
    model: str = ""
    names: Mapping[str, int] = field(default_factory=dict)
    missing: Sequence[int] = ()
    origin: Origin | None = None

    @property
    def ranks(self) -> list[int]:
        return sorted(self.steps)

    @cached_property
    def _by_number(self) -> dict[int, dict[int, Step]]:
        return {r: {s.number: s for s in some} for r, some in self.steps.items()}

    def numbers(self) -> list[int]:
        """Numbers of the steps that every rank has, in order."""
        found = list(self._by_number.values())
        return sorted(set(found[0]).intersection(*found[1:])) if found else []

    def step(self, number: int) -> dict[int, Step]:
        """Rank → its step of this number. Raises KeyError if a rank does not have it."""
        if not self.steps:
            raise KeyError(number)
        return {r: steps[number] for r, steps in self._by_number.items()}


@dataclass(frozen=True)
class RankRecording:
    """What a rank has noted of the last run that took steps: those of the model it used last. See `fitted`."""

    run: int = 0
    cell: int | None = None
    model: str = ""
    steps: tuple[Step, ...] = ()


def fitted(step: Step) -> Step:
    """A step as it was noted, with buckets whose times do not contradict the end of its backward."""
    return replace(step, buckets=tuple(_bucket(b, step.backward[2]) for b in step.buckets))


def _bucket(noted: Bucket, end: int) -> Bucket:
    """A bucket of a step whose backward ended at `end`, with a `done` that does not contradict that.

    DDP's reducer waits for every bucket before backward ends (on CPU in C++; on a GPU its stream does), so none is done
    later. The note of it may be. Python takes it on the backend's thread, which needs the interpreter. The main thread
    that has just left that wait holds the interpreter for some milliseconds more. A note that is missing (0) is later
    still. What is known then is that the bucket was done at `end` at the latest.
    """
    done = min(noted.done or end, end)
    # of a GPU: two streams' times, a microsecond apart
    return replace(noted, ready=min(noted.ready, done), sent=min(noted.sent, done), done=done)


# -- intervals -----------------------------------------------------------------------------------------


def union(spans: Iterable[Span]) -> list[Span]:
    """Disjoint spans in order that cover the same time; empty ones are left out."""
    found: list[Span] = []
    for start, end in sorted(s for s in spans if s[1] > s[0]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def length(spans: Iterable[Span]) -> int:
    """Time covered by the spans' union."""
    return sum(end - start for start, end in union(spans))


def common(one: Iterable[Span], other: Iterable[Span]) -> list[Span]:
    """Time that both cover, as disjoint spans in order."""
    a, b, found = union(one), union(other), []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return found


def minus(one: Iterable[Span], other: Iterable[Span]) -> list[Span]:
    """Time that the first cover and the second do not, as disjoint spans in order."""
    found: list[Span] = []
    holes, i = union(other), 0
    for start, end in union(one):
        while i < len(holes) and holes[i][1] <= start:
            i += 1
        k = i
        while k < len(holes) and holes[k][0] < end:
            if holes[k][0] > start:
                found.append((start, holes[k][0]))
            start = max(start, holes[k][1])
            k += 1
        if start < end:
            found.append((start, end))
    return found


def communication(step: Step) -> list[Span]:
    """When at least one bucket of the step was on its way."""
    return union((b.sent, b.done) for b in step.buckets)


def split(step: Step) -> tuple[int, int]:
    """Nanoseconds of communication while gradients were still being computed, and after that."""
    start, end = step.backward[:2]
    whole = behind = 0
    for sent, done in communication(step):
        whole += done - sent
        behind += max(0, min(done, end) - max(sent, start))
    return behind, whole - behind


def hidden(step: Step) -> int:
    """Nanoseconds of communication while gradients were still being computed."""
    return split(step)[0]


def exposed(step: Step) -> int:
    """Nanoseconds of communication that the step had to wait for."""
    return split(step)[1]


def hidden_share(step: Step) -> float | None:
    """Hidden communication as a share of all, 0 to 1; None if there was none."""
    behind, after = split(step)
    return behind / (behind + after) if behind + after else None


def lanes(spans: list[Span]) -> list[int]:
    """A lane for each span so that no two in a lane overlap, with as few lanes as can be; in the order given."""
    free_at: list[int] = []
    chosen = [0] * len(spans)
    for i in sorted(range(len(spans)), key=lambda k: spans[k]):
        start, end = spans[i]
        lane = next((k for k, at in enumerate(free_at) if at <= start), len(free_at))
        if lane == len(free_at):
            free_at.append(end)
        else:
            free_at[lane] = end
        chosen[i] = lane
    return chosen
