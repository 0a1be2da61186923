"""The pool: workers that live on between cells, and what can be done with them.

`Pool` puts the parts together: an agent that starts processes, an ipyparallel cluster that
carries the messages, a topology that says who is where, and runs. `ensure` makes the living
workers match what a cell asks for (start, grow, shrink, replace, nothing), and tells
each change in one line. Engine id == rank, always.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
import uuid as uuids
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbddp import environment, system
from nbddp.agent.handle import START_TIMEOUT, Agent
from nbddp.agent.hardware import loopback_name
from nbddp.capacity import refuse_crowd
from nbddp.draw.compared import Report
from nbddp.errors import BadInput, PoolError, PoolNotRunning, RunHung, WorkerFailed
from nbddp.options import LaunchSpec
from nbddp.pool import looks, requests, stop
from nbddp.pool.bench import REPEAT, WARMUP
from nbddp.pool.change import Layout, plan_change
from nbddp.pool.node import Living, Node, weakly
from nbddp.pool.outlook import foresee
from nbddp.pool.stop import uninterrupted
from nbddp.pool.stores import RendezvousStores
from nbddp.pool.warmup import Trials
from nbddp.run import logfile, outcome, report
from nbddp.run.request import ARGV0, CALL, CELL, HANG_AFTER, Request
from nbddp.run.screen import Late, Screen, Silent, for_shell
from nbddp.run.spmd import Run
from nbddp.topology import Topology, counted, rank_words
from nbddp.trace.measured import Measured
from nbddp.trace.memory import RankMemory
from nbddp.trace.merge import Merged
from nbddp.trace.scale import Forecast
from nbddp.trace.steps import Recording
from nbddp.values import RankValues, check_ranks
from nbddp.worker import answers, values

HOST, MASTER = "127.0.0.1", "localhost"
END_GROUP_SECONDS = 10.0  # a rank that has not ended its process group by then will never
EXIT_SECONDS = 5.0  # that functions of `atexit` have before their worker is ended
REGISTER_TIMEOUT = 60.0
AT_ONCE = 16  # workers started between two moments at which Stop is heard


class Pool:
    """A worker group under one agent.

    As a context manager or with `start()` it starts at once; otherwise the first run starts it. One that nobody holds
    any more ends.
    Raises BadInput for a placement that cannot be.
    """

    plain = False  # whether `call` takes JSON alone from the ranks: strangers' code runs there (`nbddp.teach.examiner`)

    def __init__(
        self,
        nproc: int | str | None = None,
        *,
        nnodes: int | None = None,
        gpus_per_proc: int | None = None,
        visible: str | None = None,
        oversubscribe: bool = False,
        device: str | None = None,
        agent: Agent | None = None,
    ):
        self.spec = LaunchSpec(
            nproc=nproc, nnodes=nnodes, gpus_per_proc=gpus_per_proc, visible=visible,
            oversubscribe=oversubscribe, device=device,
        )  # fmt: skip
        self._given_agent = agent
        self.nodes: list[Node] = []
        self.topology: Topology | None = None
        self.visible = "all"
        self.current: Run | None = None
        self.last_run: Run | None = None
        self.last_cell: tuple[int, int] | None = None  # number of the run, n of the In[n]
        self.measured: list[Measured] = []  # collectives that were measured on these devices
        self._cluster: Any = None
        self._wire: Any = None
        self._renewed = 0  # how often the client had been replaced when the last run began
        self._runs = itertools.count(1)
        self._group_broken = False
        self._stores: RendezvousStores | None = None
        self._run_id = str(uuids.uuid4())
        self._files: list[str] = []
        self._trials = Trials()
        self._remains = Remains()
        weakref.finalize(self, self._remains.end_elsewhere).atexit = False

    # -- life ----------------------------------------------------------------------------

    def __enter__(self) -> Pool:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def agent(self) -> Agent | None:
        """The agent of the node where the controller runs."""
        return self.nodes[0].agent if self.nodes else None

    @property
    def workers(self) -> dict[int, Living]:
        """Rank → its process, on all nodes."""
        return {r: w for node in self.nodes for r, w in node.workers.items()}

    @property
    def alive(self) -> bool:
        """Whether there are nodes, and all live."""
        return bool(self.nodes) and all(node.alive for node in self.nodes)

    @property
    def running(self) -> bool:
        return self._cluster is not None and self.alive

    @property
    def world_size(self) -> int:
        return self.topology.world_size if self.topology else 0

    def start(self) -> list[str]:
        """Start (or match) the workers this pool was made for; what was done, in words."""
        return self.ensure(self.spec if not self.running else LaunchSpec())

    def ensure(self, spec: LaunchSpec, progress: Callable[[str], None] = lambda text: None) -> list[str]:
        """Make the living workers match `spec`; a line for every change a user should know of.

        Raises BadInput, with nothing changed, if the spec cannot be met.
        """
        warm = self._warm_agent(progress)
        merged, visible = self._merge(spec)
        topology = self._plan(merged, warm)
        self._refuse_crowd(topology, merged.oversubscribe)
        check_ranks(spec.ranks, topology.world_size, "--ranks")
        check_ranks(spec.show, topology.world_size, "--show")
        if not self.running:
            with uninterrupted():
                self._start_cluster(progress)
        notes = self._match(topology, visible, fresh=spec.fresh, progress=progress)
        if spec.gpus_per_proc and not spec.visible:
            notes += topology.device_notes(visible)
        if self.topology and any(w.devices for w in topology.workers) != any(w.devices for w in self.topology.workers):
            self.measured = []
        if topology != self.topology:
            self._group_broken = self._group_broken or bool(self.topology)
        self.topology, self.visible, self.spec = topology, visible, replace(merged, visible=visible)
        self._describe()
        assert self.agent is not None
        self._trials.begin(self.agent)
        return notes

    def _warm_agent(self, progress: Callable[[str], None]) -> dict[str, Any]:
        if self.nodes and not self.alive:
            self._forget_all()
        if not self.nodes:
            given = self._given_agent if self._given_agent and self._given_agent.alive else None
            self._given_agent = None
            if given is not None and environment.needs_new_agent(given.env, os.environ):
                given.close()
                given = None
            agent = given or Agent.launch(os.environ)
            self.nodes = [Node(agent, weakly(self._worker_died), weakly(self._trials_ended))]
            self._remains.take(agent)
        if not self.nodes[0].warm:
            progress("importing torch in the warm process, once")
        return self.nodes[0].agent.wait_warm()

    def _merge(self, spec: LaunchSpec) -> tuple[LaunchSpec, str]:
        """What was not said stays as the standing pool has it (nnodes only if nproc was not said either)."""
        old = self.spec if self.topology is not None else LaunchSpec()
        keep_shape = spec.nproc is None and spec.nnodes is None
        merged = replace(
            spec,
            nproc=spec.nproc if spec.nproc is not None else old.nproc if spec.nnodes is None else None,
            nnodes=spec.nnodes or (old.nnodes if keep_shape else None),
            gpus_per_proc=spec.gpus_per_proc or old.gpus_per_proc,
            oversubscribe=spec.oversubscribe or old.oversubscribe,
            device=spec.device or old.device,
        )
        visible = spec.visible or (old.visible if self.topology else None)
        return merged, visible or ("own" if merged.oversubscribe else "all")

    def _plan(self, spec: LaunchSpec, warm: Mapping[str, Any]) -> Topology:
        return Topology.plan(
            [requests.host(warm)],
            nproc=spec.nproc,
            nnodes=spec.nnodes or 1,
            gpus_per_proc=spec.gpus_per_proc,
            oversubscribe=spec.oversubscribe,
            device=spec.device or "auto",
        )

    def _refuse_crowd(self, topology: Topology, insists: bool) -> None:
        now = len(self.workers)
        if topology.world_size > now and not insists:
            refuse_crowd(now, topology.world_size, topology.nnodes, self.nodes[0].limits())

    def _start_cluster(self, progress: Callable[[str], None]) -> None:
        progress("starting the controller")
        from ipyparallel import Cluster

        from nbddp.pool.launcher import AgentControllerLauncher, AgentEngineSetLauncher
        from nbddp.pool.wire import Wire

        assert self.agent is not None
        cluster = Cluster(
            cluster_id=f"nbddp-{self.agent.pool_id}",
            controller_launcher_class=AgentControllerLauncher,
            engine_launcher_class=AgentEngineSetLauncher,
            shutdown_atexit=False,
            log_level=40,
        )
        self._stores = RendezvousStores(self.agent)
        cluster.start_controller_sync(agent=self.agent)
        self._cluster = cluster
        self._files = [cluster.cluster_file, *cluster.controller.connection_files.values()]
        self._describe()
        self._wire = self._remains.wire = Wire(cluster.connect_client_sync)

    def _describe(self) -> None:
        """Tell the agent what `status` shows, if it has changed."""
        placed = self.topology
        subject = (placed, os.getcwd(), len(self._files))
        for node in self.nodes:
            node.describe(subject, lambda: requests.description(placed), self._files)

    def stop(self) -> None:
        """End all workers, the controller and the agent. What programs gave to `atexit` is called first."""
        try:
            self._call_exits(sorted(self.workers))
        finally:
            with uninterrupted():
                self._forget_all()

    def close(self) -> None:
        """As `stop`, and an agent that was given but never used ends too."""
        if self.agent is None and self._given_agent is not None:
            self._given_agent.close()
        self.stop()

    def _forget_all(self) -> None:
        self._remains.end()
        self._cluster = self._wire = self.topology = self._stores = None
        self.nodes, self._files, self._group_broken = [], [], False
        self._trials = Trials()

    def restart(self, ranks: Sequence[int] | None = None) -> list[str]:
        """New processes under the same ranks. Names on them are gone, and their process group."""
        self._need_running()
        chosen = check_ranks(ranks, self.world_size, "--ranks")
        self._call_exits(chosen)
        self._end(chosen)
        self._match(self.placed(), self.visible, quiet=True)
        return [f"{rank_words(chosen)} restarted; names on them are gone"]

    def _renew_all(self) -> None:
        """New processes under all ranks, as torchrun has them after a failure."""
        self._warm_agent(lambda text: None)
        self._need_running()
        self._end(sorted(self.workers))
        self._group_broken = False
        self._match(self.placed(), self.visible, quiet=True)

    # -- workers ---------------------------------------------------------------------------

    def _match(
        self,
        topology: Topology,
        visible: str,
        *,
        fresh: bool = False,
        quiet: bool = False,
        progress: Callable[[str], None] = lambda text: None,
    ) -> list[str]:
        """Start and end processes until they are those of `topology`; what a user should know, in words."""
        if any(not w.registered and w.lives for w in self.workers.values()):
            self._wait_registered()
        old = None if self.topology is None else Layout(self.topology, self.visible)
        living = {r: w.lives for r, w in self.workers.items()}
        change = plan_change(old, Layout(topology, visible), living, fresh)
        self._call_exits(change.end)
        self._end(change.end)
        if change.start:
            progress(f"starting {counted(len(change.start), 'worker')}")
            self._start_workers(topology, visible, change.start)
        return [] if quiet else [*change.notes]

    def _start_workers(self, topology: Topology, visible: str, ranks: Sequence[int]) -> None:
        assert self.agent is not None
        starts = [
            requests.worker(
                topology.workers[r],
                topology,
                env=os.environ,
                visible=visible,
                home=self.agent.home,
                profile_dir=self._cluster.profile_dir,
                url_file=self._cluster.controller.connection_files["engine"],
            )
            for r in ranks
        ]
        for i in range(0, len(starts), AT_ONCE):
            with uninterrupted():
                self.nodes[0].start(starts[i : i + AT_ONCE], self._launch)
        self._wait_registered()

    def _wait_registered(self) -> None:
        """Wait until every started worker can be reached, also those whose start was left by a Stop.

        A worker that has begun to register is not ended before it has: the hub would hold its rank for seconds.
        """
        new = {r: w.uuid for r, w in self.workers.items() if not w.registered and w.lives}
        imports = any(node.warm.get("spawn") for node in self.nodes)  # each worker by itself, perhaps from a slow disk
        self._wire.wait_for(new, self._check_starting, START_TIMEOUT if imports else REGISTER_TIMEOUT)
        for rank, worker in self.workers.items():
            if rank in new:
                worker.registered = True
        self._note(list(new), "idle")

    def _launch(self, starts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Start processes through the cluster's engine set, which `ipcluster list` counts."""
        cluster = self._cluster
        if cluster.engines:
            (engines,) = cluster.engines.values()
            answers: list[dict[str, Any]] = engines.start_workers(starts)
        else:
            cluster.start_engines_sync(len(starts), engine_set_id="workers", agent=self.agent, starts=starts)
            answers = cluster.engines["workers"].started
        cluster.update_cluster_file()
        return answers

    def _check_starting(self) -> None:
        workers = self.workers.values()
        if any(w.exit is not None and w.exit.get("pool_ended") for w in workers):
            raise PoolNotRunning("the pool's controller has ended; run the cell again to start a new pool")
        for worker in workers:
            if worker.exit is not None and not worker.registered:
                raise PoolError(
                    f"rank {worker.rank} ended while it started (exit code {worker.exit['code']}): "
                    f"{self._last_words(worker.rank) or 'it left no message'}"
                )
        if not self.alive:
            raise PoolNotRunning("the node agent has ended; run the cell again to start a new pool")

    def _call_exits(self, ranks: Sequence[int]) -> None:
        """Have ranks that are about to be ended call what their programs have registered with `atexit`; what that
        prints is shown. A rank at work, and one that does not come back, is ended without."""
        workers = self.workers
        waiting = [r for r in ranks if workers[r].exits and workers[r].lives]
        if waiting and self.current is None and self.alive:
            self._have_done("exits", waiting, EXIT_SECONDS, Late(for_shell(_shell())))

    def _have_done(self, op: str, ranks: Sequence[int], timeout: float, screen: Screen) -> Run:
        """A run of the pool's own, without a rendezvous; a rank that is not through in time is replaced."""
        number = next(self._runs)
        request = Request(op, ranks=ranks, hang_after=None, timeout=timeout)
        specs = {r: {**request.wire(), "run": number} for r in ranks}
        run = Run(
            weakref.proxy(self), specs, request, number=number, logs=self.nodes[0].run_folder(number), screen=screen
        )
        self.current = run
        try:
            run.execute()
        finally:
            self.current = None
        return run

    def _end(self, ranks: Sequence[int]) -> None:
        """End these ranks' processes and have hub and client forget them."""
        self._group_broken = self._group_broken or bool(ranks)  # whatever Stop leaves undone below
        self._kill_now(ranks)
        with uninterrupted():
            for rank in ranks:
                node = self._node_with(rank)
                self._wire.forget(rank, node.workers.pop(rank).uuid)

    def _kill_now(self, ranks: Sequence[int]) -> None:
        """Kill processes, and wait until they have ended."""
        self.kill(ranks)
        workers = self.workers
        for rank in ranks:
            _until(lambda w=workers[rank]: not w.lives, 10.0, f"rank {rank} did not end")  # type: ignore[misc]

    def _node_with(self, rank: int) -> Node:
        """The node on which a rank's process is."""
        return next(node for node in self.nodes if rank in node.workers)

    def _worker_died(self, rank: int, event: dict[str, Any]) -> None:
        """In an agent's reader thread."""
        run = self.current
        if run is not None:
            run.worker_exited(rank, event)

    def _trials_ended(self, event: dict[str, Any]) -> None:
        self._trials.heard(event)

    def _last_words(self, rank: int) -> str:
        return self._node_with(rank).last_words(rank)

    def _need_running(self) -> None:
        if not self.running or self.topology is None:
            raise PoolNotRunning("there is no pool; %ddp start --nproc 4 or a %%ddp cell starts one")

    def placed(self) -> Topology:
        """The living pool's topology. Raises PoolNotRunning."""
        if self.topology is None:
            raise PoolNotRunning("there is no pool; %ddp start --nproc 4 or a %%ddp cell starts one")
        return self.topology

    # -- what a run needs of its workers -----------------------------------------------------

    def send(self, rank: int, spec: dict[str, Any], hear: Any, code: str, buffers: list[bytes]) -> None:
        gone = self._node_with(rank).workers[rank].exit
        if gone is not None:
            if self.current is not None:
                self.current.worker_exited(rank, gone)
            return
        self._wire.send(rank, spec, hear, code=code, buffers=buffers)

    def interrupt(self, ranks: Sequence[int]) -> None:
        import signal

        self._signal(ranks, signal.SIGINT)

    def kill(self, ranks: Sequence[int]) -> None:
        import signal

        self._signal(ranks, signal.SIGKILL)

    def _signal(self, ranks: Sequence[int], number: int) -> None:
        for node in self.nodes:
            node.signal(ranks, number)

    def look(self, ranks: Sequence[int], question: dict[str, Any], hear: Callable[[int, Any], None]) -> None:
        """Ask these ranks something while they work; `hear(rank, answer)` for each that answers."""
        workers = self.workers
        self._wire.ask_all([r for r in ranks if workers[r].lives], question, hear)

    def repeat(self, ranks: Sequence[int], run: int) -> None:
        """Have ranks that have ended this run say so once more, because it did not arrive."""
        for rank in ranks:
            self._wire.listen_again(rank)
        lost, current = self._wire.connection.renewed > self._renewed, self.current

        def hear(rank: int, answer: Any) -> None:
            if answer is False and lost and current is not None:  # it has not seen the run
                current.never_reached(rank)

        self.look(ranks, {"op": "repeat", "run": run}, hear)

    def release(self, ranks: Sequence[int], run: int) -> None:
        """Free these ranks from calls they are blocked in: their sockets are shut, and the store goes away."""
        self.look(ranks, {"op": "release", "run": run}, lambda rank, answer: None)
        if self._stores is not None:
            self._stores.cut()

    def node_of(self, rank: int) -> int:
        return self.placed().workers[rank].node

    def device_of(self, rank: int) -> str:
        return self.placed().workers[rank].device_words()

    def log_of(self, rank: int) -> str:
        return next((node.workers[rank].log for node in self.nodes if rank in node.workers), "")

    def written(self, rank: int) -> dict[str, tuple[int, str]]:
        """What a rank wrote in its last run, by stream, as its own files have it: how many characters they have no
        more, and all since."""
        return self._node_with(rank).written(rank)

    # -- runs -------------------------------------------------------------------------------

    def run_cell(
        self,
        code: str,
        *,
        ranks: Sequence[int] | None = None,
        show: Sequence[int] | None = None,
        hang_after: float | None = HANG_AFTER,
        timeout: float | None = None,
        max_restarts: int = 0,
        cell: int = 1,
        argv: Sequence[str] = (),
        argv0: str = ARGV0,
        want_value: bool = False,
        check: bool = False,
        timings: bool = True,
        trace: bool = False,
        screen: Screen | None = None,
    ) -> RankValues:
        """Run source on the ranks; the values of its last expression if `want_value`.

        The rest is what `%%ddp` takes (`nbddp.run.request.Request` says it word by word): `hang_after` and `timeout`
        are in seconds, `ranks` and `show` are all if None. Raises a RunFailed: WorkerFailed, RunStopped, RunHung or
        RunTimedOut; state on the ranks that were not replaced is kept.
        """
        request = Request(
            code=code, ranks=ranks, show=show, hang_after=hang_after, timeout=timeout, max_restarts=max_restarts,
            cell=cell, argv=argv, argv0=argv0, want_value=want_value, check=check, timings=timings, trace=trace,
        )  # fmt: skip
        return self.carry_out(request, screen)

    def carry_out(self, request: Request, screen: Screen | None = None) -> RankValues:
        """What `run_cell` does, as one value."""
        self._need_running()
        screen = screen or for_shell(_shell())
        began = time.monotonic()
        attempts: list[str] = []
        while True:
            try:
                run = self._run(request, screen, timed_from=began, attempt=len(attempts))
                break
            except (WorkerFailed, RunHung) as error:
                attempts.append(str(error))
                if len(attempts) > request.max_restarts:
                    if request.max_restarts:
                        error.attempts = tuple(attempts)
                        error.report = report.attempts_text(attempts, error.report)
                    raise
                screen.say(report.attempt_words(len(attempts), request.max_restarts + 1, attempts[-1]))
                self._renew_all()
        if not request.want_value:
            return RankValues({})
        return RankValues({r: values.unpack(e.buffers[0]) for r, e in run.ended.items() if e.buffers})

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> RankValues:
        """Call `function(*args, **kwargs)` on every rank; every rank's value.

        Function and arguments travel by cloudpickle. Raises the first failing rank's own exception,
        with the WorkerFailed that holds its remote traceback as its cause; or the
        WorkerFailed itself where the exception cannot travel.
        """
        try:
            return self.call(function, args, kwargs)
        except WorkerFailed as failed:
            error = self._carried(failed)
            if error is None:
                raise
            if hasattr(error, "add_note"):  # since Python 3.11
                error.add_note(report.note(failed))
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
    ) -> RankValues:
        """As `run`, on some ranks and with limits: `hang_after` and `timeout` are in seconds, as `run_cell` has them.

        Names on the ranks stay. Raises BadInput for what cannot be sent, or a RunFailed: WorkerFailed, RunStopped,
        RunHung or RunTimedOut. A rank on which the function ends by `sys.exit()` has no value.
        """
        if not self.running:
            self.start()
        name = getattr(function, "__name__", "the function")
        chosen = check_ranks(ranks, self.world_size, "ranks")
        data = _packed((function, tuple(args), dict(kwargs or {})), name)
        request = Request(
            CALL, {"plain": self.plain}, [data], f"running {name}", chosen, hang_after=hang_after, timeout=timeout
        )
        run = self._run(request, screen or for_shell(_shell()))
        read = answers.read if self.plain else values.unpack
        return RankValues({r: read(e.buffers[0]) for r, e in run.ended.items() if e.buffers})

    def _carried(self, failed: WorkerFailed) -> BaseException | None:
        """The exception object of the first failing rank, if it travelled."""
        assert self.last_run is not None
        buffers = self.last_run.ended[failed.rank].buffers if failed.cause.kind == "raised" else []
        error = values.unpack(buffers[0]) if buffers else None
        return error if isinstance(error, Exception) else None

    def push(self, names: Mapping[str, Any], ranks: Sequence[int] | None = None) -> None:
        """Set names on the ranks. Raises BadInput for a value that cannot be pickled; then none is set."""
        self._need_running()
        chosen = check_ranks(ranks, self.world_size, "--ranks")
        buffers = [_packed(value, name) for name, value in names.items()]
        self.answers("push", chosen, buffers, names=list(names))

    def pull(self, names: Sequence[str], ranks: Sequence[int] | None = None) -> dict[str, RankValues]:
        """Fetch names from the ranks. Raises BadInput if a rank does not have one."""
        self._need_running()
        chosen = check_ranks(ranks, self.world_size, "--ranks")
        answers = self.answers("pull", chosen, names=list(names))
        found = {}
        for i, name in enumerate(names):
            lacking = [r for r, answer in answers.items() if not answer[i]]
            if lacking:
                raise BadInput(
                    f"there is no name {name} on {rank_words(lacking)}; a %%ddp cell that assigns it makes one"
                )
            found[name] = RankValues({r: values.unpack(answer[i]) for r, answer in answers.items()})
        return found

    # -- what the ranks have recorded, hold and can do (`nbddp.pool.looks`) ---------------------

    def timings(self) -> Recording:
        """The DDP steps of the last run that took some; `origin` and `missing` say whether that is the last cell, and
        on all ranks. Raises BadInput if no run has."""
        return looks.timings(self)

    def trace(self) -> Merged:
        """The traces of the last cell that was run with `trace`, merged. Raises BadInput if there is none.

        Ranks that have been replaced since are missing, and are told in `missing`.
        """
        return looks.trace(self)

    def memory(self) -> list[RankMemory]:
        """Where each rank's memory is (`nbddp.worker.memory`). Raises BadInput if no rank has a model."""
        return looks.memory(self)

    def compare(self, *names: str, ranks: Sequence[int] | None = None) -> Report:
        """Whether the ranks' copies of names are equal: any tensor, module, optimizer, number or container of them.

        Digests travel; of tensors that differ also the bytes of one rank, up to 256 MiB in all (`nbddp.pool.compare`).
        Process groups are neither needed nor used. Raises BadInput for a name that no rank has.
        """
        return looks.compare(self, names, ranks)

    def bench(
        self,
        collective: str | Sequence[str] = "all_reduce",
        sizes: Sequence[int] | None = None,
        *,
        repeat: int = REPEAT,
        warmup: int = WARMUP,
        progress: Callable[[str], None] = lambda text: None,
    ) -> list[Measured]:
        """Collectives at `sizes` bytes (1 KiB to 64 MiB), as nccl-tests measures them (`nbddp.worker.bench`).

        The default process group is used where one is alive, else one that ends with the measurement. progress: called
        with a line before each size. What was measured is kept in `measured`. Raises BadInput for what cannot be.
        """
        names = [collective] if isinstance(collective, str) else list(collective)
        return looks.bench(self, names, sizes, repeat, warmup, progress)

    def forecast(self, **asked: Any) -> Forecast:
        """The last recorded step on more nodes, by the α–β model of `nbddp.trace.cost`.

        inter_node, intra_node: `25GB/s` or bytes per second; latency: `10us` or seconds, between nodes;
        ranks_per_node, nodes (1024), strong (False), algorithm (`ring`, `tree` or `binomial`), progress. Links that
        are not given are as measured: all-reduces are measured now if none were on this number of ranks.
        Raises BadInput if no step has been recorded, or for what cannot be.
        """
        return foresee(self, **asked)

    def answers(
        self, op: str, ranks: Sequence[int] | None = None, buffers: Sequence[bytes] = (), **fields: Any
    ) -> dict[int, list[Any]]:
        """Have ranks (all, if None) carry out `op` in a run that shows nothing; rank → the buffers it answered with.

        Raises as `run_cell` does.
        """
        self._need_running()
        run = self._run(Request(op, fields, buffers, ranks=ranks), Silent())
        return {r: e.buffers for r, e in sorted(run.ended.items())}

    def troubles(self) -> str:
        """What went wrong with the connection to the workers so far, and was mended; or empty."""
        return "" if self._wire is None else str(self._wire.connection.troubles())

    def shortcomings(self) -> list[str]:
        """What nbddp leans on and does not work here, a line for the operating system and for each library; and from
        whom the ranks' store cannot be guarded."""
        warm = self.nodes[0].warm if self.nodes else {}
        unguarded = warm.get("unguarded") or (self._stores.unguarded if self._stores else "")
        return [*filter(None, [system.lost()]), *self._trials.words(), *filter(None, [unguarded])]

    def ask(self, rank: int, content: dict[str, Any], timeout: float = 1.0) -> Any:
        """A question to a rank's control thread (`complete`, `inspect`, `where`); None without an answer."""
        if not self.running or rank not in self.workers:
            return None
        return self._wire.ask(rank, content, timeout)

    def _run(self, request: Request, screen: Screen, timed_from: float | None = None, attempt: int = 0) -> Run:
        stop.check()
        self._need_running()
        ranks = check_ranks(request.ranks, self.world_size, "--ranks")
        request = request.on(ranks, check_ranks(request.show, self.world_size, "--show"))
        most = logfile.limit(os.environ)
        if self.current is not None:
            raise PoolError("the pool is busy with another run; wait for it, or stop it")
        self._make_ready(screen)
        for node in self.nodes:
            node.begin_logs(ranks)
        number = next(self._runs)
        logs = self.nodes[0].run_folder(number)
        specs = self._specs(request, number, self._take_store(number, screen), logs, attempt)
        me = weakref.proxy(self)  # what has been sent is remembered by the client's thread, and would hold the pool
        run = Run(me, specs, request, number=number, logs=logs, screen=screen, timed_from=timed_from, most=most)
        run.when_long = lambda: me._note(ranks, request.state)
        if request.is_program:  # a look at the ranks is nobody's last run
            self.last_run = run
        if request.op == CELL:
            self.last_cell = (number, request.cell)
        with uninterrupted():
            self._carry_out(run, ranks, screen)
        for others in filter(None, (run.unwritten(), *(of(list(run.ended.values())) for of in outcome.NOTES))):
            screen.say(others)
        run.raise_if_bad()
        note = outcome.note([e for _, e in sorted(run.ended.items())])
        if note:
            screen.say(note)
        return run

    def _make_ready(self, screen: Screen) -> None:
        """Nothing of an earlier run is left, the workers can be reached, and there is one for each rank."""
        if self._group_broken:
            self._end_groups()
        self._renewed = self._wire.connection.renewed
        self._wire.connection.check()
        if not all(w.lives for w in self.workers.values()):
            for note in self._match(self.placed(), self.visible):
                screen.say(note)

    def _specs(self, request: Request, number: int, port: int, logs: Path, attempt: int) -> dict[int, dict[str, Any]]:
        """Rank → what it is sent: the request, where the ranks meet, and torchrun's variables."""
        common = {
            **request.wire(), "run": number, "injected": [MASTER, port], "connect": HOST,
            "shares_gpus": self.placed().oversubscribed,
        }  # fmt: skip
        tries = (attempt, request.max_restarts)
        return {r: {**common, "env": self._variables(r, port, logs, tries)} for r in request.ranks or ()}

    def _carry_out(self, run: Run, ranks: Sequence[int], screen: Screen) -> None:
        """The run and what follows from it, as one step; Stop in the run itself is the run's."""
        self.current = run
        try:
            run.execute()
        finally:
            self.current, ending, workers = None, run.ending(), self.workers
            self._group_broken |= ending.disordered()
            for rank in run.ended.keys() & workers.keys():
                workers[rank].exits = run.ended[rank].content.get("exits", workers[rank].exits)
            if run.noted:
                self._note(ranks, "idle")
        self._end_broken(ending.broken())
        if self._group_broken:
            run.stuck = self._end_groups()
            self._note_late_deaths(run, ending.broken())
        if self._wire is not None and self._wire.connection.renewed > self._renewed:
            screen.say("the connection to the workers was lost and made anew; names on them are kept")
        if self._stores is not None:
            self._stores.after(ending.well, ending.groups() if len(run.specs) == self.world_size else None)

    def _end_broken(self, ranks: Sequence[int]) -> None:
        """End processes whose CUDA context is broken, which they never get back; the next run starts new ones."""
        if ranks:
            self._group_broken = True
            self._kill_now(ranks)

    def _note_late_deaths(self, run: Run, broken: Sequence[int]) -> None:
        """Processes that ended after their rank had left the run: gloo aborts one whose pending call does not fit.
        broken: those that we have ended."""
        for rank, worker in self.workers.items():
            ended = run.ended.get(rank)
            left = rank not in broken and ended is not None and ended.status not in outcome.GONE
            if left and worker.exit is not None:
                run.stuck.setdefault(rank, {"code": worker.exit["code"]})

    def _variables(self, rank: int, port: int, logs: Path, attempt: tuple[int, int]) -> dict[str, str]:
        """torchrun's variables for one rank of this run."""
        placed = self.placed()
        env = environment.of_worker(placed.workers[rank], placed, os.environ, visible=self.visible, loopback=_LOOPBACK)
        env.pop("CUDA_VISIBLE_DEVICES", None)  # set for good when the process started
        meet = environment.Rendezvous(MASTER, port, self._run_id, *attempt)
        env.update(environment.of_run(meet, str(logs / f"rank{rank}" / "error.json")))
        return env

    def _take_store(self, number: int, screen: Screen) -> int:
        """The port of the store where run `number` meets. That nothing guards it is said if the start of the pool did
        not."""
        assert self._stores is not None
        known = {"", self._stores.unguarded, self.nodes[0].warm.get("unguarded")}
        port = self._stores.port_of(number)
        if self._stores.unguarded not in known:
            screen.say(self._stores.unguarded)
        return port

    def _end_groups(self) -> dict[int, dict[str, Any]]:
        """Have every living rank end its process group, before any cell can meet it. A rank that does not come to an
        end of it is ended itself; returns those, with what they said of their names, and with the exit code of one that
        died meanwhile."""
        if not self.alive:
            return {}
        living = [r for r, w in self.workers.items() if w.lives]
        run = self._have_done("end_group", living, END_GROUP_SECONDS, Silent())
        self._group_broken = False
        codes = {r: e.code for r, e in run.ended.items() if e.status == outcome.DIED}
        gone = [r for r, e in run.ended.items() if e.status in (outcome.REPLACED, outcome.DIED)]
        return {r: {**run.facts.get(r, {}), "code": codes.get(r)} for r in gone}

    def _note(self, ranks: Sequence[int], state: str) -> None:
        for node in self.nodes:
            node.note(ranks, state)

    def footing(self) -> dict[str, Any]:
        """What the pool is like now, to say later what has become of it (`nbddp.pool.footing`)."""
        return {
            "running": self.running,
            "workers": {r: w.pid for r, w in self.workers.items() if w.lives},
            "world_size": self.world_size,
            "group_broken": self._group_broken,
        }

    # -- what is shown -------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The agent's answer to `status`: the pool's description and its processes."""
        self._need_running()
        assert self.agent is not None
        return self.agent.request("status")


