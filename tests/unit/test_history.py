"""Benchmarks' history: what the lines of benchmarks say is read as figures."""

from tests.benchmarks.history import read

PRINTED = """load 0.3
cold: %load_ext to the first DDP step, against torchrun: 2.23 against 6.77 s, ratio 0.330
200 DDP steps of 10 M parameters on 2 ranks, rate against torchrun: 12.5 against 12.4 /s, ratio 1.010
start: 0.31 s of CPU time (at most 0.4)
small CNN: 12.10 ms against 9.80 ms, 1.23 times (at most 1.5)
rank 1: a step of 4.10 ms (60 seen); with the hook +0.8%, null pair -0.1%; of its CPU time +1.0%, null pair +0.2%
rank 0: a step of 80.1 ms; recorded -1.5%, null pair +0.1%; of its CPU time +3.9%; parameters equal bit by bit
whole runs: 80.0 ms a step, with --sanitize 82.0 ms, +2.5%

| measure | nbddp | other | ratio | must reach |
|---|---|---|---|---|
| cold: %load_ext to the first DDP step, against torchrun | 2.23 s | 6.77 s | 0.33 | ≤ 0.6 |
| 200 DDP steps of 10 M parameters on 2 ranks, rate against torchrun | 12.5 /s | 12.4 /s | 1.01 | ≥ 0.98 |
"""


def test_what_benchmarks_print_is_read_as_ratios() -> None:
    assert read(PRINTED) == [
        {"measured": "cold: %load_ext to the first DDP step, against torchrun", "ratio": 0.33, "at most": 0.6},
        {"measured": "200 DDP steps of 10 M parameters on 2 ranks, rate against torchrun", "ratio": 1.01,
         "at least": 0.98},
        {"measured": "small CNN", "ratio": 1.23, "at most": 1.5},
        {"measured": "rank 1", "ratio": 1.008},
        {"measured": "rank 0", "ratio": 0.985},
        {"measured": "whole runs", "ratio": 1.025},
    ]  # fmt: skip
