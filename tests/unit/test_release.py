"""The version is written in one place by hand; `.ci/release prepare` writes its copies."""

from __future__ import annotations

import re
import runpy
import subprocess
from typing import Any

import pytest

import nbddp
from tests.places import ROOT


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / ".ci/release"))


def test_each_copy_of_the_version_is_one_that_a_release_writes(script: dict[str, Any]) -> None:
    for path, place in script["COPIES"].items():
        assert place.findall(path.read_text(encoding="utf-8")) == [nbddp.__version__], path
    number = re.compile(rf"(?i)version(?:__)?\W*[=:]\W*{re.escape(nbddp.__version__)}(?![\d.])")
    kinds = ("*.py", "*.json", "*.toml", "*.cff", "*.md", "*.yml")
    listed = subprocess.run(["git", "ls-files", *kinds], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = {path for path in listed.split() if number.search((ROOT / path).read_text(encoding="utf-8"))}
    copies = {path.relative_to(ROOT).as_posix() for path in (script["INIT"], *script["COPIES"])}
    assert found - {"CHANGELOG.md"} == copies, "written by hand in another place"


def test_a_version_has_three_numbers(script: dict[str, Any]) -> None:
    assert script["number"]("0.2.0") == (0, 2, 0)
    with pytest.raises(SystemExit, match="type three numbers"):
        script["number"]("0.2")
