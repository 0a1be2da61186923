"""Lesson 02: layouts on paper against closed forms, and the checks of its two exercises on real ranks."""

from __future__ import annotations

import pytest

from nbddp.errors import BadInput
from nbddp.lessons.framework import run_check
from nbddp.lessons.l02_ranks_and_devices.figure import draw_placement
from nbddp.lessons.l02_ranks_and_devices.simulation import GLOBAL, simulate_layout
from nbddp.pool.pool import WorkerPool
from nbddp.teach import check
from tests.lessons.answers import defined
from tests.lessons.tables.l02_ranks_and_devices import GPUS


def test_words_of_the_two_layouts_of_the_tutorial() -> None:
    one, two = simulate_layout(2, 4, 1, GLOBAL), simulate_layout(2, 4, 2)
    assert one.verdict() == ("cuda:RANK: ranks 4–7 cannot start; rank 4 asks for GPU 4, and node 1 has GPUs 0–3")
    assert "rank 3 (local rank 1) on GPUs 2, 3" in two.describe()
    assert two.verdict() == "cuda:LOCAL_RANK × 2, …: every rank finds its GPUs"
    assert simulate_layout(1, 8, 1, GLOBAL).verdict().endswith("on one node, rank and local rank are equal")
    with pytest.raises(BadInput, match="--gpus-per-proc"):
        simulate_layout(2, 2, 3)


def test_the_figure_says_what_each_rank_asks_for() -> None:
    shown = draw_placement(simulate_layout(2, 4, 1, GLOBAL))
    texts = [t.get_text() for axes in shown.figure.axes for t in axes.texts]
    assert "GPU 4: none" in texts
    assert "GPU 3" in texts
    assert shown.words == simulate_layout(2, 4, 1, GLOBAL).describe()


# -- place_of --------------------------------------------------------------------------------


LOCKED = """
import threading
guard = threading.Lock()
def place_of(rank, n):
    with guard:
        return divmod(rank, n)
"""


def test_a_name_that_cannot_be_sent_is_reported(pool: WorkerPool) -> None:
    line = check.place_of(defined(LOCKED, "place_of")).line
    assert line.startswith("place_of uses guard, which cannot be sent to the ranks (TypeError: cannot pickle"), line
    assert line.endswith("create it inside place_of")


# -- nothing can hang, nothing is lost ---------------------------------------------------------


def test_an_endless_answer_is_ended_and_names_stay(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_check, "DEADLINE", 1.0)
    pool.push({"kept": 41})
    answer = check.gpus_of(defined(GPUS + "while True: pass", "gpus_of"))
    assert answer.line == "no answer after 1 s: is there an endless loop, or a wait that never ends?"
    assert list(pool.pull(["kept"])["kept"]) == [41, 41]


def test_a_deadlock_is_named(pool: WorkerPool) -> None:
    waits = """
    def gpus_of(rank, n, g):
        import torch, torch.distributed as dist
        if not dist.is_initialized():
            dist.init_process_group()
        if dist.get_rank() == 0:
            dist.barrier()
        return []
    """
    answer = check.gpus_of(defined(waits, "gpus_of"))
    assert answer.line.startswith("deadlock: rank 0 waits in barrier")
