"""All explorers: `from nbddp.teach import explore; explore.layout()`.

They are found in the lessons' `explorer` modules.
"""

from __future__ import annotations

from nbddp.lessons.framework import folders
from nbddp.lessons.framework.explorer import Explorer
from nbddp.lessons.l08_buckets_and_overlap.explorer import measured_buckets

_all = folders.defined("explorer", Explorer)
globals().update(_all)
__all__ = ["measured_buckets", *sorted(_all)]


def __getattr__(name: str) -> Explorer:
    raise folders.missing("explore", "explorer", name, _all)


def __dir__() -> list[str]:
    return sorted(__all__)
