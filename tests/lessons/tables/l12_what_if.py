"""Lesson 12: answers to its exercises, wrong and right."""

from __future__ import annotations

from tests.lessons.tables import Table, within

SECONDS = "def all_reduce_seconds(ranks, size, latency, bandwidth):\n    n, m, a, b = ranks, size, latency, bandwidth\n"
SECONDS += "    return "
ALL_REDUCE_SECONDS = Table("all_reduce_seconds", within(SECONDS + "..."), wrong={
    "(n - 1) * (a + m / n / b)": "that is one half, the reduce-scatter",
    "2e3 * (n - 1) * (a + m / n / b)": "that is in milliseconds",
    "'1 s'": "return a number of seconds",
}, right=["2 * (n - 1) * a + 2 * (n - 1) / n * m / b"])  # fmt: skip
