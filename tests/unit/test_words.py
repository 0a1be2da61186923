"""Tables for the pure part of a run: what to do next, output kept and folded, failures worded, figures drawn."""

from __future__ import annotations

import builtins
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import nbddp
from nbddp.capabilities.panel import rows
from nbddp.capabilities.status.table import state_words
from nbddp.errors import Cause, Frame, Raised, RankState, RankStatus
from nbddp.execution import cell_text, report
from nbddp.execution.report import COLOURED, PLAIN, WEIGHTED
from nbddp.execution.supervise import (
    GRACE,
    PATIENCE,
    RELEASE_AFTER,
    Action,
    Finish,
    Interrupt,
    ReleaseRanks,
    Replace,
    RunState,
    Wait,
    group_is_broken,
    next_action,
)
from nbddp.execution.values import RankValues
from nbddp.figures.palette import FILLS, FRAME, INK, MUTED, PAPER
from nbddp.figures.table import Table, is_numeric
from nbddp.output.buffer import HEAD, TAIL, RankOutput, Text
from nbddp.output.layout import Print, Show, block
from nbddp.protocol import outcome, pickling
from nbddp.protocol.outcome import GroupFacts
from tests.colours import contrast

ONE = frozenset({1})


@pytest.mark.parametrize(
    ("state", "action"),
    [
        (RunState(0, ()), Finish()),
        (RunState(1, (), output_until=1.5), Wait(0.5)),
        (RunState(2, (), output_until=1.5), Finish()),
        (RunState(0, (0, 1)), Wait(None)),
        (RunState(0, (1,), failed_at=0), Wait(GRACE)),
        (RunState(GRACE, (1,), failed_at=0), Interrupt((1,), "failed")),
        (RunState(0, (1,), failed_at=0, all_hung=True), Interrupt((1,), "failed")),
        (RunState(0, (1,), all_hung=True), Wait(None)),
        (RunState(0, (1,), failed_at=0, interrupted_at=0), Wait(RELEASE_AFTER)),
        (RunState(RELEASE_AFTER, (1,), failed_at=0, interrupted_at=0), ReleaseRanks((1,))),
        (RunState(0, (1,), failed_at=0, interrupted_at=0, all_hung=True), ReleaseRanks((1,))),
        (RunState(0.5, (1,), failed_at=0, interrupted_at=0, released=ONE, stuck=(1,)), Wait(PATIENCE - 0.5)),
        (RunState(PATIENCE, (1,), failed_at=0, interrupted_at=0, released=ONE, stuck=(1,)), Replace((1,))),
        (RunState(PATIENCE, (1,), failed_at=0, interrupted_at=0, released=ONE, replaced=ONE), Wait(None)),
        (
            RunState(3, (1,), failed_at=0, interrupted_at=0, released=ONE, stuck=(1,), through_at=2.5),
            Wait(PATIENCE - 0.5),
        ),
        (
            RunState(2 + PATIENCE, (1,), failed_at=0, interrupted_at=0, released=ONE, stuck=(1,), through_at=2),
            Replace((1,)),
        ),
        (RunState(99, (1,), failed_at=0, interrupted_at=0, released=ONE, stuck=(1,), through_at=98.9), Replace((1,))),
        (RunState(9, (1,), failed_at=0, interrupted_at=0, released=ONE, cleanup=30), Wait(21)),
        (RunState(30, (1,), failed_at=0, interrupted_at=0, released=ONE, cleanup=30), Replace((1,))),
        (RunState(9, (1,), stops=(0,), interrupted_at=0, spared=(1,)), Wait(None)),
        (RunState(9, (0, 1), stops=(0,), interrupted_at=0, spared=(1,)), ReleaseRanks((0,))),
        (
            RunState(9, (0, 1), stops=(0,), interrupted_at=0, spared=(1,), released=frozenset({0}), stuck=(0,)),
            Replace((0,)),
        ),
        (RunState(9, (1,), failed_at=0, interrupted_at=0, released=ONE, pressed_again=True), Replace((1,))),
        (RunState(5, (0, 1), stops=(5,)), Interrupt((0, 1), "stopped")),
        (RunState(5, (0, 1), stops=(5, 5), interrupted_at=5), Replace((0, 1))),
        (RunState(5, (), stops=(5,)), Finish()),
        (RunState(7, (0, 1), hung_since=4, hang_after=5), Wait(2)),
        (RunState(9, (0, 1), hung_since=4, hang_after=5), Interrupt((0, 1), "hung")),
        (RunState(9, (0, 1), hung_since=4, hang_after=None), Wait(None)),
        (RunState(9, (0, 1), deadline=10), Wait(1)),
        (RunState(10, (0, 1), deadline=10, hung_since=9), Interrupt((0, 1), "late")),
        (RunState(10, (0, 1), deadline=9, failed_at=8), Interrupt((0, 1), "failed")),
    ],
)
def test_next_action(state: RunState, action: Action) -> None:
    assert next_action(state) == action


