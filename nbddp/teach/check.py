"""The checks of all exercises: `from nbddp.teach import check; check.gpus_of(gpus_of)`.

Each is an `Exercise`: called with what the learner wrote it prints one line, `ok` or what is wrong and why, and
returns it as an object with `.ok` and `.line`; `hint=True` adds the next hint. This file is the list of
them and no more.
"""

from __future__ import annotations

from nbddp.lessons.framework.answer import Answer, Exercise
from nbddp.lessons.framework.run_check import on
from nbddp.lessons.l01_one_program.exercise import share_of
from nbddp.lessons.l02_ranks_and_devices.exercise import gpus_of, place_of
from nbddp.lessons.l03_finding_each_other.exercise import by_address, by_host, by_rank, by_size
from nbddp.lessons.l04_collectives.exercise import chunk_to_send, ring_all_reduce
from nbddp.lessons.l05_averaging_gradients.exercise import attach_averaging, average_gradients
from nbddp.lessons.l06_samples.exercise import accuracy, epochs_of
from nbddp.lessons.l07_batch_norm.exercise import batch_statistics, sync_batch_norm
from nbddp.lessons.l08_buckets_and_overlap.exercise import exposed, pack
from nbddp.lessons.l09_hangs.exercise import missing_ranks, train_uneven
from nbddp.lessons.l10_restarts.exercise import Checkpoint
from nbddp.lessons.l11_launching.exercise import nodes_of, variables_of
from nbddp.lessons.l12_what_if.exercise import all_reduce_seconds
from nbddp.lessons.l13_mean_of_means.exercise import accumulate, learning_rate, token_weighted_backward
from nbddp.lessons.l14_precision.exercise import clip_global_norm, step_together
from nbddp.lessons.l15_sharding.exercise import bytes_per_rank, rest_of_epoch, sharded_step
from nbddp.lessons.l16_tensor_parallel.exercise import column_then_row, groups_of
from nbddp.lessons.l17_pipelines.exercise import run_stage, schedule_1f1b
from nbddp.lessons.l18_capstone.exercise import capstone

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
