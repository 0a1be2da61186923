"""Lesson 03's explorer and diagnosis: processes that look for each other by four variables, and who finds whom.

With `env://` the process of rank 0 hosts the store at MASTER_PORT of its own node, and every process looks for a store
at MASTER_ADDR:MASTER_PORT; all go on when WORLD_SIZE ranks are there. `localhost` is the node a process is on. Pure:
imports only the standard library and `nbddp.launch.topology`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from nbddp.launch.topology import rank_words

ADDR, PORT, RANK, WORLD = NAMES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
OWN_NODE = ("localhost", "127.0.0.1", "::1")
MEETS, HOSTS, WAITS, SEEKS, REFUSED = (
    "has met all ranks",
    "hosts the store, waits",
    "waits",
    "finds no store",
    "has no place",
)
NOTHING, TOO_MANY, PORTS, TWICE, FROM_ONE, OWN = FAULTS = (
    "none",
    "WORLD_SIZE one too large",
    "another port on the last node",
    "ranks begin at 0 on each node",
    "ranks begin at 1",
    "MASTER_ADDR is localhost",
)
A_PORT = 29400


@dataclass(frozen=True)
class PlannedProcess:
    """A process on a node, with what its environment says. `env` has the four NAMES, as text."""

    node: int
    local_rank: int
    env: Mapping[str, str]

    @property
    def rank(self) -> int:
        return int(self.env[RANK])

    @property
    def world_size(self) -> int:
        return int(self.env[WORLD])

    @property
    def looks_at(self) -> tuple[str, str]:
        """(node name, port) where it looks for the store."""
        addr = self.env[ADDR]
        return (node_name(self.node) if addr in OWN_NODE else addr, self.env[PORT])

    @property
    def name(self) -> str:
        return f"rank {self.env[RANK]} on {node_name(self.node)}"


@dataclass(frozen=True)
class ProcessPlace:
    """Where one process has got to: `state` is one of the constants above, `why` what it waits for or lacks."""

    process: PlannedProcess
    state: str
    why: str = ""


@dataclass(frozen=True)
class RendezvousState:
    """Where all that have started are. `expected` is how many processes are started in all."""

    places: tuple[ProcessPlace, ...]
    expected: int

    @property
    def met(self) -> bool:
        """Whether all processes found each other, in one group."""
        return len(self.places) == self.expected and all(p.state == MEETS for p in self.places) and self._one_group()

    def _one_group(self) -> bool:
        return len({p.process.looks_at for p in self.places}) == 1

    def stores(self) -> list[tuple[str, str]]:
        """Where a store is looked for or hosted, in order of arrival."""
        return list(dict.fromkeys(p.process.looks_at for p in self.places))

    def verdict(self) -> str:
        """The outcome, in a sentence."""
        if self.met:
            return f"all {self.expected} have met: init_process_group returns on every rank"
        if len(self.places) < self.expected:
            begun = f"{len(self.places)} of {self.expected} processes have started"
            return f"{begun}: init_process_group blocks on each of them until all have started or it times out"
        met = [p for p in self.places if p.state == MEETS]
        stuck = [p for p in self.places if p.state != MEETS]
        if not met:
            return (
                f"all {self.expected} have started but cannot meet: init_process_group raises on each after its timeout"
            )
        if not stuck:
            return "every process meets others, but they form more than one group"
        return f"{_names(met)} go on without {_names(stuck)}"

    def describe(self) -> str:
        rows = [f"  {p.process.name}: {p.state}{': ' * bool(p.why)}{p.why}" for p in self.places]
        return "\n".join([self.verdict(), *rows])


def node_name(node: int) -> str:
    return f"node{node}"


def meeting(processes: Sequence[PlannedProcess], expected: int | None = None) -> RendezvousState:
    """Who finds whom, of processes in the order in which they start."""
    places: list[ProcessPlace] = []
    for p in processes:
        there = [q for q in processes if q.looks_at == p.looks_at]
        places.append(_place(p, there))
    return RendezvousState(tuple(places), len(processes) if expected is None else expected)


def _place(p: PlannedProcess, there: Sequence[PlannedProcess]) -> ProcessPlace:
    """Where `p` is, with all processes `there` that look at the same store, itself among them."""
    addr, port = p.looks_at
    hosts = [q for q in there if q.rank == 0 and node_name(q.node) == addr]
    if not hosts:
        return ProcessPlace(p, SEEKS, f"rank 0 hosts none at {addr}:{port}")
    same = [q for q in there if q.rank == p.rank]
    if same[0] is not p:
        return ProcessPlace(p, REFUSED, f"rank {p.rank} is taken by {same[0].name}")
    if p.rank >= p.world_size:
        return ProcessPlace(p, REFUSED, f"with WORLD_SIZE {p.world_size} the last rank is {p.world_size - 1}")
    missing = sorted(set(range(p.world_size)) - {q.rank for q in there})
    waits = HOSTS if p.rank == 0 else WAITS
    if missing:
        return ProcessPlace(p, waits, f"for {rank_words(missing)}")
    if len(same) > 1:
        return ProcessPlace(p, waits, f"rank {p.rank} is claimed twice")
    return ProcessPlace(p, MEETS)


def right(nodes: int, per_node: int) -> list[PlannedProcess]:
    """The processes as torchrun makes them."""
    size = nodes * per_node
    env = {ADDR: node_name(0), PORT: str(A_PORT), WORLD: str(size)}
    return [
        PlannedProcess(n, local, {**env, RANK: str(n * per_node + local)})
        for n in range(nodes)
        for local in range(per_node)
    ]


def faulty(nodes: int, per_node: int, fault: str) -> list[PlannedProcess]:
    """The same with one of FAULTS."""
    made = right(nodes, per_node)
    change: Mapping[str, Callable[[PlannedProcess], dict[str, str]]] = {
        NOTHING: lambda p: {},
        TOO_MANY: lambda p: {WORLD: str(nodes * per_node + 1)},
        PORTS: lambda p: {PORT: str(A_PORT + 1)} if p.node == nodes - 1 else {},
        TWICE: lambda p: {RANK: str(p.local_rank)},
        FROM_ONE: lambda p: {RANK: str(p.rank + 1)},
        OWN: lambda p: {ADDR: "localhost"},
    }
    return [replace(p, env={**p.env, **change[fault](p)}) for p in made]


def arrival(
    nodes: int = 2, per_node: int = 2, arrived: int | None = None, last_first: bool = False, fault: str = NOTHING
) -> RendezvousState:
    """The first `arrived` processes (all, if None), in the order of their places or the other way round."""
    made = faulty(nodes, per_node, fault)
    order = made[::-1] if last_first else made
    return meeting(order[:arrived], expected=len(made))


def _names(places: Sequence[ProcessPlace]) -> str:
    return " and ".join(p.process.name for p in places)


def differs(processes: Sequence[PlannedProcess]) -> str:
    """Why these do not all meet, in one line for the learner; empty if they do."""
    found = meeting(processes)
    if found.met:
        return ""
    sizes = sorted({p.world_size for p in processes})
    if len(sizes) > 1:
        return f"WORLD_SIZE must be the same on every process; here it is {' and '.join(map(str, sizes))}"
    one = next((p for p in found.places if p.state == REFUSED), None) or next(
        (p for p in found.places if p.state == SEEKS), None
    )
    if one is not None and one.state == SEEKS and one.process.env[ADDR] in OWN_NODE:
        addr = one.process.env[ADDR]
        why = f"{addr} means its own node, but rank 0 is on another; use the name of rank 0's node"
        return f"{one.process.name} finds no store: {why}"
    if one is not None and one.state == SEEKS and all(p.rank for p in processes):
        return "no process has rank 0, which hosts the store; ranks begin at 0"
    one = one or next((p for p in found.places if p.state != MEETS), None)
    if one is None:
        return f"each process meets only {_alone(processes)}; all {len(processes)} must meet in one group"
    if one.state in (WAITS, HOSTS):
        return f"{one.process.name} waits {one.why}, but only {len(processes)} processes are started"
    return f"{one.process.name} {one.state}: {one.why}{_elsewhere(one, processes)}"


def _elsewhere(one: ProcessPlace, processes: Sequence[PlannedProcess]) -> str:
    """Where the store is that `one` does not find; empty if that is not its trouble."""
    host = next((p for p in processes if p.rank == 0), None)
    if one.state != SEEKS or host is None:
        return ""
    return f"; rank 0 runs on {node_name(host.node)}, and its store is at port {host.env[PORT]} there"


def _alone(processes: Sequence[PlannedProcess]) -> str:
    return "itself" if processes[0].world_size == 1 else f"{processes[0].world_size} of them"
