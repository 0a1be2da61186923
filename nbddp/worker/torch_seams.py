"""Every private name of torch that nbddp uses, each as a function or constant with a name of ours.

No other module reads one (`tests/test_seams.py`). torch itself is imported inside the functions, so that this
module can be read where torch is not loaded. Behaviour stays with the callers; here is only where torch keeps what
they need, and what they get where a version of torch does not have it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

COMPILER = "torch._dynamo"  # DDP's constructor imports it; the warm process does so once for all workers
BACKWARD = "_engine_run_backward"  # the Python function that calls the autograd engine
FUNCTIONAL = "torch/distributed/_functional_collectives.py"
ALL_GATHER_BASE, REDUCE_SCATTER_BASE = "_allgather_base", "_reduce_scatter_base"  # methods of ProcessGroup
NEW_GROUP = "_new_process_group_helper"  # in distributed_c10d: every group is made by it
TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg", "pg_coalesce_state")


# -- the flight recorder ------------------------------------------------------------------------


def flight_recorder() -> Callable[..., str] | None:
    """Dumps the recorder's entries as JSON; None without torch or without a recorder."""
    return getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace_json", None)


# -- process groups -----------------------------------------------------------------------------


def world() -> Any:
    """torch's tables of the process groups of this process; None without torch or without the tables."""
    dist = sys.modules.get("torch.distributed")
    return getattr(getattr(dist, "distributed_c10d", None), "_world", None)


def default_group() -> Any:
    return sys.modules["torch.distributed"].distributed_c10d._get_default_group()


def set_default_group(group: Any) -> None:
    sys.modules["torch.distributed"].distributed_c10d._update_default_pg(group)


def sequence(group: Any) -> int:
    """How many collectives this rank has called in a group. Raises what the backend raises that does not count."""
    return int(group._get_sequence_number_for_group())


def forget_groups() -> None:
    """Clear torch's bookkeeping of groups, in Python and in C++."""
    bindings = importlib.import_module("torch._C._distributed_c10d")
    unregister = getattr(bindings, "_unregister_all_process_groups", None)
    if unregister is not None:
        unregister()
    tables = world()
    if tables is None:
        return
    for name in TABLES:
        table = getattr(tables, name, None)
        if table is not None:
            table.clear()
    tables.group_count = 0


def abort_groups() -> None:
    """Abort the communicators of all groups, or of the default group where torch cannot do it for all."""
    dist = sys.modules["torch.distributed"]
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if abort is not None:
        abort()
    else:
        default_group().abort()
        set_default_group(None)


# -- receives from any source -------------------------------------------------------------------


def wrap_receive_from_any(note: Callable[[Any], None]) -> None:
    """Have `note(work)` told of every receive from any source."""
    import torch.distributed as dist

    original = dist.ProcessGroup.recv_anysource

    @functools.wraps(original)
    def recv_anysource(group: Any, *args: Any, **kwargs: Any) -> Any:
        work = original(group, *args, **kwargs)
        note(work)
        return work

    dist.ProcessGroup.recv_anysource = recv_anysource


def abort_receive(work: Any) -> bool:
    """End the wait in a receive of gloo's; False for any other work, or where this torch has no way.

    Its `abort` is exported by C++ and not bound to Python. Only an object whose table of virtual functions is that
    class's own is given to it; pybind11 keeps the C++ object's address right behind Python's own fields.
    """
    found = _receive_class()
    if found is None:
        return False
    table, abort = found
    address = ctypes.c_void_p.from_address(id(work) + object.__basicsize__).value
    if address is None or ctypes.c_void_p.from_address(address).value != table:
        return False
    abort(address)
    return True


@functools.cache
def _receive_class() -> tuple[int, Any] | None:
    """gloo's class of receives in torch's library: where its virtual functions are listed, and its `abort`."""
    import torch

    try:
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
        table = ctypes.c_char.in_dll(library, "_ZTVN4c10d16ProcessGroupGloo8RecvWorkE")
        abort = library["_ZN4c10d16ProcessGroupGloo8RecvWork5abortEv"]
    except (OSError, ValueError, AttributeError):  # not Linux, or a torch built otherwise
        return None
    abort.argtypes, abort.restype = [ctypes.c_void_p], None
    return ctypes.addressof(table) + 2 * ctypes.sizeof(ctypes.c_void_p), abort  # behind an offset and the type


# -- the rendezvous -----------------------------------------------------------------------------


def wrap_create_store(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `wrap(original)` in place of the function by which `env://` makes its store; nothing where it is missing."""
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # the name is also a function's
    create = getattr(rendezvous, "_create_c10d_store", None)
    if create is not None:
        rendezvous._create_c10d_store = wrap(create)


# -- DDP, autograd and tensors ------------------------------------------------------------------


def autograd_engine() -> Any:
    """The engine whose `queue_callback` runs a function when the current backward is through."""
    import torch

    return torch.autograd.Variable._execution_engine


def replace_last_hook(ddp: Any, hook: Any, state: object) -> None:
    """Set what DDP remembers (and pickles) as the communication hook registered last."""
    if getattr(ddp, "_comm_hooks", None):
        ddp._comm_hooks[-1] = (hook, state)


def is_compiled(module: Any) -> bool:
    """Whether this is what `torch.compile` made of a module."""
    return hasattr(module, "_orig_mod")


def compiled_from(module: Any) -> Any:
    return module._orig_mod


def shard(tensor: Any) -> Any:
    """A DTensor's own shard, any other tensor itself. `to_local()` would make a new tensor."""
    return getattr(tensor, "_local_tensor", tensor)


def sparse_parts(tensor: Any) -> tuple[Any, Any]:
    """Indices and values of a sparse COO tensor, also of one that is not coalesced."""
    return tensor._indices(), tensor._values()
