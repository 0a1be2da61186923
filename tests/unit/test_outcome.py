"""How a rank left, and whom a failure is blamed on: the table and the rule, without a rank in sight."""

from __future__ import annotations

import itertools
import signal
from dataclasses import replace
from typing import Any

import pytest

from nbddp.errors import Cause, Frame, Left, Raised, RunStopped, Waiting, WorkerFailed
from nbddp.execution import report
from nbddp.execution.result import RunResult, blame, leaver, lost_connection
from nbddp.pool.runs import ended_note
from nbddp.protocol.outcome import (
    FAILED,
    FINISHED,
    REPLACED,
    TABLE,
    GroupExit,
    GroupFacts,
    Outcome,
    ProcessExit,
    RankExit,
    exit_kind,
    process,
    verdict,
)
from nbddp.protocol.position import CalledFrom
from nbddp.worker import exit_info, failure

SAID = ("end", "exit 0", "exit", "raised", "interrupt")
PROCESS = ("exit 0", "exit", "signal", "lost")
OURS = ("", "interrupted", "replaced")
RUNS = ("program", "request")
LOST = (
    "[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:51401. This is typically caused by a "
    "remote worker crashing. Check the logs of the remote worker before reporting an error. GLHF! 🏖️"
)
RESET = "[/src/pair.cc:537] Read error [::ffff:10.0.0.1]:472: Connection reset by peer. This is typically caused by it."


@pytest.mark.parametrize("ours", OURS)
@pytest.mark.parametrize("runs", RUNS)
def test_every_way_out_is_one_row(ours: str, runs: str) -> None:
    ways = [(s, "lives") for s in SAID] + [("", p) for p in PROCESS]
    for left, ended in ways:
        rows = [row for row in TABLE if row.fits(left, ended, ours, runs)]
        assert len(rows) == 1, (left, ended, ours, runs, rows)


def test_nothing_but_the_end_of_a_program_is_ok() -> None:
    ways = [(s, "lives") for s in SAID] + [("", p) for p in PROCESS]
    well = {
        (left, ended, runs)
        for (left, ended), ours, runs in itertools.product(ways, OURS, RUNS)
        if verdict(left, ended, ours, runs) == "finished"
    }
    assert well == {("end", "lives", "program"), ("end", "lives", "request"), ("exit 0", "lives", "program")}
    assert verdict("something new", "lives", "", "program") == "failed"


def test_an_interrupt_is_ours_only_where_we_had_sent_one() -> None:
    assert verdict("interrupt", "lives", "", "program") == "failed"
    assert verdict("interrupt", "lives", "interrupted", "program") == "interrupted"


def test_a_process_that_ends_well_is_a_success_of_a_program_alone() -> None:
    assert verdict("", "exit 0", "", "program") == "ended"
    assert verdict("", "exit 0", "", "request") == "died"
    assert [process(c) for c in (0, 3, -15, None)] == ["exit 0", "exit", "signal", "lost"]
    ways = (Outcome(1, "exit", exit_code=0), Outcome(1, "exit", exit_code=1), Outcome(1))
    assert [exit_kind(o) for o in ways] == ["exit 0", "exit", ""]
    assert ended_note([RankExit(0, "finished", 0)]) == ""
    assert ended_note([RankExit(1, "ended", 0), RankExit(0, "finished", 0)]) == (
        "rank 1 exited with code 0; its variables are lost, and the next cell starts a new process"
    )


@pytest.mark.parametrize(
    ("code", "exits", "says"),
    [
        (None, 0, None), (0, 0, None), (3, 3, None), (True, 1, None), (256, 0, None), (-1, 255, None),
        (2**70, 255, None), ("bye", 1, "bye"), ("", 1, ""), (1.5, 1, "1.5"),
    ],
)  # fmt: skip
def test_exit_codes_are_pythons(code: object, exits: int, says: str | None) -> None:
    found = exit_info.how(SystemExit(code))
    assert found == exit_info.Way("exit", exits, says)


# -- whom to name --------------------------------------------------------------------------


def chain(kind: str, message: str, line: int) -> tuple[Raised, ...]:
    return (Raised(kind, message, (Frame("Cell In[3]", line, "<module>", user=True),)),)


def failed(rank: int, at: float, kind: str, message: str, line: int) -> RankExit:
    return RankExit(rank, "failed", at, Outcome(1, "raised", chain=chain(kind, message, line)))


def died(rank: int, at: float, code: int) -> RankExit:
    return RankExit(rank, "died", at, process=ProcessExit(code))


def with_(ended: RankExit, **said: Any) -> RankExit:
    """The same, whose worker has said this besides."""
    assert ended.outcome is not None
    return replace(ended, outcome=replace(ended.outcome, **said))


