"""What a wait at a pool's start says of its seconds."""

from __future__ import annotations

import threading

import pytest

from nbddp.agent.client import AgentClient
from nbddp.capabilities.terminal.main import _print_progress
from nbddp.output.progress import StageText, StillText, counting
from nbddp.output.screens import bar_of


def test_a_wait_says_each_whole_second_once() -> None:
    said: list[str] = []
    waits = counting(said.append, "importing torch, once", "agent")
    for seconds in (0.1, 0.9, 1.0, 1.1, 1.9, 3.5, 3.6):
        waits(seconds)
    words = "importing torch, once"
    assert said == [words, f"{words} · 1 s", f"{words} · 3 s"]
    assert [type(one) for one in said] == [StageText, StillText, StillText]
    assert {one.stage for one in said if isinstance(one, StageText)} == {"agent"}
    assert f"{words} · 3 s …</span>" in bar_of(said[-1])


def test_who_waits_for_an_agent_is_told_how_long() -> None:
    agent = object.__new__(AgentClient)
    agent._changed = threading.Condition()
    told: list[float] = []
    agent.wait_until(lambda: len(told) == 3, 60, told.append)
    assert len(told) == 3, "it waits on, and looks again"
    assert sorted(told) == told
    assert told[0] > 0


def test_a_terminal_that_prints_lines_has_one_for_a_wait(capsys: pytest.CaptureFixture[str]) -> None:
    waits = counting(_print_progress, "importing torch, once", "agent")
    waits(5.0)
    assert capsys.readouterr().err == "importing torch, once\n"
