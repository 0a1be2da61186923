"""The rules of the house: imports go down, pure modules stay light, nothing is swallowed."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from nbddp import capabilities
from tests import places

ROOT = places.ROOT / "nbddp"
FILES = sorted(ROOT.rglob("*.py"))

HEAVY = {"torch", "IPython", "ipyparallel", "zmq", "matplotlib", "ipykernel"}
PURE = {  # folder → its modules that import nothing of that
    "": "errors export",
    "agent": "child_logs stop warning_filters",
    "analysis": "*",
    "capabilities": "__init__",
    "capabilities/attached": "clusters",
    "capabilities/background": "part",
    "capabilities/bench": "command result",
    "capabilities/by_rank": "*",
    "capabilities/capacity": "part",
    "capabilities/collectives": "breakdown command instances program",
    "capabilities/compare": "command replicas",
    "capabilities/completion": "lines",
    "capabilities/debugger": "command messages prompt sender stdin transcript",
    "capabilities/doctor": "command examination findings seams",
    "capabilities/env": "options part",
    "capabilities/export": "cells command names options program sbatch target_support targets "
    "torchrun_line",
    "capabilities/forecast": "command cost scale",
    "capabilities/hosts": "command names reachability report sync_rules via",
    "capabilities/lint": "*",
    "capabilities/lint/rules": "*",
    "capabilities/memory": "command history parts timeline",
    "capabilities/panel": "curves document output page plan rows state",
    "capabilities/prove": "command judge plan proof",
    "capabilities/sanitizer": "command findings hints kinds_data kinds_drift kinds_gradients kinds_means kinds_modes "
    "options part recording rules table view",
    "capabilities/scripts": "command failures grammar launch logs part program torchrun",
    "capabilities/simulated_gpus": "advice cards options part",
    "capabilities/slurm": "command commands options",
    "capabilities/spool": "copies on_agent part",
    "capabilities/stale_modules": "part",
    "capabilities/timings": "analysis command document text",
    "capabilities/topology": "boxes command",
    "capabilities/trace": "command merge options",
    "capabilities/widgets": "*",
    "compat": "clock system",
    "compat/extra": "probes system versions",
    "deadlock": "*",
    "execution": "*",
    "figures": "html result table",
    "figures/document": "*",
    "grading": "definitions gradebook reader submissions",
    "launch": "*",
    "lessons/framework": "answer tables",
    "notebook": "commands history pool_commands",
    "output": "*",
    "pool": "change",
    "protocol": "capability codec outcome position request",
    "teach": "__init__",
    "lessons": "*/simulation l07_batch_norm/norms",
}  # fmt: skip


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{a.name}" for a in node.names)


@pytest.fixture(scope="module")
def sources() -> dict[Path, list[ast.AST]]:
    """Of each file the imports, handlers of exceptions and calls, which are read once for all tests."""
    kinds = (ast.Import, ast.ImportFrom, ast.ExceptHandler, ast.Call)
    return {path: [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, kinds)] for path in FILES}


EACH_IN_A_CHILD = """
import importlib, json, os, sys
for room, names in json.loads(sys.argv[1]).items():
    if not os.fork():
        for name in names:
            importlib.import_module(name)
        print(json.dumps([room, [name for name in sys.argv[2:] if name in sys.modules]]), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def heavy() -> dict[str, list[str]]:
    """For each room the heavy libraries that its pure modules import."""
    names = {}
    for room, parts in PURE.items():
        names[room] = [f"nbddp.{name_of(f)}" for part in parts.split() for f in (ROOT / room).glob(f"{part}.py")]
        assert names[room]
    command = [sys.executable, "-c", EACH_IN_A_CHILD, json.dumps(names), *HEAVY]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("room", PURE)
def test_pure_modules_import_nothing_heavy(heavy: dict[str, list[str]], room: str) -> None:
    assert heavy[room] == []


def test_a_launch_from_a_terminal_imports_only_what_it_needs() -> None:
    """`python -m nbddp run` is to start in under a second: what looks at ranks, writes jobs or paints errors comes with
    the first look, job or error."""
    unneeded = {"nbddp.figures.figure", "nbddp.capabilities.export.program", "nbddp.capabilities.export.sbatch"}
    unneeded |= {"nbddp.agent.server", "nbddp.capabilities.attached.engine_side"}
    unneeded |= {f"nbddp.{name_of(path)}" for path in FILES if path.name == "command.py"}
    unneeded |= {"pygments.lexers", "pynvml", "matplotlib", "ipywidgets", "torch"}
    names = "nbddp.capabilities.terminal.main, nbddp.capabilities.scripts.terminal, nbddp.pool.pool"
    code = f"import sys, {names}; print(*{unneeded!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_each_library_has_its_room(sources: dict[Path, list[ast.AST]]) -> None:
    rooms = {
        "torch": r"worker\.|compat\.|agent\.store_host|.*\.(on_rank|on_worker|engine_side|probe)"
        r"|protocol\.pickling|capabilities\.(private|debugger|memory)\.|lessons\.framework\.",
        "matplotlib": r"figures\.|.*\.figure|capabilities\.topology\.",
        "ipyparallel": r"(compat|deadlock\.on_rank|worker|pool|agent)\."
        r"|capabilities\.(attached|doctor|hosts|widgets)\.",
    }
    for path, nodes in sources.items():
        for library in {m.split(".")[0] for m in imports(nodes)} & set(rooms):
            assert re.match(rooms[library], name_of(path)), f"{name_of(path)} imports {library}"


def test_nothing_is_swallowed(sources: dict[Path, list[ast.AST]]) -> None:
    for path, nodes in sources.items():
        for node in nodes:
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


FAR = "capabilities.hosts.remote_agent:RemoteAgent.REQUESTS"
TABLES = {  # what may be asked for, and the file that has a row for each
    "agent.server:NodeAgent.REQUESTS": "agent/server.py",
    FAR: "capabilities/hosts/remote_agent.py",
    "capabilities:ROWS": "capabilities/__init__.py",
    "grading.sandbox.forkserver:ForkServer.ORDERS": "grading/sandbox/forkserver.py",
    "worker.requests:known_requests": "worker/requests.py",
    "worker.requests:known_questions": "worker/requests.py",
    "capabilities.attached.engine_side:ASKED": "capabilities/attached/engine_side.py",
    "capabilities.attached.engine_side:QUESTIONS": "capabilities/attached/engine_side.py",
    "capabilities.attached.engine_side:REQUESTS": "capabilities/attached/engine_side.py",
    "grading.examiner:Examiner.REQUESTS": "grading/examiner.py",
}
ASKED = {  # how it is asked for, and where that has its row
    r'\b(?:agent|first|far)\.(?:request|tell)\(\s*"(\w+)"': FAR,
    r'\bask_all\(\[.*\], "(\w+)"': FAR,
    r'\bpost\(\s*[\w.\[\]]+, "(\w+)"': FAR,
    r'\b(?:answers|_have_done)\(\s*"(\w+)"|\b(?:Request|RunSpec)\("(\w+)"': "worker.requests:known_requests",
    r'\bQuestion\.of\(\s*"(\w+)"': "worker.requests:known_questions",
}


def table(name: str) -> dict[str, object]:
    if name == "capabilities:ROWS":  # what they add to agents
        return {op: target for row in capabilities.ROWS for op, target in row.on_agent.ops.items()}
    module, _, path = name.partition(":")
    found = importlib.import_module(f"nbddp.{module}")
    for part in path.split("."):
        found = getattr(found, part)
    return found() if callable(found) else found  # type: ignore[return-value]


@pytest.mark.parametrize("name", TABLES)
def test_each_row_is_asked_for_by_somebody(name: str) -> None:
    own = ROOT / TABLES[name]
    sources = "".join(path.read_text() for path in FILES if path not in (own, ROOT / "capabilities/__init__.py"))
    known = set(table("agent.server:NodeAgent.REQUESTS")) if name == FAR else set()
    assert [asked for asked in set(table(name)) - known if f'"{asked}"' not in sources] == [], "asked for by nobody"


@pytest.mark.parametrize("how", ASKED)
def test_what_is_asked_for_has_a_row(how: str) -> None:
    rows, found = {**table(ASKED[how]), **(table("capabilities:ROWS") if ASKED[how] == FAR else {})}, set()
    for path in [p for p in FILES if p.relative_to(ROOT).parts[0] not in ("lessons", "teach", "grading", "worker")]:
        for names in re.findall(how, path.read_text()):
            found |= {names} if isinstance(names, str) else set(filter(None, names))
    assert found
    of_ranks = ASKED[how].startswith("worker.")
    more = [table(name) for name in TABLES if of_ranks and name.startswith("capabilities.attached")]  # engines' own
    assert found <= set(rows).union(*more)


def test_nobody_is_called_by_a_name_that_is_put_together(sources: dict[Path, list[ast.AST]]) -> None:
    for path in [p for p in FILES if name_of(p) != "compat.ipyparallel"]:  # ipyparallel's streams have such names
        for node in sources[path]:
            called = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr"
            assert not (called and isinstance(node.args[1], ast.JoinedStr)), f"{name_of(path)} line {node.lineno}"


def test_what_the_agent_starts_is_there() -> None:
    from nbddp.agent import server

    for target in server.TARGETS.values():
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name)), target


