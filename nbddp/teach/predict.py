"""The questions of all lessons. Tab after `predict.` lists them.

A question keeps the reader's prediction. The next cell shows it beside the result. `predict.summary()` returns a table
of all questions that this notebook has asked.

Example:

    from nbddp.teach import predict
    predict.local_rank()
    print(predict.summary())
"""

from __future__ import annotations

from nbddp.figures.table import Table
from nbddp.lessons.framework import folders
from nbddp.lessons.framework.prompt import Asks, Prediction
from nbddp.lessons.framework.question import questions

_asks = Asks()
_all = {q.name: Prediction(q, _asks) for folder in folders.lessons() for q in questions(folder / "predictions.ini")}
__all__ = ["summary", *_all]


def summary() -> Table:
    """Return a table of your predictions in this notebook, each beside the result."""
    return _asks.table()


def __getattr__(name: str) -> Prediction:
    if name in _all:
        return _all[name]
    raise folders.missing("predict", "question", name, _all)


def __dir__() -> list[str]:
    return sorted(__all__)
