"""The pool: workers that stay alive between cells, and the operations on them.

`WorkerPool` holds its parts (`pool.state`): the worker group (`pool.worker_group`), the connection of a run to its
ranks, and the runs (`pool.runs`). `ensure` makes the living workers match what a cell
asks for (start, grow, shrink, replace, nothing), and tells each change in one line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from nbddp.agent.client import AgentClient
from nbddp.execution import values
from nbddp.execution.execution import Execution
from nbddp.execution.values import NO_VALUES, RankValues
from nbddp.launch.machine import Node
from nbddp.launch.options import LaunchSpec
from nbddp.launch.topology import Topology, rank_words
from nbddp.output.screens import NullScreen, Screen, for_shell
from nbddp.pool.change import PoolSnapshot
from nbddp.pool.node import WorkerProcess
from nbddp.pool.runs import RankChannel, shell
from nbddp.pool.state import PoolState
from nbddp.pool.worker_group import WorkerGroup
from nbddp.protocol.capability import Target, given, pool_methods, with_options
from nbddp.protocol.pool_parts import PoolParts, call_all, lines
from nbddp.protocol.request import HANG_AFTER, SHUTDOWN, Request
from nbddp.protocol.run_spec import ARGV0, Question

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from nbddp.capabilities import PoolArguments, PoolMethods, RunArguments
else:
    PoolMethods = pool_methods()


P = ParamSpec("P")
T = TypeVar("T")


class WorkerPool(PoolMethods):
    """A worker group, on this machine or on other hosts. The magics have one, and `nbddp.Pool` is a face of one.

    The pool starts at once as a context manager or with `start()`, otherwise with the first run. It ends when nobody
    holds it any more.

    The arguments are those of `nbddp.Pool` (`nbddp.public`); agent: the one to take, else a new one.

    Raises BadInput for an impossible placement, AgentFailed for a host that does not start.

    Capabilities add methods (`nbddp.capabilities`): what the ranks have recorded, hold and can do.
    """

    holding = PoolState
    connection = RankChannel
    writes: Target = ""  # the module by which answers of `call` are written and read, where pickles are not trusted

    @with_options("pool")
    def __init__(
        self,
        nproc: int | str | None = None,
        *,
        nnodes: int | tuple[int, int] | None = None,
        gpus_per_proc: int | None = None,
        visible: str | None = None,
        oversubscribe: bool = False,
        device: str | None = None,
        agent: AgentClient | None = None,
        **options: Unpack[PoolArguments],
    ):
        spec = LaunchSpec(
            nproc=nproc, nnodes=None if isinstance(nnodes, tuple) else nnodes, gpus_per_proc=gpus_per_proc,
            elastic=nnodes if isinstance(nnodes, tuple) else None, visible=visible,
            oversubscribe=oversubscribe, device=device, **given("Pool", "pool", options),
        )  # fmt: skip
        self.measured: list[Any] = []  # collectives that were measured on these devices
        self.life = self.holding(spec, agent, self.connection)
        self.runs = self.life.runs

    # -- life ----------------------------------------------------------------------------

    def __enter__(self) -> WorkerPool:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def warm_up(self) -> None:
        """Have a warm process begin, which looks at this machine's devices and imports torch; returns at once."""
        self.life.have_agent()

    def machine(self) -> list[Node]:
        """The machines that there are: the pool's hosts, or this one. Empty while its devices are not known yet
        (`warm_up`). `parts.placed_on` has those that a plan is for."""
        return [node.host(i) for i, node in enumerate(self.group.hosts) if node.warm]

    @property
    def spec(self) -> LaunchSpec:
        """The requested layout before the start, the actual layout afterwards."""
        return self.life.spec

    @property
    def group(self) -> WorkerGroup:
        return self.life.group

    @property
    def parts(self) -> PoolParts:
        return self.life.parts

    @property
    def agent(self) -> AgentClient | None:
        """The agent of the node where the controller runs."""
        return self.group.agent

    @property
    def workers(self) -> dict[int, WorkerProcess]:
        """Rank → its process, on all nodes."""
        return self.group.workers

    @property
    def running(self) -> bool:
        return self.group.running

    @property
    def world_size(self) -> int:
        return self.group.world_size

    @property
    def topology(self) -> Topology | None:
        """Which rank runs where; None without workers."""
        return self.group.topology

    def placed(self) -> Topology:
        """The topology of the running pool. Raises PoolNotRunning."""
        return self.group.placed()

    @property
    def current(self) -> Execution | None:
        """The run in progress."""
        return self.runs.ranks.current

    @property
    def last_run(self) -> Execution | None:
        """The last run of a program; samples of the ranks do not count."""
        return self.runs.last

    def log_of(self, rank: int) -> str:
        """The file that a rank's process writes to; empty if there is none."""
        return self.runs.ranks.log_of(rank)

    def start(self) -> list[str]:
        """Start (or match) the workers that this pool was made for. Returns what was done, as sentences."""
        return self.ensure(self.spec if not self.running else LaunchSpec())

    def ask_ahead(self) -> None:
        """Have the connection asked already whether it works."""
        if self.group.running:
            self.group.wire.connection.ask()

    def ensure(self, spec: LaunchSpec, progress: Callable[[str], None] = lambda text: None) -> list[str]:
        """Make the running workers match `spec`. Returns a sentence for each change that a user should know of.

        Raises BadInput, with nothing changed, if `spec` cannot be met.
        """
        self.ask_ahead()
        here = None
        with suppress(FileNotFoundError):  # where the folder is gone
            here = os.getcwd()
        if self.life.met == (spec, here) and self.group.whole:  # nothing has happened since it was met
            return lines(self.parts.notes) if self.parts.notes else []
        old = self.topology
        notes = self.life.ensure(spec, progress)
        if old is not None and old is not self.topology and old.on_gpus != self.placed().on_gpus:
            self.measured = []
        return notes

    def keep(self, seconds: float | None) -> None:
        """Set the default for `--keep-warm`. None: use the setting of the warm process's previous owner."""
        self.life.keep(seconds)

    def stop(self) -> None:
        """End all workers, the controller and the agent, and release Slurm's nodes. Functions that programs gave to
        `atexit` are called first."""
        try:
            self.life.stop(keep=False)
        finally:
            call_all(self.parts.released)

    def close(self) -> None:
        """As `stop`, except for what `--keep-warm` keeps; an agent that was given but never used ends too."""
        try:
            self.life.close()
        finally:
            call_all(self.parts.left)

    def restart(self, ranks: Sequence[int] | None = None) -> list[str]:
        """Start new processes under the same ranks. Their names and their process group are lost."""
        return [f"{rank_words(self.life.restart(ranks))} restarted; their variables are lost"]

    # -- runs -------------------------------------------------------------------------------

    @with_options("run")
    def run_cell(
        self,
        code: str,
        *,
        ranks: Sequence[int] | None = None,
        show: Sequence[int] | None = None,
        hang_after: float | None = HANG_AFTER,
        timeout: float | None = None,
        shutdown_timeout: float = SHUTDOWN,
        max_restarts: int = 0,
        cell: int = 1,
        argv: Sequence[str] = (),
        argv0: str = ARGV0,
        want_value: bool = False,
        screen: Screen | None = None,
        **options: Unpack[RunArguments],
    ) -> RankValues[Any]:
        """Run source on the ranks. Returns the values of its last expression if `want_value`.

        The other arguments are the options of `%%ddp` (see `nbddp.protocol.request.Request`): `hang_after`, `timeout`
        and `shutdown_timeout` are in seconds, `ranks` and `show` mean all ranks if None. Raises a RunFailed:
        WorkerFailed, RunStopped, RunHung or RunTimedOut. Ranks that were not replaced keep their state.
        """
        request = Request(
            code=code, ranks=ranks, show=show, hang_after=hang_after, timeout=timeout,
            shutdown_timeout=shutdown_timeout, max_restarts=max_restarts, cell=cell, argv=tuple(argv), argv0=argv0,
            want_value=want_value, **given("run_cell", "run", options),
        )  # fmt: skip
        return self.carry_out(request, screen)

    def carry_out(self, request: Request, screen: Screen | None = None) -> RankValues[Any]:
        """`run_cell` for one `Request`."""
        run = self.runs.carry_out(request, screen or for_shell(shell()))
        return values.answered(run.ended) if request.want_value else NO_VALUES

    def answers(
        self,
        op: str,
        ranks: Sequence[int] | None = None,
        buffers: Sequence[bytes] = (),
        *,
        meets: bool = True,
        **fields: Any,
    ) -> dict[int, list[Any]]:
        """Have ranks (all, if None) carry out `op` in a run that shows nothing. Returns rank → buffers of its answer.

        meets: whether they may meet at the pool's store. Raises as `run_cell` does.
        """
        self.group.need_running()
        run = self.runs.run(Request(op, fields, buffers, ranks=ranks, meets=meets), NullScreen())
        return {r: e.buffers for r, e in sorted(run.ended.items())}

    def newest(self) -> tuple[int, int] | None:
        """The number of the last cell's run, and the n of its In[n]; None if no cell has run."""
        return self.runs.last_cell

    def troubles(self) -> str:
        """Problems of the connection to the workers so far, all repaired; or empty."""
        return "" if self.group.wire is None else str(self.group.wire.connection.troubles())

    def shortcomings(self) -> list[str]:
        """Limitations on this machine: one line for the operating system and for each library, and one if other users
        can reach the ranks' store."""
        return self.life.shortcomings()

    def ask(self, rank: int, question: Question, timeout: float = 1.0) -> Any:
        """Ask a rank's control thread (`complete`, `inspect`, `where`); None without an answer."""
        if not self.running or rank not in self.workers:
            return None
        return self.group.wire.ask(rank, question, timeout)

    def snapshot(self) -> PoolSnapshot:
        """What there is now, to say later what has changed."""
        group = self.group
        living = {r: w.pid for r, w in group.workers.items() if w.lives}
        return PoolSnapshot(group.running, living, group.world_size, group.broken)

    def marks(self, name: str) -> tuple[bool, tuple[str, ...]]:
        """Whether GPUs are simulated, and what is said under what the command `name` shows."""
        said = tuple(filter(None, [say(name) for say in self.parts.figure_notes]))
        return self.placed().simulates_gpus, said
