"""Parts of capabilities in a pool: made when they are needed, and called in the order of their rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from nbddp import capabilities
from nbddp.capabilities.widgets.part import WidgetsPart
from nbddp.launch.options import LaunchSpec
from nbddp.output.buffer import VIEW
from nbddp.pool.runs import have_parts, heard_by
from nbddp.protocol.capability import Capability, PoolPart, added_options
from nbddp.protocol.pool_parts import PoolParts

made: list[str] = []
told: list[str] = []


class First:
    """Hears of runs and of a kind of message, and fails if a run is bad."""

    def __init__(self, pool: Callable[[], Any]):
        made.append("first")

    def run_begins(self, run: str) -> None:
        told.append(f"first begins {run}")
        if run == "bad":
            raise ValueError(run)

    def run_ended(self, run: str) -> None:
        told.append(f"first ended {run}")

    def message(self, rank: int, kind: str, content: dict[str, Any], buffers: Sequence[Any]) -> bool:
        told.append(f"first heard {kind} of {rank}")
        return bool(content)


class Second:
    def __init__(self, pool: Callable[[], Any]):
        made.append(f"second of {pool()}")

    def run_begins(self, run: str) -> None:
        told.append(f"second begins {run}")


HERE = __name__
ROWS = [
    Capability(name="none"),
    Capability(name="one", part=PoolPart(target=f"{HERE}:First", messages=("said", "sung"))),
    Capability(name="two", part=PoolPart(target=f"{HERE}:Second", when=("start", "run"))),
]


@pytest.fixture
def parts() -> PoolParts:
    made.clear(), told.clear()  # type: ignore[func-returns-value]
    return PoolParts(lambda: "pool", ROWS)


def test_a_part_is_made_once_when_one_of_its_conditions_holds(parts: PoolParts) -> None:
    assert not made
    for condition in ("shell", "run", "start", "run"):
        parts.on(condition)
    assert made == ["second of pool"]
    assert parts.of("two") is parts.of("two")
    parts.of("one")
    assert made == ["second of pool", "first"]


def test_the_first_message_makes_who_hears_it(parts: PoolParts) -> None:
    assert parts.messages == {"said", "sung"}
    assert not parts.hear(0, "written", {"over": True})
    assert not made
    assert parts.hear(1, "sung", {"over": True})
    assert not parts.hear(0, "said", {})
    assert (made, told) == (["first"], ["first heard sung of 1", "first heard said of 0"])


def test_parts_are_called_in_the_order_of_their_rows(parts: PoolParts) -> None:
    lists = parts.run_begins, parts.run_ended
    parts.on("run")
    parts.of("one")
    with heard_by(parts, "run"):  # type: ignore[arg-type]
        told.append("goes on")
    assert told == ["first begins run", "second begins run", "goes on", "first ended run"]
    assert (parts.run_begins, parts.run_ended) == lists, "who holds a list sees who comes"
    told.clear()
    with heard_by(parts, "look", begins=False):  # type: ignore[arg-type]
        pass
    assert told == ["first ended look"]


def test_a_part_is_made_by_the_first_run_that_has_something_for_it() -> None:
    made.clear(), told.clear()  # type: ignore[func-returns-value]
    rows = [
        Capability(name="one", part=PoolPart(target=f"{HERE}:First", when=("field:logs", "died"))),
        Capability(name="two", part=PoolPart(target=f"{HERE}:Second", when=("run",))),
    ]
    ended = {True: SimpleNamespace(outcome=object()), False: SimpleNamespace(outcome=None)}
    for logs, told_us in ((None, True), ("logs", True), (None, False)):
        made.clear()
        parts = PoolParts(lambda: "pool", rows)
        have_parts(parts, SimpleNamespace(logs=logs))  # type: ignore[arg-type]
        with heard_by(parts, SimpleNamespace(ended={0: ended[told_us]}, plain=True)):  # type: ignore[arg-type]
            pass
        assert ("first" in made, "second of pool" in made) == (bool(logs) or not told_us, True)


def test_a_run_that_a_part_refuses_has_ended(parts: PoolParts) -> None:
    parts.of("one")
    with pytest.raises(ValueError, match="bad"), heard_by(parts, "bad"):  # type: ignore[arg-type]
        told.append("goes on")
    assert told == ["first begins bad", "first ended bad"]


def test_each_part_of_a_row_has_a_method_that_is_called() -> None:
    parts = PoolParts(rows=capabilities.ROWS)
    called = {name for name, of in vars(parts).items() if isinstance(of, list)} | {"message"}
    for row in capabilities.ROWS:
        if row.part is not None:
            methods = {name for name in called if hasattr(parts.of(row.name), name)}
            assert methods, row.name
            assert bool(row.part.messages) == ("message" in methods), row.name


def test_a_bar_that_has_ended_is_let_go_with_its_run() -> None:
    part, shown, run = WidgetsPart(None), {VIEW: {"model_id": "bar"}}, None  # type: ignore[arg-type]
    state = {"_model_name": "FloatProgressModel", "bar_style": "success", "value": 1, "max": 2}
    told = {"comm_id": "bar", "target_name": "jupyter.widget", "data": {"state": state}}
    assert part.message(0, "comm_open", told, ())
    assert part.display_over(shown)
    assert part.display_left(shown, True) == {"text/plain": part.display_words(shown)}
    part.run_ended(run)  # type: ignore[arg-type]
    assert part.display_words(shown) is None


def test_what_a_cell_shows_in_the_end_is_by_options_that_there_are() -> None:
    """The last option that is said comes first."""
    shown = [one.name for one in added_options("run") if one.shows]
    assert sorted(shown) == ["memory", "sanitize", "show_timings", "trace"]
    said = LaunchSpec(trace="a.json.gz", memory=True, show_timings=True).said
    assert [one.name for one in reversed(said) if one.shows] == ["trace", "memory", "show_timings"]


def test_all_parts_hear_the_end_of_a_run_and_no_error_is_lost() -> None:
    heard: list[str] = []

    def ended(name: str) -> Callable[[Any], None]:
        def hear(run: Any) -> None:
            heard.append(name)
            raise ValueError(name)

        return hear

    parts = PoolParts()
    parts.run_ended += [ended("first"), ended("second")]
    with pytest.raises(ValueError, match="second") as caught, heard_by(parts, "run"):  # type: ignore[arg-type]
        pass
    assert heard == ["first", "second"]
    assert str(caught.value.__context__) == "first"
