"""Test of copies of DDP models, as those of other private APIs in `capabilities.doctor`."""

from __future__ import annotations

from nbddp.compat import torch as torch_compat
from nbddp.compat.probes import alone, expect


def copies_of_ddp_models() -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    with alone():
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.ones(1, 2)).sum().backward()
        reduced = torch_compat.reduced_parameters(model)
        expect({id(p) for p in reduced} == {id(p) for p in model.parameters()}, "the reducer reports other parameters")
        torch_compat.make_reducer(model, reduced, [False, False], torch_compat.comm_hooks(model))
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        got = [p.grad is not None for p in model.parameters()]
        del model
    expect(all(got), "a model with a new reducer gets no gradients")
