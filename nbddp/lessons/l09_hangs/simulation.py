"""Lesson 09's explorer: small programs, one per rank, played call by call, and who waits for whom.

Whether a call may end and what is a deadlock is asked of `nbddp.deadlock.proof`, which judges real ranks by the
same rules. Pure: imports only that and what it may.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nbddp.deadlock.positions import RECV, SEND, Call, Position
from nbddp.deadlock.proof import Deadlock, diagnose, waits_for
from nbddp.errors import RankStatus
from nbddp.launch.topology import rank_words
from nbddp.protocol.position import Channel

BACKWARD = "backward"  # of a DDP model with one bucket: an all_reduce that C++ calls
COLLECTIVES = ("all_reduce", "broadcast", "barrier", BACKWARD)
COMPUTE = "compute"
DONE, WAITS, RUNS, AHEAD = "done", "waits", "runs", "ahead"


@dataclass(frozen=True)
class Action:
    """One line of a rank's program. op: a name in COLLECTIVES, `send`, `recv` or COMPUTE; what: the tensor of a
    collective; reduce: SUM or MAX; peer: the other end of a send or recv; rounds: how long a COMPUTE takes."""

    op: str
    line: int
    what: str = ""
    reduce: str = ""
    peer: int | None = None
    rounds: int = 1

    @property
    def is_collective(self) -> bool:
        return self.op in COLLECTIVES

    @property
    def made_of(self) -> str:
        """The collective that the process group sees."""
        return "all_reduce" if self.op == BACKWARD else self.op

    def describe(self) -> str:
        """`all_reduce`, `send to 1`, `compute`."""
        if self.peer is not None:
            return f"{self.op} {'to' if self.op == 'send' else 'from'} {self.peer}"
        return self.op


Program = Sequence[Action]  # of one rank; each program below is a function of a rank and the number of ranks


def _reduce(line: int, what: str = "float[4]", reduce: str = "SUM") -> Action:
    return Action("all_reduce", line, what, reduce)


def _uneven(rank: int, ranks: int) -> list[Action]:
    return [Action(BACKWARD, 2, "float[4]", "SUM")] * (2 if rank == ranks - 1 else 3)


def _alone(rank: int, ranks: int) -> list[Action]:
    return [_reduce(2), _reduce(2), *([Action("broadcast", 4, "float[4]")] if rank == 0 else [])]


def _swapped(rank: int, ranks: int) -> list[Action]:
    if rank == 1:
        return [_reduce(2), Action("barrier", 4), _reduce(5)]
    return [_reduce(2), _reduce(7), Action("barrier", 8)]


def _shapes(rank: int, ranks: int) -> list[Action]:
    return [_reduce(2), _reduce(3, "float[8]" if rank == 1 else "float[4]"), _reduce(4)]


def _maximum(rank: int, ranks: int) -> list[Action]:
    return [_reduce(2), _reduce(3, reduce="MAX" if rank == ranks - 1 else "SUM"), _reduce(4)]


def _slow(rank: int, ranks: int) -> list[Action]:
    return [*([Action(COMPUTE, 1, rounds=3)] if rank == ranks - 1 else []), _reduce(2), _reduce(2)]


def _crossed(rank: int, ranks: int) -> list[Action]:
    return [Action("recv", 2, peer=(rank - 1) % ranks), Action("send", 3, peer=(rank + 1) % ranks)]


def _ordered(rank: int, ranks: int) -> list[Action]:
    send, recv = Action("send", 3, peer=(rank + 1) % ranks), Action("recv", 4, peer=(rank - 1) % ranks)
    return [send, recv] if rank == 0 else [replace(recv, line=6), replace(send, line=7)]


UNEVEN, SLOW = "one batch fewer on the last rank", "the last rank is slow"
ALONE, SHAPES = "rank 0 alone makes a call", "rank 1 has another shape"
MAXIMUM = "the last rank uses MAX instead of SUM"
CROSSED, ORDERED = "a ring, all receive first", "a ring, rank 0 sends first"
MOST_MOVES = 12  # of the explorer
PROGRAMS: dict[str, Callable[[int, int], list[Action]]] = {
    UNEVEN: _uneven,
    ALONE: _alone,
    "rank 1 makes two calls in the other order": _swapped,
    SHAPES: _shapes,
    MAXIMUM: _maximum,
    SLOW: _slow,
    CROSSED: _crossed,
    ORDERED: _ordered,
}


@dataclass(frozen=True)
class LoggedCall:
    """One call of a rank as its log has it. number: of the collective in its group, from 1; 0 for other calls;
    state: DONE, WAITS, RUNS (computes), or AHEAD, when the rank has not come to it."""

    action: Action
    number: int
    state: str

    def describe(self) -> str:
        """`all_reduce #2`."""
        return f"{self.action.describe()} #{self.number}" if self.number else self.action.describe()


@dataclass(frozen=True)
class CallHistory:
    """What every rank has called after `moves` moves. waits: rank → the ranks that it waits for; last: the move after
    which nothing changes, if it is known."""

    entries: Mapping[int, tuple[LoggedCall, ...]]
    waits: Mapping[int, tuple[int, ...]]
    deadlock: Deadlock | None
    moves: int
    last: int = 0

    @property
    def ended(self) -> list[int]:
        """Ranks that have come to the end of their program."""
        return [r for r, some in self.entries.items() if all(e.state == DONE for e in some)]

    def silent(self) -> str:
        """What went through and was wrong, in a sentence; empty if nothing was."""
        called: dict[int, dict[str, list[int]]] = {}
        for rank, some in self.entries.items():
            for e in some:
                if e.number and e.state == DONE:
                    called.setdefault(e.number, {}).setdefault(e.action.reduce, []).append(rank)
        for number, by_reduce in called.items():
            if len(by_reduce) > 1:
                each = ", ".join(f"{name} on {rank_words(ranks)}" for name, ranks in by_reduce.items())
                return f"all_reduce #{number} used {each}: no rank waits, and the numbers are wrong on every rank"
        return ""

    def verdict(self) -> str:
        """Whether it can go on, in a sentence or two."""
        if self.deadlock is not None:
            said = f"deadlock: {'; '.join(self.deadlock.words)}"
            return f"{said}\n{self.deadlock.advice}" if self.deadlock.advice else said
        if len(self.ended) == len(self.entries):
            return "every rank reaches its end"
        busy = [r for r in self.entries if r not in self.ended and r not in self.waits]
        if self.waits:
            return f"{rank_words(self.waits)} {_verb('wait', self.waits)}, but {_may_come(busy)}: no deadlock"
        return f"no rank waits for long: {_may_come(busy)}" if self.moves else "no rank has started"

    def describe(self) -> str:
        """A line per rank, and the verdict."""
        lines = [f"rank {r}: {self._line(r)}" for r in self.entries]
        return "\n".join([*lines, self.verdict(), *filter(None, [self.silent()])])

    def _line(self, rank: int) -> str:
        said = []
        for e in self.entries[rank]:
            if e.state == WAITS:
                said.append(f"{e.describe()} waits for {rank_words(self.waits[rank])}")
            elif e.state != AHEAD:
                said.append(e.describe() if e.state == DONE else f"{e.describe()} …")
        if rank in self.ended:
            said.append("end")
        return " · ".join(said) or "not started"


def _verb(word: str, ranks: Mapping[int, object]) -> str:
    return word if len(ranks) > 1 else f"{word}s"


def _may_come(busy: Sequence[int]) -> str:
    return f"{rank_words(busy)} {'are' if len(busy) > 1 else 'is'} on {'their' if len(busy) > 1 else 'its'} way"


class _Rank:
    """One rank while its program is played. `at`: its action; `inside`: whether it has entered that one."""

    def __init__(self, rank: int, program: Program):
        self.rank, self.program = rank, program
        self.at, self.inside, self.left = 0, False, 0

    def enter(self) -> None:
        """Begin the next action, if it is not in one."""
        if self.at < len(self.program) and not self.inside:
            self.inside, self.left = True, self.program[self.at].rounds

    def leave(self) -> None:
        self.at, self.inside = self.at + 1, False

    def number(self, i: int) -> int:
        """Which collective of its group action `i` is; 0 for one that is none."""
        return sum(a.is_collective for a in self.program[: i + 1]) if self.program[i].is_collective else 0

    def position(self) -> Position:
        """Where it is, as the agent's looks at a real rank would have it."""
        past = {
            ("0", self.number(i)): (a.made_of, a.what) for i, a in enumerate(self.program[: self.at]) if a.is_collective
        }
        known: dict[str, Any] = {"past": past, "channels": Counter(self._made())}
        if self.at == len(self.program):
            return Position(self.rank, RankStatus.FINISHED, **known)
        action = self.program[self.at]
        where, call = f"line {action.line}", self._call(action)
        if not self.inside or call is None:
            return Position(self.rank, RankStatus.RUNNING, where, action.line, **known)
        return Position(self.rank, RankStatus.BLOCKED, where, action.line, call, **known)

    def _made(self) -> list[Channel]:
        """The channel of each send and receive so far, the present one among them."""
        called = self.program[: self.at + self.inside]
        return [self._channel(a.op, a.peer) for a in called if a.peer is not None]

    def _channel(self, op: str, peer: int) -> Channel:
        return (SEND, "0", self.rank, peer, 0) if op == "send" else (RECV, "0", peer, self.rank, 0)

    def _call(self, action: Action) -> Call | None:
        if action.is_collective:
            number = self.number(self.at)
            kind = "backward" if action.op == BACKWARD else "collective"
            return Call(action.op, kind, "0", (), number, made_of=action.made_of, what=action.what)
        if action.peer is None:
            return None
        channel = self._channel(action.op, action.peer)
        return Call(action.op, action.op, peer=action.peer, channel=channel, nth=self._made().count(channel))

    def entries(self) -> tuple[LoggedCall, ...]:
        inside = RUNS if self.at < len(self.program) and self.program[self.at].op == COMPUTE else WAITS
        states = [DONE if i < self.at else inside if i == self.at and self.inside else AHEAD
                  for i in range(len(self.program))]  # fmt: skip
        return tuple(
            LoggedCall(a, self.number(i), s) for i, (a, s) in enumerate(zip(self.program, states, strict=True))
        )


