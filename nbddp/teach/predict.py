"""The questions of all lessons: `from nbddp.teach import predict; predict.local_rank()`.

Each shows its question and keeps the answer. When the next cell has run, it is shown beside what came.
`predict.summary()` is the table of all that were asked. This file is the list of the lessons and no more.
"""

from __future__ import annotations

from difflib import get_close_matches

from nbddp.lessons.framework.prompt import Asks, Prediction
from nbddp.lessons.l01_one_program import predictions as one_program
from nbddp.lessons.l02_ranks_and_devices import predictions as ranks_and_devices
from nbddp.lessons.l03_finding_each_other import predictions as finding_each_other
from nbddp.lessons.l04_collectives import predictions as collectives
from nbddp.lessons.l05_averaging_gradients import predictions as averaging_gradients
from nbddp.lessons.l06_samples import predictions as samples
from nbddp.lessons.l07_batch_norm import predictions as batch_norm
from nbddp.lessons.l08_buckets_and_overlap import predictions as buckets_and_overlap
from nbddp.lessons.l09_hangs import predictions as hangs
from nbddp.lessons.l10_restarts import predictions as restarts
from nbddp.lessons.l11_launching import predictions as launching
from nbddp.lessons.l12_what_if import predictions as what_if
from nbddp.lessons.l13_mean_of_means import predictions as mean_of_means
from nbddp.lessons.l14_precision import predictions as precision
from nbddp.lessons.l15_sharding import predictions as sharding
from nbddp.lessons.l16_tensor_parallel import predictions as tensor_parallel
from nbddp.lessons.l17_pipelines import predictions as pipelines
from nbddp.lessons.l18_capstone import predictions as capstone
from nbddp.output.table import Table

LESSONS = (
    one_program,
    ranks_and_devices,
    finding_each_other,
    collectives,
    averaging_gradients,
    samples,
    batch_norm,
    buckets_and_overlap,
    hangs,
    restarts,
    launching,
    what_if,
    mean_of_means,
    precision,
    sharding,
    tensor_parallel,
    pipelines,
    capstone,
)

_asks = Asks()
_all = {q.name: Prediction(q, _asks) for lesson in LESSONS for q in lesson.QUESTIONS}
__all__ = ["summary", *_all]


def summary() -> Table:
    """What you predicted in this notebook, beside what came."""
    return _asks.table()


def __getattr__(name: str) -> Prediction:
    if name in _all:
        return _all[name]
    near = get_close_matches(name, _all, 3)
    raise AttributeError(f"predict has no question {name!r}" + (f"; did you mean {' or '.join(near)}?" if near else ""))


def __dir__() -> list[str]:
    return sorted(__all__)
