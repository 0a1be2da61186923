"""Lesson 10: a checkpoint that holds all that matters, so that a failed training goes on as if nothing had happened.

Four runs of one training on the ranks of the pool: undisturbed and without checkpoints (the reference); with the
learner's `save` alone; the same until the last rank fails in the middle; and once more, beginning with the learner's
`load`. What they bring back is compared bit by bit, and what differs is named. Then `save` and `load` run on one rank
less. The judging is pure.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from nbddp.errors import WorkerFailed, several
from nbddp.launch.topology import counted
from nbddp.lessons.framework.answer import OK, Exercise, Wrong, mismatch, not_written
from nbddp.lessons.framework.run_check import Reference, grouped, in_group, in_world, pool, world_sizes
from nbddp.lessons.l10_restarts.on_rank import EVERY, FAIL_AT, RankDeath, State, Training, train
from nbddp.output.screens import NullScreen

Run = Mapping[int, Training]  # by rank
LAST_SAVE = FAIL_AT // EVERY * EVERY  # the step with which the training must go on
UNDISTURBED = Reference(train, None, "", None, False)  # `train` without a checkpoint


def undisturbed(reference: Run, saving: Run) -> str:
    """Whether a run that only saves is the one that does not; the line, or empty."""
    for rank, run in saving.items():
        for step, was in reference[rank]["states"].items():
            state = run["states"].get(step)
            changed = next((part for part in NAMES if state is None or state[part] != was[part]), None)
            if changed:
                return (
                    f"rank {rank}, step {step}: a run that only saves has another {NAMES[changed]} than one without "
                    "checkpoints; save must not change anything"
                )
    return ""


Part = Literal["model", "optimizer", "lr", "sampler", "rng"]
NAMES: Mapping[Part, str] = {
    "model": "set of weights", "optimizer": "optimizer state", "lr": "learning rate", "sampler": "sampler position",
    "rng": "random state",
}  # fmt: skip


def judged(reference: Run, resumed: Run) -> str:
    """The line for a resumed run, compared with the undisturbed one."""
    return (
        _progress(resumed)
        or _state(reference, resumed)
        or _shared_file(resumed)
        or _not_atomic(resumed)
        or _gap(resumed)
        or _to_the_end(reference, resumed)
        or OK
    )


def _progress(resumed: Run) -> str:
    """Whether every rank goes on with the step after the last checkpoint."""
    for rank, run in resumed.items():
        began = run["began"]
        if began is None:
            return "load returns None; it must return the step to continue with, which save received"
        if type(began) is not int:
            return f"load returns {began!r} on rank {rank}; it must return the step to continue with, a whole number"
        if began == 0:
            return (
                f"rank {rank} continues with step 0: the step is not in the checkpoint or not returned. All steps "
                "would be repeated on weights that are already trained"
            )
        if began != LAST_SAVE:
            told = mismatch(LAST_SAVE, began, "return the step that save received")
            return f"rank {rank}, step to continue with: {told}"
    return ""


def _state(reference: Run, resumed: Run) -> str:
    """The first part of the state that is not as it was when the checkpoint was written, over all ranks."""
    pairs = {r: (reference[r]["states"][LAST_SAVE], resumed[r]["states"][LAST_SAVE]) for r in resumed}
    for rank, (was, now) in pairs.items():
        lost = [name for name, text in was["model"].items() if now["model"][name] != text]
        if lost:
            return f"rank {rank}, {lost[0]}: the weights are not those of the checkpoint; load the model's state_dict"
    for part, words in PARTS.items():
        lost_on = [rank for rank, (was, now) in pairs.items() if was[part] != now[part]]
        if lost_on:
            return _lost(part, words, lost_on, pairs)
    return ""


PARTS: Mapping[Part, str] = {
    "optimizer": (
        "the optimizer's momentum is lost: the weights are right, but the next step is not; save and load "
        "optimizer.state_dict()"
    ),
    "lr": "the learning rate is the initial one: load the optimizer's whole state_dict, param_groups too",
    "sampler": (
        "the sampler restarts its epoch: some samples are seen twice and others never; save and load "
        "batches.state_dict()"
    ),
    "rng": (
        "the random state is not restored, so dropout draws another mask; save torch.get_rng_state() and set it in load"
    ),
}


def _lost(part: str, words: str, lost_on: Sequence[int], pairs: Mapping[int, tuple[State, State]]) -> str:
    where = several("rank", lost_on)
    if part == "rng" and len(lost_on) < len(pairs):
        kept = next(r for r in pairs if r not in lost_on)
        if all(pairs[r][1]["rng"] == pairs[kept][0]["rng"] for r in lost_on):
            return (
                f"{where}: the random state is rank {kept}'s, and each rank has its own. Gather them on the rank that "
                "writes, or write a file for each rank"
            )
    return f"{where}: {words}"


def _shared_file(resumed: Run) -> str:
    """Whether two ranks write one file, each over the other's."""
    writers: dict[str, list[int]] = {}
    for rank, run in resumed.items():
        for file in {*run["wrote"], *run["moved"]}:
            writers.setdefault(file, []).append(rank)
    for ranks in writers.values():
        if len(ranks) > 1:
            return (
                f"{several('rank', ranks)} write the same file, each over the other's: let only rank 0 write, or give "
                "each rank its own file"
            )
    return ""


