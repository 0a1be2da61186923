"""What capabilities add to workers: when their parts are made and called, and what becomes of an error in one."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbddp.capabilities import ROWS
from nbddp.errors import RunFailed
from nbddp.pool.pool import WorkerPool
from nbddp.protocol.capability import Capability, RankPart, load
from nbddp.protocol.outcome import Outcome
from nbddp.protocol.run_spec import CELL, Rendezvous, RunSpec
from nbddp.worker import parts as worker_parts
from nbddp.worker.parts import HOOKS, WorkerParts
from tests.screens import Hearing

WORKER = Path(worker_parts.__file__).parent


def test_the_worker_names_no_capability() -> None:
    named = {p.name: set(re.findall(r"nbddp\.capabilities\.(\w+)", p.read_text())) for p in WORKER.glob("*.py")}
    assert {name: found for name, found in named.items() if found} == {}
    own = {word for row in ROWS for word in (row.name, *(part.name for part in row.rank))}
    attributes = {
        n for p in WORKER.glob("*.py") for n in re.findall(r"\b(?:self|kernel|worker)\.(\w+)\b", p.read_text())
    }
    assert attributes & own == set()


def targets() -> list[str]:
    """What rows name for ranks."""
    parts = [part.target for row in ROWS for part in row.rank]
    parts += [row.guard.rank for row in ROWS if row.guard]
    return [*parts, *(target for row in ROWS for target in (*row.requests.values(), *row.questions.values()))]


def test_what_rows_name_is_there() -> None:
    for target in targets():
        assert callable(load(target)), target


def test_a_process_that_forks_workers_has_imported_what_they_need() -> None:
    by_option = {part.target for row in ROWS for part in row.rank if part.when.startswith("pool:")}
    used = {target.partition(":")[0] for target in targets() if target not in by_option}
    code = "import nbddp.worker.ahead, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert used - set(done.stdout.split()) == set()


def test_a_worker_has_imported_what_answers_questions(two: WorkerPool) -> None:
    """An import in the control thread would wait for one that the main thread is in."""
    asked = {target.partition(":")[0] for row in ROWS for target in row.questions.values()}
    code = f"import sys\n[module for module in {asked!r} if module not in sys.modules]"
    assert asked
    assert list(two.run_cell(code, want_value=True, screen=Hearing())) == [[], []]


# -- when they are called ------------------------------------------------------------------------------


class Noting:
    """A part that notes what it is told, in `heard`."""

    heard: list[str]

    def __init__(self, name: str):
        self._name = name

    def begin(self, spec: RunSpec) -> None:
        self.heard.append(f"{self._name} begins {spec.run}")

    def ended(self, error: BaseException | None) -> None:
        self.heard.append(f"{self._name}'s program has ended")

    def end(self, outcome: Outcome, error: BaseException | None) -> None:
        outcome.parts[self._name] = len(self.heard)
        self.heard.append(f"{self._name} ends")


def made_by(name: str) -> Any:
    return lambda worker: Noting(name)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What parts hear that a worker of these rows has."""
    Noting.heard = []
    whens = {"first": "start", "second": "start", "asked": "option:asked", "far": "hosts", "pools": "pool:it"}
    rank = tuple(RankPart(name=name, target=name, when=when) for name, when in whens.items())
    monkeypatch.setattr(worker_parts, "rows", lambda: (Capability(name="one", rank=rank),))
    monkeypatch.setattr(worker_parts, "load", made_by)
    return Noting.heard


def test_who_begins_first_ends_last(heard: list[str]) -> None:
    parts, outcome = WorkerParts(SimpleNamespace(pool_options={}), print), Outcome(1)  # type: ignore[arg-type]
    parts.start()
    parts.begin(RunSpec(CELL, 1))
    parts.ended(None)
    parts.end(outcome, None)
    assert heard == [
        "first begins 1", "second begins 1", "second's program has ended", "first's program has ended", "second ends",
        "first ends",
    ]  # fmt: skip
    assert (outcome.parts, outcome.part_errors) == ({"second": 4, "first": 5}, ())


def test_a_part_is_made_before_the_first_run_that_needs_it(heard: list[str]) -> None:
    parts = WorkerParts(SimpleNamespace(pool_options={}), print)  # type: ignore[arg-type]
    parts.start()
    parts.begin(RunSpec(CELL, 1, Rendezvous(("a", 1), ("a", 2)), options={"asked": False}))
    assert heard == ["first begins 1", "second begins 1"]
    parts.begin(RunSpec(CELL, 2, Rendezvous(("a", 1), ("a", 2), listen="10.0.0.1")))
    parts.begin(RunSpec(CELL, 3, options={"asked": True}))
    assert heard[2:] == [
        *["first begins 2", "second begins 2", "far begins 2"],
        *["first begins 3", "second begins 3", "far begins 3", "asked begins 3"],
    ]
    with pytest.raises(KeyError):
        parts["none"]