def lost(rank: int, at: float, when: int, message: str = LOST, group: str = "0") -> RankExit:
    call = CalledFrom("all_reduce", "collective", group=group, sequence=3)
    return with_(failed(rank, at, "RuntimeError", message, 5), ended_ns=when, call=call)


def left(rank: int, when: int, status: str = "finished", group: str = "", inits: int = 1) -> RankExit:
    departure = GroupExit(group, ("Cell In[3]", 7, "<module>"), when, inits)
    return RankExit(rank, status, 1.0, Outcome(1, "end", ended_ns=when + 1, group_exits=(departure,)))


def named(*ended: RankExit) -> tuple[int, str]:
    found = blame({e.rank: e for e in ended})
    assert found is not None
    return found.ended.rank, found.left.how if found.left else found.ended.status


def test_an_error_of_its_own_comes_before_a_lost_connection_that_was_heard_earlier() -> None:
    own = failed(1, 2.0, "ValueError", "real", 8)
    assert named(lost(0, 1.0, 100), own) == (1, "failed")
    assert named(lost(0, 1.0, 100), left(1, 50), replace(own, rank=2)) == (2, "failed")


def test_the_rank_that_left_is_named_and_not_those_that_left_because_of_it() -> None:
    assert named(lost(0, 1.0, 100), left(1, 50)) == (1, "destroyed")
    assert named(lost(0, 1.0, 100), left(1, 90), left(2, 60, "interrupted")) == (2, "destroyed")
    assert named(lost(0, 1.0, 100), left(1, 150)) == (0, "failed"), "it left afterwards"
    victim = with_(lost(0, 1.0, 100), group_exits=left(0, 40).outcome.group_exits)
    assert named(victim, left(1, 50)) == (1, "destroyed"), "a rank that lost its connection is no cause"


def test_what_was_destroyed_before_an_init_is_no_departure_from_the_group_that_it_made() -> None:
    """Both have ended a group and make another; one loses its connection there, and the other is freed."""
    before, group = left(1, 40).outcome.group_exits, GroupFacts(inits=2)
    victim, peer = with_(lost(1, 1.0, 100), group_exits=before, group=group), left(0, 50, "interrupted")
    for line in (5, 9):  # it waits in the same call, or elsewhere
        peer = with_(peer, call=victim.call, chain=chain("KeyboardInterrupt", "", line))
        assert named(victim, peer) == (1, "failed")
    assert named(victim, peer, left(2, 60, inits=2)) == (2, "destroyed")
    peer = with_(peer, group_exits=peer.outcome.group_exits + left(0, 70, inits=2).outcome.group_exits)
    found = leaver({0: peer, 1: victim}, victim)
    assert found is not None
    assert (found.rank, found.how) == (0, "destroyed")


def test_a_group_that_the_call_was_not_in_is_no_departure() -> None:
    assert named(lost(0, 1.0, 100, group="2"), left(1, 40, group="1"), left(2, 50, group="2")) == (2, "destroyed")
    assert named(lost(0, 1.0, 100, group="2"), left(1, 40)) == (1, "destroyed"), "destroying the default group ends all"


def test_a_process_that_ended_is_a_departure_though_it_is_heard_of_later() -> None:
    gone = RankExit(1, "ended", 1.1, process=ProcessExit(0, seen_ns=100 + 20_000_000))
    assert named(lost(0, 1.0, 100), gone) == (1, "ended")
    killed = RankExit(2, "finished", 0.5, Outcome(1, "end"), ProcessExit(-15, seen_ns=50))
    assert named(lost(0, 1.0, 100), killed, gone) == (2, "ended")


def test_without_a_departure_the_first_lost_connection_is_named() -> None:
    assert named(lost(1, 1.0, 100), lost(0, 1.01, 101), RankExit(2, "finished", 1.0)) == (0, "failed")
    assert blame({0: RankExit(0, "finished", 1.0), 1: RankExit(1, "interrupted", 1.0)}) is None


def test_a_death_comes_before_an_error_at_about_the_same_time() -> None:
    assert named(lost(0, 1.0, 100), died(1, 1.2, -9)) == (1, "died")
    own = failed(0, 1.0, "ValueError", "x", 1)
    assert named(own, died(1, 1.2, -9)) == (1, "died")


@pytest.mark.parametrize("message", [LOST, RESET, "writev [127.0.0.1]:4: Broken pipe"])
def test_what_a_lost_connection_looks_like(message: str) -> None:
    assert lost_connection(lost(0, 1.0, 1, message))
    assert not lost_connection(failed(0, 1.0, "ValueError", message, 1))


