"""The runs of a pool: numbered, one at a time, each with its own rendezvous, and the consequences of each end. And a
run's access to its ranks: to send, to ask, to unblock and to end them, wherever they are."""

from __future__ import annotations

import functools
import itertools
import os
import re
import signal
import sys
import time
import uuid as uuids
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from nbddp.agent import stop
from nbddp.agent.hardware import loopback_name
from nbddp.agent.stop import uninterrupted
from nbddp.errors import Cause, PoolError, RankStatus, RunFailed, RunHung, WorkerFailed
from nbddp.execution import report
from nbddp.execution.cell_text import as_python
from nbddp.execution.execution import Execution
from nbddp.execution.result import UNSAID, RankSeats, StuckRank
from nbddp.launch import torchrun_env
from nbddp.launch.topology import Topology, rank_words
from nbddp.output import log_file
from nbddp.output.screens import LazyScreen, NullScreen, Screen, for_shell
from nbddp.pool.worker_group import WorkerGroup, check_ranks
from nbddp.protocol import outcome
from nbddp.protocol.capability import load, rows
from nbddp.protocol.codec import Json, to_json
from nbddp.protocol.outcome import ENDED, ProcessExit, RankExit
from nbddp.protocol.pool_parts import PoolParts, call_all
from nbddp.protocol.request import Request
from nbddp.protocol.run_spec import CELL, END_GROUP, Question, Rendezvous, Reply, RunSpec

HOST, MASTER = "127.0.0.1", "localhost"
END_GROUP_SECONDS = 10.0  # a rank that has not ended its process group by then will never
EXIT_SECONDS = 5.0  # that functions of `atexit` have before their worker is ended


class RankChannel:
    """A run's way to the ranks of a worker group. `current`: the run that is under way; it hears of deaths.

    `renewed`: how often the client had been replaced when it began.
    """

    def __init__(self, group: WorkerGroup):
        self.group = group
        self.current: Execution | None = None
        self.renewed = 0

    def died(self, rank: int, process: ProcessExit) -> None:
        """A process has ended: in an agent's reader thread."""
        run = self.current
        if run is not None:
            run.worker_exited(rank, process)

    def send(self, rank: int, spec: RunSpec, hear: Any, code: str, buffers: list[bytes]) -> None:
        if self.expect(rank):
            self.group.wire.send(rank, spec, hear, code=code, buffers=buffers)

    def expect(self, rank: int) -> bool:
        """Whether the rank lives and may answer; the run hears if it does not."""
        gone = self.group.node_with(rank).workers[rank].exit
        if gone is not None:
            self.died(rank, gone)
        return gone is None

    def signal(self, ranks: Sequence[int], number: int, *, group: bool = False) -> None:
        self.group.signal(ranks, number, group=group)

    def kill(self, ranks: Sequence[int]) -> None:
        self.group.signal(ranks, signal.SIGKILL)

    def look(self, ranks: Sequence[int], question: Question, hear: Callable[[int, Reply], None]) -> None:
        """Ask these ranks something while they work; `hear(rank, reply)` for each that answers."""
        workers = self.group.workers
        self.group.wire.ask_all([r for r in ranks if workers[r].lives], question, hear)

    def repeat(self, ranks: Sequence[int], run: int) -> None:
        """Have ranks that have ended this run say so once more, because it did not arrive."""
        for rank in ranks:
            self.group.wire.listen_again(rank)
        lost, current = self.lost, self.current

        def hear(rank: int, reply: Reply) -> None:
            if reply.answer is False and lost and current is not None:  # it has not seen the run
                current.never_reached(rank)
            if reply.answer == "untold" and current is not None:
                current.never_told(rank)

        self.look(ranks, Question.of("repeat", run=run), hear)

    @property
    def lost(self) -> bool:
        """Whether the client has been replaced since the run began."""
        return bool(self.group.wire is not None and self.group.wire.connection.renewed > self.renewed)

    def release(self, ranks: Sequence[int], run: int, then: RunSpec | None, spares: bool) -> None:
        """Free these ranks from calls they are blocked in: their sockets are shut, and the store goes away. then: the
        request that each carries out once it has ended the run, without being asked again. spares: not where the
        program has had its interrupt."""
        living = [r for r in ranks if self.group.workers[r].lives]
        next_one = to_json(then) if then is not None else None
        self.group.wire.tell(living, Question.of("release", run=run, then=next_one, spares=spares))
        if self.group.stores is not None:
            self.group.stores.cut()

    def node_of(self, rank: int) -> int:
        return self.group.placed().workers[rank].node

    def device_of(self, rank: int) -> str:
        return self.group.placed().workers[rank].device_words()

    def taken_of(self, rank: int) -> str:
        """What took the host of a rank away, such as the end of its Slurm job; empty if nothing did."""
        return self.group.node_with(rank).taken_away()

    def fate(self) -> str:
        """What becomes of a rank that cannot be unblocked."""
        return "replaced" if self.group.can_respawn else "ended"

    def advice_of(self, cause: Cause) -> str:
        """The capabilities' notes on a failure, in a line."""
        placed, said = self.group.topology, "\n".join(raised.message for raised in cause.chain)
        if placed is None or not said:
            return ""
        asked = [row.advice for row in rows() if row.advice is not None and re.search(row.advice.said, said)]
        return " ".join(filter(None, [load(advice.target)(cause, placed) for advice in asked]))

    def log_of(self, rank: int) -> str:
        return next((node.workers[rank].log for node in self.group.nodes if rank in node.workers), "")


