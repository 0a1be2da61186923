"""Backends that programs know as nccl: gloo's, each with a group on the CPU over it, and what gloo's class lacks."""

from __future__ import annotations

import copy
import datetime
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from nbddp.capabilities.simulated_gpus.on_rank import devices, nccl_calls, versions

TEN_MINUTES = datetime.timedelta(minutes=10)  # NCCL's default timeout
UNDEFINED = -(1 << 31)  # what NCCL has for a setting that is left to it
SHARED = -1  # in place of a GPU that a rank has brought
NO_EFFECT = (  # what torch calls on an nccl backend and gloo's lacks
    "_group_start", "_group_end", "_verify_work_timeout", "_add_ephemeral_timeout",
)  # fmt: skip


NAN_CHECK = "TORCH_NCCL_NAN_CHECK"
SWITCHES = (
    NAN_CHECK,
    "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_DESYNC_DEBUG",
    "TORCH_NCCL_ENABLE_TIMING",
)
YES, NO = ("y", "yes", "1", "t", "true"), ("n", "no", "0", "f", "false")
CREATORS = (  # functions of torch 2.15 and later, which has NCCL's backends as plugins
    "_create_nccl_process_group", "_create_nccl_legacy_process_group", "_create_nccl2_process_group",
    "_create_nccl_lazy_process_group",
)  # fmt: skip


class NCCLConfig:
    """As the settings of a communicator: they are kept, and change nothing."""

    __slots__ = (
        "blocking", "cga_cluster_size", "collnet_enable", "comm_name", "cta_policy", "max_ctas", "min_ctas",
        "net_name", "nvls_ctas", "shrink_share", "split_share", "traffic_class",
    )  # fmt: skip

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, None if name.endswith("_name") else UNDEFINED)


@dataclass
class Shadow:
    """A group on the CPU over the gloo that the program knows as its nccl.

    number: how many such groups this process had before. splits: how often the communicator was split.
    """

    gloo: Any
    group: Any
    boxed: Any
    store: Any
    rank: int
    size: int
    device: int | None = None  # the GPU that this rank has brought, from its first collective on
    own: nccl_calls.Own = field(default_factory=nccl_calls.Own)
    options: Any = None
    number: int = -1
    splits: int = 0
    nan_check: bool = False
    ended: bool = False  # destroyed or aborted: a program may have kept it


shadows: dict[int, Shadow] = {}  # id of a gloo backend → its shadow
nccls: set[int] = set()  # ids of those that programs know as nccl


def install() -> None:
    c10d, compiled = dist.distributed_c10d, torch._C._distributed_c10d
    compiled.ProcessGroupNCCL = c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = _class(compiled)
    c10d._NCCL_AVAILABLE = True
    c10d.default_pg_nccl_timeout = dist.constants.default_pg_nccl_timeout = TEN_MINUTES
    dist.is_nccl_available = c10d.is_nccl_available = lambda: True
    for name in NO_EFFECT:
        if not hasattr(compiled.ProcessGroupGloo, name):
            setattr(compiled.ProcessGroupGloo, name, lambda self, *args, **kwargs: None)
    for name, answer in OF_NCCL.items():
        _add(compiled.ProcessGroupGloo, name, answer)
    for name, answer in FACTS.items():
        _add(compiled.ProcessGroupGloo, name, answer, property)
    for name in CREATORS:
        if hasattr(c10d, name):
            setattr(c10d, name, _create)
    for name in ("shutdown", "abort"):
        if hasattr(compiled.ProcessGroup, name):
            setattr(compiled.ProcessGroup, name, _ending(getattr(compiled.ProcessGroup, name)))
    if hasattr(compiled.ProcessGroup, "split_group"):
        compiled.ProcessGroup.split_group = _splitting(compiled.ProcessGroup.split_group)


