"""Running a learner's function in a process group of all ranks; the group ends when all of them have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbddp.run.screen import Screen, Silent, for_shell
from nbddp.teach.running import on_ranks
from nbddp.worker.grouped import leave, staying


def in_group_of_ranks(function: Callable[..., Any], *args: Any, screen: Screen | None = None) -> dict[int, Any]:
    """By rank what `function(*args)` gives; each rank is seeded differently. Raises Wrong as `on_ranks` does.

    screen: where prints are seen, `this_screen()` for several runs; without one the run has its own.
    """
    found = on_ranks(staying, function, *args, at_least=2, screen=screen)
    own, answers = found[found.ranks[0]][0], {r: found[r][1] for r in found.ranks}
    if own:
        on_ranks(leave, screen=Silent())
    return answers


def this_screen() -> Screen:
    """One screen for all runs of a check: the notebook's cell gets one live view, and a saved one no blank lines."""
    from IPython.core.getipython import get_ipython

    return for_shell(get_ipython())
