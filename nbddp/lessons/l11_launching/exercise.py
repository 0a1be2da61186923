"""Lesson 11: a Slurm task's variables → those that a process group reads, and a node list → the hosts' names.

Every rank of the pool computes both from example jobs. The judging is pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nbddp.lessons.framework.answer import OK, Exercise, mismatch
from nbddp.lessons.framework.run_check import judged_by, tabulated
from nbddp.lessons.framework.tables import Case, Mistakes, Outcome, TableExercise, raised, unwritten

Task = tuple[dict[str, str], list[str]]  # the task's variables, and the hosts of the job in order
WANTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def hosts_of(nodelist: str) -> list[str]:
    """`gpu[01-03,07],login` → gpu01, gpu02, gpu03, gpu07, login: one range of numbers to a name, zeros kept."""
    found, rest = [], nodelist
    while rest:
        name, bracket, after = rest.partition("[")
        if not bracket or "," in name:
            name, _, rest = rest.partition(",")
            found.append(name)
            continue
        inside, _, rest = after.partition("]")
        suffix, _, rest = rest.partition(",")
        for part in inside.split(","):
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            found += [f"{name}{n:0{len(first)}d}{suffix}" for n in numbers]
    return found


def job(nodelist: str, per_node: int, job_id: int) -> list[Task]:
    """The tasks of a job with `per_node` tasks on each of its nodes, as srun numbers them."""
    hosts = hosts_of(nodelist)
    total = len(hosts) * per_node
    return [
        (
            {
                "SLURM_JOB_ID": str(job_id),
                "SLURM_JOB_NODELIST": nodelist,
                "SLURM_NNODES": str(len(hosts)),
                "SLURM_NTASKS": str(total),
                "SLURM_NODEID": str(task // per_node),
                "SLURM_PROCID": str(task),
                "SLURM_LOCALID": str(task % per_node),
                "SLURMD_NODENAME": hosts[task // per_node],
            },
            hosts,
        )
        for task in range(total)
    ]


TASKS = (*job("gpu[01-02]", 4, 4711), *job("a7,b[09-10]", 2, 815), *job("fat3", 3, 90210))

# per variable: what it is, and what is said of the ways to get it wrong
RIGHT: Mapping[str, Callable[[dict[str, str], list[str]], str]] = {
    "RANK": lambda slurm, hosts: slurm["SLURM_PROCID"],
    "LOCAL_RANK": lambda slurm, hosts: slurm["SLURM_LOCALID"],
    "WORLD_SIZE": lambda slurm, hosts: slurm["SLURM_NTASKS"],
    "MASTER_ADDR": lambda slurm, hosts: hosts[0],
}
MISTAKES: Mapping[str, Mistakes] = {
    "RANK": {
        "that is the task's number on its own node, which restarts at 0 on every node; two processes would "
        "both be rank 0": lambda slurm, hosts: slurm["SLURM_LOCALID"],
        "that is the node's number, the same for all of its processes; it is torchrun's --node-rank": (
            lambda slurm, hosts: slurm["SLURM_NODEID"]
        ),
        "ranks are counted from 0, as SLURM_PROCID is": lambda slurm, hosts: str(int(slurm["SLURM_PROCID"]) + 1),
        "SLURM_NTASKS counts the tasks of all nodes; a node has SLURM_NTASKS // SLURM_NNODES of them": (
            lambda slurm, hosts: str(
                int(slurm["SLURM_NODEID"]) * int(slurm["SLURM_NTASKS"]) + int(slurm["SLURM_LOCALID"])
            )
        ),
    },
    "LOCAL_RANK": {
        "that is the task's number in the whole job; the second node has no such GPU": (
            lambda slurm, hosts: slurm["SLURM_PROCID"]
        ),
        "that is the node's number; all processes of a node would take the same GPU": (
            lambda slurm, hosts: slurm["SLURM_NODEID"]
        ),
    },
    "WORLD_SIZE": {
        "that is the number of nodes; ranks are processes": lambda slurm, hosts: slurm["SLURM_NNODES"],
        "that is the number of processes on one node, the local world size": (
            lambda slurm, hosts: str(int(slurm["SLURM_NTASKS"]) // len(hosts))
        ),
        "that is the highest rank; the world size is one more": lambda slurm, hosts: str(
            int(slurm["SLURM_NTASKS"]) - 1
        ),
        "SLURM_NTASKS counts the tasks of all nodes already": (
            lambda slurm, hosts: str(int(slurm["SLURM_NTASKS"]) * int(slurm["SLURM_NNODES"]))
        ),
    },
    "MASTER_ADDR": {
        "that is the task's own node: each node would wait at itself for all ranks, forever": (
            lambda slurm, hosts: slurm["SLURMD_NODENAME"]
        ),
        "rank 0 opens the store, and it runs on the first node, not the last": lambda slurm, hosts: hosts[-1],
        "that is the list as Slurm writes it; return one host's name": lambda slurm, hosts: slurm["SLURM_JOB_NODELIST"],
        "those are all hosts; return the name of the one with the store": lambda slurm, hosts: ",".join(hosts),
        "every node is its own localhost: they would never meet": lambda slurm, hosts: "localhost",
        "every node is its own 127.0.0.1: they would never meet": lambda slurm, hosts: "127.0.0.1",
    },
}


def judged(by_rank: Mapping[int, Sequence[Outcome]], tasks: Sequence[Task] = TASKS) -> str:
    """The line for what every rank made of all tasks."""
    ranks = sorted(by_rank)
    first = list(by_rank[ranks[0]])
    line = unwritten("variables_of", first) or _shape(first, tasks)
    if line:
        return line
    for rank in ranks[1:]:
        name = next((n for n in RIGHT if _all(n, by_rank[rank]) != _all(n, first)), "")
        if name:
            return _depends(name, ranks[0], rank)
    line = _values(first, tasks) or _ports(first, tasks)
    if line:
        return line
    other = next((r for r in ranks[1:] if _all("MASTER_PORT", by_rank[r]) != _all("MASTER_PORT", first)), None)
    return OK if other is None else _depends("MASTER_PORT", ranks[0], other)


def _all(name: str, outcomes: Sequence[Outcome]) -> list[Any]:
    """A variable of every task; None where there is none."""
    return [value.get(name) if isinstance(value, dict) else None for _, value in outcomes]


def _depends(name: str, one: int, other: int) -> str:
    return f"ranks {one} and {other} of the pool get different answers for {name}: use only the arguments"


def _task(task: Task) -> str:
    slurm = task[0]
    return f"task {slurm['SLURM_PROCID']} of {slurm['SLURM_NTASKS']} on {slurm['SLURMD_NODENAME']}"


def _shape(outcomes: Sequence[Outcome], tasks: Sequence[Task]) -> str:
    """What is no dict of text with all names, or empty."""
    for (kind, value), task in zip(outcomes, tasks, strict=True):
        if kind != "value":
            return f"{_task(task)}: it {raised(value)}"
        if not isinstance(value, dict):
            return f"{_task(task)}: it is {value!r}; return a dict of {', '.join(WANTED)}"
        missing = [name for name in WANTED if name not in value]
        if missing:
            return f"{_task(task)}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing in the dict"
        for name in WANTED:
            if isinstance(value[name], list | dict) or value[name] is None:
                return f"{_task(task)}: {name} is {value[name]!r}; an environment variable is one string"
            if not isinstance(value[name], str):
                text = str(value[name])
                return f"{_task(task)}: {name} is {value[name]!r}; an environment variable is a string, here {text!r}"
    return ""


def _values(outcomes: Sequence[Outcome], tasks: Sequence[Task]) -> str:
    """The first variable that is not right, with the mistake that gives all of its values; or empty."""
    for name, right in RIGHT.items():
        got = [value[name] for _, value in outcomes]
        wrong = next((i for i, task in enumerate(tasks) if got[i] != right(*task)), None)
        if wrong is not None:
            why = next(
                (words for words, would in MISTAKES[name].items() if got == [would(*task) for task in tasks]), ""
            )
            why = why or _why(name, got, tasks[wrong])
            return f"{_task(tasks[wrong])}, {name}: {mismatch(repr(right(*tasks[wrong])), repr(got[wrong]), why)}"
    return ""


def _why(name: str, got: Sequence[str], task: Task) -> str:
    """The sentence about values that no known mistake gives."""
    if len(set(got)) == 1:
        return "that is the same for every task of every job; read it from the variables"
    if name == "MASTER_ADDR" and any(host.partition(":")[0] == RIGHT[name](*task) for host in got):
        return "that is more than the host's name; the port belongs in MASTER_PORT"
    return ""


def _ports(outcomes: Sequence[Outcome], tasks: Sequence[Task]) -> str:
    """Any port will do that all tasks of a job have in common and that a user may open."""
    seen: dict[str, str] = {}
    for (_, value), task in zip(outcomes, tasks, strict=True):
        port, job_id = value["MASTER_PORT"], task[0]["SLURM_JOB_ID"]
        if not (port.isascii() and port.isdigit() and 1024 <= int(port) < 65536):
            return f"{_task(task)}: MASTER_PORT is {port!r}; a port is a number from 1024 to 65535"
        if seen.setdefault(job_id, port) != port:
            return (
                f"{_task(task)}: its MASTER_PORT differs from task 0's, and they would never meet; "
                "make it from what all tasks have in common, such as SLURM_JOB_ID"
            )
    return ""


variables_of = Exercise(
    "variables_of",
    tabulated(TASKS, judged),
    verifies=f"{len(TASKS)} tasks of three jobs, on every rank of the pool",
)


def _ranges(nodelist: str, last: int = 1, keep: bool = True) -> list[str]:
    """hosts_of with one thing wrong: ranges end before their last number, or leading zeros go."""
    found = []
    for part in nodelist.replace("]", "").split("[")[-1].split(",") if "[" in nodelist else []:
        a, _, b = part.partition("-")
        found += [f"{n:0{len(a) if keep else 1}d}" for n in range(int(a), int(b or a) + (last if b else 1))]
    return [nodelist.split("[")[0] + n for n in found] or [nodelist]


def _ends(nodelist: str) -> list[str]:
    """hosts_of with two hosts for each range."""
    name, bracket, inside = nodelist.rstrip("]").partition("[")
    return [name + end for part in inside.split(",") for end in part.split("-")] if bracket else [name]


def why_not_these(case: Case, answer: Any) -> str:
    """What is wrong with a list of hosts that no known mistake gives."""
    right = hosts_of(*case)
    if not isinstance(answer, list):
        return "return a list of names"
    if answer and answer == right[: len(answer)]:
        return "the rest is missing; a return inside the loop ends it early"
    if any(isinstance(host, str) and len(host) == 1 for host in answer):
        return "adding a string to a list with += adds its letters one by one; use append"
    if [_number(host) for host in answer] == [_number(host) for host in right]:
        return "keep the leading zeros: a number has as many digits as in the list"
    return ""


def _number(host: Any) -> str:
    """`gpu007` → `gpu7`."""
    return re.sub(r"0+(?=\d)", "", str(host))


NODELISTS = ("fat3", "gpu[1-3]", "gpu[01-03,07]", "n[098-101]", "gpu[5,9]")
HOSTS = TableExercise(
    "nodes_of",
    tuple((nodelist,) for nodelist in NODELISTS),
    hosts_of,
    {
        "that is the list as Slurm writes it; return every host's name": lambda text: [text],
        "the range ends with its last number: 1-3 is 1, 2, 3": lambda text: _ranges(text, last=0),
        "leading zeros are part of the name: there is a gpu01 and no gpu1": lambda text: _ranges(text, keep=False),
        "the comma inside the brackets separates numbers, not hosts": lambda text: text.split(","),
        "these are the numbers; each needs the name in front of the bracket": (
            lambda text: [h.removeprefix(text.split("[")[0]) if "[" in text else h for h in hosts_of(text)]
        ),
        "that is the first host alone; return all": lambda text: hosts_of(text)[:1],
        "a range includes the numbers between its ends": lambda text: _ends(text),
    },
    why_not_these,
)


nodes_of = Exercise(
    "nodes_of",
    judged_by(HOSTS),
    verifies=f"{len(NODELISTS)} node lists, on every rank of the pool",
)
