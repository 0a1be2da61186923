"""`--max-restarts 1`, a hundred times: a random rank raises in the first attempt, and the second must end well.

Run by hand: `python tests/benchmarks/restarts.py [--times 100] [--nproc 4]`. The last line gives the count.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import nbddp
from nbddp.run.screen import Silent

CELL = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
model = DDP(torch.nn.Linear(4, 4))
if attempt == 0 and rank == {culprit}: raise ValueError("first attempt")
model(torch.ones(2, 4)).sum().backward()
dist.destroy_process_group()
attempt
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--nproc", type=int, default=4)
    asked = parser.parse_args()
    dice, good, began = random.Random(1), 0, time.monotonic()
    with nbddp.Pool(nproc=asked.nproc) as pool:
        for _ in range(asked.times):
            cell = CELL.format(culprit=dice.randrange(asked.nproc))
            try:
                found = pool.run_cell(cell, max_restarts=1, want_value=True, screen=Silent())
                good += list(found) == [1] * asked.nproc
            except nbddp.NbddpError as error:
                print(type(error).__name__, error, flush=True)
    each = (time.monotonic() - began) / asked.times
    print(f"{good} of {asked.times} restarts on {asked.nproc} ranks ended well, {each:.1f} s each")


if __name__ == "__main__":
    main()
