"""The rules of the house: imports go down, pure modules stay light, nothing is swallowed."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import places

ROOT = places.ROOT / "nbddp"
FILES = sorted(ROOT.rglob("*.py"))

# From the ground up. A room may import from itself and from those before it.
ROOMS = [
    "errors",
    "base",
    "seams",
    "plan",
    "trace",
    "agent",
    "worker",
    "trials",
    "run",
    "draw",
    "ask",
    "export",
    "pool",
    "panel",
    "front",
    "lessons",
    "teach",
    "__init__",
    "__main__",
]
HEAVY = {"torch", "IPython", "ipyparallel", "zmq", "matplotlib", "ipykernel"}
PURE = {  # rooms, or parts of one, whose modules import nothing of that
    "errors": "*", "base": "*", "seams": "__init__", "plan": "*", "trace": "*", "run": "*", "ask": "*", "export": "*",
    "pool": "change", "trials": "findings doctor", "front": "commands", "agent": "lines cause",
    "panel": "state plan page words style watched printed curves",
    "lessons": "answer tables */simulation batch_norm/norms", "teach": "__init__ submissions definitions reading marks",
}  # fmt: skip


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{a.name}" for a in node.names)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_down(room: str) -> None:
    below = ROOMS[: ROOMS.index(room) + 1]
    for path in [p for p in FILES if p.relative_to(ROOT).parts[0].removesuffix(".py") == room]:
        for target in {m.split(".")[1] for m in imports(path) if m.startswith("nbddp.")} & set(ROOMS):
            assert target in below, f"{name_of(path)} imports from {target}, which is above {room}"


def test_every_file_is_in_a_room() -> None:
    assert {p.relative_to(ROOT).parts[0].removesuffix(".py") for p in FILES} == set(ROOMS)


@pytest.mark.parametrize("room", PURE)
def test_pure_modules_import_nothing_heavy(room: str) -> None:
    folder = ROOT / room
    files = [f for part in PURE[room].split() for f in folder.glob(f"{part}.py")] or [folder.with_suffix(".py")]
    names = ", ".join(f"nbddp.{name_of(f)}" for f in files)
    code = f"import sys, {names}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_launch_from_a_terminal_imports_only_what_it_needs() -> None:
    """`python -m nbddp run` is to start in under a second: what looks at ranks, writes jobs or paints errors comes with
    the first look, job or error."""
    unneeded = {"nbddp.ask", "nbddp.draw", "nbddp.export", "nbddp.agent.main", "nbddp.worker.taken"}
    unneeded |= {"pygments.lexers", "pynvml", "matplotlib", "ipywidgets", "torch"}
    code = f"import sys, nbddp.front.cli, nbddp.front.script, nbddp.pool.pool; print(*{unneeded!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_each_library_has_its_room() -> None:
    rooms = {
        "torch": r"worker\.|seams\.|trials\.|agent\.store_host|lessons\.(exercise|waiting|worlds)|lessons\..*\.on_rank",
        "matplotlib": r"draw\.|lessons\..*\.figure",
        "ipyparallel": r"seams\.|worker\.|pool\.|agent\.|trials\.",
    }
    for path in FILES:
        for library in {m.split(".")[0] for m in imports(path)} & set(rooms):
            assert re.match(rooms[library], name_of(path)), f"{name_of(path)} imports {library}"


def test_nothing_is_swallowed() -> None:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and all(isinstance(s, ast.Pass) for s in node.body):
                broad = node.type is None or getattr(node.type, "id", "") in ("Exception", "BaseException")
                assert not broad, f"{name_of(path)} line {node.lineno}"


def test_no_fixed_port_and_no_kill_by_name() -> None:
    for path in FILES:
        text = path.read_text()
        for word in ("29500", "pkill", "killall", "pyplot"):
            assert word not in text, f"{word} in {name_of(path)}"


def test_readme_and_ci_run_the_same_tests() -> None:
    readme, script = ((ROOT.parent / name).read_text() for name in ("README.md", ".ci/run"))
    command = next(line for line in script.splitlines() if line.startswith("python3 -m venv"))
    assert command in readme


TABLES = {  # what may be asked for, and the file that has a row for each
    "agent.main:Agent.REQUESTS": "agent/main.py",
    "agent.reached:ReachedAgent.REQUESTS": "agent/reached.py",
    "agent.forkserver:ForkServer.ORDERS": "agent/forkserver.py",
    "worker.handlers:REQUESTS": "worker/handlers.py",
    "worker.questions:QUESTIONS": "worker/questions.py",
    "worker.taken:QUESTIONS": "worker/taken.py",
    "teach.examiner:Examiner.REQUESTS": "teach/examiner.py",
}
ASKED = {  # how it is asked for, and where that has its row
    r'\b(?:agent|first|far)\.(?:request|tell)\(\s*"(\w+)"': "agent.reached:ReachedAgent.REQUESTS",
    r'\bask_all\(\[.*\], "(\w+)"': "agent.reached:ReachedAgent.REQUESTS",
    r'\bpost\(\s*[\w.\[\]]+, "(\w+)"': "agent.reached:ReachedAgent.REQUESTS",
    r'\b(?:answers|_have_done)\(\s*"(\w+)"|\bRequest\("(\w+)"': "worker.handlers:REQUESTS",
    r'(?:look|question|tell|ask)\([^"]*\{"op": "(\w+)"': "worker.questions:QUESTIONS",
}


def table(name: str) -> dict[str, object]:
    module, _, path = name.partition(":")
    found = importlib.import_module(f"nbddp.{module}")
    for part in path.split("."):
        found = getattr(found, part)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("name", TABLES)
def test_each_row_is_asked_for_by_somebody(name: str) -> None:
    own = ROOT / TABLES[name]
    sources = "".join(path.read_text() for path in FILES if path != own)
    known = set(table("agent.main:Agent.REQUESTS")) if name.startswith("agent.reached") else set()
    assert [asked for asked in set(table(name)) - known if f'"{asked}"' not in sources] == [], "asked for by nobody"


@pytest.mark.parametrize("how", ASKED)
def test_what_is_asked_for_has_a_row(how: str) -> None:
    rows, found = table(ASKED[how]), set()
    for path in [
        p for p in FILES if p.relative_to(ROOT).parts[0] in ("ask", "front", "panel", "pool", "run", "trials")
    ]:
        for names in re.findall(how, path.read_text()):
            found |= {names} if isinstance(names, str) else set(filter(None, names))
    assert found
    assert found <= set(rows)


def test_nobody_is_called_by_a_name_that_is_put_together() -> None:
    for path in [p for p in FILES if name_of(p) != "seams.ipyparallel_seams"]:  # ipyparallel's streams have such names
        for node in ast.walk(ast.parse(path.read_text())):
            called = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr"
            assert not (called and isinstance(node.args[1], ast.JoinedStr)), f"{name_of(path)} line {node.lineno}"


def test_commands_and_what_the_agent_starts_have_a_row_each() -> None:
    from nbddp.agent import main
    from nbddp.front import cli
    from nbddp.front.commands import COMMANDS, TERMINAL_COMMANDS
    from nbddp.front.magics import DDPMagics

    assert set(DDPMagics.COMMANDS) == set(COMMANDS)
    assert set(cli.COMMANDS) == {*TERMINAL_COMMANDS, "help"}
    for target in main.TARGETS.values():
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name)), target
