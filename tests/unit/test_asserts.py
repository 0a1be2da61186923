"""A wrong index takes the simulated GPU from its process, as a kernel's assertion takes a real one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
from nbddp.capabilities.simulated_gpus import cards
from nbddp.capabilities.simulated_gpus.on_rank import install
install(cards.cards_of("1xH100"))
import torch
g, c = torch.ones(3, 4, device="cuda"), torch.ones(2)

def says(what, f):
    try:
        f()
        print(what, "nothing")
    except Exception as error:
        print(what, type(error).__name__, str(error).splitlines()[0], "|", error.__cause__)

says("number", lambda: g[7])
says("mode", lambda: (torch.cuda.set_sync_debug_mode("error"), g.sum().item()))
torch.cuda.set_sync_debug_mode("default")
torch.use_deterministic_algorithms(True)
says("order", lambda: g.median(0))
torch.use_deterministic_algorithms(False)
says("label", lambda: torch.nn.functional.cross_entropy(g, torch.tensor([0, 1, 10], device="cuda")))
says("next", lambda: g + 1)
says("new", lambda: torch.ones(1, device="cuda"))
says("home", lambda: g.cpu())
says("wait", lambda: torch.cuda.synchronize())
says("cpu", lambda: c + 1)
"""
DRIVER = "CUDA error: device-side assert triggered"


def test_after_a_wrong_label_nothing_works_on_the_gpu() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert said["number"].startswith("IndexError index 7 is out of bounds for dimension 0 with size 3")
    assert said["mode"].startswith("RuntimeError called a synchronizing CUDA operation")
    assert said["order"].startswith("RuntimeError median CUDA with indices output does not have a deterministic")
    assert DRIVER in said["label"]
    assert said["label"].endswith("| Target 10 is out of bounds.")
    assert "Assertion `t >= 0 && t < n_classes` failed." in done.stderr
    assert all(DRIVER in said[what] for what in ("next", "new", "home", "wait"))
    assert said["cpu"] == "nothing"
