"""`%ddp prove step` and `Pool.prove`: N ranks and one process take the same training step, each as a copy.

The notebook asks the ranks what the step reaches, decides what the batch is, has copies started, and waits for what
they find. If there is a difference, it tries the same with one thing changed at a time. The one that makes N ranks and
one process equal is the cause.
"""

from __future__ import annotations

import argparse
import itertools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nbddp.analysis.answers import unpacked
from nbddp.capabilities.prove import judge
from nbddp.capabilities.prove.plan import LATE, UNFIT, BatchFacts, CopyAnswer, CopyState, Plan, StepFacts
from nbddp.capabilities.prove.proof import Attempt, Proof, is_as_before, proof_of
from nbddp.errors import BadInput
from nbddp.launch.options import Parser, duration
from nbddp.launch.topology import rank_words
from nbddp.notebook.commands import Asked, CommandLine
from nbddp.protocol.codec import from_json, to_json
from nbddp.protocol.run_spec import Question

if TYPE_CHECKING:
    from nbddp.pool.pool import WorkerPool

TIMEOUT = 300.0  # seconds for each pair of runs
LOOK_SECONDS = 0.03
PATIENCE = 1.0  # seconds in which an idle rank answers
GRACE = 1.0  # seconds that other copies have when one has failed, and all beyond the time limit
NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
WORLD = re.compile(r"(^|[._])(w|ws|world|world_?size|n_?ranks|nproc\w*|num_?(replicas|ranks|gpus|processes))$", re.I)
SIZE = re.compile(r"(^|[._])(n|b|bs|batch|(micro|local)?_?batch_?size|n(um)?_?samples)$", re.I)
RANK = re.compile(r"(^|[._])(local_?|global_?)?rank$", re.I)
Facts = Mapping[int, StepFacts]

_numbers = itertools.count(1)  # of copies: an answer that comes late is that of the copy that was asked for


def prove(
    pool: WorkerPool,
    step: str,
    *args: str,
    batch: Sequence[str] = (),
    timeout: float = TIMEOUT,
    progress: Callable[[str], None] = lambda text: None,
) -> Proof:
    """Run the step on copies of the ranks and in one process, and compare. `nbddp.Pool.prove` describes the arguments.
    Raises PoolNotRunning, or BadInput if the step cannot be run so."""
    ranks = pool.placed().world_size
    for name in (step, *args, *batch):
        if NAME.fullmatch(name) is None:
            raise BadInput(f"{name!r} is not a variable on the ranks; write %ddp prove step model batch")
    if ranks < 2:
        raise BadInput("there is one rank, and N ranks are compared with one; %ddp start --nproc 2 starts two")
    if timeout <= 0:
        raise BadInput(f"--timeout {timeout:g} leaves no time; give seconds, as in --timeout 60")
    facts = unpacked(pool.answers("prove", part="look", step=step, args=list(args)))
    _check(facts)
    of_model = leaders({rank: found.peers for rank, found in facts.items()})
    each = sorted(set(of_model))
    batches = {name: [sizes[rank] for rank in each] for name, sizes in chosen_batches(facts, batch).items()}
    plan = Plan(
        step, tuple(args), tuple(batches), ones=ones(facts, batches, each), leaders=tuple(of_model), seconds=timeout
    )
    attempt = _first(pool, plan, progress)
    tried = list(_others(pool, attempt, progress)) if _is_open(attempt) else []
    return proof_of(attempt, tried, facts, batch_facts=batches, ranks=ranks)


def show(asked: Asked, line: CommandLine) -> Proof:
    args = line.args
    with asked.progress() as progress:
        return prove(
            asked.pool, args["step"], *args["arguments"], batch=args["batch"] or (), timeout=args["timeout"],
            progress=progress,
        )  # fmt: skip


def arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("step", type=_name, metavar="STEP", help="function on the ranks that does forward and backward of one step")
    add(
        "arguments",
        nargs="*",
        default=[],
        type=_name,
        metavar="ARG",
        help="variables on the ranks that are passed to it",
    )
    add("--batch", type=_names, metavar="NAMES", help="variables of the step that are batches, such as x,y")
    add("--timeout", type=duration, default=TIMEOUT, metavar="TIME", help="time limit of each attempt (default 5m)")


