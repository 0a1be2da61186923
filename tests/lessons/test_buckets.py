"""Lesson 08: the packer against DDP itself, its timeline against closed forms, and the checks of its two exercises."""

from __future__ import annotations

from statistics import median

import pytest
from matplotlib.colors import to_rgba

from nbddp.analysis.steps import Bucket, Recording, Step
from nbddp.figures.palette import FILLS
from nbddp.lessons.l08_buckets_and_overlap import figure as buckets_and_overlap_figure
from nbddp.lessons.l08_buckets_and_overlap.exercise import EXPOSED, EXPOSED_CASES, PACK, PACK_CASES
from nbddp.lessons.l08_buckets_and_overlap.figure import MOST
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
from nbddp.pool.pool import WorkerPool
from nbddp.teach import explore
from tests.lessons.answers import cells


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
def test_the_packers_buckets_are_ddps(pool: WorkerPool, layers: int, width: int, cap: float | str) -> None:
    options = "" if cap == DEFAULT else f"bucket_cap_mb={cap}"
    code = TRAIN.format(layers=layers, width=width, options=options)
    found = pool.run_cell(code, want_value=True, screen=NullScreen())
    some = packed(linear_layers(layers, width), cap)
    assert found[0] == found[1] == some.sizes()
    both = beside(pool.timings(), linear_layers(layers, width), cap)
    assert both.same_buckets
    assert "DDP's buckets are the same." in both.describe()
    recorded = [b.names for b in both.measured.step.buckets]
    assert recorded == [tuple(some.names[i] for i in members) for members in some.buckets]
    assert both.measured.step.backward[0] == 0
    other = beside(pool.timings(), linear_layers(layers + 1, width), cap)
    assert "DDP's buckets differ." in other.describe()


def test_the_limits_are_torchs_own(pool: WorkerPool) -> None:
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


def test_the_examples_in_the_lesson_are_right() -> None:
    prose = "\n".join(c.text for c in cells("08") if c.kind == "markdown")
    assert "`pack([2, 2, 2, 2], 2, 4)` is `[[3], [2, 1], [0]]`" in prose
    assert PACK.right(*PACK_CASES[0]) == [[3], [2, 1], [0]]
    assert "`exposed(20, [(5, 9), (12, 18), (20, 26)])` is `6`" in prose
    assert EXPOSED.right(*EXPOSED_CASES[0]) == 6


def test_the_last_bucket_is_sent_at_the_end_of_backward_and_the_optimizer_starts_after_it(pool: WorkerPool) -> None:
    (trains,) = [c.text for c in cells("08") if c.text.startswith("%%ddp --nproc 2")]
    pool.run_cell(trains.partition("\n")[2], screen=NullScreen())
    recording = pool.timings()
    steps = [s for n in recording.numbers()[2:] for s in recording.step(n).values()]
    assert len(steps) == 28
    sent = [[(b.sent - s.backward[0]) / (s.backward[1] - s.backward[0]) for b in s.buckets] for s in steps]
    assert median(first for first, _ in sent) < 0.5
    assert median(last for _, last in sent) > 0.9
    for s in steps:
        assert s.optimizer is not None
        assert s.optimizer[0] >= s.backward[2] >= max(b.done for b in s.buckets)
