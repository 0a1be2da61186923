"""Lesson 04: the ring on symbols against closed forms, and the checks of its two exercises on real ranks."""

from __future__ import annotations

import pytest

from nbddp.lessons.l04_collectives.collectives import (
    ALL_REDUCE,
    COLLECTIVES,
    GATHER,
    REDUCE_SCATTER,
    TensorPiece,
    collective,
)
from nbddp.lessons.l04_collectives.figure import COLOURS, draw_before_after, draw_ring
from nbddp.lessons.l04_collectives.simulation import ADDING, complete, simulate_ring
from nbddp.pool.pool import WorkerPool
from nbddp.teach import check, explore
from tests.colours import contrast
from tests.lessons.answers import defined, solution
from tests.lessons.tables.l04_collectives import changed

NPROC = 4  # of the module's pool


def test_the_explorer_opens_before_the_first_step_and_shows_a_broken_ring_beside_it() -> None:
    first, second = explore.ring().settings
    assert simulate_ring(**first).last is None
    assert simulate_ring(**second).verdict().startswith("wrong: 16 of 16")


def test_the_figure_has_a_letter_for_each_part_and_a_tick_for_each_complete_chunk() -> None:
    for shot in (simulate_ring(4, 2), simulate_ring(4, 5), simulate_ring(5, 99, ADDING)):
        shown = draw_ring(shot)
        texts = [t.get_text() for t in shown.figure.axes[0].texts]
        parts = [parts for row in shot.grid for parts in row]
        assert texts.count("✓") == sum(map(complete, parts))
        assert sum(t[-1:] in "ABCDE" and len(t) < 3 for t in texts if t) == sum(c > 0 for p in parts for c in p)
        assert shown.words == shot.describe()
    assert all(contrast("#ffffff", colour) >= 4.5 for colour in COLOURS)


# -- collectives before and after ------------------------------------------------------------

REAL = """
def left_by():
    import torch, torch.distributed as dist
    dist.init_process_group()
    rank, n = dist.get_rank(), dist.get_world_size()
    whole, root = torch.tensor([10**rank]), rank == 0
    pieces = [torch.tensor([(p + 1) * 10**rank]) for p in range(n)]
    def some(): return [torch.zeros_like(whole) for _ in range(n)]
    def one(): return torch.zeros_like(whole)
    sent, piece, summed, total = whole.clone(), one(), one(), whole.clone()
    dist.broadcast(sent, 0)
    dist.scatter(piece, pieces if root else None, 0)
    dist.gather(whole, gathered := some() if root else None, 0)
    dist.all_gather(everything := some(), whole)
    dist.reduce(reduced := whole.clone(), 0)
    dist.all_reduce(total)
    dist.reduce_scatter(summed, pieces)
    dist.all_to_all_single(turned := torch.zeros(n, dtype=torch.int64), torch.cat(pieces))
    dist.destroy_process_group()
    def numbers(tensors): return [int(v) for t in tensors for v in t]
    return {
        "broadcast": numbers([sent]), "scatter": numbers([piece]), "gather": numbers(gathered) if root else [],
        "all-gather": numbers(everything), "reduce": numbers([reduced]) if root else [],
        "all-reduce": numbers([total]), "reduce-scatter": numbers([summed]), "all-to-all": numbers([turned]),
    }
"""


def test_collectives_on_symbols_are_torchs(pool: WorkerPool) -> None:
    real = list(pool.call(defined(REAL, "left_by")))
    for name in COLLECTIVES:
        after = collective(name, 4).after
        assert [[_number(cell) for cell in row] for row in after] == [theirs[name] for theirs in real], name


def _number(cell: TensorPiece) -> int:
    """What torch has in a cell if rank r has 10 ** r, and p + 1 times as much as piece p."""
    times = 1 if cell.piece is None else cell.piece + 1
    return sum(times * 10**r for r in cell.ranks)


def test_a_reduce_scatter_and_an_all_gather_are_an_all_reduce_and_gather_is_for_one_rank() -> None:
    """What the lesson's questions about the explorer say, which opens on neither."""
    rows = collective(REDUCE_SCATTER, 4).after
    assert [row[0].ranks for row in rows] == [c.ranks for row in collective(ALL_REDUCE, 4).after for c in row]
    assert [row[0].piece for row in rows] == [0, 1, 2, 3]
    assert [len(row) for row in collective(GATHER, 4).after] == [4, 0, 0, 0]
    assert explore.before_after().settings[0]["name"] not in (GATHER, REDUCE_SCATTER, ALL_REDUCE)


def test_words_and_picture_of_a_collective() -> None:
    made = collective(REDUCE_SCATTER, 2)
    assert made.describe().splitlines() == [
        "reduce-scatter on 2 ranks: rank r has the sum of all ranks' pieces r",
        "rank 0  A0 A1  →  A0+B0",
        "rank 1  B0 B1  →  A1+B1",
    ]
    assert collective(GATHER, 2).describe().endswith("rank 1  B  →  –")
    for name in COLLECTIVES:
        made = collective(name, 4)
        pictured = draw_before_after(made)
        texts = [t.get_text() for t in pictured.figure.axes[0].texts]
        cells = [cell for row in (*made.before, *made.after) for cell in row]
        assert sum(text[:1] in "ABCD" for text in texts if text) == sum(len(cell.ranks) for cell in cells)
        assert texts.count("–") == sum(not row for row in (*made.before, *made.after))
        assert pictured.words == made.describe()


# -- ring_all_reduce -------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["init_process_group", "destroy_process_group"])
def test_a_group_that_is_made_or_ended_behind_the_check_spoils_no_later_answer(pool: WorkerPool, call: str) -> None:
    imported = f"from torch.distributed import {call} as made_or_ended\n" + changed(
        ("    return", "    made_or_ended()\n    return")
    )
    assert not check.ring_all_reduce(defined(imported, "ring_all_reduce")).ok
    assert check.ring_all_reduce(solution("04", "ring_all_reduce"))


def test_a_group_that_a_cell_has_left_stays(pool: WorkerPool) -> None:
    pool.call(_join)
    assert check.ring_all_reduce(solution("04", "ring_all_reduce"))
    assert list(pool.call(_size)) == [4, 4, 4, 4]


def _join() -> None:
    import torch.distributed as dist

    dist.init_process_group()


def _size() -> int:
    import torch
    import torch.distributed as dist

    dist.all_reduce(one := torch.ones(1))
    size = dist.get_world_size()
    dist.destroy_process_group()
    assert one == size
    return size
