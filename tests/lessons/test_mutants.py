"""No exercise takes a wrong answer for a right one: solutions changed in one place pass only if the table says why.

The table is `tests/mutants/survivors.json`. A few exercises and the wrong answers that once passed are always run; all
mutants are run by `-m mutants`, some minutes.
"""

from __future__ import annotations

import pytest

from nbddp.pool.pool import WorkerPool
from nbddp.teach import check
from tests.lessons.answers import defined
from tests.mutants.generate import mutants
from tests.mutants.survivors import RANKS, answer, known, made, passing, solutions

NPROC = RANKS
ALWAYS = ("bytes_per_rank", "missing_ranks")
EXERCISES = [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.mutants) for name in sorted(solutions())]


@pytest.mark.timeout(1200)  # the capstone's 233 train a model each
@pytest.mark.parametrize("name", EXERCISES)
def test_only_mutants_with_a_reason_pass(pool: WorkerPool, name: str) -> None:
    assert sorted(passing(name, made(name))) == sorted(known()[name])


def test_every_exercise_has_mutants_and_every_survivor_a_reason() -> None:
    assert set(known()) == set(solutions()) == {n for n in check.__all__ if isinstance(vars(check)[n], check.Exercise)}
    for name, reasons in known().items():
        changes = {c.name for c in made(name)}
        assert set(reasons) <= changes, "the table names mutants that are no longer made"
        assert len(changes) > len(reasons)
        assert all(len(why) > 20 for why in reasons.values()), name


def test_mutants_change_operators_numbers_ranks_orders_and_calls() -> None:
    source = "def f(x):\n    total(x)\n    dist.all_reduce(x)\n    return x[1:] / dist.get_world_size() - 2\n"
    names = [c.name for c in mutants(source)]
    for wanted in (
        "2 → 3", "dist.get_world_size() → 4", "dist.get_world_size → dist.get_rank", "without dist.all_reduce(x)",
        "twice dist.all_reduce(x)", "dist.all_reduce(x) before total(x)", "x[1:] → x",
        "x[1:] / dist.get_world_size() → x[1:] * dist.get_world_size()",
    ):  # fmt: skip
        assert wanted in names
    assert len(set(names)) == len(names)
    assert len({c.source for c in mutants(source)}) == len(names)


THE_MEAN = """
import torch
import torch.distributed as dist


def train_uneven(model, optimizer, batches):
    counts = torch.tensor(len(batches))
    dist.all_reduce(counts)
    for inputs, targets in batches[: int(counts) // dist.get_world_size()]:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
"""
BY_FOUR = """
def average_gradients(model):
    import torch.distributed as dist

    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= 4
"""
WHOLE_LISTS = """
def missing_ranks(log):
    if all(calls == next(iter(log.values())) for calls in log.values()):
        return None
    fewest = min(len(calls) for calls in log.values())
    return fewest + 1, sorted(rank for rank, calls in log.items() if len(calls) == fewest)
"""
ONCE_PASSED = [
    ("train_uneven", THE_MEAN, "with 5 batches on ranks 0–2, 2 on rank 3: deadlock: "),
    ("average_gradients", BY_FOUR, "on 3 ranks: rank 0, layer 0.weight: yours is 0.75 × the reference: the sum is"),
    ("missing_ranks", WHOLE_LISTS, "all ranks made the same number of calls, whatever their names"),
]


@pytest.mark.parametrize(("name", "source", "says"), ONCE_PASSED, ids=[name for name, _, _ in ONCE_PASSED])
def test_wrong_answers_that_once_passed_fail(pool: WorkerPool, name: str, source: str, says: str) -> None:
    found = getattr(check, name)(defined(source, name))
    assert not found.ok
    assert says in found.line, found.line
    assert not answer(name, source).ok
