"""`%ddp doctor`: limitations of these libraries, and of the pool's hosts."""

from __future__ import annotations

from typing import Any

from nbddp.capabilities.doctor.examination import examine
from nbddp.capabilities.doctor.findings import Together
from nbddp.notebook.commands import Asked, CommandLine


def in_notebook(asked: Asked, line: CommandLine) -> Any:
    with asked.progress() as progress:
        progress("checking the private APIs of torch, ipykernel, IPython and ipyparallel")
        found = examine(asked.pool)
        hosts = asked.pool.checkup(progress) if hasattr(asked.pool, "checkup") else None
    return found if hosts is None else Together([hosts, found])


def in_terminal(line: CommandLine) -> None:
    print(examine())
