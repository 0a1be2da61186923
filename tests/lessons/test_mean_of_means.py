"""Lesson 13: what tokens count against DDP itself, and the checks of its exercises on real ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nbddp
from nbddp.lessons.framework.run_check import ALIKE
from nbddp.lessons.l13_mean_of_means.figure import draw_weights
from nbddp.lessons.l13_mean_of_means.simulation import ALL, MEANS, RANK, RULES, Weighed, weighed
from nbddp.teach import check, predict
from tests.lessons.answers import Mutant, defined, exercise, solution

NPROC = 4

# -- what a token counts ---------------------------------------------------------------------

sizes = st.integers(1, 16)
settings = {"first": sizes, "second": sizes, "other_first": sizes, "other_second": sizes}


@given(**settings, rule=st.sampled_from(RULES))
def test_weights_add_up_to_one_and_only_one_divisor_is_always_right(rule: str, **tokens: int) -> None:
    made = weighed(rule=rule, **tokens)
    total = sum(b.tokens * b.weight for b in made.blocks)
    assert total == pytest.approx(1)
    assert made.even or rule != ALL
    assert made.effective <= made.total + 1e-9
    assert 0 <= made.moved < 1
    assert made.even == (made.moved < 1e-9) == (made.effective > made.total - 1e-9)


@given(**settings)
def test_a_ranks_own_tokens_are_the_right_divisor_only_if_ranks_have_as_many(**tokens: int) -> None:
    """What `predict.own_tokens` says."""
    made = weighed(rule=RANK, **tokens)
    assert made.even == (sum(made.tokens[0]) == sum(made.tokens[1]))
    assert predict.own_tokens.question.came == "if all ranks have the same number of tokens"


def on_ddp(tokens: tuple[tuple[int, ...], ...], rule: str) -> list[float]:
    """The weight of a token of each micro-batch, as DDP on real ranks has it."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    class Ruler(torch.nn.Module):
        def __init__(self, entries: int):
            super().__init__()
            self.entries = torch.nn.Parameter(torch.zeros(entries))

        def forward(self, place: torch.Tensor) -> torch.Tensor:
            return self.entries[place]

    dist.init_process_group()
    counts = [n for own in tokens for n in own]
    model, mine, before = DDP(Ruler(len(counts))), tokens[dist.get_rank()], dist.get_rank() * len(tokens[0])
    divisors = {"tokens of the micro-batch × micro-batches": lambda n: n * len(mine),
                "tokens of the rank": lambda n: sum(mine),
                "tokens of all ranks / world size": lambda n: sum(counts) / len(tokens)}  # fmt: skip
    with model.no_sync():
        for i, n in enumerate(mine):
            place = torch.full((n,), before + i)
            if i + 1 < len(mine):
                (model(place).sum() / divisors[rule](n)).backward()
    (model(place).sum() / divisors[rule](n)).backward()
    grown = model.module.entries.grad
    dist.destroy_process_group()
    return [float(g) / n for g, n in zip(grown, counts, strict=True)]


@pytest.mark.parametrize("rule", RULES)
def test_weights_are_those_of_ddp(two: nbddp.Pool, rule: str) -> None:
    made = Weighed(((12, 4), (2, 6)), rule)
    for found in two.run(on_ddp, made.tokens, rule):
        assert found == pytest.approx([b.weight for b in made.blocks])


@pytest.mark.parametrize("tokens", [(8, 8, 8, 8), (12, 4, 2, 6), (16, 1, 16, 16), (1, 1, 1, 1)])
def test_a_square_has_the_area_of_its_tokens_weight(tokens: tuple[int, ...]) -> None:
    made = weighed(*tokens, MEANS)
    shown = draw_weights(made)
    (axes,) = shown.figure.axes
    areas = [p.get_width() * p.get_height() for p in axes.patches]
    right = areas[1]
    assert areas[::2] == pytest.approx([right * b.relative for b in made.blocks for _ in range(b.tokens)])
    assert areas[1::2] == pytest.approx([right] * made.total)
    low, high = axes.get_ylim()[::-1]
    assert all(low <= p.get_y() and p.get_y() + p.get_height() <= high for p in axes.patches)
    assert all(t.get_fontsize() >= 6.5 for t in axes.texts)
    assert shown.words == made.words()


# -- accumulate ------------------------------------------------------------------------------

