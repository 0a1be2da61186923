"""Intervals of time: their union, what two have in common, and how much communication backward hides."""

from __future__ import annotations

from collections.abc import Iterable

from nbddp.analysis.steps import Span, Step


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
