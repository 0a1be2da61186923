"""The positions of a run's ranks: sampled occasionally; evidence from their answers is kept.

The answers feed the live status, the search for deadlocks, and the report if the run has to be ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from nbddp.deadlock import proof
from nbddp.deadlock.positions import Position, position_of
from nbddp.errors import RankStatus
from nbddp.launch.topology import rank_words
from nbddp.protocol import outcome
from nbddp.protocol.outcome import RankExit
from nbddp.protocol.position import Whereabouts
from nbddp.protocol.run_spec import Question, Reply

# what is said of a rank that has left while others are still at work
GONE_AS = {RankStatus.ENDED: RankStatus.FINISHED, RankStatus.FAILED: RankStatus.FAILED}
ANSWERS = (RankStatus.FINISHED, RankStatus.FAILED)  # what ranks may be that have left and can still be asked
FIRST = 0.15  # seconds until the first question where the ranks are
EARLIEST = 0.025  # the least of that, where a deadlock may stand for a moment only
LOOK_EVERY = 0.5  # seconds between two questions
ENDING_EVERY = 0.25  # the same, once the run is being ended
AGAIN = 0.05  # seconds until the second look after a failure
QUIET_AFTER = 5.0  # seconds without a byte after which the live view reports it
LATE = 2.0  # seconds for which a rank that does not answer is taken to be where it was
FRESH = 0.2  # seconds for which an answer is recent enough for a report
ANSWER_TIME = 0.3  # seconds a rank has to say where it is; one that holds the interpreter in native code cannot
START_EACH = 0.0012  # seconds that each rank takes to begin, where they are many more than the cores
REPORT_TIME = 0.6  # seconds it has where its answer is in the report: on a busy machine it may only be late
ANSWER_EACH = 0.005  # seconds more for each rank that is asked: they may be many more than the cores


TWO_THREADS = (
    "two threads of a rank need a group each for their collectives, as in "
    "async_save(..., process_group=dist.new_group())"
)


class RankQuestions(Protocol):
    """Who passes questions on to ranks at work."""

    def look(self, ranks: Sequence[int], question: Question, hear: Callable[[int, Reply], None]) -> None: ...
    def repeat(self, ranks: Sequence[int], run: int) -> None: ...


class RankWatcher:
    """Looks at the ranks of one run. Answers come in other threads; `came` puts each where the run's own thread finds
    it and gives it to `answered`.

    ended: the run's own table of ranks that have left it. `positions`: rank → where it is; `facts`: what it said last.
    `deadlock`: the one that stands, since `hung_since` (time.monotonic()); `proven`: that it has ended the run, so that
    no later look takes it back. program: what the ranks run, in words. began: when the run did (time.monotonic()).
    """

    def __init__(
        self,
        workers: RankQuestions,
        ranks: Sequence[int],
        ended: Mapping[int, RankExit],
        came: Callable[[int, tuple[int, Reply]], None],
        *,
        run: int,
        world_size: int,
        hang_after: float | None,
        program: str = "cell",
        began: float = 0.0,
    ):
        self._workers, self._ranks, self._ended, self._came = workers, tuple(ranks), ended, came
        self._run, self._world_size, self._hang_after, self._program = run, world_size, hang_after, program
        self.positions: dict[int, Position] = {}
        self.facts: dict[int, Whereabouts] = {}
        self.deadlock: proof.Deadlock | None = None
        self.hung_since: float | None = None
        self.proven = self._ending = False
        self._round = PollRound()
        self._quiet = StallTimer()
        self._held: set[int] = set()
        self._words: tuple[tuple[int, ...], str] = (), ""  # of the running ranks, until one moves
        self._owing: set[int] = set()  # ranks that have not answered the last question to them
        self._idle: set[int] = set()
        self._next = began + min(FIRST, self._every() / 2)
        self._under_way = began + START_EACH * len(self._ranks)
        self._assessed_at = self._looked_at = 0.0

    @property
    def looked_at(self) -> float:
        """When the ranks were asked for what is in `positions` (time.monotonic())."""
        return self._looked_at

    @property
    def running(self) -> tuple[int, ...]:
        return tuple(r for r in self._ranks if r not in self._ended)

    @property
    def all_hung(self) -> bool:
        """Whether every rank that is still at work is part of the deadlock."""
        return self.deadlock is not None and set(self.deadlock.ranks) >= set(self.running)

    @property
    def all_held(self) -> bool:
        """Whether every rank that is still at work waits for ranks that have left, one of which has failed."""
        return bool(self._held) and self._held >= set(self.running)

    def is_held(self, rank: int) -> bool:
        """Whether it is known that what this rank waits for cannot come."""
        return rank in self._held or (self.deadlock is not None and rank in self.deadlock.ranks)

    def is_blocked(self, rank: int) -> bool:
        """Whether a rank waited in a call of torch's when it was seen last."""
        return rank in self.positions and self.positions[rank].state == RankStatus.BLOCKED

    def calls_torch(self, rank: int) -> bool:
        """Whether it was in a call of torch.distributed's, also in one whose end is not the ranks' own affair."""
        return self.is_blocked(rank) or (rank in self.facts and self.facts[rank].call is not None)

    # -- looking ------------------------------------------------------------------------------

    def soon(self) -> None:
        """A rank has failed: are the others waiting for it? Those that have not come so far would be asked twice."""
        self._next = self._under_way

    def lost_request(self, rank: int) -> bool:
        """Whether it was idle, and had not begun the run: an interrupt may have hit the message."""
        return rank in self.facts and self.facts[rank].idle and not self.facts[rank].begun

    def ends(self, now: float) -> None:
        """The run is being ended: most ranks have left it before the next look."""
        self._ending, self._next = True, now + ENDING_EVERY

    def _every(self) -> float:
        if self._ending:
            return ENDING_EVERY
        return LOOK_EVERY if self._hang_after is None else min(LOOK_EVERY, max(2 * EARLIEST, self._hang_after / 3))

    def look_if_due(self) -> float:
        """Ask the ranks where they are if it is time; seconds until something about that is due."""
        now = time.monotonic()
        if self._round.open:
            if now < self._round.until:
                return self._round.until - now
            self.assess()  # without those that do not answer
        if now >= self._next:
            return self.look() - now
        return self._next - now

    def look(self, names: bool = False) -> float:
        """Ask every living rank where it is, and with `names` for all that a report needs; until when to wait for the
        answers (time.monotonic())."""
        asked = [r for r in self._ranks if r not in self._ended or self._ended[r].status in ANSWERS]
        if not names:
            asked = [r for r in asked if r not in self._held] or asked  # what was seen of these lasts
        blocked = any(p.state == RankStatus.BLOCKED for p in self.positions.values())
        suspect = names or blocked or self._has_failed()
        deep = names or self.deadlock is not None or self._has_failed()  # the run may be ended any moment
        number, now = self._round.number + 1, time.monotonic()
        until = now + (REPORT_TIME if names else ANSWER_TIME) + ANSWER_EACH * len(asked)
        self._round = PollRound(number, set(asked), {}, until, now, self._round.at, deep, tuple(asked))
        self._next = now + self._every()
        question = Question.of("stack" if deep else "where", run=self._run, history=suspect, names=deep)
        now_asked = asked if names else [r for r in asked if r not in self._owing]  # a rank that is slow gets no queue
        self._owing |= set(now_asked)
        self._workers.look(now_asked, question, lambda rank, reply: self._came(rank, (number, reply)))
        return self._round.until

    def look_for_report(self) -> float:
        """As `look` with `names`; but what has just been asked, or is constant in a deadlock, is not asked again."""
        if self._round.names:
            if self._round.open:
                return self._round.until
            stays = self.all_hung or self.all_held
            if self._round.whole and time.monotonic() - self._round.at < (LOOK_EVERY * 2 if stays else FRESH):
                return 0.0
        return self.look(names=True)

    def _has_failed(self) -> bool:
        return any(e.status != outcome.FINISHED for e in self._ended.values())

    @property
    def waits_for_answers(self) -> bool:
        return self._round.open

    def answered(self, rank: int, number: int, facts: Whereabouts | None) -> None:
        """A rank's answer to question `number`."""
        self._owing.discard(rank)
        if number == self._round.number and self._round.open:
            self._round.answers[rank] = facts
            if set(self._round.answers) >= self._round.asked:
                self.assess()

    # -- what is evident ------------------------------------------------------------------------

    def assess(self) -> None:
        """All that can answer have: where is everybody, and is it a deadlock?"""
        this, stood_since = self._round, self._assessed_at or time.monotonic()
        this.whole, this.asked = set(this.answers) >= this.asked, set()
        self._assessed_at, self._looked_at = time.monotonic(), this.at
        elapsed = this.at - this.before if this.before else float("inf")
        for rank in self._ranks:
            if rank in this.ranks or rank in self._ended:
                self._place(rank, this.answers.get(rank), elapsed)
        self._have_repeated({r for r in self.running if (said := this.answers.get(r)) is not None and said.idle})
        for rank in range(self._world_size):
            self.positions.setdefault(rank, Position(rank, RankStatus.ABSENT))
        self._quiet.note(self.positions, self.running, time.monotonic())
        self._words = (), ""
        left = [r for r in self._ended if _has_left(this.answers.get(r))]
        self._held = proof.held(self.positions, left) if self._has_failed() else set()
        if self.all_held and self.deadlock is None:
            return  # the run is ended now, for the failure
        found = proof.diagnose(self.positions, self._program)
        if self.proven and found is None:
            return  # a rank was only too busy to say once more where it is
        if found is None and self._has_failed() and not self._ending:
            self._next = min(self._next, time.monotonic() + AGAIN)  # are the others stuck? two looks tell
        if found != self.deadlock:
            self.hung_since = stood_since if found is not None else None  # seen in two rounds, it stood at the first
        self.deadlock = found

    def _place(self, rank: int, facts: Whereabouts | None, elapsed: float) -> None:
        before, ended = self.positions.get(rank), self._ended.get(rank)
        if ended is not None and ended.status != outcome.FINISHED:
            gone = GONE_AS.get(ended.status, RankStatus.DIED)
            last = position_of(rank, facts, before, elapsed) if _has_left(facts) else before
            self.positions[rank] = replace(last or Position(rank, gone), state=gone, call=None)
            return
        if facts is not None:
            known = self.facts.get(rank)
            if facts.names is None and known is not None:
                self.facts[rank] = replace(facts, names=known.names, imports=known.imports)
            else:
                self.facts[rank] = facts
        if facts is None and self.deadlock is not None and rank in self.deadlock.ranks:
            pass  # it is slow to answer: a deadlock that was proven stands until a rank says that it has moved on
        else:
            self.positions[rank] = position_of(rank, facts, before, elapsed)

    def _have_repeated(self, idle: set[int]) -> None:
        """A rank that is idle at two looks, and whose outcome has not come, has said it in vain."""
        self._idle, twice = idle, idle & self._idle
        if twice:
            self._workers.repeat(sorted(twice), self._run)

    # -- in words -----------------------------------------------------------------------------

    def status(self) -> str:
        """`running: rank 2 (cell line 5); ranks 0–1 (cell line 9, waiting in all_reduce #3 for rank 2)`."""
        running = self.running
        if self._words[0] != running:
            self._words = running, self._where_words(running)
        return "; ".join([self._words[1], *self._quiet_words()])

    def _where_words(self, running: Sequence[int]) -> str:
        at: dict[str, list[int]] = {}
        for r in running:
            p = self.positions.get(r)
            words = [] if p is None else [p.where, proof.waiting_words(p, self.positions), *self._also(p)]
            at.setdefault(", ".join(w for w in words if w), []).append(r)
        parts = [f"{rank_words(ranks)} ({where})" if where else rank_words(ranks) for where, ranks in at.items()]
        return "running: " + "; ".join(parts)

    def place_words(self, rank: int) -> str:
        """`cell line 5, its 1 child process does nothing`; empty if it is not known."""
        p = self.positions.get(rank)
        return "" if p is None else ", ".join(filter(None, (p.where, *self._also(p))))

    @staticmethod
    def _also(p: Position) -> tuple[str, ...]:
        """What a rank is in besides, for as long as it waits."""
        return p.also if p.rests or p.state == RankStatus.BLOCKED else ()

    def _quiet_words(self) -> list[str]:
        """After a while in which every rank seems to wait: what cannot be known is said, and never ended."""
        seconds = self._quiet.seconds(time.monotonic())
        most = QUIET_AFTER if self._hang_after is None else min(QUIET_AFTER, self._hang_after)
        if self.deadlock is not None or seconds < most:
            return []
        left = [r for r, p in self.positions.items() if p.state == RankStatus.FINISHED]
        gone = [f"{rank_words(left)} {'have' if len(left) > 1 else 'has'} finished the {self._program}"] if left else []
        may_act = proof.may_act_words(self.positions)
        two = any(p.state == RankStatus.BLOCKED and p.also for p in self.positions.values())
        advice = dict.fromkeys(p.advice for p in self.positions.values() if p.advice)
        moved = f"no progress for {seconds:.0f} s"
        return [moved, *gone, *may_act, *[TWO_THREADS] * two, *advice, "press Stop to unblock the ranks"]


