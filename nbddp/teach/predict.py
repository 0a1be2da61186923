"""The questions of all lessons: `from nbddp.teach import predict; predict.local_rank()`.

Each shows its question and keeps the answer. When the next cell has run, it is shown beside what came.
`predict.summary()` is the table of all that were asked. This file is the list of the lessons and no more.
"""

from __future__ import annotations

from difflib import get_close_matches

from nbddp.base.table import Table
from nbddp.lessons.asking import Asks, Prediction
from nbddp.lessons.averaging import predictions as averaging
from nbddp.lessons.batch_norm import predictions as batch_norm
from nbddp.lessons.buckets import predictions as buckets
from nbddp.lessons.capstone import predictions as capstone
from nbddp.lessons.hangs import predictions as hangs
from nbddp.lessons.launching import predictions as launching
from nbddp.lessons.mean_of_means import predictions as mean_of_means
from nbddp.lessons.pipelines import predictions as pipelines
from nbddp.lessons.placement import predictions as placement
from nbddp.lessons.precision import predictions as precision
from nbddp.lessons.rendezvous import predictions as rendezvous
from nbddp.lessons.restarts import predictions as restarts
from nbddp.lessons.ring import predictions as ring
from nbddp.lessons.samples import predictions as samples
from nbddp.lessons.sharding import predictions as sharding
from nbddp.lessons.spmd import predictions as spmd
from nbddp.lessons.tensor_parallel import predictions as tensor_parallel
from nbddp.lessons.what_if import predictions as what_if

LESSONS = (
    spmd,
    placement,
    rendezvous,
    ring,
    averaging,
    samples,
    batch_norm,
    buckets,
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
