"""Programs of two ranks for GPUs: each returns what the same program on the CPU must return, digit by digit.

`RANK=0 WORLD_SIZE=2 … python -m tests.contract.gpu_programs.ranks cuda` prints it as JSON; `cpu` is the other.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.contract.gpu_programs import idioms
from tests.contract.gpu_programs.place import KIND, ON_GPUS, device, weights


def program_ddp() -> Any:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)).to(device())
    ddp = DDP(model, device_ids=[dist.get_rank()] if ON_GPUS else None)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(ddp(torch.randn(20, 10)) if not ON_GPUS else ddp(torch.randn(20, 10).to(device())),
                          torch.randn(20, 5).to(device()))  # fmt: skip
        loss.backward()
        optimizer.step()
    return loss.item(), weights(ddp)


def program_synchronised_batch_norm() -> Any:
    """On the CPU torch has none: there each rank has the whole batch, and ordinary batch norm.

    In double precision four steps at a high learning rate agree. In float32 both programs are as far from that result:
    what differs between them is rounding, which such steps let grow.
    """
    exact, rounded = (trained_with_batch_norm(dtype) for dtype in (torch.float64, torch.float32))
    drift = abs(rounded - exact) / exact
    return round(exact, 7), 1e-9 < drift < 1e-4


def trained_with_batch_norm(dtype: Any) -> float:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)).to(dtype)
    x, y = torch.randn(8, 1, 3, 3).to(dtype), torch.randn(8, 2).to(dtype)
    part = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4) if ON_GPUS else slice(None)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if ON_GPUS else model
    ddp = DDP(model.to(device()), device_ids=[dist.get_rank()] if ON_GPUS else None)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for _ in range(4):
        optimizer.zero_grad()
        F.mse_loss(ddp(x[part].to(device())), y[part].to(device())).backward()
        optimizer.step()
    return sum(p.detach().double().square().sum().item() for p in model.parameters())


def program_model_parallel() -> Any:
    class Split(nn.Module):
        def __init__(self, one: Any, two: Any) -> None:
            super().__init__()
            self.one, self.two = one, two
            self.a, self.b = nn.Linear(10, 10).to(one), nn.Linear(10, 5).to(two)

        def forward(self, x: Any) -> Any:
            return self.b(F.relu(self.a(x.to(self.one))).to(self.two))

    rank = dist.get_rank()
    torch.manual_seed(0)
    places = (2 * rank, 2 * rank + 1) if ON_GPUS else ("cpu", "cpu")
    ddp = DDP(Split(*places))
    ddp(torch.ones(4, 10)).square().sum().backward()
    return [p.grad.double().sum().item() for p in ddp.parameters()]


def program_fsdp2() -> Any:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(KIND, (2,))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=KIND)
    torch.manual_seed(3)
    for p in model.parameters():
        nn.init.constant_(p, 0.1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, foreach=False)
    for step in range(3):
        model(torch.ones(4, 8, device=device()) * (dist.get_rank() + step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def program_tensor_parallel() -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(KIND, (2,))
    torch.manual_seed(1)
    model = nn.ModuleDict({"q": nn.Linear(16, 16), "o": nn.Linear(16, 16)}).to(device())
    parallelize_module(model, mesh, {"q": ColwiseParallel(), "o": RowwiseParallel()})
    heads = model["q"](torch.ones(2, 5, 16, device=device())).view(2, 5, -1, 4).transpose(1, 2)
    y = model["o"](F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(2, 5, -1))
    y.sum().backward()
    return y.double().sum().item()


def program_attention_of_dtensors() -> Any:
    """On the CPU DTensor knows no kernel of attention, so the tensor is whole there."""
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(4)
    q = torch.randn(2, 4, 5, 8).to(device())
    if ON_GPUS:
        q = distribute_tensor(q, init_device_mesh(KIND, (2,)), [Shard(1)])
    q.requires_grad_()
    y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    y.square().sum().backward()
    whole = [one.full_tensor() if ON_GPUS else one for one in (y, q.grad)]
    return [one.cpu().flatten()[::7].tolist() for one in whole]


def program_pipeline() -> Any:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(2)
    rank = dist.get_rank()
    layers = [nn.Linear(4, 4) for _ in range(2)]
    stage = PipelineStage(layers[rank].to(device()), rank, 2, device())
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, target: (y - target).square().mean())
    losses: list[Any] = []
    if rank == 0:
        schedule.step(torch.arange(16.0).view(4, 4).to(device()))
    else:
        schedule.step(target=torch.zeros(4, 4, device=device()), losses=losses)
    return [loss.item() for loss in losses]


def program_collectives() -> Any:
    rank, found = dist.get_rank(), []
    x = torch.arange(4.0, device=device()) + rank
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        y = x.clone()
        dist.all_reduce(y, op)
        found.append(y.tolist())
    both = [torch.empty(4, device=device()) for _ in range(2)]
    dist.all_gather(both, x)
    found.append([one.tolist() for one in both])
    y = torch.empty(2, device=device())
    dist.reduce_scatter_tensor(y, x.clone())
    found.append(y.tolist())
    things: list[Any] = [None, None]
    dist.all_gather_object(things, {"rank": rank})
    return [*found, things]


def program_sizes_that_differ() -> Any:
    """All-to-all and the like of tensors that are not equally long. gloo has none: there they are written out."""
    rank = dist.get_rank()
    given = [torch.full((rank + other + 1, 2), 10.0 * rank + other, device=device()) for other in range(2)]
    out = [torch.zeros(rank + other + 1, 2, device=device()) for other in range(2)]
    parts = [torch.zeros(other + 1, device=device()) for other in range(2)]
    own = torch.full((rank + 1,), rank + 0.5, device=device())
    total = torch.zeros(rank + 1, device=device())
    if ON_GPUS:
        dist.all_to_all(out, given)
        dist.all_gather(parts, own)
        dist.reduce_scatter(total, [torch.full((n + 1,), rank + n + 0.5, device=device()) for n in range(2)])
    else:
        total += 2 * (1 + rank)
        out = [torch.full((rank + other + 1, 2), 10.0 * other + rank) for other in range(2)]
        parts = [torch.full((other + 1,), other + 0.5) for other in range(2)]
    return [part.tolist() for part in (*out, *parts, total)]


def program_batch_with_a_send_to_oneself() -> Any:
    """Each rank sends to all, itself among them. gloo cannot: there it is written out."""
    rank, ranks = dist.get_rank(), range(2)
    if not ON_GPUS:
        return [[10.0 * other + rank] * 3 for other in ranks]
    given = [torch.full((3,), 10.0 * rank + other, device=device()) for other in ranks]
    out = [torch.zeros(3, device=device()) for _ in ranks]
    receives = [dist.P2POp(dist.irecv, out[other], other) for other in ranks]
    sends = [dist.P2POp(dist.isend, given[other], other) for other in ranks]
    for batch in (receives + sends, sends + receives):
        for work in dist.batch_isend_irecv(batch):
            work.wait()
    return [part.tolist() for part in out]


def program_coalesced() -> Any:
    """gloo lacks it: there each collective goes alone."""
    tensors = [torch.full((2,), dist.get_rank() + n + 0.5, device=device()) for n in range(3)]
    if ON_GPUS:
        with dist._coalescing_manager(device=device(), async_ops=True) as together:
            for tensor in tensors:
                dist.all_reduce(tensor)
        together.wait()
    else:
        for tensor in tensors:
            dist.all_reduce(tensor)
    return [tensor.tolist() for tensor in tensors]


def program_coalesced_in_another_shape() -> Any:
    """NCCL sees no shapes: what is scattered may have another first dimension. gloo ends the process over that."""
    rank = dist.get_rank()
    given = [torch.arange(8.0, device=device()) + n + rank for n in range(2)]
    out = [torch.zeros(2, 2, device=device()) for _ in range(2)]
    if ON_GPUS:
        with dist._coalescing_manager(device=device()):
            for one, whole in zip(out, given, strict=True):
                dist.reduce_scatter_tensor(one, whole)
    else:
        out = [(2 * torch.arange(8.0) + 2 * n + 1)[4 * rank : 4 * rank + 4].view(2, 2) for n in range(2)]
    return [one.tolist() for one in out]


def program_detailed_debugging() -> Any:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around a group that is made."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    try:
        group = dist.new_group()
        x = torch.full((2,), dist.get_rank() + 1.0, device=device())
        dist.all_reduce(x, group=group)
        objects = [None, None]
        dist.all_gather_object(objects, {"rank": dist.get_rank()}, group=group)
        average = torch.full((2,), dist.get_rank() + 1.0, device=device())
        if ON_GPUS:
            dist.all_reduce(average, dist.ReduceOp.AVG, group=group)
        return x.tolist(), objects, average.tolist() if ON_GPUS else [1.5, 1.5]
    finally:
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"
        dist.set_debug_level_from_env()


def program_own_average() -> Any:
    """nccl averages, gloo does not."""
    y = torch.tensor([1.0, 2.0], device=device()) * (dist.get_rank() + 1)
    if ON_GPUS:
        dist.all_reduce(y, dist.ReduceOp.AVG)
    else:
        dist.all_reduce(y)
        y /= 2
    return y.tolist()


def program_barrier_before_a_gpu_is_chosen() -> Any:
    """A barrier takes the GPU of the rank's number; the current one is cuda:0 on both."""
    group = dist.new_group()
    if ON_GPUS:
        torch.cuda.set_device(0)
    dist.barrier(group)
    if ON_GPUS:
        torch.cuda.set_device(dist.get_rank())
    return dist.get_world_size(group)


