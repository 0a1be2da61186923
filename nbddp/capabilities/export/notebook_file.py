"""The cells of a notebook file → pieces of a program. Pure: the file's JSON as data."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nbddp.capabilities.export.program import ExportedCell
from nbddp.errors import BadInput
from nbddp.execution.cell_text import parted


def cells_of(notebook: Mapping[str, Any], name: str, numbers: Collection[int] | None, tag: str) -> list[ExportedCell]:
    """The `%%ddp` cells, and what `%ddp push` copies to them, where the file shows its value.

    numbers: those of these `In[n]` alone; tag: those that have it. Raises BadInput if there is none such, or if a value
    is not in the file.
    """
    found: list[ExportedCell] = []
    known: dict[str, str] = {}
    seen: set[int] = set()
    for i, cell in enumerate(notebook.get("cells", ()), 1):
        if cell.get("cell_type") != "code":
            continue
        number = cell.get("execution_count")
        label = f"In[{number}]" if number else f"cell {i} of {name}"
        text = "".join(cell.get("source", ()))
        own = parted(text)
        if own is None:
            found += _pushed(text, label, known)
            continue
        if not own.body.strip():
            continue
        if numbers is not None and number not in numbers:
            continue
        if tag and tag not in cell.get("metadata", {}).get("tags", ()):
            continue
        seen.add(number)
        found.append(ExportedCell(label, own.line, own.body))
    _refuse(found, name, [n for n in numbers or () if n not in seen], tag)
    return found


def _refuse(found: Sequence[ExportedCell], name: str, missing: Sequence[int], tag: str) -> None:
    if missing:
        raise BadInput(f"{name} has no %%ddp cell In[{missing[0]}]; its saved numbers are those of its last run")
    if not any(cell.line is not None for cell in found):
        raise BadInput(f"{name} has no %%ddp cell{f' with the tag {tag}' * bool(tag)}")


def _pushed(text: str, label: str, known: dict[str, str]) -> list[ExportedCell]:
    """What `%ddp push` in a cell of the notebook sets. known: names that cells have set to literals so far."""
    found = []
    for row in text.splitlines():
        words = row.split()
        if words[:2] == ["%ddp", "push"]:
            names = [word for word in words[2:] if word.isidentifier()]
            for name in names:
                if name not in known:
                    raise BadInput(
                        f"{label} pushes {name!r}, whose value the file does not show; run the notebook and use %ddp "
                        f"export there, or set {name!r} in a %%ddp cell"
                    )
            found.append(ExportedCell(label, None, "\n".join(f"{name} = {known[name]}" for name in names) + "\n"))
        else:
            _note_literal(row, known)
    return found


def _note_literal(row: str, known: dict[str, str]) -> None:
    try:
        [node] = ast.parse(row).body
    except (SyntaxError, ValueError):
        return
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        try:
            ast.literal_eval(node.value)
        except ValueError:
            known.pop(node.targets[0].id, None)
        else:
            known[node.targets[0].id] = ast.unparse(node.value)
