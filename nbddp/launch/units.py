"""Speeds, times and sizes as people type them: `25GB/s`, `200Gb/s`, `10us`, `10m`, `64MiB`."""

from __future__ import annotations

import math
import re

_NUMBER = r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*"
_SPEED = re.compile(_NUMBER + r"(?:([kKMGT])(i?))?([Bb]|bit)(?:/s|ps)\s*")
_TIME = re.compile(_NUMBER + r"(ns|us|µs|μs|ms|s)\s*")
_SIZE = re.compile(_NUMBER + r"(?:([kKMGT])(i?))?B?\s*")
_LASTING = re.compile(_NUMBER + r"([smh])\s*")
_LONG = {"s": 1, "m": 60, "h": 3600}
MOST_SECONDS = 7 * 24 * 3600
MOST_BYTES = 1 << 40
_PREFIX = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}  # two letters look like µ


def speed(text: str) -> float:
    """`25GB/s` → 25e9 bytes per second; `Gb/s` are bits, `GiB/s` powers of 1024. Raises ValueError with a sentence that
    says what to type."""
    found = _SPEED.fullmatch(text)
    if found is None:
        raise ValueError(_speed_advice(text))
    number, prefix, binary, unit = found.groups()
    value: float = float(number) * (1024 if binary else 1000) ** _PREFIX[(prefix or "").upper()]
    if not 0 < value < math.inf:
        raise ValueError(f"{text!r} is not a link speed; type a positive one, such as 25GB/s")
    return value if unit == "B" else value / 8


def _speed_advice(text: str) -> str:
    if re.fullmatch(_NUMBER, text):
        return f"{text!r} has no unit; type {text.strip()}GB/s for bytes or {text.strip()}Gb/s for bits per second"
    if _SPEED.fullmatch(text.replace("g", "G").replace("m", "M").replace("t", "T")):
        return f"{text!r} has a lower-case prefix; type GB/s for bytes or Gb/s for bits per second, as in 25GB/s"
    return f"{text!r} is not a speed; type a number with its unit, such as 25GB/s, 200Gb/s, 800MB/s or 12GiB/s"


def delay(text: str) -> float:
    """`10us` → 1e-5 seconds; ns, us or µs, ms, s. Raises ValueError with a sentence that says what to type."""
    found = _TIME.fullmatch(text)
    if found is not None:
        return float(found[1]) * _SECONDS[found[2]]
    if re.fullmatch(_NUMBER, text):
        raise ValueError(f"{text!r} has no unit; type {text.strip()}us for microseconds, or ns, ms")
    raise ValueError(f"{text!r} is not a time; type a number with its unit, such as 10us, 800ns or 0.1ms")


def lasting(text: str) -> float:
    """`10m` → 600.0 seconds; s, m, h; 0 for `off`. Raises ValueError with a sentence that says what to type."""
    found = _LASTING.fullmatch(text)
    if text.strip() in ("off", "0"):
        return 0.0
    if found is not None and 0 < float(found[1]) * _LONG[found[2]] <= MOST_SECONDS:
        return float(found[1]) * _LONG[found[2]]
    if re.fullmatch(_NUMBER, text):
        raise ValueError(f"{text!r} has no unit; type {text.strip()}m for minutes, {text.strip()}s for seconds, or off")
    if found is not None:
        raise ValueError(f"{text!r} is not a time between 0 and a week; type one such as 10m, 90s or 2h, or off")
    raise ValueError(f"{text!r} is not a time; type a number with its unit, such as 10m, 90s or 2h, or off")


def lasts(seconds: float) -> str:
    """`10m` for 600 seconds; the largest units, rounded up to whole seconds."""
    left = math.ceil(seconds)
    parts = [(left // 3600, "h"), (left % 3600 // 60, "m"), (left % 60, "s")]
    return " ".join(f"{number}{unit}" for number, unit in parts if number) or "0s"


def amount(text: str) -> int:
    """`64MiB` → 67108864 bytes; `KB` and `MB` are powers of 1000, a bare number is bytes. Raises ValueError with a
    sentence that says what to type."""
    found = _SIZE.fullmatch(text)
    value = 0.0
    if found is not None:
        value = float(found[1]) * (1024 if found[3] else 1000) ** _PREFIX[(found[2] or "").upper()]
    if not 1 <= value <= MOST_BYTES:
        raise ValueError(f"{text!r} is not a size that can be measured; type one such as 64MiB, 4KiB or 1000")
    return int(value)
