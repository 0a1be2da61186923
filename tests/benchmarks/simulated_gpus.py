"""What simulated GPUs cost: a training step against the CPU's, and the start of a process. Ratios, measured in turn.

Run by hand: `python tests/benchmarks/simulated_gpus.py [--rounds 60]`. A small CNN is to cost 1.5 times a step on the
CPU at most, a tiny MLP 4 times, and the start 0.4 s.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import nn

MOST = {"tiny MLP, SGD": 4.0, "tiny MLP, AdamW": 4.0, "MLP 784-1024": 1.5, "CNN 32x32": 1.5}
START = 0.4  # seconds


def tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def large() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def convolutions() -> nn.Module:
    first = (nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32, 10))


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, 1e-3)


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Callable[[Any], Any]]] = {
    "tiny MLP, SGD": (tiny, (32, 64), sgd),
    "tiny MLP, AdamW": (tiny, (32, 64), adamw),
    "MLP 784-1024": (large, (128, 784), sgd),
    "CNN 32x32": (convolutions, (32, 3, 32, 32), sgd),
}


def step(model: nn.Module, optimizer: Any, x: Any, y: Any) -> float:
    begin = time.process_time()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    return time.process_time() - begin


def ratio(name: str, rounds: int) -> tuple[float, float]:
    """Median CPU time of a step on the CPU and on a simulated GPU, in seconds: others on the machine do not count."""
    make, shape, optimizer = PROGRAMS[name]
    torch.manual_seed(0)
    on_cpu = make()
    x, y = torch.randn(shape), torch.randint(0, 10, shape[:1])
    sides = []
    for device in ("cpu", "cuda"):
        model = copy.deepcopy(on_cpu).to(device)
        sides.append((model, optimizer(model.parameters()), x.to(device), y.to(device)))
    times: list[list[float]] = [[], []]
    for round_ in range(rounds + 5):
        for side, taken in zip(sides, times, strict=True):
            taken.append(step(*side))
        if round_ == 5:
            times = [[], []]
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    from nbddp.capabilities.simulated_gpus.cards import cards_of
    from nbddp.capabilities.simulated_gpus.on_rank import install

    begin = time.process_time()
    install(cards_of("2"))
    started = time.process_time() - begin
    print(f"start: {started:.2f} s of CPU time (at most {START})")
    good = started <= START
    for name, most in MOST.items():
        cpu, gpu = ratio(name, rounds)
        print(f"{name}: {gpu * 1e3:.2f} ms against {cpu * 1e3:.2f} ms, {gpu / cpu:.2f} times (at most {most})")
        good = good and gpu / cpu <= most
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
