"""The `%%ddp` cells of a notebook → one Python script that torchrun starts; those of its file → pieces of a program.

Cells run one after the other in one namespace, so their text in that order is the program. Four things differ. A script
has no pool that ends a forgotten process group: it leaves the group itself at the end. In a script a group can be made
once only. Under torchrun 2.13 the second `init_process_group` of a process finds the addresses of the first and hangs.
The pool's ranks meet afresh. A script has no IPython: a line with `%` or `!` is refused. And what a cell's line has
after `--` is for its own sys.argv; the script has that of the line it is started by. Pure: text, ast, and the file's
JSON as data.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Sequence

from nbddp.capabilities.export.names import called
from nbddp.capabilities.export.program import ExportedCell
from nbddp.errors import BadInput
from nbddp.execution.cell_text import dedented, parted
from nbddp.launch.options import LaunchSpec, parse_cell
from nbddp.protocol.codec import Json

LEAVE = """\
import torch.distributed

if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""
HEAD = '"""The %%ddp cells of a notebook, to be started by torchrun."""\n'


def script(cells: Iterable[str]) -> str:
    """Return the `%%ddp` cells of a notebook as one script for torchrun. Other cells run in the notebook kernel, and
    the script does not have them.

    - cells (several str): the source of each cell.

    Raises BadInput if there is no `%%ddp` cell, or if one cannot be part of a script.

    Example:

        from nbddp.export import script
        assert "print('on every rank')" in script(["%%ddp --nproc 2\\nprint('on every rank')"])
    """
    parts, group_of = [HEAD], 0
    for number, (line, body) in enumerate(_ddp_cells(cells), 1):
        _refuse_some_ranks(parse_cell(line), number)
        names = called(_parsed(body, f"cell {number}"))
        if "init_process_group" in names:
            _refuse_another_group(group_of, number, "is_initialized" in names)
            group_of = number
        parts.append(f"# cell {number}: %%ddp {line}".rstrip() + f"\n{body.strip()}\n")
    if len(parts) == 1:
        raise BadInput("there is no %%ddp cell to export; only %%ddp cells run on the ranks")
    if group_of:
        parts.append(LEAVE)
    whole = "\n".join(parts)
    _parsed(whole, "the script")
    return whole


def _ddp_cells(cells: Iterable[str]) -> Iterable[tuple[str, str]]:
    """The line and the body of each `%%ddp` cell."""
    for cell in cells:
        found = parted(cell)
        if found is not None and found.body.strip():
            yield found.line, dedented(found.body)


def _refuse_some_ranks(spec: LaunchSpec, number: int) -> None:
    if spec.ranks is not None:
        raise BadInput(
            f"cell {number} runs on some ranks only (--ranks), but a script runs on all; "
            'write if int(os.environ["RANK"]) in (...): in the cell, and remove --ranks'
        )


def _parsed(body: str, what: str) -> ast.Module:
    try:
        compile(body, what, "exec", dont_inherit=True)
        return ast.parse(body)
    except SyntaxError as error:
        rows = body.splitlines()
        text = rows[error.lineno - 1].strip() if error.lineno and error.lineno <= len(rows) else ""
        if text.startswith(("%", "!")):
            raise BadInput(
                f"{what}: {text!r} is IPython syntax, which a script does not have; move it to a cell without %%ddp"
            ) from None
        raise BadInput(f"{what} is not Python that can run as a script: {error.msg} at {text!r}") from None


def _refuse_another_group(before: int, number: int, asks_first: bool) -> None:
    if before and not asks_first:
        raise BadInput(
            f"cells {before} and {number} both call init_process_group, but under torchrun a process can do that only "
            f"once; write if not dist.is_initialized(): before it in cell {number}, and do not destroy the group "
            "in between"
        )


# -- pieces of a program ---------------------------------------------------------------------------


def cells_of(notebook: Json, name: str, numbers: Collection[int] | None, tag: str) -> list[ExportedCell]:
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