class Runs:
    """Carries requests out on a worker group. `last`: the last run of a program; `last_cell`: the number of a cell's
    run, and the n of its In[n]."""

    def __init__(self, ranks: RankChannel, parts: PoolParts):
        self.ranks, self.parts = ranks, parts
        self.last: Execution | None = None
        self.last_cell: tuple[int, int] | None = None
        self._numbers = itertools.count(1)
        # a placement, which GPUs are visible, what hosts have, and the variables of each rank that come of these
        self._known: tuple[Topology, str, Sequence[Mapping[str, str]], dict[int, dict[str, str]]] | None = None
        self.id = str(uuids.uuid4())

    @property
    def group(self) -> WorkerGroup:
        return self.ranks.group

    def carry_out(self, request: Request, screen: Screen) -> Execution:
        """A run and its attempts: after a failure all processes are new, and where nodes may join and leave, those
        there are. The attempt that ended well. Raises the last one's RunFailed, with all attempts in its report."""
        self.group.need_running()
        have_parts(self.parts, request)
        for launched in self.parts.launched:
            launched(request, self.id)
        if request.max_restarts:
            self.group.source.refuse_renewal(f"--max-restarts {request.max_restarts}")
        began = time.monotonic()
        attempts: list[str] = []
        while True:
            source = self.group.source
            try:
                with source.watching() if source.may_change else nullcontext():  # nodes that come or are to go end it
                    return self.run(request, screen, timed_from=began, attempt=len(attempts))
            except RunFailed as error:
                why = self.last.restart_reason if self.last is not None else ""
                if why:  # no failure, so no attempt
                    screen.say(f"{why}; restarting all workers and the cell")
                else:
                    _count(error, attempts, request.max_restarts, screen)
                self.group.source.renew(screen)

    def run(self, request: Request, screen: Screen, timed_from: float | None = None, attempt: int = 0) -> Execution:
        """Carry a request out. Raises what it comes to, if it does not end well."""
        stop.check()
        group = self.group
        group.need_running()
        ranks = check_ranks(request.ranks, group.world_size, "--ranks")
        request = request.on(ranks, check_ranks(request.show, group.world_size, "--show"))
        if request.one_shot:
            group.source.refuse_one_shot()
        most = log_file.limit(os.environ) if log_file.SETTING in os.environ else log_file.LIMIT
        if self.ranks.current is not None:
            raise PoolError("the pool is busy with another run; wait for it, or stop it")
        self._make_ready(ranks, screen, new=request.is_program or request.op == "push")
        run = self._prepared(request, screen, most, timed_from, attempt)
        # what a part has events hear is let go of in any case
        with closing(run.events), heard_by(self.parts, run, request.is_program):
            self._note_as_last(run)
            with uninterrupted():
                self._carry_out(run, ranks, screen)
        self._say_notes(run, screen)
        run.raise_if_bad()
        ended = [] if run.plain else [e for _, e in sorted(run.ended.items())]
        if ended and not request.one_shot and (note := ended_note(ended)):
            screen.say(note)
        return run

    def show_last(self, screen: Screen) -> None:
        """Show the output of the last program again. Raises what it has raised."""
        if self.last is None:
            raise PoolError("no cell has run yet; run a %%ddp cell first")
        self.last.display.show_again(screen)
        self.last.raise_if_bad()

    # -- before a run --------------------------------------------------------------------------------

    def _make_ready(self, ranks: Sequence[int], screen: Screen, new: bool) -> None:
        """Nothing of an earlier run is left, the workers can be reached, and there is one for each rank; what these
        ranks write from here on is the next run's. new: and none has served its one run; a look at what that has left
        asks it."""
        group = self.group
        if new:
            group.end_retired()
        if group.broken:
            self.end_groups()
        self.ranks.renewed = group.wire.connection.renewed
        if len(group.workers) < group.world_size or not all(w.lives for w in group.workers.values()):
            group.wire.connection.check()
            for note in group.match(group.placed(), group.visible, before_end=self.call_exits):
                screen.say(note)
        group.begin_logs(ranks)
        group.wire.connection.check()  # the last: meanwhile its word has come

    def _prepared(
        self, request: Request, screen: Screen, most: int, timed_from: float | None, attempt: int
    ) -> Execution:
        """A run with its number and its rendezvous, heard by the pool. Arguments are as `Execution` has them."""
        group, number = self.group, next(self._numbers)
        logs = group.nodes[0].run_folder(number)
        if request.meets:
            specs = self._specs(request, number, self._take_store(number, screen), attempt)
        else:
            specs = dict.fromkeys(request.ranks or (), request.spec(number))
        run = Execution(
            self.ranks, specs, request, number=number, logs=logs, screen=screen, timed_from=timed_from, most=most,
            parts=self.parts, attempt=attempt,
        )  # fmt: skip
        if not request.one_shot:
            run.next_request = lambda: RunSpec(END_GROUP, next(self._numbers))
        if not request.is_program:
            run.aside = self._take_late
        run.when_sent = lambda: group.nodes[0].forget_run(number)
        run.when_long = lambda: group.note(list(specs), RankStatus.RUNNING, request.state)
        wire = group.wire
        wire.late, wire.comm, wire.ended = self._take_late, self.parts.hear, self.parts.ranks_ended
        return run

    def _note_as_last(self, run: Execution) -> None:
        """A look at the ranks is nobody's last run."""
        if run.request.is_program:
            self.last = run
        if run.request.is_numbered:
            self.last_cell = (run.number, run.request.cell)

    def _specs(self, request: Request, number: int, ports: Sequence[int], attempt: int) -> dict[int, RunSpec]:
        """Rank → what it is sent: the request, the ranks' store, and torchrun's variables. ports: on each node's
        loopback, of the way to the store."""
        group = self.group
        placed, hosts = group.placed(), group.hosts
        meet = torchrun_env.Rendezvous(hosts[0].address or MASTER, ports[0], self.id, attempt, request.max_restarts)
        told: dict[str, Any] = {}
        if request.is_program:
            have_parts(self.parts, request)
            for tells in self.parts.tells:
                told |= tells(request)
        python = as_python(request.source) if request.op == CELL else None
        common = replace(request.spec(number), as_python=python, **told)
        errors = [str(node.errors_of(number)) for node in hosts]
        given = [dict(node.given) for node in hosts]  # once: to read os.environ costs a microsecond a name
        specs, lasting = {}, self._lasting(given)
        for rank in request.ranks or ():
            node = group.node_index(placed.workers[rank])
            env = {**lasting[rank], **torchrun_env.of_run(meet, f"{errors[node]}/rank{rank}.error.json")}
            here = Rendezvous(
                (meet.addr, meet.port), (HOST, ports[node]), hosts[node].address, env, placed.oversubscribed
            )
            specs[rank] = replace(common, rendezvous=here)
        return specs

    def _lasting(self, given: Sequence[Mapping[str, str]]) -> dict[int, dict[str, str]]:
        """Rank → torchrun's variables that no run changes. given: host → what its processes have besides."""
        group = self.group
        placed, visible = group.placed(), group.visible
        if self._known is None or self._known[0] is not placed or self._known[1:3] != (visible, given):
            found = {}
            for place in placed.workers:
                joining = placed.joining(place) or loopback_name()
                here = given[group.node_index(place)]
                found[place.rank] = torchrun_env.of_worker(place, placed, here, visible=visible, joining=joining)
                found[place.rank].pop("CUDA_VISIBLE_DEVICES", None)  # set for good when the process started
            self._known = placed, visible, given, found
        return self._known[3]

    def _take_store(self, number: int, screen: Screen) -> tuple[int, ...]:
        """The ports of the store where run `number` meets. That nothing guards it is said if the start of the pool did
        not."""
        stores = self.group.stores
        assert stores is not None
        warm = self.group.nodes[0].warm
        known = {"", stores.unguarded, warm.more.get("unguarded") if warm is not None else ""}
        ports = stores.ports_of(number)
        if stores.unguarded not in known:
            screen.say(stores.unguarded)
        return ports

    # -- a run, and after it -------------------------------------------------------------------------

    def _carry_out(self, run: Execution, ranks: Sequence[int], screen: Screen) -> None:
        """The run and what follows from it, as one step; Stop in the run itself is the run's."""
        group = self.group
        self.ranks.current = run
        one_shot, workers = run.request.one_shot, group.workers
        for rank in ranks if one_shot else ():
            workers[rank].retired = True
        try:
            run.execute()
        finally:
            run.events.close()
            self.ranks.current, workers = None, group.workers
            ending = None if run.plain else run.ending()
            if ending is not None and not one_shot:
                group.broken |= bool(run.goes_on) or (ending.disordered() and not ending.untouched())
            for rank in run.ended.keys() & workers.keys():
                workers[rank].hear(run.ended[rank].outcome)
            if ending is not None:
                run.seats = RankSeats(group.placed(), {r: w.pid for r, w in workers.items()}, group.sees_files)
            if run.noted:
                group.note(ranks, RankStatus.IDLE)
        broken = [] if one_shot or ending is None else ending.broken()
        if broken:  # a CUDA context, which the process never gets back; the next run starts new ones
            group.broken = True
            group.kill(broken)
        if group.broken:
            run.stuck = self.end_groups(run)
            self._note_late_deaths(run, broken)
        if self.ranks.lost:
            screen.say("the connection to the workers was lost and restored; variables on them are kept")
        if group.stores is not None and run.request.meets:
            groups = {r: e.group for r, e in run.ended.items() if e.group is not None}
            well = ending is None or ending.well
            group.stores.after(well, groups if len(run.specs) == group.world_size else None)

    def _note_late_deaths(self, run: Execution, broken: Sequence[int]) -> None:
        """Processes that ended after their rank had left the run: gloo aborts one whose pending call does not fit.
        broken: those that we have ended."""
        for rank, worker in self.group.workers.items():
            ended = run.ended.get(rank)
            left = rank not in broken and ended is not None and ended.status not in outcome.GONE
            if left and worker.exit is not None:
                run.stuck.setdefault(rank, StuckRank(worker.exit.code))

    def _take_late(self, rank: int, kind: str, content: Json) -> None:
        """What a rank prints when no program runs, in the client's thread."""
        if self.last is not None:
            self.parts.on("late")
            for hear in [*self.parts.printed_late]:
                hear(self.last, rank, kind, content)

    def _say_notes(self, run: Execution, screen: Screen) -> None:
        """The notes on a run, however it has ended."""
        remarks = [e for e in run.ended.values() if e.outcome is not None and e.outcome.remarks]
        said = notes(run, remarks, self.parts) if remarks else ()
        unwritten = run.display.unwritten(run.ended) if remarks or run.has_output else ""
        for note in filter(None, (unwritten, *said)):
            screen.say(note)

    # -- the pool's own runs --------------------------------------------------------------------------

    def end_groups(self, after: Execution | None = None) -> dict[int, StuckRank]:
        """Have every living rank end its process group, before any cell can meet it; those that run `after` has freed
        do so unasked. A rank that does not come to an end of it is ended itself; returns those, with what they said of
        their names, and with the exit code of one that died meanwhile."""
        if not self.group.alive:
            return {}
        living = [r for r, w in self.group.workers.items() if w.lives]
        run = self._have_done(END_GROUP, living, END_GROUP_SECONDS, NullScreen(), after)
        self.group.broken = False
        codes = {r: e.code for r, e in run.ended.items() if e.status == outcome.DIED}
        gone = [r for r, e in run.ended.items() if e.status in (outcome.REPLACED, outcome.DIED)]
        return {r: StuckRank(codes.get(r), run.facts.get(r, UNSAID)) for r in gone}

    def call_exits(self, ranks: Sequence[int]) -> None:
        """Have ranks that are about to be ended call what their programs have registered with `atexit`; what that
        prints is shown. A rank at work, and one that does not come back, is ended without."""
        workers = self.group.workers
        if not self.group.can_respawn:  # engines go on, and call them at their own end
            return
        waiting = [r for r in ranks if workers[r].exits and workers[r].lives]
        if waiting and self.ranks.current is None and self.group.alive:
            self._have_done("exits", waiting, EXIT_SECONDS, LazyScreen(for_shell(shell())))

    def _have_done(
        self, op: str, ranks: Sequence[int], timeout: float, screen: Screen, after: Execution | None = None
    ) -> Execution:
        """A run of the pool's own, without a rendezvous; a rank that is not through in time is replaced."""
        number = after.ladder.then.run if after is not None and after.ladder.then else next(self._numbers)
        request = Request(op, ranks=ranks, hang_after=None, timeout=timeout)
        specs = dict.fromkeys(ranks, request.spec(number))
        logs = self.group.nodes[0].run_folder(number)
        run = Execution(
            self.ranks, specs, request, number=number, logs=logs, screen=screen, after=after, parts=self.parts
        )
        self.ranks.current = run
        try:
            run.execute()
        finally:
            self.ranks.current = None
        return run