def program_groups_one_after_another_on_a_store() -> Any:
    """torch counts groups from 0 again once all are destroyed, so the second asks for the first one's keys."""
    found, store = [], dist.PrefixStore("one after another", dist.distributed_c10d._get_default_store())
    for n in range(2):
        if not ON_GPUS:
            found.append([3.0 + 2 * n])
            continue
        x = torch.full((1,), dist.get_rank() + 1.0 + n, device=device())
        dist.ProcessGroupNCCL(store, dist.get_rank(), 2, timeout=datetime.timedelta(seconds=30)).allreduce([x]).wait()
        found.append(x.tolist())
    return found


def program_mesh_of_a_bound_device() -> Any:
    """With `device_id`, torch splits nccl's communicator for each dimension of a mesh."""
    if not ON_GPUS:
        return [[1.0], [0.0], "nccl", "child", [1, True]]
    group = dist.distributed_c10d._get_default_group()
    group.bound_device_id = device()
    try:
        mesh = init_device_mesh(KIND, (1, 2), mesh_dim_names=("dp", "tp"))
        x, y = (torch.full((1,), float(dist.get_rank()), device=device()) for _ in range(2))
        dist.all_reduce(x, group=mesh["tp"].get_group())
        dist.all_reduce(y, group=mesh["dp"].get_group())
        child = dist.split_group(split_ranks=[[0, 1]], group_desc="child")
        backend = child._get_backend(device())
        facts = [backend.size() // 2, backend.supports_splitting]
        return [x.tolist(), (y - dist.get_rank()).tolist(), dist.get_backend(child), child.group_desc, facts]
    finally:
        group.bound_device_id = None


def program_options_of_a_communicator() -> Any:
    if not ON_GPUS:
        return [[2.0], True, 4, -(1 << 31), 33.0]
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 4
    group, x = dist.new_group(pg_options=options), torch.ones(1, device=device())
    dist.all_reduce(x, group=group)
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=33), group)
    found = group._get_backend(device()).options
    return [
        x.tolist(), found.is_high_priority_stream, found.config.max_ctas, found.config.min_ctas,
        found._timeout.total_seconds(),
    ]  # fmt: skip


