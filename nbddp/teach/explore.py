"""All explorers: `from nbddp.teach import explore; explore.layout()`. This file is the list of them and no more."""

from __future__ import annotations

from nbddp.lessons.averaging.explorer import averaging
from nbddp.lessons.batch_norm.explorer import statistics
from nbddp.lessons.buckets.explorer import buckets, measured_buckets
from nbddp.lessons.capstone.explorer import training
from nbddp.lessons.hangs.explorer import collectives
from nbddp.lessons.launching.explorer import launch
from nbddp.lessons.mean_of_means.explorer import weights
from nbddp.lessons.pipelines.explorer import pipeline
from nbddp.lessons.placement.explorer import layout
from nbddp.lessons.precision.explorer import loss_scale
from nbddp.lessons.rendezvous.explorer import arrived
from nbddp.lessons.restarts.explorer import restarts
from nbddp.lessons.ring.explorer import before_after, ring
from nbddp.lessons.samples.explorer import samples
from nbddp.lessons.sharding.explorer import gathers, zero
from nbddp.lessons.spmd.explorer import order
from nbddp.lessons.tensor_parallel.explorer import mesh
from nbddp.lessons.what_if.explorer import what_if

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
