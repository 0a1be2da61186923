"""Lesson 15: the memory of ZeRO against closed forms, FSDP's schedule, and its exercises' checks on real ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nbddp
from nbddp.lessons.l15_sharding.figure import draw_gathers, draw_zero
from nbddp.lessons.l15_sharding.schedule import schedule_gathers
from nbddp.lessons.l15_sharding.simulation import PRECISIONS, share, stages
from nbddp.teach import check
from tests.lessons.answers import Mutant, defined, exercise, solution

NPROC = 4

# -- ZeRO ------------------------------------------------------------------------------------

sharing = {
    "parameters": st.integers(1, 10**12), "ranks": st.integers(1, 4096),
    "precision": st.sampled_from(sorted(PRECISIONS)),
}  # fmt: skip


@given(**sharing)
def test_stages_shard_one_part_after_another(parameters: int, ranks: int, precision: str) -> None:
    none, one, two, three = (share(s, parameters, ranks, precision) for s in (0, 1, 2, 3))
    assert none.total == 16 * parameters
    assert three.total == pytest.approx(16 * parameters / ranks)
    assert one.parts == pytest.approx((none.parameters, none.gradients, none.optimizer / ranks))
    assert two.parts == pytest.approx((none.parameters, none.gradients / ranks, none.optimizer / ranks))


def test_the_bars_are_as_long_as_the_bytes() -> None:
    made = stages(7.5, 64)
    shown = draw_zero(made)
    (axes,) = shown.figure.axes
    widths = [p.get_width() for p in axes.patches[::2]]  # each part is a fill and an edge
    assert widths == pytest.approx([b / 1e9 for of in made.shares for b in of.parts])
    texts = [t.get_text() for t in axes.texts]
    assert {"120 GB", "31.4 GB", "16.6 GB", "1.88 GB", "a GPU of 80 GB"} <= set(texts)
    assert all(t.get_fontsize() >= 6.5 for t in axes.texts)
    assert shown.words == made.words()


def test_the_timeline_has_a_bar_for_each_span_on_one_scale() -> None:
    made = schedule_gathers(ahead=1)
    shown = draw_gathers(made)
    (axes,) = shown.figure.axes
    bars = [p.get_width() for p in axes.patches if p.get_height() == pytest.approx(0.24)][::2]
    spans = [s for row in made.spans for s in row]
    assert len(bars) == len(spans)
    assert bars == pytest.approx([(s.end - s.start) * max(bars) / 2 for s in spans])
    assert all(t.get_fontsize() >= 6.5 for t in axes.texts)
    assert shown.words == made.words()


# -- sharded_step ----------------------------------------------------------------------------

STEP = """
def sharded_step(parameters, momentum, lr):
    import torch
    import torch.distributed as dist
    from torch.nn.functional import pad
    rank, n, size = dist.get_rank(), dist.get_world_size(), len(momentum)
    def flat(tensors):
        joined = torch.cat([t.flatten() for t in tensors])
        return pad(joined, (0, size * n - len(joined)))
    def scattered(given):
        dist.reduce_scatter_tensor(got := torch.empty(size), given)
        return got
    def gathered(own):
        dist.all_gather_into_tensor(whole := torch.empty(size * n), own)
        return whole
    def write(whole):
        sizes = [p.numel() for p in parameters]
        for p, piece in zip(parameters, whole[:sum(sizes)].split(sizes)):
            p.data.copy_(piece.view_as(p))
    gradients, values = flat([p.grad for p in parameters]), flat([p.detach() for p in parameters])
    mine = slice(rank * size, (rank + 1) * size)
