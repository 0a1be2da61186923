"""Lesson 12: a step on more nodes, with another network, model, and number of micro-batches per exchange."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Choice, Explorer, Slider
from nbddp.lessons.l12_what_if.figure import draw_what_if
from nbddp.lessons.l12_what_if.simulation import DELAYS, MODELS, MOST_NODES, SPEEDS, simulate_what_if


def what_if() -> Explorer:
    """Lesson 12: a step on more nodes, with another network, model, and number of micro-batches per exchange."""
    return Explorer(
        lambda **chosen: draw_what_if(simulate_what_if(**chosen)),
        (
            Slider("nodes", "nodes", 1, MOST_NODES),
            Choice("link", "link of a node", SPEEDS),
            Choice("latency", "latency", DELAYS),
            Choice("model", "parameters", tuple(MODELS)),
            Slider("micro_batches", "micro-batches", 1, 16),
        ),
        (
            {"nodes": 1, "link": "400Gb/s", "latency": "10us", "model": "100 M", "micro_batches": 1},
            {"nodes": 8, "link": "100Gb/s", "latency": "10us", "model": "1 B", "micro_batches": 1},
        ),
    )