# -- words ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (LOST, "Connection closed by peer"),
        (RESET, "Read error: Connection reset by peer"),
        ("[enforce fail at /src/gloo/a.cc:12] a <= b. 8 vs 4", "a <= b. 8 vs 4"),
        ("cannot reach 10.0.0.1:80", "cannot reach 10.0.0.1:80"),
    ],
)
def test_headline_has_no_addresses_of_torchs(message: str, words: str) -> None:
    assert report.headline(Cause(0, 0, "raised", (Raised("RuntimeError", message),))) == (
        f"rank 0 raised RuntimeError: {words}"
    )


PLACE = Frame("Cell In[3]", 7, "<module>", True)
WAITED = Waiting((0, 2), "all_reduce #3", "cell line 5")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            Left(1, "destroyed", PLACE, waiting=WAITED),
            "it destroyed the process group (cell line 7) while ranks 0, 2 waited in all_reduce #3 (cell line 5)",
        ),
        (
            Left(1, "ended", code=0, waiting=Waiting((0,), "", "")),
            "its process exited with code 0 while rank 0 still needed it",
        ),
        (Left(1, "ended", code=-15), "its process was killed by SIGTERM"),
    ],
)
def test_a_rank_that_left_is_told_with_who_waited(how: Left, words: str) -> None:
    cause = Cause(1, 0, "left", left=how)
    assert report.headline(cause) == f"rank 1 left: {words}"
    assert report.STAY in report.failure_text(cause, [], dropped=True)


def test_a_check_words_a_learners_rank_that_left() -> None:
    from nbddp.lessons.framework.run_check import failure_words

    cause = Cause(1, 0, "left", left=Left(1, "ended", code=0))
    failed = WorkerFailed("", cause=cause, states=(), report="", logs={})
    assert failure_words(failed) == "rank 1 left: its process exited with code 0"


def test_a_terminal_has_the_notes_that_no_traceback_has() -> None:
    cause = Cause(0, 0, "raised", (Raised("ImportError", "no triton", notes=("it runs on GPUs",)),))
    failed = WorkerFailed("", cause=cause, states=(), report="", logs={})
    assert report.terminal_text(failed).splitlines() == ["rank 0 raised ImportError: no triton", "    it runs on GPUs"]


def test_what_the_worker_could_not_begin_is_not_told_as_the_programs_error() -> None:
    cause = Cause(1, 0, "raised", (Raised("OSError", "\n no space"),), stage="begin")
    assert report.headline(cause) == "rank 1 could not begin the cell: OSError:  no space"
    assert "%ddp restart --ranks 1" in report.failure_text(cause, [], dropped=False)


# -- exceptions whose class does not play along ---------------------------------------------------


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("in str")


class Interrupting(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class Number(Exception):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]


class Closed(ValueError):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class Empty(ValueError):
    def __bool__(self) -> bool:
        raise RuntimeError

    __len__ = __eq__ = __hash__ = __bool__  # type: ignore[assignment]


def noted(notes: object) -> ValueError:
    error = ValueError("v")
    error.__notes__ = notes  # type: ignore[assignment]
    return error


def raised_from(error: BaseException, cause: BaseException) -> BaseException:
    try:
        raise error from cause
    except type(error) as e:
        return e


UNREADABLE = "(its {} cannot be shown: reading {} raises {})"
ODD = {
    "no message": (Mute, "Mute", UNREADABLE.format("message", "it", "RuntimeError"), []),
    "an interrupt": (Interrupting, "Interrupting", UNREADABLE.format("message", "it", "KeyboardInterrupt"), []),
    "no text": (Number, "Number", UNREADABLE.format("message", "it", "TypeError"), []),
    "no attributes": (lambda: Closed("v"), "Closed", "v", [UNREADABLE.format("notes", "them", "RuntimeError")]),
    "no truth": (lambda: Empty("v"), "Empty", "v", []),
    "no UTF-8": (lambda: ValueError("a\ud800b"), "ValueError", r"a\ud800b", []),
    "a number as note": (lambda: noted(["one", 2]), "ValueError", "v", ["one", "2"]),
    "one note": (lambda: noted("one"), "ValueError", "v", ["one"]),
    "notes of no kind": (lambda: noted(5), "ValueError", "v", [UNREADABLE.format("notes", "them", "TypeError")]),
    "a mute note": (lambda: noted([Mute()]), "ValueError", "v", [UNREADABLE.format("notes", "them", "RuntimeError")]),
}


@pytest.mark.parametrize("odd", ODD)
def test_type_survives_a_class_that_raises(odd: str) -> None:
    make, kind, message, notes = ODD[odd]
    error = raised_from(make(), Mute())
    links = failure.chain(error, {}, ())
    assert [link.type for link in links] == ["Mute", kind]
    assert (links[-1].message, list(links[-1].notes)) == (message, notes)
    assert links[-1].frames
    assert exit_info.how(error) == exit_info.Way("raised")


