"""The process that examines one learner: it has ranks of that learner's own, and holds the right answers itself.

It is forked from the grader's warm process and forks an agent of its own (`grading.sandbox.agent`), which forks the
ranks. The learner's cells go to the ranks as text and run there alone. The ranks answer in JSON
(`grading.json_values`). This process refuses to load any class from a pickle, whoever sends it. So nothing of the
learner's can run here. It answers the grader in lines of JSON, one exercise at a time, and is killed, with all below
it, when the learner is through.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, BinaryIO, ClassVar, TypedDict

from nbddp.agent import children
from nbddp.agent.client import AgentClient
from nbddp.compat import torch
from nbddp.errors import BadInput, PoolError, PoolNotRunning, RunTimedOut
from nbddp.grading import json_values
from nbddp.grading.definitions import Handed, absent, kind
from nbddp.grading.sandbox import agent as sandbox_agent
from nbddp.grading.sandbox import rlimits
from nbddp.grading.submissions import Cell
from nbddp.launch.options import LaunchSpec
from nbddp.lessons.framework import folders, run_check
from nbddp.lessons.framework.answer import Answer, Exercise, Wrong
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from nbddp.pool.runs import RankChannel
from nbddp.pool.state import PoolState
from nbddp.protocol.codec import Json, from_json
from nbddp.protocol.messages import OUTCOME, JupyterMessage
from nbddp.protocol.pool_parts import PoolParts
from nbddp.protocol.run_spec import RunSpec

WARM = (
    "nbddp.grading.examiner",
    "nbddp.worker.engine",
    "nbddp.worker.ahead",
    "ipyparallel.controller.app",
    "ipykernel.zmqshell",
    "torch.nn.parallel",
    "torch.distributed.optim",
    *folders.modules("exercise"),
)  # what every examiner, agent and rank needs
SPARED = (  # what lessons import: imported once and not on every rank
    torch.COMPILER,
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch.utils.data",
    "nbddp.export",
    "nbddp.teach.explore",
)
OWN_MEMORY = 4 << 30  # bytes that ranks which flood it can make this process take
NO_NAME = re.compile(r"NameError: name '(\w+)' is not defined")


class StrangersRanks(RankChannel):
    """Of ranks on which a learner's code runs only outcomes are heard; what they print is dropped."""

    def send(self, rank: int, spec: RunSpec, hear: Any, code: str, buffers: list[bytes]) -> None:
        def hear_outcomes(rank: int, message: JupyterMessage) -> None:
            if message["header"]["msg_type"] == OUTCOME:
                hear(rank, message)

        super().send(rank, spec, hear_outcomes, code, buffers)


class _StrangersLife(PoolState):
    """An agent that the ranks have ended is not replaced by one without limits; and capabilities have no part in it:
    what nbddp leans on is not tried anew for every learner."""

    def __init__(self, spec: LaunchSpec, agent: AgentClient | None, connection: type[RankChannel]):
        super().__init__(spec, agent, connection)
        self._bounding = agent

    def with_parts(self) -> PoolParts:
        return PoolParts()

    def have_agent(self, imported: Mapping[str, str] | None = None, controls_only: bool = False) -> None:
        if self._bounding is None or not self._bounding.alive:
            raise PoolNotRunning("the process that starts the ranks has exited")
        super().have_agent(imported, controls_only)


class StrangersPool(WorkerPool):
    """Ranks on which a learner's code runs: only JSON is taken from them."""

    holding, connection, writes = _StrangersLife, StrangersRanks, "nbddp.grading.json_values"

    def __init__(self, nproc: int, agent: AgentClient):
        super().__init__(nproc=nproc, device="cpu", agent=agent, oversubscribe=True)


def exercises() -> dict[str, Exercise]:
    """All exercises of all lessons, by name."""
    return folders.defined("exercise", Exercise)


class ExaminerAnswer(TypedDict, total=False):
    """In JSON, to the grader. lost: it cannot go on."""

    ready: bool
    references: str
    ok: bool
    line: str
    failed: str
    lost: bool


