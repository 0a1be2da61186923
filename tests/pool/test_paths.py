"""Which files of the package a warm cell enters, a failure's report, and the figure of a step: short ways to read.

`python -m tests.house.measures --paths --files` prints them, each with the function that led there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nbddp.launch.options import LaunchSpec
from nbddp.pool.host_source import HostSource
from tests import warm
from tests.house import measures
from tests.places import ROOT
from tests.waiting import until

WAYS = json.loads((ROOT / "tests" / "house" / "paths.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, dict[str, str]]]:
    """Trip → side → file → the function that led there. A process of its own: all its threads are profiled."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.house.measures", "--paths", "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("side", [measures.NOTEBOOK, measures.RANK])
@pytest.mark.parametrize("trip", measures.TRIPS)
def test_no_other_file_is_on_the_way(found: dict[str, dict[str, dict[str, str]]], trip: str, side: str) -> None:
    """Who adds one shortens the way elsewhere, or adds it to tests/house/paths.json and says why."""
    known, entered = set(WAYS[trip][side]), found[trip][side]
    new = [f"{file}: {came}" for file, came in entered.items() if file not in known]
    assert not new, f"{trip} enters files on {side} that it did not enter:\n" + "\n".join(new)


def test_the_ways_are_as_short_as_they_were() -> None:
    most = {
        measures.CELL: (18, 12), measures.FAILURE: (22, 24), measures.FIGURE: (35, 18),
    }  # fmt: skip
    assert {trip: tuple(len(WAYS[trip][side]) for side in sides) for trip, sides in WAYS.items()} == most


# -- a line that the pool matches already ------------------------------------------------------------


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[LaunchSpec]:
    """The lines that a pool has planned anew."""
    plans = list[LaunchSpec]()
    plan = HostSource.plan
    monkeypatch.setattr(HostSource, "plan", lambda source, spec: (plans.append(spec), plan(source, spec))[1])
    return plans


def test_a_line_is_planned_once_and_again_when_something_has_happened(
    planned: list[LaunchSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = LaunchSpec(nproc=2)
    with warm.pool(2) as pool:
        pool.ensure(line)
        planned.clear()
        assert pool.ensure(line) == pool.ensure(LaunchSpec(nproc=2)) == []
        pool.run_cell("pass")
        assert not planned
        os.kill(pool.workers[1].pid, signal.SIGKILL)
        until(lambda: not pool.workers[1].lives)
        assert pool.ensure(line) == ["rank 1 is new and empty"]
        pool.restart([0])
        assert pool.ensure(line) == pool.ensure(line) == []
        assert len(planned) == 2, "once more, since something was said"
        monkeypatch.chdir(tmp_path)
        assert pool.ensure(line) == []
        assert pool.status()["info"]["cwd"] == str(tmp_path)
        assert pool.ensure(LaunchSpec(nproc=3)) == ["pool grown from 2 to 3 workers; ranks 0–1 keep their variables"]
        assert pool.ensure(line) == ["pool shrunk from 3 to 2 workers; ranks 0–1 keep their variables"]
        assert len(planned) == 5
        for _ in range(2):  # each asks for new processes
            pids = {w.pid for w in pool.workers.values()}
            pool.ensure(LaunchSpec(nproc=2, fresh=True))
            assert not pids & {w.pid for w in pool.workers.values()}


def test_a_pool_that_has_ended_between_two_cells_is_noticed() -> None:
    with warm.pool(2) as pool:
        line = LaunchSpec(nproc=2)
        pool.ensure(line), pool.ensure(line)  # type: ignore[func-returns-value]
        os.kill(pool.agent.hello.pid, signal.SIGKILL)
        until(lambda: not pool.agent.alive)
        assert pool.ensure(line) == ["the pool has stopped with its node agent; ranks 0–1 are new and empty"]
