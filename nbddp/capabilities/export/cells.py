"""The `%%ddp` cells of a notebook → one Python script that torchrun starts.

Cells run one after the other in one namespace, so their text in that order is the program. Four things differ. A
script has no pool that ends a forgotten process group: it leaves the group itself at the end. In a script a group can
be made once only: under torchrun 2.13 the second `init_process_group` of a process finds the addresses of the first
and hangs, where the pool's ranks meet afresh. A script has no IPython: a line with `%` or `!` is refused. And what a
cell's line has after `--` is for its own sys.argv; the script has that of the line it is started by.
Pure: text and ast.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from nbddp.errors import BadInput
from nbddp.execution.cell_text import dedented, parted
from nbddp.launch.options import LaunchSpec, parse_cell

LEAVE = """\
import torch.distributed

if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""
HEAD = '"""The %%ddp cells of a notebook, to be started by torchrun."""\n'


def script(cells: Iterable[str]) -> str:
    """The `%%ddp` cells of a notebook as one script for torchrun. Other cells are left out: they run in the kernel.

    Raises BadInput if there is no `%%ddp` cell, or if one cannot be part of a script.
    """
    parts, group_of = [HEAD], 0
    for number, (line, body) in enumerate(_ddp_cells(cells), 1):
        _refuse_some_ranks(parse_cell(line), number)
        called = _called(_parsed(body, f"cell {number}"))
        if "init_process_group" in called:
            _refuse_another_group(group_of, number, "is_initialized" in called)
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
            'write if int(os.environ["RANK"]) in (...): in the cell, and leave out --ranks'
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


def _called(tree: ast.Module) -> set[str]:
    """The names of all functions that are called, under whatever module's name."""
    return {str(getattr(n.func, "attr", getattr(n.func, "id", ""))) for n in ast.walk(tree) if isinstance(n, ast.Call)}