def _name(text: str) -> str:
    if NAME.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a name; assign the value on the ranks, and give its name")
    return text


def _names(text: str) -> tuple[str, ...]:
    return tuple(_name(part) for part in text.split(","))


# -- what is asked before ------------------------------------------------------------------------


def _check(facts: Facts) -> None:
    for name in dict.fromkeys(n for f in facts.values() for n in f.missing):
        lack = [rank for rank, f in facts.items() if name in f.missing]
        raise BadInput(f"{name!r} is not defined on {rank_words(lack)}; assign it in a %%ddp cell")
    for rank, found in facts.items():
        if found.refused:
            raise BadInput(f"rank {rank}: {found.refused}")
    loaders = [name for f in facts.values() for name in f.loaders]
    if loaders and not any(f.batches for f in facts.values()):
        raise BadInput(
            f"the step takes its batch from {loaders[0]}, and a proof needs one that it can join; fetch it before: "
            "batch = next(iter(loader)) in a %%ddp cell, and a step that takes the batch"
        )


def chosen_batches(facts: Facts, asked: Sequence[str]) -> dict[str, list[int]]:
    """Name of each batch → its samples on each rank. Raises BadInput where it is not clear what the batch is."""
    known = [facts[rank].batches for rank in sorted(facts)]
    common = [name for name in known[0] if all(name in k for k in known)]
    for name in asked:
        if name not in common:
            raise BadInput(f"the step uses no tensors of the name {name!r}; it uses {', '.join(common) or 'none'}")
    different = [n for n in common if len({k[n].digest for k in known}) > 1]
    found = list(asked) or [n for n in common if known[0][n].argument and known[0][n].samples]
    found = found or [n for n in different if known[0][n].samples]
    if not found:
        raise BadInput(
            "no tensor that the step uses differs between the ranks, so none is known to be a batch; write "
            f"--batch {common[0] if common else 'x'}, or give the batch as an argument of the step"
        )
    sizes = {name: [k[name].samples for k in known] for name in found}
    if not asked:
        _check_rest(common, known, sizes, different)
    return sizes


def _check_rest(
    common: Sequence[str],
    known: Sequence[Mapping[str, BatchFacts]],
    sizes: Mapping[str, list[int]],
    different: Sequence[str],
) -> None:
    """A tensor beside the batches that differs, or has as many entries as they have samples, may belong to them."""
    of_batch = list(sizes.values())
    for name in common:
        if name not in sizes and known[0][name].samples:
            counts = [k[name].samples for k in known]
            if name in different or counts in of_batch:
                why = "differs between the ranks" if name in different else "is as long as the batch"
                raise BadInput(
                    f"{name!r} {why}, and may or may not belong to the batch; write --batch "
                    f"{','.join([*sizes, name])} if it does, else --batch {','.join(sizes)}"
                )


def leaders(peers: Mapping[int, Sequence[int]]) -> list[int]:
    """Of each rank the first one that holds parts of the same model. peers: rank → those with which it holds parts."""
    first = {rank: rank for rank in sorted(peers)}
    for _ in peers:
        first = {rank: min(first[other] for other in (rank, *peers[rank])) for rank in first}
    return list(first.values())


def ones(facts: Facts, sizes: Mapping[str, Sequence[int]], each: Sequence[int]) -> dict[str, int]:
    """Whole numbers that the step uses, and that are the number of ranks, the rank, or a rank's samples by their names
    and values. Name → what it is in one process. each: the ranks whose batches it gets."""
    held = [facts[rank].numbers for rank in sorted(facts)]
    found = {}
    for name in held[0]:
        values = [h.get(name, -1) for h in held]
        if values == [len(held)] * len(held) and WORLD.search(name):
            found[name] = 1
        elif values == list(range(len(held))) and RANK.search(name):
            found[name] = 0
        elif (held_by := [values[rank] for rank in each]) in [list(s) for s in sizes.values()] and SIZE.search(name):
            found[name] = sum(held_by)
    return found


# -- attempts ------------------------------------------------------------------------------------


