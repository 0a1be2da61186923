"""Programs that are run under torchrun and under nbddp, and what came of each: a table of cases.

`python -m tests.contract.scripts OUT NAME…` runs cases under real torchrun. It imports torch once and forks a launcher
for each case, some at a time; what torchrun starts are processes of their own as ever.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

AT_ONCE = 3
PLAIN = """
    import atexit, concurrent.futures, json, multiprocessing, os, subprocess, sys, threading, time
    import helper
    rank = int(os.environ["RANK"])
    NAMES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "TORCH", "OMP_", "PYTHON_EXEC", "PET_", "MASTER_",
             "GLOO_", "NCCL_", "CUDA_", "NBDDP_")
    OURS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCHINDUCTOR_CACHE_DIR")  # docs/scripts.md says so
    OWN = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "MASTER_PORT")  # of each launch
    for name in sorted(n for n in os.environ if n.startswith(NAMES) and n not in OURS):
        print(name, "is set" if name in OWN else os.environ[name])
    here = sys.modules["__main__"]
    print(__name__, __file__, __package__, __spec__, __cached__, __doc__, type(__loader__).__name__, __annotations__)
    print(vars(here) is globals(), sorted(vars(here)), multiprocessing.current_process().name)
    print(sys.argv, sys.path[0], "" in sys.path, os.getcwd(), threading.current_thread() is threading.main_thread())
    print("to stderr", file=sys.stderr)
    sys.stdout.buffer.write(b"bytes\\n")
    sys.stdout.flush()
    os.write(1, b"by the descriptor\\n")
    subprocess.run([sys.executable, "-c", "import sys; print('of a child'); print('its errors', file=sys.stderr)"])
    os.system("echo of a shell")
    atexit.register(print, "first registered")
    atexit.register(lambda: print("last registered"))
    def late():
        time.sleep(0.2)
        print("of a thread")
    threading.Thread(target=late).start()
    pool = concurrent.futures.ThreadPoolExecutor(2)
    pool.submit(lambda: (time.sleep(0.1), print("of an executor")))
    print("the end, without a newline", end="")
"""
TERM = """
    import os, signal, sys, time
    rank = int(os.environ["RANK"])
    def bye(number, frame):
        print("got", number, flush=True)
        sys.exit(0)
    if rank == 0:
        signal.signal(signal.SIGTERM, bye)
        print("waits", flush=True)
        time.sleep(60)
    time.sleep(1)
    sys.exit(3)
"""
RECORD = """
    import os, sys, time
    from torch.distributed.elastic.multiprocessing.errors import record
    @record
    def main():
        if os.environ["RANK"] == "0":
            time.sleep(60)
        time.sleep(0.5)
        raise ValueError("a bad batch")
    if __name__ == "__main__":
        main()
"""
SPAWN = """
    import concurrent.futures, multiprocessing, os, sys
    def square(i):
        return i * i
    def child(i, queue):
        queue.put((i, __name__, square(i), os.environ["RANK"]))
    if __name__ == "__main__":
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        processes = [context.Process(target=child, args=(i, queue)) for i in range(2)]
        [p.start() for p in processes]
        print(sorted(queue.get() for _ in processes))
        [p.join() for p in processes]
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            print(list(pool.map(square, range(3))))
"""
RECORD_EXITS = RECORD.replace('raise ValueError("a bad batch")', "sys.exit(3)")
MODULE = {
    "pack/__init__.py": "",
    "pack/other.py": "value = 7\n",
    "pack/tool.py": "import sys\nfrom .other import value\nfrom . import other\n"
    "print(value, __name__, __package__, __spec__.name, __file__, sys.argv, sys.path[0])\n",
}
PACKAGE = {
    "pack/__init__.py": "",
    "pack/__main__.py": "import sys\nprint(__name__, __package__, __spec__.name, sys.argv)\n",
}
FOLDER = {
    "tool/__main__.py": "import sys, near\nprint(__name__, repr(__package__), __spec__.name, sys.argv, sys.path[0])\n",
    "tool/near.py": "",
}
TORCH_SPAWN = """
    import os, sys, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
    def worker(rank, world_size, file):
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world_size)
        total = torch.ones(1) * rank
        dist.all_reduce(total)
        for turn in range(world_size):  # the two share a file: one prints after the other
            if turn == rank:
                print("spawned", rank, "of", world_size, total.item(), flush=True)
            dist.barrier()
        dist.destroy_process_group()
    if __name__ == "__main__":
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(worker, args=(2, f"{folder}/meet"), nprocs=2, join=True)
"""
TORCH_SPAWN_ENV = """
    import os, socket, torch, torch.distributed as dist, torch.multiprocessing as mp
    def worker(rank, world_size, port):
        if port:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")  # with it no process hosts the store
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        total = torch.ones(1) * rank
        dist.all_reduce(total)
        if rank == 0:
            print("spawned", total.item(), "own port" if port else "the launcher's port", flush=True)
        dist.destroy_process_group()
    if __name__ == "__main__":
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            own = found.getsockname()[1]
        for port in (0, own):
            mp.spawn(worker, args=(2, port), nprocs=2, join=True)
