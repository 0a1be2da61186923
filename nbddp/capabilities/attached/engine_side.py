"""Turns an engine of a running cluster into a worker of a pool, and back into an engine.

The pool's process has the engine evaluate `look`, then `take`, by ipyparallel's `apply`; no agent is on this host. What
a worker has beyond an engine is put into the process once and stays, since torch's functions are wrapped; `take` and
`leave` change who has it: one pool at a time. Its owner says every few seconds that it lives. After PATIENCE seconds of
silence the engine's program is ended as by Stop, and the engine leaves the pool.

Imports neither torch nor what imports it before `take` has set the environment that they read.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from nbddp.agent import hardware, runtime_dir
from nbddp.agent.hardware import address_towards as address_towards  # asked for by `capabilities.attached.nodes`
from nbddp.agent.process_id import ProcessId
from nbddp.capabilities.gpus import on_agent as devices
from nbddp.compat import system
from nbddp.compat.clock import clock
from nbddp.compat.extra.versions import versions
from nbddp.compat.system import working_dir
from nbddp.launch import torchrun_env
from nbddp.protocol.codec import Json, LineBuffer, Message, encode
from nbddp.worker import rank_guard

if TYPE_CHECKING:  # it imports torch
    from ipyparallel.engine.kernel import IPythonParallelKernel

    from nbddp.worker.kernel import WorkerKernel
    from nbddp.worker.parts import RankWorker

PATIENCE = 20.0  # seconds
LOOK_EVERY = 1.0
OF_RUN = torchrun_env.of_run(torchrun_env.Rendezvous("", 0), "file").keys()
GATE_SECONDS = 15.0  # for a process that keeps gates to start, and to reach the store


class Owner(TypedDict):
    pool: str  # its id
    words: str  # who that is


class EngineFacts(TypedDict):
    """What a pool has to know of an engine before it takes it."""

    place: list[str]
    sees: list[str]
    host: str
    pid: int
    started: float
    python: str
    versions: dict[str, str]
    torch: bool  # whether it was imported before the engine was ever a worker
    env: dict[str, str]
    nanny: bool
    worker: bool  # whether it belongs to a pool of processes
    spoilt: str
    held: str  # by whom


class TakeRequest(TypedDict):
    env: dict[str, str]
    cwd: str
    owner: Owner
    roots: list[int]  # the pool's processes here


@dataclass
class EngineHold:
    """The engine is a pool's. env: what it had before of the variables that the pool sets."""

    owner: Owner
    env: Mapping[str, str | None]
    cwd: str
    argv: list[str]
    quits: Mapping[str, object]
    bulk: str
    threads: int  # of torch's, where it was imported; else 0
    heard: float = field(default_factory=clock.monotonic)

    @property
    def silent(self) -> float:
        """Seconds since its owner was heard."""
        return clock.monotonic() - self.heard


_kernel: Any = None  # the worker's, once this engine has been one
_spoilt = ""  # why it cannot be one
_held: EngineHold | None = None
_gates: Gates | None = None


# -- what the engine says of itself ---------------------------------------------------------------


def place() -> list[str]:
    """Equal for processes that reach each other over the loopback: host, its boot, and the network's namespace."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [socket.gethostname(), boot, _namespace("net")]


def sees_processes() -> list[str]:
    """Equal for processes of this machine that can signal each other, and see whose a connection is."""
    return [*place(), _namespace("pid"), str(os.geteuid())]


def _namespace(kind: str) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/self/ns/{kind}")
    return ""


def look() -> EngineFacts:
    from nbddp.compat.extra import ipykernel as ipykernel_extra

    kernel = ipykernel_extra.kernel_of_engine()
    return {
        "place": place(), "sees": sees_processes(), "host": socket.gethostname(), "pid": os.getpid(),
        "started": ProcessId.of(os.getpid()).started, "python": sys.executable, "versions": versions(),
        "torch": _kernel is None and "torch" in sys.modules, "env": _told_env(),
        "nanny": bool(getattr(kernel.parent, "enable_nanny", False)),
        "worker": _kernel is None and _is_worker(), "spoilt": _spoilt, "held": holder(),
    }  # fmt: skip


def facts() -> Json:
    """What this host has, as an agent tells it when it is warm."""
    cores = hardware.allowed_cores()
    with_cuda = "+cpu" not in metadata.version("torch")
    found = devices.gpus(os.environ) if with_cuda else devices.node_facts([])
    return {**found, "cores": len(cores), "numa": hardware.numa(cores), "interfaces": hardware.interfaces()}


def _told_env() -> dict[str, str]:
    """Variables that the user's own values of win over ours."""
    names = {*torchrun_env.KEEPS_PROCESS, *torchrun_env.INTERFACES, "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"}
    return {name: os.environ[name] for name in names if name in os.environ}


