"""A session's view of its pool, from a separate thread: it asks agents and ranks, and changes nothing."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from nbddp.agent.gather import AgentRequests
from nbddp.analysis.steps import Recording, Step, fitted
from nbddp.capabilities.panel.rows import Pace, SeenRanks, Use, merged
from nbddp.errors import AgentFailed, BadInput
from nbddp.execution.execution import Execution
from nbddp.launch.topology import Topology, rank_words
from nbddp.pool.pool import WorkerPool
from nbddp.protocol.codec import Message, from_json
from nbddp.protocol.run_spec import Question

if TYPE_CHECKING:
    from nbddp.capabilities.panel.on_agent import WorkerUse

MEMORY_EVERY = 30.0  # seconds: to add up a process's pages takes 10 ms; between, its resident pages are followed
MEMORY_SHARE = 0.0015  # of a core on each host, which that may cost: the ranks may be many
AT_ONCE = 4  # ranks of which it is done in one look, while their agent hears nobody
KEPT = 2000  # steps
PATIENCE = 2.0  # seconds for an agent's answer


def look(pool: WorkerPool, run: Execution | None) -> SeenRanks:
    """Where the ranks are, as far as the run has looked."""
    lives = frozenset(r for r, w in list(pool.workers.items()) if w.lives)
    if run is None or not run.request.is_program:
        return SeenRanks(lives)
    ended = {r: e.status for r, e in list(run.ended.items())}
    return SeenRanks(lives, named(run), frozenset(run.specs), dict(run.positions), ended)


def named(run: Execution) -> str:
    """What runs: `Cell In[3]`, a script's name."""
    request = run.request
    if request.program is not None:
        return str(request.program.name)
    return f"Cell In[{request.cell}]" if request.is_numbered else "a function"


class Uses:
    """What the ranks' processes use, as their agents tell: `now`, and at the look `before`."""

    def __init__(self) -> None:
        self.before: dict[int, Use] = {}
        self.now: dict[int, Use] = {}
        self._shared: dict[int, int] = {}  # rank → what its memory was more than its resident pages
        self._asked_at: dict[int, float] = {}  # rank → when it was asked for that
        self._each = 0.0  # seconds of CPU for one rank, at most

    def take(self, pool: WorkerPool, placed: Topology) -> None:
        """Ask all agents once. A host that does not answer tells nothing, and no more."""
        at = time.monotonic()
        asked = AgentRequests()
        nodes = [node for node in pool.group.nodes if node.can_respawn]
        wanted = [self._due(sorted(node.workers), at) for node in nodes]
        for node, memory in zip(nodes, wanted, strict=True):
            asked.post_if_alive(node.agent, "use", memory=memory)
        found: dict[int, Use] = {}
        for node, memory, answer in zip(nodes, wanted, asked.answers(PATIENCE), strict=True):
            if not isinstance(answer, AgentFailed):
                found.update(self._of(answer, sorted(node.workers), placed, at))
                if memory:
                    self._each = max(self._each, answer["took"] / len(memory))
        self.before, self.now = self.now, found

    def _due(self, ranks: Sequence[int], at: float) -> list[int]:
        """The ranks of a host whose memory is asked for now: those that were not asked for the longest time. One that
        has ended tells nothing, and keeps no other from its turn."""
        every = max(MEMORY_EVERY, len(ranks) * self._each / MEMORY_SHARE)
        asked = {r: self._asked_at.get(r, float("-inf")) for r in ranks}
        due = [r for r in ranks if r not in self._shared or at - asked[r] >= every]
        chosen = sorted(due, key=asked.__getitem__)[:AT_ONCE]
        self._asked_at |= dict.fromkeys(chosen, at)
        return chosen

    def _of(self, answer: Message, ranks: Sequence[int], placed: Topology, at: float) -> dict[int, Use]:
        workers = {int(r): use for r, use in answer.get("workers", {}).items()}
        gpus = {int(i): use for i, use in answer.get("gpus", {}).items()}
        found = {}
        for rank in (r for r in ranks if r < placed.world_size):
            real = [d.index for d in placed.workers[rank].devices if not d.simulated]  # the agent knows these alone
            own = [gpus[index] for index in real if index in gpus]
            told: WorkerUse = workers.get(rank, {})
            found[rank] = Use(
                at, told.get("cpu"), self._memory(rank, told),
                max((g["busy"] for g in own if g["busy"] is not None), default=None),
                sum(told_of) if (told_of := [g["memory"] for g in own if g["memory"] is not None]) else None,
            )  # fmt: skip
        return found

    def _memory(self, rank: int, told: WorkerUse) -> int | None:
        """Its memory as it was last told, and what its resident pages are more or less since; None until it is known of
        this process."""
        before = self.now.get(rank)
        if not told or (before is not None and before.cpu is not None and told["cpu"] < before.cpu):
            self._shared.pop(rank, None)
        if "memory" in told:
            self._shared[rank] = told["memory"] - told["resident"]
        return max(0, told["resident"] + self._shared[rank]) if rank in self._shared else None


class Paces:
    """The DDP steps of the run that is on, or was last, rank by rank. Ranks answer in the client's thread, when they
    can; each is asked again once it has. `new`: whether something has come since that was set back."""

    def __init__(self) -> None:
        self.run = 0
        self.steps: dict[int, tuple[Pace, ...]] = {}
        self._owing: dict[int, float] = {}
        self._last: set[int] = set()  # ranks that were asked after the run's end
        self.new = False

    def ask(self, pool: WorkerPool, run: Execution, over: bool) -> None:
        """Ask every rank for what is new. over: the run has ended; a rank that has nothing new is asked no more."""
        if run.number != self.run:
            self.run, self.steps, self._owing, self._last, self.new = run.number, {}, {}, set(), True
        now = time.monotonic()
        lives = [r for r in run.specs if r not in self._last and r in pool.workers and pool.workers[r].lives]
        for rank in [r for r in lives if now - self._owing.get(r, float("-inf")) > PATIENCE]:
            if over:
                self._last.add(rank)
            since = self.steps[rank][-1].begin if self.steps.get(rank) else 0
            self._owing[rank] = now
            question = Question.of("pace", run=run.number, since=since)
            pool.group.wire.question([rank], question, lambda r, reply, n=run.number: self._heard(n, r, reply.answer))

    def _heard(self, run: int, rank: int, answer: Any) -> None:
        if run == self.run:
            self._owing.pop(rank, None)
            if isinstance(answer, list) and answer:
                self.new = True
                self._last.discard(rank)  # there may be more
                self.steps[rank] = merged(self.steps.get(rank, ()), answer, KEPT)


def step(pool: WorkerPool, run: int, number: int) -> Recording:
    """One step of a run, asked of every rank, also while it works. Raises BadInput if a rank does not have it."""
    heard: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    ranks = sorted(pool.workers)
    question = Question.of("step", run=run, number=number)
    pool.group.wire.question(ranks, question, lambda rank, reply: heard.put((rank, reply.answer)))
    found: dict[int, dict[str, Any]] = {}
    end = time.monotonic() + PATIENCE
    with suppress(queue.Empty):
        while len(found) < len(ranks):
            rank, answer = heard.get(timeout=max(0.0, end - time.monotonic()))
            found[rank] = answer if isinstance(answer, dict) and "step" in answer else {}
    lacking = [r for r in ranks if not found.get(r)]
    if lacking:
        raise BadInput(f"step {number} is not recorded on {rank_words(lacking)}; the newest 2000 steps are kept")
    steps = {r: [fitted(from_json(Step, found[r]["step"]))] for r in ranks}
    return Recording(steps, model=str(found[ranks[0]]["model"]))
