"""Every private name of torch that nbddp uses, each as a function or constant with a name of ours.

No other module reads one (`tests/versions/test_seams.py`). torch itself is imported inside the functions, so that this
module can be read where torch is not loaded. Behaviour stays with the callers; here is only where torch keeps what
they need, and what they get where a version of torch does not have it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import BuiltinFunctionType
from typing import Any

from nbddp.compat.thread import OwnThread

C10D, BINDINGS = "torch.distributed.distributed_c10d", "torch._C._distributed_c10d"
COMPILER = "torch._dynamo"  # DDP's constructor imports it; the warm process does so once for all workers
NCCL_RECORDER = "_dump_nccl_trace_json"  # in the bindings: what dumps the recorder of NCCL's collectives
BACKWARD = "_engine_run_backward"  # the Python function that calls the autograd engine
FINALIZE = "finalize_backward"  # DDP's method by which a program ends backward itself, since torch 2.15
DDP_FILE = "torch/nn/parallel/distributed.py"
FUNCTIONAL = "torch/distributed/_functional_collectives.py"
LOADERS = "/torch/utils/data/"
# files whose functions wait in C++ for collectives that C++ has called
WAIT_IN_NATIVE = ("/torch/distributed/", "/torch/nn/parallel/", "/torch/_ops.py", "/torch/autograd/graph.py")
ALL_GATHER_BASE, REDUCE_SCATTER_BASE = "_allgather_base", "_reduce_scatter_base"  # methods of ProcessGroup
NEW_GROUP = "_new_process_group_helper"  # in distributed_c10d: every group is made by it
CHECKED, WRAPPER = "_create_process_group_wrapper", "_ProcessGroupWrapper"  # there too, for debug level DETAIL
# in torch's library, of gloo's classes of sends and receives: the table of virtual functions, and the one that aborts
TRANSFERS = (
    ("_ZTVN4c10d16ProcessGroupGloo8SendWorkE", "_ZN4c10d16ProcessGroupGloo8SendWork5abortEv"),
    ("_ZTVN4c10d16ProcessGroupGloo8RecvWorkE", "_ZN4c10d16ProcessGroupGloo8RecvWork5abortEv"),
)
LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
# in the library of torch's base: reads LOG_LEVEL, as it does while torch is imported; and where it keeps the level
READS_LEVEL, KEEPS_LEVEL = "_ZN3c1011initLoggingEv", "FLAGS_caffe2_log_level"
TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg", "pg_coalesce_state")


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
# Keys of a recorder's entry that are read
ENTRY_KEYS = ("collective_seq_id", "input_dtypes", "input_sizes", "is_p2p", "pg_id", "process_group", "profiling_name",
              "retired", "time_created_ns")  # fmt: skip


# -- the flight recorder ------------------------------------------------------------------------

# methods of ProcessGroup that call several collectives as one, or one under a newer name
COALESCED = ("allgather_into_tensor_coalesced", "all_gather_single_coalesced", "reduce_scatter_tensor_coalesced",
             "reduce_scatter_single_coalesced")  # fmt: skip


def flight_recorders() -> list[Callable[..., str]]:
    """Each dumps entries as JSON: gloo's recorder (since torch 2.8) and NCCL's own, where torch has them."""
    bindings = sys.modules.get(BINDINGS)
    found = (getattr(bindings, name, None) for name in ("_dump_fr_trace_json", NCCL_RECORDER))
    return [dump for dump in found if isinstance(dump, BuiltinFunctionType)]  # torch's own, and none put in its place


def has_nccl_recorder() -> bool:
    """Whether torch has the recorder of NCCL's collectives."""
    return isinstance(getattr(sys.modules.get(BINDINGS), NCCL_RECORDER, None), BuiltinFunctionType)


def has_generic_recorder() -> bool:
    """Whether torch has the recorder that is not NCCL's alone, with the setting that goes with it."""
    return hasattr(sys.modules.get(BINDINGS), "_dump_fr_trace_json")


# -- process groups -----------------------------------------------------------------------------


def world() -> Any:
    """torch's tables of the process groups of this process; None without torch or without the tables."""
    dist = sys.modules.get("torch.distributed")
    return getattr(getattr(dist, "distributed_c10d", None), "_world", None)


def group_count() -> int:
    """How many groups torch has given names to."""
    tables = world()
    return int(tables.group_count) if tables is not None else 0