def play(programs: Sequence[Program], moves: int) -> CallHistory:
    """Play the programs for so many moves. In a move every rank that is in no call enters its next one; then all
    calls end that nobody has to be waited for."""
    ranks = [_Rank(r, p) for r, p in enumerate(programs)]
    for _ in range(moves):
        _move(ranks)
    positions = {r.rank: r.position() for r in ranks}
    waits = {r: waits_for(p, positions)[0] for r, p in positions.items() if p.state == RankStatus.BLOCKED}
    return CallHistory({r.rank: r.entries() for r in ranks}, waits, diagnose(positions), moves)


def _move(ranks: Sequence[_Rank]) -> None:
    for r in ranks:
        r.enter()
    positions = {r.rank: r.position() for r in ranks}
    for r in ranks:
        if not r.inside:
            continue
        if positions[r.rank].state == RankStatus.BLOCKED:
            if not waits_for(positions[r.rank], positions)[0]:
                r.leave()
        else:
            r.left -= 1
            if r.left == 0:
                r.leave()


def log(program: str, ranks: int, moves: int) -> CallHistory:
    """A program of PROGRAMS on so many ranks after so many moves."""
    programs = [PROGRAMS[program](r, ranks) for r in range(ranks)]
    said = [play(programs, n).describe() for n in range(MOST_MOVES + 1)]
    last = max((n for n in range(1, len(said)) if said[n] != said[n - 1]), default=0)
    return replace(play(programs, moves), last=last)
