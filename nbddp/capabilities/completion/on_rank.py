"""Tab and `?` on a rank, and the kind of each completion, without calling the program's code.

IPython knows kinds from Jedi alone, which takes seconds on torch and is off on the ranks.
"""

from __future__ import annotations

import builtins
import inspect
import keyword
import re
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from nbddp.worker.parts import RankWorker

UNKNOWN = ""
DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*$")


def complete(worker: RankWorker, code: str, cursor_pos: int) -> Any:
    found = worker.shell.kernel.do_complete(code, cursor_pos)
    found["kinds"] = kinds(code[: found["cursor_start"]], found["matches"], worker.shell.user_ns)
    return found


def inspected(worker: RankWorker, code: str, cursor_pos: int, detail_level: int = 0) -> Any:
    return worker.shell.kernel.do_inspect(code, cursor_pos, detail_level)


def kinds(before: str, matches: Sequence[str], names: Mapping[str, object]) -> list[str]:
    """module, class, function, instance, keyword, magic or param of each match; empty where it is not known.

    before: the code up to the place that a match replaces.
    """
    return [_kind(before, match, names) for match in matches]


def _kind(before: str, match: str, names: Mapping[str, object]) -> str:
    if match.startswith("%"):
        return "magic"
    if match.endswith("="):
        return "param"
    found = DOTTED.search((before + match).rsplit("\n", 1)[-1])
    if found is None:
        return UNKNOWN
    first, *path = found[0].split(".")
    if not path and keyword.iskeyword(first):
        return "keyword"
    held = names.get(first, getattr(builtins, first, inspect.Parameter.empty))
    for name in path:
        held = _attribute(held, name)
    if held is inspect.Parameter.empty:
        return UNKNOWN
    if isinstance(held, ModuleType):
        return "module"
    if isinstance(held, type):
        return "class"
    if inspect.isroutine(held) or isinstance(held, (staticmethod, classmethod)):
        return "function"
    return "instance"


def _attribute(held: Any, name: str) -> Any:
    """As `getattr`, without running code; a torch.nn.Module's parameters, buffers and modules are found too."""
    found = inspect.getattr_static(held, name, inspect.Parameter.empty)
    torch = sys.modules.get("torch")
    if found is inspect.Parameter.empty and torch is not None and isinstance(held, torch.nn.Module):
        module = torch.nn.Module
        own = (*module.named_parameters(held, recurse=False), *module.named_buffers(held, recurse=False))
        found = dict((*own, *module.named_children(held))).get(name, found)
    return found
