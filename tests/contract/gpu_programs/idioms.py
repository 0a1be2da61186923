"""Idioms of well-known training programs for GPUs, as functions that `ranks.py` runs beside its own."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from tests.contract.gpu_programs.place import KIND, ON_GPUS, device, weights


def small() -> Any:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(8, 10)).to(device())


def wrapped(module: Any, **options: Any) -> Any:
    return DDP(module.to(device()), device_ids=[dist.get_rank()] if ON_GPUS else None, **options)


def batches(number: int = 4) -> Iterator[tuple[Any, Any]]:
    """Other ones on each rank."""
    generator = torch.Generator().manual_seed(1 + 10 * dist.get_rank())
    for _ in range(number):
        x, y = torch.randn(8, 3, 8, 8, generator=generator), torch.randint(0, 10, (8,), generator=generator)
        yield x.to(device(), non_blocking=True), y.to(device(), non_blocking=True)


def trained(model: Any, optimizer: Any, number: int = 4) -> float:
    for x, y in batches(number):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return weights(model)


def program_moving_averages_and_channels_last() -> Any:
    """torchvision's and timm's training: two averages of the weights, warmup, label smoothing, metrics of all ranks."""
    model = small().to(memory_format=torch.channels_last)
    mean = torch.optim.swa_utils.AveragedModel(model, device(), lambda a, p, n: 0.9 * a + 0.1 * p, use_buffers=True)
    copied, ddp = copy.deepcopy(model).eval(), wrapped(model)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9, nesterov=True)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    total = torch.zeros(2, dtype=torch.float64, device=device())
    for x, y in batches():
        loss = F.cross_entropy(ddp(x.contiguous(memory_format=torch.channels_last)), y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        mean.update_parameters(ddp.module)
        with torch.no_grad():
            for old, new in zip(copied.state_dict().values(), model.state_dict().values(), strict=True):
                old.copy_(0.99 * old + 0.01 * new)
        total += torch.tensor([loss.item(), 1.0], dtype=torch.float64, device=device())
    dist.barrier()
    dist.all_reduce(total)
    return weights(ddp), weights(mean), weights(copied), total.tolist()


def program_accumulation_under_a_scaler() -> Any:
    """Both autocasts have the same operators here; the rest of their lists differs."""
    torch.manual_seed(0)
    ddp = wrapped(nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 10)), gradient_as_bucket_view=True)
    optimizer, scaler = torch.optim.AdamW(ddp.parameters(), 1e-2), torch.amp.GradScaler(KIND, init_scale=16.0)
    for n, (x, y) in enumerate(batches(6)):
        with contextlib.nullcontext() if n % 2 else ddp.no_sync():
            with torch.autocast(KIND, dtype=torch.bfloat16):
                out = ddp(x.flatten(1)[:, :12])
            scaler.scale(F.cross_entropy(out.float(), y) / 2).backward()
        if n % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
    return weights(ddp), scaler.get_scale()


def program_batches_fetched_on_a_stream() -> Any:
    """The prefetcher of apex's and DALI's examples."""
    stream = torch.cuda.Stream() if ON_GPUS else None
    ddp = wrapped(small())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05)
    mean, source = torch.full((1, 3, 1, 1), 0.4, device=device()), batches(3)

    def fetched() -> Any:
        with torch.cuda.stream(stream) if ON_GPUS else contextlib.nullcontext():
            pair = next(source, None)
            return pair and (pair[0].float().sub_(mean).div_(0.2), pair[1])

    pair = fetched()
    while pair is not None:
        if ON_GPUS:
            torch.cuda.current_stream().wait_stream(stream)
            pair[0].record_stream(torch.cuda.current_stream())
        now, pair = pair, fetched()
        optimizer.zero_grad()
        F.cross_entropy(ddp(now[0]), now[1]).backward()
        optimizer.step()
    return weights(ddp)


def program_profile_with_a_schedule() -> Any:
    from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

    ddp = wrapped(small())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPUS else [])]
    steps = schedule(wait=1, warmup=1, active=2, repeat=1)
    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=activities, schedule=steps, on_trace_ready=tensorboard_trace_handler(folder)) as found:
            for _ in range(5):
                trained(ddp, optimizer, 1)
                found.step()
        (written,) = Path(folder).iterdir()
        names = {event.get("name") for event in json.loads(written.read_text())["traceEvents"]}
    return weights(ddp), "ProfilerStep#2" in names, "aten::convolution" in names


def program_resumed_with_all_generators() -> Any:
    """A checkpoint with the states of the generators of all GPUs: the steps after it are the same again."""

    def made() -> tuple[Any, Any]:
        model = wrapped(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 4)))
        return model, torch.optim.Adam(model.parameters(), 1e-2)

    def step(model: Any, optimizer: Any) -> float:
        loss = model(torch.ones(4, 6, device=device())).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss)

    torch.manual_seed(3)
    model, optimizer = made()
    step(model, optimizer)
    file, states = io.BytesIO(), torch.cuda.get_rng_state_all() if ON_GPUS else [torch.get_rng_state()]
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "states": states}, file)
    first = [step(model, optimizer) for _ in range(3)]
    model, optimizer = made()
    file.seek(0)
    kept = torch.load(file, map_location=device(), weights_only=True)
    model.module.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    states = [state.cpu() for state in kept["states"]]
    torch.cuda.set_rng_state_all(states) if ON_GPUS else torch.set_rng_state(states[0])
    return [step(model, optimizer) for _ in range(3)] == first


def program_graphed_callables() -> Any:
    torch.manual_seed(0)
    one, two = nn.Sequential(nn.Linear(8, 16), nn.ReLU()).to(device()), nn.Linear(16, 4).to(device())
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], 0.1)
    if ON_GPUS:
        examples = torch.randn(6, 8, device=KIND), torch.randn(6, 16, device=KIND, requires_grad=True)
        one, two = torch.cuda.make_graphed_callables((one, two), ((examples[0],), (examples[1],)))
    generator, losses = torch.Generator().manual_seed(3), []
    for _ in range(4):
        x, y = (torch.randn(6, n, generator=generator).to(device()) for n in (8, 4))
        optimizer.zero_grad(set_to_none=True)
        losses.append(F.mse_loss(two(one(x)), y))
        losses[-1].backward()
        optimizer.step()
    return [loss.item() for loss in losses]


def program_fsdp1() -> Any:
    """Parameters in the host's memory need a GPU to compute with; on the CPU they are there anyway."""
    from torch.distributed.fsdp import CPUOffload
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    torch.manual_seed(0)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=300)
    options: dict[str, Any] = {"cpu_offload": CPUOffload(offload_params=True)} if ON_GPUS else {}
    module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    where = dist.get_rank() if ON_GPUS else torch.device(KIND)
    model = FSDP(module, auto_wrap_policy=policy, device_id=where, **options)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for n in range(3):
        optimizer.zero_grad()
        model(torch.full((4, 16), 0.1 * (dist.get_rank() + n), device=device())).square().mean().backward()
        optimizer.step()
    with FSDP.summon_full_params(model):
        return weights(model)


