"""The clock of nbddp's own functions, whatever a program puts in the place of the standard library's.

A test may replace `time.monotonic` or `time.time`, and freezegun replaces them in the namespace of every module that
has imported them. So they are attributes of an object here.
"""

from __future__ import annotations

import time


class Clock:
    """The functions of `time` as they were when this module was imported."""

    monotonic = staticmethod(time.monotonic)
    perf_counter = staticmethod(time.perf_counter)
    perf_counter_ns = staticmethod(time.perf_counter_ns)
    process_time = staticmethod(time.process_time)
    thread_time_ns = staticmethod(time.thread_time_ns)
    time_ns = staticmethod(time.time_ns)
    sleep = staticmethod(time.sleep)


clock = Clock()
