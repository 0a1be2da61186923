"""Values that were pushed to the ranks → code that sets them, and what has to be saved beside it.

A literal becomes itself, a function or class its source, anything else is pickled. Imports no library of values.
"""

from __future__ import annotations

import ast
import inspect
import pickle
import pickletools
import textwrap
from collections.abc import Mapping
from typing import Any

from nbddp.errors import BadInput

LONGEST = 2000  # characters of a literal
FILE = "-values.pkl"  # how the name of a script's file of values ends
LOAD = """\
import os
import pickle
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), {file!r}), "rb") as file:
    {names} = pickle.load(file)[{label!r}]
"""


def code_of(values: Mapping[str, Any], label: str, file: str) -> tuple[str, dict[str, tuple[bytes, ...]]]:
    """Code that sets these names, and label → pickles that `file` is to have, one per value. Raises BadInput for a
    value that a script cannot have."""
    lines, saved = [], {}
    for name, value in values.items():
        text = _source(name, value)
        if text is None:
            saved[name] = _pickled(name, value)
        else:
            lines.append(text)
    if saved:
        lines.append(LOAD.format(file=file, label=label, names="".join(f"{name}, " for name in saved).rstrip(" ")))
    return "\n".join(lines) + "\n", {label: tuple(saved.values())} if saved else {}


def files_read(source: str) -> list[str]:
    """The files of values that a script names; the script may have been renamed since it was written."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # as whoever runs it will say
        return []
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return list(dict.fromkeys(text for text in texts if text.endswith(FILE)))


def _source(name: str, value: Any) -> str | None:
    if inspect.isfunction(value) or inspect.isclass(value):
        try:
            text = textwrap.dedent(inspect.getsource(value))
        except (OSError, TypeError):
            return None
        return text if value.__name__ == name and text.lstrip().startswith(("def ", "class ", "async ", "@")) else None
    if inspect.ismodule(value):
        return f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}"
    text = repr(value)
    try:
        same = len(text) <= LONGEST and type(ast.literal_eval(text)) is type(value) and ast.literal_eval(text) == value
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return f"{name} = {text}" if same else None


def _pickled(name: str, value: Any) -> bytes:
    advice = f"create {name!r} in a %%ddp cell instead of pushing it"
    try:
        data = pickle.dumps(value)
    except Exception as e:
        raise BadInput(f"{name!r} cannot be saved for the script: {type(e).__name__}: {e}; {advice}") from None
    if any(argument in ("__main__", "__main__ ") for _, argument, _ in pickletools.genops(data)):
        raise BadInput(f"{name!r} uses a class or function of the notebook, which the script does not have; {advice}")
    return data