def holder() -> str:
    """Whose the engine is, in words; empty where it can be taken."""
    if _held is None or _held.silent > PATIENCE:
        return ""
    return _held.owner["words"]


# -- taken, and left ------------------------------------------------------------------------------


def take(asked: TakeRequest) -> tuple[str, str]:
    """Become the worker that is asked for; its working directory, and its folder for results.

    Raises RuntimeError if another pool has the engine, or if it could not be made a worker.
    """
    global _held, _kernel, _spoilt
    if _spoilt:
        raise RuntimeError(f"this engine cannot be a worker: {_spoilt}; restart the cluster")
    if holder() and _held is not None and _held.owner["pool"] != asked["owner"]["pool"]:
        raise RuntimeError(f"{holder()} has this engine")
    if _held is not None:  # its owner has not come to it
        leave()
    guard = rank_guard.guard()  # which may raise: before anything is changed
    env = asked["env"]
    shell, torch = _shell(), sys.modules.get("torch")
    held = EngineHold(
        asked["owner"], {name: os.environ.get(name) for name in (*env, *OF_RUN)}, working_dir(), list(sys.argv),
        {name: shell.user_ns.get(name) for name in ("exit", "quit")}, tempfile.mkdtemp(prefix="nbddp-"),
        torch.get_num_threads() if torch is not None else 0,
    )  # fmt: skip
    os.environ.update(env)
    with suppress(OSError):  # what it is then, is said
        os.chdir(asked["cwd"])
    guard.belong_to(asked["roots"])
    try:
        _work()
    except BaseException as e:
        _spoilt = f"{type(e).__name__}: {e}" if _kernel is None and _is_worker() else ""
        _give_back(held)
        raise
    shell.user_ns["exit"] = shell.user_ns["quit"] = sys.exit
    _held = held
    return working_dir(), held.bulk


def _is_worker() -> bool:
    """Whether this engine's kernel is a worker's, whoever has made it one."""
    from nbddp.compat.extra import ipykernel as ipykernel_extra

    return hasattr(ipykernel_extra.kernel_of_engine(), "groups")


def _shell() -> Any:
    from IPython.core.getipython import get_ipython

    return get_ipython()


def _made_worker(kernel: IPythonParallelKernel) -> WorkerKernel:
    """An engine's kernel becomes a worker's; once."""
    from nbddp.protocol import messages
    from nbddp.worker.kernel import WorkerKernel

    kernel.__class__ = WorkerKernel
    kernel.begin_work()
    kernel.shell_handlers[messages.RUN] = kernel.nbddp_run
    kernel.control_handlers[messages.QUESTION] = kernel.nbddp_request
    return kernel  # type: ignore[no-any-return]


def _work() -> None:
    """Have the process do a worker's work: torch is imported here, if it was not."""
    global _kernel
    from nbddp.compat.extra import ipykernel as ipykernel_extra
    from nbddp.worker import engine
    from nbddp.worker.kernel import WorkerKernel
    from nbddp.worker.output import led_before

    engine.prepare_torch()
    if _kernel is not None:
        return
    WorkerKernel.log_file = os.dup(led_before([sys.stderr]).get("stderr", 2))
    kernel = _made_worker(ipykernel_extra.kernel_of_engine())
    kernel.requests.update(REQUESTS)
    kernel.questions.update(ASKED)
    engine.hook(kernel)
    _kernel = kernel
    threading.Thread(target=_watch_owner, name="nbddp-owner", daemon=True).start()


def leave() -> None:
    """Be an engine again, with the names that programs have made: in the main thread, between two programs."""
    global _held, _gates
    held, _held = _held, None
    if held is None:
        return
    if _gates is not None:
        _gates.end()
        _gates = None
    _kernel.groups.rest()
    _give_back(held)
    _give_torch_back(held)
    sys.argv = held.argv
    _shell().user_ns.update({name: value for name, value in held.quits.items() if value is not None})