_LOOPBACK = loopback_name()


class Remains:
    """What outlives a pool that is dropped, and is to end with it: its agent, with all processes, and its client."""

    def __init__(self) -> None:
        self.agent: Agent | None = None
        self.wire: Any = None

    def take(self, agent: Agent) -> None:
        self.agent = agent
        atexit.register(self._at_exit)

    def end(self) -> None:
        agent, self.agent = self.agent, None
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.close()
        if agent is not None:
            agent.close()
        atexit.unregister(self._at_exit)

    def end_elsewhere(self) -> None:
        """As `end`; a pool may be dropped in any thread, also in one that `end` waits for."""
        if self.agent is not None:
            threading.Thread(target=self.end, name="nbddp-ending").start()

    def _at_exit(self) -> None:
        if self.agent is not None:
            self.agent.close(timeout=2)


def _packed(value: Any, name: str) -> bytes:
    try:
        return values.pack(value)
    except Exception as e:
        raise BadInput(
            f"{name} cannot be sent to the ranks: {values.reason(e)}; make it in a %%ddp cell instead"
        ) from None


def _until(done: Callable[[], bool], timeout: float, why: str) -> None:
    end = time.monotonic() + timeout
    while not done():
        stop.check()
        if time.monotonic() > end:
            raise PoolError(f"{why} within {timeout:.0f} s; %ddp stop, then start again")
        time.sleep(0.002)


def _shell() -> Any:
    """The running IPython shell, without importing IPython into a plain program."""
    import sys

    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None
