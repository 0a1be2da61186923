"""torch's own tests for GPUs, on simulated ones: how each ends, and what it said if it failed.

`python -m tests.contract.torchs_gpu_tests OUT.jsonl test_cuda --folder pytorch/test` runs `test_cuda.py` of a checkout
of PyTorch; `distributed` runs the class of `test_distributed_spawn.py`, which ships with torch, with nccl. The checkout
is no part of this repository.

Workers run the tests one after another and write a line before and after each. A test that ends its process, or lasts
too long, is noted, and new workers go on after it. `--table OUT.jsonl …` counts what files have.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import functools
import importlib
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nbddp.capabilities.simulated_gpus.cards import cards_of
from nbddp.capabilities.simulated_gpus.on_rank import install
from tests.contract import torchs_own
from tests.places import ROOT

DISTRIBUTED = "distributed"
STARTING = 300.0  # seconds that workers may take to import torch and the module
LEFT = "left"  # a group that no rank can destroy
MEMORY = {"test_cuda": 9 << 30, "test_c10d_nccl": 8 << 30}  # bytes of addresses a process may have: some fill a GPU
Ended = tuple[str, str]  # ok, skip, fail, died or slow; and what was said


# -- the parent ----------------------------------------------------------------------------------


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("out", type=Path)
    p.add_argument("module", nargs="?", default="", help=f"test_cuda, test_c10d_nccl, {DISTRIBUTED}")
    p.add_argument("--folder", type=Path, default=Path(), help="of the module")
    p.add_argument("--gpus", default="4xT4", help="the simulated GPUs")
    p.add_argument("--seconds", type=float, default=60.0, help="a test may take")
    p.add_argument("--only", default="", help="words in the names of tests, separated by commas")
    p.add_argument("--without", default="", help="words in the names of tests that are left out")
    p.add_argument("--slice", default="0/1", help="K/N: each Nth test, from the Kth on")
    p.add_argument("--table", nargs="*", type=Path, help="count what these files have")
    a = p.parse_args()
    if os.environ.get("TORCHS_GPU_TESTS"):
        work(a)
    elif a.table is not None:
        print(table([*a.table, a.out]))
    else:
        supervise(a)


def supervise(a: argparse.Namespace) -> None:
    """Until each test has ended somehow; those that a file has already are not run again."""
    a.out.touch()
    with tempfile.TemporaryDirectory() as folder:
        names = json.loads(_workers(a, folder, "names", 1)[0].communicate()[0].splitlines()[-1])
        k, n = map(int, a.slice.split("/"))
        words, without = a.only.split(","), [word for word in a.without.split(",") if word]
        names = [name for name in names[k::n] if any(word in name for word in words)]
        names = [name for name in names if not any(word in name for word in without)]
        while left := [name for name in names if name not in read(a.out)]:
            once(a, left, folder)
    print(table([a.out]))


def once(a: argparse.Namespace, left: list[str], folder: str) -> None:
    """Workers run the tests that are left, until they are done, or a test does not end by itself."""
    (Path(folder) / "left").write_text(json.dumps(left))
    ranks = _workers(a, folder, "tests", torchs_own.RANKS if a.module == DISTRIBUTED else 1)
    log, seen, began = Path(folder, "progress"), 0, time.monotonic()
    while any(rank.poll() is None for rank in ranks):
        size = log.stat().st_size if log.exists() else 0
        seen, began = (size, time.monotonic()) if size != seen else (seen, began)
        broken = next((rank.returncode for rank in ranks if rank.poll()), 0)
        if time.monotonic() - began > _limit(a.seconds, bool(seen), bool(broken)):
            break
        time.sleep(0.1)
    died = [rank.poll() for rank in ranks]
    for rank in ranks:
        if rank.poll() is None:
            os.killpg(rank.pid, signal.SIGKILL)
        rank.communicate()
    _note_the_unfinished(a.out, log, left, died)


def _limit(seconds: float, begun: bool, broken: bool) -> float:
    """Seconds in which something has to happen: an import is no test, and ranks that have lost one do not go on."""
    return 5.0 if broken else seconds if begun else STARTING


def _note_the_unfinished(out: Path, log: Path, left: list[str], died: list[int | None]) -> None:
    """Of the test that had begun; if none had, the first."""
    begun = log.read_text().splitlines() if log.exists() else []
    name = begun[-1] if begun and begun[-1] in left else left[0]
    if name in read(out):
        return  # the workers had ended it, and left
    codes = [code for code in died if code]
    said = (Path(log.parent) / "errors").read_text(errors="replace")[-6000:]
    _write(out, name, ("died" if codes else "slow", f"{said}\nexit codes {codes}"))


def _workers(a: argparse.Namespace, folder: str, what: str, number: int) -> list[subprocess.Popen[str]]:
    around = {
        **os.environ,
        "TORCHS_GPU_TESTS": what,
        "OMP_NUM_THREADS": "1",
        "FOLDER": folder,
        "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
    }
    around |= {"WORLD_SIZE": str(number), "RUN": str(time.monotonic_ns()), "PYTHONPATH": f"{ROOT}:{a.folder}"}
    command = [sys.executable, "-m", "tests.contract.torchs_gpu_tests", *sys.argv[1:]]
    errors = open(Path(folder) / "errors", "w")  # noqa: SIM115  # workers write it
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE if what == "names" else errors, "stderr": errors, "text": True}
    return [
        subprocess.Popen(command, env={**around, "RANK": str(r)}, cwd=ROOT, start_new_session=True, **pipes)
        for r in range(number)
    ]


def read(out: Path) -> dict[str, Ended]:
    """Name → how it ended."""
    return {name: (how, said) for name, how, said, *_ in map(json.loads, out.read_text().splitlines())}


def _write(out: Path, name: str, ended: Ended) -> None:
    with out.open("a") as file:
        file.write(json.dumps([name, *ended]) + "\n")


def table(files: list[Path]) -> str:
    """A line for each file, then one for each test that did not pass, with the last line that it said."""
    lines = []
    for file in files:
        found = read(file)
        counts = collections.Counter(how for how, _ in found.values())
        lines.append(f"{file.stem}: {len(found)} tests, " + ", ".join(f"{n} {how}" for how, n in counts.most_common()))
        for name, (how, said) in sorted(found.items()):
            if how not in ("ok", "skip"):
                lines.append(f"  {how} {name}: {(said.strip().splitlines() or [''])[-1][:220]}")
    return "\n".join(lines)


# -- a worker ------------------------------------------------------------------------------------


def work(a: argparse.Namespace) -> None:
    faulthandler.enable()
    if a.module in MEMORY:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY[a.module],) * 2)
    install(cards_of(a.gpus))
    folder, first = os.environ["FOLDER"], os.environ["RANK"] == "0"
    tests = _distributed(folder) if a.module == DISTRIBUTED else _of_module(a.module)
    if os.environ["TORCHS_GPU_TESTS"] == "names":
        print(json.dumps(list(tests)))
        return
    for name in json.loads((Path(folder) / "left").read_text()):
        if first:
            with (Path(folder) / "progress").open("a") as file:
                file.write(name + "\n")
        found = tests[name]()
        if first or found[0] != "ok":
            _write(a.out, name, ("fail", found[1]) if found[0] == LEFT else found)
        if found[0] == LEFT:
            os._exit(0)  # new workers go on


def _of_module(name: str) -> dict[str, Any]:
    module = importlib.import_module(name)
    common = importlib.import_module("torch.testing._internal.common_distributed")  # which looks for GPUs
    common.MultiProcessTestCase._spawn_processes = _forked  # a spawned process imports all of that again
    vars(module).pop("load_tests", None)  # torch's own is for shards, and wants to know its script
    found = _flat(unittest.TestLoader().loadTestsFromModule(module))
    return {one.id().partition(".")[2]: functools.partial(_run, one) for one in found}


def _forked(test: Any) -> None:
    """Its ranks, as `_spawn_processes` of torch's class begins them."""
    test._start_processes(multiprocessing.get_context("fork").Process)