def leave_if_of(pool: str) -> None:
    """As `leave`, if it is this pool that has the engine."""
    if _held is not None and _held.owner["pool"] == pool:
        leave()


def _give_back(held: EngineHold) -> None:
    """The environment and the folder as they were."""
    for name, value in held.env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    with suppress(OSError):  # it is gone
        os.chdir(held.cwd)
    rank_guard.guard().rest()
    shutil.rmtree(held.bulk, ignore_errors=True)


def _give_torch_back(held: EngineHold) -> None:
    """Restore torch's number of threads: the earlier one, or that of a fresh torch."""
    import torch

    from nbddp.worker import engine

    engine.prepare_torch()
    if held.threads:
        torch.set_num_threads(held.threads)


# -- what the owner asks in between: in the control thread ------------------------------------------


def _beat(pool: str) -> bool:
    """The owner lives. Whether the engine is still its."""
    if _held is None or _held.owner["pool"] != pool:
        return False
    _held.heard = clock.monotonic()
    return True


def _other(pool: str) -> str:
    """Whose the engine is, if it is another pool's."""
    return holder() if _held is not None and _held.owner["pool"] != pool else ""


def _abandon(pool: str) -> bool:
    """The owner goes, and does not wait for the engine's program."""
    if not _beat(pool):
        return False
    assert _held is not None
    _held.heard = -float("inf")
    _let_go()
    return True


def _memory() -> int:
    import psutil

    return hardware.memory_of(psutil.Process())


def _let_go() -> None:
    """End the program, where one is at work, as Stop does, and leave."""
    spec = _kernel.spec
    if _kernel.release.start() and spec is not None:
        _kernel.questions["interrupt"](_kernel, again=spec.run)
    _kernel.parent.loop.add_callback(_leave_if_idle)


def _leave_if_idle() -> None:
    if not _kernel.at_work:
        leave()


def _watch_owner() -> None:
    while True:
        clock.sleep(LOOK_EVERY)
        if _held is not None and _held.silent > PATIENCE:
            _let_go()


class Gates:
    """A process of this host that keeps gates to the pool's store (`agent.store_host`), and ends with the engine."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(GATE_SECONDS)
        self._lines = LineBuffer()
        code = "import json, sys; from nbddp.agent.store_host import main; sys.exit(main(json.loads(sys.argv[1])))"
        request = f'{{"channel": {theirs.fileno()}, "owner": {os.getpid()}}}'
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, request], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, env={**runtime_dir.private_caches(), **os.environ}, start_new_session=True,
        )  # fmt: skip
        theirs.close()

    def open(self, message: Message) -> Message:
        """Open the gate that is asked for; its port. Raises OSError."""
        self._channel.sendall(encode({"op": "open", **message}))
        while True:
            chunk = self._channel.recv(65536)
            if not chunk:
                raise OSError("the process that keeps the gate has exited")
            for answer in self._lines.feed(chunk):
                if answer["store"] == message["store"]:
                    return answer

    def close(self, stores: list[int]) -> None:
        self._channel.sendall(encode({"op": "close", "stores": stores}))

    def end(self) -> None:
        self._channel.close()
        self._process.wait()


def _open_gate(store: int, of: tuple[str, int], key: str, roots: list[int], **more: object) -> Message:
    """As `protocol.agent.OpenStore` has it. Lead processes of this host to the pool's store on another."""
    global _gates
    if system.is_linux() and _gates is None:
        _gates = Gates()
    if _gates is None:
        raise OSError(f"{system.name()} does not report who owns a connection")
    return _gates.open({"store": store, "of": of, "key": key, "roots": roots})


def _close_gates(stores: list[int]) -> None:
    if _gates is not None:
        _gates.close(stores)


def _engine(worker: RankWorker, do: str, **fields: Any) -> Any:
    return QUESTIONS[do](**fields)


def _leave(worker: RankWorker, buffers: Sequence[Any]) -> list[bytes]:
    """The pool goes, and the engine, which is not its own, stays."""
    leave()
    return []


ASKED: dict[str, Callable[..., Any]] = {"engine": _engine}  # more questions to this worker, and more requests
REQUESTS: dict[str, Callable[..., list[bytes]]] = {"leave": _leave}
QUESTIONS: dict[str, Callable[..., Any]] = {
    "other": _other,
    "beat": _beat,
    "abandon": _abandon,
    "memory": _memory,
    "gate": _open_gate,
    "close_gates": _close_gates,
}
