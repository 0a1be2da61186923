"""Lesson 02: layouts on paper against closed forms, and the checks of its two exercises on real ranks."""

from __future__ import annotations

import pytest

import nbddp
from nbddp.errors import BadInput
from nbddp.lessons.framework import run_check
from nbddp.lessons.l02_ranks_and_devices.figure import draw_placement
from nbddp.lessons.l02_ranks_and_devices.simulation import GLOBAL, simulate_layout
from nbddp.teach import check
from tests.lessons.answers import Mutant, defined, exercise, solution


def test_words_of_the_two_layouts_of_the_tutorial() -> None:
    one, two = simulate_layout(2, 4, 1, GLOBAL), simulate_layout(2, 4, 2)
    assert one.verdict() == ("cuda:RANK: ranks 4–7 cannot start; rank 4 asks for GPU 4, and node 1 has GPUs 0–3")
    assert "rank 3 (local rank 1) on GPUs 2, 3" in two.words()
    assert two.verdict() == "cuda:LOCAL_RANK × 2, …: every rank finds its GPUs"
    assert simulate_layout(1, 8, 1, GLOBAL).verdict().endswith("on one node, rank and local rank are equal")
    with pytest.raises(BadInput, match="--gpus-per-proc"):
        simulate_layout(2, 2, 3)


def test_the_figure_says_what_each_rank_asks_for() -> None:
    shown = draw_placement(simulate_layout(2, 4, 1, GLOBAL))
    texts = [t.get_text() for axes in shown.figure.axes for t in axes.texts]
    assert "GPU 4: none" in texts
    assert "GPU 3" in texts
    assert shown.words == simulate_layout(2, 4, 1, GLOBAL).words()
    assert all(t.get_fontsize() >= 6.5 for axes in shown.figure.axes for t in axes.texts)


# -- gpus_of ---------------------------------------------------------------------------------

GPUS = "def gpus_of(rank, n, g):\n    "
WRONG_GPUS = [
    Mutant("global rank", GPUS + "return list(range(rank * g, rank * g + g))", "that counts GPUs over all nodes"),
    Mutant("the tutorial's", GPUS + "return [rank]", "gpus_of(4, 4, 1): expected [0], got [4]; the global rank is not"),
    Mutant("overlapping", GPUS + "l = rank % n; return list(range(l, l + g))", "the blocks overlap"),
    Mutant("first only", GPUS + "return [rank % n * g]", "that is only the first GPU of the process"),
    Mutant("one each", GPUS + "return [rank % n]", "only if every process owns one GPU"),
    Mutant("strided", GPUS + "return list(range(rank % n, n * g, n))", "a process owns consecutive GPUs"),
    Mutant("the node", GPUS + "l = rank // n; return list(range(l * g, l * g + g))", "is the node; the remainder"),
    Mutant("wrong divisor", GPUS + "l = rank % g; return list(range(l * g, l * g + g))", "not rank % gpus_per_proc"),
    Mutant("one too many", GPUS + "l = rank % n; return list(range(l * g, l * g + g + 1))", "has 2 indices, but"),
    Mutant("a number", GPUS + "return rank % n * g", "return a list with one index"),
    Mutant("names", GPUS + "return [f'cuda:{i}' for i in range(g)]", "device indices are integers"),
    Mutant("backwards", GPUS + "l = rank % n; return [*range(l * g, l * g + g)][::-1]", "right but in another order"),
    Mutant("unwritten", GPUS + "...", "still to be written"),
    Mutant("not implemented", GPUS + "raise NotImplementedError", "gpus_of raised NotImplementedError: it is still"),
    Mutant("no such name", "def gpus_of(rank, n, own):\n    first = rank\n    return [last]",
           "raised NameError: name 'last' is not defined (line 3, in gpus_of)"),
    Mutant("raises", GPUS + "return [[0][rank]]", "gpus_of(1, 4, 1) raised IndexError: list index out of range"),
    Mutant("arguments", "def gpus_of(rank):\n    return [rank]", "raised TypeError: gpus_of() takes 1 positional"),
    Mutant(
        "environment", GPUS + "import os; l = int(os.environ['LOCAL_RANK']); return [*range(l * g, l * g + g)]",
        "gpus_of(0, 4, 1) is [0] on rank 0 and is [1] on rank 1: the result must depend only on the arguments",
    ),
    Mutant("leaves", GPUS + "raise SystemExit", "every rank called sys.exit() instead of returning an answer"),
    Mutant("leaves badly", GPUS + "raise SystemExit(3)", "a rank called sys.exit(3) instead of returning an answer"),
    Mutant("ends the process", GPUS + "import os; os._exit(7)", "died: its process ended with exit code 7"),
    Mutant("cannot be sent", "import threading\nlock = threading.Lock()\n" + GPUS + "return lock", "cannot be sent"),
    Mutant("returns early", GPUS + "some = []\n    for i in range(g):\n"
           "        some.append(rank % n * g + i)\n        return some", "that is only the first GPU of the process"),
    Mutant("what append gives", GPUS + "some = []\n    for i in range(g): some = some.append(i)\n    return some",
           "gpus_of(0, 4, 1): expected [0], got None; here the function ends without a value to return"),
    Mutant("devices", GPUS + "import torch; return [torch.device('cuda', rank % n)]",
           "device indices are integers"),
    Mutant("a float", GPUS + "first = rank % n * g / 1; return list(range(first, first + g))",
           "/ gives a float, // a whole"),
    Mutant("the environment", GPUS + "import os; return os.environ", "gpus_of(0, 4, 1): expected [0], got os.environ"),
]  # fmt: skip
RIGHT_GPUS = [
    GPUS + "return [rank % n * g + k for k in range(g)]",
    GPUS + "first = (rank - rank // n * n) * g\n    return range(first, first + g)",
]


