"""A copy of a rank: a forked process, which has all that the rank has, and from which nothing leads back.

A fork copies model, optimizer, generators, globals and closures alike, so no name of the step has to be bound anew.
What a fork shares is cut off here. Sockets and pipes lead nowhere. Files cannot be written: by Linux's Landlock, and
where a kernel lacks that, as far as Python sees it. Each open file is read from a position of its own. Tensors in
shared memory become the copy's own. `torch` runs on one thread, since those of the rank's pools are not there.

Process groups of the rank cannot be used by two processes. So torch forgets them, and groups of the copies take their
place, in DDP models too. A DDP model gets a new reducer for the parameters that its old one exchanged, which need not
be those that the module has now.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import gc
import inspect
import io
import os
import select
import signal
import stat
import struct
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from nbddp.agent.children import die_with_parent
from nbddp.capabilities.prove.on_rank_reach import Names
from nbddp.compat import torch as torch_compat
from nbddp.compat.extra import system as system_extra
from nbddp.compat.extra import torch as torch_extra
from nbddp.worker.parts import RankWorker

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
HARMLESS = ("/dev/", "/proc/")
TRIES, BEGINS, BEGUN = 3, 10.0, b"."  # seconds in which a fork begins; what it then says
NewObjects = dict[int, Any]  # id of an old group or tensor → what takes its place
CHANGES = frozenset(
    ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink", "os.chmod", "os.utime",
     "subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.kill", "os.killpg")
)  # fmt: skip

_kept: list[Any] = []  # groups of the rank: their end would wait for threads that are not here
_names: dict[int, str] = {}  # id of each → the name by which meshes look for it


class StepActs(Exception):
    """The step does what no copy may do; its text says what, and what to change."""


def forked(quietly: bool, read: int, write: int) -> int:
    """Fork, and return as `os.fork` does. quietly: torch is to run backward there, though it has threads for GPUs. Such
    a fork says by the pipe that it has begun, and is made again if it does not. Raises RuntimeError."""
    if not quietly:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns of threads; the module says what is done about them
            return os.fork()
    for _ in range(TRIES):
        pid = system_extra.fork_quietly()
        if pid == 0:
            bytearray(1 << 14)  # takes the lock that another thread may have held
            os.write(write, BEGUN)
            return 0
        if select.select([read], [], [], BEGINS)[0] and os.read(read, 1) == BEGUN:
            return pid
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    raise RuntimeError("no copy of this rank could begin; run %ddp prove again")


def cut_off(parent: int, keep: Sequence[int], seconds: float, shared: Iterable[Any] = ()) -> None:
    """Have this process, a fork, share nothing with the rank but the descriptors in `keep`. It ends by itself after
    some seconds, and with its parent. shared: tensors in shared memory."""
    os.setsid()
    die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    _cut_descriptors({*keep})
    deny_writes(except_below="/dev")
    sys.stdout = sys.stderr = io.StringIO()
    sys.addaudithook(_refuse)
    import torch

    torch.save = torch.serialization.save = _save_in_memory(torch.save)  # it writes in C++
    torch.set_num_threads(1)
    for tensor in shared:
        tensor.data = tensor.data.clone()


def _cut_descriptors(keep: set[int]) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        with contextlib.suppress(OSError):  # the one by which they were listed
            if fd not in keep and fd != null:
                _cut(fd, null)
    os.close(null)


def _cut(fd: int, null: int) -> None:
    mode, flags = os.fstat(fd).st_mode, fcntl.fcntl(fd, fcntl.F_GETFL)
    writes = flags & os.O_ACCMODE != os.O_RDONLY
    if stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode) or (writes and (stat.S_ISREG(mode) or os.isatty(fd))):
        os.dup2(null, fd, inheritable=False)
    elif stat.S_ISREG(mode):
        at = os.lseek(fd, 0, os.SEEK_CUR)
        own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        os.lseek(own, at, os.SEEK_SET)
        os.dup2(own, fd, inheritable=False)
        os.close(own)


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    """An audit hook: no file is changed, and no other program started."""
    if event == "open":
        path, _, flags = args
        writes = isinstance(flags, int) and flags & WRITES
        if writes and not (isinstance(path, int) or str(path).startswith(HARMLESS)):
            raise StepActs(
                f"it opens {os.fsdecode(path)!r} for writing, which a copy must not do; remove that from the step"
            )
    elif event in CHANGES:
        raise StepActs(f"it calls {event}, which a copy must not do; remove that from the step")


def _save_in_memory(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch.save, without files."""

    @functools.wraps(original)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, str | os.PathLike):
            raise StepActs(f"it saves to {os.fspath(f)!r}, and a copy writes no files; remove that from the step")
        return original(obj, f, *args, **kwargs)

    return save


