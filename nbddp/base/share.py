"""Progress as text that knows how much is done: a bar in words for a terminal, a real one for a page. Pure."""

from __future__ import annotations

from typing import Any

CELLS = 24  # characters of a bar in words


class Share(str):
    """`████░░░░ 3/9  all_reduce of 64 KiB`; `words` is what is done, `done` and `of` how much of it."""

    words: str
    done: int
    of: int

    def __new__(cls, words: str, done: int, of: int) -> Share:
        full = CELLS * done // of
        made = super().__new__(cls, f"{'█' * full}{'░' * (CELLS - full)} {done}/{of}  {words}")
        made.words, made.done, made.of = words, done, of
        return made

    def __getnewargs__(self) -> Any:
        return self.words, self.done, self.of