HEAD = """
import contextlib
def accumulate(model, micro_batches, loss_of):
    n = len(micro_batches)
"""


def body(text: str) -> str:
    return HEAD + "\n".join("    " + line for line in text.strip("\n").splitlines())


GUARDED = """
for i, (x, y) in enumerate(micro_batches):
    with {guard}:
        loss = loss_of(model(x), y){scale}
        loss.backward()
"""
LATER = "model.no_sync() if i + 1 < n else contextlib.nullcontext()"
WRONG_SUMS = [
    Mutant("no_sync without with", body("n = len(micro_batches)\nmodel.no_sync()\nfor x, y in micro_batches: "
           "(loss_of(model(x), y) / n).backward()"),
           "they were exchanged 5 times: model.no_sync() was called and never entered; it is a context manager"),
    Mutant("targets first", body(GUARDED.format(guard=LATER, scale=" / n").replace("loss_of(model(x), y)",
           "loss_of(y, model(x))")), "loss_of takes the outputs first, then the targets"),
    Mutant("not divided", body(GUARDED.format(guard=LATER, scale="")),
           "rank 0, 0.weight, 5 micro-batches: yours is 5.00 × the reference: you added up 5 micro-batches"),
    Mutant("every time", body(GUARDED.format(guard="contextlib.nullcontext()", scale=" / n")),
           "right, but they were exchanged 5 times for 5 micro-batches, and once is enough"),
    Mutant("never", body(GUARDED.format(guard="model.no_sync()", scale=" / n")),
           "rank 0, 5 micro-batches: no gradients were exchanged, so every rank has its own"),
    Mutant("the first", body(GUARDED.format(guard="model.no_sync() if i else contextlib.nullcontext()", scale=" / n")),
           "exchanged in micro-batch 1, and what came after it is every rank's own"),
    Mutant("forward outside", body("""
for i, (x, y) in enumerate(micro_batches):
    loss = loss_of(model(x), y) / n
    with model.no_sync() if i + 1 < n else contextlib.nullcontext():
        loss.backward()
"""), "although no_sync was entered: DDP decides in forward"),
    Mutant("every other", body(GUARDED.format(guard="model.no_sync() if i % 2 else contextlib.nullcontext()",
                                             scale=" / n")),
           "exchanged 3 times for 5 micro-batches"),
    Mutant("by the world size", body("import torch.distributed as dist\nw = dist.get_world_size()\n"
                                     + GUARDED.format(guard=LATER, scale=" / w")),
           "you divided by the world size, which DDP does itself"),
    Mutant("by both", body("import torch.distributed as dist\nw = dist.get_world_size()\n"
                           + GUARDED.format(guard=LATER, scale=" / n / w")),
           "yours is 0.25 × the reference: you divided by the world size too"),
    Mutant("twice", body(GUARDED.format(guard=LATER, scale=" / n / n")), "by the number of micro-batches twice"),
    Mutant("always five", body(GUARDED.format(guard=LATER, scale=" / 5")),
           "rank 0, 0.weight, 3 micro-batches: yours is 0.60 × the reference; each micro-batch's loss counts 1/3"),
    Mutant("set to zero", body("""
for i, (x, y) in enumerate(micro_batches):
    model.zero_grad()
    with model.no_sync() if i + 1 < n else contextlib.nullcontext():
        (loss_of(model(x), y) / n).backward()
"""), "yours is of the last micro-batch alone"),
    Mutant("past DDP", body(GUARDED.format(guard=LATER, scale=" / n").replace("model(x)", "model.module(x)")),
           "nothing went through DDP; call model(inputs)"),
    Mutant("all at once", body("""
import torch
x, y = (torch.cat(some) for some in zip(*micro_batches))
loss_of(model(x), y).backward()
"""), "5 micro-batches went through the model in 1 forward"),
    Mutant("by hand", body("""
import torch.distributed as dist
with model.no_sync():
    for x, y in micro_batches:
        (loss_of(model(x), y) / n).backward()
for p in model.parameters():
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()
"""), "the gradients are right, but DDP exchanged none of them"),
    Mutant("steps", body(GUARDED.format(guard=LATER, scale=" / n") + "import torch\n"
                         "torch.optim.SGD(model.parameters(), lr=0.1).step()"), "a parameter changed"),
    Mutant("one left out", body(GUARDED.format(guard=LATER, scale=" / n").replace("(micro_batches)",
                                                                                "(micro_batches[1:], 1)")),
           "yours differs from the reference by up to"),
    Mutant("cleared", body(GUARDED.format(guard=LATER, scale=" / n") + "model.zero_grad()"), "has no gradient after"),
    Mutant("one backward", body("sum(loss_of(model(x), y) / n for x, y in micro_batches).backward()"),
           "up to 5 losses waited for backward() at a time"),
    Mutant("last forgotten", body("with model.no_sync():\n    for x, y in micro_batches[:-1]: "
                                  "(loss_of(model(x), y) / n).backward()"),
           "4 forwards, all inside no_sync, so no gradients were exchanged: the last micro-batch is missing"),
    Mutant("last whole", body(GUARDED.format(guard=LATER, scale=" / (n if i + 1 < n else 1)")),
           "expected a weight of 1/5 for each micro-batch, got 1.00 for the last and 0.20 for each before it"),
    Mutant("by those before", body(GUARDED.format(guard=LATER, scale=" / (n - 1 if i + 1 < n else n)")),
           "got 0.20 for the last and 0.25 for each before it"),
    Mutant("zeros", body(GUARDED.format(guard=LATER, scale=" / n") + "for p in model.parameters(): p.grad.zero_()"),
           "set to zero after the last backward()"),
    Mutant("sum over ranks", body(GUARDED.format(guard=LATER, scale=" / n") + "import torch.distributed as dist\n"
                                  "for p in model.parameters(): dist.all_reduce(p.grad)"),
           "yours is 4.00 × the reference: you added up over the ranks"),
    Mutant("unwritten", HEAD + "    ...", "still to be written"),
    Mutant("raises", body("return micro_batches[9]"), "raised IndexError: list index out of range"),
    Mutant("one rank alone", body("import torch.distributed as dist\nif dist.get_rank():\n    return\n"
                                  + GUARDED.format(guard=LATER, scale=" / n")), "deadlock: rank 0"),
]  # fmt: skip
RIGHT_SUMS = [
    body("""
*early, last = micro_batches
with model.no_sync():
    for x, y in early:
        loss_of(model(x), y).div(n).backward()
loss_of(model(last[0]), last[1]).div(n).backward()
"""),
    body("""
for i, (x, y) in enumerate(micro_batches):
    model.require_backward_grad_sync = i == n - 1
    loss_of(model(x), y).backward()
for p in model.parameters():
    p.grad.div_(n)
"""),
]


