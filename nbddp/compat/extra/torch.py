"""Private names of torch that only capabilities use, as `compat.torch` has those of the core."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from nbddp.compat.torch import BACKWARD, BINDINGS, C10D, CHECKED, COMPILER, NEW_GROUP, WRAPPER

# The names that a private API of `%ddp doctor` needs, as module:attribute; the others are tried alone
NAMES = {
    "flight recorder": (f"{BINDINGS}:_dump_fr_trace_json",),
    "tables of groups": (f"{C10D}:_world",),
    "default group": (f"{C10D}:_get_default_group",),
    "another default group": (f"{C10D}:_update_default_pg",),
    "sequence numbers": (f"{BINDINGS}:ProcessGroup._get_sequence_number_for_group",),
    "clearing of groups": (f"{BINDINGS}:_unregister_all_process_groups",),
    "abort of groups": (f"{C10D}:_abort_process_group",),
    "store of env://": ("torch.distributed.rendezvous:_create_c10d_store",),
    "sockets of a new group": (f"{C10D}:{NEW_GROUP}",),
    "checks of DETAIL": (f"{C10D}:{CHECKED}", f"{C10D}:{WRAPPER}"),
    "frames of backward": (f"torch.autograd.graph:{BACKWARD}",),
    "marks on Work and Store": (f"{BINDINGS}:Work.wait", f"{BINDINGS}:Store.get", f"{BINDINGS}:Store.wait"),
    "DDP's reducer": ("torch.distributed:Reducer",),
    "backends of a group": tuple(
        f"{BINDINGS}:ProcessGroup.{name}" for name in ("_register_backend", "_get_backend", "_device_types")
    ),
    "state of a step": (
        "torch._C:_current_graph_task_id",
        "torch.utils.data._utils.fetch:_MapDatasetFetcher",
    ),
    "copies of DDP models": (
        "torch.distributed:Reducer._get_zeros_like_grad_buckets",
        "torch.distributed:Reducer._set_static_graph",
        *(
            f"torch.nn.parallel:DistributedDataParallel.{name}"
            for name in ("_ddp_init_helper", "_get_ddp_logging_data", "_register_builtin_comm_hook")
        ),
    ),
    "copies of FSDP2 models": (f"{BINDINGS}:_register_process_group",),
    "end of backward": ("torch.autograd:Variable._execution_engine",),
    "data loaders": ("torch.utils.data.dataloader:_BaseDataLoaderIter",),
    "end of data loaders": (
        "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter._shutdown_workers",
        "torch.utils.data._utils.signal_handling:_remove_worker_pids",
    ),
    "parts of sparse tensors": ("torch:Tensor._indices", "torch:Tensor._values"),
    "profilers of a program": (
        "torch.autograd.profiler:_prepare_profiler",
        "torch.autograd.profiler:_enable_profiler",
        "torch.autograd.profiler:_disable_profiler",
    ),
    "history of GPU memory": ("torch.cuda.memory:_record_memory_history", "torch.cuda.memory:_snapshot"),
}


@contextmanager
def coalescing(backend: Any) -> Iterator[list[Any]]:
    """Sends and receives of a backend as one call, where it does that, as NCCL has to; of their works those that are to
    be waited for."""
    works: list[Any] = []
    together = bool(getattr(backend, "supports_coalescing", False))
    if together:
        backend._start_coalescing()
    yield works
    if together:
        works[:] = [backend._end_coalescing()]


def share_backends(real: Any, other: Any) -> str:
    """Register a group's backends with another, each under the type that C++ looks for; the name that both then have.

    Empty, and nothing is registered, if torch cannot do it, and under debug level DETAIL. There a backend is wrapped.
    DDP's logger, told that it is gloo, takes the wrapper for gloo and crashes (torch 2.13, with torchrun too).
    """
    if not hasattr(real, "_register_backend"):
        return ""
    other.bound_device_id = real.bound_device_id  # registering sets the backend's to its group's
    backends = {device: real._get_backend(device) for device in real._device_types}
    if any(type(b).__name__ == "_ProcessGroupWrapper" for b in backends.values()):
        return ""
    types = real.BackendType
    for device, backend in backends.items():
        other._register_backend(device, getattr(types, backend.name().upper(), types.CUSTOM), backend)
    return str(real.name())


def serves(group: Any, device: str) -> str:
    """Name of the group's backend for this type of device; empty where it has none or torch does not tell."""
    for known in getattr(group, "_device_types", ()):
        if known.type == device:
            return str(group._get_backend(known).name())
    return ""


