"""Lesson 09: programs played against the judgement of real deadlocks, and the checks of its two exercises."""

from __future__ import annotations

import pytest

import nbddp
from nbddp.lessons.l09_hangs.exercise import LOG_CASES, LOGS, missing
from nbddp.lessons.l09_hangs.figure import draw_collectives
from nbddp.lessons.l09_hangs.simulation import Action, log, play
from nbddp.output.screens import NullScreen
from nbddp.teach import check, explore
from tests.kernels import Kernel
from tests.lessons.answers import Mutant, cells, defined, exercise, solution
from tests.unit.test_hangs import MANY

REAL = """
import torch, torch.distributed as dist
if not dist.is_initialized(): dist.init_process_group()
rank = dist.get_rank()
t = torch.ones(4)
"""


@pytest.mark.parametrize(
    ("code", "programs"),
    [
        ("\ndist.all_reduce(t)\nif rank == 0: dist.broadcast(t, 0)",
         [[Action("all_reduce", 7, "float[4]"), *[Action("broadcast", 8, "float[4]")] * (r == 0)] for r in (0, 1)]),
        ("\n(dist.barrier if rank else dist.all_reduce)(*[t] * (1 - rank))",
         [[Action("all_reduce", 7, "float[4]")], [Action("barrier", 7)]]),
        ("\ndist.recv(t, 1 - rank)\ndist.send(t, 1 - rank)",
         [[Action("recv", 7, peer=1 - r), Action("send", 8, peer=1 - r)] for r in (0, 1)]),
    ],
    ids=["alone", "another", "crossed"],
)  # fmt: skip
def test_the_played_deadlock_is_worded_as_the_real_one(
    pool: nbddp.Pool, code: str, programs: list[list[Action]]
) -> None:
    with pytest.raises(nbddp.RunHung) as caught:
        pool.run_cell(REAL + code, hang_after=0.5, screen=NullScreen())
    played = play(programs, MANY)
    assert played.deadlock is not None
    assert str(caught.value) == f"deadlock: {'; '.join(played.deadlock.words)}"


UNDER_DETAIL = """
dist.destroy_process_group()
dist.set_debug_level(dist.DebugLevel.DETAIL)
dist.init_process_group()
dist.set_debug_level(dist.DebugLevel.OFF)
try:
    {}
    said = ""
except RuntimeError as error:
    said = str(error)
dist.destroy_process_group()
said
"""


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("dist.all_reduce(t, op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)", False),
        ("dist.all_reduce(t.int() if rank else t)", True),
        ("dist.all_reduce(t[:2] if rank else t)", True),
        ("dist.broadcast(t, 0) if rank else dist.all_reduce(t)", True),
    ],
    ids=["operation", "type", "shape", "collective"],
)
def test_what_torchs_debug_mode_tells_and_what_not(pool: nbddp.Pool, call: str, told: bool) -> None:
    """The lesson's table."""
    said = pool.run_cell(REAL + UNDER_DETAIL.format(call), want_value=True, screen=NullScreen())
    assert ["Detected mismatch between collectives" in text for text in said] == [told, told]


def test_the_figure_shows_calls_and_arrows() -> None:
    shown = draw_collectives(log("one batch fewer on the last rank", 4, 3))
    table, graph = shown.figure.axes
    texts = [t.get_text() for t in table.texts]
    assert texts.count("backward #3") == 3
    assert texts.count("for rank 3") == 3
    assert sum(type(p).__name__ == "FancyArrowPatch" for p in graph.patches) == 3
    assert all(t.get_fontsize() >= 6.5 for axes in shown.figure.axes for t in axes.texts)
    first, second = (explore.collectives().show(**s).words for s in explore.collectives().settings)
    assert "no deadlock" in first
    assert "deadlock: ranks 0–2 wait in backward" in second


def test_the_demonstrations_end_in_the_same_deadlock_when_they_are_run_twice(four: Kernel) -> None:
    code = [c.text for c in cells("09") if c.kind == "code"]
    (start,) = [text for text in code if text.startswith("%%ddp --nproc 4")]
    demonstrations = [text.replace("--hang-after 2", "--hang-after 0.5") for text in code if "--hang-after 2" in text]
    assert len(demonstrations) == 2
    assert four.run(start).ok
    for text in demonstrations:
        first, second = (four.run(text) for _ in range(2))
        assert "deadlock: " in first.evalue
        assert first.evalue == second.evalue


# -- missing_ranks ---------------------------------------------------------------------------