@pytest.mark.every(4, "mutants")
@pytest.mark.parametrize("mutant", WRONG_SUMS, ids=str)
def test_wrong_accumulation_is_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    mutant.meets(check.accumulate)


def test_right_accumulation_passes(pool: nbddp.Pool) -> None:
    assert check.accumulate(solution("13", "accumulate"))
    for source in RIGHT_SUMS:
        assert check.accumulate(defined(source, "accumulate")), source
    assert "still to be written" in check.accumulate(exercise("13", "accumulate")).line


# -- token_weighted_backward -----------------------------------------------------------------

TOKENS = """
import contextlib
import torch
import torch.distributed as dist
def token_weighted_backward(model, micro_batches, loss_sum):
    n, world = len(micro_batches), dist.get_world_size()
    own = sum((t != -100).sum() for _, t in micro_batches)
    everyone = own.clone()
    dist.all_reduce(everyone)
    for i, (x, y) in enumerate(micro_batches):
        with {guard}:
            loss = {loss}
            loss.backward()
{end}"""
SUM = "loss_sum(model(x), y)"
RIGHT = f"{SUM} * world / everyone"


def tokens(loss: str, guard: str = LATER, end: str = "") -> str:
    return TOKENS.format(loss=loss, guard=guard, end=end)


MANY = "rank 0, 82 tokens on 4 ranks: "
WRONG_TOKENS = [
    Mutant("mean of means", tokens(f"{SUM} / (y != -100).sum().clamp(min=1) / n"),
           MANY + "every micro-batch counts the same, however many tokens it has: that is the mean of means"),
    Mutant("means added up", tokens(f"{SUM} / (y != -100).sum().clamp(min=1)"),
           MANY + "every micro-batch counts the same, however many tokens it has, and the means were added up"),
    Mutant("by the rank's own", tokens(f"{SUM} / own"), "so a rank with few tokens counts as much as one with many"),
    Mutant("by the rank's own, undone", tokens(f"{SUM} * world / own"), "all_reduce their number before you divide"),
    Mutant("DDP divides too", tokens(f"{SUM} / everyone"), "DDP divides the sum over ranks by the world size"),
    Mutant("world size twice", tokens(f"{RIGHT} * world"), "by the world size once too often"),
    Mutant("only summed", tokens(f"{SUM} * world"), MANY + "the sum over tokens was not divided by their number"),
    Mutant("as it comes", tokens(SUM), MANY + "the sum over tokens was not divided by their number"),
    Mutant("padding", tokens(RIGHT).replace("(t != -100).sum()", "torch.tensor(t.numel())"),
           MANY + "padding was counted: a target of -100 is not a token"),
    Mutant("padding, and DDP divides", tokens(f"{SUM} / everyone").replace("(t != -100).sum()",
           "torch.tensor(t.numel())"), "padding was counted, but a target of -100 is not a token; and DDP's"),
    Mutant("by micro-batches too", tokens(f"{RIGHT} / n"), "needs no such division"),
    Mutant("set to zero between", tokens(f"(model.zero_grad(), {RIGHT})[1]"), "only the last micro-batches count"),
    Mutant("set to zero after", tokens(RIGHT, end="    [p.grad.zero_() for p in model.parameters()]"),
           "they were set to zero after the last backward()"),
    Mutant("always four", tokens(f"{SUM} * 4 / everyone"),
           "rank 0, 55 tokens on 3 ranks: you multiply by 4, and the world size is 3"),
    Mutant("largest rank", tokens(RIGHT).replace("all_reduce(everyone", "all_reduce(everyone, dist.ReduceOp.MAX"),
           "expected a weight of 1/82, 0.012, for every token, got 0.037 for every token"),
    Mutant("half of the first", tokens(f"{RIGHT} * (0.5 if i == 0 else 1)"),
           "got 0.0122 in rank 0's micro-batch 2 and 0.0061 in rank 0's micro-batch 1"),
    Mutant("nan", tokens(f"{RIGHT} * (0 / (i * y.sum()))"), "rank 0: a gradient is nan"),
    Mutant("every time", tokens(RIGHT, "contextlib.nullcontext()"),
           "the gradients are right, but they were exchanged 3 times for 3 micro-batches, and once is enough"),
    Mutant("never", tokens(RIGHT, "model.no_sync()"), "rank 0, 3 micro-batches: no gradients were exchanged"),
    Mutant("the first", tokens(RIGHT, "model.no_sync() if i else contextlib.nullcontext()"),
           "gradients were exchanged in micro-batch 1, and what came after it is every rank's own"),
    Mutant("past DDP", tokens(RIGHT).replace("model(x)", "model.module(x)"), "nothing went through DDP"),
    Mutant("one backward", tokens(f"(loss if i else 0) + {RIGHT}").replace("            loss.backward()", "")
           + "    loss.backward()\n", "right, but up to 3 losses waited for backward() at a time"),
    Mutant("squares", tokens(f"{SUM} ** 2 / everyone"), "got 0.167 in rank 3's micro-batch 3 and "),
    Mutant("steps", tokens(RIGHT, end="    torch.optim.SGD(model.parameters(), lr=0.1).step()"), "a parameter changed"),
    Mutant("cleared", tokens(RIGHT, end="    model.zero_grad()"), "rank 0: 0.weight has no gradient"),
    Mutant("targets first", tokens("loss_sum(y, model(x))"), "loss_sum takes the outputs first, then the targets"),
    Mutant("unwritten", "def token_weighted_backward(model, micro_batches, loss_sum):\n    ...", "still to be written"),
    Mutant("raises", tokens("loss_sum(model(x))"), "raised TypeError"),
    Mutant("one rank leaves", tokens(RIGHT).replace("    own =", "    if dist.get_rank() == 3: return\n    own ="),
           "deadlock: ranks 0–2"),
    Mutant("dies", tokens("__import__('os').kill(__import__('os').getpid(), 9)"), "killed by SIGKILL"),
    Mutant("one rank counts alone", tokens(RIGHT).replace("    dist.all_reduce(everyone)",
           "    if dist.get_rank(): dist.all_reduce(everyone)"), ALIKE),
]  # fmt: skip
RIGHT_TOKENS = [
    tokens(RIGHT),
    tokens(f"{SUM} / everyone").replace("all_reduce(everyone)", "all_reduce(everyone := everyone.double(), "
                                        "dist.ReduceOp.AVG)"),
    tokens(SUM, end="    for p in model.parameters(): p.grad *= world / everyone"),
    tokens(RIGHT).replace("everyone = own.clone()", "everyone = torch.tensor(float(own))"),
]  # fmt: skip


