"""The panel while a cell runs: what the strip says of each rank, and buttons that act meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nbddp.capabilities.panel import page
from nbddp.capabilities.panel import state as panel_state
from nbddp.capabilities.panel.rows import Pace, SeenRanks, Use, merged, rate, rows, share, slowest
from nbddp.capabilities.panel.state import State
from nbddp.deadlock.positions import Call, Position
from nbddp.errors import RankStatus
from nbddp.launch.machine import Node
from nbddp.launch.topology import Topology
from tests.notebook.test_panel import Balanced

PLACED = Topology.plan([Node(0, "here", cores=8)], nproc=4)
ALL = frozenset(range(4))
REDUCE = Call("all_reduce", "collective", group="0", ranks=(0, 1, 2, 3), sequence=14, made_of="all_reduce")


def at(rank: int, call: Call | None = None, line: int = 12) -> Position:
    state = RankStatus.RUNNING if call is None else RankStatus.BLOCKED
    return Position(rank, state, f"cell line {line}", line, call, latest={"0": 13 if call is None else 14})


def paces(works: float, exposed: float, count: int = 20) -> list[Pace]:
    """Steps of a rank that works and waits for so many seconds."""
    period, waited = round((works + exposed) * 1e9), round(exposed * 1e9)
    return [Pace(n, 1 + n * period, n * period + period // 2, waited) for n in range(count)]


# -- what a row says -------------------------------------------------------------------------------


def test_each_rank_has_its_state_in_words_and_a_sign() -> None:
    positions = {0: at(0, REDUCE), 1: at(1), 2: at(2, REDUCE), 3: at(3, REDUCE)}
    look = SeenRanks(ALL - {3}, "Cell In[3]", ALL, positions, {})
    found = rows(PLACED, look, {}, {}, {})
    assert [(r.state, r.doing) for r in found] == [
        ("waiting", "in all_reduce #14 for rank 1, cell line 12"),
        ("running", "cell line 12"),
        ("waiting", "in all_reduce #14 for rank 1, cell line 12"),
        ("dead", "its process has exited"),
    ]
    state = panel_state.seen(State(placed=PLACED), found, "Cell In[3]", 7.9)
    shown = page.strip(state)
    Balanced(shown)
    assert "Cell In[3], 7 s" in page.running(state)
    assert page.strip(panel_state.seen(state, found, "Cell In[3]", 9.0)) == shown, "sent again only when a rank changes"
    assert shown.count('scope="row"') == 4
    for sign in ("◐", "●", "✕"):
        assert f'<span aria-hidden="true">{sign}</span>' in shown


@pytest.mark.parametrize(
    ("look", "state"),
    [
        (SeenRanks(ALL), "idle"),
        (SeenRanks(frozenset()), "dead"),
        (SeenRanks(ALL, "Cell In[1]", frozenset({1})), "idle"),
        (SeenRanks(ALL, "Cell In[1]", ALL), "running"),
        (SeenRanks(ALL, "Cell In[1]", ALL, {}, {0: RankStatus.FINISHED}), "finished"),
        (SeenRanks(ALL, "Cell In[1]", ALL, {}, {0: RankStatus.FAILED}), "failed"),
        (SeenRanks(ALL, "Cell In[1]", ALL, {}, {0: RankStatus.DIED}), "dead"),
        (SeenRanks(ALL, "Cell In[1]", ALL, {0: Position(0, RankStatus.SILENT)}), "silent"),
    ],
)
def test_states(look: SeenRanks, state: str) -> None:
    assert rows(PLACED, look, {}, {}, {})[0].state == state


def test_rates_and_shares_are_of_what_was_used_between_two_looks() -> None:
    assert rate(paces(0.02, 0.005)) == pytest.approx(40)
    assert rate(paces(0.02, 0.005, count=1)) is None
    assert share(Use(1.0, 10.0), Use(1.5, 10.25)) == pytest.approx(50)
    assert share(None, Use(1.5, 10.0)) is None
    assert share(Use(1.0, 10.0), Use(1.5, None)) is None
    assert [p.number for p in merged(paces(0.1, 0)[:3], [[2, 1, 2, 0, 0, 0], [3, 10**9, 2 * 10**9, 5, 6, 7]], 3)] == [
        1,
        2,
        3,
    ]


@pytest.mark.parametrize(
    ("works", "found"),
    [
        ((0.02, 0.04, 0.02), 1),
        ((0.02, 0.02, 0.021), 2),
        ((0.02, 0.02, 0.0204), None),
        ((0.02,), None),
        ((0.03, 0.02), 0),
    ],
)
def test_the_slowest_rank_is_the_one_that_works_clearly_longer(works: Sequence[float], found: int | None) -> None:
    period = max(works) + 0.001
    assert slowest({r: paces(w, period - w) for r, w in enumerate(works)}) == found


def test_a_rank_of_which_no_step_is_known_leaves_it_open_who_is_slowest() -> None:
    assert slowest({0: paces(0.02, 0.02), 1: paces(0.04, 0), 2: ()}) is None
