"""Trials of torch's seams: each does with a seam what nbddp does with it, in a world of one rank without a network,
and raises if that fails. They run in a process that is thrown away (`worker.trials`).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from nbddp.seams import Failed, Untried, expect
from nbddp.worker import torch_seams


@contextlib.contextmanager
def alone() -> Iterator[Any]:
    """A default process group of one rank, without a network; torch.distributed."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist
    finally:
        dist.destroy_process_group()


def _recorded() -> list[dict[str, Any]]:
    import torch

    dump = torch_seams.flight_recorder()
    if dump is None:
        raise Failed("there is no recorder")
    with alone() as dist:
        dist.all_reduce(torch.ones(1))
        entries: list[dict[str, Any]] = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    expect(entries, "an all_reduce left no entry")
    return entries


def flight_recorder() -> None:
    _recorded()


def entry_keys() -> None:
    lacking = [key for key in torch_seams.ENTRY_KEYS if key not in _recorded()[-1]]
    expect(not lacking, f"an entry has no {', '.join(lacking)}")


def tables_of_groups() -> None:
    with alone() as dist:
        tables, group = torch_seams.world(), dist.group.WORLD
        expect(group in tables.pg_map, "the default group is not in its table")
        expect(list(tables.pg_group_ranks[group]) == [0], "the ranks of a group are told otherwise")
        expect(isinstance(tables.pg_names[group], str), "groups have no names")
        expect("gloo" in str(tables.pg_backend_config[group]), "the backends of a group are told otherwise")
        expect(tables.group_count >= 1, "groups are not counted")


def default_group() -> None:
    with alone() as dist:
        expect(torch_seams.default_group() is dist.group.WORLD, "it is another group than group.WORLD")


def another_default_group() -> None:
    with alone() as dist:
        whole, other = dist.group.WORLD, dist.new_group([0])
        torch_seams.set_default_group(other)
        expect(dist.group.WORLD is other, "setting it has no effect")
        torch_seams.set_default_group(whole)


def sequence_numbers() -> None:
    import torch

    with alone() as dist:
        before = torch_seams.sequence(dist.group.WORLD)
        dist.all_reduce(torch.ones(1))
        expect(torch_seams.sequence(dist.group.WORLD) == before + 1, "an all_reduce is not counted")


def clearing_of_groups() -> None:
    with alone():
        pass
    torch_seams.forget_groups()
    tables = torch_seams.world()
    expect(not tables.pg_map and tables.group_count == 0, "a group is still there")
    with alone() as dist:
        expect(dist.get_world_size() == 1, "the next init fails")


def abort_of_groups() -> None:
    raise Untried("only groups of NCCL are aborted")


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
    torch_seams.wrap_create_store(wrap)
    try:
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:1", rank=0, world_size=1)
        dist.destroy_process_group()
    finally:
        torch_seams.wrap_create_store(lambda ours: originals[0])
    expect(asked == [("127.0.0.1", 1, 0, 1)], "env:// makes its store otherwise")


def sockets_of_a_new_group() -> None:
    from nbddp.worker.groups import Groups

    groups = Groups()
    groups.install()
    if not os.path.isdir("/proc/self/fd"):
        raise Untried("sockets cannot be told apart without /proc")
    with alone():
        expect(groups.sockets.torchs(), "making a group shows no sockets of torch's")


def store_on_a_socket() -> None:
    from nbddp.agent.store_host import open_store

    store, port = open_store()
    store.set("key", "value")
    expect(store.get("key") == b"value" and port > 0, "the store gives back something else")


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
    expect(torch_seams.BACKWARD in names, f"backward runs without {torch_seams.BACKWARD}")


def marks() -> None:
    import torch

    from nbddp.worker import calls

    calls.mark()
    with alone() as dist:
        dist.all_reduce(torch.ones(1), async_op=True).wait()
        store = dist.HashStore()
        store.set("key", "value")
        expect(store.get("key") == b"value", "a store gives back something else")


def _trained() -> list[dict[str, Any]]:
    """The steps that the recorder has of one step of DDP."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from nbddp.worker.recorder import Recorder

    recorder = Recorder()
    recorder.install()
    with alone():
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.ones(1, 2)).sum().backward()
        steps: list[dict[str, Any]] = recorder.collect()["steps"]
        del model
    return steps


def ddps_reducer() -> None:
    steps = _trained()
    expect(steps and steps[0]["buckets"], "a step of DDP shows no bucket")


def end_of_backward() -> None:
    import torch

    called: list[int] = []
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda gradient: torch_seams.autograd_engine().queue_callback(lambda: called.append(1)))
    leaf.sum().backward()
    expect(called, "the engine does not call back")


def ddps_hooks() -> None:
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    with alone():
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        model.register_comm_hook(None, allreduce_hook)
        expect(torch_seams.replace_last_hook(model, allreduce_hook, None), "DDP keeps no list of hooks")
        del model


def methods_of_collectives() -> None:
    import torch

    from nbddp.worker.messages import listening

    with alone() as dist, listening() as heard:
        dist.all_gather_into_tensor(torch.ones(1), torch.ones(1))
        dist.reduce_scatter_tensor(torch.ones(1), torch.ones(1))
    expect(heard["collectives"] == ["all_gather_into_tensor", "reduce_scatter_tensor"], "they go by another method")


def compiled_modules() -> None:
    import torch

    module = torch.nn.Linear(1, 1)
    made = torch.compile(module)
    expect(torch_seams.is_compiled(made), "a compiled module does not keep the module")
    expect(torch_seams.compiled_from(made) is module, "it keeps another one")


def shards_of_dtensors() -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    with alone():
        made = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,)))
        expect(type(torch_seams.shard(made)) is torch.Tensor, "a DTensor does not keep its shard")


def parts_of_sparse() -> None:
    import torch

    indices, values = torch_seams.sparse_parts(
        torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,), check_invariants=False)
    )
    expect((indices.shape[1], len(values)) == (2, 2), "the tensor was coalesced")


def import_of_the_compiler() -> None:
    importlib.import_module(torch_seams.COMPILER)


TRIALS: dict[str, Callable[[], None]] = {
    "flight recorder": flight_recorder,
    "flight recorder's keys": entry_keys,
    "tables of groups": tables_of_groups,
    "default group": default_group,
    "another default group": another_default_group,
    "sequence numbers": sequence_numbers,
    "clearing of groups": clearing_of_groups,
    "abort of groups": abort_of_groups,
    "store of env://": store_of_env,
    "sockets of a new group": sockets_of_a_new_group,
    "store on a given socket": store_on_a_socket,
    "frames of backward": frames_of_backward,
    "marks on Work and Store": marks,
    "DDP's reducer": ddps_reducer,
    "end of backward": end_of_backward,
    "DDP's list of hooks": ddps_hooks,
    "methods of collectives": methods_of_collectives,
    "compiled modules": compiled_modules,
    "shards of DTensors": shards_of_dtensors,
    "parts of sparse tensors": parts_of_sparse,
    "import of the compiler": import_of_the_compiler,
}
