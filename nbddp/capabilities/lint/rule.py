"""A rule and its finding, as data. Pure. A page such as `rules/data.md` has a section for each rule."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from nbddp.capabilities.lint.meaning import Meaning

MARK = "# <-"  # behind the line of an example that is flagged


class Hit(NamedTuple):
    """A place that a rule has found. words: what its sentence names."""

    node: ast.AST
    words: dict[str, str] = {}


@dataclass(frozen=True)
class Rule:
    """A mistake that source shows.

    - level: `error`: results are wrong or the program hangs or fails; `warning`: under the condition that the sentence
      names; `note`: nothing is wrong yet.
    - what: the sentence, with names of the program in braces. why: what it does. cure: what to write.
    - seen: where it was found or is described, by kind.
    - wrong, right: programs; `MARK` stands behind each line of `wrong` that is flagged. cells: they are a notebook's.
    """

    name: str
    level: str
    title: str
    what: str
    why: str
    cure: str
    seen: str
    wrong: str
    right: str
    check: Callable[[Meaning], Iterable[Hit]] = field(repr=False)
    cells: bool = False