def have_parts(parts: PoolParts, request: Request) -> None:
    """Have the parts that programs make, or fields of this request. Most are made by the first program."""
    if "run" in parts.due:
        parts.on("run")
    for name in [each for each in parts.fields if getattr(request, each) is not None]:
        parts.on(f"field:{name}")


@contextmanager
def heard_by(parts: PoolParts, run: Execution, begins: bool = True) -> Iterator[None]:
    """Meanwhile a run goes on. begins: whether parts hear that."""
    try:
        for hear in [*parts.run_begins] if begins else ():
            hear(run)
        yield
    finally:
        if "died" in parts.due and any(ended.outcome is None for ended in run.ended.values()):
            parts.on("died")
        failed = parts.run_failed if parts.run_failed and not run.plain else []
        if ends := [*failed, *parts.run_ended]:
            call_all([functools.partial(hear, run) for hear in ends])


def _count(error: RunFailed, attempts: list[str], most: int, screen: Screen) -> None:
    """Note a failed attempt. Raises the error if it is none, or the last one."""
    if not isinstance(error, (WorkerFailed, RunHung)):
        raise error
    attempts.append(str(error))
    if len(attempts) > most:
        if most:
            error.attempts = tuple(attempts)
            error.report = report.attempts_text(attempts, error.report)
            error.painted = report.attempts_text(attempts, error.painted)
        raise error
    screen.say(report.attempt_words(len(attempts), most + 1, attempts[-1]))


