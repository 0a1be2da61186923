"""Test of the recorder of steps, as those of other private APIs in `capabilities.doctor`."""

from __future__ import annotations

from nbddp.compat.extra.probes import alone, expect


def ddps_reducer() -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from nbddp.capabilities.timings.on_rank import Recorder

    recorder = Recorder()
    recorder.install()
    with alone():
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.ones(1, 2)).sum().backward()
        steps = recorder.collect().steps
        del model
        recorder.let_go()
    expect(steps and steps[0].buckets, "a step of DDP shows no bucket")