def _first(pool: WorkerPool, plan: Plan, progress: Callable[[str], None]) -> Attempt:
    """In float64 where the step allows that, else in its own types. Raises BadInput if it fails there too."""
    why = ""
    for changed in (plan, replace(plan, double=False), replace(plan, double=False, watch=False)):
        attempt = _attempt(pool, changed, progress, "the step in float64" if changed.double else "the step")
        if not attempt.error:
            return replace(attempt, no_double=why)
        if attempt.kind == UNFIT:
            raise BadInput(f"the batches of the ranks make no batch for one process: {attempt.error}")
        if attempt.kind == LATE:
            break
        why = why or attempt.error
    where = "one process with all batches" if attempt.in_one else "copies of the ranks"
    raise BadInput(f"the step failed in {where}: {attempt.error}\nNothing on the ranks has changed.")


def _attempt(pool: WorkerPool, plan: Plan, progress: Callable[[str], None], words: str) -> Attempt:
    progress(f"{words}, on copies of {pool.placed().world_size} ranks and in one process")
    copy = next(_numbers)
    try:
        pool.answers("prove", part="start", plan=to_json(plan), copy=copy)
        return Attempt(plan, _wait(pool, plan.seconds, copy))
    finally:  # also after Stop: copies that still run are ended
        _end(pool, copy)


def _wait(pool: WorkerPool, seconds: float, copy: int) -> dict[int, CopyAnswer]:
    """rank → what its copy has found. Once one has failed, the others, which may wait for it, have a moment."""
    found: dict[int, CopyAnswer] = {}
    ranks = range(pool.placed().world_size)
    until = time.monotonic() + seconds + GRACE
    while len(found) < len(ranks) and time.monotonic() < until:
        for rank in [r for r in ranks if r not in found]:
            told = pool.ask(rank, Question.of("proof", copy=copy), PATIENCE)
            its = from_json(CopyState, told or {"state": ""})
            if told is None:
                pool.answers("prove", part="there")  # raises if a rank has ended
            elif its.state == "done" and its.answer is not None:
                found[rank] = its.answer
                if its.answer.error:
                    until = min(until, time.monotonic() + GRACE)
            elif its.state == "none":
                raise BadInput(f"rank {rank} has no copy any more; run %ddp prove again")
        time.sleep(LOOK_SECONDS)
    if not found:
        raise BadInput("the copies of the ranks do not answer; run %ddp prove again, or %ddp restart")
    return found


def _end(pool: WorkerPool, copy: int) -> None:
    for rank in range(pool.placed().world_size):
        pool.ask(rank, Question.of("proof", copy=copy, end=True), PATIENCE)


def _is_open(attempt: Attempt) -> bool:
    """Whether other attempts may tell the cause of a difference."""
    deviation = attempt.comparison.deviation
    if deviation is None or attempt.before or attempt.alone or attempt.backwards[0] != attempt.backwards[1]:
        return False
    return not deviation.spread > attempt.comparison.allowed and (deviation.constant or not attempt.random)


def _others(pool: WorkerPool, first: Attempt, progress: Callable[[str], None]) -> Iterator[tuple[str, Attempt]]:
    """The same with one thing changed, until N ranks and one process are equal: what, and the attempt."""
    for name, plan, words in _changes(first):
        attempt = _attempt(pool, plan, progress, f"the step {words}")
        yield name, attempt
        if name == "turned" and not attempt.error and is_as_before(first, attempt):
            continue
        if name == "turned" or (not attempt.error and attempt.comparison.equal):
            return


def _changes(first: Attempt) -> Iterator[tuple[str, Plan, str]]:
    assert first.comparison.deviation is not None
    row = judge.known_factor(first.comparison.deviation, len(first.sizes))
    if row is not None:
        if row.name == "1/N":
            yield "once", replace(first.plan, same=True, once=True), "with one batch everywhere"
        return
    yield "turned", replace(first.plan, turned=True), "with the batches in another order"
    if len(set(first.sizes)) > 1 and min(first.sizes) > 0:
        yield "sizes", replace(first.plan, size=min(first.sizes)), "with batches of one size"
    if first.statistics:
        yield "statistics", replace(first.plan, evaluated=True), "with BatchNorm in eval mode"
    yield "batches", replace(first.plan, same=True), "with rank 0's batch on all ranks"