@pytest.mark.parametrize("mutant", WRONG_GPUS, ids=str)
def test_wrong_gpus_are_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    mutant.meets(check.gpus_of)


def test_right_gpus_pass(pool: nbddp.Pool) -> None:
    assert check.gpus_of(solution("02", "gpus_of"))
    for source in RIGHT_GPUS:
        assert check.gpus_of(defined(source, "gpus_of")), source
    assert "still to be written" in check.gpus_of(exercise("02", "gpus_of")).line


# -- place_of --------------------------------------------------------------------------------

PLACE = "def place_of(rank, n):\n    return "
WRONG_PLACES = [
    Mutant("swapped", PLACE + "rank % n, rank // n", "the two are swapped"),
    Mutant("from one", PLACE + "rank // n + 1, rank % n + 1", "nodes and local ranks are numbered from 0"),
    Mutant("node from one", PLACE + "rank // n + 1, rank % n", "nodes are numbered from 0"),
    Mutant("global", PLACE + "rank // n, rank", "the second number is the global rank"),
    Mutant("dealt out", PLACE + "rank % 3, rank // 3", "torchrun fills node 0 first"),
    Mutant("a float", PLACE + "rank / n, rank % n", "/ gives a float; // gives"),
    Mutant("the node alone", PLACE + "rank // n", "return a pair"),
    Mutant("unwritten", PLACE + "None", "still to be written"),
    Mutant(
        "two always", PLACE + "(rank // 2, rank % 2)", "that is right for 2 processes per node only; use nproc_per_node"
    ),
    Mutant("four always", PLACE + "divmod(rank, 4)", "that is right for 4 processes per node only"),
    Mutant("rounded", PLACE + "(round(rank / n), rank % n)", "the node is the number of full nodes before this rank"),
    Mutant("both the rest", PLACE + "(rank % n, rank % n)", "the node is the number of full nodes before"),
    Mutant("both the node", PLACE + "(rank // n, rank // n)", "the number of ranks of the same node that come before"),
    Mutant(
        "two nodes", PLACE + "(0, rank) if rank < n else (1, rank - n)", "a node has 4 ranks here, so the last local"
    ),
    Mutant("text", PLACE + "(str(rank // n), str(rank % n))", "expected [0, 0], got ['0', '0']; both must be integers"),
    Mutant("one node", PLACE + "(0, rank) if rank < n else None", "here the function ends without a value to return"),
    Mutant("a map", PLACE + "map(int, divmod(rank, n))", "expected [0, 0], got <map object>; return a pair"),
]
RIGHT_PLACES = [PLACE + "(rank // n, rank % n)", PLACE + "[(rank - rank % n) // n, rank - rank // n * n]"]


LOCKED = """
import threading
guard = threading.Lock()
def place_of(rank, n):
    with guard:
        return divmod(rank, n)
"""


def test_a_name_that_cannot_be_sent_is_reported(pool: nbddp.Pool) -> None:
    line = check.place_of(defined(LOCKED, "place_of")).line
    assert line.startswith("place_of uses guard, which cannot be sent to the ranks (TypeError: cannot pickle"), line
    assert line.endswith("create it inside place_of")


@pytest.mark.parametrize("mutant", WRONG_PLACES, ids=str)
def test_wrong_places_are_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    mutant.meets(check.place_of)


def test_right_places_pass(pool: nbddp.Pool) -> None:
    assert check.place_of(solution("02", "place_of"))
    for source in RIGHT_PLACES:
        assert check.place_of(defined(source, "place_of")), source
    assert "still to be written" in check.place_of(exercise("02", "place_of")).line


# -- nothing can hang, nothing is lost ---------------------------------------------------------


def test_an_endless_answer_is_ended_and_names_stay(pool: nbddp.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_check, "DEADLINE", 1.0)
    pool.push({"kept": 41})
    answer = check.gpus_of(defined(GPUS + "while True: pass", "gpus_of"))
    assert answer.line == "no answer after 1 s: is there an endless loop, or a wait that never ends?"
    assert list(pool.pull(["kept"])["kept"]) == [41, 41]


def test_a_deadlock_is_named(pool: nbddp.Pool) -> None:
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