"""
RIGHT_STEP = """
momentum.mul_(0.9).add_(scattered(gradients) / n)
write(gathered(values[mine] - lr * momentum))
"""


def step(text: str) -> str:
    return STEP + "\n".join("    " + line for line in text.strip("\n").splitlines())


def changed(*pairs: tuple[str, str], source: str = "") -> str:
    made = source or step(RIGHT_STEP)
    for old, new in pairs:
        assert old in made
        made = made.replace(old, new)
    return made


WRONG_STEPS = [
    Mutant("summed", changed((" / n)", ")")), "that is the step of summed gradients"),
    Mutant("own gradient", changed(("scattered(gradients) / n", "gradients[mine]")), "its own gradient only;"),
    Mutant("own gradient divided", changed(("scattered(gradients)", "gradients[mine]")),
           "its own gradient only, divided by the world size"),
    Mutant("divided twice", changed((" / n)", " / n / n)")), "divided by the world size twice"),
    Mutant("divided by four", changed((" / n)", " / 4)")), "3 ranks, 25 numbers: after step 1 of 3"),
    Mutant("not gathered", step("momentum.mul_(0.9).add_(scattered(gradients) / n)\n"
                                "values[mine] -= lr * momentum\nwrite(values)"), "all-gather the shards"),
    Mutant("momentum rebound", step("momentum = 0.9 * momentum + scattered(gradients) / n\n"
                                    "write(gathered(values[mine] - lr * momentum))"),
           "after step 2 of 3, rank 0, number 0 of parameters[0]"),
    Mutant("momentum rebound, why", step("momentum = 0.9 * momentum + scattered(gradients) / n\n"
                                         "write(gathered(values[mine] - lr * momentum))"),
           "momentum is lost between steps"),
    Mutant("uphill", changed(("- lr", "+ lr")), "has the wrong sign"),
    Mutant("no decay", changed((".mul_(0.9)", "")), "the old momentum is not reduced"),
    Mutant("dampened", changed(("scattered(gradients) / n", "0.1 * scattered(gradients) / n")),
           "here the gradient has weight 0.1"),
    Mutant("old momentum", step("new = scattered(gradients) / n\nwrite(gathered(values[mine] - lr * momentum))\n"
                                "momentum.mul_(0.9).add_(new)"), "from before this gradient"),
    Mutant("no lr", changed(("lr * ", "")), "the learning rate is missing"),
    Mutant("not padded", changed(("return pad(joined, (0, size * n - len(joined)))", "return joined")),
           "reduce_scatter_tensor: the input has 25 numbers and the output 7; on 4 ranks the input has 4 × as many"),
    Mutant("all_reduce", changed(("scattered(gradients)", "all_reduced()"), (
           "    gradients, values", "    def all_reduced():\n        dist.all_reduce(gradients)\n        "
           "return gradients[mine]\n    gradients, values")), "right, but all_reduce was called: reduce-scatter"),
    Mutant("twice", changed(("    momentum.mul_", "    scattered(gradients)\n    momentum.mul_")),
           "a rank gave 56 numbers to reduce_scatter_tensor in a step, where 28 do"),
    Mutant("minimum", changed(("got := torch.empty(size), given", "got := torch.empty(size), given, dist.ReduceOp.MIN"),
                              (" / n)", ")")), "the smallest gradients of all ranks"),
    Mutant("written nowhere", changed(("p.data.copy_(piece.view_as(p))", "p = piece.view_as(p)")),
           "no parameter changed"),
    Mutant("async", changed(("own)\n", "own, async_op=True)\n")), "nothing waits for it"),
    Mutant("turned", changed(("values[mine] -", "values.flip(0)[mine] -")),
           "after step 1 of 3, rank 0, number 0 of parameters[0]: expected"),
    Mutant("leaf changed", step("for p in parameters: p -= lr * p.grad"), "a leaf Variable that requires grad"),
    Mutant("one rank alone", changed(("    momentum.mul_", "    if rank == 1: return\n    momentum.mul_")),
           "deadlock: "),
    Mutant("dies", step("import os\nif rank == 1: os._exit(3)"), "rank 1"),
    Mutant("endless", step("while True: pass"), "no answer after"),
    Mutant("unwritten", step("..."), "it is still to be written"),
    Mutant("raises", step("parameters[9]"), "IndexError: list index out of range"),
]  # fmt: skip
RIGHT_STEPS = [
    step(RIGHT_STEP),
    changed(("torch.empty(size), given)", "torch.empty(size), given, op=dist.ReduceOp.AVG)"), (" / n)", ")")),
    step("""
