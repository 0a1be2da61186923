"""Code objects on their way keep the name of their file. An error names its place by it, and a report knows the user's
frames by it. cloudpickle leaves it out from 3.1.3 on.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import Any


def table() -> ChainMap[type, Any]:
    """The dispatch table of such a pickler. It is of its class: one in C reads the table once, when it is made."""
    import cloudpickle

    return ChainMap({CodeType: reduced}, cloudpickle.Pickler.dispatch_table)


def reduced(code: CodeType) -> tuple[Any, ...]:
    """What cloudpickle makes of it, and its file."""
    import cloudpickle

    found: tuple[Any, ...] = cloudpickle.Pickler.dispatch_table[CodeType](code)
    make, made_of = found[:2]
    return found if code.co_filename in made_of else (placed, (code.co_filename, make, made_of))


def placed(file: str, make: Callable[..., CodeType], made_of: tuple[Any, ...]) -> CodeType:
    """Where it arrives: the code, with its file."""
    return make(*made_of).replace(co_filename=file)
