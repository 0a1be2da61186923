"""Progress as text that carries its values: the stage of a pool's start, and how much is done. A terminal gets a bar in
words, a page a real one. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

CELLS = 24  # characters of a bar in words
Stage = Literal["agent", "controller", "engines", "devices", "ready"]
STAGES: tuple[Stage, ...] = get_args(Stage)  # of a pool's start, in their order


class StageText(str):
    """A sentence of progress, and the stage of a start that it belongs to; None: of none."""

    stage: Stage | None

    def __new__(cls, words: str, stage: Stage | None) -> StageText:
        made = super().__new__(cls, words)
        made.stage = stage
        return made

    def __getnewargs__(self) -> Any:
        return str(self), self.stage


class StillText(StageText):
    """The sentence of progress that was said before, with its seconds so far. Who prints a line for each sentence
    leaves it out."""


def counting(progress: Callable[[str], None], words: str, stage: Stage) -> Callable[[float], None]:
    """Say what is being waited for. Returns what is to be told the seconds of waiting, and says each whole one."""
    said = 0

    def wait(seconds: float) -> None:
        nonlocal said
        if seconds >= said + 1:
            said = int(seconds)
            progress(StillText(f"{words} · {said} s", stage))

    progress(StageText(words, stage))
    return wait


class Progress(StageText):
    """`████░░░░ 3/9  all_reduce of 64 KiB`; `words` is what is done, `done` and `of` how much of it."""

    words: str
    done: int
    of: int

    def __new__(cls, words: str, done: int, of: int, stage: Stage | None = None) -> Progress:
        full = CELLS * done // of
        made = str.__new__(cls, f"{'█' * full}{'░' * (CELLS - full)} {done}/{of}  {words}")
        made.words, made.done, made.of, made.stage = words, done, of, stage
        return made

    def __getnewargs__(self) -> Any:
        return self.words, self.done, self.of, self.stage
