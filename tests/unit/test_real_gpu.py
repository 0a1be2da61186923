"""Simulated GPUs answer what an H100 answered: tests/gpu/asked has the programs, tests/data the answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.gpu import compare

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests/data/h100-torch-2.11.json.gz"
DIFFER = json.loads((ROOT / "tests/data/simulated-differs.json").read_text())  # group → case → why
GROUPS = ("two_devices", "devices", "host", "numbers", "types", "shapes", "streams", "memory", "limited")


def asked(to: Path, groups: tuple[str, ...], *more: str) -> list[compare.Pair]:
    """The answers of an H100 and of simulated GPUs here."""
    command = [sys.executable, "tests/gpu/record.py", str(to), "--simulate", "--together", "500", "--width", "2"]
    command += ["--each", "60", "--seconds", "500", "--only", *groups, *more]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(compare.pairs(compare.read(RECORD), compare.read(to)))


def unlike(found: list[compare.Pair]) -> list[str]:
    """The cases that differ and are not known to, with both answers."""
    return [
        f"{p.group}: {p.name}\n  H100 {compare.words(p.real)}\n  here {compare.words(p.simulated)}"
        for p in found
        if not p.equal and p.name not in DIFFER.get(p.group, {})
    ]


def test_each_seventh_program_that_mixes_devices_or_types(tmp_path: Path) -> None:
    found = asked(tmp_path / "here.json", ("two_devices", "types"), "--every", "7")
    assert len(found) >= 30
    assert unlike(found) == []


@pytest.mark.more
def test_all_programs(tmp_path: Path) -> None:
    if not version("torch").startswith("2.11."):
        pytest.skip(f"torch {version('torch')} words some errors otherwise than 2.11, of which the record is")
    found = asked(tmp_path / "here.json", GROUPS)
    assert len(found) >= 500
    assert unlike(found) == []


@pytest.mark.more
def test_training_takes_the_memory_it_took(tmp_path: Path) -> None:
    names = ("MLP, batch 256", "MLP, batch 256, DDP")
    found = asked(tmp_path / "here.json", ("trainings",), "--cases", "MLP", "--steps", "3")
    assert [p.name for p in found] == list(names)
    for p in found:
        assert p.simulated["losses"] == pytest.approx(p.real["losses"], rel=1e-4)
        assert [row[:5] for row in p.simulated["notes"]] == [row[:5] for row in p.real["notes"]]


def test_what_is_known_to_differ_is_asked() -> None:
    record = compare.read(RECORD)
    assert {(g, n) for g, cases in DIFFER.items() for n in cases if n not in record[g]} == set()
