"""The rules of the house: imports go down, pure modules stay light, nothing is swallowed."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "nbddp"
FILES = sorted(ROOT.rglob("*.py"))

# From the ground up. A module may import from its own storey and from those above it in this list.
STOREYS = [
    [
        "errors",
        "seams",
        "system",
        "machine",
        "capacity",
        "pool.stop",
        "topology",
        "draw.palette",
        "draw.table",
        "agent.lines",
        "agent.home",
        "agent.limits",
        "worker.kept",
        "agent.logs",
        "worker.device_clock",
        "worker.recorder",
        "trace.quantities",
        "trace.origin",
        "trace.steps",
        "trace.overlap",
        "trace.waiting",
        "trace.measured",
        "trace.align",
        "trace.merge",
        "draw.trace",
        "trace.words",
        "trace.replicas",
        "trace.exchange",
        "trace.memory",
        "worker.memory",
        "draw.compared",
        "worker.digests",
        "trace.units",
        "trace.cost",
        "trace.ring",
        "trace.scale",
        "trace.foretold",
        "agent.identity",
        "agent.strays",
        "agent.peers",
        "worker.quiet",
        "worker.release",
        "worker.torch_seams",
        "worker.ipykernel_seams",
        "worker.check",
        "worker.noted",
        "worker.flight",
        "worker.threads",
        "worker.foreign",
        "worker.shared",
        "worker.held",
        "worker.program",
        "worker.loopback",
        "worker.arrivals",
        "worker.children",
        "worker.streams",
        "worker.modules",
    ],
    [
        "options",
        "environment",
        "run.cell",
        "run.request",
        "run.supervise",
        "worker.values",
        "worker.failure",
        "worker.context",
        "worker.calls",
        "worker.pairs",
        "worker.groups",
        "worker.clocks",
        "worker.bench",
        "worker.tracing",
        "worker.leaving",
        "worker.exercise",
        "worker.answers",
        "worker.messages",
        "worker.averaging",
        "worker.sampling",
        "worker.normalising",
        "worker.uneven",
        "worker.accumulation",
        "worker.checkpoint",
    ],
    ["export"],
    [
        "teach.answer",
        "teach.raised",
        "teach.tables",
        "teach.placement",
        "teach.rendezvous",
        "teach.spmd",
        "teach.ring",
        "teach.averaging",
        "teach.samples",
        "teach.moments",
        "teach.norms",
        "teach.buckets",
        "teach.launching",
        "teach.whatif",
        "teach.zero",
        "teach.submissions",
        "teach.definitions",
        "teach.reading",
        "teach.marks",
        "teach.restarts",
    ],
    [
        "commands",
        "values",
        "run.deadlock",
        "run.positions",
        "run.collect",
        "run.logfile",
        "run.report",
        "run.block",
        "worker.handlers",
        "worker.kernel",
        "draw",
        "teach.collectives",
    ],
    ["worker", "run.screen", "agent"],
    ["run", "status"],
    [
        "pool.requests",
        "pool.ipyparallel_seams",
        "pool.connection",
        "pool.wire",
        "pool.launcher",
        "worker.trials",
        "worker.torch_trials",
        "worker.ddp_trials",
        "worker.ipykernel_trials",
        "pool.compare",
        "pool.bench",
        "pool.change",
        "pool.node",
        "pool.stores",
        "stacks",
    ],
    ["pool"],
    ["assist", "interrupts", "debug", "magics", "cli"],
    ["teach.running"],
    ["teach.check", "teach.checks", "teach.explore", "teach.explorer", "teach.explorers"],
    ["teach.examiner", "teach.confined"],
    ["teach.collected"],
    ["teach.grader"],
    ["teach.grade"],
    ["teach"],
    ["__main__", "__init__"],
]
HEAVY = {"torch", "IPython", "ipyparallel", "zmq", "matplotlib", "ipykernel"}
PURE = [
    "nbddp",
    "nbddp.errors",
    "nbddp.machine",
    "nbddp.seams",
    "nbddp.system",
    "nbddp.draw.doctor",
    "nbddp.pool.change",
    "nbddp.pool.doctor",
    "nbddp.topology",
    "nbddp.environment",
    "nbddp.options",
    "nbddp.commands",
    "nbddp.run.supervise",
    "nbddp.run.deadlock",
    "nbddp.run.outcome",
    "nbddp.run.blame",
    "nbddp.run.positions",
    "nbddp.run.block",
    "nbddp.run.report",
    "nbddp.run.ending",
    "nbddp.run.watch",
    "nbddp.run.collect",
    "nbddp.run.cell",
    "nbddp.run.request",
    "nbddp.agent.lines",
    "nbddp.trace.quantities",
    "nbddp.trace.ring",
    "nbddp.trace.foretold",
    "nbddp.teach",
    "nbddp.teach.answer",
    "nbddp.teach.tables",
    "nbddp.teach.placement",
    "nbddp.teach.rendezvous",
    "nbddp.teach.spmd",
    "nbddp.teach.ring",
    "nbddp.teach.averaging",
    "nbddp.teach.samples",
    "nbddp.teach.moments",
    "nbddp.teach.norms",
    "nbddp.teach.buckets",
    "nbddp.teach.collectives",
    "nbddp.export",
    "nbddp.teach.launching",
    "nbddp.teach.whatif",
    "nbddp.teach.zero",
    "nbddp.teach.submissions",
    "nbddp.teach.definitions",
    "nbddp.teach.reading",
    "nbddp.teach.marks",
    "nbddp.teach.restarts",
]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def storey(module: str) -> int:
    parts = module.split(".")
    for depth in range(len(parts), 0, -1):
        for i, names in enumerate(STOREYS):
            if ".".join(parts[:depth]) in names:
                return i
    raise AssertionError(f"{module} has no storey")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{a.name}" for a in node.names)


def exists(module: str) -> bool:
    path = ROOT.joinpath(*module.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


@pytest.mark.parametrize("path", [f for f in FILES if f.stat().st_size], ids=name_of)
def test_imports_go_down(path: Path) -> None:
    own = name_of(path) or "__init__"
    targets = {m.removeprefix("nbddp.") for m in imports(path) if m.startswith("nbddp.")}
    for target in {t for t in targets if exists(t) and t not in ("agent", "run", "draw", "pool", "worker", "teach")}:
        assert storey(target) <= storey(own), f"{own} imports {target}, which stands above it"


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_import_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_each_library_has_its_room() -> None:
    rooms = {
        "torch": ("worker", "agent.store_host"),
        "matplotlib": ("draw",),
        "ipyparallel": ("worker", "pool", "agent"),
    }
    for path in FILES:
        for library in {m.split(".")[0] for m in imports(path)} & set(rooms):
            assert name_of(path).startswith(rooms[library]), f"{name_of(path)} imports {library}"


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


def test_what_may_be_asked_for_has_a_row_each() -> None:
    """Of commands, of requests to a worker, and of what the agent starts."""
    from nbddp.agent import main
    from nbddp.commands import COMMANDS
    from nbddp.magics import DDPMagics
    from nbddp.worker.handlers import REQUESTS

    assert set(DDPMagics.COMMANDS) == set(COMMANDS)
    for target in main.TARGETS.values():
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name)), target
    sources = "".join(path.read_text() for path in FILES if path.name != "handlers.py")
    assert [asked for asked in REQUESTS if f'"{asked}"' not in sources] == [], "asked for by nobody"
