"""The questions of all lessons: `from nbddp.teach import predict; predict.local_rank()`.

Each shows its question and keeps the answer. When the next cell has run, it is shown beside what came.
`predict.summary()` is the table of all that were asked. They are found in the lessons' folders.
"""

from __future__ import annotations

from nbddp.lessons.framework import folders
from nbddp.lessons.framework.prompt import Asks, Prediction
from nbddp.lessons.framework.question import questions
from nbddp.output.table import Table

_asks = Asks()
_all = {q.name: Prediction(q, _asks) for folder in folders.lessons() for q in questions(folder / "predictions.ini")}
__all__ = ["summary", *_all]


def summary() -> Table:
    """What you predicted in this notebook, beside what came."""
    return _asks.table()


def __getattr__(name: str) -> Prediction:
    if name in _all:
        return _all[name]
    raise folders.missing("predict", "question", name, _all)


def __dir__() -> list[str]:
    return sorted(__all__)