def watch_profilers(begins: Callable[[], None], began: Callable[[], None], ended: Callable[[], None]) -> None:
    """Call `begins` before anything of this process prepares or starts a profiler, `began` when one has started and
    `ended` when one has stopped; nothing where torch's own Python classes do not go by these functions."""
    module: Any = importlib.import_module("torch.autograd.profiler")
    old: Any = importlib.import_module("torch.autograd.profiler_legacy")

    def around(original: Callable[..., Any], before: Callable[[], None], after: Callable[[], None]) -> Any:
        @functools.wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            before()
            found = original(*args, **kwargs)
            after()
            return found

        return called

    def nothing() -> None:
        pass

    for owner, name, before, after in (
        (module, "_prepare_profiler", begins, nothing),
        (module, "_enable_profiler", begins, began),
        (module, "_disable_profiler", nothing, ended),
        (old, "_enable_profiler_legacy", begins, began),
        (old, "_disable_profiler_legacy", nothing, ended),
    ):
        if hasattr(owner, name):
            setattr(owner, name, around(getattr(owner, name), before, after))


def autograd_engine() -> Any:
    """The engine whose `queue_callback` runs a function when the current backward is through; None without it."""
    import torch

    return getattr(torch.autograd.Variable, "_execution_engine", None)


def loader_iterator() -> Any:
    """The class of all iterators over torch's data loaders, whose `__next__` makes a batch; None if it is elsewhere."""
    import torch.utils.data.dataloader as module

    return getattr(module, "_BaseDataLoaderIter", None)


def fetcher_of_maps() -> Any:
    """The class whose `fetch` takes a batch out of a data set by its indices, in loader workers too; None if it is
    elsewhere."""
    from torch.utils.data import _utils

    return getattr(_utils.fetch, "_MapDatasetFetcher", None)


def in_backward() -> bool:
    """Whether this thread runs a backward, as where a forward is recomputed."""
    import torch

    return int(torch._C._current_graph_task_id()) != -1


def joins(ddp: Any) -> bool:
    """Whether a DDP model is within a `Join`."""
    return bool(getattr(getattr(ddp, "_join_config", None), "enable", False))


def passing_buffers(module: Any) -> set[str]:
    """Names of a module's own buffers that its state_dict leaves out."""
    return getattr(module, "_non_persistent_buffers_set", set())


def scale_of(scaler: Any) -> Any:
    """The tensor with a GradScaler's scale; None before its first step."""
    return getattr(scaler, "_scale", None)


def shards_over(module: Any) -> Any:
    """The data-parallel group over which FSDP2 shards this module's parameters; None if it does not."""
    state = getattr(module, "_get_fsdp_state", None)
    groups = getattr(state(), "_fsdp_param_group", None) if state is not None else None
    mesh = getattr(getattr(groups, "mesh_info", None), "mesh", None)
    return mesh.get_group() if mesh is not None and mesh.ndim == 1 else None


def fsdp_state(module: Any) -> Any:
    """What FSDP2 keeps at a module; None if `fully_shard` was not called with it."""
    state = getattr(module, "_get_fsdp_state", None)
    return None if state is None else state()


def fsdp_groups(module: Any) -> list[Any]:
    """What FSDP2 keeps of the parameters that it shards at this module; none if it shards none there."""
    state = fsdp_state(module)
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    one = getattr(state, "_fsdp_param_group", None)
    return [] if one is None else [one]


def fsdp_meshes(module: Any) -> list[Any]:
    return [group.mesh_info.mesh for group in fsdp_groups(module)]


def without_precision(module: Any) -> bool:
    """Have FSDP2 compute at a module in the types that the parameters have now; whether it had other ones."""
    state = fsdp_state(module)
    before, plain = state._mp_policy, type(state._mp_policy)()
    state._mp_policy = plain
    for group in fsdp_groups(module):
        group.mp_policy = plain
        for parameter in group.fsdp_params:
            parameter.reset_sharded_param()
            parameter.all_gather_outputs = []  # and what they become have the types of before
            vars(parameter).pop("_unsharded_param", None)
        group._init_mp_dtypes()
    return bool(before != plain)


def without_sharding(module: Any) -> None:
    """Have FSDP2 and tensor parallelism do nothing at a module whose tensors are whole."""
    state = fsdp_state(module)
    if hasattr(state, "_fsdp_param_groups"):
        state._fsdp_param_groups = []
    elif state is not None:
        state._fsdp_param_group = None
    for table in (module._forward_pre_hooks, module._forward_hooks):
        for key in [k for k, hook in table.items() if _shards(hook)]:
            del table[key]


def _shards(hook: Any) -> bool:
    own = str(getattr(getattr(hook, "func", hook), "__module__", ""))
    return own.startswith(("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed._"))


def answer_to(name: str, group: Any) -> None:
    """Have meshes and functional collectives that look for a group of this name find `group`, if they find none."""
    bindings = importlib.import_module(BINDINGS)
    register = getattr(bindings, "_register_process_group", None)
    if register is not None:
        with suppress(RuntimeError):  # there is one
            register(name, group)


