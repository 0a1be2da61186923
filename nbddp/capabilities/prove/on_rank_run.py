"""A run of the step in copies: on each rank, and in one process; and the comparison, on rank 0's copy.

Rank 0's copy forks once more before anything has run. That process forgets all groups, is a world of its own, gets the
batches of all ranks and runs the step there. No collective joins it with the others.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from nbddp.capabilities.prove import on_rank_copy as copying
from nbddp.capabilities.prove import on_rank_shards as sharding
from nbddp.capabilities.prove.on_rank_batch import CannotJoin, cut, digest, joined, like, samples
from nbddp.capabilities.prove.on_rank_reach import Names, Reached, reach
from nbddp.capabilities.prove.plan import CopyAnswer, OneProcess, Plan, SeenFacts, TensorPair
from nbddp.compat.extra import torch as torch_extra
from nbddp.deadlock.on_rank import frames
from nbddp.protocol.codec import from_json, to_json
from nbddp.worker.parts import RankWorker

TINY = 1e-300
FORKED = "Autograd-and-Fork"  # what torch refers to where it sees GPUs, and has used autograd before a fork
NO_BACKWARD = (
    "where torch sees GPUs, it cannot run backward in a copy of a process that has run it; %ddp restart --env "
    "CUDA_VISIBLE_DEVICES= hides them, then run the cells again on CPU"
)


class StepFailed(Exception):
    """The step raised; its text says what, and where. side: `ranks` or `one`."""


def value_of(held: Names, name: str) -> Any:
    """What a name, or a name with attributes, holds. Raises KeyError or AttributeError."""
    first, *path = name.split(".")
    found = held[first]
    for part in path:
        found = getattr(found, part)
    return found


class Copy:
    """This process, once it is cut off."""

    def __init__(self, worker: RankWorker, plan: Plan, living: copying.Living, rank: int, size: int):
        self.worker, self.plan, self.living, self.rank, self.size = worker, plan, living, rank, size
        held = worker.shell.user_ns
        self.step = value_of(held, plan.step)
        self.args: Names = {name: value_of(held, name) for name in plan.args}
        self.reached: Reached = reach(self.step, self.args, self.args)
        self.seen = WatchedStep()
        self.groups: list[tuple[Any, Any]] = []  # of the rank, and what takes their place

    def batches(self) -> Names:
        return {name: self.reached.values[name] for name in self.plan.batches}

    def put(self, batches: Names) -> None:
        for name, value in batches.items():
            self.reached.places[name].put(value)
            self.reached.values[name] = value

    def prepare(self) -> list[copying.DdpParts]:
        """Precision, dropout and modes, alike on all sides; the DDP models are taken apart."""
        import torch

        parts = copying.take_apart(self.living.ddp)
        modules, optimizers = self.living.modules, self.living.optimizers
        if sharding.settle(self.reached.modules.values(), optimizers, self.plan.double):
            self.seen.precision.add(sharding.MIXED)
        if self.plan.evaluated:
            for module in modules:
                if isinstance(module, torch.nn.BatchNorm1d | torch.nn.BatchNorm2d | torch.nn.BatchNorm3d):
                    module.eval()
        for tensor in copying.own_tensors(modules, optimizers):
            tensor.grad = None
        if self.plan.double:
            torch.set_default_dtype(torch.float64)
            copying.to_double(copying.own_tensors(modules, optimizers))
            copying.to_double(self.reached.tensors())
        without_dropout(self.seen, modules)
        count_backwards(self.seen)
        self.seen.hooks = {name for part in parts for name in part.hook_names}
        copying.run_eagerly()
        return parts

    def parameters(self) -> Names:
        """Name → parameter, of the models that the step reaches and of their optimizers; each once."""
        found: dict[int, tuple[str, Any]] = {}
        several = len(self.reached.modules) > 1
        for title, module in self.reached.modules.items():
            for name, parameter in module.named_parameters():
                plain = ".".join(p for p in name.split(".") if p not in ("module", torch_extra.COMPILED))
                found.setdefault(id(parameter), (f"{title}.{plain}" if several else plain, parameter))
        for title, optimizer in self.reached.optimizers.items():
            some = [p for group in optimizer.param_groups for p in group["params"]]
            for i, parameter in enumerate(some):
                found.setdefault(id(parameter), (f"{title}'s parameter {i}", parameter))
        return dict(found.values())

    def call(self, watch: bool) -> Names:
        """Run the step; `gradient NAME` and `update NAME` → what it has left there."""
        named = self.parameters()
        before = {name: p.detach().clone() for name, p in named.items()}
        at_steps = _Gradients(named)
        states = random_states()
        with maybe(self.seen, watch):
            self.step(*self.args.values())
        if random_states() != states:
            self.seen.random.add("random or numpy.random")
        return at_steps.found(named, before)


class _Gradients:
    """Gradients as they are when an optimizer begins to use them."""

    def __init__(self, named: Names):
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._names = {id(p): name for name, p in named.items()}
        self._kept: dict[str, Any] = {}
        self.stepped = False
        self._hook = register_optimizer_step_pre_hook(self._keep)

    def _keep(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.stepped = True
        if len(args) > 1 or kwargs:
            return  # a closure computes them within the step
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            name = self._names.get(id(parameter))
            if name is not None and parameter.grad is not None:
                self._kept.setdefault(name, _dense(parameter.grad))

    def found(self, named: Names, before: Names) -> Names:
        self._hook.remove()
        gradients = {n: self._kept.get(n, None if p.grad is None else _dense(p.grad)) for n, p in named.items()}
        made = {f"gradient {n}": g for n, g in gradients.items() if g is not None}
        if self.stepped or not made:
            moved = {n: p.detach() - before[n] for n, p in named.items()}
            made.update({f"update {n}": m for n, m in moved.items() if sharding.is_shard(m) or bool(m.count_nonzero())})
        return made


def _dense(gradient: Any) -> Any:
    made = gradient.detach()
    return (made.to_dense() if made.is_sparse else made).clone()


# -- the two sides -------------------------------------------------------------------------------


def in_copy(worker: RankWorker, plan: Plan, living: copying.Living, rank: int, size: int) -> CopyAnswer:
    """The work of a rank's copy."""
    copy = Copy(worker, plan, living, rank, size)
    pairs = copying.with_copies(worker, rank, size, plan.seconds)
    copy.groups = pairs
    copying.put_in_place(pairs, living)
    gathered = _gather(copy)
    sharding.reshard(copy.reached.modules.values())
    shards = sharding.gathered(copy.reached)
    reference = _Reference(copy, gathered, shards) if rank == 0 else None
    del shards
    if plan.same:
        copy.put(_shared(copy.batches()))
    parts = copy.prepare()
    copying.put_together(parts)
    note_cuts(copy.seen)
    differ_before = tuple(name for name, off in _spread(copy.parameters()).items() if off > 0)
    try:
        found = copy.call(watch=False)
    except BaseException as e:
        raise StepFailed(f"ranks: {words(e, worker.files.shown)}") from e

    seen = copy.seen.facts()
    agreed = _agreed(found)
    spread = _spread({name: found[name] for name in agreed})
    alone = tuple(sorted(found.keys() - set(agreed)))
    found = sharding.wholes(found, agreed) | {name: found[name] for name in alone}
    answer = CopyAnswer(before=differ_before, alone=alone, seen=seen)
    if reference is None:
        return answer
    one, theirs = reference.result()
    return replace(answer, one=one, pairs=() if one.error else compare(found, theirs, spread))


