"""The checks of all exercises. Tab after `check.` lists them.

A check takes the learner's answer and prints one line: `ok`, or the mistake and its cause. It returns an `Answer` with
`ok` (bool) and `line` (str). `hint=True` adds the next hint, as `hint` (str). A check never raises for an answer.
`check.on(pool)` is a context manager: inside it, checks that need ranks use this pool.

Example:

    from nbddp.teach import check
    answer = check.gpus_of(lambda local_rank, gpus_per_proc: [local_rank])
    print(answer.ok, answer.line)
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