def _flat(suite: Any) -> Iterator[Any]:
    for one in suite:
        if isinstance(one, unittest.TestSuite):
            yield from _flat(one)
        else:
            yield one


def _run(test: Any) -> Ended:
    result = unittest.TestResult()
    unittest.TestSuite([test]).run(result)
    for _, said in result.failures + result.errors:
        return "fail", said
    return ("skip", result.skipped[0][1]) if result.skipped else ("ok", "")


def _distributed(folder: str) -> dict[str, Any]:
    return {name: functools.partial(_together, name, folder) for name in torchs_own.names(folder, "nccl")}


def _together(name: str, folder: str) -> Ended:
    """On this rank of those that run it."""
    import torch
    import torch.distributed as dist

    rank, run = int(os.environ["RANK"]), os.environ["RUN"]
    test = getattr(torchs_own.suite(os.path.join(folder, run), "nccl"), name)
    if getattr(test, "__unittest_skip__", False):
        return "skip", test.__unittest_skip_why__
    torch.cuda.set_device(rank)
    os.environ["LOCAL_RANK"] = str(rank)
    os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)  # torch's decorator of levels leaves the last one, here DETAIL
    dist.set_debug_level_from_env()
    store = dist.FileStore(os.path.join(folder, f"store-{run}-{name}"), torchs_own.RANKS)
    try:
        found = torchs_own.outcome(name, os.path.join(folder, run), store, "nccl")
    except BaseException:
        found = traceback.format_exc()
    if dist.is_initialized():  # no rank can go on with it
        return LEFT, found
    if found.startswith(("skip", "exit")):
        return "skip", found
    return ("ok", "") if found == "ok" else ("fail", found)


if __name__ == "__main__":
    main()
