"""Lesson 03: answers to its exercises, wrong and right."""

from __future__ import annotations

from tests.lessons.tables import Table, within


def env(**parts: str) -> str:
    given = {"MASTER_ADDR": "'node0'", "MASTER_PORT": "29400", "WORLD_SIZE": "4", "RANK": "2 * node + local_rank"}
    rows = ", ".join(f"{k!r}: {v}" for k, v in {**given, **parts}.items() if v)
    return f"{{{rows}}}"


LOCAL = "localhost means its own node, but rank 0 is on another"
PROCESS = "def by_address(node, local_rank):\n    return ..."
BY_ADDRESS = Table("by_address", within(PROCESS), unwritten=LOCAL, every=3, nproc=4, wrong={
    env(MASTER_ADDR="'localhost'"): LOCAL,
    env(MASTER_ADDR="'127.0.0.1'"): "127.0.0.1 means its own node",
    env(MASTER_ADDR="'node7'"): "looks for a host called node7; the nodes are node0 and node1",
    env(RANK="0"): "rank 0 on node0 has no place: rank 0 is taken",
    env(RANK="2 * node + local_rank + 1"): "no process has rank 0, which hosts the store",
    env(WORLD_SIZE="6"): "rank 0 on node0 waits for ranks 4–5, but only 4 processes are started",
    env(WORLD_SIZE="2"): "rank 2 on node1 has no place: with WORLD_SIZE 2 the last rank is 1",
    env(WORLD_SIZE="4 + node"): "WORLD_SIZE must be the same on every process; here it is 4 and 5",
    env(RANK="0", WORLD_SIZE="1", MASTER_ADDR="f'node{node}'", MASTER_PORT="29400 + local_rank"):
        "each process meets only itself; all 4 must meet in one group",
    env(RANK="local_rank", WORLD_SIZE="2", MASTER_ADDR="f'node{node}'"):
        "each process meets only 2 of them; all 4 must meet in one group",
    env(MASTER_PORT=""): "by_address(0, 0) does not set MASTER_PORT",
    env(RANK="'first'"): "by_address(0, 0) sets RANK to 'first'; it must be an integer",
    env(MASTER_PORT="0"): "sets MASTER_PORT to 0; ports are numbered",
    env(RANK="local_rank - 2 * node"): "by_address(1, 0) sets RANK to -2; it must be an integer, 0 or greater",
    env(RANK="3 - 2 * node - local_rank"): "; rank 0 runs on node1, and its store is at port 29400 there",
    env(MASTER_ADDR="'node0:29400'"): "looks for a host called node0:29400; the nodes are",
    "def by_address(node, local_rank):\n"
    "    if node == 0: return {'MASTER_ADDR': 'node0', 'MASTER_PORT': 29400, 'WORLD_SIZE': 4, 'RANK': local_rank}":
        "by_address(1, 0) is None; here the function ends without a value",
    env().replace("MASTER_ADDR", "MASTER_ADRR"): "does not set MASTER_ADDR",
    "def by_address(node, local_rank):\n    import os\n    return os.environ":
        "by_address(0, 0) is os.environ; return a dict with MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE",
    "def by_address(node, local_rank): return [1]": "by_address(0, 0) is [1]; return a dict with",
    "def by_address(node, local_rank): return 1 // node": "by_address(0, 0) raised ZeroDivisionError",
    env(MASTER_PORT="99999"): "sets MASTER_PORT to 99999; ports are numbered from 1 to 65535",
    env(MASTER_ADDR="'node1'"): "finds no store: rank 0 hosts none at node1:29400",
})  # fmt: skip

TAKEN = "rank 0 on node1 has no place: rank 0 is taken by rank 0 on node0"
BY_RANK = Table("by_rank", within("def by_rank(node, local_rank):\n    return ..."), nproc=4, unwritten=TAKEN, right=[
    env(RANK="local_rank * 2 + node", WORLD_SIZE="'4'"),
    env(RANK="[[0, 1], [2, 3]][node][local_rank]"),
    env(MASTER_ADDR="'Node0'"),
    env(MASTER_ADDR="'node1'", RANK="2 - 2 * node + local_rank"),
    env(MASTER_ADDR="['localhost', 'node0'][node]"),
])  # fmt: skip
BY_SIZE = Table("by_size", nproc=4, unwritten="rank 0 on node0 waits for ranks 4–5")
BY_HOST = Table("by_host", nproc=4, unwritten="no process has rank 0, which hosts the store")