def _class(compiled: Any) -> Any:
    """The class that programs and torch take for ProcessGroupNCCL."""
    base = getattr(compiled.ProcessGroupGloo, "_Options", object)

    class Options(base):  # type: ignore[misc, valid-type]
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            super().__init__()
            self.__dict__.update(is_high_priority_stream=is_high_priority_stream, config=NCCLConfig())

        def __deepcopy__(self, memo: Any) -> Any:
            made = Options()
            made._timeout = self._timeout
            made.__dict__.update(self.__dict__, config=copy.deepcopy(self.config, memo))
            return made

    class Kind(type):
        def __instancecheck__(cls, one: Any) -> bool:
            return id(one) in nccls

    class ProcessGroupNCCL(metaclass=Kind):
        def __new__(cls, store: Any, rank: int, size: int, options: Any = None, timeout: Any = None) -> Any:
            given = Options() if options is None else options
            if options is None:
                given._timeout = timeout or TEN_MINUTES
            return made(store, rank, size, given)

    ProcessGroupNCCL.Options = Options  # type: ignore[attr-defined]
    ProcessGroupNCCL.NCCLConfig = NCCLConfig  # type: ignore[attr-defined]
    ProcessGroupNCCL.get_build_nccl_version = staticmethod(versions.nccl)  # type: ignore[attr-defined]
    ProcessGroupNCCL.get_runtime_nccl_version = staticmethod(versions.nccl)  # type: ignore[attr-defined]
    return ProcessGroupNCCL


def made(store: Any, rank: int, size: int, options: Any) -> Any:
    """A gloo backend, known as nccl."""
    if devices.count() < 1:
        raise ValueError("ProcessGroupNCCL is only supported with GPUs, no GPUs found!")
    _check_environment()
    store = dist.PrefixStore(f"simulated/{store.add(f'simulated/made/{rank}', 1)}/", store)  # it may have served before
    kind, wait = torch._C._distributed_c10d.ProcessGroupGloo, options._timeout
    gloo = kind(dist.PrefixStore("nccl/", store), rank, size, timeout=wait)
    shadow = shadows[id(gloo)] = over(gloo, store)
    shadow.options, shadow.number = options, len(nccls)
    shadow.nan_check = os.environ.get(NAN_CHECK, "0").lower() in YES
    nccls.add(id(gloo))
    parent = getattr(options, "split_from", None)
    if parent is not None:
        _count_split(parent)
    return gloo


def _check_environment() -> None:
    for name in SWITCHES:
        if os.environ.get(name, "0").lower() not in YES + NO:
            raise RuntimeError(f"Invalid value for environment variable: {name}")


def _create(opts: Any, backend_options: Any) -> Any:
    """As the plugins of torch 2.15 do, from options of a group."""
    options = backend_options or dist.ProcessGroupNCCL.Options()
    options._timeout, options.split_from = opts.timeout, opts.split_from
    return made(opts.store, opts.group_rank, opts.group_size, options)


def over(gloo: Any, store: Any) -> Shadow:
    compiled = torch._C._distributed_c10d
    kind, rank, size = compiled.ProcessGroup.BackendType.GLOO, gloo.rank(), gloo.size()
    group = compiled.ProcessGroup(dist.PrefixStore("simulated/group/", store), rank, size)
    group._register_backend(torch.device("cpu"), kind, gloo)
    group._set_default_backend(kind)
    return Shadow(gloo, group, group.boxed(), store, rank, size)


def unwrapped(backend: Any) -> Any:
    """Without the wrapper of `TORCH_DISTRIBUTED_DEBUG=DETAIL`."""
    return getattr(backend, "wrapped_pg", backend)


def is_nccl(group: Any) -> bool:
    try:
        return id(unwrapped(group._get_backend(torch.device("cuda")))) in nccls
    except RuntimeError:  # it has no backend for CUDA
        return False


def bring(shadow: Shadow, device: int, key: str = "simulated") -> None:
    """NCCL refuses two ranks on one GPU when the communicator is made: at the first collective, or where the program
    has named the device."""
    if shadow.device is not None:
        return
    shadow.device = device
    node = os.environ.get("GROUP_RANK", "")  # simulated nodes have GPUs of their own
    mine = f"{socket.gethostname()}:{node}:{devices.physical(device)}"
    shadow.store.set(f"{key}/{shadow.rank}", mine)
    for rank in range(shadow.size):
        other = shadow.store.get(f"{key}/{rank}").decode()
        if rank != shadow.rank and other == mine:
            shadow.device = None  # the next collective tries again, as NCCL does
            bus = (devices.physical(device) + 1) << 12
            raise dist.DistBackendError(versions.one_gpu_twice(shadow.rank, rank, bus))


# -- what programs and torch ask of such a backend ----------------------------------------------------


