"""A launch (how many nodes, processes, how they meet) → the torchrun line to type on each node.

Options and defaults are those of torchrun 2.13 (`torch/distributed/run.py`). Pure: no torch, no process.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from nbddp.capabilities.scripts import logs
from nbddp.capabilities.scripts.logs import LogOptions
from nbddp.errors import BadInput

C10D, STATIC, SRUN = "c10d", "static", "srun"  # how the ranks get their numbers and meet
PORT = 29400  # torchrun's own for c10d where none is said


class UnquotedWord(str):
    """A word for the shell to expand, such as `"$SLURM_NODEID"`: it is not quoted again."""


def shell_line(words: Iterable[str]) -> str:
    """Join words into one command for a POSIX shell; each is quoted unless it is an UnquotedWord."""
    return " ".join(w if isinstance(w, UnquotedWord) else shlex.quote(w) for w in words)


@dataclass(frozen=True)
class Launch:
    """One start of a script on `nnodes` nodes with `nproc` processes each.

    - script (str): its path. arguments (tuple of str): its arguments (default: none).
    - nnodes (int): nodes (default 1). nproc (int): processes per node (default 2).
    - gpus_per_proc (int): GPUs per process (default 1); 0 for a program that runs on CPU.
    - rendezvous (str): C10D (default), STATIC or SRUN. With C10D, torchrun's nodes agree on their numbers. With STATIC,
      each node gets its number on its line. With SRUN, Slurm starts every process, without torchrun.
    - host (str), port (int): the rendezvous; in a batch script Slurm decides (defaults `node0`, 29400).
    - run_id (str): distinguishes two jobs at one host (default `ddp`).
    - max_restarts (int): how often torchrun restarts all workers after a failure (default 0); not with SRUN.
    - min_nodes (int): with C10D, continue with as few nodes as these (default: all); not in a batch script.
    - env (tuple of pairs of str): variables of every process (default: none).
    - own_gpus (bool): each process sees only its own GPUs (default False).
    - logs (a value of `%ddp export`): files of its output (default: none).

    Raises BadInput if the launch is impossible.

    Example:

        from nbddp.export import SRUN, Launch
        launch = Launch("train.py", ("--epochs", "1"), nnodes=2, nproc=4, rendezvous=SRUN)
    """

    script: str = "train.py"
    arguments: tuple[str, ...] = ()
    nnodes: int = 1
    nproc: int = 2
    gpus_per_proc: int = 1
    rendezvous: str = C10D
    host: str = "node0"
    port: int = PORT
    run_id: str = "ddp"
    max_restarts: int = 0
    min_nodes: int | None = None
    env: tuple[tuple[str, str], ...] = ()
    own_gpus: bool = False
    logs: LogOptions | None = None

    def __post_init__(self) -> None:
        for name, least in (("nnodes", 1), ("nproc", 1), ("gpus_per_proc", 0), ("max_restarts", 0)):
            if getattr(self, name) < least:
                raise BadInput(f"{name}={getattr(self, name)} is not possible; use {least} or more")
        if self.rendezvous not in (C10D, STATIC, SRUN):
            raise BadInput(f"rendezvous={self.rendezvous!r} is not one of {C10D}, {STATIC}, {SRUN}")
        if not 0 < self.port < 65536:
            raise BadInput(f"port={self.port} is not a port; use a number from 1024 to 65535")
        if not self.script or not self.host or self.host.split() != [self.host]:
            raise BadInput("a launch needs the path of a script, and a host name without spaces")
        if self.max_restarts and self.rendezvous == SRUN:
            raise BadInput(f"only torchrun restarts workers; remove max_restarts, or use rendezvous={C10D!r}")
        self._check_elastic()
        self._check_words()

    def _check_words(self) -> None:
        for name, _ in self.env:
            if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                raise BadInput(f"{name!r} is not a variable's name; use one such as NCCL_DEBUG")
        for word in (self.script, *self.arguments, self.host, self.run_id, *(value for _, value in self.env)):
            if "\0" in word:
                raise BadInput(f"a command cannot contain a NUL byte, but {word!r} does")

    def _check_elastic(self) -> None:
        if self.min_nodes is None:
            return
        if not 0 < self.min_nodes <= self.nnodes:
            raise BadInput(f"min_nodes={self.min_nodes} is not possible; use 1 to {self.nnodes}")
        if self.rendezvous != C10D:
            raise BadInput(f"only c10d lets nodes join and leave; remove min_nodes, or use rendezvous={C10D!r}")

    @property
    def backend(self) -> str:
        """The process group's backend for the devices: nccl on GPUs, gloo on CPU."""
        return "nccl" if self.gpus_per_proc else "gloo"

    @property
    def endpoint(self) -> str:
        """`host:port`; an IPv6 address is in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def program(self) -> tuple[str, ...]:
        """The script and its arguments; a path that begins with a dash is not mistaken for an option."""
        path = f"./{self.script}" if self.script.startswith("-") else self.script
        return (path, *self.arguments)


def torchrun_line(launch: Launch, node: int = 0) -> str:
    """Return the line to type on a node. On one node torchrun finds a free port itself (`--standalone`).

    - launch (Launch): what is started. node (int): number of the node (default 0).

    Raises BadInput for a node that the launch does not have, or if Slurm starts the processes.

    Example:

        from nbddp.export import Launch, torchrun_line
        assert torchrun_line(Launch("train.py")) == "torchrun --standalone --nproc-per-node 2 train.py"
    """
    if not 0 <= node < launch.nnodes:
        raise BadInput(f"there is no node {node}; the launch has nodes 0 to {launch.nnodes - 1}")
    if launch.nnodes == 1:
        start: list[str] = ["--standalone"]
    elif launch.rendezvous == STATIC:
        start = static_words(launch, str(node), launch.host, str(launch.port))
    else:
        start = c10d_words(launch, launch.endpoint, launch.run_id)
    return shell_line([*env_words(launch), *torchrun_words(launch, start)])


def env_words(launch: Launch) -> list[str]:
    """The variables, as words before a command."""
    return [UnquotedWord(f"{name}={shlex.quote(value)}") for name, value in launch.env]


def torchrun_words(launch: Launch, start: list[str]) -> list[str]:
    """The arguments of a torchrun line; `start` holds the options by which the nodes meet."""
    if launch.rendezvous == SRUN:
        raise BadInput(f"with rendezvous={SRUN!r} Slurm starts every process and torchrun does not run; use {C10D!r}")
    return ["torchrun", *start, "--nproc-per-node", str(launch.nproc), *agent_words(launch), *launch.program]


def agent_words(launch: Launch) -> list[str]:
    """What torchrun's agent on each node does besides starting processes."""
    words = ["--max-restarts", str(launch.max_restarts)] if launch.max_restarts else []
    words += ["--virtual-local-rank"] if launch.own_gpus else []
    return [*words, *(logs.words_of(launch.logs) if launch.logs else [])]


def static_words(launch: Launch, node_rank: str, host: str, port: str) -> list[str]:
    """Tell each node its rank and the address of node 0."""
    return ["--nnodes", str(launch.nnodes), "--node-rank", node_rank, "--master-addr", host, "--master-port", port]


def c10d_words(launch: Launch, endpoint: str, run_id: str) -> list[str]:
    """The same words on every node."""
    nnodes = str(launch.nnodes) if launch.min_nodes is None else f"{launch.min_nodes}:{launch.nnodes}"
    return ["--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", run_id]
