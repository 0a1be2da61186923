"""The table of capabilities: each command is declared once, and the core knows those of capabilities by it alone."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from nbddp import capabilities
from nbddp.capabilities.completion.lines import complete_command
from nbddp.capabilities.slurm import allocation
from nbddp.capabilities.terminal import main as terminal
from nbddp.errors import BadInput
from nbddp.notebook import commands
from nbddp.notebook.commands import OWN, known, overview, parse_command
from nbddp.pool.pool import WorkerPool
from nbddp.protocol.capability import Capability, Command, load
from tests.places import ROOT

ADDED = [command for row in capabilities.ROWS for command in row.commands]
CORE = [ROOT / "nbddp" / "__init__.py", *(ROOT / "nbddp" / "notebook").glob("*.py")]
MEANT_OTHERWISE = {"status: memory"}  # a column of the table
TARGETS = ("notebook", "terminal", "grammar", "parse", "pasted")


def test_each_command_is_declared_once() -> None:
    declared = Counter(command.name for command in (*OWN, *ADDED))
    assert [name for name, count in declared.items() if count > 1] == []
    assert list(known()) == [line.split()[1] for line in overview().splitlines()[1:-2]]
    assert {command.after for command in ADDED} <= {"", *declared}


def test_no_file_of_the_core_names_a_command_of_a_capability() -> None:
    names = {command.name for command in ADDED}
    for path in CORE:
        texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        found = names & {text for text in texts if isinstance(text, str)}
        assert {f"{path.stem}: {name}" for name in found} <= MEANT_OTHERWISE


@pytest.mark.parametrize("row", capabilities.ROWS, ids=lambda row: row.name)
def test_a_row_names_what_is_in_its_folder(row: Capability) -> None:
    assert importlib.util.find_spec(f"nbddp.capabilities.{row.name}")
    own = [*row.names.values(), *row.methods.values(), *row.public.values()]
    own += [row.part.target] if row.part is not None else []
    own += [option.shows for option in row.options if option.shows]
    own += [target for c in row.commands for field in TARGETS if (target := getattr(c, field))]
    there = row.on_agent
    own += [*there.ops.values(), *there.starts.values()]
    own += filter(None, [there.warm, there.begins, there.succeeds, row.agents, row.waits, row.main])
    own += row.terminal.values()
    for target in own:
        assert target.startswith((f"nbddp.capabilities.{row.name}.", "nbddp.notebook.commands:")), target
        assert callable(load(target)), target


@pytest.mark.parametrize("command", OWN, ids=lambda command: command.name)
def test_the_commands_of_every_pool_have_handlers(command: Command) -> None:
    assert {name for row in capabilities.ROWS for name in row.terminal} <= {own.name for own in OWN}
    for target in filter(None, (getattr(command, field) for field in TARGETS)):
        assert callable(load(target)), target


def test_type_checkers_see_what_the_rows_add() -> None:
    tree = ast.parse(inspect.getsource(capabilities))
    (typed,) = [node for node in tree.body if isinstance(node, ast.If)]
    classes = [typed, *(node for node in typed.body if isinstance(node, ast.ClassDef))]
    seen = {
        f"{getattr(of, 'name', '')}.{n.targets[0].id}": ast.unparse(n.value)  # type: ignore[attr-defined]
        for of in classes for n in of.body if isinstance(n, ast.Assign)
    }  # fmt: skip
    rows = capabilities.ROWS
    names = [name for row in rows for name in row.names]
    assert ast.literal_eval(seen.pop(".__all__")) == sorted([*names, *capabilities.PACKAGES])
    methods = {f"PoolMethods.{name}": target for row in rows for name, target in row.methods.items()}
    public = {f"PublicMethods.{n}": f"Method({t})" for row in rows for n, t in {**row.methods, **row.public}.items()}
    # as functions: a `Method` would lose which values a function gives
    public |= {name: public[name][7:-1] for name in ("PublicMethods.call", "PublicMethods.run")}
    declared = {name: target.replace(":", ".") for name, target in {**methods, **public}.items()}
    assert seen == {name: target for name, target in declared.items() if "._" not in name}


def test_methods_of_rows_are_methods_of_a_pool() -> None:
    """With their words and arguments, on the class and on an object, and Tab offers them."""
    pool = WorkerPool(2)
    for row in capabilities.ROWS:
        for name, target in row.methods.items():
            assert name in dir(pool)
            assert getattr(WorkerPool, name) is load(target)
            method = getattr(pool, name)
            assert method.__self__ is pool
            if not name.startswith("_"):
                assert (method.__name__, method.__doc__) == (name, load(target).__doc__)
    assert str(inspect.signature(pool.sizes)).startswith("(*names: 'str', ranks: ")
    assert not hasattr(pool, "timing")
    pool.close()


@pytest.mark.parametrize("gone", capabilities.ROWS, ids=lambda row: row.name)
def test_without_its_row_a_capability_is_not_known(gone: Capability, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "rows", lambda: tuple(row for row in capabilities.ROWS if row is not gone))
    known.cache_clear()
    try:
        names = {command.name for command in gone.commands}
        assert set(known()) == {command.name for command in (*OWN, *ADDED)} - names
        assert parse_command("start").name == "start"
        assert complete_command("") == list(known())
        for name in names:
            with pytest.raises(BadInput, match=f"%ddp has no subcommand '{name}'"):
                parse_command(name)
    finally:
        known.cache_clear()


def test_a_terminal_shows_and_ends_what_earlier_kernels_have_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("NBDDP_RUNTIME_DIR", str(tmp_path))
    left = [allocation.KeptAllocation(tmp_path, {"job": job}) for job in (12, 34)]
    monkeypatch.setattr(allocation.KeptAllocation, "end", lambda one: f"Slurm job {one.name} released")
    monkeypatch.setattr(allocation.KeptAllocation, "left", 600.0)
    assert terminal.detached() == []
    monkeypatch.setattr(allocation, "kept", lambda: left)

    def said(*words: str) -> list[str]:
        assert terminal.main(words) == 0
        return capsys.readouterr().out.splitlines()

    rows = [
        f"Slurm job {n} is kept for the next kernel, 10m left; python -m nbddp stop {n} releases it" for n in (12, 34)
    ]
    assert said("status") == rows
    assert said("status", "34") == rows[1:]
    assert said("stop", "12") == ["Slurm job 12 released"]
    assert said("stop") == ["Slurm job 12 released", "Slurm job 34 released"]
    assert terminal.main(["status", "56"]) == 2


def test_a_terminal_without_a_character_shows_another_in_its_place() -> None:
    env = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-m", "nbddp", "start", "--help"], env=env, capture_output=True, check=True)
    assert b"NCCL_DEBUG, ?" in done.stdout
    assert done.stderr == b""
