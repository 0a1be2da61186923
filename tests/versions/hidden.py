"""Takes private names of torch and ipykernel away, as a version without them would, and torch itself goes on.

A function of a module is found by torch in its own globals, by us as an attribute of the module: so the module is
replaced by a stand-in that lacks the name. `python -m tests.versions.hidden` tries every seam without what it needs,
each in a process of its own, and prints the verdicts. `FOLDER/sitecustomize.py` (`in_agents`) does it in an agent,
whose workers then lack what can be spared, all at once.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

TRIAL_SECONDS = 20.0


class Without(types.ModuleType):
    """A module without some of its names."""

    def __init__(self, real: types.ModuleType, names: set[str]):
        super().__init__(real.__name__)
        vars(self).update(
            _real=real, _names=names, __path__=getattr(real, "__path__", []), __file__=getattr(real, "__file__", None)
        )

    def __getattr__(self, name: str) -> Any:
        if name in vars(self)["_names"]:
            raise AttributeError(f"module has no attribute {name}")
        return getattr(vars(self)["_real"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_real"], name, value)


def hide(names: Sequence[str]) -> None:
    """Take away each `module:attribute`."""
    for name in names:
        module, path = name.split(":")
        *owners, last = path.split(".")
        if owners:
            owner = importlib.import_module(module)
            for part in owners:
                owner = getattr(owner, part)
            delattr(owner, last)
            continue
        real = importlib.import_module(module)
        if isinstance(real, Without):
            vars(real)["_names"].add(last)
            continue
        sys.modules[module] = without = Without(real, {last})
        parent, _, own = module.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, without)


def unseen_by(cls: type, name: str, reader: str) -> None:
    """Take an attribute of a class's objects away from one module that reads it."""
    found = cls.__getattribute__

    def __getattribute__(self: Any, asked: str) -> Any:
        if asked == name and sys._getframe(1).f_globals["__name__"] == reader:
            raise AttributeError(name)
        return found(self, asked)

    cls.__getattribute__ = __getattribute__  # type: ignore[method-assign]
    otherwise: Any = getattr(cls, "__getattr__", None)
    if otherwise is not None:  # Python asks it where the other found nothing

        def __getattr__(self: Any, asked: str) -> Any:
            if asked == name and sys._getframe(1).f_globals["__name__"] == reader:
                raise AttributeError(name)
            return otherwise(self, asked)

        cls.__getattr__ = __getattr__  # type: ignore[attr-defined]


# -- what is no attribute of a module or class, or what torch needs for itself --------------------


def engine() -> None:
    import torch

    torch.autograd.Variable = type("Variable", (), {})


def entry_keys() -> None:
    import torch

    bindings = importlib.import_module("torch._C._distributed_c10d")
    dump = bindings._dump_fr_trace_json
    assert torch.distributed.is_available()
    bindings._dump_fr_trace_json = lambda **options: dump(**options).replace(b'"collective_seq_id"', b'"number"')


def listening() -> None:
    import torch.distributed as dist

    def refusing(*args: Any, **options: Any) -> Any:
        raise NotImplementedError("no listen fd")

    dist.TCPStore = refusing


def unreachable() -> None:
    import torch.distributed as dist

    original = dist.TCPStore.__init__

    def refusing(store: Any, *args: Any, master_listen_fd: int | None = None, **options: Any) -> None:
        if master_listen_fd is not None:
            with socket.socket(fileno=os.dup(master_listen_fd)) as copy:
                if copy.family != socket.AF_INET or copy.getsockname()[0] != "127.0.0.1":
                    raise RuntimeError("another kind of socket")
        original(store, *args, master_listen_fd=master_listen_fd, **options)

    dist.TCPStore.__init__ = refusing


def reducer() -> None:
    import torch.distributed as dist

    original = dist.Reducer.__init__

    def refusing(made: Any, params: Any, indices: Any, limits: Any, group: Any, *args: Any, **named: Any) -> None:
        if type(group).__module__.startswith("nbddp"):
            raise TypeError("incompatible constructor arguments")
        original(made, params, indices, limits, group, *args, **named)

    dist.Reducer.__init__ = refusing


def hooks() -> None:
    from torch.nn.parallel import DistributedDataParallel as DDP

    unseen_by(DDP, "_comm_hooks", "nbddp.compat.extra.torch")


def compiled() -> None:
    import torch

    unseen_by(type(torch.compile(torch.nn.Linear(1, 1))), "_orig_mod", "nbddp.compat.extra.torch")


def shards() -> None:
    from torch.distributed.tensor import DTensor

    unseen_by(DTensor, "_local_tensor", "nbddp.compat.extra.torch")


def methods() -> None:
    from nbddp.compat import torch as torch_compat
    from nbddp.deadlock.on_rank import call_log

    for name in (torch_compat.ALL_GATHER_BASE, "all_gather_single"):  # as if torch had renamed its method
        del call_log.COLLECTIVES[name]


def sparse() -> None:
    import torch

    unseen_by(torch.Tensor, "_indices", "nbddp.compat.extra.torch")


def compiler() -> None:
    sys.modules["torch._dynamo"] = None  # type: ignore[assignment]