def test_outcome_that_cannot_be_sent_still_says_who_and_what() -> None:
    said = Outcome(3, "raised", ended_ns=1, chain=(object(),))
    short = exit_info.unworded(said, Mute(), TypeError("no JSON"))
    (link,) = short.chain
    assert (link.type, short.left, short.run, short.ended_ns) == ("Mute", "raised", 3, 1)
    assert link.message.endswith("(the report of this rank is incomplete because of TypeError: no JSON)")


def test_a_brief_chain_has_places_and_no_source() -> None:
    """What a rank that was freed came out of: nobody is shown its lines or its values."""
    error = raised_from(ValueError("v"), KeyError("k"))
    whole, brief = (failure.chain(error, {}, (), of) for of in ([lambda frame, line: [("name", "1")]], None))
    assert all(frame.context and frame.values for link in whole for frame in link.frames if frame.user)
    assert [replace(f, context=(), values=()) for link in whole for f in link.frames] == [
        f for link in brief for f in link.frames
    ]
    assert any(f.context for link in whole for f in link.frames)


class Taken:
    """A host that a scheduler takes away."""

    def node_of(self, rank: int) -> int:
        return 0

    def log_of(self, rank: int) -> str:
        return ""

    def device_of(self, rank: int) -> str:
        return "cpu"

    def taken_of(self, rank: int) -> str:
        return "Slurm job 7 was cancelled"

    def advice_of(self, cause: Cause) -> str:
        return ""

    def fate(self) -> str:
        return "ended"


@pytest.mark.parametrize(
    ("code", "told"), [(-signal.SIGTERM, True), (-signal.SIGKILL, True), (-signal.SIGSEGV, False), (1, False)]
)
def test_a_signal_of_the_scheduler_is_told_apart_from_others(code: int, told: bool) -> None:
    error = RunResult(Taken(), {0: died(0, 0.0, code)}).error()
    assert error is not None
    assert ("Slurm job 7 was cancelled." in str(error.report)) is told


def test_while_ranks_are_still_at_work_no_scheduler_is_asked_why_one_died() -> None:
    """It may take seconds, in which nobody is freed; the report asks."""
    ended = {0: died(0, 0.0, -signal.SIGTERM)}
    slow = Taken()
    slow.taken_of = lambda rank: pytest.fail("asked")  # type: ignore[method-assign]
    assert RunResult(slow, ended, running=(1,), ended_by="failed").so_far() == "rank 0 died: killed by SIGTERM"


@pytest.mark.parametrize(
    ("ended_by", "link", "words"),
    [
        ("failed", Raised("ValueError", "no\nmore"), "rank 0 raised ValueError: no"),
        ("failed", Raised("RuntimeError", "Connection closed by peer [127.0.0.1]:5"), ""),
        ("stopped", Raised("ValueError", "no"), ""),
        ("late", Raised("ValueError", "no"), "the run took longer than --timeout 5"),
        ("failed", None, ""),
    ],
    ids=["raised", "lost a peer, whose end is not known yet", "stopped", "late", "cannot be worded"],
)
def test_what_ends_a_run_is_said_before_all_ranks_have_ended(ended_by: str, link: Raised | None, words: str) -> None:
    ended = {0: RankExit(0, FAILED, 0.0, Outcome(1, "raised", chain=(link,)))}
    assert RunResult(Taken(), ended, running=(1,), ended_by=ended_by, timeout=5.0).so_far() == words


def test_a_rank_that_the_user_restarts_is_the_cause_and_not_a_peer_that_lost_it() -> None:
    lost = Raised("RuntimeError", "Connection closed by peer [127.0.0.1]:5")
    killed = RankExit(2, REPLACED, 10.3)
    peers = {r: RankExit(r, FAILED, 10.1, Outcome(1, "raised", chain=(lost,))) for r in (0, 1)}
    ended = {**peers, 2: killed, 3: RankExit(3, FINISHED, 9.0)}
    result = RunResult(
        Taken(), ended, ended_by="stopped", interrupted_at=10.2, restarted=(2,), restarted_at=10.0,
        why={2: "you restarted it"},
    )  # fmt: skip
    error = result.error()
    assert isinstance(error, RunStopped)
    assert str(error).splitlines()[0] == "rank 2 was restarted by you; ranks 0–1 were stopped"
    assert "lost its connection to rank 2" in error.report
    assert "rank 2: still running; you restarted it, so it is ended" in error.report
    assert "Connection closed" not in error.report
    before = {**ended, 0: RankExit(0, FAILED, 9.5, Outcome(1, "raised", chain=(Raised("ValueError", "no"),)))}
    found = replace(result, ended=before).error()
    assert "ValueError" in str(found), "what failed before is the cause"
