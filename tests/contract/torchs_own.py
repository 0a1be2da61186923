"""torch's own DistributedTests on the ranks that are there, whoever started them; and how they end under torchrun.

The class ships with torch. Set to a rank in place of `MAIN_PROCESS_RANK`, a test method runs its body here instead of
starting processes. Its barrier of files needs a folder that all ranks share, and begins at 0 in each test.

On a pool of three: this source in a cell, then `outcome("test_all_gather", folder)`, a cell each. Under torchrun each
test has a prefix of the agent's store, which serves one `init_process_group` of a process and no second.

`python -m tests.contract.torchs_own` runs them all under torchrun, and keeps how they ended in `torchs_own.json`, under
the facts about torch and the machine that decide what is skipped. It takes a minute.
"""

from __future__ import annotations

import datetime
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

RANKS = 3
TIMEOUT = datetime.timedelta(seconds=30)


@functools.cache
def suite(folder: str, backend: str = "gloo") -> Any:
    """The class of the tests, with its files in a folder that all ranks share."""
    for name in ("barrier", "test_dir", "init_dir", "ended"):
        os.makedirs(os.path.join(folder, name), exist_ok=True)
    os.environ.update(BACKEND=backend, TEMP_DIR=folder, INIT_METHOD="env://")
    from torch.testing._internal.distributed import distributed_test

    class Here(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        barrier = distributed_test.Barrier

    return Here


def names(folder: str, backend: str = "gloo") -> list[str]:
    return sorted(n for n in dir(suite(folder, backend)) if n.startswith("test_"))


def outcome(name: str, folder: str, store: Any = None, backend: str = "gloo") -> str:
    """How a test ends on this rank: `ok`, `skip`, `exit 75`, or an exception in a line. store: that of the group, if it
    is not the one of `env://`."""
    import torch.distributed as dist
    from torch.testing._internal.common_utils import set_rng_seed

    kind, rank = suite(folder, backend), int(os.environ["RANK"])
    given = {} if store is None else {"store": store, "rank": rank, "world_size": RANKS}
    dist.init_process_group(backend, timeout=TIMEOUT, **given)
    dist.barrier()
    if rank == 0:
        kind.barrier.init()
    kind.barrier.barrier_id = 0
    dist.barrier()
    test = kind(name)
    test.rank, test.skip_return_code_checks, test.file_name = rank, [], os.path.join(folder, "file")
    set_rng_seed()
    found = ended(getattr(test, name))
    wait_for_all(Path(folder, "ended"), name, rank)
    if dist.is_initialized():
        dist.destroy_process_group()
    return found


def ended(test: Any) -> str:
    try:
        test()
    except unittest.SkipTest:
        return "skip"
    except SystemExit as e:  # how torch's tests skip on one rank: 7x and 8x
        return f"exit {e.code}"
    except Exception as e:
        return f"{type(e).__name__}: {e}".splitlines()[0]
    return "ok"


def wait_for_all(folder: Path, name: str, rank: int) -> None:
    """Wait until the test has ended on all ranks. By files: a rank that failed has left its part of a collective
    undone, and a rank that destroys its group breaks the others'."""
    (folder / f"{name}-{rank}").touch()
    while not all((folder / f"{name}-{r}").exists() for r in range(RANKS)):
        time.sleep(0.005)


# -- under torchrun ----------------------------------------------------------------------------


def facts() -> str:
    """What decides which tests are skipped or fail: the table is good where these are the same."""
    import torch
    import torch.distributed as dist

    version = torch.__version__.split("+")[0]
    nccl, vision = dist.is_nccl_available(), importlib.util.find_spec("torchvision") is not None
    return f"torch {version}, {torch.cuda.device_count()} GPUs, NCCL {nccl}, torchvision {vision}"


def under_torchrun(folder: str) -> dict[str, list[str]]:
    """Name → how it ended on each rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), __file__, folder]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(os.path.join(folder, "log"), "w") as log:
        subprocess.run(command, stdout=log, stderr=log, check=True, env=environment)
    found = [json.loads(Path(folder, f"outcomes-{r}.json").read_text()) for r in range(RANKS)]
    return {name: [rank[name] for rank in found] for name in found[0]}


def one_rank(folder: str) -> None:
    from torch.distributed import PrefixStore, TCPStore

    agent = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    found = {name: outcome(name, folder, PrefixStore(name, agent)) for name in names(folder)}
    Path(folder, f"outcomes-{os.environ['RANK']}.json").write_text(json.dumps(found))


def write_table() -> None:
    table = Path(__file__).with_suffix(".json")
    known = json.loads(table.read_text()) if table.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        known[facts()] = under_torchrun(folder)
    lines = [
        f"{json.dumps(key)}: {{\n" + ",\n".join(f"  {json.dumps(n)}: {json.dumps(o)}" for n, o in some.items()) + "\n}"
        for key, some in sorted(known.items())
    ]
    table.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__" and "RANK" not in os.environ:
    write_table()
elif __name__ == "__main__" and sys.argv[1:]:  # not in a cell
    one_rank(sys.argv[1])
