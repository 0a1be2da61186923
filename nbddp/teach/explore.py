"""The explorers of all lessons. Tab after `explore.` lists them.

An explorer shows an idea under sliders in a notebook. `str()` of it is the text of two settings, and `show(**chosen)`
returns the figure for chosen values of its controls.

Example:

    from nbddp.teach import explore
    print(explore.layout())
"""

from __future__ import annotations

from nbddp.lessons.framework import folders
from nbddp.lessons.framework.explorer import Explorer
from nbddp.lessons.l08_buckets_and_overlap.figure import measured_buckets

_all = folders.defined("figure", Explorer)
globals().update(_all)
__all__ = ["measured_buckets", *sorted(_all)]


def __getattr__(name: str) -> Explorer:
    raise folders.missing("explore", "explorer", name, _all)


def __dir__() -> list[str]:
    return sorted(__all__)
