"""Every private name of torch that nbddp uses, each as a function or constant with a name of ours.

No other module reads one (`tests/test_seams.py`). torch itself is imported inside the functions, so that this
module can be read where torch is not loaded. Behaviour stays with the callers; here is only where torch keeps what
they need, and what they get where a version of torch does not have it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

COMPILER = "torch._dynamo"  # DDP's constructor imports it; the warm process does so once for all workers
BACKWARD = "_engine_run_backward"  # the Python function that calls the autograd engine
FUNCTIONAL = "torch/distributed/_functional_collectives.py"
LOADERS = "/torch/utils/data/"
# files whose functions wait in C++ for collectives that C++ has called
WAIT_IN_NATIVE = ("/torch/distributed/", "/torch/nn/parallel/", "/torch/_ops.py", "/torch/autograd/graph.py")
ALL_GATHER_BASE, REDUCE_SCATTER_BASE = "_allgather_base", "_reduce_scatter_base"  # methods of ProcessGroup
NEW_GROUP = "_new_process_group_helper"  # in distributed_c10d: every group is made by it
TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg", "pg_coalesce_state")


# -- the flight recorder ------------------------------------------------------------------------

# methods of ProcessGroup that call several collectives as one, or one under a newer name
COALESCED = ("allgather_into_tensor_coalesced", "all_gather_single_coalesced", "reduce_scatter_tensor_coalesced",
             "reduce_scatter_single_coalesced")  # fmt: skip


def flight_recorders() -> list[Callable[..., str]]:
    """Each dumps entries as JSON: gloo's recorder (since torch 2.8) and NCCL's own, where torch has them."""
    bindings = sys.modules.get("torch._C._distributed_c10d")
    found = (getattr(bindings, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"))
    return [dump for dump in found if dump is not None]


def has_generic_recorder() -> bool:
    """Whether torch has the recorder that is not NCCL's alone, with the setting that goes with it."""
    return hasattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace_json")


# -- process groups -----------------------------------------------------------------------------


def world() -> Any:
    """torch's tables of the process groups of this process; None without torch or without the tables."""
    dist = sys.modules.get("torch.distributed")
    return getattr(getattr(dist, "distributed_c10d", None), "_world", None)


def group_count() -> int:
    """How many groups torch has given names to."""
    tables = world()
    return int(tables.group_count) if tables is not None else 0


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