def _add(kind: Any, name: str, answer: Callable[..., Any], wrap: Callable[[Any], Any] = lambda called: called) -> None:
    """gloo's own answer stays that of backends which are gloo for the program too."""
    own = vars(kind).get(name) or getattr(kind, name, None)
    read = own.fget if isinstance(own, property) else own

    def called(self: Any, *args: Any) -> Any:
        if id(self) in nccls:
            return answer(shadows[id(self)], *args)
        if read is None:
            raise AttributeError(f"'{kind.__module__}.{kind.__name__}' object has no attribute '{name}'")
        return read(self, *args)

    setattr(kind, name, wrap(called))


def _count_split(backend: Any) -> None:
    shadows[id(backend)].splits += 1


def _no_color(shadow: Shadow, device: Any) -> None:
    """This rank is in no group of a split that the others make."""
    shadow.splits += 1


def _end(shadow: Shadow, *why: Any) -> None:
    shadow.ended = True


def _ending(end: Callable[..., Any]) -> Callable[..., Any]:
    """`ProcessGroup.shutdown` and `abort`, which end the backend in C++."""

    def ending(self: Any) -> None:
        if is_nccl(self):
            _end(shadows[id(unwrapped(self._get_backend(torch.device("cuda"))))])
        end(self)

    return ending


def _set_nan_check(shadow: Shadow, on: bool) -> None:
    shadow.nan_check = on


def _connect(shadow: Shadow, device: Any) -> None:
    bring(shadow, devices.index_for(torch.device(device)))


def _set_timeout(shadow: Shadow, timeout: Any) -> None:
    shadow.options._timeout = timeout
    _own_set_timeout(shadow.gloo, timeout)


def _options(shadow: Shadow) -> Any:
    """With the timeout that gloo has now: C++ may have set it."""
    if _own_options is not None:
        shadow.options._timeout = _own_options.fget(shadow.gloo)._timeout
    return shadow.options


_own_options = getattr(torch._C._distributed_c10d.ProcessGroupGloo, "options", None)
_own_set_timeout = torch._C._distributed_c10d.ProcessGroupGloo._set_default_timeout
OF_NCCL: Mapping[str, Callable[..., Any]] = {
    "comm_split_count": lambda shadow: shadow.splits,
    "perform_nocolor_split": _no_color,
    "eager_connect_single_device": _connect,
    **dict.fromkeys(("_shutdown", "shutdown", "_abort", "abort"), _end),
    "_set_enable_nan_check": _set_nan_check,
    "_is_initialized": lambda shadow: shadow.device is not None,
    "_set_default_timeout": _set_timeout,
}
FACTS: Mapping[str, Callable[[Shadow], Any]] = {
    "options": _options,
    "uid": lambda shadow: shadow.number,
    "supports_splitting": lambda shadow: True,
}


def _splitting(split: Callable[..., Any]) -> Callable[..., Any]:
    """`ProcessGroup.split_group`: NCCL splits its communicator, so a backend of the child is known as nccl too."""

    def splitting(
        self: Any, ranks: Any, timeout: Any = None, opts: Any = None, group_name: Any = None, group_desc: Any = None,
        **more: Any,
    ) -> Any:  # fmt: skip
        if not is_nccl(self):
            return split(self, ranks, timeout, opts, group_name, group_desc, **more)
        cuda = torch.device("cuda")
        parent = unwrapped(self._get_backend(cuda))
        _count_split(parent)
        if self.rank() not in ranks:
            return None
        kind, rank, size = torch._C._distributed_c10d.ProcessGroup, sorted(ranks).index(self.rank()), len(ranks)
        store = dist.PrefixStore(f"{group_name}/", self.get_group_store())
        options = copy.deepcopy(parent.options if opts is None else opts)
        options._timeout = timeout or options._timeout
        options.split_from = None
        child = kind(store, rank, size)
        child._register_backend(cuda, kind.BackendType.NCCL, made(store, rank, size, options))
        cpu = torch.device("cpu")
        if cpu in self._device_types and cpu in (more.get("device_types") or [cpu]):
            gloo = torch._C._distributed_c10d.ProcessGroupGloo(
                dist.PrefixStore("cpu/", store), rank, size, timeout=options._timeout
            )
            child._register_backend(cpu, kind.BackendType.GLOO, gloo)
        child._set_default_backend(kind.BackendType.NCCL)
        child._set_group_name(group_name)
        child._set_group_desc(group_desc or "undefined")
        return child

    return splitting