MISSING = (
    "def missing_ranks(log):\n    n = {r: len(c) for r, c in log.items()}; lo, hi = min(n.values()), max(n.values())\n"
)
EVEN = "    if lo == hi: return None\n    return "
WRONG_LOGS = [
    Mutant("who waits", MISSING + EVEN + "lo + 1, sorted(r for r in n if n[r] > lo)", "the ranks that they wait for"),
    Mutant("all behind", MISSING + EVEN + "lo + 1, sorted(r for r in n if n[r] < hi)", "miss only a later one"),
    Mutant("the last", MISSING + EVEN + "hi, sorted(r for r in n if n[r] < hi)", "the last collective that any rank"),
    Mutant("last common", MISSING + EVEN + "lo, sorted(r for r in n if n[r] == lo)", "the next one is where they wait"),
    Mutant("one only", MISSING + EVEN + "lo + 1, [min(r for r in n if n[r] == lo)]", "only one of the missing ranks"),
    Mutant("positions", MISSING + EVEN + "lo + 1, [i for i, r in enumerate(n) if n[r] == lo]", "not ranks"),
    Mutant("never None", MISSING + "    return lo + 1, sorted(r for r in n if n[r] == lo)", "no rank is missing"),
    Mutant("ranks alone", MISSING + EVEN + "sorted(r for r in n if n[r] == lo)", "return a pair"),
    Mutant("out of order", MISSING + EVEN + "lo + 1, sorted((r for r in n if n[r] == lo), reverse=True)", "sort the"),
    Mutant("rank 0's", "def missing_ranks(log):\n    return len(log[0]), []", "the ranks are not"),
    Mutant("unwritten", "def missing_ranks(log):\n    ...", "still to be written"),
    Mutant("as they come", MISSING + EVEN + "lo + 1, [r for r in n if n[r] == lo]", "sort the ranks"),
    Mutant("its name", MISSING + EVEN + "log[max(n, key=n.get)][lo], [r for r in n if n[r] == lo]", "not its name"),
    Mutant("a set", MISSING + EVEN + "lo + 1, {r for r in n if n[r] == lo}", "expected [3, [2]], got [3, {2}]"),
]  # fmt: skip
RIGHT_LOGS = [
    MISSING + EVEN + "(lo + 1, [r for r in sorted(n) if n[r] == lo])",
    """
def missing_ranks(log):
    for number in range(1, 1 + max(map(len, log.values()))):
        gone = [rank for rank in sorted(log) if len(log[rank]) < number]
        if gone:
            return [number, gone]
""",
]


@pytest.mark.parametrize("mutant", WRONG_LOGS, ids=str)
def test_wrong_readings_of_a_log_are_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    mutant.meets(check.missing_ranks)


def test_right_readings_pass(pool: nbddp.Pool) -> None:
    assert check.missing_ranks(solution("09", "missing_ranks"))
    for source in RIGHT_LOGS:
        assert check.missing_ranks(defined(source, "missing_ranks")), source
    assert "still to be written" in check.missing_ranks(exercise("09", "missing_ranks")).line


def test_no_two_mistakes_look_the_same_to_the_check() -> None:
    given = [tuple(repr(m.would(*c)) for c in LOG_CASES) for m in LOGS.mistakes]
    given.append(tuple(repr(missing(*c)) for c in LOG_CASES))
    assert len(set(given)) == len(given)
    prose = "\n".join(c.text for c in cells("09") if c.kind == "markdown")
    assert '`{0: ["broadcast", "all_reduce"], 1: ["broadcast"]}`' in prose
    assert "`(2, [1])`" in prose
    assert missing({0: ["broadcast", "all_reduce"], 1: ["broadcast"]}) == [2, [1]]


# -- train_uneven ----------------------------------------------------------------------------

HEAD = """
import torch, torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.functional import mse_loss
def step(model, optimizer, batch):
    optimizer.zero_grad()
    mse_loss(model(batch[0]), batch[1]).backward()
    optimizer.step()
def agreed(value, op):
    count = torch.tensor(value)
    dist.all_reduce(count, op=op)
    return int(count)
def train_uneven(model, optimizer, batches):
    rank, world = dist.get_rank(), dist.get_world_size()
"""


def train(body: str) -> str:
    return HEAD + "".join(f"    {line}\n" for line in body.strip().split("\n"))