def program_sharded_optimizer() -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = wrapped(small())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
    found = trained(ddp, optimizer)
    optimizer.consolidate_state_dict(to=0)
    return found, len(optimizer.state_dict()["state"]) if dist.get_rank() == 0 else 0


def program_compressed_gradients() -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    found = []
    low_rank = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
    for state, hook in ((low_rank, powerSGD_hook.powerSGD_hook), (None, default_hooks.fp16_compress_hook)):
        ddp = wrapped(small())
        ddp.register_comm_hook(state, hook)
        found.append(trained(ddp, torch.optim.SGD(ddp.parameters(), 0.1), 5))
    return found


def program_asynchronous_checkpoint() -> Any:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device())
    fully_shard(model, mesh=init_device_mesh(KIND, (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 8, device=device()) * (dist.get_rank() + 1)).square().mean().backward()
        optimizer.step()

    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, 0)
    step()
    kept = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.async_save(kept, checkpoint_id=folder[0], process_group=dist.new_group(backend="gloo")).result()
    saved = weights(model)
    step()
    kept = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(kept, checkpoint_id=folder[0])
    set_state_dict(model, optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"])
    return saved, weights(model) == saved


def program_static_graph_with_checkpointing() -> Any:
    class Twice(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last, self.reentrant = nn.Linear(8, 16), nn.Linear(16, 4), reentrant
            self.middle = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.ReLU())

        def forward(self, x: Any) -> Any:
            h = self.first(x)
            for _ in range(2):
                h = checkpoint(self.middle, h, use_reentrant=self.reentrant)
            return self.last(h)

    found = []
    for reentrant in (True, False):
        ddp = wrapped(Twice(reentrant), static_graph=True)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        torch.manual_seed(5)
        for _ in range(3):
            optimizer.zero_grad()
            ddp(torch.ones(4, 8, device=device()) * (dist.get_rank() + 1)).square().mean().backward()
            optimizer.step()
        found.append(weights(ddp))
    return found


def program_uneven_inputs() -> Any:
    ddp = wrapped(small())
    with ddp.join():
        return trained(ddp, torch.optim.SGD(ddp.parameters(), 0.1), 2 + dist.get_rank())


def program_contrastive_loss_over_all_ranks() -> Any:
    from torch.distributed.nn import all_gather

    torch.manual_seed(dist.get_rank())
    z = torch.randn(4, 8).to(device()).requires_grad_()
    both = torch.cat(all_gather(F.normalize(z, dim=1)))
    labels = torch.arange(4, device=device()) + 4 * dist.get_rank()
    loss = F.cross_entropy(F.normalize(z, dim=1) @ both.T / 0.1, labels)
    loss.backward()
    return loss.item(), z.grad.double().sum().item()


def program_tokens_to_experts() -> Any:
    """All-to-all with numbers that each rank counts for itself, there and back."""
    torch.manual_seed(dist.get_rank())
    x = torch.randn(6, 4).to(device())
    given = torch.tensor([[4, 2], [1, 5]][dist.get_rank()], device=device())
    got = torch.empty_like(given)
    dist.all_to_all_single(got, given)
    there, back = x.new_empty(int(got.sum()), 4), torch.empty_like(x)
    dist.all_to_all_single(there, x, got.tolist(), given.tolist())
    dist.all_to_all_single(back, there * 2, given.tolist(), got.tolist())
    return there.double().sum().item(), torch.equal(back, 2 * x)


# -- what published programs call beside their training ---------------------------------------------


def program_one_scaler_of_two_optimizers() -> Any:
    """A step whose first optimizer meets an infinity: the scaler skips that one, and makes the other's."""
    torch.manual_seed(0)
    one, two = (wrapped(nn.Linear(12, 10)) for _ in range(2))
    first, second = torch.optim.SGD(one.parameters(), 0.1), torch.optim.Adam(two.parameters(), 1e-2)
    scaler, scales = torch.amp.GradScaler(KIND, init_scale=64.0, growth_interval=2), []
    for n, (x, y) in enumerate(batches(5)):
        x = x.flatten(1)[:, :12]
        losses = F.cross_entropy(one(x), y) * (float("inf") if n == 3 else 1), F.cross_entropy(two(x), y)
        for loss, optimizer in zip(losses, (first, second), strict=True):
            optimizer.zero_grad()
            scaler.scale(loss).backward()
        for optimizer in (first, second):
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return weights(one), weights(two), scales


def program_pinned_batches_of_a_loader() -> Any:
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 3, 8, 8), torch.randint(0, 10, (24,)))
    loader = DataLoader(data, 8, pin_memory=ON_GPUS)
    ddp, copied = wrapped(small()), torch.cuda.Stream() if ON_GPUS else None
    optimizer, pinned = torch.optim.SGD(ddp.parameters(), 0.1), []
    for x, y in loader:
        pinned.append(x.is_pinned() == ON_GPUS)
        with torch.cuda.stream(copied) if ON_GPUS else contextlib.nullcontext():
            x, y = x.to(device(), non_blocking=True), y.to(device(), non_blocking=True)
        if copied is not None:
            torch.cuda.current_stream().wait_stream(copied)
        optimizer.zero_grad()
        F.cross_entropy(ddp(x), y).backward()
        optimizer.step()
    return weights(ddp), all(pinned)