def members(name: str) -> tuple[list[int], str]:
    """Global ranks and backend of the group of this name, empty if it is unknown; without torch's tables every name is
    taken for the default group's."""
    tables = world()
    if tables is None:
        dist = sys.modules["torch.distributed"]
        return (list(range(dist.get_world_size())), str(dist.get_backend())) if dist.is_initialized() else ([], "")
    for group, ranks in list(tables.pg_group_ranks.items()):
        if tables.pg_names.get(group) == name:
            return sorted(ranks), str(tables.pg_backend_config.get(group, ""))
    return [], ""


def numbered(group: Any) -> dict[int, int]:
    """Global rank → rank in the group; empty where torch does not know."""
    tables = world()
    known: dict[int, int] = {} if tables is None else tables.pg_group_ranks.get(group) or {}
    return known


def default_group() -> Any:
    dist = sys.modules["torch.distributed"]
    find = getattr(dist.distributed_c10d, "_get_default_group", None)
    return dist.group.WORLD if find is None else find()


def gloo_reports_connections() -> bool:
    """Whether gloo prints to stdout how many peers a new group has; no group is needed to know it."""
    import torch

    return bool((2, 8) <= torch.torch_version.TorchVersion(torch.__version__) < (2, 11))


def destroy_holds_interpreter() -> bool:
    """Whether destroy_process_group joins gloo's threads while it holds the interpreter, which such a thread needs to
    drop a tensor that Python knows; seen on torch 2.6, where a program may hang so, under torchrun too."""
    import torch

    return bool(torch.torch_version.TorchVersion(torch.__version__) < (2, 8))


def set_default_group(group: Any) -> None:
    replace = getattr(sys.modules["torch.distributed"].distributed_c10d, "_update_default_pg", None)
    if replace is None:
        raise RuntimeError("this torch cannot make another group the default one; %ddp doctor shows details")
    replace(group)


def sequence(group: Any) -> int:
    """How many collectives this rank has called in a group; 0 where torch or the backend does not count them."""
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # up to torch 2.7 a group that was made without naming a backend; its backends do count
        try:
            backends = [group._get_backend(device) for device in getattr(group, "_device_types", ())]
            distinct = {id(b): b for b in backends}  # one backend may serve several devices
            return sum(int(b._get_sequence_number_for_group()) for b in distinct.values())
        except (RuntimeError, AttributeError):
            return 0
    except AttributeError:
        return 0


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


def forget_groups() -> None:
    """Clear torch's bookkeeping of groups, in Python and in C++."""
    bindings = importlib.import_module(BINDINGS)
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


# -- sends and receives in progress -------------------------------------------------------------


def can_abort_transfers() -> bool:
    """Whether torch's library has what `abort_transfer` calls."""
    return len(_transfer_classes()) == len(TRANSFERS)


def abort_transfer(work: Any) -> bool:
    """End the wait in a send or a receive of gloo's; False for any other work, or where this torch has no way.

    Its `abort` is exported by C++ and not bound to Python. Only an object whose table of virtual functions is that
    class's own is given to it; pybind11 keeps the C++ object's address right behind Python's own fields.
    """
    address = ctypes.c_void_p.from_address(id(work) + object.__basicsize__).value
    if address is None:
        return False
    abort = _transfer_classes().get(ctypes.c_void_p.from_address(address).value or 0)
    if abort is None:
        return False
    abort(address)
    return True


@functools.cache
def _transfer_classes() -> dict[int, Any]:
    """gloo's classes of sends and receives in torch's library: where its virtual functions are listed → `abort`."""
    import torch

    found = {}
    try:
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
        for listed, name in TRANSFERS:
            table, abort = ctypes.c_char.in_dll(library, listed), library[name]
            abort.argtypes, abort.restype = [ctypes.c_void_p], None
            found[ctypes.addressof(table) + 2 * ctypes.sizeof(ctypes.c_void_p)] = abort  # behind an offset and the type
    except (OSError, ValueError, AttributeError):  # not Linux, or a torch built otherwise
        pass
    return found


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


def wrap_checks(note: Callable[[str, Any], None]) -> None:
    """Call `note` with a group's name and its helper, when torch makes that for debug level DETAIL. The helper is the
    gloo group in which its ranks meet before each collective."""
    module: Any = importlib.import_module(C10D)
    create, wrapper = getattr(module, CHECKED, None), getattr(module, WRAPPER, None)
    if create is None or wrapper is None:
        return
    names: list[str] = []

    def created(wrapped_pg: Any, store_prefix: str, *args: Any, **kwargs: Any) -> Any:
        names.append(store_prefix)
        try:
            return create(wrapped_pg, store_prefix, *args, **kwargs)
        finally:
            names.pop()

    def wrapped(backend: Any, helper: Any) -> Any:
        if names:
            note(names[-1], helper)
        return wrapper(backend, helper)

    setattr(module, CHECKED, created)
    setattr(module, WRAPPER, wrapped)