def outside_graphs(function: Any) -> Any:
    """The function, which torch.compile is not to trace. It is marked, at no cost for a call, and what it calls is not;
    torch.compiler.disable, which this torch is asked for if it has no such mark, makes a wrapper around each call."""
    import torch

    mark = getattr(importlib.import_module(f"{COMPILER}.decorators"), "skip", torch.compiler.disable)
    return mark(function)


def replace_last_hook(ddp: Any, hook: Any, state: object) -> bool:
    """Set what DDP remembers (and pickles) as the communication hook registered last; False if it remembers none."""
    hooks = getattr(ddp, "_comm_hooks", None)
    if hooks:
        hooks[-1] = (hook, state)
    return bool(hooks)


def reduced_parameters(ddp: Any) -> list[Any]:
    """The parameters whose gradients DDP's reducer exchanges, in its order, whatever the module holds by now. Raises
    RuntimeError where they are not known."""
    had = list(getattr(ddp, "_module_parameters", ()))
    try:
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
    except RuntimeError:  # some are sparse, and have no bucket of zeros
        wanted = [p for p in had if p.requires_grad]
        if len(wanted) != ddp._get_ddp_logging_data().get("num_parameter_tensors"):
            raise
        return wanted
    known = {id(p): p for bucket in buckets for p in bucket.parameters()}
    ordered = [p for p in had if id(p) in known]
    return ordered if len(ordered) == len(known) else list(known.values())


def saved(node: Any, name: str) -> Any:
    """What a node of autograd's graph keeps for backward. Raises AttributeError if this version keeps no such thing."""
    return getattr(node, "_saved_" + name)


def has_hooks(tensor: Any) -> bool:
    """Whether the program has hooks on a tensor, which may change its gradient."""
    return bool(getattr(tensor, "_backward_hooks", None))


def has_step_hooks(optimizer: Any) -> bool:
    """Whether the program has hooks of its own that run before an optimizer's step."""
    return bool(getattr(optimizer, "_optimizer_step_pre_hooks", None))


def comm_hooks(ddp: Any) -> tuple[list[tuple[Any, Any]], str]:
    """A DDP model's hooks with their states, and the name of a hook in C++, empty without one."""
    name = str(ddp._get_ddp_logging_data().get("comm_hook", ""))
    return list(getattr(ddp, "_comm_hooks", ())), name if name.startswith("BuiltinCommHookType") else ""


def make_reducer(ddp: Any, parameters: list[Any], sparse: list[bool], hooks: tuple[list[tuple[Any, Any]], str]) -> None:
    """Give a DDP model a new reducer for its `process_group`, with the settings that it has."""
    import torch.distributed as dist

    ddp._ddp_init_helper(parameters, sparse, {}, ddp.static_graph)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    own, in_native = hooks
    if own:
        ddp._comm_hooks.clear()
    for hook, state in own:
        ddp.register_comm_hook(state, hook)
    if in_native:
        kinds = dist.BuiltinCommHookType
        ddp._register_builtin_comm_hook(getattr(kinds, in_native.rpartition(".")[2], kinds.ALLREDUCE))


def watch_operators(note: Callable[[Any, Any, Any], None]) -> Any:
    """While the result is open, it gets each operator of this thread, with its arguments and its result."""
    from torch.utils import _python_dispatch

    class Watch(_python_dispatch.TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            note(func, args, found)
            return found

    return Watch()


COMPILED = "_orig_mod"  # the name of a module within what torch.compile made of it


def is_compiled(module: Any) -> bool:
    """Whether this is what `torch.compile` made of a module."""
    return hasattr(module, COMPILED)


def compiled_from(module: Any) -> Any:
    return module._orig_mod


def shard(tensor: Any) -> Any:
    """A DTensor's own shard, any other tensor itself. `to_local()` would make a new tensor."""
    return getattr(tensor, "_local_tensor", tensor)


def sparse_parts(tensor: Any) -> tuple[Any, Any]:
    """Indices and values of a sparse COO tensor, also of one that is not coalesced."""
    if not hasattr(tensor, "_indices") or not hasattr(tensor, "_values"):
        tensor = tensor.coalesce()
        return tensor.indices(), tensor.values()
    return tensor._indices(), tensor._values()


def begin_memory_history(entries: int) -> bool:
    """Have the allocator keep its last `entries` allocations and frees of each GPU, with the Python frames of each
    allocation; False where torch sees no GPU. Raises RuntimeError if this torch keeps none."""
    import torch

    if not torch.cuda.is_available():
        return False
    record = getattr(torch.cuda.memory, "_record_memory_history", None)
    if record is None or not hasattr(torch.cuda.memory, "_snapshot"):
        raise RuntimeError("this torch keeps no history of GPU memory")
    record("all", context="alloc", stacks="python", max_entries=entries, clear_history=True)
    return True


def end_memory_history() -> dict[str, Any]:
    """The allocator's state and its history, in the format that torch's docstring has; it keeps none from here on."""
    import torch

    found: dict[str, Any] = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(None)
    return found
