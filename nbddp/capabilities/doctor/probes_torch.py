"""Tests of torch's private APIs: in process groups and stores, in DDP, autograd and tensors.

Each uses a private API as nbddp does, in a world of one rank without a network, and raises if that fails. They
run in a process that is thrown away (`capabilities.doctor.probe_runner`).
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from nbddp.compat import system
from nbddp.compat import torch as torch_compat
from nbddp.compat.extra import torch as torch_extra
from nbddp.compat.extra.probes import Failed, Untried, alone, expect
from nbddp.deadlock.on_rank import call_log, flight, torch_debug_detail
from nbddp.deadlock.on_rank.call_log import COLLECTIVES

SOON = 5.0  # seconds that a wait which was ended has to return


def _recorded() -> list[flight.RecordedCall]:
    if not torch_compat.flight_recorders():
        raise Failed("there is no recorder")
    flight.switch_on()
    with alone() as (dist, one):
        dist.all_reduce(one)
        entries = [entry for dump in flight.dumps(active=False) for entry in dump.get("entries", ())]
    expect(entries, "an all_reduce left no entry")
    return entries


def flight_recorder() -> None:
    _recorded()


def nccls_flight_recorder() -> None:
    import torch.distributed as dist

    if not dist.is_nccl_available():
        raise Untried("this torch has no NCCL")
    expect(torch_compat.has_nccl_recorder(), "NCCL's collectives are not recorded")


def flight_recorders_keys() -> None:
    lacking = [key for key in torch_compat.ENTRY_KEYS if key not in _recorded()[-1]]
    expect(not lacking, f"an entry has no {', '.join(lacking)}")


def tables_of_groups() -> None:
    with alone() as (dist, _):
        tables, group = torch_compat.world(), dist.group.WORLD
        expect(group in tables.pg_map, "the default group is not in its table")
        expect(list(tables.pg_group_ranks[group]) == [0], "the ranks of a group are reported in another way")
        expect(isinstance(tables.pg_names[group], str), "groups have no names")
        expect("gloo" in str(tables.pg_backend_config[group]), "the backends of a group are reported in another way")
        expect(tables.group_count >= 1, "groups are not counted")


def default_group() -> None:
    with alone() as (dist, _):
        expect(torch_compat.default_group() is dist.group.WORLD, "it is not group.WORLD")


def another_default_group() -> None:
    with alone() as (dist, _):
        whole, other = dist.group.WORLD, dist.new_group([0])
        torch_compat.set_default_group(other)
        expect(dist.group.WORLD is other, "setting it has no effect")
        torch_compat.set_default_group(whole)


def sequence_numbers() -> None:
    with alone() as (dist, one):
        before = torch_compat.sequence(dist.group.WORLD)
        dist.all_reduce(one)
        expect(torch_compat.sequence(dist.group.WORLD) == before + 1, "an all_reduce is not counted")


def clearing_of_groups() -> None:
    with alone():
        pass
    torch_compat.forget_groups()
    tables = torch_compat.world()
    expect(not tables.pg_map and tables.group_count == 0, "a group is still there")
    with alone() as (dist, _):
        expect(dist.get_world_size() == 1, "the next init fails")


def abort_of_groups() -> None:
    raise Untried("only NCCL groups are aborted")


def abort_of_transfers() -> None:
    if not system.has_proc():
        raise Untried(f"no rank is unblocked on {system.name()}")
    expect(torch_compat.can_abort_transfers(), "torch's library does not export a function that aborts one")
    with alone() as (dist, one):
        work = dist.irecv(one)
        waiting = threading.Thread(target=work.wait, daemon=True)
        waiting.start()
        expect(torch_compat.abort_transfer(work), "a receive's class is not gloo's")
        waiting.join(SOON)
        expect(not waiting.is_alive(), "a receive keeps waiting")


def store_of_env() -> None:
    import torch.distributed as dist

    asked: list[tuple[Any, ...]] = []

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_store(host: str, port: int, rank: int, size: int, timeout: Any, *args: Any, **kwargs: Any) -> Any:
            asked.append((host, port, rank, size))
            return dist.HashStore()

        originals.append(original)
        return create_store

    originals: list[Callable[..., Any]] = []
    torch_compat.wrap_create_store(wrap)
    try:
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:1", rank=0, world_size=1)
        dist.destroy_process_group()
    finally:
        torch_compat.wrap_create_store(lambda ours: originals[0])
    expect(asked == [("127.0.0.1", 1, 0, 1)], "env:// creates its store in another way")


def sockets_of_a_new_group() -> None:
    from nbddp.worker.process_groups import Groups

    groups = Groups()
    groups.install()
    if not system.has_proc():
        raise Untried("sockets cannot be identified without /proc")
    with alone():
        expect(groups.sockets.torchs(), "making a group shows no sockets of torch's")


def store_on_a_given_socket() -> None:
    from nbddp.agent import store_host

    served = store_host.in_the_open("")
    served.store.set("key", "value")
    expect(served.store.get("key") == b"value" and served.port > 0, "the store returns something else")
    served.close()


def marks_on_work_and_store() -> None:
    call_log.install()
    with alone() as (dist, one):
        dist.all_reduce(one, async_op=True).wait()
        store = dist.HashStore()
        store.set("key", "value")
        expect(store.get("key") == b"value", "a store returns something else")


def cs_log_level() -> None:
    found = []
    before = os.environ.get(torch_compat.LOG_LEVEL)
    for level in ("ERROR", "INFO"):
        os.environ[torch_compat.LOG_LEVEL] = level
        found.append(torch_compat.read_log_level())
    del os.environ[torch_compat.LOG_LEVEL]
    if before is not None:
        os.environ[torch_compat.LOG_LEVEL] = before
    expect(found == [2, 0], f"levels ERROR and INFO became {found}")


def checks_of_detail() -> None:
    """Two ranks of one process: one comes to a collective, and its helper's count says that it waits there."""
    import torch
    import torch.distributed as dist

    helpers: dict[int, Any] = {}
    groups: dict[int, Any] = {}
    torch_compat.wrap_checks(lambda name, helper: helpers.update({helper.rank(): helper}))
    store, soon = dist.HashStore(), timedelta(seconds=SOON)
    numbers = [torch.ones(1), torch.ones(1)]

    def make(rank: int) -> None:
        own = dist.ProcessGroupGloo(dist.PrefixStore("own", store), rank, 2, soon)
        groups[rank] = getattr(dist.distributed_c10d, torch_compat.CHECKED)(own, "name", store, rank, 2, soon)

    _both(make)
    expect(len(helpers) == 2, "a group is checked in another way")
    first = threading.Thread(target=lambda: groups[1].allreduce([numbers[1]]).wait(), daemon=True)
    first.start()
    until = time.monotonic() + SOON
    while not torch_debug_detail.waits(helpers[1]) and time.monotonic() < until:
        time.sleep(0.01)
    expect(torch_debug_detail.waits(helpers[1]), "a rank that waits in a check is not seen")
    expect(not torch_debug_detail.waits(helpers[0]), "a rank that has called nothing seems to wait")
    groups[0].allreduce([numbers[0]]).wait()
    first.join(SOON)
    expect(not any(map(torch_debug_detail.waits, helpers.values())), "a rank that is through a check seems to wait")