def test_a_part_that_sleeps_hears_of_no_run_until_it_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Noting, "heard", [], raising=False)
    rank = tuple(RankPart(name=name, target=name, sleeps=name == "sleeper") for name in ("sleeper", "other"))
    monkeypatch.setattr(worker_parts, "rows", lambda: (Capability(name="one", rank=rank),))
    monkeypatch.setattr(worker_parts, "load", made_by)
    parts = WorkerParts(SimpleNamespace(pool_options={}), print)  # type: ignore[arg-type]
    parts.start()

    def run(number: int, wakes: bool = False) -> list[str]:
        Noting.heard.clear()
        parts.begin(RunSpec(CELL, number))
        for _ in range(2 * wakes):
            parts.wake("sleeper")
        parts.ended(None)
        parts.end(Outcome(number), None)
        return [text for text in Noting.heard if "sleeper" in text]

    assert run(1) == []
    awake = ["sleeper begins 2", "sleeper's program has ended", "sleeper ends"]
    assert run(2, wakes=True) == awake, "it begins amid the run"
    assert run(3) == [awake[0].replace("2", "3"), *awake[1:]]


class Recording(Noting):
    """A part that hears of runs with an option alone. `goes_on`: what `ended` answers."""

    goes_on, begins_to_the_end = False, True

    def begin(self, spec: RunSpec) -> None:
        super().begin(spec)
        if not self.begins_to_the_end:
            raise KeyboardInterrupt

    def ended(self, error: BaseException | None) -> bool:  # type: ignore[override]
        super().ended(error)
        return self.goes_on


@pytest.mark.parametrize("how", ["it ends", "it goes on", "Stop came as it began"])
def test_what_a_part_has_begun_ends_though_no_later_run_asks_for_it(
    heard: list[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    row = Capability(name="one", rank=(RankPart(name="it", target="it", hears="asked"),))
    monkeypatch.setattr(worker_parts, "rows", lambda: (row,))
    monkeypatch.setattr(worker_parts, "load", lambda name: lambda worker: Recording(name))
    monkeypatch.setattr(Recording, "goes_on", how == "it goes on")
    monkeypatch.setattr(Recording, "begins_to_the_end", how != "Stop came as it began")
    parts = WorkerParts(SimpleNamespace(pool_options={}), print)  # type: ignore[arg-type]
    parts.start()
    with suppress(KeyboardInterrupt):
        parts.begin(RunSpec(CELL, 1, options={"asked": True}))
        parts.ended(None)
    parts.end(Outcome(1), None)
    heard.clear()
    monkeypatch.setattr(Recording, "goes_on", False)
    for run in (2, 3):
        parts.begin(RunSpec(CELL, run))
        parts.ended(None)
        parts.end(Outcome(run), None)
    assert heard == ([] if how == "it ends" else ["it's program has ended"])


def test_a_part_of_a_pools_option_is_made_for_pools_that_have_it(heard: list[str]) -> None:
    worker = SimpleNamespace(pool_options={"it": "so"})
    parts = WorkerParts(worker, print)  # type: ignore[arg-type]
    parts.start()
    parts.begin(RunSpec(CELL, 1))
    assert heard == ["first begins 1", "second begins 1", "pools begins 1"]


def test_no_program_runs_without_the_part_of_a_pools_option(heard: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(target: str) -> Any:
        raise RuntimeError("of another layout")

    worker = SimpleNamespace(pool_options={"it": "so"})
    parts = WorkerParts(worker, lambda text: None)  # type: ignore[arg-type]
    monkeypatch.setattr(worker_parts, "load", refuses)
    parts.start()
    for run in (1, 2):
        with pytest.raises(RuntimeError, match="pools could not begin: RuntimeError: of another layout"):
            parts.begin(RunSpec(CELL, run))
        parts.end(Outcome(run), None)


def test_a_part_that_is_asked_for_and_cannot_be_made_is_an_error_of_each_run(
    heard: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(target: str) -> Any:
        raise ImportError(f"no module {target}")

    log: list[str] = []
    parts = WorkerParts(SimpleNamespace(pool_options={}), log.append)  # type: ignore[arg-type]
    monkeypatch.setattr(worker_parts, "load", refuses)
    for run in (1, 2):
        with pytest.raises(RuntimeError, match="asked could not begin: ImportError: no module asked"):
            parts.begin(RunSpec(CELL, run, options={"asked": True}))
        outcome = Outcome(run)
        parts.end(outcome, None)
        assert outcome.part_errors == (), "the run's own error says it"
    assert ["Traceback" in text for text in log] == [True, True]


# -- an error in one ---------------------------------------------------------------------------------

BROKEN = """
class Broken:
    def fail(self, *args): raise ValueError("boom")
Broken.{hook} = Broken.fail
get_ipython().kernel.parts.add("broken", Broken())
"""
MENDED = """
hooks = get_ipython().kernel.parts._hooks
for hook in hooks: hooks[hook] = [(name, method) for name, method in hooks[hook] if name != "broken"]
"""
NOTE = "broken failed on ranks 0–1 (ValueError: boom); the program itself is not affected"


@pytest.mark.parametrize("hook", HOOKS[:3])
def test_an_error_in_a_part_is_reported_in_one_line_and_the_cell_is_what_it_is(two: WorkerPool, hook: str) -> None:
    two.run_cell(BROKEN.format(hook=hook), screen=Hearing())
    try:
        screen = Hearing()
        assert list(two.run_cell("6 * 7", want_value=True, screen=screen)) == [42, 42]
        assert screen.said == [NOTE]
        screen = Hearing()
        with pytest.raises(RunFailed, match="ZeroDivisionError"):
            two.run_cell("1 / 0", screen=screen)
        assert screen.said == [NOTE]
    finally:
        two.run_cell(MENDED, screen=Hearing())
    screen = Hearing()
    assert list(two.run_cell("6 * 7", want_value=True, screen=screen)) == [42, 42]
    assert screen.said == []
