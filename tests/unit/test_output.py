"""Output is kept in order, and the work is in proportion to what is written, whatever moves the cursor."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbddp.output.buffer import LONGEST, WIDE_HEAD, WIDE_TAIL, RankOutput, Text
from nbddp.output.layout import Print, Show, block, fold
from nbddp.output.run_output import RankOutputs
from nbddp.output.screens import NullScreen
from nbddp.output.terminal_line import TerminalLine, unstamped


@given(st.lists(st.sampled_from(["ab\n", "c", "\n\n", "d" * 30, "\r"]), max_size=30))
def test_many_lines_at_once_count_as_one_by_one(pieces: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nbddp.output.buffer.LONGEST", 50)
        whole, cut = Text(), Text()
        whole.write("stdout", "".join(pieces))
        for piece in pieces:
            cut.write("stdout", piece)
    assert (whole.print_of(), whole.lines()) == (cut.print_of(), cut.lines())


ROWS = ["a", "bcd", "\n", "\n\n", "\r", "\x1b[A\r", "\x1b[2A\r", "\x1b[9A\r", "\x1b[B\r", "\r\x1b[K"]


def screen(text: str) -> list[str]:
    """The rows of a terminal that has no end."""
    rows, at, column = [""], 0, 0
    for part in re.split(r"(\n|\r|\x1b\[\d*[ABK])", text):
        if part == "\n":
            at, column = at + 1, 0
            rows += [""] * (at == len(rows))
        elif part == "\r":
            column = 0
        elif part.endswith("K"):
            rows[at] = rows[at][:column]
        elif part.startswith("\x1b"):
            number = int(part[2:-1] or "1")
            at = max(0, at - number) if part.endswith("A") else min(len(rows) - 1, at + number)
        else:
            rows[at] = rows[at][:column] + part + rows[at][column + len(part) :]
            column += len(part)
    return [row.rstrip() for row in rows if row.strip()]


@given(st.lists(st.sampled_from(ROWS), max_size=40))
@settings(max_examples=200, deadline=None)
def test_a_cursor_that_goes_up_writes_over_what_was_there(pieces: list[str]) -> None:
    text, cut = "".join(pieces), Text()
    for character in text:
        cut.write("stdout", character)
    assert [line.rstrip() for line in cut.lines_of("stdout") if line.strip()] == screen(text)
    whole = Text()
    whole.write("stdout", text)
    assert [line.rstrip() for line in whole.lines_of("stdout") if line.strip()] == screen(text)


def test_lines_that_are_taken_back_are_told_once_beside_those_of_another_stream() -> None:
    text = Text()
    for i in range(3):
        text.write("stdout", f"step {i}\n")
        text.write("stderr", f"\n\rbar {i}")
        text.write("stderr", "\x1b[A")
    assert [line for _, line in text.lines()[0] if line] == ["step 0", "step 1", "step 2", "bar 2"]


def feeds(line: TerminalLine, n: int) -> dict[str, Callable[[], None]]:
    """Ways of writing about n pieces at a long line."""

    def each(*pieces: str) -> Callable[[], None]:
        return lambda: [line.write(piece) for _ in range(n) for piece in pieces] and None  # type: ignore[func-returns-value]

    return {
        "returns over a long line": each("\rab"),
        "backspaces": each("xy", "\b\b\b"),
        "backspaces at once": lambda: line.write("\b" * n),
        "erased to the end": each("abc\r\x1b[K"),
        "erased to the start": each("abc\x1b[1K"),
        "erased and written": each("\x1b[2K\r50%"),
        "growing": each("x"),
        "growing, and back at once": each("x", "\r", "x" * 3),
    }


@pytest.mark.parametrize("way", [*feeds(TerminalLine(), 1)])
def test_twice_the_writing_is_twice_the_work(way: str) -> None:
    """Counted in slices that are made or moved, on a line of a length that any copy of it would show."""
    work = []
    for n in (1000, 2000):
        line = TerminalLine()
        for _ in range(n):
            line.write("xxxxx")
        before = line.touched
        feeds(line, n)[way]()
        line.write("\r")
        work.append(line.touched - before)
    assert work[1] <= 2.1 * work[0]
    assert work[1] <= 12 * 2000


def test_a_progress_bar_overwrites_its_line() -> None:
    text = Text()
    for i in range(100):
        text.write("stderr", f"\r{i}% done")
    assert text.lines() == ([("stderr", "99% done")], 0, [])


def test_a_line_without_an_end_is_ended() -> None:
    text = Text()
    for _ in range(5):
        text.write("stdout", "x" * (LONGEST // 2))
    text.write("stdout", "\rend\n")
    lines = text.lines_of("stdout")
    assert [len(line) > WIDE_HEAD for line in lines] == [True, True, True]
    assert lines[2].startswith("endxxx")
    assert f"… {LONGEST - WIDE_HEAD - WIDE_TAIL:,} characters omitted …" in lines[0]


# -- the block --------------------------------------------------------------------------------------


def output(tmp_path: Path, rank: int = 0) -> RankOutput:
    return RankOutput(rank, tmp_path, held=False)


def say(out: RankOutput, *said: tuple[str, str]) -> RankOutput:
    for stream, text in said:
        out.take("stream", {"name": stream, "text": text})
    return out


def test_both_streams_of_a_rank_keep_their_order_in_the_block_and_in_the_log(tmp_path: Path) -> None:
    said = ("stdout", "a\n"), ("stderr", "b\nc\n"), ("stdout", "d"), ("stderr", "e\n"), ("stdout", "\n")
    out = say(output(tmp_path), *said)
    out.close()
    assert block([out]) == [
        Print("stdout", "rank 0        │ a\n"),
        Print("stderr", "rank 0 stderr │ b\n              │ c\n              │ e\n"),
        Print("stdout", "rank 0        │ d\n"),
    ]
    assert out.log.read_text() == "a\nb\nc\nde\n\n"


STAMPS = {
    "c10": "[W1123 06:05:5{r}.12345678{r} ProcessGroupGloo.cpp:123] Warning: the device is guessed (function guess)\n",
    "with its rank": "[rank{r}]:[W1123 06:05:5{r}.12345678{r} ProcessGroupNCCL.cpp:5023] Warning: guessed\n",
    "glog": "W1123 06:05:5{r}.123456 471{r} file.cc:12] guessed\n",
    "torch's Python": "[rank{r}]:W1123 06:05:5{r}.123000 471{r} torch/distributed/run.py:792] guessed\n",
}


@pytest.mark.parametrize("line", STAMPS.values(), ids=STAMPS)
def test_log_lines_that_differ_in_time_process_and_rank_are_shown_once(tmp_path: Path, line: str) -> None:
    outputs = [say(output(tmp_path, r), ("stderr", line.format(r=r)), ("stdout", "trained\n")) for r in range(3)]
    first, second = block(outputs)
    width = len("ranks 0–2 stderr")
    assert first == Print("stderr", f"ranks 0–2 stderr │ {line.format(r=0)}")
    note = "… 1 log line has the time and process of rank 0; those of ranks 1–2: %ddp log"
    assert isinstance(second, Print)
    assert second.text == f"{'ranks 0–2':{width}} │ trained\n{'ranks 0–2':{width}} │ {note}\n"
    alone = block(outputs[:1])
    assert "log line" not in "".join(p.text for p in alone if isinstance(p, Print)), "of one rank nothing is left out"


def test_log_lines_that_say_different_things_are_shown_by_rank(tmp_path: Path) -> None:
    said = ("[W1123 06:05:58.1 a.cpp:1] Warning: one\n", "[W1123 06:05:58.1 a.cpp:1] Warning: two\n")
    others = ("[E1123 06:05:58.1 a.cpp:1] Warning: one\n", "[W1123 06:05:58.1 a.cpp:2] Warning: one\n")
    outputs = [say(output(tmp_path, r), ("stderr", line)) for r, line in enumerate((*said, *others))]
    assert len(fold(outputs)) == 4
    assert unstamped("at 1123 06:05:58.123456 nothing of a log begins\n") == (
        "at 1123 06:05:58.123456 nothing of a log begins\n", 0,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["text/html", "image/png", "text/markdown", "text/latex"])
def test_a_rich_output_stands_under_its_label_without_the_words_for_it(tmp_path: Path, kind: str) -> None:
    out = output(tmp_path)
    data = {kind: "x", "text/plain": "<IPython.core.display.HTML object>"}
    out.take("display_data", {"data": data, "metadata": {}})
    assert block([out]) == [Print("stdout", "rank 0 │\n"), Show(data, {})]


def test_what_may_not_be_seen_has_its_words_too(tmp_path: Path) -> None:
    out = output(tmp_path)
    data = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/plain": "IntSlider(value=0)"}
    out.take("display_data", {"data": data, "metadata": {}})
    assert block([out]) == [Print("stdout", "rank 0 │ IntSlider(value=0)\n"), Show(data, {})]


# -- bars, and what is cleared ----------------------------------------------------------------------


def html(text: str, **more: object) -> dict[str, object]:
    return {"data": {"text/html": f"<pre>{text}</pre>", "text/plain": text}, "metadata": {}, **more}


def comm(ident: str, **state: str) -> dict[str, object]:
    return {"comm_id": ident, "data": {"method": "update", "state": state}}


def in_area(*messages: tuple[str, dict[str, object]]) -> list[tuple[str, dict[str, object]]]:
    """As ipywidgets' `with output:` sends it."""
    return [("comm_msg", comm("a", msg_id="1")), *messages, ("comm_msg", comm("a", msg_id=""))]


