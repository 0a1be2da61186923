"""`%ddp prove` on a rank: it lists the values that a step reaches, starts a copy of itself, and returns the copy's
result.

The rank itself only reads, forks, and reads a pipe. So Stop, a failure or a time limit leave nothing to be taken back:
the copy is killed. The copy ends by itself when the rank does.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import select
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nbddp.capabilities.prove import on_rank_copy as copying
from nbddp.capabilities.prove import on_rank_shards as sharding
from nbddp.capabilities.prove.on_rank_batch import counted, digest, samples
from nbddp.capabilities.prove.on_rank_reach import Names, Reached, holds_batch, reach
from nbddp.capabilities.prove.on_rank_run import main, value_of
from nbddp.capabilities.prove.plan import LATE, BatchFacts, CopyAnswer, CopyState, Plan, StepFacts
from nbddp.compat import system
from nbddp.compat.extra import system as system_extra
from nbddp.execution.report import signal_name
from nbddp.protocol import pickling
from nbddp.protocol.codec import from_json
from nbddp.worker.parts import RankWorker


@dataclass
class RunningCopy:
    """A copy: the number that the notebook gave it, its process, the pipe it answers by, what has come so far, and its
    answer. With an answer its process has been waited for, and the pipe is closed."""

    number: int
    pid: int
    read: int
    came: bytearray = field(default_factory=bytearray)
    answer: CopyAnswer | None = None


_running: list[RunningCopy] = []  # at most one


def prove(worker: RankWorker, buffers: Sequence[Any], *, part: str, **fields: Any) -> list[bytes]:
    """Say what a step reaches, or start a copy that runs it."""
    if part == "look":
        return [pickling.pack_answer(look(worker.shell.user_ns, copying.has_gpus(worker), **fields))]
    if part == "start":
        start(worker, from_json(Plan, fields["plan"]), fields["copy"])
    return [pickling.pack_answer(None)]


def proof(worker: RankWorker, *, copy: int, end: bool = False) -> CopyState:
    """What the copy of this number has found, if it is done, however often that is asked; with `end` it is killed.
    Asked by the control thread, and late where the rank was stopped."""
    one = _running[0] if _running and _running[0].number == copy else None
    if end and one is not None:
        kill()
    if end or one is None:
        return CopyState("none")
    while one.answer is None and select.select([one.read], [], [], 0)[0]:
        data = os.read(one.read, 1 << 16)
        one.came += data
        if not data:
            one.answer = _answer(one)
    return CopyState("runs" if one.answer is None else "done", one.answer)


def _answer(one: RunningCopy) -> CopyAnswer:
    """Of a copy that has closed its end of the pipe."""
    os.close(one.read)
    _, status = os.waitpid(one.pid, 0)
    if one.came:
        return from_json(CopyAnswer, json.loads(bytes(one.came)))
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGALRM:
        return CopyAnswer("it took longer than the time limit", LATE)
    words = signal_name(code) if code < 0 else f"exit status {code}"
    return CopyAnswer(f"its process ended ({words})", "Ended")


def kill() -> None:
    """End the copy and what it has started."""
    while _running:
        one = _running.pop()
        if one.answer is not None:
            continue
        for ends in (os.killpg, os.kill):  # it may not have its own process group yet
            with contextlib.suppress(OSError):
                ends(one.pid, signal.SIGKILL)
        os.close(one.read)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(one.pid, 0)


def start(worker: RankWorker, plan: Plan, number: int) -> None:
    kill()
    read, write = os.pipe()
    parent, living = os.getpid(), copying.living(worker.shell.user_ns)
    try:
        pid = copying.forked(copying.has_gpus(worker), read, write)
    except RuntimeError:
        os.close(read)
        os.close(write)
        raise
    if pid == 0:
        try:
            main(worker, plan, living, parent, write)
        finally:
            os._exit(1)
    os.close(write)
    _running.append(RunningCopy(number, pid, read))


# -- what the step reaches -----------------------------------------------------------------------


def look(held: Names, gpus: bool, *, step: str, args: Sequence[str]) -> StepFacts:
    """What is known of a step before it runs."""
    missing = tuple(name for name in (step, *args) if not _has(held, name))
    if missing:
        return StepFacts(missing=missing)
    function = value_of(held, step)
    if not callable(function):
        kind = type(function).__name__
        why = f"{step!r} is of type {kind} and not a function; name the function that does forward and backward"
        return StepFacts(refused=why)
    given = {name: value_of(held, name) for name in args}
    unfit = _unfit(step, function, list(given.values()))
    if unfit:
        return StepFacts(refused=unfit)
    reached = reach(function, given, given)
    refused = refusal(reached, gpus)
    return StepFacts(refused=refused) if refused else _facts(reached, given)


def _has(held: Names, name: str) -> bool:
    try:
        value_of(held, name)
    except (KeyError, AttributeError):
        return False
    return True


def _unfit(step: str, function: Any, args: list[Any]) -> str:
    try:
        inspect.signature(function).bind(*args)
    except TypeError as e:
        shape = inspect.signature(function)
        return f"{step}{shape} cannot be called so: {e}. Write %ddp prove {step} {' '.join(shape.parameters).upper()}"
    except ValueError:  # it has no signature
        pass
    return ""


def _facts(reached: Reached, given: Names) -> StepFacts:
    values = reached.values
    batches = {
        n: BatchFacts(samples(v), digest(v), n in given, counted(v)) for n, v in values.items() if holds_batch(v)
    }
    numbers = {n: v for n, v in values.items() if isinstance(v, int) and not isinstance(v, bool)}
    return StepFacts(
        batches=batches, numbers=numbers, loaders=tuple(reached.loaders), peers=sharding.peers(reached.modules.values())
    )


def refusal(reached: Reached, gpus: bool) -> str:
    """Why the step cannot be run in copies here; empty if it can. gpus: simulated ones, which copies can use."""
    import torch
    import torch.distributed as dist

    if not system.has_proc():
        return f"copies of a rank are made by fork, which is not safe on {system.name()}"
    if not (dist.is_available() and dist.is_initialized()):
        return "the ranks have no process group; run dist.init_process_group() in a %%ddp cell first"
    tensors = [*(p for m in reached.modules.values() for p in m.parameters()), *reached.tensors()]
    devices = {t.device.type for t in tensors} - ({"cpu", "cuda"} if gpus else {"cpu"})
    if gpus and not system_extra.can_fork_quietly():
        return "copies with simulated GPUs need the function _Fork of glibc 2.34 or newer, which is not here"
    if devices or (torch.cuda.is_initialized() and not gpus):
        where = f"the step's tensors are on {', '.join(sorted(devices))}" if devices else "this rank has used CUDA"
        return (
            f"{where}, and a process that has used a GPU cannot be copied by fork; run the cells that make the model "
            "on simulated GPUs (%ddp start --simulate-gpus 2) or on CPU, and prove the step there"
        )
    return sharding.refusal(reached) or _settings()


def _settings() -> str:
    """Of DDP models, what a copy could not have."""
    ddp_type = sys.modules["torch.nn.parallel"].DistributedDataParallel
    import gc

    # by their types: isinstance asks the thing itself, and a dead weakref.proxy raises
    for ddp in (thing for thing in gc.get_objects() if issubclass(type(thing), ddp_type)):
        if getattr(ddp, "mixed_precision", None) is not None:
            return "a DDP model has mixed_precision=…, which a copy cannot have; use torch.autocast for the proof"
        if getattr(ddp, "delay_all_reduce_named_params", None):
            return "a DDP model has delay_all_reduce_named_params, which a copy cannot have"
    return ""