@pytest.mark.every(4, "mutants")
@pytest.mark.parametrize("mutant", WRONG_TOKENS, ids=str)
def test_wrong_weights_are_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    mutant.meets(check.token_weighted_backward)


def test_right_weights_pass(pool: nbddp.Pool) -> None:
    assert check.token_weighted_backward(solution("13", "token_weighted_backward"))
    for source in RIGHT_TOKENS:
        assert check.token_weighted_backward(defined(source, "token_weighted_backward")), source
    unwritten = check.token_weighted_backward(exercise("13", "token_weighted_backward"))
    assert "still to be written" in unwritten.line


def test_two_ranks_are_enough(two: nbddp.Pool) -> None:
    with check.on(two):
        assert check.token_weighted_backward(solution("13", "token_weighted_backward"))
        assert check.accumulate(solution("13", "accumulate"))


# -- learning_rate ---------------------------------------------------------------------------

RATE = """
def learning_rate(step, warmup, base, base_batch, ranks, batch, micro_batches):
    k = {k}
    if step >= warmup:
        return base * k
    return {ramp}
"""
K, RAMP = "ranks * batch * micro_batches / base_batch", "base + base * (k - 1) * step / warmup"


def rate(k: str = K, ramp: str = RAMP) -> str:
    return RATE.format(k=k, ramp=ramp)