got, parts = torch.empty(size), [torch.empty(size) for _ in range(n)]
dist.reduce_scatter(got, list((gradients / n).split(size)))
momentum.mul_(0.9).add_(got)
dist.all_gather(parts, values[mine] - lr * momentum)
write(torch.cat(parts))
"""),
    changed(("p.data.copy_(piece.view_as(p))", "p.data = piece.view_as(p).clone()")),
]


@pytest.mark.every(4, "mutants")
@pytest.mark.parametrize("mutant", WRONG_STEPS, ids=str)
def test_a_wrong_sharded_step_is_told_why(pool: nbddp.Pool, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    if mutant.name == "endless":
        monkeypatch.setattr("nbddp.lessons.framework.run_check.DEADLINE", 2.0)
    mutant.meets(check.sharded_step)


def test_right_sharded_steps_pass(pool: nbddp.Pool) -> None:
    assert check.sharded_step(solution("15", "sharded_step"))
    for source in RIGHT_STEPS:
        assert check.sharded_step(defined(source, "sharded_step")), source
    assert "still to be written" in check.sharded_step(exercise("15", "sharded_step")).line


# -- rest_of_epoch ---------------------------------------------------------------------------

REST = "def rest_of_epoch(order, seen, rank, world_size):\n    n, r, s = world_size, rank, seen\n    return "
WRONG_RESTS = [
    Mutant("each rank's", REST + "order[r::n][s:]", "counts the samples of all ranks together, not those of each"),
    Mutant("times the ranks", REST + "order[s * n + r::n]", "counts the samples of all ranks together"),
    Mutant("divides", REST + "order[r::n][s // n:]", "right only if the world size divides seen"),
    Mutant("rounds up", REST + "order[r::n][-(-s // n):]", "that rounds up"),
    Mutant("from the start", REST + "order[r::n]", "restarts the epoch"),
    Mutant("all", REST + "order[s:]", "every rank reads all remaining samples"),
    Mutant("positions", REST + "list(range(s + r, len(order), n))", "those are positions in order"),
    Mutant("blocks", REST + "order[s:][r * -(-(len(order) - s) // n):(r + 1) * -(-(len(order) - s) // n)]",
           "has a block"),
    Mutant("dropped", REST + "order[s:s + (len(order) - s) // n * n][r::n]", "the last samples are not read"),
    Mutant("padded", REST + "(order[s:] + (order[s:] * n)[:-(len(order) - s) % n])[r::n]",
           "as DistributedSampler does"),
    Mutant("already", REST + "order[:s][r::n]", "those samples were read already"),
    Mutant("backwards", REST + "order[s:][::-1][r::n]", "samples number 0 are"),
    Mutant("one sample", REST + "order[s + r]", "return a list of samples"),
    Mutant("floats", REST + "order[s + r / n::n]", "slice indices must be integers"),
    Mutant("unwritten", REST + "None", "still to be written"),
    Mutant("asks ranks", "import torch.distributed as d\n" + REST + "order[s + d.get_rank()::d.get_world_size()]",
           "the arguments contain everything"),
]  # fmt: skip
RIGHT_RESTS = [
    REST + "order[s:][r::n]",
    REST + "[v for i, v in enumerate(order[s:]) if i % n == r]",
    REST + "order[s + n - 1 - r::n]",
]


@pytest.mark.parametrize("mutant", WRONG_RESTS, ids=str)
def test_a_wrong_rest_of_the_epoch_is_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    mutant.meets(check.rest_of_epoch)


def test_every_way_to_deal_out_the_rest_in_turn_passes(pool: nbddp.Pool) -> None:
    assert check.rest_of_epoch(solution("15", "rest_of_epoch"))
    for source in RIGHT_RESTS:
        assert check.rest_of_epoch(defined(source, "rest_of_epoch")), source
    assert "still to be written" in check.rest_of_epoch(exercise("15", "rest_of_epoch")).line


# -- bytes_per_rank --------------------------------------------------------------------------

BYTES = "def bytes_per_rank(stage, parameters, ranks):\n    p, n = parameters, ranks\n    return "
SUM = " + ".join(f"{{{i}}} * p // (n if stage >= {{{i + 3}}} else 1)" for i in range(3))
WRONG_BYTES = [
    Mutant("no copy", BYTES + SUM.format(2, 2, 8, 3, 2, 1), "keeps a float32 copy"),
    Mutant("float32", BYTES + SUM.format(4, 4, 8, 3, 2, 1), "that is float32 throughout"),
    Mutant("always", BYTES + "16 * p // n", "stage 0 shards nothing"),
    Mutant("all or nothing", BYTES + "16 * p // (n if stage else 1)", "that shards everything from stage 1 on"),
    Mutant("too far", BYTES + SUM.format(2, 2, 12, 2, 1, 0), "one stage too far"),
    Mutant("behind", BYTES + SUM.format(2, 2, 12, 4, 3, 2), "one stage behind"),
    Mutant("whole parameters", BYTES + SUM.format(2, 2, 12, 4, 2, 1), "stage 3 shards the parameters too"),
    Mutant("another order", BYTES + SUM.format(2, 2, 12, 1, 2, 3), "the order is wrong"),
    Mutant("nothing", BYTES + "16 * p", "that shards nothing"),
    Mutant("parameters", BYTES + "2 * p", "the parameters alone"),
    Mutant("together", BYTES + "n * (" + SUM.format(2, 2, 12, 3, 2, 1) + ")", "what all ranks hold together"),
    Mutant("words", BYTES + "'16 GB'", "return a number of bytes"),
    Mutant("one stage for another", BYTES + "(4 + 12 / n) * p if stage == 2 else "
           + SUM.format(2, 2, 12, 3, 2, 1), "those are the bytes of stage 1"),
    Mutant("unwritten", BYTES + "None", "still to be written"),
    Mutant("gigabytes", BYTES + "(" + SUM.format(2, 2, 12, 3, 2, 1) + ") / 1e9", "that is in GB; return bytes"),
    Mutant("GiB", BYTES + "(" + SUM.format(2, 2, 12, 3, 2, 1) + ") / 2**30", "that is in GiB"),
    Mutant("three parts", BYTES + "12 * p, 2 * p, 2 * p", "the sum of the parts"),
    Mutant("one stage each", BYTES + SUM.replace(">=", "==").format(2, 2, 12, 3, 2, 1), "one part at each stage"),
    Mutant("64", BYTES.replace("n = parameters, ranks", "n = parameters, 64") + SUM.format(2, 2, 12, 3, 2, 1),
           "that is always 64"),
    Mutant("copy twice", BYTES + SUM.format(4, 4, 12, 3, 2, 1), "among the optimizer's 12 bytes already"),
    Mutant("optimizer alone", BYTES + "12 * p // (n if stage else 1)", "the optimizer's state alone; parameters"),
    Mutant("no stage 0", "def bytes_per_rank(stage, p, n):\n    if stage: return 16 * p // n", "ends without a value"),
    Mutant("the pool's size", "import torch.distributed as d\n" + BYTES + "16 * p // d.get_world_size()",
           "the arguments contain everything"),
]  # fmt: skip
RIGHT_BYTES = [
    BYTES + "2 * p / n ** (stage > 2) + 2 * p / n ** (stage > 1) + 12 * p / n ** (stage > 0)",
    BYTES + "{0: 16 * p, 1: 4 * p + 12 * p // n, 2: 2 * p + 14 * p // n, 3: 16 * p // n}[stage]",
]


@pytest.mark.parametrize("mutant", WRONG_BYTES, ids=str)
def test_wrong_bytes_are_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    mutant.meets(check.bytes_per_rank)


def test_right_bytes_pass(pool: nbddp.Pool) -> None:
    assert check.bytes_per_rank(solution("15", "bytes_per_rank"))
    for source in RIGHT_BYTES:
        assert check.bytes_per_rank(defined(source, "bytes_per_rank")), source
    assert "still to be written" in check.bytes_per_rank(exercise("15", "bytes_per_rank")).line
