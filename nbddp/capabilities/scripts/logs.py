"""Where what ranks print is written and shown, as torchrun's `--log-dir`, `--redirects`, `--tee` and
`--local-ranks-filter` say it (torch/distributed/elastic/multiprocessing/api.py). Pure.

A set of streams is one of torchrun's numbers: 0 none, 1 stdout, 2 stderr, 3 both.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STREAMS = ("stdout", "stderr")
_SETS: dict[str, frozenset[str]] = {
    "0": frozenset(), "1": frozenset({"stdout"}), "2": frozenset({"stderr"}), "3": frozenset(STREAMS),
}  # fmt: skip
Which = Mapping[int | None, frozenset[str]]  # local rank → streams; None: every local rank
NONE: Which = {None: _SETS["0"]}


@dataclass(frozen=True)
class LogOptions:
    """folder: the base of the log directory; None: one is made, if any stream is written. redirects: streams that go to
    a file instead of the screen; tee: to both. only: local ranks that are shown; None: all. filters: for each stream,
    words: a line that has one of them is written to `filtered_stdout.log` as well."""

    folder: str | None = None
    redirects: Which = field(default_factory=lambda: NONE)
    tee: Which = field(default_factory=lambda: NONE)
    only: tuple[int, ...] | None = None
    filters: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def written(self, local_rank: int) -> frozenset[str]:
        """Streams of a local rank that have a file."""
        return of(self.redirects, local_rank) | of(self.tee, local_rank)

    def unseen(self, local_rank: int) -> frozenset[str]:
        """Streams of a local rank that are not shown."""
        if self.only is not None and local_rank not in self.only:
            return frozenset(STREAMS)
        return of(self.redirects, local_rank) - of(self.tee, local_rank)

    @property
    def writes(self) -> bool:
        """Whether there is to be a log directory."""
        return bool(self.folder) or any((*self.redirects.values(), *self.tee.values()))


def given(value: LogOptions | str | None) -> LogOptions | None:
    """The argument `logs` of a call: a folder stands for `--log-dir`."""
    return LogOptions(folder=value) if isinstance(value, str) else value


def of(which: Which, local_rank: int) -> frozenset[str]:
    """The streams of one local rank."""
    return which.get(local_rank, which.get(None, _SETS["0"]))


def streams(text: str) -> Which:
    """`3` for every local rank, or `0:1,1:2`. Raises ArgumentTypeError."""
    if text in _SETS:
        return {None: _SETS[text]}
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} names no streams; use 1 (stdout), 2 (stderr), 3 (both) or 0 (none), or one for each local rank, "
            "as 0:3,1:2"
        )
    return {int(rank): _SETS[value] for rank, _, value in (part.partition(":") for part in text.split(","))}


def local_ranks(text: str) -> tuple[int, ...]:
    """`0,2`. Raises ArgumentTypeError."""
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of local ranks; write it as 0,2")
    return tuple(sorted({int(rank) for rank in text.split(",")}))


def words(text: str) -> tuple[str, ...]:
    """`apple,orange`; two commas stand for one in a word."""
    return tuple(part.replace("\0", ",") for part in text.replace(",,", "\0").split(","))


def of_options(typed: Mapping[str, Any]) -> LogOptions | None:
    """What was asked for, by options' names; None if nothing was."""
    folder, redirects, tee, only = map(typed.get, ("log_dir", "redirects", "tee", "local_ranks_filter"))
    filters = typed.get("duplicate_stdout_filters") or (), typed.get("duplicate_stderr_filters") or ()
    if not any((folder, redirects, tee, only, *filters)):
        return None
    return LogOptions(folder, redirects or NONE, tee or NONE, only, filters)


def words_of(logs: LogOptions) -> list[str]:
    """The options of torchrun that say so."""
    found = ["--log-dir", logs.folder] if logs.folder else []
    for option, which in (("--redirects", logs.redirects), ("--tee", logs.tee)):
        text = text_of(which)
        found += [option, text] if text != "0" else []
    return [*found, *(["--local-ranks-filter", ",".join(map(str, logs.only))] if logs.only is not None else [])]


def text_of(which: Which) -> str:
    """As `streams` reads it."""
    numbers = {streams: number for number, streams in _SETS.items()}
    return ",".join(numbers[of] if rank is None else f"{rank}:{numbers[of]}" for rank, of in which.items())
