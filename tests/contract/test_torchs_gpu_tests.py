"""The driver of torch's own tests for GPUs notes how each ends: those that end their process or last too long too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract import torchs_gpu_tests
from tests.places import ROOT

MODULE = """
import os, time, unittest
import torch
from torch.testing._internal.common_distributed import MultiProcessTestCase

class Alone(unittest.TestCase):
    def test_a_passes(self):
        self.assertEqual(str(torch.ones(1, device="cuda:3").device), "cuda:3")
    def test_b_is_skipped(self):
        self.skipTest("no such thing")
    def test_c_fails(self):
        self.fail("what it says")
    def test_d_dies(self):
        os.abort()
    def test_e_lasts(self):
        time.sleep(600)
    def test_f_is_left_out(self):
        os.abort()

class WithRanks(MultiProcessTestCase):
    world_size = 2
    def setUp(self):
        super().setUp()
        self._spawn_processes()
    def test_ranks(self):
        self.assertEqual(torch.ones(1, device=f"cuda:{self.rank}").get_device(), self.rank)
"""


@pytest.mark.more
def test_each_test_is_noted_once(tmp_path: Path) -> None:
    (tmp_path / "test_few.py").write_text(MODULE)
    out = tmp_path / "found.jsonl"
    command = [sys.executable, "-m", "tests.contract.torchs_gpu_tests", str(out), "test_few", "--folder", str(tmp_path)]
    more = ["--seconds", "30", "--without", "left_out"]
    done = subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, timeout=400)
    found = torchs_gpu_tests.read(out)
    assert {name: how for name, (how, _) in found.items()} == {
        "Alone.test_a_passes": "ok", "Alone.test_b_is_skipped": "skip", "Alone.test_c_fails": "fail",
        "Alone.test_d_dies": "died", "Alone.test_e_lasts": "slow", "WithRanks.test_ranks": "ok",
    }, done.stderr[-2000:]  # fmt: skip
    assert "what it says" in found["Alone.test_c_fails"][1]
    assert "exit codes [-6]" in found["Alone.test_d_dies"][1]
    assert done.stdout.splitlines()[0] == "found: 6 tests, 2 ok, 1 skip, 1 fail, 1 died, 1 slow"
    assert done.stdout.splitlines()[2].strip().startswith("died Alone.test_d_dies: exit codes [-6]")


def test_an_import_is_no_test_that_lasts() -> None:
    assert torchs_gpu_tests._limit(2.0, begun=False, broken=False) > 60
    assert torchs_gpu_tests._limit(2.0, begun=True, broken=False) == 2
