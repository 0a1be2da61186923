"""Tables for the pure part of a hang: who waits for whom, whether it can end, in which words; and a run that hangs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nbddp.deadlock.on_rank import runnable
from nbddp.deadlock.positions import ANY, Call, Position, facts_of, position_of
from nbddp.deadlock.proof import diagnose, held, waiting_words, waits_for
from nbddp.deadlock.watch import START_EACH, RankWatcher, StallTimer
from nbddp.errors import RankStatus, RunHung
from nbddp.execution.execution import Execution
from nbddp.output.screens import NullScreen
from nbddp.protocol.codec import to_json
from nbddp.protocol.messages import OUTCOME
from nbddp.protocol.outcome import Outcome, RankExit
from nbddp.protocol.position import BlockingCall, CallHistory, Channel, PendingCollective, Whereabouts
from nbddp.protocol.request import Request
from nbddp.protocol.run_spec import Question, Reply, RunSpec


def at(rank: int, op: str, line: int, sequence: int = 1, what: str = "float[4]", **more: Any) -> Position:
    """A rank blocked in a collective of the default group of all ranks."""
    of_call = {k: more.pop(k) for k in ("seen", "root", "of", "epoch", "in_thread", "group") if k in more}
    call = Call(
        op, more.pop("kind", "collective"), of_call.pop("group", "0"), more.pop("ranks", ()), sequence,
        made_of=more.pop("made_of", op), what=what, **of_call,
    )  # fmt: skip
    return Position(rank, "blocked", f"cell line {line}", line, call, **more)


def peer(rank: int, kind: str, other: int | None, line: int = 3, tag: int = 0, nth: int = 1, **more: Any) -> Position:
    """A rank blocked in its n-th send or receive on a channel; `made`: what else it has sent and received."""
    channel = side(kind, rank, other, tag)
    op = "wait" if more.pop("asynchronous", False) else kind
    call = Call(op, op, peer=other, channel=channel, nth=nth)
    made = {channel: nth, **more.pop("made", {})}
    return Position(rank, "blocked", f"cell line {line}", line, call, channels=made, **more)


def side(kind: str, rank: int, other: int | None, tag: int = 0) -> Channel:
    other = ANY if other is None else other
    return ("s", "0", rank, other, tag) if kind == "send" else ("r", "0", other, rank, tag)


def init(rank: int, inits: int = 1) -> Position:
    return Position(rank, "blocked", "cell line 2", 2, Call("init_process_group", "init"), inits=inits)


def done(rank: int, **more: Any) -> Position:
    return Position(rank, "finished", **more)


def busy(rank: int, **more: Any) -> Position:
    return Position(rank, "running", "cell line 7", 7, **more)


def sub(rank: int, sequence: int = 1) -> Position:
    """Rank blocked in a group of ranks 0 and 1 alone."""
    return at(rank, "all_reduce", 5, sequence, ranks=(0, 1))


NOTHING = [
    ([at(0, "all_reduce", 9), busy(1)], "a slow rank may still come"),
    ([at(0, "all_reduce", 9), Position(1, "silent")], "so may one that does not answer"),
    ([at(0, "all_reduce", 9), at(1, "all_reduce", 9)], "all have come: a transfer"),
    ([at(0, "all_reduce", 9), at(1, "all_reduce", 12)], "from different lines: a transfer too"),
    ([at(0, "all_reduce", 9), busy(1), at(2, "barrier", 8, 3)], "everybody waits for a slow rank, at last"),
    ([peer(0, "send", 1), peer(1, "recv", 0)], "they have met"),
    ([peer(0, "send", 1, made={side("recv", 0, 1): 1}), peer(1, "send", 0, made={side("recv", 1, 0): 1})],
     "both wait for their sends, and both have called the receives"),
    ([peer(0, "recv", 1, nth=3), done(1, channels={side("send", 1, 0): 3})],
     "rank 1 has sent it, asynchronously, and its process still takes part"),
    ([peer(0, "send", 1), peer(1, "recv", None)], "a receive from any source may be for it"),
    ([peer(0, "recv", None), peer(1, "recv", 0), done(2, channels={side("send", 2, 0): 1})],
     "rank 2 has sent something that nobody has received"),
    ([peer(0, "recv", 1), peer(1, "recv", 0, sure=False)], "rank 1 was seen in its wait only once"),
    ([peer(0, "recv", 1, sure=False), done(1)], "so was rank 0"),
    ([peer(0, "recv", 1), done(1, informed=False)], "rank 1 did not say what it has sent"),
    ([peer(0, "recv", 1), Position(1, "unknown", why="KeyError: 'op'")], "rank 1 cannot report its position"),
    ([Position(0, "blocked", call=Call("wait", "wait")), done(1)], "nobody knows what rank 0 waits for"),
    ([at(0, "all_reduce", 9, seen=False), done(1)], "the recorder does not have what rank 0 waits in"),
    ([at(0, "all_reduce", 9, 3), done(1, blind=frozenset("0"))], "rank 1 has called more than is known"),
    ([at(0, "all_reduce", 9, 3), done(1, records=False)], "rank 1's recorder was never seen to record"),
    ([at(0, "all_reduce", 9, 3), done(1, latest={"0": 3})], "rank 1 has called it, though the record is not here"),
    ([at(0, "all_gather", 9), at(1, "all_gather_into_tensor", 9, what="", seen=False)],
     "rank 1 is in it too, and its recorder has it as done"),
    ([at(0, "broadcast", 9, root=0, moved=True), at(1, "broadcast", 9, root=1)], "the roots differ, but bytes move"),
    ([peer(0, "recv", None), busy(1), done(2)], "any rank may send, and rank 1 still can"),
    ([init(0), busy(1)], "rank 1 may still come"),
    ([init(0), at(1, "all_reduce", 5, inits=1)], "rank 1 has been through the init that rank 0 is still in"),
    ([at(0, "broadcast", 5, 2), at(1, "all_reduce", 6, 3, past={("0", 2): ("broadcast", "float[4]", None)})],
     "rank 1 has done its part of the broadcast"),
    ([at(0, "all_reduce", 5, 4), done(1, past={("0", 4): ("all_reduce", "float[4]", None)})],
     "rank 1 has called it, asynchronously, and its process still takes part"),
    ([Position(0, "blocked", call=Call("new_group", "new_group"), groups=2, inits=1), init(1, 2)],
     "rank 1 has been through the new_group, and is at the next init"),
    ([sub(0), sub(1), done(2)], "rank 2 is not in that group"),
    ([done(0), done(1)], "nobody waits"),
]  # fmt: skip


@pytest.mark.parametrize(("places", "why"), NOTHING, ids=[why for _, why in NOTHING])
def test_what_can_still_end_is_no_deadlock(places: list[Position], why: str) -> None:
    assert diagnose({p.rank: p for p in places}) is None, why


DEADLOCKS = [
    ([at(0, "all_reduce", 12), at(1, "all_reduce", 12), done(2), at(3, "all_reduce", 12)], (0, 1, 3),
     "ranks 0–1, 3 wait in all_reduce #1 (line 12); rank 2 has finished the cell without calling it"),
    ([at(0, "all_reduce", 12), done(1), done(2)], (0,),
     "rank 0 waits in all_reduce #1 (line 12); ranks 1–2 have finished the cell without calling it"),
    ([at(0, "barrier", 5), at(1, "all_reduce", 6)], (0, 1),
     "collective #1 differs between ranks, with barrier on rank 0 (line 5), all_reduce on rank 1 (line 6)"),
    ([at(0, "all_reduce", 5), at(1, "all_reduce", 5, what="float[8]")], (0, 1),
     "all_reduce #1 has different shapes or dtypes, float[4] on rank 0 (line 5), float[8] on rank 1 (line 5)"),
    ([at(0, "all_reduce", 5, 4, "float[2]"), done(1, past={("0", 4): ("all_reduce", "float[1]", None)})], (0,),
     "all_reduce #4 has different shapes or dtypes, float[2] on rank 0 (line 5), float[1] on rank 1"),
    ([at(0, "barrier", 5, 4, ""), busy(1),
      done(2, past={("0", 4): ("all_reduce", "float[1]", None), ("0", 5): ("barrier", "", None)})], (0,),
     "collective #4 differs between ranks, with barrier on rank 0 (line 5), all_reduce on rank 2"),
    ([peer(0, "recv", 1), peer(1, "recv", 0)], (0, 1),
     "rank 0 waits in recv from rank 1 (line 3), and rank 1 waits in recv from rank 0 (line 3)"),
    ([peer(0, "send", 1, tag=1), peer(1, "recv", 0, tag=2)], (0, 1),
     "rank 0 waits in send to rank 1 (line 3), and rank 1 waits in recv from rank 0 (line 3)"),
    ([peer(0, "recv", None), done(1), done(2)], (0,),
     "rank 0 waits in recv (line 3); ranks 1–2 have finished the cell without calling it"),
    ([peer(0, "send", 1, nth=2), done(1, channels={side("recv", 1, 0): 1})], (0,),
     "rank 0 waits in send to rank 1 (line 3); rank 1 has finished the cell without calling it"),
    ([peer(0, "recv", 1, asynchronous=True), peer(1, "recv", 0, asynchronous=True)], (0, 1),
     "rank 0 waits in wait() for a recv from rank 1 (line 3), "
     "and rank 1 waits in wait() for a recv from rank 0 (line 3)"),
    ([at(0, "broadcast", 5, root=0), at(1, "broadcast", 6, root=1)], (0, 1),
     "broadcast #1 has different src, src=0 on rank 0 (line 5), src=1 on rank 1 (line 6)"),
    ([at(0, "gather_object", 5, made_of="gather", root=0), done(1, past={("0", 1): ("gather", "float[4]", 1)})], (0,),
     "gather #1 has different dst, dst=0 on rank 0 (line 5), dst=1 on rank 1"),
    ([at(0, "all_reduce", 5, group="a", ranks=(0, 1), of=" of group {0, 1}"),
      at(1, "all_reduce", 6, group="b", ranks=(1, 2), of=" of group {1, 2}"),
      at(2, "all_reduce", 7, group="c", ranks=(0, 2), of=" of group {0, 2}")], (0, 1, 2),
     "rank 0 waits in all_reduce #1 of group {0, 1} (line 5); rank 1 waits in all_reduce #1 of group {1, 2} (line 6); "
     "rank 2 waits in all_reduce #1 of group {0, 2} (line 7)"),
    ([init(0, 2), at(1, "all_gather", 5, group="1", epoch=(7, 1), inits=1)], (0, 1),
     "rank 0 waits in init_process_group (line 2); rank 1 waits in all_gather #1 of the group of init #1 (line 5)"),
    ([at(0, "all_reduce", 5, in_thread=True), done(1)], (0,),
     "rank 0 waits in all_reduce #1 in a thread (line 5); rank 1 has finished the cell without calling it"),
    ([init(0), done(1)], (0,),
     "rank 0 waits in init_process_group (line 2); rank 1 has finished the cell without calling it"),
    ([init(0, 2), done(1, inits=1)], (0,),
     "rank 0 waits in init_process_group (line 2); rank 1 has finished the cell without calling it"),
    ([at(0, "backward", 7, 9, kind="backward"), done(1)], (0,),
     "rank 0 waits in backward, backward #9 (line 7); rank 1 has finished the cell without calling it"),
    ([at(0, "all_reduce", 5, 2), Position(1, "died")], (0,),
     "rank 0 waits in all_reduce #2 (line 5); rank 1 has died"),
    ([at(0, "all_reduce", 5, 2), peer(1, "recv", 0), busy(2)], (0, 1),
     "rank 0 waits in all_reduce #2 (line 5); rank 1 waits in recv from rank 0 (line 3); rank 2 is running"),
    ([at(0, "all_reduce", 5), Position(1, "absent"), Position(2, "absent")], (0,),
     "rank 0 waits in all_reduce #1 (line 5); ranks 1–2 do not take part in this run"),
    ([sub(0), done(1), busy(2)], (0,),
     "rank 0 waits in all_reduce #1 (line 5); rank 1 has finished the cell without calling it"),
]  # fmt: skip


@pytest.mark.parametrize(("places", "ranks", "words"), DEADLOCKS, ids=[w for _, _, w in DEADLOCKS])
def test_deadlocks_are_named(places: list[Position], ranks: tuple[int, ...], words: str) -> None:
    found = diagnose({p.rank: p for p in places})
    assert found is not None
    assert (found.ranks, found.words) == (ranks, (words,))


@pytest.mark.parametrize(
    ("places", "advice"),
    [
        ([at(0, "all_reduce", 7, kind="backward"), done(1)], "the same number of batches"),
        ([at(0, "broadcast", 7), done(1)], "use model.module"),
        ([peer(0, "recv", 1), peer(1, "recv", 0)], "batch_isend_irecv"),
    ],
)
def test_usual_causes_are_told(places: list[Position], advice: str) -> None:
    found = diagnose({p.rank: p for p in places})
    assert found is not None
    assert advice in found.advice


def failed(rank: int, **more: Any) -> Position:
    return Position(rank, "failed", **more)


@pytest.mark.parametrize(
    ("places", "left", "ranks"),
    [
        ([at(0, "all_reduce", 9, sure=False), failed(1)], [1], {0}),  # one look is enough
        ([at(0, "all_reduce", 9), failed(1)], [], set()),  # what rank 1 has called is not known
        ([at(0, "all_reduce", 9), failed(1, latest={"0": 1})], [1], set()),  # it has done its part
        ([at(0, "all_reduce", 9, acts=("a thread",)), failed(1)], [1], set()),  # a thread of rank 0's may still act
        ([at(0, "all_reduce", 9, seen=False), failed(1)], [1], set()),
        ([at(0, "broadcast", 9, root=0), failed(1)], [1], set()),  # a root leaves before the others have entered
        ([at(0, "all_to_all", 9), failed(1)], [1], set()),  # rank 0 may have nothing to exchange with rank 1
        ([at(0, "barrier", 9), failed(1), busy(2)], [1], {0}),
        ([sub(0), at(1, "all_reduce", 6, group="1", ranks=(1, 2)), failed(2)], [2], {0, 1}),  # 0 for 1, which for 2
        ([sub(0), at(1, "all_reduce", 6, group="1", ranks=(0, 1)), failed(2)], [2], set()),  # a circle proves nothing
    ],
)
def test_ranks_that_a_failed_one_holds_are_known_by_one_look(
    places: list[Position], left: list[int], ranks: set[int]
) -> None:
    assert held({p.rank: p for p in places}, left) == ranks


def test_waiting_is_worded_for_one_rank() -> None:
    places = {0: at(0, "all_reduce", 9, 14), 1: busy(1), 2: peer(2, "recv", None)}
    assert waiting_words(places[0], places) == "waiting in all_reduce #14 for ranks 1–2"
    assert waiting_words(places[1], places) == ""
    assert waiting_words(places[2], places) == "waiting in recv for any of ranks 0–1"
    assert waits_for(places[1], places) == ((), True)


PENDING = PendingCollective("0", (0, 1), 3, "all_reduce", "float[4]", backend="gloo", seen=True)
IN_REDUCE = BlockingCall("all_reduce", "collective")
NOTHING = CallHistory()
FACTS = Whereabouts(
    user=("Cell In[4]", 9, "train"), call=IN_REDUCE, pending=PENDING, exact=True, waits="futex", cpu=2.0, inits=1,
    groups=1, bytes=5, token=(1,), past=NOTHING,
)  # fmt: skip


RESTS = replace(FACTS, call=None, pending=None, exact=False, waits="futex", children=(1, 4), cpu=1.0)


@pytest.mark.parametrize(
    ("answers", "seconds"),
    [
        ([RESTS] * 8, 3.0),
        ([RESTS, RESTS, None, RESTS, None, None, RESTS, RESTS], 3.0),
        ([RESTS, RESTS, None, None, None, None, None, RESTS], 0.0),  # who does not answer for long may compute
        ([RESTS, RESTS, None, replace(RESTS, cpu=1.9), *[replace(RESTS, cpu=1.9)] * 4], 1.5),
        ([RESTS, RESTS, None, *[replace(RESTS, children=(1, 9))] * 5], 2.0 - 0.5),
        ([RESTS, RESTS, None, *[replace(RESTS, bytes=9)] * 5], 2.0 - 0.5),
        ([None] * 8, 0.0),
    ],
)
def test_an_answer_that_is_late_does_not_end_the_time_without_progress(
    answers: list[Whereabouts | None], seconds: float
) -> None:
    """On a busy machine a rank that waits for a process of its own does not always answer in time."""
    timer, before = StallTimer(), None
    for i, facts in enumerate(answers):
        before = position_of(0, facts, before, 0.5 if i else float("inf"))
        timer.note({0: before}, [0], 0.5 * i)
    assert timer.seconds(0.5 * (len(answers) - 1)) == seconds


NATIVE: dict[str, Any] = {"call": None, "exact": False}  # C++ waits for what it has called itself
ON_GPU = {**NATIVE, "pending": replace(PENDING, backend="nccl")}


@pytest.mark.parametrize(
    ("changed", "state"),
    [
        ({}, "blocked"),
        ({"waits": "busy"}, "running"),
        ({**NATIVE, "cpu": 1.01}, "blocked"),
        ({**NATIVE, "cpu": 1.9}, "running"),
        ({**NATIVE, "cpu": 1.01, "bytes": 6}, "running"),
        ({**NATIVE, "waits": "sleep", "cpu": 1.01}, "running"),
        ({**NATIVE, "pending": None}, "running"),
        ({"call": BlockingCall("backward", "backward"), "exact": False, "cpu": 1.01}, "blocked"),
        ({"call": BlockingCall("init_process_group", "init"), "pending": None, "waits": "sleep"}, "blocked"),
        ({"call": BlockingCall("init_process_group", "outside"), "pending": None, "waits": "futex"}, "running"),
        ({**ON_GPU, "waits": "busy"}, "blocked"),
        ({**ON_GPU, "waits": "sleep"}, "running"),
        ({**ON_GPU, "waits": ""}, "running"),
    ],
)
def test_what_a_worker_answers_tells_whether_it_is_blocked(changed: dict[str, Any], state: str) -> None:
    found = position_of(0, replace(FACTS, **changed), Position(0, "running", cpu=1.0, bytes=5), 1.0)
    assert (found.state, found.where, found.line) == (state, "cell line 9, in train", 9)


@pytest.mark.parametrize(
    ("later", "sure"),
    [
        ({}, True),
        ({"token": (2,)}, False),
        ({"acts": ("a thread",)}, False),
        ({"pending": replace(PENDING, sequence=4)}, False),
    ],
)
def test_a_rank_is_stuck_only_if_it_is_in_the_same_wait_in_two_looks(later: dict[str, Any], sure: bool) -> None:
    first = position_of(0, FACTS, None, 1.0)
    second = position_of(0, replace(FACTS, **later), first, 1.0)
    assert (first.sure, second.state, second.sure) == (False, "blocked", sure)
    assert bool(diagnose({0: second, 1: done(1)})) == sure


@pytest.mark.parametrize("facts", [FACTS, Whereabouts(idle=True, inits=1, groups=1)])
def test_what_could_act_at_the_last_look_may_be_acting_now(facts: Whereabouts) -> None:
    """A handler of a signal removes itself, and is about to call, in the middle of a look."""
    out = [position_of(0, replace(facts, acts=("its handler of SIGALRM",)), None, 1.0)]
    for _ in range(2):
        out.append(position_of(0, facts, out[-1], 1.0))
    assert [p.sure and p.state != "running" for p in out] == [False, False, True]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, "all_reduce #3"),
        ({"pending": replace(PENDING, default=False)}, "all_reduce #3 of group {0, 1}"),
        ({"pending": replace(PENDING, default=False, named="tp")}, "all_reduce #3 of group {0, 1} (tp)"),
        ({"pending": replace(PENDING, default=False, nth=2)}, "all_reduce #3 of the second group {0, 1}"),
        ({"pending": replace(PENDING, default=False, named="tp", nth=22, made_at=("Cell In[3]", 5, "<module>"))},
         "all_reduce #3 of the 22nd group {0, 1} (tp, made at cell line 5)"),
        ({"pending": replace(PENDING, default=False, nth=12, made_at=("/a/model.py", 7, "build"))},
         "all_reduce #3 of the 12th group {0, 1} (made at model.py line 7, in build)"),
        ({"thread": True}, "all_reduce #3 in a thread"),
        ({"call": BlockingCall("init_process_group", "init"), "inits": 2}, "init_process_group #2"),
        ({"call": BlockingCall("wait", "wait")}, "wait() for all_reduce #3"),
        ({"call": BlockingCall("wait", "wait", channel=("r", "0", -1, 0, 0), nth=1, members=(0, 1))},
         "wait() for a recv"),
    ],
)  # fmt: skip
def test_what_a_rank_waits_in_is_told(changed: dict[str, Any], words: str) -> None:
    call = position_of(0, replace(FACTS, **changed), None, 1.0).call
    assert call is not None
    assert call.describe() == words


def test_a_question_that_failed_is_told_as_that_and_proves_nothing() -> None:
    before = position_of(1, FACTS, None, 1.0)
    assert before.where
    found = position_of(1, Whereabouts(failed="KeyError: 'profiling_name'"), before, 1.0)
    assert not found.where, "it may be elsewhere by now"
    places = {0: at(0, "all_reduce", 5), 1: found}
    assert waiting_words(found, places) == "cannot report its position: KeyError: 'profiling_name'"
    assert diagnose(places) is None
    assert waiting_words(places[0], places) == "apparently waiting in all_reduce #1 for rank 1"


def test_a_rank_that_does_not_answer_is_silent_and_one_that_is_idle_has_finished() -> None:
    assert position_of(0, None, None, 1.0).state == "silent"
    idle = Whereabouts(idle=True, inits=1, groups=1, past=CallHistory({"0": ((1, "barrier", "", None),)}))
    found = position_of(0, idle, None, 1.0)
    assert (found.state, found.past) == ("finished", {("0", 1): ("barrier", "", None)})
    assert position_of(0, replace(idle, acts=("a thread",)), None, 1.0).state == "running"


def test_a_rank_that_is_idle_and_has_not_begun_has_not_finished() -> None:
    late = position_of(1, Whereabouts(idle=True, begun=False, inits=1, past=NOTHING), None, 1.0)
    assert (late.state, late.where) == ("running", "not begun yet")
    assert diagnose({0: at(0, "all_reduce", 5), 1: late}) is None


class Busy:
    """One rank that waits for another that has finished, and is too busy to answer when it is asked a second time."""

    def __init__(self) -> None:
        self.run: Execution
        self.asked: list[str] = []

    def send(self, rank: int, *what: Any) -> None:
        if rank == 1:
            self.ends(1, Outcome(1, "end"))

    def look(self, ranks: Sequence[int], question: Question, hear: Callable[[int, Reply], None]) -> None:
        self.asked.append(question.op)
        if question.op == "where":
            hear(0, Reply(to_json(seen(recv=True))))
            hear(1, Reply(to_json(IDLE)))

    def signal(self, ranks: Sequence[int], number: int, *, group: bool = False) -> None:
        self.ends(0, Outcome(1, "raised"))

    def ends(self, rank: int, outcome: Outcome) -> None:
        self.run.hear(rank, {"header": {"msg_type": OUTCOME}, "buffers": [], "content": outcome})

    def __getattr__(self, name: str) -> Any:
        return lambda *asked: {}


def test_a_deadlock_that_ended_the_run_is_told_though_a_rank_is_silent_in_the_last_look(tmp_path: Path) -> None:
    workers = Busy()
    workers.run = Execution(
        workers,
        {r: RunSpec("cell", 1) for r in (0, 1)},
        Request(hang_after=0.05, timeout=10),
        number=1,
        logs=tmp_path,
        screen=NullScreen(),
    )
    workers.run.execute()
    assert [op for op in workers.asked if op != "interrupt_started"][-1] == "stack"
    with pytest.raises(RunHung, match="rank 0 waits in recv"):
        workers.run.raise_if_bad()


IDLE = Whereabouts(idle=True, past=NOTHING)


def seen(recv: bool, token: int = 1) -> Whereabouts:
    """A rank in a receive from rank 1, or in a line of its own."""
    call = BlockingCall("recv", "recv", 1, channel=("r", "0", 1, 0, 0), nth=1, members=(0, 1)) if recv else None
    user = ("Cell In[1]", 2, "f")
    return Whereabouts(user=user, call=call, exact=True, waits="futex", token=(token,), past=NOTHING)


def test_a_deadlock_stands_from_the_first_look_on_and_until_a_rank_says_that_it_has_moved() -> None:
    """A look that a rank does not answer in time takes nothing back; and what was just asked is not asked again."""
    asked: list[Question] = []

    class Asks:
        def look(self, ranks: Sequence[int], question: Question, hear: Callable[[int, Reply], None]) -> None:
            asked.append(question)

        def repeat(self, ranks: Sequence[int], run: int) -> None: ...

    ended = {1: RankExit(1, RankStatus.FINISHED, 0.0)}
    watcher = RankWatcher(Asks(), [0, 1], ended, lambda *came: None, run=1, world_size=2, hang_after=5.0)

    def look(facts: Whereabouts | None) -> None:
        watcher.look()
        watcher.answered(1, len(asked), IDLE)
        if facts is None:
            watcher.assess()  # time is up
        else:
            watcher.answered(0, len(asked), facts)

    look(seen(recv=True))
    first = time.monotonic()
    assert watcher.deadlock is None
    look(seen(recv=True))
    assert watcher.deadlock is not None
    assert watcher.hung_since is not None
    assert watcher.hung_since <= first
    stood = watcher.hung_since
    look(None)
    assert (watcher.hung_since, asked[-1].op) == (stood, "stack")
    watcher.look_for_report()
    assert len(asked) == 4, "the last look was not whole"
    watcher.answered(1, 4, IDLE)
    watcher.answered(0, 4, seen(recv=True))
    watcher.look_for_report()
    assert len(asked) == 4
    look(seen(recv=False, token=2))
    assert (watcher.deadlock, watcher.hung_since) == (None, None)


def test_names_that_a_rank_has_told_stay_until_it_is_asked_for_them_again() -> None:
    class Asks:
        def look(self, ranks: Sequence[int], question: Question, hear: Callable[[int, Reply], None]) -> None: ...
        def repeat(self, ranks: Sequence[int], run: int) -> None: ...

    watcher = RankWatcher(Asks(), [0], {}, lambda *came: None, run=1, world_size=1, hang_after=5.0)
    told: list[tuple[str, ...] | None] = []
    for number, names in enumerate((("x",), None, ()), 1):
        watcher.look()
        watcher.answered(0, number, replace(seen(recv=False), names=names, imports=names))
        told.append(watcher.facts[0].names)
    assert told == [("x",), ("x",), ()]


def test_an_answer_that_was_lost_is_none() -> None:
    assert facts_of(Reply()) is None
    assert facts_of(Reply(to_json(Whereabouts()))) == Whereabouts()
    assert facts_of(Reply(failed="KeyError")) == Whereabouts(failed="KeyError")


def test_end_of_an_earlier_cells_group_is_a_place_and_no_deadlock() -> None:
    """Its connections are shut after a while, so it waits for nobody."""
    call = BlockingCall("destroy_process_group of an earlier cell's group", "drop")
    facts = Whereabouts(user=("Cell In[3]", 2, "<module>"), call=call, waits="futex", token=(0,), bytes=0)
    me = position_of(0, facts, position_of(0, facts, None, 1.0), 1.0)
    positions = {0: me, 1: done(1)}
    assert me.sure
    assert me.where == "cell line 2"
    assert waiting_words(me, positions) == "in destroy_process_group of an earlier cell's group"
    assert diagnose(positions) is None


def test_after_a_failure_ranks_are_asked_when_all_can_have_begun() -> None:
    """Many ranks on few cores take a while to come to the call that they wait in; asked before, each is asked twice."""
    asked: list[float] = []

    class Asks:
        def look(self, ranks: Sequence[int], question: Question, hear: Callable[[int, Reply], None]) -> None:
            asked.append(time.monotonic())

        def repeat(self, ranks: Sequence[int], run: int) -> None: ...

    def waits(ranks: int) -> float:
        ended = {0: RankExit(0, RankStatus.FAILED, 0.0)}
        come = range(ranks)
        now = time.monotonic()
        watcher = RankWatcher(
            Asks(), come, ended, lambda *came: None, run=1, world_size=ranks, hang_after=5.0, began=now
        )
        watcher.soon()
        return watcher.look_if_due()

    assert waits(64) == pytest.approx(64 * START_EACH, abs=0.02)
    assert waits(2) < 0.01
    assert not asked


@pytest.mark.parametrize(
    ("file", "known"),
    [
        ("libtorch_cpu.so", True), ("libgomp-a34b3233.so.1", True), ("libtriton.so", True), ("libcublasLt.so.12", True),
        ("libmine.so", False), ("_mine.cpython-311-x86_64-linux-gnu.so", False),
    ],
)  # fmt: skip
def test_threads_of_these_libraries_call_no_program(file: str, known: bool) -> None:
    """torch before 2.13 names none of its threads, and words of a library that is loaded remain on their stacks."""
    assert bool(runnable.LIBRARIES.fullmatch(file)) is known
