"""Arguments in Python that are options of a line: their names and types, held against the declarations of the options.

A type checker sees the same before the program runs. Here an error says what to write. Pure.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from nbddp.errors import BadInput
from nbddp.launch.options import fields_of, known, nearest
from nbddp.protocol.capability import load

# the annotations of a pool's own arguments (`nbddp.public.Pool`); rows have theirs
OWN_TYPES = {
    "nproc": "int | str", "nnodes": "int | tuple[int, int]", "gpus_per_proc": "int", "visible": "str",
    "oversubscribe": "bool", "device": "str",
}  # fmt: skip
TYPES: Mapping[str, tuple[type, ...]] = {
    "str": (str,), "int": (int,), "bool": (bool,), "float": (int, float), "Mapping[str, str]": (Mapping,),
    "tuple[int, int]": (tuple,),
}  # fmt: skip


def check_arguments(call: str, of: str, given: Mapping[str, object]) -> None:
    """Hold the arguments of `call` against the options. of: `pool` or `run`.

    Raises TypeError for a name that is no argument, and BadInput for a value of the wrong type or that no option takes.
    """
    options = {option.name: option for option in fields_of(of)}
    for name, value in given.items():
        if name not in options or not (options[name].python or name in OWN_TYPES):
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}{_meant(name, of)}")
        if value is None:
            continue
        annotation = OWN_TYPES.get(name, options[name].annotation).removesuffix(" | None")
        if not _is_of(value, annotation):
            takes = annotation.replace(" | ", " or ")
            raise BadInput(f"{call}({name}={value!r}): {name} is of type {takes}, not {type(value).__name__}")
        if options[name].choices and value not in options[name].choices:
            raise BadInput(f"{call}({name}={value!r}): {name} is one of {', '.join(options[name].choices)}")
        if name in OWN_TYPES and options[name].type:
            _read(call, name, value, options[name].type)


def _meant(name: str, of: str) -> str:
    if name in known() and known()[name].of == of:
        return f"; it is an option of lines alone: {known()[name].flags[0]}"
    near = nearest(name, [option.name for option in fields_of(of) if option.python])
    return f"; did you mean {near}?" if near else ""


def _is_of(value: object, annotation: str) -> bool:
    words = annotation.split(" | ")
    if isinstance(value, bool):
        return "bool" in words
    return any(isinstance(value, TYPES[word]) if word in TYPES else type(value).__name__ == word for word in words)


def _read(call: str, name: str, value: Any, reader: str) -> None:
    """Raises BadInput for what the same option of a line refuses."""
    try:
        load(reader)(":".join(map(str, value)) if isinstance(value, tuple) else str(value))
    except argparse.ArgumentTypeError as e:
        raise BadInput(f"{call}({name}={value!r}): {e}") from None
