"""Times, speeds, sizes and shares as people read them: the same for a figure's text, a table and a test. And which
ranks get a row where space is limited: those that the text names, then the lowest.

Three digits where that says enough, with the unit that fits. What people type is read by `units`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

MOST = 16  # ranks with a row


def digits(value: float) -> str:
    """`123`, `12.3`, `1.23`: three digits, of a value that is to be below 1000."""
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


def duration(seconds: float) -> str:
    """`412 µs`, `12.3 ms`, `1.23 s`; `0 ms` for none."""
    if not seconds:
        return "0 ms"
    units = ((1.0, "s"), (1e3, "ms"))
    value, unit = next(((seconds * by, u) for by, u in units if seconds * by >= 0.9995), (seconds * 1e6, "µs"))
    return f"{digits(value)} {unit}"


def speed(bytes_per_second: float) -> str:
    """`25.0 GB/s`, `125 MB/s`; decimal, as nccl-tests has it."""
    if bytes_per_second == float("inf"):
        return "too high to be seen"
    if bytes_per_second >= 0.9995e9:
        return f"{digits(bytes_per_second / 1e9)} GB/s"
    return f"{digits(bytes_per_second / 1e6)} MB/s"


def size(count: float) -> str:
    """Bytes by powers of 1024, as buckets and messages are cut: `24 MiB`, `3.8 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if count >= 10 or unit == "B" else f"{count:.1f} {unit}"


def amount(count: float) -> str:
    """Bytes by powers of 1000, as a GPU's memory and a model's parameters are counted: `2.00 GB`, `20.0 MB`."""
    units = ((1e9, "GB"), (1e6, "MB"))
    value, unit = next(((count / by, u) for by, u in units if count >= 0.9995 * by), (count / 1e3, "KB"))
    return f"{digits(value)} {unit}"


def percent(share: float) -> str:
    """`94 %`, `0.4 %`, `<0.1 %`."""
    value = 100 * share
    if 0 < value < 0.1:
        return "<0.1 %"
    return f"{value:.1f} %" if 0 < value < 9.95 else f"{value:.0f} %"


def drawn(ranks: Iterable[int], named: Iterable[int] = ()) -> list[int]:
    """At most MOST of these ranks, in order; `named` ones first of all, but no rank that is not there."""
    every = sorted(ranks)
    wanted = [r for r in dict.fromkeys(named) if r in every]
    return sorted([*wanted, *(r for r in every if r not in wanted)][:MOST])


def note(ranks: int, shown: int) -> str:
    """What is said where not all are drawn; empty where all are."""
    return f"{shown} of {ranks} ranks are drawn" if shown < ranks else ""
