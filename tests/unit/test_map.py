"""Core and capabilities come apart: what the map of the package counts goes down, and never up."""

from __future__ import annotations

import json

from tests.house import check, measures


def test_what_ties_core_and_capabilities_does_not_grow() -> None:
    ties, wrong = check.count()
    assert wrong == [], "mend tests/house/map.tsv"
    counted = measures.static(ties)
    least = json.loads(check.LEAST.read_text(encoding="utf-8"))
    more = {what: places for what, places in counted.items() if len(places) > least.get(what, len(places))}
    assert {what: f"{len(places)}, not {least[what]}" for what, places in more.items()} == {}


def test_the_checker_sees_circles() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}}
    assert check.circles(graph) == [["b", "c"], ["d"]]
