"""The prompt for stopped ranks where no panel is open, and the one after a failure: tables for the pure part, and a
real kernel whose input requests are answered. Terminals are in test_terminals."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nbddp.capabilities.debugger import prompt as debugger_prompt
from nbddp.capabilities.debugger.command import PostMortem
from nbddp.capabilities.debugger.messages import Stopped
from nbddp.capabilities.debugger.transcript import Transcripts, TypedLine, chosen, folded, read
from nbddp.deadlock.positions import Position
from nbddp.errors import BadInput, Cause, Frame, Raised, RankStatus
from nbddp.launch.topology import rank_words

# -- tables ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("p x", TypedLine("p x")),
        ("  n ", TypedLine("n")),
        ("@1 p x + 1", TypedLine("p x + 1", (1,))),
        ("@0,2-3 n", TypedLine("n", (0, 2, 3))),
        ("@2", TypedLine("", (2,))),
        ("@all", TypedLine("", ())),
        ("@all c", TypedLine("c", ())),
        ("", TypedLine("")),
    ],
)
def test_a_line_names_ranks_as_the_option_does(typed: str, line: TypedLine) -> None:
    assert read(typed) == line


@pytest.mark.parametrize("typed", ["@", "@x p y", "@3-1 p y", "@none n", "@ 1 n"])
def test_a_line_that_names_no_ranks_is_refused_with_what_to_write(typed: str) -> None:
    with pytest.raises(BadInput, match="@1 p x, @0,2-3 p x or @all p x"):
        read(typed)


def test_a_line_goes_to_those_that_wait_for_one() -> None:
    assert chosen([0, 1, 3], None) == chosen([0, 1, 3], ()) == [0, 1, 3]
    assert chosen([0, 1, 3], (1, 2)) == [1]
    with pytest.raises(BadInput, match=r"^rank 2 cannot take a line; stopped in the debugger: ranks 0–1, 3$"):
        chosen([0, 1, 3], (2,))
    with pytest.raises(BadInput, match=r"^no rank waits in a debugger$"):
        chosen([], None)


def test_equal_answers_are_shown_once() -> None:
    found = folded({2: ["a"], 0: ["a"], 1: ["b", "c"], 3: [], 4: ["a"]})
    shown = [(rank_words(ranks), *lines) for ranks, lines in found]
    assert shown == [("ranks 0, 2, 4", "a"), ("rank 1", "b", "c")]


CELL = Frame("Cell In[2]", 9, "<module>", True, ((9, "train(3)"),))
WITHIN = Frame("Cell In[2]", 4, "train", True, ((3, "def train(n):"), (4, "    1 / n")), (("n", "0"), ("w", "[1]")))
DEAD = Cause(1, 0, "raised", (Raised("E", "m", (CELL, Frame("torch.py", 1, "f", False), WITHIN)),))


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        (["p n"], "0"),
        (["n"], "0"),
        (["w"], "[1]"),  # pdb's own command comes before a name
        (["p n + 1"], "n was 0; its value was released with the frame, so expressions cannot use it"),
        (["p m"], "on the rank: m"),
        (["u", "n"], "on the rank: n"),
        (["u", "u"], "this is the oldest frame"),
        (["u", "d", "d"], "this is the newest frame"),
        (["a"], "n = 0\nw = [1]"),
        (["u", "a"], "no variables of this frame are known"),
        (["p"], "on the rank: p"),
        ([""], ""),
        (["q"], None),
    ],
)
def test_after_a_failure_words_are_of_the_frame_and_expressions_of_the_rank(typed: Sequence[str], answer: str) -> None:
    dead = PostMortem(DEAD, lambda text: f"on the rank: {text}")
    found = [dead.answer(line) for line in typed][-1]
    if typed == ["w"]:
        answer = "  cell line 9: train(3)\n> cell line 4, in train: 1 / n"
    assert found == answer


class Typist:
    """A keyboard whose questions are kept, and run whose ranks are moved by hand."""

    def __init__(self) -> None:
        self.open, self.asked, self.debugged, self.positions = False, list[str](), Transcripts(), dict[int, Position]()
        self.looked_at, self.sent = 0.0, list[tuple[tuple[int, ...], str]]()

    def ask(self, prompt: str, complete: object) -> None:
        self.open = True
        self.asked.append(prompt)

    def hear(self, descriptor: int, seconds: float | None) -> str | None:
        raise AssertionError("lines are typed by `type`")

    def hide(self) -> None: ...
    def show(self) -> None: ...

    def withdraw(self) -> None:
        self.open = False

    def running(self) -> tuple[int, ...]:
        return (0, 1)

    def send_line(self, ranks: Sequence[int], line: str) -> None:
        self.sent.append((tuple(ranks), line))
        self.debugged.sent(ranks, line)

    def stop(self) -> None: ...
    def names(self, rank: int, text: str, hear: object) -> None: ...

    def says(self, rank: int, text: str, stopped: bool = True) -> None:
        self.debugged.heard(rank, Stopped(stopped, text, ("Cell In[2]", 3, "f")))


def test_a_question_waits_for_ranks_that_make_a_step_and_for_none_that_wait_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr(debugger_prompt.time, "monotonic", lambda: clock[0])
    by = Typist()
    prompt = debugger_prompt.Prompt(by, by)
    by.debugged.views["prompt"] = prompt.told

    def look() -> float | None:
        return prompt.look(lambda: None, over=False)

    def types(line: str) -> None:
        by.open = False
        prompt._take(line)

    assert look() is None, "no rank has stopped"
    by.says(0, "here")
    assert look() == debugger_prompt.PATIENCE, "the other rank may stop as well"
    by.says(1, "here")
    assert (look(), by.asked) == (None, ["ranks 0–1 ddp> "])
    types("n")
    by.says(0, "", stopped=False)
    by.says(0, "there")
    assert look() == debugger_prompt.STEP
    by.positions[1] = Position(1, RankStatus.BLOCKED)
    assert look() == debugger_prompt.STEP, "that was seen before the step"
    clock[0], by.looked_at = 100.2, 100.1
    assert (look(), by.asked[-1]) == (None, "rank 0 ddp> ")
    types("@0 n")
    by.says(0, "on")
    assert look() == debugger_prompt.STEP, "rank 1 still makes its step, and may be free by now"
    clock[0] += debugger_prompt.STEP + 0.1
    assert (look(), len(by.asked)) == (None, 3)
    types("c")
    by.says(0, "", stopped=False)
    assert (look(), by.open) == (None, False)
    assert by.sent == [((0, 1), "n"), ((0,), "n"), ((0,), "c")]
