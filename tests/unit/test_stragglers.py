"""A rank that is late gets its cause: tables with known answers, and each cause planted on one of four real ranks."""

from __future__ import annotations

import random
import re
import statistics
from dataclasses import replace

import pytest

from nbddp.analysis.cause import BACKWARD, BATCH, EITHER, FORWARD, INPUT, MACHINE, OPTIMIZER, UNKNOWN, cause, steady
from nbddp.analysis.steps import Bucket, Recording, Span, Step
from nbddp.analysis.wait_time import Straggler, straggler, transfers
from nbddp.capabilities.timings.analysis import (
    AFTER,
    BETWEEN,
    LOSS,
    analysed,
    latest_bucket,
    own,
    parts,
    slow,
    verdict,
)
from nbddp.capabilities.timings.text import sentences

MS = 1_000_000

# -- tables ----------------------------------------------------------------------------------------

USUAL = {INPUT: 10, FORWARD: 30, LOSS: 2, BACKWARD: 60, OPTIMIZER: 20}


def table(**factors: float) -> dict[int, dict[str, int]]:
    """Four ranks alike, but rank 2, whose parts take so many times as long: milliseconds."""
    names = {"input": INPUT, "forward": FORWARD, "loss": LOSS, "backward": BACKWARD, "optimizer": OPTIMIZER}
    by = {names[short]: f for short, f in factors.items()}
    usual = {part: took * MS for part, took in USUAL.items()}
    late = {part: int(took * by.get(part, 1)) for part, took in usual.items()}
    return {0: usual, 1: usual, 2: late, 3: usual}


@pytest.mark.parametrize(
    ("factors", "what", "words"),
    [
        ({"input": 9}, INPUT, "cause: input (data loader), which has 100 % of rank 2's extra time"),
        ({"forward": 3}, FORWARD, "cause: forward, which has 100 % of rank 2's extra time"),
        ({"backward": 2}, BACKWARD, "cause: backward, which has 100 % of rank 2's extra time"),
        ({"backward": 2, "forward": 1.1}, BACKWARD, "cause: backward, which has 95 % of rank 2's extra time"),
        ({"optimizer": 4}, OPTIMIZER, "cause: optimizer, which has 100 % of rank 2's extra time"),
        ({"forward": 2, "backward": 2, "optimizer": 2, "loss": 2}, MACHINE,
         "cause: the machine. Everything takes rank 2 about 2.00 times as long"),
        ({"forward": 1.5, "backward": 1.4, "optimizer": 1.6, "input": 1.5}, MACHINE,
         "cause: the machine. Everything takes rank 2 about 1.46 times as long"),
        ({"forward": 2, "backward": 2.1}, BATCH,
         "cause: more work, such as a larger batch or longer inputs; forward and backward take rank 2 about 2.07 "
         "times as long, but the optimizer does not"),
        ({"forward": 1.08, "backward": 1.09, "optimizer": 1.07}, MACHINE,
         "cause: the machine. Everything takes rank 2 about 1.08 times as long"),
        ({"input": 3, "optimizer": 2}, UNKNOWN,
         "cause: not known; rank 2's extra time is spread over several parts (input (data loader) 50 %, "
         "optimizer 50 %)"),
    ],
)  # fmt: skip
def test_the_part_with_most_of_the_extra_time_is_the_cause(factors: dict[str, float], what: str, words: str) -> None:
    found = cause(table(**factors), 2)
    assert found is not None
    assert (found.what, found.describe()) == (what, words)


def test_without_an_optimizer_a_larger_batch_and_a_slower_machine_are_not_told_apart() -> None:
    times = {r: {FORWARD: own[FORWARD], BACKWARD: own[BACKWARD]} for r, own in table(forward=2, backward=2).items()}
    found = cause(times, 2)
    assert found is not None
    assert found.what == EITHER
    assert "a larger batch, longer inputs or a slower machine; the optimizer is too short" in found.describe()


