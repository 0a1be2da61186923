"""torch's flight recorders: what of a dump is evidence, and that they record at all.

gloo and NCCL have a recorder each. Their entries look alike, but do not mean the same (read in torch's sources, not
seen on a GPU). NCCL's sends and receives carry the number of the last collective; what was called inside coalescing has
no events and stays "active" for ever; and an entry is marked done by a watchdog, some time after the collective is. So
an active entry of NCCL's counts only if it is no send or receive, and no other entry has its number. Nor may the group
have completed that number. Pure but for `dumps`, `held` and `switch_on`.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypedDict

from nbddp.compat import torch as torch_compat

SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # of the recorders, in entries; the older name last
ENTRIES = "2000"  # torch's own default, where it has one that is not 0
NCCL = "nccl"
COMPLETED: Final = "time_discovered_completed_ns"  # key of an entry; 0 or None until its end is seen


class RecordedCall(TypedDict, total=False):
    """An entry of a dump, with torch's names. `process_group`: name and description."""

    pg_id: int
    process_group: tuple[str, str]
    profiling_name: str
    collective_seq_id: int
    time_created_ns: int
    time_discovered_completed_ns: int | None
    retired: bool
    is_p2p: bool
    input_dtypes: list[str]
    input_sizes: list[list[int]]


GroupStatus = Mapping[str, Mapping[str, str | int]]  # `pg_id` → what NCCL's watchdog knows of the group


class RecorderDump(TypedDict, total=False):
    """What a recorder holds. An empty one of NCCL's has no entries, and gloo's no status."""

    entries: list[RecordedCall]
    pg_status: GroupStatus


@dataclass(frozen=True)
class FlightEntry:
    """One collective of a group as a recorder has it. `name`: `gloo:all_reduce`; `group`: torch's name of it,
    `description`: the user's; `what`: its tensors; `active`: it is evident that it is not done."""

    name: str
    group: str
    description: str
    sequence: int
    what: str
    created_ns: int
    active: bool

    @property
    def backend(self) -> str:
        return self.name.rpartition(":")[0] or "gloo"

    @property
    def op(self) -> str:
        """`all_reduce`, also of `nccl:_all_reduce`."""
        return self.name.rpartition(":")[2].lstrip("_")


@dataclass(frozen=True)
class FlightRecords:
    """What recorders held at one moment, oldest first. `open`: what of it they do not say to be done."""

    of_all: list[FlightEntry]
    open: list[FlightEntry]


def switch_on() -> None:
    """Have the recorders record where torch's default is not to (2.8 to 2.10), unless the user has said how.

    They read the environment when they are first asked; afterwards it is as it was, for programs can read it.
    """
    if any(name in os.environ for name in SIZES):
        return
    dumping = torch_compat.flight_recorders()
    name = SIZES[0] if torch_compat.has_generic_recorder() else SIZES[1]  # the other name's warning is not wanted
    os.environ[name] = ENTRIES
    try:
        for dump in dumping:
            dump(includeCollectives=True, onlyActive=True)
    finally:
        del os.environ[name]


def dumps(active: bool) -> list[RecorderDump]:
    """What the recorders hold now; with `active`, only what may not be done. Without what was called in groups of ours,
    and with what that has overwritten."""
    found = [json.loads(dump(includeCollectives=True, onlyActive=active)) for dump in torch_compat.flight_recorders()]
    return (
        [_as_if_alone(dump, [] if active else kept) for dump, kept in zip(found, _kept, strict=True)]
        if _ours
        else found
    )


_ours: set[int] = set()  # `pg_id` of groups that are not the program's
_kept: list[list[RecordedCall]] = []  # of each recorder, what it held before those were made


@contextmanager
def making_room() -> Iterator[None]:
    """A group of ours is made, and called once, in this block: nobody sees its calls, and what they overwrite in the
    recorders is kept."""
    before = dumps(active=False)
    began = time.time_ns()
    yield
    _kept[:] = [[e for e in dump.get("entries", ()) if e["retired"]] for dump in before]
    raw = (e for dump in dumps(active=False) for e in dump.get("entries", ()) if e["time_created_ns"] >= began)
    _ours.update(e["pg_id"] for e in raw if not e["process_group"][0])


def _as_if_alone(dump: RecorderDump, kept: list[RecordedCall]) -> RecorderDump:
    """A dump without the entries of our groups, and with those that a recorder would still hold without them."""
    held = dump.get("entries", [])
    oldest = min((e["time_created_ns"] for e in held), default=0)
    own = [e for e in held if e["pg_id"] not in _ours]
    return {**dump, "entries": [*(e for e in kept if e["time_created_ns"] < oldest), *own][-int(ENTRIES) :]}


def held() -> FlightRecords:
    """What the recorders hold now, by one dump of each: with 2000 entries it takes tens of milliseconds."""
    found = dumps(active=False)
    of_all, undone = entries(found), [_undone(dump) for dump in found]
    same = all(len(a["entries"]) == len(b.get("entries", ())) for a, b in zip(undone, found, strict=True))
    return FlightRecords(of_all, of_all if same else entries(undone))


def _undone(dump: RecorderDump) -> RecorderDump:
    """What of a dump torch would give with `onlyActive`."""
    return {**dump, "entries": [e for e in dump.get("entries", ()) if not e.get(COMPLETED)]}


def entries(dumped: Iterable[RecorderDump]) -> list[FlightEntry]:
    """The collectives of these dumps, oldest first."""
    found = [e for dump in dumped for e in _of_dump(dump)]
    return sorted(found, key=lambda e: e.created_ns)


def nameless(dumped: Iterable[RecorderDump]) -> list[int]:
    """Times (time.time_ns()) at which collectives of an unknown group began. Debug level DETAIL has those: collectives
    of wrapped groups, and those in which the ranks compare them."""
    raw = (e for dump in dumped for e in dump.get("entries", ()) if not e["is_p2p"])
    return [e["time_created_ns"] for e in raw if not e["process_group"][0]]


def _of_dump(dump: RecorderDump) -> list[FlightEntry]:
    raw = [e for e in dump.get("entries", ()) if not e["is_p2p"]]  # an empty dump of NCCL's has no entries
    same = Counter((e["pg_id"], e["collective_seq_id"]) for e in raw)
    status = dump.get("pg_status", {})
    found = []
    for e in raw:
        name = str(e["profiling_name"])
        alone = same[e["pg_id"], e["collective_seq_id"]] == 1
        evident = not name.startswith(NCCL) or (alone and _is_open(e, status))
        group, description = e["process_group"]
        if not group:  # one that debug level DETAIL has wrapped, or the one in which it checks: which, is not said
            continue
        if not name.endswith(":coalesced"):
            found.append(
                FlightEntry(name, group, description, e["collective_seq_id"], what(e), e["time_created_ns"],
                      evident and not e["retired"])
            )  # fmt: skip
    return found


def _is_open(entry: RecordedCall, status: GroupStatus) -> bool:
    """Whether NCCL's watchdog has not seen this collective completed; False where it has no status of the group."""
    of_group = status.get(str(entry["pg_id"]))
    return of_group is not None and entry["collective_seq_id"] > int(of_group["last_completed_collective"])


def what(entry: RecordedCall) -> str:
    """`float[4, 2]`, several joined by commas."""
    pairs = zip(entry.get("input_dtypes", ()), entry.get("input_sizes", ()), strict=False)
    return ", ".join(f"{dtype.lower()}{sizes}" for dtype, sizes in pairs)
