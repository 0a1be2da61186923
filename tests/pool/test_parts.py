"""A pool in which capabilities have no part still runs cells."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nbddp.errors import BadInput, WorkerFailed
from nbddp.execution.execution import Execution
from nbddp.output.buffer import VIEW, Display, Text
from nbddp.output.screens import NullScreen
from nbddp.pool import state
from nbddp.pool.pool import WorkerPool

SHOWN = """
import ipywidgets
display(ipywidgets.IntProgress(3))
print("through")
"""


@pytest.fixture(scope="module")
def alone() -> Iterator[WorkerPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "rows", lambda: ())
        pool = WorkerPool(nproc=2)
    with pool:
        yield pool


def test_a_cell_runs_and_a_failure_is_told(alone: WorkerPool) -> None:
    assert list(alone.run_cell("6 * 7", want_value=True, screen=NullScreen())) == [42, 42]
    with pytest.raises(WorkerFailed, match="no good"):
        alone.run_cell("raise ValueError('no good')", screen=NullScreen())


def test_a_widget_is_what_its_bundle_says(alone: WorkerPool) -> None:
    alone.run_cell(SHOWN, screen=NullScreen())
    assert alone.last_run is not None
    shown, text = alone.last_run.outputs[0].items
    assert isinstance(shown, Display)
    assert VIEW not in shown.data
    assert shown.data["text/plain"].startswith("IntProgress(")
    assert isinstance(text, Text)
    assert text.lines_of("stdout") == ["through"]


def test_a_breakpoint_says_that_nobody_can_type(alone: WorkerPool) -> None:
    with pytest.raises(WorkerFailed, match="breakpoint"):
        alone.run_cell("breakpoint()", screen=NullScreen())


def test_what_a_part_has_a_run_hear_is_let_go_of_though_another_part_refuses_the_run(alone: WorkerPool) -> None:
    closed: list[str] = []

    class Poller:
        def close(self) -> None:
            closed.append("closed")

    def refuse(run: Execution) -> None:
        run.events.hear(Poller())  # type: ignore[arg-type]
        raise BadInput("no such folder")

    begins = alone.life.parts.run_begins
    begins.append(refuse)
    try:
        with pytest.raises(BadInput, match="no such folder"):
            alone.run_cell("1", screen=NullScreen())
    finally:
        begins.remove(refuse)
    assert closed == ["closed"]