def _gather(copy: Copy) -> list[Names] | None:
    """The batches of all ranks, on rank 0."""
    import torch.distributed as dist

    own = copy.batches()
    if copy.plan.size:
        own = {name: cut(value, samples(value), copy.plan.size) for name, value in own.items()}
        copy.put(own)
    gathered: list[Any] | None = [None] * copy.size if copy.rank == 0 else None
    dist.gather_object(own, gathered)
    return None if gathered is None else [_here(one, own) for one in _each_once(gathered, copy.plan)]


def _each_once(gathered: Sequence[Any], plan: Plan) -> list[Any]:
    """The batches of the plan's ranks. Raises CannotJoin if ranks that hold parts of one model have different ones."""
    each = [digest(batches) for batches in gathered]
    for rank, leader in enumerate(plan.leaders):
        if each[rank] != each[leader]:
            raise CannotJoin(
                f"ranks {leader} and {rank} hold parts of one model, and have different batches; give the ranks of one "
                "tensor parallel group the same batch"
            )
    return [gathered[rank] for rank in sorted(set(plan.leaders))]


def _here(batches: Names, own: Names) -> Names:
    """Batches of another rank on the devices of this rank's."""
    return {name: like(value, own[name]) for name, value in batches.items()}


def _shared(own: Names) -> Names:
    """Rank 0's batches, on this rank's devices."""
    import torch.distributed as dist

    held = [own]
    dist.broadcast_object_list(held, src=0)
    return _here(held[0], own)


