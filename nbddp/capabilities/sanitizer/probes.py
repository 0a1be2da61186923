"""Trial of what the sanitizer reads of a training step, as those of other seams in `capabilities.doctor`."""

from __future__ import annotations

from nbddp.compat import torch as torch_compat
from nbddp.compat.probes import alone, expect


def state_of_a_step() -> None:
    import torch
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel

    seen: list[bool] = []
    with alone():
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        outside = torch_compat.joins(model)
        with Join([model]):
            within = torch_compat.joins(model)
            result = model(torch.ones(1, 2)).sum()
            result.register_hook(lambda _: seen.append(torch_compat.in_backward()))
            result.backward()
        expect((outside, within) == (False, True), "a DDP model does not tell that it is within Join")
        expect(torch_compat.shards_over(model) is None, "a DDP model is taken for one of FSDP2's")
        _fsdp2()
        del model
    expect(seen == [True] and not torch_compat.in_backward(), "whether a backward runs cannot be told")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    expect(torch_compat.scale_of(scaler) is not None, "a GradScaler keeps its scale elsewhere")
    expect(hasattr(torch_compat.fetcher_of_maps(), "fetch"), "batches are fetched by another class")


def _fsdp2() -> None:
    import torch

    fully_shard = getattr(torch.distributed.fsdp, "fully_shard", None)
    if fully_shard is None or not hasattr(torch.cpu.Stream, "record_event"):
        return  # torch 2.6 has no FSDP2 on CPU
    sharded = fully_shard(torch.nn.Linear(2, 2))
    expect(torch_compat.shards_over(sharded) is not None, "an FSDP2 model does not tell its group")
