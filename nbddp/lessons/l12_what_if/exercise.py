"""Lesson 12's exercise: the seconds of a ring all-reduce in the α–β model, a table.

All cases come out exact in floats, in whatever order one multiplies: latency, bytes and bandwidth are powers of two.
"""

from __future__ import annotations

from typing import Any

from nbddp.lessons.framework.answer import Exercise
from nbddp.lessons.framework.run_check import judged_by
from nbddp.lessons.framework.tables import Case, TableExercise

SETTINGS = ((2.0**28, 2.0**-14, 2.0**33), (2**4, 2.0**-12, 2.0**12), (2.0**20, 2.0**-16, 2.0**35))
CASES = tuple((ranks, *setting) for setting in SETTINGS for ranks in (8, 2, 64, 1))


def right_seconds(ranks: int, size: float, latency: float, bandwidth: float) -> float:
    messages = 2 * (ranks - 1)
    return messages * (latency + size / ranks / bandwidth)


def _as(messages: Any, waits: Any = lambda a: a, moves: Any = lambda n, m, b: m / n / b) -> Any:
    """What comes of another number of messages, another latency or another time to move a message."""

    def would(ranks: int, size: float, latency: float, bandwidth: float) -> float:
        return float(messages(ranks) * (waits(latency) + moves(ranks, size, bandwidth)))

    return would


def _both(n: int) -> int:
    return 2 * (n - 1)


MISTAKES = {
"that is one half, the reduce-scatter; an all-gather of as many messages follows": _as(lambda n: n - 1),
"each of the 2 (n - 1) messages has 1/n of the buffer, not all of it": _as(_both, moves=lambda n, m, b: m / b),
"the latency is missing: every message pays it": _as(_both, waits=lambda a: 0.0),
"the latency is paid by every message, not once": lambda n, m, a, b: a + _both(n) * m / n / b if n > 1 else 0.0,
"the latency is paid by every message, not once, and one rank sends none": lambda n, m, a, b: a + _both(n) * m / n / b,
"the time to move the bytes is missing": _as(_both, moves=lambda n, m, b: 0.0),
"that is one message; a ring sends 2 (n - 1) one after another": _as(lambda n: 1, moves=lambda n, m, b: m / b),
"there are n - 1 steps in each half, not n": _as(lambda n: 2 * n),
"both halves have n - 1 messages": _as(lambda n: 2 * n - 1),
"bytes are divided by the bandwidth": _as(_both, moves=lambda n, m, b: m / n * b),
}  # fmt: skip


def why_not(case: Case, answer: Any) -> str:
    if type(answer) not in (int, float):
        return "return a number of seconds"
    ratios = {
        1e3: "that is in milliseconds; seconds are asked for",
        1e6: "that is in microseconds; seconds are asked for",
    }
    right = right_seconds(*case)
    return next((words for by, words in ratios.items() if right and abs(answer / right / by - 1) < 1e-9), "")


SECONDS = TableExercise("all_reduce_seconds", CASES, right_seconds, MISTAKES, why_not, exact=False)
all_reduce_seconds = Exercise(
    "all_reduce_seconds",
    judged_by(SECONDS),
    verifies="the α–β model's seconds for 1 to 64 ranks, three sizes and three links",
)
