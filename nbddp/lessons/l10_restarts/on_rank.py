"""Lesson 10 on a rank: a small training that can fail in the middle and go on from a learner's checkpoint.

What comes back is plain data: the state before every step in texts that are equal if and only if the bits are. torch is
imported in the functions only: a check names this module in the notebook's kernel.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from nbddp.launch.topology import counted
from nbddp.lessons.framework.async_work import Misused
from nbddp.lessons.framework.on_rank import outcome

if TYPE_CHECKING:
    import torch

STEPS, EVERY, FAIL_AT, BATCH, SAMPLES = 9, 2, 5, 2, 24
SEED, OTHER_SEED = 500, 9000  # of the first attempt and of the next: a new process has another random state


class State(TypedDict):
    """A rank's, as texts that are equal if and only if the bits are."""

    model: dict[str, str]  # by parameter
    optimizer: str
    lr: str
    sampler: str
    rng: str


class Touched(TypedDict):
    wrote: list[str]  # files
    read: list[str]
    moved: list[str]  # where files were renamed to
    gap: list[str]  # those of these that were removed before


class Training(Touched):
    began: Any  # what load returned
    first: tuple[str, Any]  # the outcome of a load without a checkpoint
    states: dict[int, State]  # before each step
    final: State


class RankDeath(Exception):
    """Stands for the death of a rank."""


class Batches:
    """A sampler with a position: this rank's indices, batch after batch, shuffled anew in every epoch."""

    def __init__(self, samples: int, batch: int, rank: int, world_size: int):
        self.samples, self.batch, self.rank, self.world_size = samples, batch, rank, world_size
        self.epoch = self.position = 0

    def __next__(self) -> torch.Tensor:
        import torch

        order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(self.epoch))
        own = order[self.rank :: self.world_size][self.position : self.position + self.batch]
        self.position += self.batch
        if self.position + self.batch > self.samples // self.world_size:
            self.epoch, self.position = self.epoch + 1, 0
        return own

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


def text_of(value: Any) -> str:
    """A digest of tensors, and of lists and dicts of them."""
    import torch

    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:12]
    if isinstance(value, dict):
        return " ".join(f"{k}={text_of(v)}" for k, v in sorted(value.items(), key=lambda item: str(item[0])))
    return "[" + " ".join(map(text_of, value)) + "]" if isinstance(value, list | tuple) else repr(value)


def seen(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> State:
    import torch

    state = optimizer.state_dict()
    return {
        "model": {name: text_of(p) for name, p in model.named_parameters()},
        "optimizer": text_of(state["state"]),
        "lr": repr(state["param_groups"][0]["lr"]),
        "sampler": text_of(batches.state_dict()),
        "rng": text_of(torch.get_rng_state()),
    }


def train(make: Callable[[str], Any] | None, path: str, fail_at: int | None, resumed: bool) -> Training:
    """STEPS steps; with `make`, a checkpoint after every EVERY, and first of all `load` is called: with `resumed` there
    is a checkpoint at `path`, otherwise none.

    fail_at: the last rank raises RankDeath before this step; the others wait for it in theirs. In a process group.
    """
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)  # the same data everywhere
    x, y = torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 1)
    model, optimizer = fresh(rank, resumed)
    batches, began = Batches(SAMPLES, BATCH, rank, world_size), 0
    states: dict[int, State] = {}
    first: tuple[str, Any] = ("value", 0)
    with files() as touched:
        checkpoint = make(path) if make else None
        if checkpoint and resumed:
            began = checkpoint.load(model, optimizer, batches)
        elif checkpoint:
            first = outcome(checkpoint.load, (model, optimizer, batches))
        copy = DistributedDataParallel(model)
        settle(copy, x)
        for step in range(began if type(began) is int and 0 <= began <= STEPS else STEPS, STEPS):
            states[step] = seen(model, optimizer, batches)
            if step == fail_at and rank == world_size - 1:
                raise RankDeath
            own = next(batches)
            learn(copy, optimizer, x[own], y[own], step)
            if checkpoint and (step + 1) % EVERY == 0:
                with lists_of_the_world():
                    checkpoint.save(copy, optimizer, batches, step + 1)
                dist.barrier()
    return {"began": began, "first": first, "states": states, "final": seen(model, optimizer, batches), **touched}


