"""What of a flight recorder's dump is evidence: dumps in the form that gloo's and NCCL's recorders write."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nbddp.deadlock.on_rank import flight
from tests import places

DUMPS = json.loads((places.ROOT / "tests" / "data" / "flight.json").read_text())


def active(name: str) -> list[tuple[str, str, int]]:
    return [(e.backend, e.op, e.sequence) for e in flight.entries([DUMPS[name]]) if e.active]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("gloo, in an all_reduce", [("gloo", "all_reduce", 2)]),
        ("gloo, all done", []),
        ("NCCL, nothing called", []),
        ("NCCL, in an all_reduce", [("nccl", "all_reduce", 3)]),
        ("NCCL, done but not yet retired", []),
        ("NCCL, a send after an all_reduce", []),
        ("NCCL, a send alone in the dump of what is active", []),
        ("NCCL, coalesced calls", []),
        ("NCCL, of a group without a status", []),
    ],
)
def test_what_is_evidently_not_done(name: str, found: list[tuple[str, str, int]]) -> None:
    assert active(name) == found


def test_both_recorders_are_read_in_the_order_of_time() -> None:
    both = [DUMPS["NCCL, in an all_reduce"], DUMPS["gloo, in an all_reduce"]]
    assert [(e.backend, e.sequence) for e in flight.entries(both)] == [
        ("gloo", 1), ("gloo", 2), ("nccl", 2), ("nccl", 3)
    ]  # fmt: skip


def test_which_backend_called_is_told_by_the_entry_and_not_by_the_group() -> None:
    """A group of `cpu:gloo,cuda:nccl` has entries in both."""
    mixed = {**DUMPS["gloo, in an all_reduce"]}
    mixed["entries"] = [*mixed["entries"], *DUMPS["NCCL, in an all_reduce"]["entries"]]
    assert {e.backend for e in flight.entries([mixed])} == {"gloo", "nccl"}


@pytest.mark.parametrize("key", ["profiling_name", "collective_seq_id", "is_p2p", "retired", "process_group", "pg_id"])
def test_a_renamed_key_is_an_error_and_no_silence(key: str) -> None:
    entries = [{k: v for k, v in e.items() if k != key} for e in DUMPS["NCCL, in an all_reduce"]["entries"]]
    with pytest.raises(KeyError, match=key):
        flight.entries([{**DUMPS["NCCL, in an all_reduce"], "entries": entries}])


class Recorders:
    """Stand for torch's, as it comes with recorders that read their size when they are first asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, generic: bool) -> None:
        self.sizes: list[dict[str, str]] = []
        monkeypatch.setattr(flight.torch_compat, "flight_recorders", lambda: [self.dump])
        monkeypatch.setattr(flight.torch_compat, "has_generic_recorder", lambda: generic)

    def dump(self, **options: Any) -> str:
        self.sizes.append({name: flight.os.environ[name] for name in flight.SIZES if name in flight.os.environ})
        return "{}"


@pytest.mark.parametrize(("generic", "name"), [(True, flight.SIZES[0]), (False, flight.SIZES[1])])
def test_recorders_are_switched_on_and_the_environment_stays(
    monkeypatch: pytest.MonkeyPatch, generic: bool, name: str
) -> None:
    for each in flight.SIZES:
        monkeypatch.delenv(each, raising=False)
    recorders = Recorders(monkeypatch, generic)
    flight.switch_on()
    assert recorders.sizes == [{name: flight.ENTRIES}]
    assert not set(flight.SIZES) & set(flight.os.environ)


@pytest.mark.parametrize("name", flight.SIZES)
def test_what_the_user_set_is_left_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "0")
    recorders = Recorders(monkeypatch, generic=True)
    flight.switch_on()
    assert recorders.sizes == []
    assert flight.os.environ[name] == "0"


def test_one_dump_says_what_was_called_and_what_may_not_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dump of a full recorder takes tens of milliseconds, in every rank: torch is asked once, for all, and what it
    would leave out of the active ones is left out here."""
    asked: list[dict[str, Any]] = []
    first, *others = DUMPS["NCCL, in an all_reduce"]["entries"]
    dump = {**DUMPS["NCCL, in an all_reduce"], "entries": [{**first, flight.COMPLETED: 3000}, *others]}

    def recorder(**options: Any) -> str:
        asked.append(options)
        return json.dumps(dump)

    monkeypatch.setattr(flight.torch_compat, "flight_recorders", lambda: [recorder])
    held = flight.held()
    assert asked == [{"includeCollectives": True, "onlyActive": False}]
    assert held.of_all == flight.entries([dump])
    assert held.open == flight.entries([{**dump, "entries": others}])
    assert len(held.open) == len(held.of_all) - 1


def test_gloo_has_no_time_of_completion_so_one_dump_serves_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    dump = DUMPS["gloo, in an all_reduce"]
    entries = [{**e, flight.COMPLETED: 0} for e in dump["entries"]]  # as torch 2.13 words it
    monkeypatch.setattr(flight, "dumps", lambda active: [{**dump, "entries": entries}])
    held = flight.held()
    assert held.open is held.of_all
