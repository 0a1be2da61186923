"""A worker process: an ipyparallel engine whose id is its rank.

Started by the agent, forked from its warm self (torch is already imported) or spawned.
`main` runs in the new process and returns when the engine ends.
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import gc
import importlib
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypedDict

import ipyparallel.engine.app as engine_app
import zmq
from traitlets.config import Config

from nbddp.agent import hardware, warning_filters
from nbddp.compat import system
from nbddp.compat import torch as torch_compat
from nbddp.compat.clock import clock
from nbddp.compat.system import LOOPBACK
from nbddp.deadlock.on_rank import child_waits, flight, position
from nbddp.worker import output
from nbddp.worker.kernel import WorkerKernel
from nbddp.worker.output import PrintedOutput

CONNECT_SECONDS = 5
_connections = itertools.count()
# Signals that the engine's threads leave to the main thread, and so to the program's threads. A program may block one,
# to wait for it; in a thread that has not, it would end the process. The others end a start, or tell of a crash.
LEFT_TO_PROGRAMS = signal.valid_signals() - {
    signal.SIGINT, signal.SIGTERM, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT,
}  # fmt: skip


class EngineRequest(TypedDict):
    """The pool's description of a worker that the agent forks."""

    rank: int
    uuid: str
    url_file: str
    profile_dir: str
    cwd: str
    log: str
    options: dict[str, Any]


def main(request: EngineRequest) -> int:
    """Be the worker of rank `request["rank"]` in the cluster of `request["url_file"]`."""
    _Engine.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_PROGRAMS)
    log = os.fdopen(os.dup(2), "w")  # before ipykernel captures it
    faulthandler.enable(file=log, all_threads=False)  # to word threads that run on would crash in its turn
    faulthandler.register(signal.SIGUSR2, file=log, all_threads=False)  # `stacks` asks so where nothing else answers
    WorkerKernel.log_file, WorkerKernel.log_path = log.fileno(), request["log"]
    WorkerKernel.pool_options = request.get("options", {})  # a field that has its default does not travel
    prepare_torch()
    # A child that is forked here (a data loader's worker) must leave our garbage alone. To end a dead process group it
    # would wait for threads that only we have.
    os.register_at_fork(after_in_child=gc.freeze)
    without_debugger()
    if not hasattr(engine_app, "Kernel"):
        raise RuntimeError("this ipyparallel has no engine.app.Kernel to replace; install ipyparallel 9")
    engine_app.Kernel = WorkerKernel
    if json.loads(Path(request["url_file"]).read_text())["location"] != LOOPBACK:  # the controller is on another host
        system.keep_context_alive(zmq.Context.instance())
    app = _Engine.instance(config=_config(request))
    app.initialize([])
    app.start()
    return 0


class _Engine(engine_app.IPEngine):  # type: ignore[misc]
    """An engine that, once registered, flushes its output quickly and hooks torch's rendezvous.
    blocked: the signals that its programs find blocked."""

    blocked: Iterable[int] = ()

    async def complete_registration(self, message: Any, connect: Callable[..., Any], *args: Any) -> None:
        await super().complete_registration(message, functools.partial(connect_surely, connect), *args)
        # ipyparallel's handler lets the cell end as if nothing had been, and the engine with it; a program dies by it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        hook(self.kernel)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
        child_waits.begin(os.path.dirname(self.kernel.log_path))
        gc.freeze()  # a program's garbage is collected without a look at what the engine is made of
        warning_filters.put_back()
        self.log.setLevel(self.log_level)  # its handlers have it alone: whatever is logged would be made, and dropped


def hook(kernel: WorkerKernel) -> None:
    """Have a worker's kernel see what programs print, and what they do with torch and at their end; once, when its
    streams are there."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # ipyparallel prints its log's handlers before, and the first cell would show that as its own
    kernel.streams = (sys.stdout, sys.stderr)
    kernel.printed = PrintedOutput(kernel.streams, kernel.running)
    own_clock(kernel)
    output.complete(kernel.streams)
    output.free_dumps()
    kernel.interrupts.install()
    kernel.leavings.install(kernel.interrupts)
    kernel.exits.install()
    kernel.groups.install()
    os.register_at_fork(after_in_child=kernel.groups.sockets.leave_in_child)
    kernel.departures.install()
    position.install()
    kernel.groups.hold_destroy()
    kernel.parts.start()


def own_clock(kernel: WorkerKernel) -> None:
    """Have the loops of the worker's threads go by its own clock: they ask `time.monotonic` again and again."""
    threads = (kernel.streams[0].pub_thread, getattr(kernel, "control_thread", None))
    loops = [thread.io_loop.asyncio_loop for thread in threads if thread is not None]
    for loop in [asyncio.get_event_loop(), *loops]:
        loop.time = clock.monotonic


def connect_surely(connect: Callable[..., Any], end: zmq.Socket[Any], *args: Any, **options: Any) -> None:
    """Connect a socket of the engine's, and wait until the other end knows it. The controller reports an engine as soon
    as its heart beats. It drops messages for an engine that its other sockets do not know."""
    name = f"inproc://connecting-{next(_connections)}"  # pyzmq's own choice may be taken, by the last one
    opened = end.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED, name)
    try:
        connect(end, *args, **options)
        opened.poll(CONNECT_SECONDS * 1000)  # a controller that is slower may lose a message; it is asked for again
    finally:
        end.disable_monitor()
        opened.close(linger=0)


def without_debugger() -> None:
    """Import ipykernel's debugger as if debugpy were not installed. No client can reach it in an engine, and it costs
    every worker 25 MB and a quarter of a second."""
    hidden = "debugpy" not in sys.modules
    if hidden:
        sys.modules["debugpy"] = None  # type: ignore[assignment]  # what import takes for "not there"
    try:
        importlib.import_module("ipykernel.debugger")
    finally:
        if hidden:
            del sys.modules["debugpy"]


def _config(request: EngineRequest) -> Config:
    config = Config()
    config.ProfileDir.location = request["profile_dir"]
    config.Session.session = request["uuid"]  # the engine's identity is its session's
    config.IPEngine.id = request["rank"]
    config.IPEngine.url_file = request["url_file"]
    config.IPEngine.enable_nanny = False  # the agent knows every exit at once
    config.IPEngine.max_heartbeat_misses = 0  # the agent watches the controller
    config.IPEngine.log_level = 40
    config.IPEngine.work_dir = request["cwd"]
    return config


def prepare_torch() -> None:
    """What torch read when it was imported (in the warm process), read again from this worker's environment."""
    forked = "torch" in sys.modules
    import torch
    import torch.distributed

    if forked:  # a spawned worker's import has read it all
        torch.set_num_threads(threads(os.environ, len(hardware.allowed_cores())))
        if torch_compat.LOG_LEVEL in os.environ:
            torch_compat.read_log_level()
    if torch.distributed.is_available():
        flight.switch_on()
        set_level = getattr(torch.distributed, "set_debug_level_from_env", None)
        if set_level is not None:
            set_level()


def threads(env: Any, cores: int) -> int:
    """Intra-op threads that a fresh torch would take: OMP_NUM_THREADS, else one per core."""
    text = env.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(text) if text.isdigit() and int(text) > 0 else cores