@pytest.mark.parametrize(
    ("ends", "sequences", "broken"),
    [
        (["finished", "finished"], [1, 1], False),
        (["finished", "finished"], [1, 2], False),
        (["failed", "failed"], [3, 3], False),
        (["failed", "finished"], [3, 4], True),
        (["failed", "interrupted"], [3, 3], True),
        (["died", "finished"], [3, 3], True),
    ],
)
def test_group_is_broken(ends: list[str], sequences: list[int], broken: bool) -> None:
    groups = {r: GroupFacts(1, s) for r, s in enumerate(sequences)}
    assert group_is_broken(dict(enumerate(ends)), groups) == broken


def test_a_group_whose_connections_were_shut_is_broken() -> None:
    """Also where all ranks failed at the same point."""
    groups = {r: GroupFacts(1, 5, cut=r == 1) for r in range(2)}
    assert group_is_broken({0: RankStatus.FAILED, 1: RankStatus.FAILED}, groups)


def stream(text: str, name: str = "stdout") -> dict[str, str]:
    return {"name": name, "text": text}


def test_long_output_keeps_head_tail_count_and_the_whole_on_disk(tmp_path: Path) -> None:
    out = RankOutput(0, tmp_path / "r", "0.log")
    for i in range(10_000):
        out.take("stream", stream(f"{i}\n"))
    out.close()
    item = out.items[0]
    assert isinstance(item, Text)
    head, left_out, tail = item.lines()
    ends = head[0][1], tail[-1][1]
    assert (len(head), left_out, len(tail), ends) == (HEAD, 10_000 - HEAD - TAIL, TAIL, ("0", "9999"))
    assert out.log.read_text() == "".join(f"{i}\n" for i in range(10_000))


def rank_output(tmp_path: Path, rank: int, *takes: tuple[str, dict[str, object]]) -> RankOutput:
    out = RankOutput(rank, tmp_path, f"{rank}.log")
    for kind, content in takes:
        out.take(kind, content)
    out.close()
    return out


def test_equal_ranks_are_folded_and_labels_aligned(tmp_path: Path) -> None:
    same, other = ("stream", stream("a\nb\n")), ("stream", stream("c\n"))
    outs = [rank_output(tmp_path, r, other if r == 2 else same) for r in (3, 2, 1, 0)]
    assert block(outs) == [Print("stdout", "ranks 0–1, 3 │ a\n             │ b\nrank 2       │ c\n")]


def test_ranks_that_differ_only_in_left_out_lines_are_not_folded(tmp_path: Path) -> None:
    outs = [
        rank_output(tmp_path, r, ("stream", stream("".join(f"{r if i == 500 else i}\n" for i in range(1000)))))
        for r in range(2)
    ]
    text = "".join(p.text for p in block(outs) if isinstance(p, Print))
    assert text.count("900 lines omitted") == 2


def test_results_displays_updates_and_clearing(tmp_path: Path) -> None:
    shown = {"data": {"text/html": "<b>1</b>", "text/plain": "B"}, "transient": {"display_id": "x"}}
    update = {"data": {"text/html": "<b>2</b>", "text/plain": "B"}, "transient": {"display_id": "x"}}
    result = {"data": {"text/plain": "42"}}
    out = rank_output(
        tmp_path, 0, ("stream", stream("gone")), ("clear_output", {"wait": True}), ("display_data", shown),
        ("update_display_data", update), ("execute_result", result), ("stream", stream("e\n", "stderr")),
    )  # fmt: skip
    assert block([out]) == [
        Print("stdout", "rank 0        │\n"),
        Show(update["data"], {}),
        Print("stdout", "rank 0 Out    │ 42\n"),
        Print("stderr", "rank 0 stderr │ e\n"),
    ]