@dataclass
class Living:
    """What of torch's a rank has: found by the rank, since a copy would have to copy each page that it looks at.

    shared: tensors in shared memory. holders: what refers to a process group.
    """

    shared: list[Any]
    modules: list[Any]
    optimizers: list[Any]
    ddp: list[Any]
    holders: list[Any]


def living(names: Names) -> Living:
    """Nothing is asked of any object but its type. names: those of the cells, which the collector does not show: the
    dict is older than the first cell, and frozen."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    kinds = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
    of_type: dict[type, int] = {}
    found: tuple[list[Any], ...] = ([], [], [], [])
    for thing in gc.get_objects():
        kind = type(thing)
        at = of_type.get(kind)
        if at is None:
            at = of_type[kind] = next((i for i, k in enumerate(kinds) if issubclass(kind, k)), 3)
        if at < 3:
            found[at].append(thing)
    ddp = [m for m in found[1] if issubclass(type(m), DistributedDataParallel) and "reducer" in m.__dict__]
    tables = torch_compat.world()
    groups = list(tables.pg_group_ranks)
    holders = [h for h in gc.get_referrers(*groups) if h is not groups] if groups else []
    return Living([t for t in found[0] if _is_shared(t)], found[1], found[2], ddp, [names, *holders])


def _is_shared(tensor: Any) -> bool:
    try:
        return tensor.device.type == "cpu" and tensor.is_leaf and bool(tensor.is_shared())
    except (RuntimeError, NotImplementedError, AttributeError):  # one without storage
        return False


# -- process groups ------------------------------------------------------------------------------


def leave_groups() -> list[tuple[Any, list[int]]]:
    """Have torch forget the rank's groups, which stay alive and unused: each with its global ranks, the default one
    first."""
    tables = torch_compat.world()
    default = torch_compat.default_group()
    mine = [(g, ranks) for g, ranks in tables.pg_group_ranks.items() if not isinstance(g, int)]  # others have a number
    known = [(group, sorted(ranks)) for group, ranks in mine]
    known.sort(key=lambda found: found[0] is not default)
    _kept.append([group for group, _ in known])
    _names.update({id(group): group.group_name for group, _ in known})
    torch_compat.set_default_group(None)
    torch_compat.forget_groups()
    return known


def has_gpus(worker: RankWorker) -> bool:
    """Whether a copy of this rank can use its GPUs: simulated ones."""
    return bool(worker.parts.of("copied"))


def begin_group(store: Any, rank: int, size: int, seconds: float, gpus: bool) -> None:
    """Make a default group of gloo's, and of simulated nccl's for GPUs."""
    import torch.distributed as dist

    init = inspect.unwrap(dist.init_process_group)
    init(
        "cpu:gloo,cuda:nccl" if gpus else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )


def with_copies(worker: RankWorker, rank: int, size: int, seconds: float) -> list[tuple[Any, Any]]:
    """Make groups in which the copies of all ranks meet; pairs of an old group and its new one."""
    import torch.distributed as dist

    old = leave_groups()
    worker.groups.released()  # its client's connection leads nowhere
    begin_group(worker.groups.store("prove"), rank, size, seconds, has_gpus(worker))
    new = [dist.group.WORLD]
    new += [dist.new_group(ranks, use_local_synchronization=True) for _, ranks in old[1:]]
    return [(was, now) for (was, _), now in zip(old, new, strict=True)]


def alone(before: Iterable[tuple[Any, Any]], gpus: bool) -> list[tuple[Any, Any]]:
    """Make a world of this process alone, which replaces all groups. before: those of the rank that were replaced."""
    import torch.distributed as dist

    old = leave_groups()
    begin_group(dist.HashStore(), 0, 1, 60.0, gpus)
    return [(group, dist.group.WORLD) for group in (*(g for g, _ in old), *(g for g, _ in before))]


def put_in_place(pairs: Sequence[tuple[Any, Any]], living: Living) -> None:
    """Have names, attributes, list items and closures that hold an old group hold the new one."""
    new = {id(old): now for old, now in pairs}
    replaced(living.holders, new)
    for ddp in living.ddp:
        ddp.process_group = new.get(id(ddp.process_group), ddp.process_group)
    for old, now in pairs:
        if id(old) in _names:
            torch_extra.answer_to(_names[id(old)], now)


def replaced(holders: Iterable[Any], new: NewObjects) -> None:
    """Have what holds an old object hold the new one; also as the key of a dict."""
    for holder in holders:
        if isinstance(holder, dict):
            if any(id(k) in new or id(v) in new for k, v in holder.items()):
                items = [(new.get(id(k), k), new.get(id(v), v)) for k, v in holder.items()]
                holder.clear()
                holder.update(items)
        elif isinstance(holder, list):
            holder[:] = [new.get(id(v), v) for v in holder]
        elif isinstance(holder, types.CellType):
            holder.cell_contents = new.get(id(holder.cell_contents), holder.cell_contents)
        else:
            _in_attributes(holder, new)


def _in_attributes(holder: Any, new: NewObjects) -> None:
    held = getattr(holder, "__dict__", None)
    if isinstance(held, dict):
        for key in [k for k, v in held.items() if id(v) in new]:
            held[key] = new[id(held[key])]


# -- models --------------------------------------------------------------------------------------


@dataclass
class DdpParts:
    """What of a DDP model is needed to give it a reducer again. hooks: with states, and the name of one in C++."""

    ddp: Any
    parameters: list[Any]
    hooks: tuple[list[tuple[Any, Any]], str]

    @property
    def hook_names(self) -> list[str]:
        own, in_native = self.hooks
        return [getattr(hook, "__name__", type(hook).__name__) for hook, _ in own] + ([in_native] if in_native else [])


def take_apart(models: Iterable[Any]) -> list[DdpParts]:
    """Remove each DDP model's reducer and with it its hooks on gradients."""
    parts = []
    for ddp in models:
        parts.append(DdpParts(ddp, torch_extra.reduced_parameters(ddp), torch_extra.comm_hooks(ddp)))
        del ddp.__dict__["reducer"], ddp.__dict__["logger"]
    return parts