"""
DDP = """
    import os, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8) + dist.get_rank()).square().mean()
        loss.backward()
        optimizer.step()
    print(loss.item().hex(), [p.sum().item().hex() for p in model.parameters()])
    dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Case:
    """words: of the command line, from the script on; options: before it. heavy: it imports torch on the ranks, or
    torchrun takes half a minute for it. nproc: 1 where all ranks would fail, and torchrun end some before they have
    said why."""

    words: tuple[str, ...]
    options: tuple[str, ...] = ()
    heavy: bool = False
    nproc: int = 2
    files: dict[str, str] = field(default_factory=dict)


def case(
    body: str, words: tuple[str, ...] = (), options: tuple[str, ...] = (), nproc: int = 2, heavy: bool = False
) -> Case:
    """A script of some lines that knows its rank."""
    text = f"import os, sys, time\nrank = int(os.environ['RANK'])\n{body}\n"
    return Case(("case.py", *words), options, heavy, nproc, {"case.py": text})


CASES = {
    "plain": Case(
        ("my script.py", "--lr", "0.1", "a b", "${local_rank}"), files={"my script.py": PLAIN, "helper.py": ""}
    ),
    "module": Case(("pack.tool", "x"), ("-m",), files=MODULE),
    "package": Case(("pack",), ("-m",), files=PACKAGE),
    "folder": Case(("tool", "y"), files=FOLDER),
    "argparse": case(
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--steps', type=int)\np.parse_args()",
        words=("--steps", "many"), nproc=1,
    ),
    "exit 0": case("sys.exit(0 if rank else None)"),
    "exit 1": case("sys.exit('told on stderr')", nproc=1),
    "exit 3": case("time.sleep(rank / 2)\nif rank:\n    sys.exit(3)"),
    "os._exit": case("print('before', flush=True)\nos._exit(4)", nproc=1),
    "killed": case("import signal\nif rank:\n    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"),
    "raises": case(
        "import atexit\natexit.register(print, 'at exit')\n"
        "def f():\n    raise ValueError(f'bad batch on {rank}')\n"
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    f()", nproc=1,
    ),
    "hook": case(
        "def hook(kind, error, tb):\n    print('hook', kind.__name__, error, tb.tb_lineno)\n"
        "sys.excepthook = hook\nraise KeyError(rank)", nproc=1,
    ),
    "syntax": Case(("case.py",), nproc=1, files={"case.py": "print('never')\ndef f(:\n    pass\n"}),
    "asyncio": case(
        "import asyncio\nasync def main():\n    await asyncio.sleep(0)\n    return asyncio.current_task() is not None\n"
        "print(asyncio.run(main()), asyncio.run(main()))"
    ),
    "terminated": Case(("case.py",), files={"case.py": TERM}),
    "deaf to SIGTERM": case(
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(rank)\nif rank:\n    sys.exit(1)\n"
        "print('waits', flush=True)\ntime.sleep(60)", options=("--shutdown-timeout", "1"), heavy=True,
    ),
    "restarts": case(
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\nprint('attempt', attempt)\nsys.exit(1 - int(attempt))",
        options=("--max-restarts", "1"), nproc=1,
    ),
    "spawn": Case(("case.py",), files={"case.py": SPAWN}),
    "record": Case(("case.py",), heavy=True, files={"case.py": RECORD}),
    "record exits": Case(("case.py",), heavy=True, files={"case.py": RECORD_EXITS}),
    "torch spawn": Case(("case.py",), heavy=True, files={"case.py": TORCH_SPAWN}),
    "torch spawn by env": Case(("case.py",), heavy=True, nproc=1, files={"case.py": TORCH_SPAWN_ENV}),
    "ddp": Case(("case.py",), heavy=True, files={"case.py": DDP}),
}  # fmt: skip


