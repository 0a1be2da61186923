"""Lesson 02: which node and local rank a rank has, and which GPUs are its own.

Both are arithmetic on the arguments, judged by tables over several layouts, on every rank of the pool. An answer from
the process's own environment differs from rank to rank.
"""

from __future__ import annotations

from typing import Any

from nbddp.errors import several
from nbddp.launch.topology import counted
from nbddp.lessons.framework.answer import Exercise
from nbddp.lessons.framework.run_check import judged_by
from nbddp.lessons.framework.tables import Case, TableExercise
from nbddp.lessons.l02_ranks_and_devices.simulation import block

NODES = 2
LAYOUTS = ((4, 1), (2, 2), (1, 4), (3, 2))  # processes per node, GPUs per process
GPU_CASES = tuple((rank, local, own) for local, own in LAYOUTS for rank in range(NODES * local))
PLACE_CASES = tuple((rank, local) for local in (4, 2, 1, 3) for rank in range(3 * local))


def why_not_these(case: Case, answer: Any) -> str:
    """Why these GPUs are wrong, in the order in which it would show on a machine."""
    rank, local, own = case
    if not isinstance(answer, list):
        return "return a list with one index for each GPU of the process"
    if not all(type(i) is int for i in answer):
        return "device indices are integers: 0 is the first GPU of the node, cuda:0"
    beyond = [i for i in answer if not 0 <= i < local * own]
    if beyond:
        return f"the node has GPUs 0–{local * own - 1}, but not {several('GPU', beyond)}"
    if len(answer) != own:
        return f"the list has {len(answer)} indices, but the process owns {counted(own, 'GPU')}"
    others = {i: r for r in range(local) if r != rank % local for i in block(r, own)}
    taken = [i for i in answer if i in others]
    if taken:
        return f"{several('GPU', taken)} {_is(taken)} owned by local rank {others[taken[0]]} on the same node"
    return (
        "the GPUs are right but in another order; the lowest index comes first"
        if sorted(answer) == block(rank % local, own)
        else ""
    )


def _is(some: list[int]) -> str:
    return "is" if len(some) == 1 else "are"


def why_not_there(case: Case, answer: Any) -> str:
    """Why this pair is wrong, or which rule gives the right one."""
    rank, local = case
    if not isinstance(answer, list) or len(answer) != 2:
        return "return a pair: (node, local rank)"
    if not all(type(i) is int for i in answer):
        return "both must be integers"
    if not 0 <= answer[1] < local:
        return f"a node has {counted(local, 'rank')} here, so the last local rank is {local - 1}"
    if answer[1] != rank % local:
        return "the local rank is the number of ranks of the same node that come before this one"
    return "the node is the number of full nodes before this rank; a full node has nproc_per_node ranks"


GPUS = TableExercise(
    "gpus_of",
    GPU_CASES,
    lambda rank, local, own: block(rank % local, own),
    {
        "that counts GPUs over all nodes, by the global rank; device indices begin at 0 on every node, so use "
        "the local rank": lambda rank, local, own: block(rank, own),
        "the global rank is not a device index; indices begin at 0 on every node, and a process owns "
        "gpus_per_proc GPUs": lambda rank, local, own: [rank],
        "the blocks overlap: local rank 1's GPUs begin where local rank 0's end, at 1 × gpus_per_proc": (
            lambda rank, local, own: list(range(rank % local, rank % local + own))
        ),
        "that is only the first GPU of the process; it owns gpus_per_proc GPUs": lambda rank, local, own: [
            rank % local * own
        ],
        "that is the local rank; it is the device index only if every process owns one GPU": lambda rank, local, own: [
            rank % local
        ],
        "no GPU is taken twice, but a process owns consecutive GPUs": lambda rank, local, own: [
            rank % local + k * local for k in range(own)
        ],
        "rank // nproc_per_node is the node; the remainder, rank % nproc_per_node, is the local rank": (
            lambda rank, local, own: block(rank // local, own)
        ),
        "the local rank is rank % nproc_per_node, not rank % gpus_per_proc": lambda rank, local, own: block(
            rank % own, own
        ),
    },
    why_not_these,
)
PLACES = TableExercise(
    "place_of",
    PLACE_CASES,
    lambda rank, local: [rank // local, rank % local],
    {
        "the two are swapped: return the node first, then the local rank": lambda rank, local: [
            rank % local,
            rank // local,
        ],
        "nodes and local ranks are numbered from 0, as ranks are": lambda rank, local: [
            rank // local + 1,
            rank % local + 1,
        ],
        "nodes are numbered from 0, as ranks are": lambda rank, local: [rank // local + 1, rank % local],
        "the second number is the global rank; local ranks begin at 0 on every node": lambda rank, local: [
            rank // local,
            rank,
        ],
        "that deals the ranks to the nodes in turn; torchrun fills node 0 first, then node 1": lambda rank, local: [
            rank % 3,
            rank // 3,
        ],
        "that is right for 2 processes per node only; use nproc_per_node": lambda rank, _: [rank // 2, rank % 2],
        "that is right for 4 processes per node only; use nproc_per_node": lambda rank, _: [rank // 4, rank % 4],
        "/ gives a float; // gives the number of full nodes before this rank": lambda rank, local: [
            rank / local,
            rank % local,
        ],
    },
    why_not_there,
)


gpus_of = Exercise(
    "gpus_of",
    judged_by(GPUS),
    verifies=f"{len(GPU_CASES)} ranks of {len(LAYOUTS)} layouts on two nodes, on every rank of the pool",
)
place_of = Exercise(
    "place_of",
    judged_by(PLACES),
    verifies=f"{len(PLACE_CASES)} ranks of 4 layouts on three nodes, on every rank of the pool",
)
