"""Lesson 02: which node and local rank a rank has, and which GPUs are its own.

Both are arithmetic on the arguments, judged by tables over several layouts, and worked out on every rank of the
pool: an answer that comes from the process's own environment differs from rank to rank.
"""

from __future__ import annotations

from typing import Any

from nbddp.lessons.answer import Exercise
from nbddp.lessons.placement.simulation import block
from nbddp.lessons.running import judged_by
from nbddp.lessons.tables import Case, Mistake, Table
from nbddp.plan.machine import several
from nbddp.plan.topology import counted

NODES = 2
LAYOUTS = ((4, 1), (2, 2), (1, 4), (3, 2))  # processes per node, GPUs per process
GPU_CASES = tuple((rank, local, own) for local, own in LAYOUTS for rank in range(NODES * local))
PLACE_CASES = tuple((rank, local) for local in (4, 2, 1, 3) for rank in range(3 * local))


def why_not_these(case: Case, answer: Any) -> str:
    """What cannot be about the GPUs that were answered, in the order in which it would show on a machine."""
    rank, local, own = case
    if not isinstance(answer, list):
        return "a list is wanted, of one index for each GPU of the process"
    if not all(type(i) is int for i in answer):
        return "device indices are whole numbers: 0 is the first GPU of the node, cuda:0"
    beyond = [i for i in answer if not 0 <= i < local * own]
    if beyond:
        return f"the node has GPUs 0–{local * own - 1}, and {several('GPU', beyond)} {_is(beyond)} not there"
    if len(answer) != own:
        return f"it has {len(answer)} where the process owns {own}"
    others = {i: r for r in range(local) if r != rank % local for i in block(r, own)}
    taken = [i for i in answer if i in others]
    if taken:
        return f"{several('GPU', taken)} {_is(taken)} local rank {others[taken[0]]}'s on the same node"
    return "they are the right ones in another order" if sorted(answer) == block(rank % local, own) else ""


def _is(some: list[int]) -> str:
    return "is" if len(some) == 1 else "are"


def why_not_there(case: Case, answer: Any) -> str:
    """What cannot be about the pair that was answered, or what rule gives the right one."""
    rank, local = case
    if not isinstance(answer, list) or len(answer) != 2:
        return "a pair is wanted: (node, local rank)"
    if not all(type(i) is int for i in answer):
        return "both are whole numbers"
    if not 0 <= answer[1] < local:
        return f"a node has {counted(local, 'rank')} here, so the last local rank is {local - 1}"
    if answer[1] != rank % local:
        return "the local rank is how many ranks of the same node come before this one"
    return "the node is how many full nodes come before this rank: nproc_per_node ranks make one full"


def for_always(local: int) -> Mistake:
    return Mistake(
        f"that is for {local} processes per node; nproc_per_node says how many there are",
        lambda rank, _: [rank // local, rank % local],
    )


GPUS = Table(
    "gpus_of",
    GPU_CASES,
    lambda rank, local, own: block(rank % local, own),
    (
        Mistake(
            "that counts GPUs over all nodes, by the global rank; device indices begin at 0 again on every node, so "
            "take the local rank",
            lambda rank, local, own: block(rank, own),
        ),
        Mistake(
            "the global rank is no device index; indices begin at 0 again on every node, and a process owns "
            "gpus_per_proc of them",
            lambda rank, local, own: [rank],
        ),
        Mistake(
            "the blocks overlap: local rank 1 begins where local rank 0's GPUs end, at 1 × gpus_per_proc",
            lambda rank, local, own: list(range(rank % local, rank % local + own)),
        ),
        Mistake(
            "that is the first GPU of the process alone; it owns gpus_per_proc of them",
            lambda rank, local, own: [rank % local * own],
        ),
        Mistake(
            "that is the local rank, which is the device index only if every process owns one GPU",
            lambda rank, local, own: [rank % local],
        ),
        Mistake(
            "no GPU is taken twice, but a process owns GPUs that lie side by side, not every so many",
            lambda rank, local, own: [rank % local + k * local for k in range(own)],
        ),
        Mistake(
            "rank // nproc_per_node is the node; the remainder, rank % nproc_per_node, is the local rank",
            lambda rank, local, own: block(rank // local, own),
        ),
        Mistake(
            "the local rank is rank % nproc_per_node, not rank % gpus_per_proc",
            lambda rank, local, own: block(rank % own, own),
        ),
    ),
    why_not_these,
)
PLACES = Table(
    "place_of",
    PLACE_CASES,
    lambda rank, local: [rank // local, rank % local],
    (
        Mistake(
            "the two are the other way round: the node first, then the local rank",
            lambda rank, local: [rank % local, rank // local],
        ),
        Mistake(
            "nodes and local ranks are counted from 0, as ranks are",
            lambda rank, local: [rank // local + 1, rank % local + 1],
        ),
        Mistake("nodes are counted from 0, as ranks are", lambda rank, local: [rank // local + 1, rank % local]),
        Mistake(
            "the second is the global rank; local ranks begin at 0 again on every node",
            lambda rank, local: [rank // local, rank],
        ),
        Mistake(
            "that deals ranks out to the nodes in turn; torchrun fills node 0 first, then node 1",
            lambda rank, local: [rank % 3, rank // 3],
        ),
        for_always(2),
        for_always(4),
        Mistake(
            "/ divides to a float; // gives the whole number of full nodes before this rank",
            lambda rank, local: [rank / local, rank % local],
        ),
    ),
    why_not_there,
)


gpus_of = Exercise(
    "gpus_of",
    judged_by(GPUS),
    (
        "device indices begin at 0 on every node, so the node a rank is on must not matter",
        "the local rank is rank % nproc_per_node; each local rank before this one owns gpus_per_proc GPUs",
        "the first GPU is local_rank × gpus_per_proc, and there are gpus_per_proc in a row: list(range(first, ...))",
    ),
    verifies=f"{len(GPU_CASES)} ranks of {len(LAYOUTS)} layouts on two nodes, on every rank of the pool",
)
place_of = Exercise(
    "place_of",
    judged_by(PLACES),
    (
        "torchrun fills node 0 with the first nproc_per_node ranks, node 1 with the next, and so on",
        "how many full nodes come before this rank? And how many ranks of its own node?",
        "divmod(rank, nproc_per_node) gives both at once",
    ),
    verifies=f"{len(PLACE_CASES)} ranks of 4 layouts on three nodes, on every rank of the pool",
)
