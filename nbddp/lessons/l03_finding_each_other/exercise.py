"""Lesson 03: a function that gives each process its variables; four processes on two nodes must find each other.

The learner's function is called for every process, and its answer is used for real. Each rank of the pool is one of the
processes and calls `init_process_group` with it. All run on one machine, so a node's name and port become a port of
this machine, and `localhost` on the second node another one. The run decides; the words come from
`nbddp.lessons.l03_finding_each_other.simulation`, which is pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nbddp.agent.controller import quiet_ports
from nbddp.lessons.framework.answer import OK, Exercise, Wrong
from nbddp.lessons.framework.on_rank import meet, tabulate
from nbddp.lessons.framework.run_check import on_ranks
from nbddp.lessons.framework.tables import nothing, raised, unwritten
from nbddp.lessons.l03_finding_each_other.simulation import (
    ADDR,
    NAMES,
    PORT,
    RANK,
    WORLD,
    PlannedProcess,
    differs,
    node_name,
)
from nbddp.output.screens import NullScreen

NODES, PER_NODE = 2, 2
ALL = NODES * PER_NODE
LAST_PORT = 65535
PLACES = tuple((node, local) for node in range(NODES) for local in range(PER_NODE))
PATIENCE, SHORT = 15.0, 1.0  # seconds to find each other; where it is known that they cannot, only to see that
# they do not (a look-up of names can take 5 s, so that the right ones get more)


def processes_of(name: str, outcomes: Sequence[tuple[str, Any]]) -> list[PlannedProcess]:
    """The processes, from what the function gave for each of PLACES. Raises Wrong for what is no environment."""
    early = unwritten(name, outcomes)
    if early:
        raise Wrong(early)
    made = []
    for (node, local), (kind, value) in zip(PLACES, outcomes, strict=True):
        call = f"{name}({node}, {local})"
        if kind == "raised":
            raise Wrong(f"{call} {raised(value)}")
        if not isinstance(value, Mapping):
            raise Wrong(f"{call} is {value!r}; {nothing(value) or 'return a dict with ' + ', '.join(NAMES)}")
        made.append(PlannedProcess(node, local, _environment(call, value)))
    return made


def _environment(call: str, given: Mapping[str, object]) -> dict[str, str]:
    """The four variables as text. Raises Wrong for one that is missing or cannot be read as init_process_group does."""
    lacking = [n for n in NAMES if str(given.get(n, "")).strip() in ("", "None")]
    if lacking:
        raise Wrong(f"{call} does not set {', '.join(lacking)}; init_process_group needs {', '.join(NAMES)}")
    env = {n: str(given[n]).strip() for n in NAMES}
    env[ADDR] = env[ADDR].lower()  # as names of hosts are compared
    for name in (PORT, RANK, WORLD):
        if not env[name].isdecimal():
            raise Wrong(f"{call} sets {name} to {given[name]!r}; it must be an integer, 0 or greater")
    if not 0 < int(env[PORT]) <= LAST_PORT:
        raise Wrong(f"{call} sets {PORT} to {given[PORT]!r}; ports are numbered from 1 to {LAST_PORT}")
    return env


def reachable(processes: Sequence[PlannedProcess], ports: Sequence[int]) -> list[dict[str, str]]:
    """The same environments for one machine: every (node, port) that is looked at is one of `ports` here.

    A rank 0 that looks at another node hosts where nobody looks, itself included: it gets a port of its own.
    """
    here: dict[tuple[str, ...], int] = {}
    free = iter(ports)
    environs = []
    for p in processes:
        astray = p.rank == 0 and p.looks_at[0] != node_name(p.node)
        at = (*p.looks_at, p.name) if astray else p.looks_at
        if at not in here:
            here[at] = next(free)
        environs.append({**p.env, ADDR: "127.0.0.1", PORT: str(here[at])})
    return environs


def line(processes: Sequence[PlannedProcess], outcomes: Sequence[tuple[str, str, int]]) -> str:
    """The answer's line from what really happened on each rank. `ok` also needs variables with which it can happen: a
    rank's word alone is not enough."""
    if any(kind == "standing" for kind, _, _ in outcomes):
        return "an earlier cell left a process group; end it with dist.destroy_process_group() in a %%ddp cell"
    why = unknown_node(processes) or differs(processes)
    if why:
        return why
    wanted = sum(range(ALL))
    if all(kind == "met" and total == wanted for kind, _, total in outcomes):
        return OK
    rank, error = next(((r, e) for r, (kind, e, _) in enumerate(outcomes) if kind == "failed"), (0, ""))
    return f"the processes did not meet; {processes[rank].name} raised {error}"


def unknown_node(processes: Sequence[PlannedProcess]) -> str:
    """A sentence on a MASTER_ADDR that is none of the nodes; empty if there is none."""
    names = [node_name(n) for n in range(NODES)]
    for p in processes:
        if p.looks_at[0] not in names:
            return f"{p.name} looks for a host called {p.env[ADDR]}; the nodes are {' and '.join(names)}"
    return ""


def judged(name: str) -> Callable[[Any], str]:
    def judge(function: Callable[..., Any]) -> str:
        found = on_ranks(tabulate, function, PLACES, ranks=(0,))
        processes = processes_of(name, found[0])
        known = bool(unknown_node(processes) or differs(processes))
        claim, ports = quiet_ports(ALL)
        with claim:
            environs = reachable(processes, ports)
            outcomes = on_ranks(
                meet,
                environs,
                SHORT if known else PATIENCE,
                ranks=range(ALL),
                at_least=ALL,
                hang_after=None,
                deadline=40.0,
                screen=NullScreen(),
            )
        return line(processes, [outcomes[r] for r in range(ALL)])

    return judge


def _exercise(name: str) -> Exercise:
    return Exercise(name, judged(name), verifies="four real processes met with your variables and added up their ranks")


by_address, by_rank, by_size, by_host = map(_exercise, ("by_address", "by_rank", "by_size", "by_host"))
