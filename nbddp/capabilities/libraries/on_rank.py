"""Libraries that were written for a process that runs one program.

Some refuse where somebody types (Lightning, Fabric). Some would start ranks of their own in a cell, which is already
run by every rank: a message reports that. Lightning's and Fabric's launchers for notebooks (`ddp_notebook`,
`ddp_spawn`, `ddp_fork`) start all ranks anew in each rank. Those meet under numbers that are taken, and hang.

Some keep objects of a process group in their modules, and use them in the next cell, when the group is gone. So these
are taken from them: at once (DeepSpeed), or when the program makes the library's object anew (accelerate). Until then
accelerate's old object may be asked for its rank. Of others the error says whose it is.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nbddp.deadlock.on_rank import frames

if TYPE_CHECKING:
    from nbddp.errors import Raised
    from nbddp.worker.parts import RankWorker

PROMPTS = ("ps1", "ps2", "ps3")  # of `sys`: they say that somebody types
LAUNCHERS = ("lightning", "pytorch_lightning", "lightning_fabric")
SAYS = (
    'this cell already runs on every rank, but this strategy starts its own ranks; use strategy="ddp" with as many '
    "devices as there are ranks on a node"
)
# Modules whose global names hold groups, and what is made of groups
HOLDERS = {"deepspeed.utils.groups": ("mesh_device",), "deepspeed.comm.comm": ("cdb",)}
GONE = ("Default process group has not been initialized", "is not registered, please create group with")


class Libraries:
    """The part of a worker that hears of its groups and its exceptions."""

    def __init__(self, worker: RankWorker) -> None:
        import torch.multiprocessing

        torch.multiprocessing.start_processes = _refusing(torch.multiprocessing.start_processes)
        for prompt in PROMPTS:
            vars(sys).pop(prompt, None)

    def group_begins(self) -> None:
        if "accelerate" in sys.modules:
            _renew_accelerate(sys.modules["accelerate"])

    def group_gone(self) -> None:
        """No library may think that it has a group."""
        import torch.distributed as dist

        for name, things in HOLDERS.items():
            if name in sys.modules:
                _empty(vars(sys.modules[name]), things, dist.ProcessGroup)
        self.group_begins()

    def note(self, found: Raised) -> str:
        """Whose group is gone, if torch reports that to an installed library: not to a cell's own call."""
        if not any(words in found.message for words in GONE):
            return ""
        outside = [frame.file for frame in found.frames if f"{os.sep}torch{os.sep}" not in frame.file]
        library = frames.package(outside[-1]) if outside else ""
        return library and (
            f"{library} uses a process group that no longer exists. If an earlier cell created it, create {library}'s "
            "objects again, or run the cell with --fresh"
        )


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def start_processes(*args: Any, **kwargs: Any) -> Any:
        by = sys._getframe(1).f_globals.get("__name__", "")
        if by.partition(".")[0] in LAUNCHERS:
            raise RuntimeError(SAYS)
        return original(*args, **kwargs)

    return start_processes


# -- what libraries keep of a group -------------------------------------------------------------


def _empty(names: dict[str, object], things: Sequence[str], group: type) -> None:
    for name, value in names.items():
        if name in things or isinstance(value, group):
            names[name] = None
        elif isinstance(value, dict) and any(isinstance(v, group) for v in value.values()):
            value.clear()


def _renew_accelerate(accelerate: Any) -> None:
    """Have an `Accelerator()`, or a `PartialState()` that a cell makes, forget a state that was of a group."""
    state = sys.modules.get("accelerate.state")
    for name, by_anyone in (("Accelerator", True), ("PartialState", False)):
        cls = getattr(accelerate, name, None)
        if state is not None and cls is not None and not getattr(cls.__init__, "renews", False):
            cls.__init__ = _renewing(cls.__init__, state, by_anyone)
            cls.__init__.renews = True


def _renewing(original: Callable[..., None], state: Any, by_anyone: bool) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(made: Any, *args: Any, **kwargs: Any) -> None:
        by = sys._getframe(1).f_globals.get("__name__")
        if (by_anyone or by == "__main__") and _is_stale(state.PartialState):
            state.AcceleratorState._reset_state(True)
            state.GradientState._reset_state()
        original(made, *args, **kwargs)

    return __init__


def _is_stale(partial: Any) -> bool:
    """Whether accelerate's state is of a group that is gone, or of another number of ranks."""
    import torch.distributed as dist

    kept = vars(partial).get("_shared_state", {})
    if not kept.get("backend"):
        return False
    return not dist.is_initialized() or str(kept.get("num_processes")) != os.environ.get("WORLD_SIZE")
