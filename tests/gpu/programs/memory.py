"""Counters of memory, streams and events."""

import time

import torch

torch.cuda.set_device(0)
base = torch.cuda.memory_allocated()
x = torch.ones(1024, 1024, device="cuda")
assert torch.cuda.memory_allocated() - base == 4 << 20, torch.cuda.memory_allocated()
y = x @ x
assert torch.cuda.memory_allocated() - base == 8 << 20
del y
assert torch.cuda.memory_allocated() - base == 4 << 20
assert torch.cuda.max_memory_allocated() - base == 8 << 20, torch.cuda.max_memory_allocated()
torch.cuda.reset_peak_memory_stats()
assert torch.cuda.max_memory_allocated() - base == 4 << 20
assert torch.cuda.memory_reserved() >= torch.cuda.memory_allocated()
s = torch.cuda.memory_summary()
assert "PyTorch CUDA memory summary, device ID 0" in s
free, total = torch.cuda.mem_get_info()
assert free < total
torch.cuda.empty_cache()
stream = torch.cuda.Stream()
a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
a.record()
with torch.cuda.stream(stream):
    assert torch.cuda.current_stream() == stream
    z = x * 2
    x.record_stream(stream)
time.sleep(0.02)
torch.cuda.current_stream().wait_stream(stream)
b.record()
torch.cuda.synchronize()
ms = a.elapsed_time(b)
assert 19 < ms < 500, ms
assert torch.cuda.current_stream() == torch.cuda.default_stream()
p = torch.cuda.get_device_properties(0)
print(
    "RESULT",
    torch.cuda.get_device_name(0),
    p.total_memory,
    torch.cuda.get_device_capability(),
    torch.cuda.device_count(),
    p,
)
v = x.view(-1)[:10]
del x, z
assert torch.cuda.memory_allocated() - base == 4 << 20  # the view keeps the storage
print(
    torch.cuda.get_arch_list(),
    torch.cuda.is_bf16_supported(),
    torch.backends.cudnn.is_available(),
    torch.cuda.utilization(),
)
st = torch.cuda.memory_stats()
assert st["allocated_bytes.all.peak"] >= 4 << 20
print(
    torch.accelerator.current_device_index(),
    torch.accelerator.device_count(),
    torch.accelerator.is_available(),
    torch.accelerator.current_stream(),
)
torch.accelerator.synchronize()
