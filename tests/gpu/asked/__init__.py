"""What `record.py` asks a GPU, as tables: one case a line, `name = program`; a bar in the program is a new line.

A wrong program sees torch, nn, F, dist, np, FOLDER, c (on the CPU), g (the same on the GPU), m (a layer there) and ids.
Where it sets `answer`, that is written down. `questions.txt` holds expressions alone.
`sequences.txt`: steps between which the counters of memory are read; B(n) is a tensor of n bytes.
`operators.txt`: `name = x = result`; memory is counted around result and around its backward.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
BEFORE = """
import copy, io, os, pickle, sys, warnings
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
"""
TENSORS = """
c = torch.ones(3, 4)
g = torch.ones(3, 4, device="cuda")
m = nn.Linear(4, 2).cuda()
ids = torch.tensor([0, 1, 2])
"""


def table(name: str) -> dict[str, str]:
    """The programs of one table, by name.

    Example:
        >>> table("streams")["events without timing"]
        'torch.cuda.Event().elapsed_time(torch.cuda.Event())'
    """
    lines = (FOLDER / f"{name}.txt").read_text().splitlines()
    if name == "questions":
        return {line: line for line in lines}
    rows = [line.split(" = ", 1) for line in lines]
    found = {row[0]: row[1].replace("|", "\n") if name not in ("sequences", "operators") else row[1] for row in rows}
    if len(found) != len(rows):
        raise ValueError(f"{name}.txt: a name stands twice")
    return found