def _has_left(facts: Whereabouts | None) -> bool:
    """Whether a rank answered that it has ended the run and that nothing on it goes on."""
    return facts is not None and facts.idle and facts.begun and not facts.acts


@dataclass
class StallTimer:
    """Since when every running rank waits, in torch or elsewhere, and moves no byte."""

    since: float | None = None

    def note(self, positions: Mapping[int, Position], running: Sequence[int], now: float) -> None:
        """After a round of looks. On a busy machine a rank may be late to answer: that says nothing for a while."""
        late = [r for r in running if positions[r].state == RankStatus.SILENT]
        ranks = [positions[r] for r in running if r not in late]
        still = bool(running) and all(p.state == RankStatus.BLOCKED or p.rests for p in ranks)
        lost = any(positions[r].unanswered > LATE for r in late)
        if not still or lost or any(p.moved for p in positions.values()):
            self.since = None
        elif self.since is None and not late:
            self.since = now

    def seconds(self, now: float) -> float:
        return 0.0 if self.since is None else now - self.since


@dataclass
class PollRound:
    """One question to all ranks where they are, and the answers so far."""

    number: int = 0
    asked: set[int] = field(default_factory=set)
    answers: dict[int, Whereabouts | None] = field(default_factory=dict)
    until: float = 0.0
    at: float = 0.0
    before: float = 0.0
    names: bool = False  # whether all was asked that a report needs
    ranks: tuple[int, ...] = ()  # that were asked
    whole: bool = False  # whether all that were asked have answered

    @property
    def open(self) -> bool:
        return bool(self.asked)