@pytest.mark.parametrize(
    ("factors", "inputs", "what", "words"),
    [
        ({"forward": 1.9, "backward": 1.8}, 2.0, BATCH,
         "cause: more work. Rank 2's inputs have 2.00 times as many elements as the others', and forward and backward "
         "take about 1.83 times as long"),
        ({"forward": 1.9, "backward": 1.8, "loss": 1.5, "optimizer": 1.4}, 2.0, BATCH, "cause: more work. Rank 2's"),
        ({"forward": 1.2, "backward": 2.0}, 2.0, BATCH, "cause: more work. Rank 2's"),
        ({"forward": 3.9, "backward": 3.8}, 2.0, BATCH, "cause: more work. Rank 2's"),
        ({"forward": 2, "backward": 2, "optimizer": 2}, 1.0, MACHINE,
         "cause: the machine. Everything takes rank 2 about 2.00 times as long, with inputs no larger than the "
         "others'"),
        ({"forward": 3, "backward": 3, "optimizer": 3}, 1.1, MACHINE,
         "cause: the machine. Everything takes rank 2 about 3.00 times as long; its inputs have 1.10 times as many "
         "elements as the others', which alone does not explain it"),
        ({"forward": 2, "backward": 2}, 1.0, EITHER,
         "cause: forward and backward take rank 2 about 2.00 times as long. Its inputs are no larger than the others', "
         "and its optimizer is as fast. Possible causes are other code on this rank, or work that depends on the "
         "values of the inputs"),
        ({"forward": 3, "backward": 3}, 1.1, EITHER,
         "cause: forward and backward take rank 2 about 3.00 times as long. Its inputs have 1.10 times as many "
         "elements as the others', which explains only a part of it"),
        ({"backward": 3}, 1.1, BACKWARD, "cause: backward, which has 100 % of rank 2's extra time"),
        ({"input": 9}, 2.0, INPUT, "cause: input (data loader), which has 100 % of rank 2's extra time"),
    ],
)  # fmt: skip
def test_the_size_of_its_inputs_tells_more_work_from_a_slow_machine(
    factors: dict[str, float], inputs: float, what: str, words: str
) -> None:
    found = cause(table(**factors), 2, inputs={0: 1000, 1: 1000, 2: int(1000 * inputs), 3: 1000})
    assert found is not None
    assert found.what == what
    assert found.describe().startswith(words)


def test_an_optimizer_that_is_a_little_slower_does_not_speak_for_the_machine() -> None:
    """The ranks of a busy machine differ by chance: 1.3 is not 1.9."""
    times = table(forward=1.9, backward=1.8, loss=1.5, optimizer=1.35)
    found = cause(times, 2)
    assert found is not None
    assert found.what == EITHER
    assert found.describe().endswith(
        "Possible causes are a larger batch, longer inputs or a slower machine. The optimizer, whose work does not "
        "depend on the batch, takes 1.35 times as long, which does not decide it"
    )
    as_slow = cause(table(forward=1.9, backward=1.8, loss=1.5, optimizer=1.6), 2)
    assert as_slow is not None
    assert as_slow.what == MACHINE


def test_inputs_that_are_not_known_on_all_ranks_say_nothing() -> None:
    times = table(forward=2, backward=2, optimizer=2)
    some = cause(times, 2, inputs={0: 1000, 1: 0, 2: 2000, 3: 1000})
    none = cause(times, 2)
    assert some == none
    assert none is not None
    assert none.inputs == 0


def test_without_an_optimizer_and_with_equal_inputs_the_cause_is_left_open() -> None:
    times = {r: {FORWARD: own[FORWARD], BACKWARD: own[BACKWARD]} for r, own in table(forward=2, backward=2).items()}
    found = cause(times, 2, inputs=dict.fromkeys(range(4), 8))
    assert found is not None
    assert found.what == EITHER
    assert "a slower machine, other code on this rank, or work that depends on the values" in found.describe()