def program_steps_between_events() -> Any:
    ddp = wrapped(small())
    optimizer, times = torch.optim.SGD(ddp.parameters(), 0.1), []
    for _ in range(2):
        begin, end = (torch.cuda.Event(enable_timing=True) if ON_GPUS else None for _ in range(2))
        if begin is not None:
            begin.record()
        found = trained(ddp, optimizer, 1)
        if begin is not None and end is not None:
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) >= 0 and end.query())
    return found, all(times)


def program_old_names_of_amp() -> Any:
    """`torch.cuda.amp`, as most published programs write it."""
    torch.manual_seed(0)
    ddp = wrapped(nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 10)))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    scaler = torch.cuda.amp.GradScaler(init_scale=16.0) if ON_GPUS else torch.amp.GradScaler("cpu", init_scale=16.0)
    old = functools.partial(torch.cuda.amp.autocast, dtype=torch.bfloat16)
    for x, y in batches(3):
        optimizer.zero_grad()
        with old() if ON_GPUS else torch.autocast("cpu", dtype=torch.bfloat16):
            out = ddp(x.flatten(1)[:, :12])
        scaler.scale(F.cross_entropy(out.float(), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    return weights(ddp), str(out.dtype)


def program_ranges_of_nvtx() -> Any:
    ddp = wrapped(small())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for n in range(2):
        if ON_GPUS:
            torch.cuda.nvtx.range_push(f"step {n}")
            torch.cuda.nvtx.mark("begins")
        with torch.cuda.nvtx.range("training") if ON_GPUS else contextlib.nullcontext():
            found = trained(ddp, optimizer, 1)
        if ON_GPUS:
            torch.cuda.nvtx.range_pop()
    return found


def program_report_of_memory() -> Any:
    """Peaks are those of a model whose sizes are known; a fraction of the memory is enough for it."""
    if ON_GPUS:
        torch.cuda.set_per_process_memory_fraction(0.5, dist.get_rank())
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if ON_GPUS else 0
    kept = torch.ones(1 << 20, device=device())
    said = [True, True, True]
    if ON_GPUS:
        summary, stats = torch.cuda.memory_summary(abbreviated=True), torch.cuda.memory_stats()
        said = [
            "PyTorch CUDA memory summary" in summary,
            torch.cuda.max_memory_allocated() - before == kept.numel() * 4,
            stats["allocation.all.allocated"] > 0,
        ]
        torch.cuda.set_per_process_memory_fraction(1.0, dist.get_rank())
    return said, kept.sum().item()


def program_fallback_without_apex() -> Any:
    try:
        from apex.optimizers import FusedAdam as Adam
        from apex.parallel import DistributedDataParallel as Wrapped
    except ImportError:
        Adam, Wrapped = functools.partial(torch.optim.AdamW, fused=True), wrapped
    ddp = Wrapped(small())
    return trained(ddp, Adam(ddp.parameters(), 1e-2))


def program_fallback_without_dali() -> Any:
    try:
        from nvidia.dali.plugin.pytorch import DALIClassificationIterator as Batches
    except ImportError:
        Batches = batches
    ddp = wrapped(small())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for x, y in Batches(2):
        optimizer.zero_grad()
        F.cross_entropy(ddp(x.to(memory_format=torch.channels_last)), y).backward()
        optimizer.step()
    return weights(ddp)


def program_choice_of_an_attention() -> Any:
    """By the old context of `torch.backends.cuda`, and by the new one."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    generator, found = torch.Generator().manual_seed(1), []
    q, k, v = (torch.randn(2, 2, 6, 8, generator=generator).to(device()).requires_grad_() for _ in range(3))
    old = functools.partial(torch.backends.cuda.sdp_kernel, enable_flash=False, enable_mem_efficient=False)
    for context in (old() if ON_GPUS else sdpa_kernel(SDPBackend.MATH), sdpa_kernel([SDPBackend.MATH])):
        with context:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out.square().mean().backward()
        found.append((out.double().sum().item(), q.grad.double().sum().item()))
    return found


def program_reproducible_settings() -> Any:
    """Flags of cuDNN and of matrix products, seeds of all GPUs, and deterministic algorithms."""
    kept = torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32
    torch.cuda.manual_seed_all(3)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            ddp = wrapped(small())
            return trained(ddp, torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9, foreach=True), 3)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32 = kept
