"""Programs with a silent mistake beside their healthy twins (`tests/data/silent.txt`), and how they are run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import nbddp
from nbddp.capabilities.sanitizer.findings import SanitizerFindings
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests.places import ROOT

HELPERS = """
import contextlib, copy, os, random, tempfile
import numpy as np, torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as Fn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler
class Net(nn.Module):
    def __init__(self, drop=0.0, bn=False):
        super().__init__()
        self.a, self.bn = nn.Linear(8, 16), nn.BatchNorm1d(16) if bn else nn.Identity()
        self.d, self.b = nn.Dropout(drop), nn.Linear(16, 2)
    def forward(self, x): return self.b(self.d(torch.relu(self.bn(self.a(x)))))
def data(n=32):
    g = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, 8, generator=g), torch.randint(0, 2, (n,), generator=g))
def loader(r, w, ds=None, bs=4, sampler=True, **more):
    ds = ds or data(); sm = DistributedSampler(ds, w, r, **more) if sampler else None
    return DataLoader(ds, bs, sampler=sm, shuffle=sm is None), sm
def std(r, w, net=None, seed=True, **more):
    torch.manual_seed(0); net = net or Net(); torch.manual_seed(100 + r if seed else 0)
    d = DDP(net, **more); return d, torch.optim.SGD(d.parameters(), 0.1)
def epochs(d, o, ld, sm, n=2, set_epoch=True, first=0):
    for e in range(first, first + n):
        if sm and set_epoch: sm.set_epoch(e)
        for x, y in ld:
            o.zero_grad(); Fn.cross_entropy(d(x), y).backward(); o.step()
"""
RUN = """
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
try: {name}(rank, world, {bad})
finally: dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Program:
    """A body with a mistake where `bad` holds. kind: of its finding, empty if there is none; line: words of its line.
    always: it may be the one of its kind that is run without `-m more`."""

    name: str
    kind: str
    line: str
    always: bool
    body: str

    @property
    def has_twin(self) -> bool:
        """Whether the body has two programs in it: one with the mistake, and one without."""
        return re.search(r"\bbad\b", self.body) is not None


def programs(file: Path = ROOT / "tests/data/silent.txt") -> list[Program]:
    found = []
    for title, body in re.findall(r"^## (.*)\n((?:(?!## ).*\n?)*)", file.read_text(encoding="utf-8"), re.MULTILINE):
        name, kind, line, *star = (part.strip() for part in title.split("|"))
        found.append(Program(name, kind, line, bool(star), body.rstrip()))
    return found


PROGRAMS = {each.name: each for each in programs()}
ON_GPU = """
import os, torch, torch.distributed as dist
from torch.nn.functional import cross_entropy as loss
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("cpu:gloo,cuda:nccl")
r, nowhere = dist.get_rank(), open(os.devnull, "w")
torch.cuda.set_device(r); torch.manual_seed(0)
d, c = DDP(torch.nn.Linear(8, 4).cuda()), DDP(torch.nn.Linear(8, 4))
o, oc = (torch.optim.SGD(m.parameters(), .1) for m in (d, c))
seen, scaler = [], torch.amp.GradScaler("cuda"); torch.manual_seed(r)
xs, ys = torch.randn(32, 4, 8).cuda(), torch.randint(0, 4, (32, 4)).cuda()
for i in range(32):
    x, y = xs[i], ys[i]
"""


def reads() -> dict[str, tuple[str, str]]:
    """Loops on a GPU: name → words of the line that waits for it at each step (none: no line does), and the program."""
    found = {}
    text = (ROOT / "tests/data/reads.txt").read_text(encoding="utf-8")
    for title, body in re.findall(r"^## (.*)\n((?:(?!## ).*\n?)*)", text, re.MULTILINE):
        name, line = (part.strip() for part in title.split("|"))
        found[name] = (line, f"{ON_GPU}{body.rstrip()}\ndist.destroy_process_group()\n")
    return found


def define(pool: WorkerPool, body: str = "", name: str = "") -> None:
    """Define the helpers on the ranks, or a program."""
    source = f"def {name}(r, w, bad):\n{body}\n" if body else HELPERS
    pool.run_cell(source, cell=2 if body else 1, screen=NullScreen())


def found_in(pool: WorkerPool, name: str, bad: bool) -> SanitizerFindings:
    """What the sanitizer says of a program. One that fails loudly has findings until then."""
    try:
        pool.run_cell(RUN.format(name=name, bad=bad), cell=3, sanitize=True, screen=NullScreen())
    except nbddp.WorkerFailed:
        if not bad:
            raise
    return pool.findings()