def traceback_of_reply() -> None:
    from ipykernel.ipkernel import IPythonKernel

    IPythonKernel.do_execute = lambda kernel: None


def history() -> None:
    from IPython.core.interactiveshell import InteractiveShell

    if hasattr(InteractiveShell, "_format_exception_for_storage"):  # not in IPython 8
        del InteractiveShell._format_exception_for_storage


def autoreload() -> None:
    from nbddp.compat.extra import ipykernel as ipykernel_extra

    ipykernel_extra.autoreload = lambda shell: ({}, {})


def nccls_recorder() -> None:
    import torch.distributed as dist

    from nbddp.compat import torch as torch_compat

    dist.is_nccl_available = lambda: True  # this torch may have neither
    torch_compat.has_nccl_recorder = lambda: False


def transfers() -> None:
    from nbddp.compat import torch as torch_compat

    torch_compat.can_abort_transfers = lambda: False


def log_level() -> None:
    from nbddp.compat import torch as torch_compat

    torch_compat.READS_LEVEL = "no_such_function"


def event_loop() -> None:
    from nbddp.compat import ipykernel

    ipykernel.held_by = lambda loop: None


AWAY: dict[str, Callable[[], None]] = {
    "NCCL's flight recorder": nccls_recorder,
    "abort of transfers": transfers,
    "C++'s log level": log_level,
    "flight recorder's keys": entry_keys,
    "store on a given socket": listening,
    "store out of reach": unreachable,
    "DDP's reducer": reducer,
    "end of backward": engine,
    "DDP's list of hooks": hooks,
    "compiled modules": compiled,
    "shards of DTensors": shards,
    "methods of collectives": methods,
    "parts of sparse tensors": sparse,
    "import of the compiler": compiler,
    "history of errors": history,
    "traceback of a reply": traceback_of_reply,
    "files of autoreload": autoreload,
    "event loop": event_loop,
}
# What torch or ipykernel cannot do without, even where only their own functions look for it
KEPT = {
    "marks on Work and Store", "DDP's reducer", "methods of collectives", "status messages", "interrupt of an await",
    "topics of messages", "history of errors", "traceback of a reply", "store on a given socket",
    "import of the compiler", "flight recorder's keys", "NCCL's flight recorder", "backends of a group",
    "messages during a cell", "questions of a cell", "flush before a display", "copies of DDP models",
    "copies of FSDP2 models", "state of a step",
}  # fmt: skip


def take_away(key: str) -> None:
    from nbddp.capabilities.doctor.probe_runner import NAMES

    if key in AWAY:
        AWAY[key]()
    else:
        hide(NAMES[key])


def spared() -> list[str]:
    """Seams that workers can lack all at once."""
    from nbddp.capabilities.doctor.seams import SEAMS

    return [s.key for s in SEAMS if s.library != "ipyparallel" and s.key not in KEPT]


HOOK = """
import os, sys

class Before:
    def find_spec(self, name, path=None, target=None):
        if name == "nbddp.worker.engine" and "torch" in sys.modules:
            sys.meta_path.remove(self)
            from tests.versions import hidden
            hidden.{what}()

if sys.argv[:1] == ["-m"]:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # torch 2.8's compiler starts a thread: nothing would be forked
    sys.meta_path.insert(0, Before())
"""


def in_agents(folder: Path, what: Callable[[], None]) -> None:
    """Write a `sitecustomize.py` that calls `what`, a function of this module, before the workers' code is read."""
    (folder / "sitecustomize.py").write_text(HOOK.format(what=what.__name__))


def all_spared() -> None:
    """Take everything away that can be spared."""
    for key in spared():
        take_away(key)


def gate() -> None:
    """Leave the ranks' store open to all, and gloo's connections unchecked."""
    from nbddp.capabilities.private import on_rank, sock_owner

    sock_owner.unavailable = lambda: "it has been taken away"
    on_rank.check = lambda *_: False


def beat() -> None:
    """Have the controller's heart beat every ten minutes."""
    from nbddp.agent import controller

    controller.BEAT_MS = 600_000


def main() -> None:
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1")
    from nbddp.agent.server import WARM
    from nbddp.capabilities.doctor import probe_runner
    from nbddp.capabilities.doctor.seams import SEAMS

    for name in (*WARM, probe_runner.__name__):  # once, for all children; nothing has run yet that starts a thread
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        print(f"what is imported has started {threads - 1} threads; a child may hang", file=sys.stderr)
    sys.stdout.flush()
    for seam in SEAMS:
        while not _tried_in_child(seam.key):
            print(f"the child that tried {seam.key} did not end, and another one tries it", file=sys.stderr)


def _tried_in_child(key: str) -> bool:
    """Whether the child has ended."""
    from nbddp.capabilities.doctor import probe_runner

    child = os.fork()
    if not child:
        take_away(key)
        verdict = probe_runner.tried(key)
        print(json.dumps([key, verdict.present, verdict.works, verdict.why]), flush=True)
        os._exit(0)
    end = time.monotonic() + TRIAL_SECONDS
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(0.005)
    return True


if __name__ == "__main__":
    main()
