"""`%ddp status`: a row for each process of the pool, on all of its nodes; in a terminal, of all pools of this user."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbddp.agent import runtime_dir
from nbddp.agent.client import AgentClient
from nbddp.agent.gather import AgentRequests
from nbddp.capabilities.status.table import status_table
from nbddp.figures.table import Table
from nbddp.launch.units import lasts
from nbddp.notebook.commands import Asked, CommandLine
from nbddp.protocol.capability import load, rows
from nbddp.protocol.codec import Message
from nbddp.protocol.pool_parts import lines

if TYPE_CHECKING:
    from nbddp.pool.pool import WorkerPool


PROG = "python -m nbddp"


def status(pool: WorkerPool) -> Message:
    """The agent's answer to `status`: the pool's description, and the processes of all nodes."""
    group = pool.group
    group.need_running()
    asked = AgentRequests()
    told = [node.children(asked) for node in group.nodes]
    first, *others = asked.take()
    answers = iter([first, *others])
    children = [child for own in told for child in (next(answers)["children"] if own is None else own)]
    return {**first, "children": children, "info": {**first["info"], "asked_all": True}}


def in_notebook(asked: Asked, line: CommandLine) -> Table:
    answer = status(asked.pool)
    for words in lines(asked.pool.parts.holds):
        print(words)
    if answer["keep"]:
        print(f"the warm process stays for {lasts(answer['keep'])} after this notebook kernel exits (--keep-warm)")
    asked.tell_shortcomings()
    return status_table(answer)


def in_terminal(line: CommandLine) -> None:
    """What earlier kernels have left, and the pools; or the one that is named."""
    for strange in runtime_dir.strange():
        print(strange)
    name = line.args["pool"]
    found = [one for row in rows() if row.waits for one in load(row.waits)() if name in ("", one.name)]
    for one in found:
        print(one.describe(PROG))
    everyone = () if name else runtime_dir.running()
    pools = line.agents() if name and not found else [AgentClient.connect(home) for home in everyone]
    if not pools and not found:
        print("you have no running pool; a %%ddp cell or python -m nbddp start starts one")
    for agent in pools:
        answer = agent.request("status")
        info = answer["info"]
        title = f"pool {agent.pool_id} · started in {info.get('cwd', '?')} by process {info.get('owner', '?')}"
        print(status_table(answer, title))
        if answer.get("keep"):
            print(f"its warm process stays for {lasts(answer['keep'])} after the notebook kernel exits (--keep-warm)")
        print()