def fresh(rank: int, resumed: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model with the same first weights on every rank, and its optimizer; a resumed training has others. After that
    each rank draws random numbers of its own."""
    import torch

    seed, rate = (OTHER_SEED, 0.3) if resumed else (SEED, 0.2)
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.25), torch.nn.Linear(8, 1))
    torch.manual_seed(seed + rank)
    return model, torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def learn(copy: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, step: int) -> None:
    """One step; the third ends with a schedule that has done its part."""
    optimizer.zero_grad()
    (copy(x) - y).square().mean().backward()
    optimizer.step()
    if step == 2:
        optimizer.param_groups[0]["lr"] = 0.1


def settle(copy: Any, x: torch.Tensor) -> None:
    """A forward and backward pass that leaves nothing behind but DDP's layout of buckets.

    DDP lays its buckets out anew after its first step (`Reducer::rebuild_buckets`). Without this, the step after a
    restart would add up four ranks' gradients in another order than the undisturbed run. The last bit would differ.
    """
    import torch

    state = torch.get_rng_state()
    copy(x).sum().backward()
    copy.zero_grad()
    torch.set_rng_state(state)


@contextmanager
def lists_of_the_world() -> Iterator[None]:
    """Inside the block a list that gathers from all ranks must have one place per rank. torch accepts a longer one, and
    then the same code fails on a larger world."""
    import torch.distributed as dist

    gathered = {"all_gather_object": dist.all_gather_object, "gather_object": dist.gather_object}
    for name, original in gathered.items():
        setattr(dist, name, _with_one_place_each(name, original))
    try:
        yield
    finally:
        for name, original in gathered.items():
            setattr(dist, name, original)


def _with_one_place_each(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    place = inspect.signature(original)
    (listed,) = (word for word in ("object_list", "object_gather_list") if word in place.parameters)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist

        given = place.bind(*args, **kwargs).arguments
        places, world = given.get(listed), dist.get_world_size(given.get("group"))
        if isinstance(places, list) and len(places) != world:
            raise Misused(
                f"the list for {name} has {counted(len(places), 'place')} on {counted(world, 'rank')}; its length must "
                "be dist.get_world_size()"
            )
        return original(*args, **kwargs)

    return call


_heard: list[Callable[[str, Any], None]] = []
_hooked: list[bool] = []


def _audit(event: str, args: Any) -> None:
    if _heard:
        _heard[-1](event, args)


@contextmanager
def files() -> Iterator[Touched]:
    """The files that are written, read and renamed inside the block, by torch.save and by Python's open."""
    import torch

    touched: Touched = {"wrote": [], "read": [], "moved": [], "gap": []}
    removed: set[str] = set()

    def note(kind: Literal["wrote", "read", "moved"], path: Any) -> None:
        if isinstance(path, str | bytes | os.PathLike):
            name = os.path.realpath(os.fsdecode(path))
            touched[kind].append(name)
            if kind == "moved" and name in removed:
                touched["gap"].append(name)

    def hear(event: str, args: Any) -> None:
        if event == "open":
            writes = any(c in str(args[1] or "") for c in "wax+") or bool((args[2] or 0) & (os.O_WRONLY | os.O_RDWR))
            note("wrote" if writes else "read", args[0])
        elif event == "os.rename":
            note("moved", args[1])
        elif event == "os.remove":
            removed.add(os.path.realpath(os.fsdecode(args[0])))

    if not _hooked:  # an audit hook stays for the life of a process
        sys.addaudithook(_audit)
        _hooked.append(True)
    saved = torch.save

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        note("wrote", f)  # torch opens the file in C++
        saved(obj, f, *args, **kwargs)

    torch.save = save
    _heard.append(hear)
    try:
        yield touched
    finally:
        _heard.pop()
        torch.save = saved
