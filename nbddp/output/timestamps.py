"""The stamps of log lines: time, process and rank, in which the same warning differs from rank to rank.

torch's C++ code writes `[rank3]:[W1123 06:05:58.123456789 ProcessGroupNCCL.cpp:1250] Warning: …`, and glog and torch's
Python logs `W1123 06:05:58.123456 4711 torch/distributed/run.py:792] …`. Pure.
"""

from __future__ import annotations

import re

_STAMP = re.compile(
    r"^(?:\[rank\d+\]: ?)?"  # the rank
    r"(\[?[VDIWEF])\d{4} \d\d:\d\d:\d\d\.\d+ +"  # severity, month and day, time
    r"(?:\d+ +)?"  # process or thread
    r"(?=[\w./\\-]+:\d+\])",  # the place in the source
    re.MULTILINE,
)


def unstamped(text: str) -> tuple[str, int]:
    """The text without what comes before the place in the source, save for the severity; and in how many lines."""
    return _STAMP.subn(r"\1 ", text)
