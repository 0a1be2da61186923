"""What runs on a GPU alone: `pytest tests/gpu` writes what it found to `tests/gpu/report.md`.

Elsewhere every test is skipped, with the reason. The tests' own process asks NVML and torch's versions and never CUDA:
ranks alone use a GPU.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nbddp.capabilities.gpus import on_agent as devices
from nbddp.launch.options import LaunchSpec
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool

REPORT = Path(__file__).with_name("report.md")
ROW = "gpu row"
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "1"}
VERSION = """
from nbddp.worker.gpus import nccl_version
nccl_version()
"""


def why_not() -> str:
    """Why nothing can run here; empty if it can."""
    import torch

    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} was built without CUDA"
    found = devices.gpus(os.environ)
    if not found["devices"]:
        return "; ".join(found["untold"]) or "NVML tells of no GPU here"
    return ""


WHY_NOT = why_not()


def pytest_itemcollected(item: pytest.Item) -> None:  # of this folder
    if WHY_NOT:
        item.add_marker(pytest.mark.skip(reason=f"no GPU: {WHY_NOT}"))


@pytest.fixture(scope="session")
def cards() -> list[dict[str, Any]]:
    """The GPUs as NVML tells them."""
    found: list[dict[str, Any]] = devices.gpus(os.environ)["devices"]
    return found


@pytest.fixture
def row(record_property: Callable[[str, object], None], request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Takes what a test has found: it stands in the report beside the test's name."""
    return lambda found: record_property(ROW, found)


@pytest.fixture(scope="module")
def one() -> Iterator[WorkerPool]:
    """One rank on a GPU of its own."""
    with WorkerPool(nproc=1) as made:
        yield made


@pytest.fixture(scope="module")
def two(one: WorkerPool, cards: list[dict[str, Any]]) -> Iterator[WorkerPool]:
    """Two ranks over NCCL: on a GPU each, or on one, where NCCL takes two ranks."""
    version = tuple(one.run_cell(VERSION, want_value=True, screen=NullScreen())[0])
    alone = len(cards) == 1
    if alone and version < (2, 30):
        pytest.skip(f"one GPU, and NCCL {'.'.join(map(str, version))} takes one rank on each (2.30 takes more)")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SHARED.items() if alone else ():
            patch.setenv(name, value)
        with WorkerPool(nproc=2, oversubscribe=alone, visible="all") as made:
            yield made


@pytest.fixture
def pair(two: WorkerPool) -> WorkerPool:
    """The two ranks, whole, with `kept` on each: its own rank."""
    two.ensure(LaunchSpec())
    two.run_cell("import os; kept = int(os.environ['RANK'])", screen=NullScreen())
    return two


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    stats = terminalreporter.stats
    reports = [r for kind in ("passed", "failed", "skipped") for r in stats.get(kind, []) if "tests/gpu/" in r.nodeid]
    if not WHY_NOT and reports:
        REPORT.write_text(report_of(reports))
        terminalreporter.write_line(f"the report is in {REPORT}")


def report_of(reports: list[pytest.TestReport]) -> str:
    """A table in Markdown: what was tried, how it went, what was found."""
    import torch

    names = sorted({str(card.get("name", "a GPU")) for card in devices.gpus(os.environ)["devices"]})
    count = len(devices.gpus(os.environ)["devices"])
    head = (
        f"{count} × {', '.join(names)}; driver {driver()}; torch {torch.__version__}; Python "
        f"{platform.python_version()}; {time.strftime('%Y-%m-%d', time.gmtime())}"
    )
    rows = ["| tried | | found |", "|---|---|---|"]
    for r in reports:
        name = r.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")
        found = "; ".join(str(v) for k, v in r.user_properties if k == ROW)
        why = r.longrepr[2].removeprefix("Skipped: ") if r.skipped and isinstance(r.longrepr, tuple) else ""
        rows.append(f"| {name} | {r.outcome}, {r.duration:.1f} s | {found or why} |")
    return "\n".join([head, "", *rows, ""])


def driver() -> str:
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as e:
        return f"not told ({e})"