# -- names of what stands on one page --------------------------------------------------------------

NAME = re.compile(r"(?<![\w/-])nbddp-[a-z][\w-]*")
MEANT = {  # name → why two folders have it
    "nbddp-live": "tabs are kept apart while the page around them is live",
    "nbddp-fresh": "tabs are kept apart while the page around them is live",
    "nbddp-ending": "threads of a pool and of a worker, which are other processes",
}
OF_OTHERS = ("figures/controls.js", "figures/labextensions/nbddp/static/remoteEntry.js")  # treat what others have made


def test_a_css_class_belongs_to_one_folder() -> None:
    """All outputs of a notebook are one page, where rules and scripts of one feature meet the elements of another."""
    owners: dict[str, set[str]] = {}
    for path in sorted(each for kind in ("*.py", "*.js", "*.css") for each in ROOT.rglob(kind)):
        if path.relative_to(ROOT).as_posix() not in OF_OTHERS:
            for name in NAME.findall(path.read_text(encoding="utf-8")):
                owners.setdefault(name, set()).add(path.parent.relative_to(ROOT).as_posix())
    assert {name: found for name, found in owners.items() if len(found) > 1 and name not in MEANT} == {}
    assert {name for name, found in owners.items() if len(found) > 1} == set(MEANT)
    assert len(owners) > 50
