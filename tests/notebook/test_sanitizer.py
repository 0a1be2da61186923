"""`%%ddp --sanitize` in a kernel: what the cell shows when it has ended, and when it has failed."""

from __future__ import annotations

from tests.kernels import Kernel
from tests.lessons.answers import text_of

TRAINS = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
ddp = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
for step in range(3):
    optimizer.zero_grad()
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + rank))
    ddp.module(x).square().mean().backward()
    optimizer.step()
"""


def test_a_cell_ends_with_its_findings_and_a_failed_one_with_those_until_then(four: Kernel) -> None:
    shown = four.run(f"%%ddp --sanitize{TRAINS}dist.destroy_process_group()")
    assert shown.ok, shown.error
    text = text_of(shown.outputs)
    assert "sanitizer: 1 finding (4 ranks, 3 optimizer steps)" in text
    assert "ddp.module(x).square().mean().backward()" in text
    html = [o["data"]["text/html"] for o in shown.outputs if "text/html" in o.get("data", {})]
    assert any("<b>past-ddp</b> (wrong)" in each for each in html)
    failed = four.run(f"%%ddp --sanitize{TRAINS}if rank == 1: raise ValueError('late')")
    assert not failed.ok
    assert "past-ddp" in text_of(failed.outputs)
    assert "findings cover the steps before" in text_of(failed.outputs)
    quiet = four.run(f"%%ddp --sanitize --allow past-ddp{TRAINS}dist.destroy_process_group()")
    assert "silenced: past-ddp" in text_of(quiet.outputs)