def put_together(parts: Iterable[DdpParts]) -> None:
    """Give each a reducer in its new group."""
    import torch

    for part in parts:
        sparse = {
            id(m.weight)
            for m in part.ddp.module.modules()
            if isinstance(m, torch.nn.Embedding | torch.nn.EmbeddingBag) and m.sparse
        }
        flags = [id(p) in sparse for p in part.parameters]
        torch_extra.make_reducer(part.ddp, part.parameters, flags, part.hooks)


def plain_models() -> None:
    """Have DDP models be their modules, and meshes have one rank, as in a program for one process."""
    from torch.nn.parallel import DistributedDataParallel as DDP

    def forward(ddp: Any, *args: Any, **kwargs: Any) -> Any:
        return ddp.module(*args, **kwargs)

    def nothing(*args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext()

    for name, value in (("forward", forward), ("no_sync", nothing), ("join", nothing)):
        setattr(DDP, name, value)
    meshes = sys.modules.get("torch.distributed.device_mesh")
    if meshes is not None:
        meshes.DeviceMesh.size = lambda mesh, *args, **kwargs: 1
        meshes.DeviceMesh.get_rank = meshes.DeviceMesh.get_local_rank = lambda mesh, *args, **kwargs: 0


def to_double(tensors: Iterable[Any]) -> None:
    """Leaves of floating point become float64 in place."""
    import torch

    for tensor in tensors:
        narrow = tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
        if narrow and tensor.is_leaf and tensor.layout is torch.strided and not hasattr(tensor, "full_tensor"):
            tensor.grad = None
            tensor.data = tensor.data.double()


def own_tensors(modules: Iterable[Any], optimizers: Iterable[Any]) -> Iterable[Any]:
    """Parameters, buffers and optimizer state, each tensor once."""
    found: dict[int, Any] = {}
    for module in modules:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            found[id(tensor)] = tensor
    for optimizer in optimizers:
        for state in optimizer.state.values():
            found.update({id(v): v for k, v in state.items() if hasattr(v, "dtype") and k != "step"})
    return found.values()


def run_eagerly() -> None:
    """Have what torch.compile made run as it was written: its threads and processes are not here."""
    import torch

    stance: Callable[[str], Any] | None = getattr(torch.compiler, "set_stance", None)
    if torch_compat.COMPILER in sys.modules and stance is not None:
        stance("force_eager")


# -- what a copy may write ---------------------------------------------------------------------------

CREATE, ADD_RULE, RESTRICT = 444, 445, 446  # system calls, the same on all processors
VERSION = 1  # a flag of CREATE: only tell the version
PATH_BENEATH = 1
NO_NEW_PRIVILEGES = 38  # of prctl
WRITE_FILE = 1 << 1
REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))
REFER, TRUNCATE = 1 << 13, 1 << 14  # since versions 2 and 3


def deny_writes(except_below: str) -> bool:
    """Deny this process and its children to open a file for writing, and to make, remove or truncate any, but below
    one folder: by Landlock. Whether it is denied; nothing is where a kernel has none. What is open stays."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(CREATE, None, ctypes.c_size_t(0), VERSION)
    if version < 1:
        return False
    handled = WRITE_FILE | REMOVE_AND_MAKE | (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    asked = struct.pack("=Q", handled)
    rules = libc.syscall(CREATE, asked, ctypes.c_size_t(len(asked)), 0)
    if rules < 0:
        return False
    folder = os.open(except_below, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", handled, folder)
        added = libc.syscall(ADD_RULE, rules, PATH_BENEATH, rule, 0)
        return bool(
            added == 0 and libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0 and libc.syscall(RESTRICT, rules, 0) == 0
        )
    finally:
        os.close(folder)
        os.close(rules)
