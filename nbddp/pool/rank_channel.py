"""A run's access to its ranks: to send, to ask, to unblock and to end them, wherever they are."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from typing import Any

from nbddp.errors import Cause
from nbddp.execution.execution import Execution
from nbddp.pool.worker_group import WorkerGroup
from nbddp.protocol.capability import load, rows
from nbddp.protocol.codec import to_json
from nbddp.protocol.outcome import ProcessExit
from nbddp.protocol.run_spec import Question, Reply, RunSpec


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
        """What capabilities say of a failure besides, in a line."""
        placed, said = self.group.topology, "\n".join(raised.message for raised in cause.chain)
        if placed is None or not said:
            return ""
        asked = [row.advice for row in rows() if row.advice is not None and re.search(row.advice.said, said)]
        return " ".join(filter(None, [load(advice.target)(cause, placed) for advice in asked]))

    def log_of(self, rank: int) -> str:
        return next((node.workers[rank].log for node in self.group.nodes if rank in node.workers), "")
