"""Errors of other classes show the user's frames alone in IPython, and are otherwise what they were."""

from __future__ import annotations

import builtins
import pickle
import re
import traceback
import types
from typing import Any

import pytest
from IPython.core.ultratb import AutoFormattedTB

import nbddp
from nbddp.errors import in_own_frames
from nbddp.execution.values import RankValues

VALUES = RankValues({0: "a", 1: "b"})
SLIPS = {
    "values[7]": "IndexError: rank 7 has no value here; ranks 0–1 have",
    "values[None]": "TypeError: RankValues takes a rank or a slice, not NoneType",
    "values[0.5]": "TypeError: RankValues takes a rank or a slice, not float",
    "values.index('c')": "ValueError: no rank has the value 'c'",
    "nbddp.Pool(nprok=2)": "TypeError: Pool() got an unexpected keyword argument 'nprok'; did you mean nproc?",
    "nbddp.Pool().frobnicate": "AttributeError: nbddp.Pool has no 'frobnicate'; help(nbddp.Pool) lists what it has",
    "nbddp.Pool(2).call(abs, hang=1)": "TypeError: call() got an unexpected keyword argument 'hang'",
}


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> None:
    formatter = AutoFormattedTB(mode="Context", tb_offset=0)
    monkeypatch.setattr(
        builtins, "get_ipython", lambda: types.SimpleNamespace(InteractiveTB=formatter, colors="nocolor"), raising=False
    )


def shown(line: str) -> str:
    """What IPython shows for the error of a line of a user."""
    try:
        exec(compile(f"def theirs():\n    {line}\ntheirs()", "user.py", "exec"), {"nbddp": nbddp, "values": VALUES})
    except Exception as error:
        render: Any = error
        return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(render._render_traceback_()))
    raise AssertionError(f"{line} raised nothing")


@pytest.mark.usefixtures("shell")
@pytest.mark.parametrize("line", SLIPS)
def test_a_slip_shows_the_users_frames_and_the_sentence(line: str) -> None:
    text = shown(line)
    assert SLIPS[line] in text
    assert "theirs()" in text, "the user's own frame"
    assert "/nbddp/" not in text
    assert "in_own_frames" not in text


@pytest.mark.usefixtures("shell")
def test_a_marked_error_stays_as_it_was_for_everybody_else() -> None:
    error = in_own_frames(KeyError("gone"))
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.args) == (KeyError, ("gone",))
    assert "KeyError: 'gone'" in "".join(traceback.format_exception(again))


class Frozen(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


def test_an_error_that_refuses_attributes_is_raised_all_the_same() -> None:
    assert isinstance(in_own_frames(Frozen()), Frozen)


def test_a_rank_may_be_any_whole_number() -> None:
    class Two:
        def __index__(self) -> int:
            return 1

    assert VALUES[Two()] == "b"  # type: ignore[call-overload]