def _both(make: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=make, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)


# -- DDP, autograd and tensors ---------------------------------------------------------------------


def frames_of_backward() -> None:
    import torch

    names: list[str] = []

    def hook(gradient: Any) -> None:
        frame: Any = sys._getframe()
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back

    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(hook)
    leaf.sum().backward()
    expect(torch_compat.BACKWARD in names, f"backward runs without {torch_compat.BACKWARD}")


def backends_of_a_group() -> None:
    with alone() as (dist, _):
        group = dist.group.WORLD
        other = dist.ProcessGroup(0, 1)
        expect(torch_extra.share_backends(group, other) == group.name(), "one group cannot have another's backends")
        del other


def end_of_backward() -> None:
    import torch

    called: list[int] = []
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda gradient: torch_extra.autograd_engine().queue_callback(lambda: called.append(1)))
    leaf.sum().backward()
    expect(called, "the engine does not call back")


def data_loaders() -> None:
    import torch
    from torch.utils.data import DataLoader

    owner = torch_extra.loader_iterator()
    expect(owner is not None and "__next__" in vars(owner), "iterators over data loaders have no common __next__")
    batches = iter(DataLoader(torch.arange(2)))
    expect(isinstance(batches, owner), "an iterator over a data loader is of another class")
    del batches


def end_of_data_loaders() -> None:
    import torch
    from torch.utils.data import DataLoader

    asked: list[int] = []

    def hurries() -> Callable[[], bool]:
        asked.append(1)
        return lambda: False

    torch_compat.hurry_loaders(hurries, 60)
    batches = iter(DataLoader(torch.arange(2), num_workers=1))
    del batches
    expect(asked, "an iterator over a data loader ends its processes in another way")