FRAMES = (
    Frame("Cell In[5]", 9, "<module>", True, ((9, "train()"),)),
    Frame("/v/site-packages/torch/nn/modules/module.py", 5, "_call", False),
    Frame("/v/site-packages/torch/nn/modules/linear.py", 7, "forward", False),
)


def test_our_own_files_are_told_from_the_package_on() -> None:
    frames = (Frame("Cell In[3]", 2, "f", user=True, context=()), Frame(report.__file__, 9, "agree", False, ()))
    cause = Cause(0, 0, "raised", (Raised("ValueError", "bad", frames),))
    assert "  … 1 frame in nbddp/execution/report.py, agree" in report.failure_text(cause, [], dropped=False)


def test_failure_is_worded_with_user_frames_and_torch_folded() -> None:
    cause = Cause(2, 0, "raised", (Raised("ValueError", "bad batch\nsecond", FRAMES),))
    others = [
        RankState(0, "finished"), RankState(1, "finished"), RankState(3, "interrupted", "cell line 4"),
        RankState(2, "replaced", "cell line 4", lost=tuple(f"n{i}" for i in range(14))),
        RankState(5, "interrupted", "cell line 9", doing="waiting in all_reduce #14 for rank 2"),
        RankState(4, "running"),
    ]  # fmt: skip
    text = report.failure_text(cause, others, dropped=True)
    assert report.headline(cause) == "rank 2 raised ValueError: bad batch (cell line 9)"
    assert text.startswith("rank 2 raised ValueError (cell line 9):\n    bad batch\n    second\n  ranks 0–1: finished")
    assert text.count("bad batch") == 1
    assert "\n\nCell In[5], line 9\n---->    9 train()\n" in text
    assert "  … 2 frames, the last in torch/nn/modules/linear.py, forward" in text
    assert "  ranks 0–1: finished the cell\n  rank 3: cell line 4, still running; interrupted, variables are" in text
    assert "  rank 5: cell line 9, waiting in all_reduce #14 for rank 2; unblocked, variables are kept" in text
    assert "could not be unblocked, so it is replaced; lost: n0, n1" in text
    assert "n11 and 2 more" in text
    assert report.lost_words(["model", "opt"], ["np", "torch", "F"]) == (
        "lost: model, opt and 3 imports (np, torch, F)"
    )
    assert report.lost_words([], ["np"]) == "lost: 1 import (np)"
    assert report.lost_words([], []) == "its variables are lost"
    assert "  rank 4: still running\n" in text
    assert "Call init_process_group() again" in text


def test_what_a_headline_leaves_out_is_under_it() -> None:
    lost = (
        "[/torch/gloo/pair.cc:525] Read error [127.0.0.1]:4711: Connection reset by peer. This is typically caused by"
    )
    chain = (Raised("KeyError", "'first'"), Raised("RuntimeError", lost, FRAMES, "while handling", ("a note",)))
    text = report.failure_text(Cause(0, 0, "raised", chain), [], dropped=False)
    first, second, third, *rest = text.splitlines()
    assert first.startswith("rank 0 raised RuntimeError: Read error")
    assert "4711" not in first
    assert (second, third) == (f"    {lost}", "    a note")
    assert rest[1] == "KeyError: 'first'", "the one before it is told where it was raised"


