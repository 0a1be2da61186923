"""How the agent makes a process: fork from its warm self, or spawn where it may not fork.

Forking is sound only while the agent has one thread and has never touched CUDA; then a new worker costs a fraction of a
second and a few MB. Every child leads its own session (its subprocesses die with it) and ends with the agent. Linux
sees to that; elsewhere a thread of its own does. None is ended by SIGINT: some front ends (VS Code) send Stop to
every process under the notebook kernel. A worker hears it while a cell runs.

A forked process begins with its parent's generators, and so would its siblings. Without a seed, all ranks would draw
the same weights, masks and permutations. Generators of accelerators are made in the process that uses one, and
operating-system randomness (`secrets`, `uuid`, numpy's `default_rng`) is nobody's copy. One thing cannot be made anew:
`hash()` of strings, which orders a set of strings. It stays the interpreter's for as long as that lives. So whoever
needs it different in each process asks for one that is spawned.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from nbddp.agent import warning_filters
from nbddp.agent.process_id import ProcessId
from nbddp.compat import system

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LOOK_EVERY = 0.25  # seconds between two looks whether the parent lives, where Linux does not tell


def why_not_fork() -> str:
    """Empty if this process may fork workers now, else the reason."""
    if os.environ.get("NBDDP_START_METHOD") == "spawn":
        return "NBDDP_START_METHOD=spawn"
    if not system.is_linux():
        return f"fork is not safe on {system.name()}"
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return f"the warm process has {threads} threads"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialized in the warm process"
    return ""


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have this process signalled when the process `parent` ends; elsewhere than on Linux also those it has started."""
    if system.is_linux():
        system.prctl(PR_SET_PDEATHSIG, int(number))
    else:
        watching = threading.Thread(
            target=_end_after, args=(ProcessId.of(parent), number), name="nbddp-parent", daemon=True
        )
        watching.start()
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def outlive_parent() -> None:
    """Take back `die_with_parent` (Linux)."""
    system.prctl(PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Have what descends from this process, and has lost its parent, become its own child (Linux)."""
    system.prctl(PR_SET_CHILD_SUBREAPER, 1)


def _end_after(parent: ProcessId, number: int) -> None:
    while parent.alive() or os.getppid() == parent.pid:  # a debugger takes the place of a parent
        time.sleep(LOOK_EVERY)
    if number == signal.SIGKILL and os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), number)
    os.kill(os.getpid(), number)


def start(
    target: str, request: dict[str, Any], *, close: Iterable[int], keep: Iterable[int] = (), spawn: bool | None = None
) -> int:
    """Start `target` ("module:function") with `request` in a new process; returns its pid.

    request: JSON data; `log` (path), `env` (whole environment), `cwd` and `path` (sys.path) are applied before the
        function is called. `enters`: a function that is called between, with the request.
    close: the agent's own descriptors, not to be held by a forked child.
    keep: descriptors that a spawned child inherits.
    spawn: whether it is spawned; if not given, it is where this process may not fork.
    """
    if bool(why_not_fork()) if spawn is None else spawn:
        return _spawn(target, request, keep)
    return _fork(target, request, close)


def _fork(target: str, request: dict[str, Any], close: Iterable[int]) -> int:
    parent = os.getpid()
    gc.freeze()  # and stay so: a collection in the child would touch, and so copy, every page it shares
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        gc.enable()
        signal.set_wakeup_fd(-1)
        _take_signals()
        os.setsid()
        die_with_parent(parent)
        for fd in close:
            os.close(fd)
        code = _run(target, request)
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # also where the disk is full: this is a copy of the agent, and must not go on as one
            os._exit(code)


def _spawn(target: str, request: dict[str, Any], keep: Iterable[int]) -> int:
    process = subprocess.Popen(
        [sys.executable, "-m", "nbddp.agent.children", target, str(os.getpid())],
        stdin=subprocess.PIPE,
        env=request["env"],
        pass_fds=tuple(keep),
        start_new_session=True,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as pipe:  # if it has ended already, its exit is reported as any other
        pipe.write(json.dumps(request).encode())
    process.returncode = 0  # reaped by the agent's own wait, not by Popen
    return process.pid


def _run(target: str, request: dict[str, Any]) -> int:
    _enter(request)
    return int(_call(target, request) or 0)


def _call(target: str, request: dict[str, Any]) -> Any:
    module, name = target.split(":")
    return getattr(importlib.import_module(module), name)(request)


def _enter(request: dict[str, Any]) -> None:
    """Become the process that `request` describes: log, environment, folder, path, seeds."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    for name in set(os.environ) - set(request["env"]):
        del os.environ[name]
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.path[:] = request["path"]
    _own_copies()
    if "enters" in request:
        _call(request["enters"], request)


def _own_copies() -> None:
    """Make this process's own what a fork has copied: seeds, keys, and what was read from the environment."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()  # the CPU's alone: `torch.seed` would seed all GPUs alike
    multiprocessing.current_process().authkey = os.urandom(32)
    tempfile.tempdir = None  # TMPDIR may be another
    time.tzset()  # so may TZ


def _take_signals() -> None:
    """A child has the default actions, and no handler of the agent's; what that ignores is ignored after exec too, and
    SIGINT stays so."""
    handled = {number for number in signal.valid_signals() if callable(signal.getsignal(number))}
    for number in handled - {signal.SIGINT} | {signal.SIGHUP, signal.SIGQUIT}:
        signal.signal(number, signal.SIG_DFL)


def _spawned() -> None:
    warning_filters.put_off()
    target, parent = sys.argv[1], int(sys.argv[2])
    _take_signals()
    die_with_parent(parent)
    request = json.loads(sys.stdin.buffer.read())
    sys.exit(_run(target, request))


if __name__ == "__main__":
    _spawned()
