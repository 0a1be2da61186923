"""What the gate before the ranks' store and the check of gloo's connections cost, on this machine, now.

Run by hand: `python tests/benchmarks/gate.py [--rounds 10] [--ranks 2 4 64]`. Inits are timed in turn on a pool with
both and on one with neither, whose store is torch's own server.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from nbddp.capabilities.private import sock_owner
from nbddp.launch.options import LaunchSpec
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests.versions import hidden

ROOT = Path(__file__).parents[2]
SET_UP = (
    "import os, time, torch, torch.distributed as dist\nfrom nbddp.capabilities.private import "
    "on_rank as pairs\nt = torch.ones(1)\n"
)
INIT = """
began = time.perf_counter()
dist.init_process_group('gloo'); dist.all_reduce(t); dist.destroy_process_group()
time.perf_counter() - began
"""
SHARE = """
known, inside = pairs.check, []
def check(*given):
    began, cpu = time.perf_counter(), time.thread_time()
    try: return known(*given)
    finally: inside.append((time.perf_counter() - began, time.thread_time() - cpu))
pairs.check = check
began, cpu = time.perf_counter(), time.thread_time()
dist.init_process_group('gloo')
took = time.perf_counter() - began, time.thread_time() - cpu
pairs.check = known
dist.all_reduce(t); dist.destroy_process_group()
inside[0], took
"""
STORE = """
from datetime import timedelta
store = dist.TCPStore('127.0.0.1', int(os.environ['MASTER_PORT']), is_master=False)
def each(work, n):
    began = time.perf_counter()
    for _ in range(n): work()
    return (time.perf_counter() - began) / n
key, large = f'large{os.environ["RANK"]}', bytes(8 << 20)
small = each(lambda: (store.set(key, 'a'), store.get(key)), 500) / 2
big = each(lambda: (store.set(key, large), store.get(key)), 3)
store.delete_key(key)
small, big
"""


def values(pool: WorkerPool, code: str, ranks: list[int] | None = None) -> list[Any]:
    return list(pool.run_cell(SET_UP + code, want_value=True, ranks=ranks, hang_after=None, screen=NullScreen()))


def each(work: Callable[[], object], times: int = 1000) -> float:
    """Microseconds of one call, the median of five series."""
    series = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(times):
            work()
        series.append((time.perf_counter() - began) / times * 1e6)
    return statistics.median(series)


def questions(pool: WorkerPool) -> None:
    """How long the kernel takes to say whose a connection is, and /proc to say which process's."""
    assert pool.agent is not None
    with ExitStack() as stack:
        door = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        near = stack.enter_context(socket.create_connection(door.getsockname()))
        stack.enter_context(door.accept()[0])
        kernel, here = stack.enter_context(sock_owner.SockDiag()), sock_owner.ends(near)
        print(f"whose a connection is: {each(lambda: kernel.owner(*here)):.1f} µs")
    family = sock_owner.ProcessTree(pool.agent.hello.pid)
    for rank in (0, pool.world_size - 1):
        pid = pool.workers[rank].pid
        inode = max(sock_owner.held_by(pid, {-1}))
        took = each(lambda i=inode: family.holders({i}), 20)
        print(f"which of {pool.world_size} ranks has it, if it is rank {rank}: {took:.0f} µs")
    print(f"that no process has it: {each(lambda: family.holders({1}), 5):.0f} µs")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 64])
    asked = options.parse_args()
    with ExitStack() as stack:
        guarded = stack.enter_context(WorkerPool(nproc=asked.ranks[0], oversubscribe=True))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        hidden.in_agents(Path(folder), hidden.gate)
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, str(ROOT)])
        bare = stack.enter_context(WorkerPool(nproc=asked.ranks[0], oversubscribe=True))
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
        for name, pool in (("through the gate", guarded), ("to torch's own server", bare)):
            small, big = values(pool, STORE, [0])[0]
            print(f"set or get {name}: {small * 1e6:.1f} µs; 8 MB set and get: {big * 1e3:.0f} ms")
        print("\n| ranks | init, all_reduce, destroy | without | ratio | the check in an init: time, CPU of the rank |")
        print("|---|---|---|---|---|")
        for ranks in asked.ranks:
            for pool in (guarded, bare):
                pool.ensure(LaunchSpec(nproc=ranks, oversubscribe=True))
                values(pool, INIT)
            samples = [[max(values(pool, INIT)) for pool in (guarded, bare)] for _ in range(asked.rounds)]
            ours, theirs = (statistics.median(column) * 1e3 for column in zip(*samples, strict=True))
            shares = [pair for _ in range(3) for pair in values(guarded, SHARE)]
            wall = statistics.median(check[0] / took[0] for check, took in shares)
            cpu = statistics.median(check[1] for check, _ in shares)
            part = statistics.median(check[1] / took[1] for check, took in shares)
            print(
                f"| {ranks} | {ours:.1f} ms | {theirs:.1f} ms | {ours / theirs:.2f} | {wall:.0%}; {cpu * 1e6:.0f} µs, "
                f"{cpu * 1e6 / (ranks - 1):.0f} µs a pair, {part:.0%} |",
                flush=True,
            )
        questions(guarded)


if __name__ == "__main__":
    main()
