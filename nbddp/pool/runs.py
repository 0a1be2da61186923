"""The runs of a pool: numbered, one at a time, each with its own rendezvous, and what follows from how one ends."""

from __future__ import annotations

import itertools
import os
import sys
import uuid as uuids
from collections.abc import Mapping, Sequence
from typing import Any

from nbddp.base import stop
from nbddp.base.stop import uninterrupted
from nbddp.errors import PoolError
from nbddp.plan import environment
from nbddp.plan.request import CELL, Request
from nbddp.pool import requests
from nbddp.pool.group import WorkerGroup
from nbddp.pool.ranks import RankConnection
from nbddp.run import logfile, outcome
from nbddp.run.between import Between
from nbddp.run.screen import Late, Screen, Silent, for_shell
from nbddp.run.spmd import Run
from nbddp.run.values import check_ranks

HOST, MASTER = "127.0.0.1", "localhost"
END_GROUP = "end_group"
END_GROUP_SECONDS = 10.0  # a rank that has not ended its process group by then will never
EXIT_SECONDS = 5.0  # that functions of `atexit` have before their worker is ended


class Runs:
    """Carries requests out on a worker group. `last`: the last run of a program; `last_cell`: the number of a cell's
    run, and the n of its In[n]."""

    def __init__(self, ranks: RankConnection):
        self.ranks = ranks
        self.last: Run | None = None
        self.last_cell: tuple[int, int] | None = None
        self.between = Between()
        self._numbers = itertools.count(1)
        self._id = str(uuids.uuid4())

    @property
    def group(self) -> WorkerGroup:
        return self.ranks.group

    def run(self, request: Request, screen: Screen, timed_from: float | None = None, attempt: int = 0) -> Run:
        """Carry a request out. Raises what it comes to, if it does not end well."""
        stop.check()
        group = self.group
        group.need_running()
        ranks = check_ranks(request.ranks, group.world_size, "--ranks")
        request = request.on(ranks, check_ranks(request.show, group.world_size, "--show"))
        most = logfile.limit(os.environ)
        if self.ranks.current is not None:
            raise PoolError("the pool is busy with another run; wait for it, or stop it")
        self._make_ready(screen)
        group.begin_logs(ranks)
        number = next(self._numbers)
        logs = group.nodes[0].run_folder(number)
        specs = self._specs(request, number, self._take_store(number, screen), attempt)
        run = Run(self.ranks, specs, request, number=number, logs=logs, screen=screen, timed_from=timed_from, most=most,
                  widgets=group.wire.widgets)  # fmt: skip
        end = Request(END_GROUP, hang_after=None).wire()
        run.next_request = lambda: {**end, "run": next(self._numbers)}
        run.when_sent = lambda: group.nodes[0].forget_run(number)
        run.when_long = lambda: group.note(ranks, request.state)
        if request.is_program:  # a look at the ranks is nobody's last run
            self.last = run
            self.between.follow(logs, most)
        else:
            run.aside = self.between.take
        group.wire.late = self.between.take
        if request.op == CELL:
            self.last_cell = (number, request.cell)
        with uninterrupted():
            self._carry_out(run, ranks, screen)
        if request.op == CELL:
            self._show_earlier(run, screen)
        for others in filter(None, (run.unwritten(), *(of(list(run.ended.values())) for of in outcome.NOTES))):
            screen.say(others)
        run.raise_if_bad()
        note = outcome.note([e for _, e in sorted(run.ended.items())])
        if note:
            screen.say(note)
        return run

    # -- before a run --------------------------------------------------------------------------------

    def _make_ready(self, screen: Screen) -> None:
        """Nothing of an earlier run is left, the workers can be reached, and there is one for each rank."""
        group = self.group
        if group.broken:
            self.end_groups()
        self.ranks.renewed = group.wire.connection.renewed
        group.wire.connection.check()
        if not all(w.lives for w in group.workers.values()):
            for note in group.match(group.placed(), group.visible, before_end=self.call_exits):
                screen.say(note)

    def _specs(self, request: Request, number: int, ports: Sequence[int], attempt: int) -> dict[int, dict[str, Any]]:
        """Rank → what it is sent: the request, where the ranks meet, and torchrun's variables. ports: on each node's
        loopback, of the way to the store."""
        group = self.group
        placed, hosts = group.placed(), group.hosts
        meet = environment.Rendezvous(hosts[0].address or MASTER, ports[0], self._id, attempt, request.max_restarts)
        common = {
            **request.wire(), "run": number, "injected": [meet.addr, meet.port], "shares_gpus": placed.oversubscribed,
        }  # fmt: skip
        ways = [{"connect": [HOST, port], "listen": node.address} for node, port in zip(hosts, ports, strict=True)]
        errors = [str(node.errors_of(number)) for node in hosts]
        specs = {}
        for rank in request.ranks or ():
            seat = group.seat(placed.workers[rank])
            specs[rank] = {**common, **ways[seat], "env": self._variables(rank, meet, hosts[seat].given, errors[seat])}
        return specs

    def _variables(
        self, rank: int, meet: environment.Rendezvous, here: Mapping[str, str], errors: str
    ) -> dict[str, str]:
        """torchrun's variables for one rank of this run. here: what it has besides."""
        placed, visible = self.group.placed(), self.group.visible
        place = placed.workers[rank]
        env = environment.of_worker(place, placed, here, visible=visible, joining=requests.joining(placed, place))
        env.pop("CUDA_VISIBLE_DEVICES", None)  # set for good when the process started
        env.update(environment.of_run(meet, f"{errors}/rank{rank}.error.json"))
        return env

    def _take_store(self, number: int, screen: Screen) -> tuple[int, ...]:
        """The ports of the store where run `number` meets. That nothing guards it is said if the start of the pool did
        not."""
        stores = self.group.stores
        assert stores is not None
        known = {"", stores.unguarded, self.group.nodes[0].warm.get("unguarded")}
        ports = stores.ports_of(number)
        if stores.unguarded not in known:
            screen.say(stores.unguarded)
        return self.group.by_host(ports)

    # -- a run, and after it -------------------------------------------------------------------------

    def _carry_out(self, run: Run, ranks: Sequence[int], screen: Screen) -> None:
        """The run and what follows from it, as one step; Stop in the run itself is the run's."""
        group = self.group
        self.ranks.current = run
        try:
            run.execute()
        finally:
            self.ranks.current, ending, workers = None, run.ending(), group.workers
            group.broken |= bool(run.goes_on) or (ending.disordered() and not ending.untouched())
            for rank in run.ended.keys() & workers.keys():
                workers[rank].exits = run.ended[rank].content.get("exits", workers[rank].exits)
            if run.noted:
                group.note(ranks, "idle")
        broken = ending.broken()
        if broken:  # a CUDA context, which the process never gets back; the next run starts new ones
            group.broken = True
            group.kill(broken)
        if group.broken:
            run.stuck = self.end_groups(run)
            self._note_late_deaths(run, broken)
        if self.ranks.lost:
            screen.say("the connection to the workers was lost and reestablished; names on them are kept")
        if group.stores is not None:
            group.stores.after(ending.well, ending.groups() if len(run.specs) == group.world_size else None)

    def _note_late_deaths(self, run: Run, broken: Sequence[int]) -> None:
        """Processes that ended after their rank had left the run: gloo aborts one whose pending call does not fit.
        broken: those that we have ended."""
        for rank, worker in self.group.workers.items():
            ended = run.ended.get(rank)
            left = rank not in broken and ended is not None and ended.status not in outcome.GONE
            if left and worker.exit is not None:
                run.stuck.setdefault(rank, {"code": worker.exit["code"]})

    def _show_earlier(self, run: Run, screen: Screen) -> None:
        """What was printed before this cell, when none ran."""
        for later in self.between.collect(run.shown):
            for out in later.outputs:
                run.earlier.setdefault(out.rank, []).append(out.log)
            screen.say(later.words())

    # -- the pool's own runs --------------------------------------------------------------------------

    def end_groups(self, after: Run | None = None) -> dict[int, dict[str, Any]]:
        """Have every living rank end its process group, before any cell can meet it; those that run `after` has freed
        do so unasked. A rank that does not come to an end of it is ended itself; returns those, with what they said of
        their names, and with the exit code of one that died meanwhile."""
        if not self.group.alive:
            return {}
        living = [r for r, w in self.group.workers.items() if w.lives]
        run = self._have_done(END_GROUP, living, END_GROUP_SECONDS, Silent(), after)
        self.group.broken = False
        codes = {r: e.code for r, e in run.ended.items() if e.status == outcome.DIED}
        gone = [r for r, e in run.ended.items() if e.status in (outcome.REPLACED, outcome.DIED)]
        return {r: {**run.facts.get(r, {}), "code": codes.get(r)} for r in gone}

    def call_exits(self, ranks: Sequence[int]) -> None:
        """Have ranks that are about to be ended call what their programs have registered with `atexit`; what that
        prints is shown. A rank at work, and one that does not come back, is ended without."""
        workers = self.group.workers
        if self.group.joined is not None:  # engines go on, and call them at their own end
            return
        waiting = [r for r in ranks if workers[r].exits and workers[r].lives]
        if waiting and self.ranks.current is None and self.group.alive:
            self._have_done("exits", waiting, EXIT_SECONDS, Late(for_shell(shell())))

    def _have_done(
        self, op: str, ranks: Sequence[int], timeout: float, screen: Screen, after: Run | None = None
    ) -> Run:
        """A run of the pool's own, without a rendezvous; a rank that is not through in time is replaced."""
        number = after.then["run"] if after is not None and after.then else next(self._numbers)
        request = Request(op, ranks=ranks, hang_after=None, timeout=timeout)
        specs = {r: {**request.wire(), "run": number} for r in ranks}
        logs = self.group.nodes[0].run_folder(number)
        run = Run(self.ranks, specs, request, number=number, logs=logs, screen=screen, after=after)
        self.ranks.current = run
        try:
            run.execute()
        finally:
            self.ranks.current = None
        return run


def shell() -> Any:
    """The running IPython shell, without importing IPython into a plain program."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None