def _not_atomic(resumed: Run) -> str:
    """Whether a file that load reads is written in place."""
    read = {file for run in resumed.values() for file in run["read"]}
    if any(file in read for run in resumed.values() for file in run["wrote"]):
        return (
            "the checkpoint is written over the last good one: a failure during save leaves neither; write "
            "to another name first, then call os.replace"
        )
    return ""


def _gap(resumed: Run) -> str:
    """Whether a file that load reads is removed before the new one gets its name."""
    read = {file for run in resumed.values() for file in run["read"]}
    if any(file in read for run in resumed.values() for file in run["gap"]):
        return (
            "the last good checkpoint is removed before the new one has its name: a failure in between leaves none; "
            "os.replace replaces it atomically"
        )
    return ""


def _to_the_end(reference: Run, resumed: Run) -> str:
    """All later steps and the final state, bit by bit."""
    for rank, run in resumed.items():
        for step, was in reference[rank]["states"].items():
            if step >= LAST_SAVE and run["states"].get(step) != was:
                return f"rank {rank} differs from the undisturbed run from step {step} on"
        if run["final"] != reference[rank]["final"]:
            return f"rank {rank} ends in another state than the undisturbed run"
    return ""


def judge(make: Callable[[str], Any]) -> str:
    """Train, save, fail, train again; the line."""
    if not (isinstance(make, type) or getattr(make, "is_class", False)):  # a Handed is none itself
        return "pass the class itself: check.Checkpoint(Checkpoint)"
    ranks = range(pool(2).world_size)
    with tempfile.TemporaryDirectory() as folder:
        path, other = (str(Path(folder, name, "checkpoint.pt").resolve()) for name in ("failing", "undisturbed"))
        for file in (path, other):
            Path(file).parent.mkdir()
        reference = UNDISTURBED.by_rank()
        saving = _run("save", make, other)
        _fail(make, path)
        if not list(Path(path).parent.glob("*")):
            return not_written("save").replace("returned None", "wrote no file")
        resumed = _run("load", make, path, resumed=True)
        runs = [{r: run[r] for r in ranks} for run in (reference, saving, resumed)]
        line = undisturbed(runs[0], runs[1]) or judged(runs[0], runs[2])
        if line == OK:
            line = _first_start(runs[1]) or OK
        if line == OK:
            _on_fewer(make, str(Path(folder, "fewer", "checkpoint.pt").resolve()))
    return line


def _on_fewer(make: Callable[[str], Any], path: str) -> None:
    """Save and load on one rank fewer: a number in the place of the world size fails there. Raises Wrong."""
    Path(path).parent.mkdir()
    with grouped():
        size = world_sizes()[1]
        for part, resumed in (("save", False), ("load", True)):
            try:
                in_world(size, train, make, path, None, resumed, screen=NullScreen())
            except Wrong as wrong:
                raise Wrong(f"{part}, on {counted(size, 'rank')}: {_said(wrong, path)}") from wrong


def _first_start(saving: Run) -> str:
    """Whether `load` begins at step 0 where no checkpoint has been written yet."""
    for rank, run in saving.items():
        kind, value = run["first"]
        if (kind, value) != ("value", 0) or type(value) is not int:
            told = f"returns {value!r}" if kind == "value" else f"raises {str(value).partition(':')[0]}"
            return (
                f"rank {rank}: load {told} at the first start, when there is no checkpoint yet; return 0 if "
                "os.path.exists(self.path) is false"
            )
    return ""


def _fail(make: Callable[[str], Any], path: str) -> None:
    """The attempt that fails, for real: one rank raises, and the pool frees the others."""
    try:
        _run("save", make, path, fail_at=FAIL_AT)
    except Wrong as wrong:
        failed = wrong.__cause__.__cause__ if wrong.__cause__ else None
        if not (isinstance(failed, WorkerFailed) and failed.exception_type.endswith(RankDeath.__name__)):
            raise


def _run(part: str, make: Callable[[str], Any], path: str, *, fail_at: int | None = None, resumed: bool = False) -> Run:
    """One run; `part` is the method that is to blame if it does not end well."""
    try:
        return in_group(train, make, path, fail_at, resumed)
    except Wrong as wrong:
        raise Wrong(f"{part}: {_said(wrong, path)}") from wrong


def _said(wrong: Wrong, path: str) -> str:
    text = str(wrong).replace(f"{Path(path).parent}/", "")  # a folder of another name each time
    return next((words for error, words in ERRORS.items() if error in text), text)


ERRORS = {
    "Error(s) in loading state_dict": (
        "the names in the checkpoint begin with module. because save took them from the DDP model, but load "
        "gets the model before DDP wraps it; save model.module.state_dict()"
    ),
    "has no attribute 'module'": "load gets the model before DDP wraps it, so there is no model.module yet; load into "
    "model",
    "UnpicklingError": "torch.load reads only tensors and plain containers, not other objects (weights_only); save "
    "state_dict()s instead of the objects",
}  # what is in torch's error → what to say


Checkpoint = Exercise(
    "Checkpoint",
    judge,
    takes="class",
    verifies="a training that failed and resumed equals the undisturbed one, bit by bit, on every rank",
)
