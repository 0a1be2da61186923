"""Trial of what the sanitizer reads of a training step, as those of other private APIs in `capabilities.doctor`."""

from __future__ import annotations

from nbddp.compat.extra import torch as torch_extra
from nbddp.compat.extra.probes import alone, expect


def state_of_a_step() -> None:
    import torch
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel

    seen: list[bool] = []
    with alone():
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        outside = torch_extra.joins(model)
        with Join([model]):
            within = torch_extra.joins(model)
            result = model(torch.ones(1, 2)).sum()
            result.register_hook(lambda _: seen.append(torch_extra.in_backward()))
            result.backward()
        expect((outside, within) == (False, True), "a DDP model does not report that it is within Join")
        expect(torch_extra.shards_over(model) is None, "a DDP model is taken for one of FSDP2's")
        _fsdp2()
        del model
    expect(seen == [True] and not torch_extra.in_backward(), "whether a backward runs cannot be determined")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    expect(torch_extra.scale_of(scaler) is not None, "a GradScaler keeps its scale elsewhere")
    _counted_losses()
    optimizer = torch.optim.SGD([torch.ones(1)])
    expect(not torch_extra.has_step_hooks(optimizer), "an optimizer without hooks seems to have some")
    optimizer.register_step_pre_hook(lambda *_: None)
    expect(torch_extra.has_step_hooks(optimizer), "an optimizer's hooks are kept elsewhere")
    model = torch.nn.BatchNorm1d(2)
    model.register_buffer("passing", torch.ones(1), persistent=False)
    expect(torch_extra.passing_buffers(model) == {"passing"}, "buffers that are not saved are listed elsewhere")
    expect(hasattr(torch_extra.fetcher_of_maps(), "fetch"), "batches are fetched by another class")


def _counted_losses() -> None:
    import torch

    from nbddp.capabilities.sanitizer.on_rank_losses import counted

    logits, labels = torch.ones(3, 2, requires_grad=True), torch.tensor([0, 1, -100])
    expect(not torch_extra.has_hooks(logits), "a tensor without hooks seems to have some")
    logits.register_hook(lambda gradient: None)
    expect(torch_extra.has_hooks(logits), "a tensor's hooks are kept elsewhere")
    mask = torch.tensor([1.0, 1.0, 0.0])
    losses = {
        "cross_entropy": torch.nn.functional.cross_entropy(logits, labels),
        "a masked mean": (logits.sum(1) * mask).sum() / 2,
        "masked_fill": logits.sum(1).masked_fill(mask == 0, 0.0).sum() / 2,
        "where": torch.where(mask == 1, logits.sum(1), 0.0).sum() / 2,
    }
    for name, loss in losses.items():
        found = [(whole, int(count)) for _, whole, count, *_ in counted(loss.grad_fn, ())]
        expect(found == [(3, 2)], f"the graph of {name} does not show how many targets count: {found}")


def _fsdp2() -> None:
    import torch

    fully_shard = getattr(torch.distributed.fsdp, "fully_shard", None)
    if fully_shard is None or not hasattr(torch.cpu.Stream, "record_event"):
        return  # torch 2.6 has no FSDP2 on CPU
    sharded = fully_shard(torch.nn.Linear(2, 2))
    expect(torch_extra.shards_over(sharded) is not None, "an FSDP2 model does not report its group")