def test_a_long_pause_between_steps_is_the_cause_though_forward_and_backward_are_slower_too() -> None:
    times = {r: {BETWEEN: MS, **own} for r, own in table(forward=1.4, backward=1.4).items()}
    times[2] = {**times[2], BETWEEN: 200 * MS}
    found = cause(times, 2)
    assert found is not None
    assert found.describe() == "cause: between steps, which has 85 % of rank 2's extra time"


def test_a_rank_that_takes_no_longer_has_no_cause() -> None:
    assert cause(table(), 2) is None
    assert cause(table(forward=0.5), 2) is None
    assert cause({0: table()[0]}, 0) is None


def test_where_all_parts_are_slower_alike_the_largest_is_not_the_cause() -> None:
    """A rank that is 3 % slower loses most where most of its time goes."""
    found = cause(table(forward=1.035, loss=1.03, backward=1.03, optimizer=1.03, input=1.03), 2)
    assert found is not None
    assert (found.what, next(iter(found.by_part))) == (UNKNOWN, BACKWARD)
    by_part = {r: {FORWARD: int(10 * MS * f), BACKWARD: int(90 * MS * f)} for r, f in ((0, 1), (1, 1), (2, 1.03))}
    found = cause(by_part, 2)
    assert found is not None
    assert (found.what, round(found.by_part[BACKWARD], 2)) == (UNKNOWN, 0.9), "backward has 90 % of all time too"
    found = cause({r: {FORWARD: 10 * MS, BACKWARD: (99 if r == 2 else 90) * MS} for r in range(3)}, 2)
    assert found is not None
    assert found.what == BACKWARD, "though it has 90 % of all time"


# -- recordings ------------------------------------------------------------------------------------


def step(number: int, at: int, extra: dict[str, int], loader: tuple[Span, ...] = (), every: int = 1000) -> Step:
    """Forward 10, loss 2, backward 40 with buckets ready after 20 and 40, all done at the same time; optimizer 10."""
    forward = (at, at + 10 + extra.get(FORWARD, 0))
    begins = forward[1] + 2 + extra.get(LOSS, 0)
    ready = (begins + 20, begins + 40 + extra.get(BACKWARD, 0))
    done = (number + 1) * every - 100
    buckets = tuple(Bucket(i, 100, t, t, done, (f"{i}.weight",)) for i, t in enumerate(ready))
    optimizer = (done + 5, done + 15 + extra.get(OPTIMIZER, 0))
    return Step(number, forward, (begins, ready[1], done), optimizer, buckets, loader=loader)


def recording(extra: dict[str, int], loads: bool = True, count: int = 15, every: int = 1000) -> Recording:
    """Rank 1 of three takes longer in some part of each of `count` steps of so many milliseconds."""
    steps: dict[int, list[Step]] = {}
    for rank in range(3):
        mine = extra if rank == 1 else {}
        for n in range(count):
            before = n * every - 100 + 15 + mine.get(OPTIMIZER, 0)
            loader = (before + 5, before + 15 + mine.get(INPUT, 0))
            begins = loader[1] + 10 + mine.get(AFTER, 0)
            made = step(n, begins, mine, (loader,) if loads else (), every)
            steps.setdefault(rank, []).append(made)
    in_ms = {r: [_scaled(s) for s in some] for r, some in steps.items()}
    return Recording(in_ms, model="Net")