VIEW = {"application/vnd.jupyter.widget-view+json": {"model_id": "a"}, "text/plain": "Output()"}
OPENED = ("comm_open", comm("a", _model_name="OutputModel", msg_id=""))
VIEWED = ("display_data", {"data": VIEW, "metadata": {}})
BAR = [
    message for i in range(3) for message in in_area(("clear_output", {"wait": True}), ("display_data", html(f"{i}%")))
]
BEFORE, AFTER = (("stream", {"name": "stdout", "text": f"{word}\n"}) for word in ("before", "after"))
SHOWN = ["rank 0 │ before", "rank 0 │", "<pre>2%</pre>", "rank 0 │ after"]


@pytest.mark.parametrize(
    ("messages", "rows"),
    [
        ([BEFORE, OPENED, VIEWED, *BAR, AFTER], SHOWN),
        ([BEFORE, OPENED, *BAR, AFTER], SHOWN),
        ([BEFORE, OPENED, *BAR, AFTER, VIEWED], SHOWN),
        ([BEFORE, OPENED, VIEWED, *BAR, AFTER, ("comm_close", comm("a"))], ["rank 0 │ before", "rank 0 │ after"]),
        ([BEFORE, OPENED, VIEWED, *BAR, ("clear_output", {"wait": True}), AFTER], ["rank 0 │ after"]),
        ([BEFORE, ("display_data", html(""))], ["rank 0 │ before"]),
        ([OPENED, VIEWED, *in_area(BEFORE), AFTER], ["rank 0 │ before", "rank 0 │ after"]),
    ],
    ids=["shown first", "shown nowhere", "shown last", "closed", "all cleared", "empty", "text"],
)
def test_a_bar_in_an_output_widget_clears_itself_alone(
    tmp_path: Path, messages: list[tuple[str, dict[str, object]]], rows: list[str]
) -> None:
    out = output(tmp_path)
    for kind, content in messages:
        out.take(kind, content)
    found = Shown()
    found.finish([out])
    assert found.rows == rows


class Shown(NullScreen):
    def __init__(self) -> None:
        self.rows: list[str] = []

    def say(self, text: str) -> None:
        self.rows += text.splitlines()

    def finish(self, outputs: Sequence[RankOutput]) -> None:
        for piece in block(outputs):
            rich = piece.data["text/html"] if isinstance(piece, Show) else ""
            self.rows += piece.text.splitlines() if isinstance(piece, Print) else rich.splitlines()


def test_the_output_of_a_rank_is_made_once_and_by_who_asks_for_it(tmp_path: Path) -> None:
    asked: list[RankOutput] = []

    def make(rank: int) -> RankOutput:
        if not asked:  # another thread asks meanwhile, and is quicker
            asked.append(RankOutput(9, tmp_path))
            asked[0] = outputs[rank]
        return RankOutput(rank, tmp_path)

    outputs = RankOutputs([0, 2], make)
    assert (list(outputs), len(outputs), dict(outputs.made)) == ([0, 2], 2, {})
    assert outputs[2] is asked[0] is outputs[2]
    assert list(outputs.made) == [2]
    with pytest.raises(KeyError):
        outputs[1]
