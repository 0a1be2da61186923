"""Stop at any moment of any command: one line that is true, and the pool works on."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

import pytest

from tests.kernels import Kernel, Shown

START, SET_UP = (
    "%ddp start --nproc 2",
    """%%ddp --nproc 2
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
if not dist.is_initialized(): dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(64, 64))
for _ in range(3): model(torch.ones(8, 64)).sum().backward()""",
)
COMMANDS = {
    "status": "%ddp status",
    "topology": "%ddp topology",
    "timings": "%ddp timings",
    "memory": "%ddp memory",
    "compare": "%ddp compare model",
    "forecast": "%ddp forecast",
    "bench": "%ddp bench --max 64KiB",
    "stacks": "%ddp stacks",
    "log": "%ddp log --rank 0",
    "push": "%ddp push given",
    "pull": "%ddp pull model",
    "restart": "%ddp restart --ranks 1",
    "start": "%ddp start --nproc 3",
    "shrink": "%ddp start --nproc 2",
    "stop": "%ddp stop",
    "cell": "%%ddp\nprint('done')",
}
MOMENTS = int(os.environ.get("NBDDP_STOP_MOMENTS", "4"))  # of each command; more make a longer sweep
OURS = ("CommandStopped", "RunStopped")
AFTER = "%%ddp --nproc 2\nimport os\nprint('works', os.environ['WORLD_SIZE'])"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    k = Kernel(cwd=str(tmp_path_factory.mktemp("stop")))
    assert k.run("%load_ext nbddp\ngiven = list(range(1000))").ok
    yield k
    k.close()


def stop_after(kernel: Kernel, code: str, seconds: float) -> Shown:
    """Run a cell and press Stop so long after the kernel has taken it up."""
    cell = kernel.send(code)
    while True:
        message = kernel.client.get_iopub_msg(timeout=60)
        if message["msg_type"] == "execute_input" and message["parent_header"].get("msg_id") == cell:
            break
    time.sleep(seconds)
    kernel.interrupt()
    return kernel.collect(cell)


def one_line(shown: Shown) -> bool:
    """What a stopped command may show; one that was done before answers as always."""
    if shown.ok:
        return True
    lines = shown.reply["traceback"]
    return shown.reply["ename"] in OURS and len(lines) == 1 and (
        "\n" not in lines[0] or shown.reply["evalue"] == "the run was stopped by the user"
    )  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_stop_gives_one_line_and_the_next_cell_works(
    stopped: Kernel, name: str, request: pytest.FixtureRequest
) -> None:
    k, code, chance = stopped, COMMANDS[name], random.Random(name)
    took = 0.0
    stops = 0
    for i in range(MOMENTS + 1):
        for prepare in (SET_UP, *(["%ddp start --nproc 3"] if name == "shrink" else [])):
            shown = k.run(prepare)
            assert shown.ok, shown.error
        if i == 0:
            assert k.run(code).ok, "what it imports, it has imported"
            assert k.run(SET_UP).ok
            shown = k.run(code)
            assert shown.ok, shown.error
            took = shown.took
            continue
        moment = took * (i - 1 + chance.random()) / MOMENTS
        shown = stop_after(k, code, moment)
        stops += not shown.ok
        assert one_line(shown), f"after {moment:.3f} of {took:.3f} s\n{shown.error}"
        print(name, f"{moment:.3f}/{took:.3f}", "ok" if shown.ok else shown.evalue)
        after = k.run(AFTER)
        assert after.ok, after.error
        assert after.text().endswith("ranks 0–1 │ works 2\n")
    print(name, stops, "stopped")
