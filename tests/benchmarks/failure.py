"""One rank raises while the other waits in an all_reduce: how long until the notebook says so, and what is left.

Run by hand: `pip install accelerate`, then `python tests/benchmarks/failure.py [--rounds 3]`. The same program
runs in turn under `%%ddp`, under ipyparallel's `%%px` and under accelerate's notebook_launcher, each in a kernel of
its own, with a process-group timeout of 25 s (torch's default is 30 minutes). Time is taken from the
exception, written down by the rank that raises it, to the cell's reply.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.kernels import Kernel, Shown

PROGRAM = """
import os, time, datetime, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=25))
kept = 42
if os.environ["RANK"] == "1":
    open({path!r}, "w").write(str(time.time()))
    raise ValueError("the cause")
dist.all_reduce(torch.ones(1))
"""
AGAIN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo"); dist.all_reduce(torch.ones(1)); print(kept); dist.destroy_process_group()
"""
MEET = """
import os, socket
sock = socket.socket(); sock.bind(("127.0.0.1", 0)); port = sock.getsockname()[1]; sock.close()
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=3)
    asked = options.parse_args()
    path = str(Path(tempfile.mkdtemp()) / "raised")
    program = PROGRAM.format(path=path)
    tools: dict[str, Callable[[], tuple[float, bool]]] = {
        "%%ddp": Ours(program, path), "%%px": Px(program, path), "accelerate": Accelerate(program, path),
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in tools}
    usable: dict[str, bool] = {}
    for _ in range(asked.rounds):
        for name, tool in tools.items():
            seconds, usable[name] = tool()
            times[name].append(seconds)
            print(f"{name}: {seconds:.2f} s", flush=True)
    ours = statistics.median(times["%%ddp"])
    print(f"\n{'tool':<12} {'exception to report':>20} {'ratio':>8}  names kept and usable")
    for name, found in times.items():
        median = statistics.median(found)
        print(f"{name:<12} {median:>18.2f} s {median / ours:>8.1f}  {'yes' if usable[name] else 'no'}")


class Tool:
    """A kernel with a tool set up; a call runs the program and says how long the report took, and what is left."""

    def __init__(self, program: str, path: str):
        self.program, self.path = program, path
        self.kernel = Kernel()
        self.set_up()

    def set_up(self) -> None: ...

    def cell(self) -> str:
        raise NotImplementedError

    def still_there(self) -> bool:
        return False

    def __call__(self) -> tuple[float, bool]:
        Path(self.path).unlink(missing_ok=True)
        shown = self.kernel.run(self.cell(), timeout=120)
        took = time.time() - float(Path(self.path).read_text())
        text = shown.error + shown.text("stderr") + shown.text()
        assert "the cause" in text, text
        return took, self.still_there()

    def run(self, code: str) -> Shown:
        shown = self.kernel.run(code, timeout=120)
        assert shown.ok, shown.error
        return shown


class Ours(Tool):
    def set_up(self) -> None:
        self.run("%load_ext nbddp")
        self.run("%ddp start --nproc 2")

    def cell(self) -> str:
        return f"%%ddp\n{self.program}"

    def still_there(self) -> bool:
        again = (
            "import torch, torch.distributed as dist\ndist.init_process_group('gloo'); dist.all_reduce(torch.ones(1))"
        )
        return "42" in self.kernel.run(f"%%ddp\n{again}\nprint(kept)\ndist.destroy_process_group()").text()


class Px(Tool):
    def set_up(self) -> None:
        self.run("import ipyparallel as ipp\nrc = ipp.Cluster(n=2).start_and_connect_sync(activate=True)")

    def still_there(self) -> bool:
        program, self.program = self.program, AGAIN
        shown = self.kernel.run(self.cell(), timeout=120)
        self.program = program
        return shown.text().count("42") == 2

    def cell(self) -> str:
        self.run(f"{MEET}\nview = rc[:]\nview.scatter('where', [(0, port), (1, port)], block=True)")
        where = (
            "import os\n(r, p), = where\n"
            "os.environ.update(RANK=str(r), WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(p))\n"
        )
        leave = "import torch.distributed as dist\nif dist.is_initialized(): dist.destroy_process_group()\n"
        return f"%%px\n{where}{leave}{self.program}"


class Accelerate(Tool):
    def cell(self) -> str:
        body = "\n".join(f"    {line}" for line in self.program.strip().splitlines())
        return (
            f"{MEET}from accelerate import notebook_launcher\ndef train():\n{body}\n"
            "notebook_launcher(train, num_processes=2, use_port=str(port))"
        )


if __name__ == "__main__":
    main()