def serves(group: Any, device: str) -> str:
    """Name of the group's backend for this type of device; empty where it has none or torch does not tell."""
    for known in getattr(group, "_device_types", ()):
        if known.type == device:
            return str(group._get_backend(known).name())
    return ""


# -- the rendezvous -----------------------------------------------------------------------------


def wrap_create_store(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Put `wrap(original)` in place of the function by which `env://` makes its store; False where it is missing."""
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # the name is also a function's
    create = getattr(rendezvous, "_create_c10d_store", None)
    if create is not None:
        rendezvous._create_c10d_store = wrap(create)
    return create is not None


# -- C++'s log ------------------------------------------------------------------------------------


def read_log_level() -> int | None:
    """Have C++ read TORCH_CPP_LOG_LEVEL again; the level that it has then (0: INFO, 1: WARNING), or None where torch's
    library has no such function."""
    import torch

    suffix = "dylib" if sys.platform == "darwin" else "so"
    try:
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", f"libc10.{suffix}"))
        library[READS_LEVEL]()
        return ctypes.c_int.in_dll(library, KEEPS_LEVEL).value
    except (OSError, ValueError, AttributeError):
        return None


# -- profilers ------------------------------------------------------------------------------------


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


# -- DDP, autograd and tensors ------------------------------------------------------------------


def autograd_engine() -> Any:
    """The engine whose `queue_callback` runs a function when the current backward is through; None without it."""
    import torch

    return getattr(torch.autograd.Variable, "_execution_engine", None)


KNOWS_WORKERS = "_worker_pids_set"  # whether its handler of SIGCHLD looks at an iterator's processes


def hurry_loaders(hurries: Callable[[], Callable[[], bool]], seconds: float) -> None:
    """Have the processes of a data loader hold nobody up for more than `seconds` when its iterator dies.

    torch waits for each until it has made its batch, for up to 5 s, and then ends it. They have that time still, but
    the wait goes on in a thread. Where what `hurries()` has made is true then, or becomes so, they are ended.
    """
    import torch.utils.data.dataloader as module

    iterator = getattr(module, "_MultiProcessingDataLoaderIter", None)
    if iterator is None or not {"__del__", "_shutdown_workers"} <= vars(iterator).keys():
        return
    original, pid = iterator._shutdown_workers, os.getpid()

    @functools.wraps(original)
    def _shutdown_workers(self: Any) -> None:
        if getattr(self, "_shutdown", True):
            original(self)
        else:
            _shut_down(self, original, seconds, hurries())

    def __del__(self: Any) -> None:
        if getattr(self, "_shutdown", True):
            return
        hurry = hurries()  # here: the program may have failed before the thread looks
        asked = (self, original, seconds, hurry)
        if os.getpid() != pid or hurry():
            _shut_down(*asked)
            return
        ending = OwnThread("nbddp-loader", _shut_down, *asked)
        if ending.begin():
            ending.join(seconds)
        else:  # the interpreter ends, or there is no room for a thread
            _shut_down(*asked)

    iterator._shutdown_workers, iterator.__del__ = _shutdown_workers, __del__


def _shut_down(iterator: Any, original: Callable[[Any], None], seconds: float, hurry: Callable[[], bool]) -> None:
    """As torch ends it, with a thread that ends its processes where that is to be soon."""
    done = threading.Event()
    OwnThread("nbddp-loader", _hurry_loader, iterator, done, seconds, hurry).begin()
    try:
        original(iterator)
    finally:
        done.set()


def _hurry_loader(iterator: Any, done: threading.Event, seconds: float, hurry: Callable[[], bool]) -> None:
    """End its processes as torch does in the end: for those that it knows its handler of SIGCHLD raises."""
    from torch.utils.data._utils import signal_handling

    while not done.wait(seconds):
        if hurry():
            break
    if done.is_set():
        return
    if getattr(iterator, KNOWS_WORKERS, False):
        setattr(iterator, KNOWS_WORKERS, False)
        signal_handling._remove_worker_pids(id(iterator))
    for process in iterator._workers:
        process.terminate()


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


# -- the CUDA allocator's history ------------------------------------------------------------------


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
