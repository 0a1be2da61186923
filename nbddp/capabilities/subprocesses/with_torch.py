"""Something is done as soon as a process imports torch.distributed, and torch is not imported for it."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

LIBRARY = "torch.distributed"


def once_imported(do: Callable[[], None]) -> None:
    """Call it at once where the library is there, else when its import ends."""
    if LIBRARY in sys.modules:
        do()
    else:
        sys.meta_path.insert(0, _Finder(do))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the library as ever, once."""

    def __init__(self, do: Callable[[], None]) -> None:
        self._do = do

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if name != LIBRARY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                self._do()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
