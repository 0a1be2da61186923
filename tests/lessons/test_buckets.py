"""Lesson 08: the packer against DDP itself, its timeline against closed forms, and the checks of its two exercises."""

from __future__ import annotations

from statistics import median

import pytest
from matplotlib.colors import to_rgba

import nbddp
from nbddp.analysis.steps import Bucket, Recording, Step
from nbddp.figures.palette import FILLS
from nbddp.lessons.l08_buckets_and_overlap import figure as buckets_and_overlap_figure
from nbddp.lessons.l08_buckets_and_overlap.exercise import EXPOSED, EXPOSED_CASES, PACK, PACK_CASES
from nbddp.lessons.l08_buckets_and_overlap.explorer import MOST
from nbddp.lessons.l08_buckets_and_overlap.simulation import (
    CAP,
    DEFAULT,
    FIRST,
    MIB,
    beside,
    exchange,
    limits,
    linear_layers,
    packed,
)
from nbddp.output.screens import NullScreen
from nbddp.teach import check, explore
from tests.lessons.answers import Mutant, cells, defined, exercise, solution


def test_words_of_the_explorers_settings() -> None:
    default, four = (
        explore.buckets().show(**s).words
        for s in ({**explore.buckets().settings[1], "cap_mb": DEFAULT}, explore.buckets().settings[1])
    )
    assert "bucket 1: 6.bias … 0.weight (14), 28 MiB" in default
    assert "hidden behind backward and 4.18 ms exposed; the last bucket alone takes 4.18 ms" in default
    assert "bucket 7: 0.bias, 0.weight, 4.0 MiB" in four
    assert "658 µs exposed; the last bucket alone takes 658 µs" in four


@pytest.mark.parametrize("sent", [0, 3, 8, MOST])
def test_buckets_are_exchanged_one_by_one(sent: int) -> None:
    setting = {**explore.buckets().settings[1], "sent": sent}
    made, words = exchange(**setting), explore.buckets().show(**setting).words
    assert [b.index for b in made.so_far] == [*range(min(sent, 8))]
    assert made.is_whole == (sent >= 8)
    if made.is_whole:
        assert words == explore.buckets().show(**explore.buckets().settings[1]).words
    else:
        assert words.splitlines()[-1].startswith(f"8 ranks, 100 Gb/s InfiniBand: {sent} of 8 buckets exchanged, ")
        assert "exposed" not in words
    *_, time = explore.buckets().show(**setting).figure.axes
    assert sum(patch.get_facecolor() != to_rgba(FILLS[2]) for patch in time.patches) == min(sent, 8)


def test_no_setting_of_the_explorer_has_more_buckets_than_its_steps_reach() -> None:
    caps = next(c for c in explore.buckets().controls if c.name == "cap_mb").options
    widths = next(c for c in explore.buckets().controls if c.name == "width").options
    made = (packed(linear_layers(n, width), cap) for n in range(1, 25) for width in widths for cap in caps)
    most = max(len(one.buckets) for one in made)
    assert most == MOST


def test_the_figure_fits_its_texts() -> None:
    shown = buckets_and_overlap_figure.exchange(exchange(24, 512, 1, 5, 512, "NVLink"))
    texts = [t for axes in shown.figure.axes for t in axes.texts]
    assert any(t.get_text() == "gradients in the order in which they become ready" for t in texts)
    assert all(t.get_fontsize() >= 6.5 for t in texts)


# -- the packer against DDP ------------------------------------------------------------------

EXACT = 1.001953125  # MiB: a layer of 512 × 512 with its bias, so that buckets hold their limit to the byte
TRAIN = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
if not dist.is_initialized(): dist.init_process_group()
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(*[torch.nn.Linear({width}, {width}) for _ in range({layers})]), {options})
for _ in range(3):
    model(torch.ones(2, {width})).sum().backward()
