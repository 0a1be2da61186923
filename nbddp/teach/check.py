"""The checks of all exercises: `from nbddp.teach import check; check.gpus_of(gpus_of)`.

Each is an `Exercise`. Called with the learner's answer, it prints one line: `ok`, or the mistake and its cause. It
returns the line as an object with `.ok` and `.line`; `hint=True` adds the next hint. They are found in the lessons'
`exercise` modules.
"""

from __future__ import annotations

from nbddp.lessons.framework import folders
from nbddp.lessons.framework.answer import Answer, Exercise
from nbddp.lessons.framework.run_check import on

_all = folders.defined("exercise", Exercise)
globals().update(_all)
__all__ = ["Answer", "Exercise", "on", *sorted(_all)]


def __getattr__(name: str) -> Exercise:
    raise folders.missing("check", "exercise", name, _all)


def __dir__() -> list[str]:
    return sorted(__all__)
