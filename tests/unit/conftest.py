"""Unit tests import no torch: where they run alone, one that does fails the run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_sessionfinish(session: pytest.Session) -> None:
    alone = bool(session.items) and all(HERE in item.path.parents for item in session.items)
    if alone and "torch" in sys.modules and not session.config.option.collectonly:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        sys.stderr.write("\na unit test has imported torch; move it to tests/pool or tests/lessons\n")
