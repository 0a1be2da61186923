"""Tests of copies of DDP and sharded models, as those of other private APIs in `capabilities.doctor`."""

from __future__ import annotations

from nbddp.compat.extra import torch as torch_extra
from nbddp.compat.extra.probes import Untried, alone, expect


def copies_of_ddp_models() -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    with alone():
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.ones(1, 2)).sum().backward()
        reduced = torch_extra.reduced_parameters(model)
        expect({id(p) for p in reduced} == {id(p) for p in model.parameters()}, "the reducer reports other parameters")
        torch_extra.make_reducer(model, reduced, [False, False], torch_extra.comm_hooks(model))
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        got = [p.grad is not None for p in model.parameters()]
        del model
    expect(all(got), "a model with a new reducer gets no gradients")


def copies_of_fsdp2_models() -> None:
    import torch
    from torch.distributed import fsdp

    from nbddp.capabilities.prove import on_rank_shards as sharding
    from nbddp.capabilities.prove.on_rank_reach import Reached

    if not hasattr(fsdp, "fully_shard") or not hasattr(torch.cpu.Stream, "record_event"):
        raise Untried("this torch has no FSDP2 on CPU")
    batch = torch.ones(1, 2)
    with alone():
        model = fsdp.fully_shard(torch.nn.Linear(2, 1), mp_policy=fsdp.MixedPrecisionPolicy(torch.bfloat16))
        model(batch).sum().backward()
        model.zero_grad()
        expect(sharding.settle([model], [], double=True), "FSDP2 does not report its mixed precision")
        made = model(batch.double()).dtype
        expect(made is torch.float64, f"a model of FSDP2 in float64 computes in {made}")
        sharding.reshard([model])
        sharding.gathered(Reached(modules={"model": model})).put([model])
        model(batch.double()).sum().backward()
        plain = [type(each) is torch.Tensor for p in model.parameters() for each in (p.data, p.grad)]
        del model
    expect(all(plain), "parameters of FSDP2 cannot be made whole")
