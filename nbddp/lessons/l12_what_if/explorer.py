"""Lesson 12: a step on more nodes, with another network, model, and number of micro-batches per exchange."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Choice, Explorer, Slider
from nbddp.lessons.l12_what_if.figure import draw_what_if
from nbddp.lessons.l12_what_if.simulation import DELAYS, MODELS, MOST_NODES, SPEEDS, simulate_what_if

what_if = Explorer(
    __doc__,
    simulate_what_if,
    draw_what_if,
    Slider("nodes", "nodes", 1, MOST_NODES, at=(1, 8)),
    Choice("link", "link of a node", SPEEDS, at=("400Gb/s", "100Gb/s")),
    Choice("latency", "latency", DELAYS, at=("10us", "10us")),
    Choice("model", "parameters", tuple(MODELS), at=("100 M", "1 B")),
    Slider("micro_batches", "micro-batches", 1, 16, at=(1, 1)),
    begins={"nodes": 16},
)