def ddps_list_of_hooks() -> None:
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    with alone():
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        model.register_comm_hook(None, allreduce_hook)
        expect(torch_extra.replace_last_hook(model, allreduce_hook, None), "DDP keeps no list of hooks")
        del model


def methods_of_collectives() -> None:
    with alone() as (dist, one), _called(COLLECTIVES) as called:
        dist.all_gather_into_tensor(one, one)
        dist.reduce_scatter_tensor(one, one)
    names = [COLLECTIVES[method][0] for method in called]
    expect(names == ["all_gather_into_tensor", "reduce_scatter_tensor"], "they go by another method")


@contextmanager
def _called(methods: Iterable[str]) -> Iterator[list[str]]:
    """The names of these methods of a process group, as they are called while the block lasts."""
    import torch.distributed as dist

    called: list[str] = []
    originals = {name: vars(dist.ProcessGroup)[name] for name in methods if name in vars(dist.ProcessGroup)}

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return original(*args, **kwargs)

        return call

    for name in originals:
        setattr(dist.ProcessGroup, name, noting(name, getattr(dist.ProcessGroup, name)))
    try:
        yield called
    finally:
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, original)


def compiled_modules() -> None:
    import torch

    module = torch.nn.Linear(1, 1)
    made = torch.compile(module)
    expect(torch_extra.is_compiled(made), "a compiled module does not keep the module")
    expect(torch_extra.compiled_from(made) is module, "it keeps another one")


def shards_of_dtensors() -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    with alone():
        made = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,)))
        expect(type(torch_extra.shard(made)) is torch.Tensor, "a DTensor does not keep its shard")


def parts_of_sparse_tensors() -> None:
    import torch

    indices, values = torch_extra.sparse_parts(
        torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,), check_invariants=False)
    )
    expect((indices.shape[1], len(values)) == (2, 2), "the tensor was coalesced")


def profilers_of_a_program() -> None:
    from torch import profiler

    seen: list[str] = []
    torch_extra.watch_profilers(lambda: seen.append("begins"), lambda: seen.append("on"), lambda: seen.append("off"))
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU]):
        expect("on" in seen and seen[0] == "begins", "that a profiler starts is not noticed before it does")
    expect(seen[-1] == "off", "that a profiler has stopped is not noticed")


def history_of_gpu_memory() -> None:
    import torch

    if not torch_extra.begin_memory_history(100):
        raise Untried("torch sees no GPU here")
    tensor = torch.ones(1, device="cuda")
    found = torch_extra.end_memory_history()
    entries = [e for some in found["device_traces"] for e in some if e["action"] == "alloc"]
    expect(any(e["addr"] == tensor.untyped_storage().data_ptr() for e in entries), "an allocation is not recorded")
    lacking = [key for key in ("size", "time_us", "frames") if key not in entries[-1]]
    expect(not lacking, f"an allocation has no {', '.join(lacking)}")
    expect(all("allocated_size" in segment for segment in found["segments"]), "segments do not say what is allocated")
    expect(entries[-1]["frames"], "an allocation has no Python frames")


def import_of_the_compiler() -> None:
    importlib.import_module(torch_compat.COMPILER)