def _scaled(s: Step) -> Step:
    def ms(span: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(t * MS for t in span)

    buckets = tuple(replace(b, ready=b.ready * MS, sent=b.sent * MS, done=b.done * MS) for b in s.buckets)
    assert s.optimizer is not None
    loader = tuple((a * MS, b * MS) for a, b in s.loader)
    return replace(s, forward=ms(s.forward), backward=ms(s.backward), optimizer=ms(s.optimizer), buckets=buckets,
                   loader=loader)  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.parametrize("where", [INPUT, AFTER, FORWARD, LOSS, BACKWARD, OPTIMIZER])
def test_the_part_of_a_step_that_takes_longer_is_found_though_all_leave_backward_together(where: str) -> None:
    made = recording({where: 100})
    assert len({s.backward[2] for s in made.step(3).values()}) == 1
    found = slow(made)
    assert found is not None
    assert (found.rank, found.extra, found.steps) == (1, 100 * MS, 14)
    assert (found.last, found.of) == (14 if where == BACKWARD else 28, 28), "its first bucket is ready in time"
    assert (found.cause.what, found.cause.by_part) == (where, {where: 1.0})
    assert found.describe()[0].startswith(
        "over 14 steps rank 1 takes 100 ms longer per step than the other ranks; it starts"
    )


def late_in(made: Recording, number: int, rank: int, by: int) -> Recording:
    """In this step the gradients of `rank` are ready that many milliseconds later; the exchange ends with them."""

    def later(s: Step) -> Step:
        buckets = tuple(replace(b, ready=b.ready + by * MS, sent=b.sent + by * MS) for b in s.buckets)
        start, computed, done = s.backward
        return replace(s, buckets=buckets, backward=(start, computed + by * MS, done))

    return replace(made, steps={r: [later(s) if (r, s.number) == (rank, number) else s for s in some]
                                for r, some in made.steps.items()})  # fmt: skip


def on_ranks(made: Recording, number: int) -> list[str]:
    """The sentences of a step's text that are about ranks, without the first, on its buckets."""
    return sentences(analysed(made, number))[1:]


def test_the_text_of_a_step_names_only_the_rank_that_is_slow_over_all_steps() -> None:
    made = recording({FORWARD: 100})
    whole = "over 14 steps rank 1 takes 100 ms longer per step than the other ranks; it starts 28 of 28 buckets last"
    assert on_ranks(made, 7)[0] == f"{whole}, in this step 2 of 2, by 100 ms"
    other = late_in(made, 7, rank=0, by=130)
    assert straggler(transfers(other.step(7))) == Straggler(0, 130 * MS, 2, 2), "here rank 0 comes last"
    first, why = on_ranks(other, 7)
    assert first == f"{whole.replace('28 of', '26 of')}, in this step 0 of 2"
    assert why.startswith("cause: forward")
    assert on_ranks(other, 8)[0].endswith("starts 26 of 28 buckets last, in this step 2 of 2, by 100 ms")


@pytest.mark.parametrize(("count", "known"), [(15, "no rank is slower than noise (± 30.0 ms over 14 steps)"),
                                              (4, "whether a rank is slower is not known: ")])  # fmt: skip
def test_where_no_rank_is_slow_the_text_of_a_step_names_none_however_late_one_is(count: int, known: str) -> None:
    (said,) = on_ranks(late_in(recording({}, count=count), 2, rank=0, by=130), 2)
    assert said.startswith(known)
    assert said.endswith("; in this step the ranks wait 130 ms for the last one to start a bucket")
    assert not re.search(r"rank \d", said)


def test_of_a_slow_backward_the_gradients_that_come_late_are_named() -> None:
    found = slow(recording({BACKWARD: 100}))
    assert found is not None
    assert found.worst is not None
    assert found.describe()[1] == (
        "cause: backward, which has 100 % of rank 1's extra time; it loses most before 1.weight is ready, in bucket 1"
    )


def test_where_other_gradients_come_late_in_each_step_none_are_named() -> None:
    made = recording({BACKWARD: 100})
    turns = [s if s.number % 3 else _first_late(s) for s in made.steps[1]]
    found = slow(replace(made, steps={**made.steps, 1: turns}))
    assert found is not None
    assert found.describe()[1] == "cause: backward, which has 100 % of rank 1's extra time"


def _first_late(s: Step) -> Step:
    """The same step, in which the first bucket is late and not the second."""
    first, second = s.buckets
    ready = second.ready - 20 * MS
    return replace(s, buckets=(replace(first, ready=ready, sent=ready), second))


def test_without_a_data_loader_the_time_between_steps_is_called_so() -> None:
    found = slow(recording({INPUT: 100}, loads=False))
    assert found is not None
    assert found.cause.what == BETWEEN


def test_what_a_hook_waits_for_while_it_sends_is_not_the_ranks_own() -> None:
    bucket = Bucket(0, 100, 30, 70, 90)
    made = Step(1, (0, 10), (12, 80, 90), (90, 95), (bucket,))
    assert parts(made, made)[BACKWARD] == 80 - 12 - 40


def test_what_a_rank_waits_for_a_core_is_not_its_own() -> None:
    before, after = (Step(n, (at, at + 10), (at + 10, at + 70, at + 90), None, ()) for n, at in ((1, 0), (2, 100)))
    assert own(before, after) == (80, 0)
    assert own(replace(before, queued=(5, 7)), replace(after, queued=(37, 40))) == (50, 30)
    assert own(replace(before, queued=(5, 7)), replace(after, queued=(100, 100))) == (0, 80), "no more than there is"


def test_of_a_rank_that_shares_its_core_only_a_part_that_stands_out_counts() -> None:
    """Cold caches make all its parts slower alike, which shows no program; what it waits for the core is 20 ms a step,
    in backward."""
    alike = {INPUT: 4, AFTER: 4, FORWARD: 4, LOSS: 1, BACKWARD: 16, OPTIMIZER: 4}
    found = slow(recording(alike))
    assert found is not None
    assert (found.rank, found.cause.what) == (1, MACHINE), "its cores are its own"
    for extra, rank in ((alike, None), ({BACKWARD: 25}, 1), ({**alike, FORWARD: 30}, 1)):
        made = recording({**extra, BACKWARD: extra.get(BACKWARD, 0) + 20}, count=17)
        waits = [replace(s, queued=(20 * MS * (i + 1),) * 2) for i, s in enumerate(made.steps[1])]
        others = {r: [replace(s, queued=(0, 0)) for s in made.steps[r]] for r in (0, 2)}
        judged = slow(replace(made, steps={**others, 1: waits}))
        assert (judged and judged.rank) == rank, extra


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        ({FORWARD: 10, LOSS: 1, BACKWARD: 16, OPTIMIZER: 8}, MACHINE),
        ({FORWARD: 2, BACKWARD: 8, OPTIMIZER: 10}, UNKNOWN),
        ({FORWARD: 12, BACKWARD: 4}, FORWARD),
    ],
)
def test_on_a_shared_core_a_rank_that_is_slower_in_several_parts_is_not_named(extra: dict[str, int], what: str) -> None:
    """It loses its core in each second step, for 40 of 300 ms."""
    made = recording(extra, count=32, every=300)
    own_core = slow(made)
    assert own_core is not None
    assert own_core.cause.what == what
    lost = [
        replace(s, backward=(s.backward[0], s.backward[1] + 40 * MS * (n % 2), s.backward[2]),
                queued=(40 * MS * ((n + 1) // 2),) * 2)
        for n, s in enumerate(made.steps[1])
    ]  # fmt: skip
    others = {r: [replace(s, queued=(0, 0)) for s in made.steps[r]] for r in (0, 2)}
    found = verdict(replace(made, steps={**others, 1: lost}))
    assert found is not None
    assert (found.slow and found.slow.cause.what) == (FORWARD if what == FORWARD else None)
    assert what == FORWARD or found.describe()[0].startswith("no rank is slower than noise")


def test_no_part_with_a_minority_of_the_extra_time_is_the_cause_also_if_it_stands_out() -> None:
    found = slow(recording({FORWARD: 40, BACKWARD: 50, OPTIMIZER: 40}, count=32))
    assert found is not None
    assert found.describe()[1] == (
        "cause: not known; rank 1's extra time is spread over several parts (backward 38 %, forward 31 %, "
        "optimizer 31 %)"
    )


def test_the_parts_of_a_step_are_those_of_the_time_that_a_rank_works_by_itself() -> None:
    """So a wait in the optimizer is taken off the optimizer."""
    before, after = (
        Step(n, (at, at + 10), (at + 12, at + 70, at + 80), (at + 80, at + 80 + 5 * n), ())
        for n, at in ((1, 0), (2, 100))
    )
    found = parts(before, after)
    assert (found[OPTIMIZER], sum(found.values())) == (5, sum(own(before, after)))
    assert parts(replace(before, optimizer=None), after)[OPTIMIZER] == 0


def test_with_too_few_steps_for_the_parts_it_is_not_known_whether_a_rank_is_slower() -> None:
    for count, words in ((13, "whether a rank is slower is not known: 12 steps"), (16, "no rank is slower than noise")):
        found = verdict(recording({FORWARD: 15}, count=count))
        assert found is not None
        assert found.describe()[0].startswith(words)
        assert count == 16 or found.describe()[0].endswith("a small one takes 15"), "of three ranks with seven parts"


@pytest.mark.parametrize(("third", "named"), [(1, False), (2, True)])
def test_gradients_are_named_that_come_late_in_most_steps(third: int, named: bool) -> None:
    """In one or two of three steps, where chance would do it in one of ten."""
    steps: dict[int, list[Step]] = {0: [], 1: []}
    for n in range(99):
        late = 9 if n % 3 < third else n % 9
        for rank, some in steps.items():
            ready = [20 + 10 * i + 5 * (rank and i >= late) for i in range(10)]
            buckets = tuple(Bucket(i, 100, t, t, 900, (f"{i}.weight",)) for i, t in enumerate(ready))
            some.append(Step(n, (0, 10), (10, ready[-1], 900), None, buckets))
    found = latest_bucket(Recording(steps), range(99), 1)
    assert (found and found.index) == (9 if named else None)


def test_ranks_alike_have_no_slow_one() -> None:
    assert slow(recording({})) is None
    assert slow(recording({FORWARD: 2})) is None
    assert slow(Recording({})) is None


def noisy(count: int, more: float = 0.0, where: str = "", waits: bool = False, seed: int = 1) -> Recording:
    """Two ranks whose backward differs by a half from step to step, in steps of 300 ms; rank 1 takes
    `more` of that longer in one part. waits: it loses its core in two of three steps, in any part, rank 0 in one."""
    dice, steps = random.Random(seed), dict[int, list[Step]]()
    for rank in range(2):
        at = queued = 0
        for n in range(count):
            took = {AFTER: 5.0, FORWARD: 20.0, LOSS: 1.0, BACKWARD: 40 * dice.uniform(1, 2), OPTIMIZER: 10.0}
            took = {part: t * dice.uniform(0.98, 1.02) for part, t in took.items()}
            if rank == 1 and where:
                took[where] += 300 * more
            if waits and dice.random() < (0.67 if rank else 0.33):
                lost = dice.uniform(3, 30)
                took[dice.choice([AFTER, FORWARD, BACKWARD])] += lost
                queued += int(lost * MS)
            start = at + took[AFTER]
            left = start + took[FORWARD]
            begun = left + took[LOSS]
            computed = begun + took[BACKWARD]
            done = 300 * (n + 1)
            stepped = done + took[OPTIMIZER]
            span = [int(t * MS) for t in (start, left, begun, computed, done, stepped)]
            bucket = Bucket(0, 100, span[3], span[3], span[4])
            steps.setdefault(rank, []).append(
                Step(n, (span[0], span[1]), (span[2], span[3], span[4]), (span[4], span[5]), (bucket,),
                     queued=(queued, queued))
            )  # fmt: skip
            at = int(stepped)
    return Recording(steps, model="Net")


@pytest.mark.parametrize(("more", "count"), [(0.1, 32), (0.05, 102)])
@pytest.mark.parametrize("where", [BETWEEN, FORWARD, OPTIMIZER])
@pytest.mark.parametrize("waits", [False, True])
def test_a_constant_delay_in_one_part_is_found_beside_a_backward_that_varies(
    more: float, count: int, where: str, waits: bool
) -> None:
    planted = AFTER if where == BETWEEN else where
    for seed in range(4):
        found = slow(noisy(count, more, planted, waits, seed))
        assert found is not None
        assert (found.rank, found.cause.what) == (1, where)


@pytest.mark.parametrize("count", [3, 10, 32, 102])
@pytest.mark.parametrize("waits", [False, True])
def test_a_backward_that_varies_and_a_core_that_is_lost_make_no_rank_slow(count: int, waits: bool) -> None:
    assert [slow(noisy(count, waits=waits, seed=seed)) for seed in range(10)] == [None] * 10


@pytest.mark.parametrize(
    ("extra", "shares", "words"),
    [
        ({FORWARD: 60}, {FORWARD: 1.0}, "cause: forward, which has 100 % of rank 1's extra time"),
        ({FORWARD: 40, OPTIMIZER: 40}, {FORWARD: 0.5, OPTIMIZER: 0.5},
         "cause: not known; rank 1's extra time is spread over several parts (forward 50 %, optimizer 50 %)"),
    ],
)  # fmt: skip
def test_the_part_that_is_known_to_be_slower_is_the_cause_though_another_differs_more_by_chance(
    extra: dict[str, int], shares: dict[str, float], words: str
) -> None:
    """Backward takes rank 1 longer in 18 of 31 steps, and shorter in the others."""
    made = recording(extra, count=32)
    chance = [90 * MS * (1 if n % 12 < 7 else -1) for n in range(32)]
    moved = [
        replace(s, backward=(s.backward[0], s.backward[1] + 100 * MS + more, s.backward[2]))
        for s, more in zip(made.steps[1], chance, strict=True)
    ]
    others = {r: [replace(s, backward=(s.backward[0], s.backward[1] + 100 * MS, s.backward[2])) for s in made.steps[r]]
              for r in (0, 2)}  # fmt: skip
    found = slow(replace(made, steps={**others, 1: moved}))
    assert found is not None
    assert statistics.median(chance[1:]) == 90 * MS
    assert (found.rank, found.extra, found.cause.by_part) == (1, sum(extra.values()) * MS, shares)
    assert found.describe()[1] == words
    assert (replace(found.cause, by_part={}).describe() == "cause: forward") == (len(shares) == 1)


def test_a_cause_that_one_stretch_of_time_alone_makes_is_not_known() -> None:
    """Rank 1 of two takes 10 ms longer in its optimizer each time, and once it loses half a second in forward."""
    usual = {FORWARD: 30 * MS, BACKWARD: 60 * MS, OPTIMIZER: 20 * MS}
    late = {**usual, OPTIMIZER: 30 * MS}
    steps = [{0: usual, 1: late} for _ in range(5)]
    found = steady(steps, 1)
    assert found is not None
    assert (found.what, found.by_part) == (OPTIMIZER, {OPTIMIZER: 1.0})
    steps[3] = {0: usual, 1: {**late, FORWARD: 530 * MS}}
    assert cause({r: {part: sum(s[r][part] for s in steps) for part in usual} for r in (0, 1)}, 1).what == FORWARD  # type: ignore[union-attr]
    found = steady(steps, 1)
    assert found is not None
    assert found.describe() == "cause: not known"
    alone = steady(steps[3:4], 1)
    assert alone is not None
    assert alone.what == FORWARD
    assert steady([], 1) is None
