"""All explorers: `from nbddp.teach import explore; explore.layout()`. This file is the list of them and no more."""

from __future__ import annotations

from nbddp.lessons.l01_one_program.explorer import order
from nbddp.lessons.l02_ranks_and_devices.explorer import layout
from nbddp.lessons.l03_finding_each_other.explorer import arrived
from nbddp.lessons.l04_collectives.explorer import before_after, ring
from nbddp.lessons.l05_averaging_gradients.explorer import averaging
from nbddp.lessons.l06_samples.explorer import samples
from nbddp.lessons.l07_batch_norm.explorer import statistics
from nbddp.lessons.l08_buckets_and_overlap.explorer import buckets, measured_buckets
from nbddp.lessons.l09_hangs.explorer import collectives
from nbddp.lessons.l10_restarts.explorer import restarts
from nbddp.lessons.l11_launching.explorer import launch
from nbddp.lessons.l12_what_if.explorer import what_if
from nbddp.lessons.l13_mean_of_means.explorer import weights
from nbddp.lessons.l14_precision.explorer import loss_scale
from nbddp.lessons.l15_sharding.explorer import gathers, zero
from nbddp.lessons.l16_tensor_parallel.explorer import mesh
from nbddp.lessons.l17_pipelines.explorer import pipeline
from nbddp.lessons.l18_capstone.explorer import training

__all__ = [
    "arrived",
    "averaging",
    "before_after",
    "buckets",
    "collectives",
    "gathers",
    "launch",
    "layout",
    "loss_scale",
    "measured_buckets",
    "mesh",
    "order",
    "pipeline",
    "restarts",
    "ring",
    "samples",
    "statistics",
    "training",
    "weights",
    "what_if",
    "zero",
]