def program_sum_of_scaled_inputs() -> Any:
    """nccl's own reduction, with which FSDP divides gradients."""
    one = torch.full((4,), dist.get_rank() + 1.0, device=device())
    if not ON_GPUS:
        return [[1.5] * 4, [1.5] * 2, [dist.get_rank() + 1.0] * 4]
    total, part, given = one.clone(), torch.zeros(2, device=device()), one.clone()
    dist.all_reduce(total, op=dist._make_nccl_premul_sum(0.5))
    dist.reduce_scatter_tensor(part, given, op=dist._make_nccl_premul_sum(0.5))
    return [total.tolist(), part.tolist(), given.tolist()]


def program_sparse_gradients() -> Any:
    """nccl refuses them; gloo adds them up."""
    torch.manual_seed(0)
    ddp = DDP(nn.Embedding(5, 2, sparse=True).to(device()), device_ids=[dist.get_rank()] if ON_GPUS else None)
    try:
        ddp(torch.tensor([1, 2, 2], device=device())).sum().backward()
    except RuntimeError as e:
        return str(e).splitlines()[0] if ON_GPUS else ""
    return "NCCL does not support all_reduce with sparse tensors. Please use dense tensors instead."


def program_float8() -> Any:
    """gloo has no such type; NCCL moves it, and adds it up on a Hopper alone."""
    low = torch.full((2,), dist.get_rank() + 1.0, device=device()).to(torch.float8_e4m3fn)
    if not ON_GPUS:
        return [[1.0, 1.0, 2.0, 2.0], [2.0, 2.0], True]
    gathered = torch.empty(4, device=device()).to(low.dtype)
    dist.all_gather_into_tensor(gathered, low)
    try:
        dist.all_reduce(low)
        refused = ""
    except RuntimeError as e:
        refused = str(e)
    dist.broadcast(low, 1)
    told = "Float8 dtypes" in refused or refused.endswith("FP8 reduction support begins with sm90 capable devices.")
    return [gathered.float().tolist(), low.float().tolist(), told]


PROGRAMS = {
    name.removeprefix("program_"): one
    for name, one in (globals() | vars(idioms)).items()
    if name.startswith("program_")
}


def main() -> None:
    import warnings

    warnings.simplefilter("ignore")
    if ON_GPUS:
        from nbddp.capabilities.simulated_gpus.cards import cards_of
        from nbddp.capabilities.simulated_gpus.on_rank import install

        install(cards_of("4"))
    dist.init_process_group("nccl" if ON_GPUS else "gloo")
    if ON_GPUS:
        torch.cuda.set_device(dist.get_rank())
    found = {}
    for name, program in PROGRAMS.items():
        with contextlib.suppress(ImportError):  # an older torch lacks the feature, on the CPU too
            found[name] = program()
    print("RETURNED", json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