class _Reference:
    """One process with the batches of all ranks; a fork of rank 0's copy."""

    def __init__(self, copy: Copy, gathered: Sequence[Names] | None, shards: sharding.WholeModel):
        assert gathered is not None
        if copy.plan.same:
            gathered = [gathered[0]] * (1 if copy.plan.once else len(gathered))
        if copy.plan.turned:
            gathered = [*gathered[1:], gathered[0]]
        sizes = [next((samples(v) for v in one.values() if samples(v)), 0) for one in gathered]
        union = {n: joined([one[n] for one in gathered], n, sizes) for n in copy.plan.batches}
        self.sizes = sizes
        parent = os.getpid()
        self._read, write = os.pipe()
        self._pid = copying.forked(copying.has_gpus(copy.worker), self._read, write)
        if self._pid == 0:
            os.close(self._read)
            try:
                _alone(copy, union, shards, parent, write)
            finally:
                os._exit(1)
        os.close(write)

    def result(self) -> tuple[OneProcess, Names]:
        """Its results, and its tensors."""
        import torch

        with os.fdopen(self._read, "rb") as pipe:
            data = pipe.read()
        os.waitpid(self._pid, 0)
        if not data:
            return OneProcess("the process exited without a message"), {}
        size = int.from_bytes(data[:8], "big")
        told = from_json(OneProcess, json.loads(data[8 : 8 + size]))
        tensors = torch.load(io.BytesIO(data[8 + size :]), weights_only=True)
        return replace(told, sizes=tuple(self.sizes)), tensors


def _alone(copy: Copy, union: Names, shards: sharding.WholeModel, parent: int, write: int) -> None:
    """The one process's work; does not return."""
    import torch

    copying.cut_off(parent, [write], copy.plan.seconds)
    copy.worker.parts.tell("copied")
    tensors: Names = {}
    try:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        pairs = copying.alone(copy.groups, copying.has_gpus(copy.worker))
        copy.put({**union, **copy.plan.ones})
        shards.put(copy.reached.modules.values())
        copy.prepare()
        copying.plain_models()
        copying.put_in_place(pairs, copy.living)
        tensors = copy.call(watch=copy.plan.watch)
        told = OneProcess(seen=copy.seen.facts())
    except BaseException as e:
        told = OneProcess(words(e, copy.worker.files.shown))
    kept = io.BytesIO()
    torch.save(tensors, kept)
    head = json.dumps(to_json(told)).encode()
    with os.fdopen(write, "wb") as pipe:
        pipe.write(len(head).to_bytes(8, "big") + head + kept.getvalue())
    os._exit(0)


def words(error: BaseException, names: dict[str, str]) -> str:
    """The error and the last place in the program that led to it. names: file of each cell → how it is shown."""
    if FORKED in str(error):
        return NO_BACKWARD
    own = [f for f in traceback.extract_tb(error.__traceback__) if frames.is_user(f.filename, names)]
    place = f" (line {own[-1].lineno}: {own[-1].line})" if own else ""
    text = str(error).strip().split("\n")[0] if not isinstance(error, StepFailed | CannotJoin) else str(error)
    kind = "" if isinstance(error, StepFailed | CannotJoin | copying.StepActs) else f"{type(error).__name__}: "
    return f"{kind}{text[:600]}{place}"


# -- the comparison ------------------------------------------------------------------------------


def _agreed(found: Names) -> list[str]:
    """Names that all ranks have, in rank 0's order."""
    import torch.distributed as dist

    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, list(found))
    return [name for name in held[0] if all(name in other for other in held)]


def _spread(tensors: Names) -> dict[str, float]:
    """Name → how far the ranks' values are apart, as a part of their size."""
    import torch
    import torch.distributed as dist

    found = {}
    for name, tensor in tensors.items():
        flat = sharding.whole(tensor.detach()).double().reshape(-1).contiguous()
        low, high = flat.clone(), flat.clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        dist.all_reduce(high, op=dist.ReduceOp.MAX)
        size = torch.maximum(low.abs(), high.abs()).norm().item()
        found[name] = (high - low).norm().item() / max(size, TINY)
    return found


def compare(ours: Names, theirs: Names, spread: dict[str, float]) -> tuple[TensorPair, ...]:
    """Each gradient and update of the ranks beside that of one process."""
    pairs = []
    for name in dict.fromkeys([*theirs, *ours]):
        got, want = ours.get(name), theirs.get(name)
        if got is None or want is None:
            pairs.append(TensorPair(name, missing="ranks" if got is None else "one"))
        elif got.shape != want.shape:
            pairs.append(TensorPair(name, missing="shape"))
        else:
            a, b = (each.cpu().double().reshape(-1) for each in (got, want))
            pairs.append(_pair(name, spread.get(name, 0.0), a, b))
    return tuple(pairs)


def _pair(name: str, spread: float, a: Any, b: Any) -> TensorPair:
    finite = bool(a.isfinite().all() and b.isfinite().all())
    if not finite:
        return TensorPair(name, spread=0.0, finite=False)
    largest = float((a - b).abs().max()) if a.numel() else 0.0
    return TensorPair(
        name, spread=spread, dot=float(a @ b), square=float(b @ b), own=float(a @ a), apart=float((a - b) @ (a - b)),
        largest=largest,
    )  # fmt: skip


