"""The checks of all exercises: `from nbddp.teach import check; check.gpus_of(gpus_of)`.

Each is an `Exercise`: called with what the learner wrote it prints one line, `ok` or what is wrong and why, and
returns it as an object with `.ok` and `.line`; `hint=True` adds the next hint. This file is the list of
them and no more.
"""

from __future__ import annotations

from nbddp.teach.answer import Answer, Exercise
from nbddp.teach.checks.averaging import attach_averaging, average_gradients
from nbddp.teach.checks.beyond import accumulate, bytes_per_rank
from nbddp.teach.checks.buckets import exposed, pack
from nbddp.teach.checks.hangs import missing_ranks, train_uneven
from nbddp.teach.checks.moments import batch_statistics, sync_batch_norm
from nbddp.teach.checks.placement import gpus_of, place_of
from nbddp.teach.checks.rendezvous import by_address, by_host, by_rank, by_size
from nbddp.teach.checks.restart import Checkpoint
from nbddp.teach.checks.ring import chunk_to_send, ring_all_reduce
from nbddp.teach.checks.samples import accuracy, epochs_of
from nbddp.teach.checks.slurm import nodes_of, variables_of
from nbddp.teach.checks.spmd import share_of
from nbddp.teach.running import on

__all__ = [
    "Answer",
    "Checkpoint",
    "Exercise",
    "accumulate",
    "accuracy",
    "attach_averaging",
    "average_gradients",
    "batch_statistics",
    "by_address",
    "by_host",
    "by_rank",
    "by_size",
    "bytes_per_rank",
    "chunk_to_send",
    "epochs_of",
    "exposed",
    "gpus_of",
    "missing_ranks",
    "nodes_of",
    "on",
    "pack",
    "place_of",
    "ring_all_reduce",
    "share_of",
    "sync_batch_norm",
    "train_uneven",
    "variables_of",
]
