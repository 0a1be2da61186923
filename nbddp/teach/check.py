"""The checks of all exercises: `from nbddp.teach import check; check.gpus_of(gpus_of)`.

Each is an `Exercise`: called with what the learner wrote it prints one line, `ok` or what is wrong and why, and
returns it as an object with `.ok` and `.line`; `hint=True` adds the next hint. This file is the list of
them and no more.
"""

from __future__ import annotations

from nbddp.lessons.answer import Answer, Exercise
from nbddp.lessons.averaging.exercises import attach_averaging, average_gradients
from nbddp.lessons.batch_norm.exercises import batch_statistics, sync_batch_norm
from nbddp.lessons.buckets.exercises import exposed, pack
from nbddp.lessons.capstone.exercises import capstone
from nbddp.lessons.hangs.exercises import missing_ranks, train_uneven
from nbddp.lessons.launching.exercises import nodes_of, variables_of
from nbddp.lessons.mean_of_means.exercises import accumulate, learning_rate, token_weighted_backward
from nbddp.lessons.pipelines.exercises import run_stage, schedule_1f1b
from nbddp.lessons.placement.exercises import gpus_of, place_of
from nbddp.lessons.precision.exercises import clip_global_norm, step_together
from nbddp.lessons.rendezvous.exercises import by_address, by_host, by_rank, by_size
from nbddp.lessons.restarts.exercises import Checkpoint
from nbddp.lessons.ring.exercises import chunk_to_send, ring_all_reduce
from nbddp.lessons.running import on
from nbddp.lessons.samples.exercises import accuracy, epochs_of
from nbddp.lessons.sharding.exercises import bytes_per_rank, rest_of_epoch, sharded_step
from nbddp.lessons.spmd.exercises import share_of
from nbddp.lessons.tensor_parallel.exercises import column_then_row, groups_of
from nbddp.lessons.what_if.exercises import all_reduce_seconds

__all__ = [
    "Answer",
    "Checkpoint",
    "Exercise",
    "accumulate",
    "accuracy",
    "all_reduce_seconds",
    "attach_averaging",
    "average_gradients",
    "batch_statistics",
    "by_address",
    "by_host",
    "by_rank",
    "by_size",
    "bytes_per_rank",
    "capstone",
    "chunk_to_send",
    "clip_global_norm",
    "column_then_row",
    "epochs_of",
    "exposed",
    "gpus_of",
    "groups_of",
    "learning_rate",
    "missing_ranks",
    "nodes_of",
    "on",
    "pack",
    "place_of",
    "rest_of_epoch",
    "ring_all_reduce",
    "run_stage",
    "schedule_1f1b",
    "sharded_step",
    "share_of",
    "step_together",
    "sync_batch_norm",
    "token_weighted_backward",
    "train_uneven",
    "variables_of",
]