def main(worker: RankWorker, plan: Plan, living: copying.Living, parent: int, write: int) -> None:
    """A fork of a rank begins; does not return."""
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        copying.cut_off(parent, [write], plan.seconds, living.shared)
        worker.parts.tell("copied")
        answer = in_copy(worker, plan, living, rank, size)
    except BaseException as e:
        answer = CopyAnswer(words(e, worker.files.shown), type(e).__name__)
    with contextlib.suppress(OSError), os.fdopen(write, "wb") as pipe:  # an error: nobody waits any more
        pipe.write(json.dumps(to_json(answer)).encode())
    os._exit(0)


# -- what is watched in a step -----------------------------------------------------------------------

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
ATTENTION = "scaled_dot_product"  # random by its dropout alone, and that is off
CUTS = ("all_gather", "all_gather_into_tensor", "all_gather_object", "gather", "all_gather_single")


class WatchedStep:
    """As `SeenFacts`, while it is being found."""

    def __init__(self) -> None:
        self.dtypes: set[str] = set()
        self.random: set[str] = set()
        self.statistics: set[str] = set()
        self.dropout: set[str] = set()
        self.cuts: set[str] = set()
        self.hooks: set[str] = set()
        self.precision: set[str] = set()
        self.backwards = 0

    def count(self) -> None:
        self.backwards += 1

    def facts(self) -> SeenFacts:
        names = ("dtypes", "random", "statistics", "dropout", "cuts", "hooks", "precision")
        found: dict[str, Any] = {name: tuple(sorted(getattr(self, name))) for name in names}
        return SeenFacts(**found, backwards=self.backwards)


def watching(seen: WatchedStep) -> AbstractContextManager[Any]:
    """While this is open, operators are seen."""
    import torch

    watch: AbstractContextManager[Any] = torch_extra.watch_operators(
        lambda func, args, found: _note(seen, torch, func, args, found)
    )
    return watch


def _note(seen: WatchedStep, torch: Any, func: Any, args: Any, found: Any) -> None:
    name = func.__name__.partition(".")[0]
    if torch.Tag.nondeterministic_seeded in func.tags and ATTENTION not in name:
        seen.random.add(f"torch.{name.rstrip('_')}")
    if "batch_norm" in name and "backward" not in name and _computes_statistics(args):
        seen.statistics.add("batch_norm")
    for value in found if isinstance(found, list | tuple) else (found,):
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1:
            seen.dtypes.add(str(value.dtype).removeprefix("torch."))


def _computes_statistics(args: Any) -> bool:
    flags = [a for a in args if isinstance(a, bool)]
    return not flags or flags[0]


def random_states() -> tuple[Any, ...]:
    """Of generators that are not torch's."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), repr(numpy.random.get_state()) if numpy is not None else None


def without_dropout(seen: WatchedStep, modules: list[Any]) -> None:
    """Have no dropout in this process; what would have been is noted."""
    import torch
    from torch.nn import functional

    def plain(name: str) -> Callable[..., Any]:
        @functools.wraps(getattr(functional, name))
        def same(
            input: Any,  # noqa: A002 - torch's name
            p: float = 0.5,
            training: bool = name != "feature_alpha_dropout",
            *a: Any,
            **k: Any,
        ) -> Any:
            if training and p > 0:
                seen.dropout.add(f"{name}, p={p:g}")
            return input

        return same

    for name in DROPOUTS:
        setattr(functional, name, plain(name))
    attention = functional.scaled_dot_product_attention

    def attend(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *a: Any, **k: Any
    ) -> Any:
        if dropout_p > 0:
            seen.dropout.add(f"scaled_dot_product_attention, p={dropout_p:g}")
        return attention(query, key, value, attn_mask, 0.0, *a, **k)

    functional.scaled_dot_product_attention = attend
    for module in modules:
        if isinstance(module, torch.nn.RNNBase) and module.training and module.dropout > 0:
            seen.dropout.add(f"{type(module).__name__}, p={module.dropout:g}")
            module.dropout = 0.0


def note_cuts(seen: WatchedStep) -> None:
    """Note calls of collectives whose results carry no gradient."""
    import torch.distributed as dist

    def noted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.cuts.add(name)
            return original(*args, **kwargs)

        return call

    for name in CUTS:
        if hasattr(dist, name):
            setattr(dist, name, noted(name, getattr(dist, name)))


def count_backwards(seen: WatchedStep) -> None:
    """Count calls of backward: a step that makes one per sample makes more of them with more samples."""
    import torch

    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        seen.count()
        return original(*args, **kwargs)

    torch.autograd.backward = backward


def maybe(seen: WatchedStep, watch: bool) -> AbstractContextManager[Any]:
    return watching(seen) if watch else nullcontext()
