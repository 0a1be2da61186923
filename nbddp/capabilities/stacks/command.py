"""`%ddp stacks`: where every rank is, and its Python stack.

It shows them while a cell runs (`live`), or as they were when one had to be ended (`of_run`).

A rank cannot answer while native code holds its interpreter. Then it is asked by a signal instead: `faulthandler`
writes its stack into the worker's log without the interpreter.
"""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbddp.agent.client import AgentClient
from nbddp.compat import system
from nbddp.deadlock import proof
from nbddp.deadlock.positions import GONE, Position, facts_of, position_of
from nbddp.errors import BadInput, PoolError, RankStatus, inside
from nbddp.execution.report import omitted_words
from nbddp.figures.table import Table
from nbddp.launch.topology import rank_words
from nbddp.notebook.commands import Asked, CommandLine
from nbddp.protocol import position
from nbddp.protocol.codec import Message
from nbddp.protocol.position import StackRow, Whereabouts
from nbddp.protocol.run_spec import Question

ANSWER_TIME = 0.5  # seconds
APART = 0.2  # seconds between the two looks that tell computing from waiting
DUMP = signal.SIGUSR2  # on which a worker writes its stack into its log


@dataclass(frozen=True)
class Stacks:
    """What is shown. `stacks`: rank → frames, outermost first; `dumps`: rank → what faulthandler wrote."""

    positions: Mapping[int, Position]
    stacks: Mapping[int, Sequence[StackRow]]
    dumps: Mapping[int, str] = field(default_factory=dict)
    title: str = ""

    def __repr__(self) -> str:
        rows = [(r, p.where or "–", self.doing(p)) for r, p in sorted(self.positions.items())]
        parts = [repr(Table(("rank", "line", "state"), rows, title=self.title))]
        found = proof.diagnose(self.positions)
        if found is not None:
            parts.append("\n".join(w for w in (f"deadlock: {'; '.join(found.words)}", found.advice) if w))
        same: dict[str, list[int]] = {}
        for r, p in sorted(self.positions.items()):
            text = self.dumps.get(r) or "\n".join(stack_text(self.stacks.get(r, ())))
            if p.state not in GONE and text:
                same.setdefault(text, []).append(r)
        parts += [f"{rank_words(ranks)}:\n{text}" for text, ranks in same.items()]
        return "\n\n".join(parts)

    def doing(self, p: Position) -> str:
        idle = all(q.state == RankStatus.FINISHED for q in self.positions.values())
        words = {
            RankStatus.FINISHED: "idle" if idle else "has finished the cell",
            RankStatus.FAILED: "has failed",
            RankStatus.DIED: "has died",
            RankStatus.ABSENT: "does not take part",
        }
        return words.get(p.state) or proof.waiting_words(p, self.positions) or "running"


def stack_text(frames: Iterable[Sequence[object]]) -> list[str]:
    """One line per frame, outermost first: `  Cell In[3], line 9, in train`."""
    rows, lines = [tuple(row) for row in frames], []
    for i, end in position.kept_frames(rows):
        file, line, name, _ = rows[i]
        short = str(file).replace("\\", "/").split("site-packages/")[-1]
        lines.append(f"  {short}, line {line}{inside(str(name))}")
        lines += omitted_words([str(row[2]) for row in rows[i + 1 : end]])
    return lines


def in_notebook(asked: Asked, line: CommandLine) -> Stacks:
    run = asked.pool.last_run
    if run is not None and run.error() is not None and run.positions:
        return of_run(run.positions, run.facts)
    if not asked.pool.running:
        raise BadInput("there is no pool, so there are no stacks; a %%ddp cell or %ddp start starts one")
    assert asked.pool.agent is not None
    return live(asked.pool.agent)


def in_terminal(line: CommandLine) -> None:
    for agent in line.agents():
        print(live(agent))


def of_run(positions: Mapping[int, Position], facts: Mapping[int, Whereabouts]) -> Stacks:
    """The stacks as they were when the last run was ended, or last looked at."""
    return Stacks(positions, {r: f.stack for r, f in facts.items()}, title="when the last run ended:")


def live(agent: AgentClient) -> Stacks:
    """Ask the ranks of a running pool. Raises PoolError if the pool has no workers."""
    from nbddp.pool.rpc import join

    status = agent.request("status")
    here = {c["rank"]: c for c in status["children"] if c["kind"] == "worker"}
    workers = {w["rank"]: here.get(w["rank"]) for w in status["info"].get("workers", ())} or here
    info = status["info"]
    files = [f for f in [*status["files"], info.get("file", "")] if f.endswith("-client.json")]
    if not workers or not files:
        raise PoolError(f"pool {agent.pool_id} has no workers; a %%ddp cell starts them")
    wire = join(files[0], {int(rank): uuid for rank, uuid in info.get("engines", {}).items()})
    try:
        return _ask(agent, wire, workers)
    finally:
        wire.close()


def _ask(agent: AgentClient, wire: Any, workers: Mapping[int, Message | None]) -> Stacks:
    ranks = [r for r in workers if r in wire.engines()]
    before: dict[int, Position] = {}
    facts: dict[int, Whereabouts] = {}
    elapsed, asked_at = float("inf"), 0.0
    for history in (False, True):
        now = time.monotonic()
        elapsed = now - asked_at if asked_at else elapsed
        asked_at = now
        facts = _answers(wire, ranks, Question.of("stack", history=history))
        found = {r: position_of(r, facts.get(r), before.get(r), elapsed) for r in ranks}
        before = found
        if not history and not all(f.idle for f in facts.values()):
            time.sleep(APART)  # the CPU time used meanwhile tells computing from waiting
    silent = {r: workers[r] for r in ranks if r not in facts}
    dumps = {r: _dumped(agent, worker) for r, worker in silent.items() if worker}  # others are on another host
    lost = {r: Position(r, RankStatus.DIED) for r in workers if r not in ranks}
    stacks = {r: f.stack for r, f in facts.items()}
    return Stacks({**before, **lost}, stacks, dumps, title=f"pool {agent.pool_id}")


def _answers(wire: Any, ranks: Sequence[int], question: Question) -> dict[int, Whereabouts]:
    heard: queue.SimpleQueue[tuple[int, Whereabouts | None]] = queue.SimpleQueue()
    wire.ask_all(ranks, question, lambda rank, reply: heard.put((rank, facts_of(reply))))
    found: dict[int, Whereabouts] = {}
    end = time.monotonic() + ANSWER_TIME
    while len(found) < len(ranks) and time.monotonic() < end:
        try:
            rank, answer = heard.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            break
        if answer is not None:
            found[rank] = answer
    return found


def _dumped(agent: AgentClient, worker: Message) -> str:
    """A silent rank's stack, written by faulthandler into its log; empty if it does not listen to the signal."""
    if not system.is_linux():
        return f"its stack is not available: {system.name()} does not report whether a signal can request it"
    if not listens(worker["pid"], DUMP):
        return ""
    log = Path(worker["log"])
    start = log.stat().st_size if log.exists() else 0
    agent.request("signal", pids=[worker["pid"]], signal=int(DUMP))
    end = time.monotonic() + ANSWER_TIME
    size = start
    while time.monotonic() < end:
        time.sleep(0.02)
        before, size = size, log.stat().st_size
        if start < before == size:
            break  # it has stopped growing
    with log.open(errors="replace") as file:
        file.seek(start)
        return file.read().strip()


def listens(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal: one that it does not handle would end it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line for line in lines if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