class Examiner:
    """Answers the grader's requests about one learner's files."""

    def __init__(self, pool: WorkerPool):
        self.pool = pool
        self._endless: dict[tuple[Cell, ...], str] = {}  # cells whose reading never ends → the line

    def _references(self, asked: Json) -> ExaminerAnswer:
        """What is right, worked out by ranks that have run no learner's code yet."""
        exercises()  # which make them
        found = {r.name: r.by_rank() for r in run_check.Reference.every} if self.pool.world_size > 1 else {}
        return {"references": json_values.write(found).decode()}

    def _examine(self, asked: Json) -> ExaminerAnswer:
        """The answer to `exercise` in a file with `cells`."""
        cells = tuple((where, source) for where, source in asked["cells"])
        try:
            answer = self._examined(asked["exercise"], cells)
        except Wrong as wrong:
            answer = Answer(False, str(wrong))
        return {"ok": answer.ok, "line": answer.line}

    def _examined(self, name: str, cells: tuple[Cell, ...]) -> Answer:
        made = self._read(name, cells)
        handed = Handed(cells, name, is_class=made == "class") if made in ("class", "function") else None
        answer = exercises()[name](handed)
        lacking = NO_NAME.search(answer.line)
        why = lacking and run_check.on_ranks(absent, cells, lacking[1], ranks=[0], screen=NullScreen())[0]
        return replace(answer, line=f"{answer.line} ({why})") if why else answer

    def _read(self, name: str, cells: tuple[Cell, ...]) -> str:
        """What the cells make of a name, seen on every rank. Raises Wrong if that is nothing."""
        if cells in self._endless:
            raise Wrong(self._endless[cells])
        try:
            found = run_check.on_ranks(kind, cells, name, screen=NullScreen())
        except Wrong as wrong:
            line = f"when its cells were run: {wrong}"
            if isinstance(wrong.__cause__, RunTimedOut) and not self._ends(cells):
                self._endless[cells] = line
            raise Wrong(line) from wrong
        for made, why in found:
            if not made:
                raise Wrong(why)
        return str(found[0][0])

    def _ends(self, cells: Sequence[Cell]) -> bool:
        """Whether the cells can be run at all, without what makes one exercise's answer."""
        try:
            run_check.on_ranks(kind, cells, "", ranks=[0], screen=NullScreen())
        except Wrong:
            return False
        return True

    REQUESTS: ClassVar[dict[str, Callable[[Examiner, Json], ExaminerAnswer]]] = {
        "references": _references,
        "examine": _examine,
    }


def main(request: Json) -> int:
    """Examine until nobody asks any more. request: `channel`; `nproc`; `deadline`, seconds; `guard`."""
    children.adopt_orphans()
    channel = socket.socket(fileno=request["channel"])
    guard = from_json(sandbox_agent.Sandbox, request["guard"])
    home, _, connection = sandbox_agent.launch(os.environ, guard, close=[channel.fileno()])
    refuse_pickles()
    rlimits.bound_self(OWN_MEMORY)
    agent = AgentClient.at(connection, home, os.environ)
    run_check.DEADLINE = request["deadline"]
    with channel.makefile("rwb") as lines:
        _serve(lines, StrangersPool(request["nproc"], agent))
    return 0


def _serve(lines: Any, pool: WorkerPool) -> None:
    try:
        pool.start()
    except (PoolError, BadInput) as error:
        _say(lines, {"failed": str(error), "lost": True})
        return
    _say(lines, {"ready": True})
    examiner, known = Examiner(pool), json.loads(lines.readline())["references"]
    with run_check.on(pool), run_check.knowing(None if known is None else json_values.read(known.encode())):
        for line in lines:
            asked = json.loads(line)
            try:
                _say(lines, examiner.REQUESTS[asked["op"]](examiner, asked))
            except PoolError as error:  # ranks can end what they live by
                _say(lines, {"failed": str(error), "lost": True})
                return
            except Exception as error:  # what ranks bring may be made to upset who judges it
                _say(lines, {"failed": f"{type(error).__name__}: {error}"})


def _say(lines: BinaryIO, answer: ExaminerAnswer) -> None:
    lines.write(json.dumps(answer).encode() + b"\n")
    lines.flush()


def refuse_pickles() -> None:
    """From now on nothing that is unpickled in this process names a class or function: no pickle can run anything. It
    cannot be taken back."""

    def refuse(event: str, args: tuple[Any, ...]) -> None:
        if event == "pickle.find_class":
            raise PermissionError(f"an examiner loads no names from pickles: {args[0]}.{args[1]}")

    sys.addaudithook(refuse)
