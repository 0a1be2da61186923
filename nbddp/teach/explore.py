"""All explorers: `from nbddp.teach import explore; explore.layout()`. This file is the list of them and no more."""

from __future__ import annotations

from nbddp.teach.explorers.averaging import averaging
from nbddp.teach.explorers.buckets import buckets, measured_buckets
from nbddp.teach.explorers.collectives import collectives
from nbddp.teach.explorers.launching import launch
from nbddp.teach.explorers.moments import statistics
from nbddp.teach.explorers.placement import layout
from nbddp.teach.explorers.rendezvous import arrived
from nbddp.teach.explorers.restarts import restarts
from nbddp.teach.explorers.ring import ring
from nbddp.teach.explorers.samples import samples
from nbddp.teach.explorers.spmd import order
from nbddp.teach.explorers.whatif import what_if
from nbddp.teach.explorers.zero import zero

__all__ = [
    "arrived",
    "averaging",
    "buckets",
    "collectives",
    "launch",
    "layout",
    "measured_buckets",
    "order",
    "restarts",
    "ring",
    "samples",
    "statistics",
    "what_if",
    "zero",
]