[int(n) for n in model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")]
"""


@pytest.mark.parametrize(
    ("layers", "width", "cap"),
    [
        (8, 512, DEFAULT),
        (8, 512, 25),
        (8, 512, 3),
        (8, 512, 1),
        (8, 512, EXACT),
        (5, 300, 0.5),
        (3, 1024, DEFAULT),
        (9, 1024, DEFAULT),
    ],
)
def test_the_packers_buckets_are_ddps(pool: nbddp.Pool, layers: int, width: int, cap: float | str) -> None:
    options = "" if cap == DEFAULT else f"bucket_cap_mb={cap}"
    code = TRAIN.format(layers=layers, width=width, options=options)
    found = pool.run_cell(code, want_value=True, screen=NullScreen())
    some = packed(linear_layers(layers, width), cap)
    assert found[0] == found[1] == some.sizes()
    both = beside(pool.timings(), linear_layers(layers, width), cap)
    assert both.same_buckets
    assert "DDP's buckets are the same." in both.words()
    recorded = [b.names for b in both.measured.step.buckets]
    assert recorded == [tuple(some.names[i] for i in members) for members in some.buckets]
    assert both.measured.step.backward[0] == 0
    other = beside(pool.timings(), linear_layers(layers + 1, width), cap)
    assert "DDP's buckets differ." in other.words()


def test_the_limits_are_torchs_own(pool: nbddp.Pool) -> None:
    code = "import torch.distributed as dist\ndist._DEFAULT_FIRST_BUCKET_BYTES"
    assert list(pool.run_cell(code, want_value=True, screen=NullScreen())) == [FIRST] * 2
    assert limits() == (FIRST, CAP)
    assert limits(2) == (2 * MIB, 2 * MIB)


def test_a_recorded_step_is_drawn_beside_paper() -> None:
    some = packed(linear_layers(2, 512), 1)
    step = Step(4, (0, 5), (10, 30_000_010, 44_000_010), (44_000_020, 45_000_000),
                tuple(Bucket(k, n, at, at, at + 14_000_000) for k, (n, at) in
                      enumerate(zip(some.sizes(), (15_000_010, 30_000_010), strict=True))))  # fmt: skip
    both = beside(Recording({0: [step], 1: [step]}), linear_layers(2, 512), 1)
    shown = buckets_and_overlap_figure.beside(both)
    assert "recorded on rank 0: backward 30.0 ms, all-reduce 28.0 ms, 50 % hidden" in shown.words
    assert "on paper: backward 30.0 ms, all-reduce 28.0 ms" in shown.words
    titles = [t.get_text() for axes in shown.figure.axes for t in axes.texts]
    assert {"recorded on rank 0", "on paper"} <= set(titles)


# -- pack ------------------------------------------------------------------------------------

LOOP = """
def pack(sizes, first, cap):
    out, now, limit = [], [], first
    for i in {order}:
        now.append({keep})
        if sum({held}) {full} limit:
            out.append(now); now, limit = [], {then}
    {rest}
    return out
"""
RIGHT = {
    "order": "reversed(range(len(sizes)))", "keep": "i", "held": "sizes[k] for k in now", "full": ">=", "then": "cap",
    "rest": "out += [now] if now else []",
}  # fmt: skip


def loop(**changed: str) -> str:
    return LOOP.format(**{**RIGHT, **changed})


NEVER_OVER = """
def pack(sizes, first, cap):
    out, now, held, limit = [], [], 0, first
    for i in reversed(range(len(sizes))):
        if now and held + sizes[i] > limit:
            out.append(now); now, held, limit = [], 0, cap
        now.append(i); held += sizes[i]
    return out + [now]
"""
NEVER_RESET = """
def pack(sizes, first, cap):
    out, now, held, limit = [], [], 0, first
    for i in reversed(range(len(sizes))):
        now.append(i); held += sizes[i]
        if held >= limit:
            out.append(now); now, limit = [], cap
    return out + ([now] if now else [])
"""
PACKS = "def pack(sizes, first, cap):\n    "
WRONG_PACKS = [
    Mutant("forwards", loop(order="range(len(sizes))"), "the gradient of the last parameter comes first"),
    Mutant("never over", NEVER_OVER, "that gradient may exceed it"),
    Mutant("more than", loop(full=">"), "holds exactly its limit is full"),
    Mutant("first for all", loop(then="first"), "from the second bucket on it is cap"),
    Mutant("cap for all", loop().replace("[], [], first", "[], [], cap"), "the first bucket's limit is `first`"),
    Mutant("rest lost", loop(rest=""), "is sent too, when backward is over"),
    Mutant("empty last", loop(rest="out += [now]"), "the last bucket is empty"),
    Mutant("never reset", NEVER_RESET, "reset the running sum to 0"),
    Mutant("other positions", loop(keep="len(sizes) - 1 - i").replace("sizes[k]", "sizes[len(sizes) - 1 - k]"),
           "counted in the reversed list"),
    Mutant("one each", PACKS + "return [[i] for i in range(len(sizes))][::-1]", "as if the limits were 0"),
    Mutant("all in one", PACKS + "return [list(range(len(sizes)))[::-1]]", "one bucket for all gradients"),
    Mutant("sizes", loop(keep="sizes[i]", held="now"), "positions 0 to 3, each once; these are the sizes"),
    Mutant("rising", loop().replace("now.append(i)", "now.insert(0, i)"), "within a bucket the gradient of the later"),
    Mutant("in reverse", loop().replace("return out", "return out[::-1]"), "but in reverse order"),
    Mutant("counts", loop(held="1 for k in now"), "this counts gradients; the limit applies"),
    Mutant("positions", loop(held="now"), "this adds positions"),
    Mutant("exactly", loop(full="=="), "a bucket that exceeds its limit is full too: >=, not =="),
    Mutant("grows", loop(then="limit + cap"), "this adds cap to the limit with every bucket"),
    Mutant("empty first", NEVER_OVER.replace("now and ", ""), "these buckets never exceed their limit, and one may be"),
    Mutant("cleared", loop().replace("now, limit = [], cap", "limit = cap; now.clear()"), "create a new one with []"),
    Mutant("without 0", loop(order="range(len(sizes) - 1, 0, -1)"), "each once; position 0 is missing"),
    Mutant("none", PACKS + "return []", "each once; position 0 is missing"),
    Mutant("yields", PACKS + "yield [0]", "got <generator object pack>; return a list of buckets"),
    Mutant("flat", PACKS + "return list(range(len(sizes)))", "return a list of buckets"),
    Mutant("unwritten", PACKS + "...", "still to be written"),
    Mutant("changes its input", PACKS + "return [[sizes.pop()] for _ in range(9)]", "pop from empty list"),
]  # fmt: skip
RECURSIVE = """
def pack(sizes, first, cap):
    held, i = 0, len(sizes)
    while i and held < first:
        i -= 1
        held += sizes[i]
    return [list(range(len(sizes)))[:i - 1 if i else None:-1]] + (pack(sizes[:i], cap, cap) if i else [])
"""
GENERATOR = """
def pack(sizes, first, cap):
    limits, out, held = [first], [[]], 0
    for i, n in list(enumerate(sizes))[::-1]:
        if held >= (first if len(out) == 1 else cap):
            out.append([]); held = 0
        out[-1].append(i); held += n
    return tuple(tuple(b) for b in out)
"""


@pytest.mark.parametrize("mutant", WRONG_PACKS, ids=str)
def test_wrong_buckets_are_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    mutant.meets(check.pack)


def test_right_buckets_pass(pool: nbddp.Pool) -> None:
    assert check.pack(solution("08", "pack"))
    for source in (loop(), RECURSIVE, GENERATOR):
        assert check.pack(defined(source, "pack")), source
    assert "still to be written" in check.pack(exercise("08", "pack")).line


# -- exposed ---------------------------------------------------------------------------------

LATE = "def exposed(end, spans):\n    return "
WRONG_TIMES = [
    Mutant("twice", LATE + "sum(max(0, d - end) for s, d in spans)", "counted twice"),
    Mutant("last sent", LATE + "max(0, spans[-1][1] - end) if spans else 0", "until all are done"),
    Mutant("negative", LATE + "max([d - end for s, d in spans], default=0)", "expected 0, got -1; it is negative"),
    Mutant("sums", LATE + "sum(d - s for s, d in spans)", "the sum of the buckets' times"),
    Mutant("late ones whole", LATE + "sum(d - s for s, d in spans if d > end)", "from its start"),
    Mutant("an end", LATE + "max([d for s, d in spans], default=0)", "the step waits from backward_end on"),
    Mutant("hidden", LATE + "len({t for s, d in spans for t in range(s, min(d, end))})", "the hidden part"),
    Mutant("all", LATE + "len({t for s, d in spans for t in range(s, d)})", "all the time with a bucket"),
    Mutant("no_sync", LATE + "max(0, max(d for s, d in spans) - end)", "exposed(8, []) raised ValueError: max()"),
    Mutant("first late", LATE + "next((d - end for s, d in spans if d > end), 0)", "the first bucket that ends after"),
    Mutant(
        "in the loop",
        "def exposed(end, spans):\n    for s, d in spans:\n        return max(0, d - end)",
        "a return inside",
    ),
    Mutant(
        "the earliest",
        LATE + "max(0, min([d for s, d in spans] or [0]) - end)",
        "the end of the bucket that is done first",
    ),
    Mutant(
        "sent late", LATE + "sum(d - s for s, d in spans if s >= end)", "only buckets that were sent after backward"
    ),
    Mutant("the longest", LATE + "max([d - s for s, d in spans] or [0])", "that is the longest bucket's time"),
    Mutant(
        "from the first",
        LATE + "max([d for s, d in spans] or [0]) - min([s for s, d in spans] or [0])",
        "when the first bucket was sent;",
    ),
    Mutant("turned", LATE + "end - max([end] + [d for s, d in spans])", "expected 6, got -6; the sign is reversed"),
    Mutant(
        "largest pair", LATE + "max(spans)[1] - end if spans else 0", "expected 4, got 3; that is the end of the bucket"
    ),
    Mutant("each", LATE + "sum(d - end for s, d in spans)", "a time is never negative"),
    Mutant("any way", LATE + "abs(max([d for s, d in spans] or [end]) - end)", "so nothing is exposed"),
    Mutant(
        "a share", LATE + "(max([end] + [d for s, d in spans]) - end) / sum(d - s for s, d in spans)", "return the time"
    ),
    Mutant("a list", LATE + "[d - end for s, d in spans]", "return a number"),
    Mutant("unwritten", LATE + "None", "still to be written"),
]
RIGHT_TIMES = [
    LATE + "float(max([end] + [d for s, d in spans]) - end)",
    LATE + "max([0] + [d - end for s, d in spans])",
    LATE + "len({t for s, d in spans for t in range(max(s, end), d)})",
]


@pytest.mark.parametrize("mutant", WRONG_TIMES, ids=str)
def test_wrong_times_are_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    mutant.meets(check.exposed)


def test_right_times_pass(pool: nbddp.Pool) -> None:
    assert check.exposed(solution("08", "exposed"))
    for source in RIGHT_TIMES:
        assert check.exposed(defined(source, "exposed")), source
    assert "still to be written" in check.exposed(exercise("08", "exposed")).line


def test_the_examples_in_the_lesson_are_right() -> None:
    prose = "\n".join(c.text for c in cells("08") if c.kind == "markdown")
    assert "`pack([2, 2, 2, 2], 2, 4)` is `[[3], [2, 1], [0]]`" in prose
    assert PACK.right(*PACK_CASES[0]) == [[3], [2, 1], [0]]
    assert "`exposed(20, [(5, 9), (12, 18), (20, 26)])` is `6`" in prose
    assert EXPOSED.right(*EXPOSED_CASES[0]) == 6


def test_the_last_bucket_is_sent_at_the_end_of_backward_and_the_optimizer_starts_after_it(pool: nbddp.Pool) -> None:
    (trains,) = [c.text for c in cells("08") if c.text.startswith("%%ddp --nproc 2")]
    pool.run_cell(trains.partition("\n")[2], screen=NullScreen())
    recording = pool.timings()
    steps = [s for n in recording.numbers()[2:] for s in recording.step(n).values()]
    assert len(steps) == 8
    sent = [[(b.sent - s.backward[0]) / (s.backward[1] - s.backward[0]) for b in s.buckets] for s in steps]
    assert median(first for first, _ in sent) < 0.5
    assert median(last for _, last in sent) > 0.9
    for s in steps:
        assert s.optimizer is not None
        assert s.optimizer[0] >= s.backward[2] >= max(b.done for b in s.buckets)
