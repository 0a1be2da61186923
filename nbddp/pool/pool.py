"""The pool: workers that live on between cells, and what can be done with them.

`Pool` is the face of what it holds (`pool.state`): the worker group (`pool.worker_group`), the connection that a run
has to its ranks (`pool.rank_channel`), and the runs (`pool.runs`). `ensure` makes the living workers match what a cell
asks for (start, grow, shrink, replace, nothing), and tells each change in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbddp.agent.client import AgentClient
from nbddp.capabilities.doctor.background import Probes
from nbddp.capabilities.hosts import report_query
from nbddp.capabilities.hosts.report import HostsReport
from nbddp.capabilities.scripts.logs import LogOptions
from nbddp.capabilities.slurm import host_source
from nbddp.capabilities.slurm.commands import Slurm
from nbddp.compat.working_dir import here
from nbddp.errors import BadInput, WorkerFailed
from nbddp.execution import report
from nbddp.execution.execution import Execution
from nbddp.execution.values import RankValues, check_ranks
from nbddp.launch import env_options
from nbddp.launch.machine import Node
from nbddp.launch.options import REPEAT, WARMUP, LaunchSpec
from nbddp.launch.topology import Topology, rank_words
from nbddp.output.mimebundles import face
from nbddp.output.screens import NullScreen, Screen, for_shell
from nbddp.pool import payloads, retry
from nbddp.pool.node import WorkerProcess
from nbddp.pool.rank_channel import RankChannel
from nbddp.pool.runs import shell
from nbddp.pool.state import PoolState
from nbddp.pool.worker_group import WorkerGroup
from nbddp.protocol import json_values, pickling
from nbddp.protocol.program import SHUTDOWN, Program, check_file
from nbddp.protocol.request import ARGV0, HANG_AFTER, SCRIPT, Request

if TYPE_CHECKING:  # what looks at ranks is imported by the first look: a launch from a terminal needs none of it
    from nbddp.analysis.steps import Recording
    from nbddp.capabilities.bench.result import Measured
    from nbddp.capabilities.collectives.program import Breakdown
    from nbddp.capabilities.compare.report import Report
    from nbddp.capabilities.forecast.scale import Forecast
    from nbddp.capabilities.memory.parts import RankMemory
    from nbddp.capabilities.memory.sizes import Sizes
    from nbddp.capabilities.memory.timeline import Allocations
    from nbddp.capabilities.trace.merge import Merged


class Pool:
    """A worker group, on this machine or on other hosts.

    The pool starts at once as a context manager or with `start()`, otherwise with the first run. It ends when nobody
    holds it any more.

    The arguments are the options of `%ddp start`:

    - nproc, gpus_per_proc, visible, oversubscribe, device: the workers of a node.
    - nnodes: number of nodes; (1, 4) for nodes that may come and go.
    - hosts: `nodea,user@nodeb:2222`, or a file with one host per line. ssh_config, python, setup: ssh's configuration,
      the Python interpreter there, and a shell line to run there first. via: what starts a process there, if not ssh
      (`mpiexec`, `kubectl exec -i {host} -- {command}`).
    - slurm: nodes of Slurm, such as `nbddp.Slurm(nodes=2, time="1:00:00")`; True for this process's own job.
    - interface: the network interface that connects all hosts. sync: whether to copy the working directory there.
    - cluster: a running ipyparallel cluster, as PROFILE/ID, its id or its connection file.
    - debug: `off`, `info` or `detail`; env: environment variables of the ranks.

    Raises BadInput for an impossible placement, AgentFailed for a host that does not start.
    """

    holding = PoolState
    connection = RankChannel
    trials = Probes
    plain = (
        False  # whether `call` takes JSON alone from the ranks: strangers' code runs there (`nbddp.grading.examiner`)
    )

    def __init__(
        self,
        nproc: int | str | None = None,
        *,
        nnodes: int | tuple[int, int] | None = None,
        gpus_per_proc: int | None = None,
        visible: str | None = None,
        oversubscribe: bool = False,
        device: str | None = None,
        hosts: str | None = None,
        ssh_config: str | None = None,
        python: str | None = None,
        setup: str | None = None,
        via: str | None = None,
        slurm: Slurm | bool | None = None,
        interface: str | None = None,
        sync: bool = False,
        cluster: str | None = None,
        debug: str | None = None,
        env: Mapping[str, str] | None = None,
        agent: AgentClient | None = None,
    ):
        spec = LaunchSpec(
            nproc=nproc, nnodes=None if isinstance(nnodes, tuple) else nnodes, gpus_per_proc=gpus_per_proc,
            elastic=nnodes if isinstance(nnodes, tuple) else None, visible=visible,
            oversubscribe=oversubscribe, device=device, hosts=hosts, ssh_config=ssh_config, python=python, setup=setup,
            via=via, slurm=Slurm() if slurm is True else slurm or None, interface=interface, sync=sync, cluster=cluster,
            debug=debug, env=env_options.checked(debug, env or {}),
        )  # fmt: skip
        self.measured: list[Measured] = []  # collectives that were measured on these devices
        self.life = self.holding(spec, agent, self.connection, self.trials)
        self.elsewhere, self.runs = self.life.elsewhere, self.life.runs

    # -- life ----------------------------------------------------------------------------

    def __enter__(self) -> Pool:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        return face("pool", self)

    def warm_up(self) -> None:
        """Have a warm process begin, which looks at this machine's devices and imports torch; returns at once."""
        self.life.have_agent()

    def machine(self) -> list[Node]:
        """The machines that plans are for: the pool's hosts, or this one. Empty while its devices are not known yet
        (`warm_up`)."""
        return [node.host(i) for i, node in enumerate(self.group.hosts) if node.warm]

    @property
    def spec(self) -> LaunchSpec:
        """What the pool was made for; once it runs, what it is."""
        return self.life.spec

    @property
    def group(self) -> WorkerGroup:
        return self.life.group

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
        """The last run of a program; looks at the ranks do not count."""
        return self.runs.last

    def log_of(self, rank: int) -> str:
        """The file that a rank's process writes to; empty if there is none."""
        return self.runs.ranks.log_of(rank)

    def start(self) -> list[str]:
        """Start (or match) the workers that this pool was made for. Returns what was done, as sentences."""
        return self.ensure(self.spec if not self.running else LaunchSpec())

    def ask_ahead(self) -> None:
        """A cell is coming: have the pool's connection asked already whether it works."""
        self.life.ask_ahead()

    def ensure(self, spec: LaunchSpec, progress: Callable[[str], None] = lambda text: None) -> list[str]:
        """Make the running workers match `spec`. Returns a sentence for each change that a user should know of.

        Raises BadInput, with nothing changed, if `spec` cannot be met.
        """
        old = self.topology
        notes = self.life.ensure(spec, progress)
        if old is not None and old.on_gpus != self.placed().on_gpus:
            self.measured = []
        return notes

    def sync(self, progress: Callable[[str], None] = lambda text: None) -> list[str]:
        """Copy this process's working directory to the pool's hosts (`nbddp.capabilities.hosts.sync`). Returns what was
        copied, as sentences.

        Workers that start from now on start in the copy. Raises BadInput if the pool is on this machine or the folder
        is too large, PoolNotRunning without a pool.
        """
        if not self.group.nodes:
            self.group.need_running()
        if self.group.sees_files:
            raise BadInput("the pool runs on this machine, and its workers see these files; --sync is for --hosts")
        return self.life.reaching.sync([node.agent for node in self.group.spread], progress)

    def keep(self, seconds: float | None) -> None:
        """Set the default of `--keep-warm`; None: as the warm process has it from its last owner."""
        self.life.keep(seconds)

    def stop(self) -> None:
        """End all workers, the controller and the agent, and release Slurm's nodes. Functions that programs gave to
        `atexit` are called first."""
        try:
            self.life.stop(keep=False)
        finally:
            self.elsewhere.release()

    def close(self) -> None:
        """As `stop`, except for what `--keep-warm` keeps; an agent that was given but never used ends too."""
        try:
            self.life.close()
        finally:
            self.elsewhere.leave()

    def restart(self, ranks: Sequence[int] | None = None) -> list[str]:
        """Start new processes under the same ranks. Their names and their process group are lost."""
        return [f"{rank_words(self.life.restart(ranks))} restarted; names on them are gone"]

    # -- runs -------------------------------------------------------------------------------

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
        check: bool = False,
        timings: bool = True,
        trace: bool = False,
        memory: bool = False,
        screen: Screen | None = None,
    ) -> RankValues:
        """Run source on the ranks. Returns the values of its last expression if `want_value`.

        The other arguments are the options of `%%ddp` (see `nbddp.protocol.request.Request`): `hang_after`, `timeout`
        and `shutdown_timeout` are in seconds, `ranks` and `show` mean all ranks if None. Raises a RunFailed:
        WorkerFailed, RunStopped, RunHung or RunTimedOut. Ranks that were not replaced keep their state.
        """
        request = Request(
            code=code, ranks=ranks, show=show, hang_after=hang_after, timeout=timeout,
            shutdown_timeout=shutdown_timeout, max_restarts=max_restarts, cell=cell, argv=tuple(argv), argv0=argv0,
            want_value=want_value, check=check, timings=timings, trace=trace, memory=memory,
        )  # fmt: skip
        return self.carry_out(request, screen)

    def carry_out(self, request: Request, screen: Screen | None = None) -> RankValues:
        """`run_cell` for one `Request`."""
        run = retry.carry_out(self.life, request, screen or for_shell(shell()))
        return payloads.answered(run.ended) if request.want_value else RankValues({})

    def run_script(
        self,
        script: str,
        *words: str,
        module: bool = False,
        keep: bool = False,
        logs: LogOptions | None = None,
        max_restarts: int = 0,
        hang_after: float | None = HANG_AFTER,
        timeout: float | None = None,
        screen: Screen | None = None,
    ) -> None:
        """Run a script (or a module) on every rank as torchrun does, with `words` as its arguments.

        The ranks are new processes that end with the script; keep: use the existing ones, and keep the script's names
        there. Other arguments and exceptions are as for `run_cell`.
        """
        program = Program(script, module, keep)
        if not self.spec.elsewhere:
            check_file(program, here())
        self.ensure(replace(LaunchSpec() if self.running else self.spec, fresh=not keep))
        request = Request(
            op=SCRIPT, program=program, argv=words, logs=logs, max_restarts=max_restarts, hang_after=hang_after,
            timeout=timeout,
        )  # fmt: skip
        self.carry_out(request, screen)

    def scale(self, nodes: int, progress: Callable[[str], None] = lambda text: None) -> list[str]:
        """Change the number of nodes. Returns what was done, as sentences. Raises BadInput if the pool was started
        without `--nnodes MIN:MAX`, or if `nodes` is outside those bounds."""
        return self.life.reaching.scale(self.spec, nodes, progress)

    def attach(self, job: int | None = None, progress: Callable[[str], None] = lambda text: None) -> list[str]:
        """Start workers on the Slurm nodes that an earlier kernel kept (`--keep-alive`). Returns what was done, as
        sentences.

        job: needed if several jobs are kept. Raises BadInput if none is kept, or if this pool is running.
        """
        if self.running:
            raise BadInput(
                f"this pool runs {host_source.on(self.spec)}; %ddp stop ends it, then %ddp attach uses the job"
            )
        kept = host_source.to_attach(job)
        spec = host_source.restored(kept)
        self.elsewhere.hold(kept.take())
        return self.ensure(spec, progress)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> RankValues:
        """Call `function(*args, **kwargs)` on every rank. Returns every rank's value.

        Function and arguments are sent by cloudpickle. Raises the first failing rank's own exception, with the
        WorkerFailed that holds the remote traceback as its cause; or the WorkerFailed itself if the exception cannot be
        sent.
        """
        try:
            return self.call(function, args, kwargs)
        except WorkerFailed as failed:
            assert self.last_run is not None
            error = payloads.carried(failed, self.last_run.ended)
            if error is None:
                raise
            if hasattr(error, "add_note"):  # since Python 3.11
                error.add_note(report.note(failed))
            failed.__cause__ = error.__cause__  # its own goes on to be told
            raise error from failed

    def call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        ranks: Sequence[int] | None = None,
        screen: Screen | None = None,
        hang_after: float | None = HANG_AFTER,
        timeout: float | None = None,
        shutdown_timeout: float = SHUTDOWN,
    ) -> RankValues:
        """As `run`, on some ranks and with limits in seconds, as in `run_cell`.

        Names on the ranks are kept. Raises BadInput if something cannot be sent, or a RunFailed: WorkerFailed,
        RunStopped, RunHung or RunTimedOut. A rank whose function calls `sys.exit()` has no value.
        """
        screen = screen or for_shell(shell())
        for note in [] if self.running else self.start():
            screen.say(note)
        chosen = check_ranks(ranks, self.world_size, "ranks")
        limits = {"hang_after": hang_after, "timeout": timeout, "shutdown_timeout": shutdown_timeout}
        request = payloads.call(function, args, kwargs, chosen, self.plain, **limits)
        run = self.runs.run(request, screen)
        return payloads.answered(run.ended, json_values.read if self.plain else pickling.unpack)

    def push(self, names: Mapping[str, Any], ranks: Sequence[int] | None = None) -> None:
        """Copy values to names on the ranks. Raises BadInput if one cannot be pickled; then none is set."""
        self.group.need_running()
        chosen = check_ranks(ranks, self.world_size, "--ranks")
        buffers = [payloads.packed(value, name) for name, value in names.items()]
        self.answers("push", chosen, buffers, names=list(names))

    def pull(self, names: Sequence[str], ranks: Sequence[int] | None = None) -> dict[str, RankValues]:
        """Fetch names from the ranks. Raises BadInput if a name is not defined on every rank."""
        self.group.need_running()
        chosen = check_ranks(ranks, self.world_size, "--ranks")
        return payloads.pulled(names, self.answers("pull", chosen, names=list(names)))

    # -- what the ranks have recorded, hold and can do (`nbddp.capabilities.timings.command`) ---------------------

    def timings(self) -> Recording:
        """DDP steps of the last run that recorded any; `origin` and `missing` say whether that is the last cell, and
        whether all ranks recorded it. Raises BadInput if no run has recorded a step."""
        from nbddp.capabilities.timings import command

        return command.timings(self)

    def collectives(self) -> Breakdown:
        """Who arrived last at the collectives of the last run that called some, and how each rank spent that run: for
        any program, without a trace. Raises BadInput if no run has called a collective."""
        from nbddp.capabilities.timings import command

        return command.collectives(self)

    def trace(self) -> Merged:
        """The merged traces of the last cell that ran with `trace`. Raises BadInput if there are none.

        Ranks that have been replaced since are listed in `missing`.
        """
        from nbddp.capabilities.timings import command

        return command.trace(self)

    def memory(self) -> list[RankMemory]:
        """What each rank's memory holds (`nbddp.capabilities.memory.on_rank`). Raises BadInput if no rank has a
        model."""
        from nbddp.capabilities.timings import command

        return command.memory(self)

    def sizes(self, *names: str, ranks: Sequence[int] | None = None) -> Sizes:
        """What names hold on each rank, in bytes: what is shared, and what is sharded. Raises BadInput for a name that
        no rank has or that holds no tensor."""
        from nbddp.capabilities.timings import command

        return command.sizes(self, names, ranks)

    def allocations(self, step: int | None = None, whole: bool = False) -> Allocations:
        """What the ranks allocated over a step of the last cell that was run with `memory`: step `step`, or the one
        with the highest peak, or the `whole` cell. Raises BadInput if there is none."""
        from nbddp.capabilities.timings import command

        return command.allocations(self, step, whole)

    def compare(self, *names: str, ranks: Sequence[int] | None = None) -> Report:
        """Compare the ranks' copies of names: tensors, modules, optimizers, numbers, or containers of them.

        Ranks send digests; for tensors that differ also the bytes of one rank, up to 256 MiB in all
        (`nbddp.capabilities.compare.command`). No process group is needed or used. Raises BadInput for a name that no
        rank has.
        """
        from nbddp.capabilities.timings import command

        return command.compare(self, names, ranks)

    def bench(
        self,
        collective: str | Sequence[str] = "all_reduce",
        sizes: Sequence[int] | None = None,
        *,
        repeat: int = REPEAT,
        warmup: int = WARMUP,
        progress: Callable[[str], None] = lambda text: None,
    ) -> list[Measured]:
        """Measure collectives of `sizes` bytes (default: 1 KiB to 64 MiB), as nccl-tests does
        (`nbddp.capabilities.bench.on_rank`).

        The ranks meet in a process group of nbddp's own: the program's groups count none of it. progress: called with a
        line before each size. `measured` keeps the results. Raises BadInput for impossible sizes or counts.
        """
        from nbddp.capabilities.timings import command

        names = [collective] if isinstance(collective, str) else list(collective)
        gpus = command.own_gpus(self.placed(), self.group.visible)
        found = command.bench(self, gpus, names, sizes, repeat, warmup, progress)
        new = {(m.collective, m.ranks, m.bytes) for m in found}
        self.measured = [m for m in self.measured if (m.collective, m.ranks, m.bytes) not in new] + found
        return found

    def forecast(self, **asked: Any) -> Forecast:
        """Predict the last recorded step on more nodes, by the α–β model of `nbddp.capabilities.forecast.cost`.

        - inter_node, intra_node: bandwidth, as `25GB/s` or bytes per second; intra_node defaults to the measured one.
        - latency: between nodes, as `10us` or seconds.
        - ranks_per_node, nodes (default 1024), strong (default False), algorithm (`ring`, `tree` or `binomial`),
          progress.

        Links that are not given are taken as measured; all-reduces are measured now if there are no measurements on
        this number of ranks. Raises BadInput if no step has been recorded, or for impossible arguments.
        """
        from nbddp.capabilities.forecast.command import foresee

        return foresee(self, **asked)

    def answers(
        self, op: str, ranks: Sequence[int] | None = None, buffers: Sequence[bytes] = (), **fields: Any
    ) -> dict[int, list[Any]]:
        """Have ranks (all, if None) carry out `op` in a run that shows nothing. Returns rank → buffers of its answer.

        Raises as `run_cell` does.
        """
        self.group.need_running()
        run = self.runs.run(Request(op, fields, buffers, ranks=ranks), NullScreen())
        return {r: e.buffers for r, e in sorted(run.ended.items())}

    def newest(self) -> tuple[int, int] | None:
        """The number of the last cell's run, and the n of its In[n]; None if no cell has run."""
        return self.runs.last_cell

    def troubles(self) -> str:
        """Problems of the connection to the workers so far, all repaired; or empty."""
        return "" if self.group.wire is None else str(self.group.wire.connection.troubles())

    def shortcomings(self) -> list[str]:
        """What does not work here, one line for the operating system and for each library, and who can reach the ranks'
        store because it cannot be guarded."""
        return self.life.shortcomings()

    def checkup(self, progress: Callable[[str], None] = lambda text: None) -> HostsReport | None:
        """Findings about the pool's hosts (`%ddp doctor`); None for a pool on this machine, or without a pool."""
        return report_query.examine(self.group, progress)

    def ask(self, rank: int, content: dict[str, Any], timeout: float = 1.0) -> Any:
        """Ask a rank's control thread (`complete`, `inspect`, `where`); None without an answer."""
        if not self.running or rank not in self.workers:
            return None
        return self.group.wire.ask(rank, content, timeout)

    def footing(self) -> dict[str, Any]:
        """The pool's present state, to report later what has changed (`nbddp.pool.snapshot`)."""
        return self.life.footing()

    # -- what is shown -------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The agent's answer to `status`: the pool's description and its processes."""
        return self.life.status()
