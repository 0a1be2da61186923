"""Private names of torch that the core uses, each as a function or constant with a name of ours; `compat.extra` has the
others.

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
from collections.abc import Callable
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


# -- DDP, autograd and tensors ------------------------------------------------------------------


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