def shell() -> Any:
    """The running IPython shell, without importing IPython into a plain program."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


# -- notes on how ranks ended -----------------------------------------------------------------------
def notes(run: Execution | None, ended: Sequence[RankExit], parts: PoolParts) -> list[str]:
    """What a user should know of the ranks' processes, however the run has ended. Pure but for the parts."""
    said = [e.outcome for e in ended if e.outcome is not None]
    handling = {outcome.nccl_handling for outcome in said if outcome.nccl_handling}
    told = [note for remarks in parts.remarks for note in remarks(run, said)]
    return [note for note in (*told, handling_note(handling), *parts_notes(ended)) if note]


def parts_notes(ended: Sequence[RankExit]) -> list[str]:
    """Which parts of capabilities have failed, on which ranks."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for e in ended:
        for failed in e.outcome.part_errors if e.outcome is not None else ():
            ranks.setdefault(failed, []).append(e.rank)
    return [
        f"{name} failed on {rank_words(some)} ({error}); the program itself is not affected"
        for (name, error), some in ranks.items()
    ]


def handling_note(found: Collection[str]) -> str:
    """That a program has had NCCL end its process when a collective fails; empty if none has."""
    if not found:
        return ""
    return (
        f"TORCH_NCCL_ASYNC_ERROR_HANDLING is {' and '.join(sorted(found))} in this program: NCCL then aborts "
        "a rank whose collective fails, and its variables are lost; with 2, the setting of %%ddp, the rank survives"
    )


def ended_note(ended: Sequence[RankExit]) -> str:
    """A note on ranks whose processes exited without an error; empty if there are none."""
    ranks = [e.rank for e in ended if e.status == ENDED]
    if not ranks:
        return ""
    its, new = ("its", "a new process") if len(ranks) == 1 else ("their", "new processes")
    return f"{rank_words(ranks)} exited with code 0; {its} variables are lost, and the next cell starts {new}"
