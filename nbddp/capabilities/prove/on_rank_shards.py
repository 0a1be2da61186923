"""Models of FSDP2 and of tensor parallelism in copies.

On the ranks they stay what they are. One process holds whole tensors: those are gathered before it is forked, and there
they take the place of the shards in modules and optimizers. What FSDP2 and tensor parallelism do at a module is removed
there, as DDP is. Ranks that hold parts of one model see one batch, which counts once.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from nbddp.capabilities.prove.on_rank_copy import replaced
from nbddp.capabilities.prove.on_rank_reach import Names, Reached
from nbddp.compat.extra import torch as torch_extra

COPIES = 4  # parameters, gradients, updates and states in one process; ranks have gradients and updates
MIXED = "mixed precision of FSDP2"


def is_shard(tensor: Any) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Any) -> Any:
    """The full tensor of a DTensor, for which all ranks call collectives; any other tensor itself."""
    return tensor.detach().full_tensor() if is_shard(tensor) else tensor


def wholes(found: Names, names: Iterable[str]) -> Names:
    """Each of these tensors whole, without updates that are zero."""
    made = {name: whole(found[name]) for name in names}
    return {n: t for n, t in made.items() if not is_shard(found[n]) or _counts(n, t)}


def _counts(name: str, tensor: Any) -> bool:
    return not name.startswith("update ") or bool(tensor.count_nonzero())


def refusal(reached: Reached) -> str:
    """Why a model's parameters cannot be whole in one process; empty if they can."""
    import torch

    for title, module in reached.modules.items():
        if any("FullyShardedDataParallel" in type(m).__name__ for m in module.modules()):
            return (
                f"{title} is a model of FSDP 1, which keeps parameters as parts of flat tensors; wrap it by "
                "fully_shard(module) of torch.distributed.fsdp, or by DDP, and prove the step there"
            )
        for name, parameter in (*module.named_parameters(), *module.named_buffers()):
            kind = type(torch_extra.shard(parameter.data))
            if kind is not torch.Tensor:
                return (
                    f"{title}.{name} is a {kind.__name__}, and copies compute with plain tensors and DTensors; prove "
                    "the step with a model that has these"
                )
    batches = [name for name, value in reached.values.items() if is_shard(value)]
    if batches:
        return f"{batches[0]} is a DTensor; give the step each rank's own part of it ({batches[0]}.to_local())"
    return _too_large(reached)


def _too_large(reached: Reached) -> str:
    import torch.distributed as dist

    shards = [p for module in reached.modules.values() for p in module.parameters() if is_shard(p)]
    needed = (COPIES + 2 * dist.get_world_size()) * sum(8 * p.numel() for p in shards)
    free = psutil.virtual_memory().available
    if needed < free:
        return ""
    return (
        f"one process needs about {needed >> 30} GiB for the whole model, and {free >> 30} GiB are free here; prove "
        "the step with fewer layers"
    )


def peers(modules: Iterable[Any]) -> tuple[int, ...]:
    """Global ranks that hold other parts of the model which this rank computes with. They are in those dimensions of a
    DTensor's mesh that FSDP2 does not shard over."""
    import torch.distributed as dist

    each = [m for module in modules for m in module.modules()]
    data = [_ranks(mesh) for m in each for mesh in torch_extra.fsdp_meshes(m)]
    of_data = {ranks for dims in data for ranks in dims}
    found = {dist.get_rank()}
    for mesh in {id(p.device_mesh): p.device_mesh for m in each for p in m.parameters() if is_shard(p)}.values():
        found.update(rank for ranks in _ranks(mesh) if ranks not in of_data for rank in ranks)
    return tuple(sorted(found))


def _ranks(mesh: Any) -> list[tuple[int, ...]]:
    """This rank's neighbours in each dimension of a mesh, with itself."""
    import torch.distributed as dist

    return [tuple(dist.get_process_group_ranks(mesh.get_group(i))) for i in range(mesh.ndim)]


# -- in copies -----------------------------------------------------------------------------------


def reshard(modules: Iterable[Any]) -> None:
    """Have FSDP2 models hold shards, as before a step."""
    for module in modules:
        for part in module.modules():
            if torch_extra.fsdp_state(part) is not None:
                part.reshard()


def settle(modules: Iterable[Any], optimizers: Iterable[Any], double: bool) -> bool:
    """Have models with DTensors compute in their parameters' types, and in float64 if asked. Whether FSDP2 had a mixed
    precision."""
    mixed = []
    for module in modules:
        if double and any(is_shard(p) for p in module.parameters()):
            module.double()
        mixed += [torch_extra.without_precision(m) for m in module.modules() if torch_extra.fsdp_state(m) is not None]
    for state in (state for optimizer in optimizers for state in optimizer.state.values()):
        if double:
            state.update({k: v.double() for k, v in state.items() if is_shard(v) and v.is_floating_point()})
    return any(mixed)


@dataclass
class WholeModel:
    """Of the models and optimizers that a step reaches, each DTensor with the whole one; and the entries of optimizer
    states that are DTensors."""

    tensors: list[tuple[Any, Any]]
    states: list[tuple[Any, str, Any]]

    def put(self, modules: Iterable[Any]) -> None:
        """Have this process be one that has never sharded them."""
        import torch

        for module in modules:
            for part in module.modules():
                torch_extra.without_sharding(part)
        for state, key, value in self.states:
            state[key] = value
        if self.tensors:
            each = [tensor for tensor, _ in self.tensors]
            new = {
                id(t): torch.nn.Parameter(full, t.requires_grad) if isinstance(t, torch.nn.Parameter) else full
                for t, full in self.tensors
            }
            gc.unfreeze()  # a fork is frozen, and shows nothing
            holders = [h for h in gc.get_referrers(*each) if h is not each]
            gc.freeze()
            replaced(holders, new)


def gathered(reached: Reached) -> WholeModel:
    """Gather them. All ranks call it."""
    tensors = {id(t): t for t in _tensors(reached) if is_shard(t)}
    states = [
        (state, key, whole(value))
        for optimizer in reached.optimizers.values()
        for group in optimizer.param_groups
        for state in (optimizer.state[p] for p in group["params"] if p in optimizer.state)
        for key, value in list(state.items())
        if is_shard(value)
    ]
    return WholeModel([(t, whole(t)) for t in tensors.values()], states)


def _tensors(reached: Reached) -> Iterator[Any]:
    for module in reached.modules.values():
        yield from (*module.parameters(), *module.buffers())
    for optimizer in reached.optimizers.values():
        yield from (p for group in optimizer.param_groups for p in group["params"])
