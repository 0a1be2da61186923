"""A rank's part of a check: it calls a learner's function and returns plain data.

The learner's own objects stay on the rank. So the notebook imports nothing to look at an answer, and no answer can fail
to travel. Imports torch only inside what needs it.
"""

from __future__ import annotations

import copy
import os
import random
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nbddp.lessons.framework.plain_values import plain
from nbddp.protocol import pickling

CELL = re.compile(r"ipykernel_\d+[/\\]\d+\.py$|^<cell>$|^<ipython-input")  # the file of code from a notebook's cell
SEED = 1000  # a rank's own seed is SEED + rank: ranks that must agree have to make themselves agree


def gradients(module: Any) -> dict[str, list[float] | None]:
    """By parameter, as flat lists; None for one that has no gradient."""
    return {n: None if p.grad is None else p.grad.flatten().tolist() for n, p in module.named_parameters()}


def all_gradients(module: Any) -> dict[str, list[float]]:
    """The same of a module whose parameters all have one."""
    return {n: p.grad.flatten().tolist() for n, p in module.named_parameters()}


def tabulate(function: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[tuple[str, Any]]:
    """The outcome for each case: ("value", plain data), ("unwritten", None) or ("raised", "ValueError: text").

    The function gets copies, so that one that changes its arguments spoils no later case. Chance is seeded by the rank:
    one that draws lots answers alike in every run, and otherwise on other ranks.
    """
    with _chance(SEED + int(os.environ.get("RANK", 0))):
        return [outcome(function, copy.deepcopy(case)) for case in cases]


@contextmanager
def _chance(seed: int) -> Iterator[None]:
    """Python's and NumPy's random numbers begin at `seed` in the block; then they go on as if none had been drawn."""
    numpy: Any = sys.modules.get("numpy")
    state, theirs = random.getstate(), numpy and numpy.random.get_state()
    random.seed(seed)
    if numpy:
        numpy.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
        if numpy:
            numpy.random.set_state(theirs)


def outcome(function: Callable[..., Any], case: tuple[Any, ...]) -> tuple[str, Any]:
    """Of one call, as `tabulate` has it."""
    try:
        return "value", plain(function(*case))
    except NotImplementedError:
        return "unwritten", None
    except Exception as error:
        return "raised", pickling.reason(error) + place(error)


def place(error: BaseException) -> str:
    """` (line 3, in share_of)`: where a learner's code raised it; empty if no frame of the traceback is in a cell."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if CELL.search(f.filename)]
    return f" (line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""


def enter() -> bool:
    """Have a default process group; whether this call made it. `leave` ends it, in a run of its own. If a rank ended it
    as soon as it is through, it would cut off one that still waits. That rank would then see a broken connection
    instead of a deadlock."""
    import torch.distributed as dist

    if dist.is_initialized():
        return False
    dist.init_process_group()
    return True


def leave() -> None:
    """End the default process group, if there still is one (a run that fails has its groups ended by the pool)."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def seeded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)` with torch seeded with this rank's own seed; torch's random state is put back."""
    import torch
    import torch.distributed as dist

    _refuse_another_group()
    state = torch.random.get_rng_state()
    torch.manual_seed(SEED + dist.get_rank())
    try:
        return function(*args, **kwargs)
    finally:
        torch.random.set_rng_state(state)


def _refuse_another_group() -> None:
    """Have a second init_process_group be torch's own error, as in a script. In a cell it would end the group that an
    earlier run has made, here under the hands of the models that use it."""
    from IPython.core.getipython import get_ipython

    groups = getattr(getattr(get_ipython(), "kernel", None), "groups", None)
    if groups is not None:
        groups.made_in = groups.run


def meet(environs: Sequence[dict[str, str]], timeout: float) -> tuple[str, str, int]:
    """Look for the other ranks by these variables (`environs[rank]`), and add up all ranks' numbers if they are found.

    ("met", "", sum) or ("failed", "DistStoreError: text", 0); a group that has stood before is left alone, with
    ("standing", "", 0). timeout: seconds.
    """
    import datetime

    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return "standing", "", 0
    os.environ.update(environs[int(os.environ["RANK"])])  # every run begins with torchrun's own values again
    try:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total)
        return "met", "", int(total)
    except Exception as error:
        return "failed", pickling.reason(error), 0
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