WRONG_RATES = [
    Mutant("not scaled", rate("1"), "expected 1.375, got 0.5; that is the learning rate of the small batch"),
    Mutant("without micro-batches", rate("ranks * batch / base_batch"), "effective batch includes the micro-batches"),
    Mutant("without ranks", rate("batch * micro_batches / base_batch"), "the effective batch includes all ranks"),
    Mutant("without batch", rate("ranks * micro_batches"), "depends on batch"),
    Mutant("divided", rate("base_batch / (ranks * batch * micro_batches)"), "divides where it should multiply"),
    Mutant("square root", rate(f"({K}) ** 0.5"), "that grows with the square root of the batch"),
    Mutant("no warm-up", rate(ramp="base * k"), "there is no warm-up"),
    Mutant("from zero", rate(ramp="base * k * step / warmup"), "that begins at 0"),
    Mutant("ahead", rate(ramp=RAMP.replace("step", "(step + 1)")), "that is one step ahead"),
    Mutant("late", rate(ramp=RAMP.replace("warmup", "(warmup + 1)")),
           "step 1 of a warm-up of 4 steps is 1/4 of the way from 0.5 to 4.0"),
    Mutant("goes on", rate().replace("step >= warmup", "not warmup"), "that keeps growing after the warm-up"),
    Mutant("stays", rate(ramp="base"), "that stays at base until the warm-up is over"),
    Mutant("no division by zero", rate().replace("step >= warmup", "step > warmup"), "ZeroDivisionError"),
    Mutant("curved", rate(ramp="base * k ** (step / warmup)"), "step 1 of a warm-up of 4 steps is 1/4 of the way"),
    Mutant("a word", rate("1", "'four'"), "a learning rate is a number"),
    Mutant("unwritten", rate() .replace("    k =", "    return None\n    k ="), "still to be written"),
]  # fmt: skip
RIGHT_RATES = [
    rate(),
    rate(ramp="base * (1 - step / warmup) + base * k * step / warmup"),
    rate().replace("step >= warmup", "warmup <= step").replace("ranks * batch", "batch * ranks"),
    """
def learning_rate(step, warmup, base, small, ranks, batch, micro):
    done = min(1, step / warmup) if warmup else 1
    return base + (base * ranks * batch * micro / small - base) * done
""",
]


@pytest.mark.parametrize("mutant", WRONG_RATES, ids=str)
def test_wrong_learning_rates_are_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    mutant.meets(check.learning_rate)


def test_right_learning_rates_pass(pool: nbddp.Pool) -> None:
    assert check.learning_rate(solution("13", "learning_rate"))
    for source in RIGHT_RATES:
        assert check.learning_rate(defined(source, "learning_rate")), source
    assert "still to be written" in check.learning_rate(exercise("13", "learning_rate")).line