def test_a_report_in_colours_says_the_same() -> None:
    frame = Frame("Cell In[5]", 2, "f", True, ((1, "def f():"), (2, '    return "x" or None'), (3, '"""')))
    cause = Cause(2, 0, "raised", (Raised("ValueError", "bad", (*FRAMES, frame)),))
    others = [RankState(0, "finished"), RankState(1, "finished")]
    made = [
        lambda paint: report.failure_text(cause, others, dropped=True, paint=paint),
        lambda paint: report.stopped_text(others, dropped=False, paint=paint),
        lambda paint: report.hung_text("deadlock", ["ranks wait"], "", others, dropped=False, paint=paint),
    ]
    for words in made:
        plain, painted = words(PLAIN), words(COLOURED)
        assert re.sub(r"\x1b\[[\d;]*m", "", painted) == plain
        assert painted.startswith("\x1b[1m")
        weighted = words(WEIGHTED)
        assert set(re.findall(r"\x1b\[[\d;]*m", weighted)) <= {"\x1b[1m", "\x1b[01m", "\x1b[0m", "\x1b[39;49;00m"}
        assert re.sub(r"\x1b\[[\d;]*m", "", weighted) == plain
    assert "\x1b[34mreturn\x1b" in made[0](COLOURED)
    assert "\x1b[01mreturn\x1b" in made[0](WEIGHTED)


@pytest.mark.parametrize(("colors", "no_color", "seen"), [("Linux", "", True), ("NoColor", "", False),
                                                          ("nocolor", "", False), ("neutral", "1", False)])  # fmt: skip
def test_a_report_is_in_colour_where_ipythons_tracebacks_are(
    monkeypatch: pytest.MonkeyPatch, colors: str, no_color: str, seen: bool
) -> None:
    monkeypatch.setattr(builtins, "get_ipython", lambda: SimpleNamespace(colors=colors), raising=False)
    monkeypatch.setenv("NO_COLOR", no_color)
    error = nbddp.RunStopped("stopped", report="plain")
    error.painted = "painted"
    assert error._render_traceback_() == ["painted" if seen else "plain"]
    assert nbddp.BadInput("no")._render_traceback_() == ["\x1b[31mBadInput\x1b[0m: no" if seen else "BadInput: no"]


@pytest.mark.parametrize("status", RankStatus)
def test_each_state_of_a_rank_has_words_wherever_it_is_shown(status: RankStatus) -> None:
    assert rows.STATES[status] in rows.SIGNS
    assert state_words({"status": status.value, "doing": ""}) == status.value
    assert state_words({"status": status.value, "doing": "running Cell In[3]"}) == "running Cell In[3]"


@pytest.mark.parametrize("script", [False, True])
def test_a_report_has_words_for_each_way_to_leave_a_run(script: bool) -> None:
    ways = {row.verdict for row in outcome.TABLE} | ({outcome.TERMINATED} if script else set())
    for status in (*sorted(ways), RankStatus.RUNNING):  # which is what Stop's report may say of one that was not freed
        assert report.state_words(RankState(0, status, script=script))


def test_in_a_notebook_errors_have_weight_and_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(colors="Linux", kernel=object())
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    assert nbddp.BadInput("no")._render_traceback_() == ["\x1b[1mBadInput\x1b[0m: no"]


def test_equal_rows_of_a_table_are_one() -> None:
    states = [RankState(r, "interrupted", "cell line 4", doing="waiting in barrier") for r in range(64) if r != 9]
    states.insert(9, RankState(9, "finished"))
    assert report.positions_table(states) == [
        "     ranks  line         state",
        "0–8, 10–63  cell line 4  waiting in barrier  unblocked, variables are kept",
        "         9  –            finished the cell",
    ]
    assert report.positions_table(states[8:10])[0].split() == ["rank", "line", "state"]


def test_the_lines_of_an_exit_are_not_repeated_in_part() -> None:
    """Python writes them to stderr, and so they are in the output."""
    cause = Cause(0, 0, "exit", (Raised("SystemExit", "bye\nnow", FRAMES),), code=1)
    text = report.failure_text(cause, [], dropped=False)
    assert text.splitlines()[0].startswith("rank 0 exited with code 1 (")
    assert "now" not in text


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, "died: killed by SIGKILL; the usual cause is that the machine ran out of memory"),
        (-11, "died: killed by SIGSEGV"),
        (3, "died: its process exited with code 3"),
    ],
)
def test_how_a_process_ended(code: int, words: str) -> None:
    assert report.ended(code) == words