EACH = "for b in batches{}: step(model, optimizer, b)"
FIRST = "with 3 batches on rank 0, 2 on rank 1: "
WRONG_TRAININGS = [
    Mutant("as it was", train(EACH.format("")), FIRST + "deadlock: rank 0 waits in backward, all_reduce #"),
    Mutant("the mean", train("n = agreed(len(batches), dist.ReduceOp.SUM) // world\n" + EACH.format("[:n]")),
           "with 2 batches on rank 0, 4 on rank 1: deadlock: rank 1 waits in backward"),
    Mutant("nothing", train("..."), "no step was taken"),
    Mutant("no_sync", train("with model.no_sync():\n    " + EACH.format("")), "end with different parameters"),
    Mutant("module", train("model = model.module\n" + EACH.format("")), "end with different parameters"),
    Mutant("first only", train(EACH.format("[:1]")), "only 1 of the 2 batches that every rank has was used"),
    Mutant("two, always", train(EACH.format("[:2]")), "with 3 batches on ranks 0–1: only 2 of the 3 batches"),
    Mutant("the most", train("n = agreed(len(batches), dist.ReduceOp.MAX)\nfor i in range(n): "
           "step(model, optimizer, batches[i])"), "rank 1 raised IndexError: list index out of range"),
    Mutant("rank 0's count", train("n = torch.tensor(len(batches))\ndist.broadcast(n, 0)\nfor i in range(int(n)): "
           "step(model, optimizer, batches[i])"), "rank 1 raised IndexError"),
    Mutant("the sum", train("n = agreed(len(batches), dist.ReduceOp.SUM)\n" + EACH.format("[:n]")), "deadlock: rank 0"),
    Mutant("barrier", train(EACH.format("") + "\ndist.barrier()"), "deadlock: "),
    Mutant("rest alone", train("n = agreed(len(batches), dist.ReduceOp.MIN)\n" + EACH.format("[:n]") +
           "\nwith model.no_sync():\n    " + EACH.format("[n:]")), "end with different parameters"),
    Mutant("averaged at the end", train("with model.no_sync():\n    " + EACH.format("") +
           "\nfor p in model.parameters():\n    dist.all_reduce(p.data)\n    p.data /= world"),
           "DDP averages gradients in every step"),
    Mutant("rank 0's model", train("with model.no_sync():\n    " + EACH.format("") +
           "\nfor p in model.parameters(): dist.broadcast(p.data, 0)"), "rank 0 alone would get these parameters"),
    Mutant("sums", train("n = agreed(len(batches), dist.ReduceOp.MIN)\noptimizer.param_groups[0]['lr'] *= world\n" +
           EACH.format("[:n]")), "all ranks agree, but not on what averaged gradients give"),
    Mutant("agrees on one rank", train("n = agreed(len(batches), dist.ReduceOp.MIN) if rank == 0 else 2\n" +
           EACH.format("[:n]")), "deadlock: "),
    Mutant("swallows", train("try:\n    " + EACH.format("") + "\nexcept RuntimeError: pass"), "deadlock: "),
    Mutant("never zero", train("n = agreed(len(batches), dist.ReduceOp.MIN)\noptimizer.zero_grad = lambda: None\n" +
           EACH.format("[:n]")), "optimizer.zero_grad() is missing"),
    Mutant("another group", train("dist.init_process_group()\n" + EACH.format("")),
           "default process group twice; the check has made the process group; leave that out"),
    Mutant("takes nothing", HEAD + "    pass\ndef train_uneven(): pass", "raised TypeError: train_uneven() takes 0"),
]  # fmt: skip
RIGHT_TRAININGS = {
    "the least": "n = agreed(len(batches), dist.ReduceOp.MIN)\n" + EACH.format("[:n]"),
    "gathered": "all_of = [None] * world\ndist.all_gather_object(all_of, len(batches))\n"
    + EACH.format("[:min(all_of)]"),
    "asks before each step": "for b in batches:\n    if not agreed(1, dist.ReduceOp.MIN): break\n"
    "    step(model, optimizer, b)\nelse:\n    agreed(0, dist.ReduceOp.MIN)",
    "Join": "with Join([model]):\n    " + EACH.format(""),
    "Join, by those who are left": "with Join([model], divide_by_initial_world_size=False):\n    " + EACH.format(""),
    "begins again": "n = agreed(len(batches), dist.ReduceOp.MAX)\n"
    "for i in range(n): step(model, optimizer, batches[i % len(batches)])",
    "repeats the last": "n = agreed(len(batches), dist.ReduceOp.MAX)\n"
    "for i in range(n): step(model, optimizer, batches[min(i, len(batches) - 1)])",
}


@pytest.mark.every(3)
@pytest.mark.parametrize("mutant", WRONG_TRAININGS, ids=str)
def test_wrong_trainings_are_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    answer = mutant.meets(check.train_uneven)
    assert answer.line.startswith("with "), "the layout is told"


@pytest.mark.parametrize("how", RIGHT_TRAININGS)
def test_right_trainings_pass(pool: nbddp.Pool, how: str) -> None:
    assert check.train_uneven(defined(train(RIGHT_TRAININGS[how]), "train_uneven"))


def test_the_lessons_solution_passes_and_its_exercise_hangs(pool: nbddp.Pool) -> None:
    pool.push({"kept": 41})
    assert check.train_uneven(solution("09", "train_uneven"))
    unfinished = exercise("09", "train_uneven")
    line = check.train_uneven(unfinished).line
    assert line.startswith(FIRST + "deadlock: rank 0 waits in backward, all_reduce #")
    assert line.endswith("rank 1 has finished the cell without calling it")
    assert list(pool.pull(["kept"])["kept"]) == [41, 41]


def test_the_check_leaves_the_process_group_as_it_was(pool: nbddp.Pool) -> None:
    is_there = "import torch.distributed as dist\ndist.is_initialized()"
    pool.run_cell("import torch.distributed as dist\nif dist.is_initialized(): dist.destroy_process_group()",
                  screen=NullScreen())  # fmt: skip
    assert check.train_uneven(solution("09", "train_uneven"))
    assert list(pool.run_cell(is_there, want_value=True, screen=NullScreen())) == [False, False]
    pool.run_cell("dist.init_process_group()", screen=NullScreen())
    assert check.train_uneven(solution("09", "train_uneven"))
    assert list(pool.run_cell(is_there, want_value=True, screen=NullScreen())) == [True, True]