def write(folder: Path, of: Case) -> None:
    """Have the case's files in a folder."""
    for name, text in of.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = text.strip("\n").split("\n")
        indent = len(lines[0]) - len(lines[0].lstrip())
        path.write_text("\n".join(line[indent:] for line in lines) + "\n")


def launched(folder: Path, words: list[str]) -> int:
    """Start torchrun with these words, as its console script does, and wait for it; the exit status."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.chdir(folder)
        null = os.open(folder / "launcher.txt", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(null, 1)
        os.dup2(null, 2)
        from torch.distributed.run import main

        main(words)
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_real(out: Path, names: list[str]) -> None:
    """Run cases under torchrun; OUT/NAME gets the files and the logs, OUT/NAME/status the exit status."""
    import torch.distributed.run  # noqa: F401

    running: dict[int, Path] = {}

    def wait() -> None:
        pid, status = os.wait()
        (running.pop(pid) / "status").write_text(str(os.waitstatus_to_exitcode(status)))

    for name in names:
        one, folder = CASES[name], out / name
        write(folder, one)
        options = ["--nproc-per-node", str(one.nproc), "--log-dir", "logs", "--redirects", "3", "--rdzv-id", "launch"]
        running[launched(folder, [*options, *one.options, *one.words])] = folder
        while len(running) >= AT_ONCE:
            wait()
    while running:
        wait()


@dataclass
class Result:
    """What a launch left: for each attempt and rank its streams, whether it has an error file and what that says."""

    status: int
    streams: dict[str, str]
    errors: dict[str, object]
    layout: list[str]


def read(folder: Path, status: int) -> Result:
    (root,) = (folder / "logs").iterdir()
    assert root.name.startswith("launch_") or "-" in root.name
    files = sorted(p for p in root.rglob("*") if p.is_file())
    streams = {str(p.relative_to(root)): tidy(p.read_text(), folder) for p in files if p.suffix == ".log"}
    errors = {}
    for path in files:
        if path.name == "error.json":
            said = json.loads(path.read_text())["message"]
            said["extraInfo"]["timestamp"] = "some"
            errors[str(path.relative_to(root))] = json.loads(json.dumps(said).replace(str(folder), "FOLDER"))
    return Result(status, streams, errors, sorted(str(p.relative_to(root)) for p in root.rglob("*")))


def tidy(text: str, folder: Path) -> str:
    """Without what belongs to one launch: the folder, and how Python words that it ran a module."""
    lines = text.replace(str(folder), "FOLDER").splitlines(keepends=True)
    return "".join(kept(lines))


def kept(lines: list[str]) -> Iterator[str]:
    skip = False
    for line in lines:
        frame = line.lstrip().startswith("File ")
        if frame or not line.startswith(" "):
            skip = frame and "<frozen runpy>" in line
        if not skip:
            yield line


if __name__ == "__main__":
    began = time.monotonic()
    run_real(Path(sys.argv[1]), sys.argv[2:])
    print(f"{time.monotonic() - began:.1f} s", file=sys.stderr)