def test_cell_keeps_its_line_numbers_and_inner_magics() -> None:
    assert cell_text.prepare("--nproc 2", "a\nb") == "# %%ddp --nproc 2\na\nb"
    assert cell_text.prepare("", "%%time\nx") == "%%time\nx"
    assert cell_text.prepare("", "\n    a = 1\n\n    if a:\n        b") == "# %%ddp\n\na = 1\n\nif a:\n    b"
    assert cell_text.prepare("-o x", "a", ["", "%%time"]) == "#\n# %%time\n# %%ddp -o x\na"
    assert cell_text.rows_above("\n%%time\n%%ddp -o x\n\na\n\n", "\na\n") == ["", "%%time"]
    assert (
        cell_text.rows_above("%%ddp\na", "a")
        == cell_text.rows_above("%%time\n%%ddp\nb", "a")
        == cell_text.rows_above("", "a")
        == []
    )


def test_values_that_cannot_travel_say_why() -> None:
    class Bad:
        def __repr__(self) -> str:
            raise ValueError("no")

        def __reduce__(self) -> str:
            raise TypeError("stays here")

    value = pickling.unpack(pickling.pack_or_words(Bad()))
    assert repr(value) == "<Bad whose repr raises ValueError>  (not sent: TypeError: stays here)"
    assert pickling.unpack(pickling.pack_or_words([1, lambda: 3]))[1]() == 3


def test_an_answer_of_our_own_has_no_repr_made_of_it() -> None:
    class Steps:
        def __repr__(self) -> str:
            raise AssertionError("nobody reads it")

    assert type(pickling.unpack(pickling.pack_answer(Steps()))).__name__ == "Steps"
    assert repr(pickling.unpack(pickling.pack_answer(threading.Lock()))).startswith("  (not sent: TypeError")


def test_values_by_rank_are_a_sequence_with_a_readable_repr() -> None:
    some = RankValues({2: "b", 0: "a", 3: "b"})
    assert some.by_rank() == {0: "a", 2: "b", 3: "b"}
    assert (some[2], list(some), some.ranks) == ("b", ["a", "b", "b"], (0, 2, 3))
    assert repr(some) == "rank 0    │ 'a'\nranks 2–3 │ 'b'"
    with pytest.raises(IndexError, match="rank 1 has no value here; ranks 0, 2–3 have"):
        some[1]
    with pytest.raises(IndexError, match="rank -9 has no value here"):
        some[-9]
    assert (some[-1], list(reversed(some))) == ("b", ["b", "b", "a"])
    assert (some.index("b"), some.index("b", 3), "a" in some) == (2, 3, True)
    with pytest.raises(ValueError, match="no rank has the value 'c'"):
        some.index("c")


def test_text_is_readable_on_every_fill() -> None:
    assert all(contrast(fill, PAPER) >= 4.5 for fill in FILLS)
    assert contrast(INK, FRAME) >= 4.5
    assert contrast(MUTED, FRAME) >= 4.5


def test_table_is_text_and_escaped_html() -> None:
    table = Table(("rank", "state"), [(0, "<idle>"), (10, "x")], title="pool")
    assert repr(table) == "pool\nrank  state\n   0  <idle>\n  10  x"
    assert "&lt;idle&gt;" in table._repr_html_()
    assert '<td style="text-align: right">10</td>' in table._repr_html_()


def test_quantities_end_at_the_right_and_their_units_begin_on_one_line() -> None:
    rows = [("a", "272 MiB", "1.20 s", "94 %"), ("b 2", "–", "412 µs", "<0.1 %"), ("c", "1.2 GiB", "12.3 ms", "3.4 %")]
    table = Table(("name", "memory", "time", "share"), rows)
    assert repr(table).splitlines() == [
        "name   memory     time   share",
        "a     272 MiB  1.20 s     94 %",
        "b 2         –   412 µs  <0.1 %",
        "c     1.2 GiB  12.3 ms   3.4 %",
    ]
    assert '<td style="text-align: right">272&nbsp;MiB</td>' in table._repr_html_()


@pytest.mark.parametrize("words", ["0 (simulated)", "2.13.0", "3 of 4", "12 apples", "cuda:0", "–"])
def test_words_with_numbers_in_them_are_no_numbers(words: str) -> None:
    assert not is_numeric([words], [words])
