"""What macOS does not have, refused on Linux to nbddp's own files; torch, psutil and ipyparallel keep it.

In each process that starts with `environment(...)` a `sitecustomize.py` calls `install`. From then on a file of nbddp
sees `sys`, `os`, `socket` and others as macOS has them: names that Linux alone has are missing, `sys.platform` is
"darwin", the peak of memory comes in bytes. What is there and must not be used, fork and /proc and prctl, raises
`Refused`, and is written down too (`uses`), so that nobody swallows it. Who calls is told by the innermost frame that
is not the standard library's. Processes of multiprocessing that a cell starts are spawned, as on macOS.

`python -m pytest -p tests.versions.elsewhere` runs tests so.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import json
import os
import resource
import select
import signal
import socket
import sys
import sysconfig
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import places

AS, INTO = "NBDDP_TEST_AS", "NBDDP_TEST_REFUSED"  # "darwin"; the file in which uses are written down
ROOT = places.ROOT
OURS = str(ROOT / "nbddp") + os.sep
LIBRARY = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
PACKAGES = ("site-packages", "dist-packages")
LINUXS = ("/proc", "/sys")
EPHEMERAL = [int(port) for port in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()]
LONGEST_SOCKET = 103  # bytes of an AF_UNIX path on macOS
MISSING = {  # names that macOS's Python lacks (`os.waitid` came with 3.13)
    "os": (
        "sched_getaffinity", "sched_setaffinity", "pidfd_open", "waitid", "WNOWAIT", "P_PIDFD", "memfd_create",
        "eventfd", "splice", "copy_file_range", "getrandom", "pipe2", "setns", "unshare", "getxattr", "setxattr",
        "listxattr", "posix_fadvise", "posix_fallocate", "fdatasync", "timerfd_create", "getresuid", "O_TMPFILE",
    ),
    "signal": (
        "pidfd_send_signal", "sigtimedwait", "sigwaitinfo", "SIGRTMIN", "SIGRTMAX", "SIGPWR", "SIGPOLL", "SIGSTKFLT",
    ),
    "socket": (
        "TCP_INFO", "TCP_USER_TIMEOUT", "TCP_QUICKACK", "AF_NETLINK", "AF_PACKET", "SO_PEERCRED", "SO_MARK",
        "SO_DOMAIN", "SO_PROTOCOL", "SO_BINDTODEVICE", "MSG_NOSIGNAL", "SOCK_CLOEXEC", "SOCK_NONBLOCK",
        "SCM_CREDENTIALS",
    ),
    "select": ("epoll", "EPOLLIN"),
    "time": ("pthread_getcpuclockid", "CLOCK_BOOTTIME", "CLOCK_MONOTONIC_RAW"),
    "resource": ("prlimit", "RLIMIT_MSGQUEUE", "RLIMIT_NICE", "RLIMIT_RTPRIO", "RUSAGE_THREAD"),
}  # fmt: skip


class Refused(OSError):
    """nbddp has used what macOS does not have, or must not be used there."""


def environment(folder: Path, base: Mapping[str, str]) -> dict[str, str]:
    """The environment in which processes are refused these things, and write down their uses into `folder`."""
    hook = "import os\nif os.environ.get('NBDDP_TEST_AS'):\n    import tests.versions.refused as refused\n"
    hook += "    refused.install()\n"
    (folder / "sitecustomize.py").write_text(hook)
    path = [str(folder), str(ROOT), *filter(None, [base.get("PYTHONPATH")])]
    return {**base, AS: "darwin", INTO: str(folder / "refused.jsonl"), "PYTHONPATH": os.pathsep.join(path)}


def uses(folder: Path) -> list[dict[str, Any]]:
    """What was refused so far: `what`, and `where` of nbddp."""
    file = folder / "refused.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


# -- in each process -----------------------------------------------------------------------------


def install() -> None:
    """Refuse them in this process; once, before nbddp is imported."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    views = _views()
    own = dict(vars(builtins))
    own["__import__"] = _importing(views)
    sys.meta_path.insert(0, _Finder(own))
    sys.addaudithook(_heard)
    for name in ("stat", "lstat", "readlink"):
        setattr(os, name, _not_there(getattr(os, name)))


def _refuse(what: str) -> Refused:
    """Write it down, and the error to raise."""
    frames = [f for f in traceback.extract_stack() if f.filename.startswith(OURS)]
    where = [f"{f.filename.removeprefix(OURS)}:{f.lineno} {f.name}" for f in frames[-3:]]
    line = json.dumps({"what": what, "where": where, "process": sys.argv[:2]})
    with open(os.environ[INTO], "a") as file:
        file.write(line + "\n")
    return Refused(f"macOS: {what} in {where[-1:]}")


def _is_ours() -> bool:
    """Whether the innermost frame that is not the standard library's is nbddp's."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(OURS):
            return True
        inner = file.startswith("<frozen") or file == __file__
        if not inner and (not file.startswith(LIBRARY) or any(part in file for part in PACKAGES)):
            return False
        frame = frame.f_back
    return False


def _is_linuxs(path: object) -> bool:
    try:
        text = os.fsdecode(path)  # type: ignore[arg-type]
    except TypeError:
        return False
    return any(text == root or text.startswith(root + "/") for root in LINUXS)


def _heard(event: str, args: tuple[Any, ...]) -> None:
    """Python's own events (sys.addaudithook): an exception here is the caller's."""
    concerns, answer = EVENTS.get(event, NOTHING)
    if concerns is not None and concerns(*args) and _is_ours():
        raise OSError(answer) if answer else _refuse(" ".join([event, *map(str, args[:2])]))


def _has_long_path(end: socket.socket, address: Any) -> bool:
    return end.family == socket.AF_UNIX and len(os.fsencode(address)) > LONGEST_SOCKET


NOTHING = (None, "")
# event: whether these are the arguments in question, and what macOS answers; empty: nbddp must not do it
EVENTS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("open", "os.listdir", "os.scandir"), (lambda path=".", *_: _is_linuxs(path), "")),
    **dict.fromkeys(("os.fork", "os.forkpty"), (lambda: True, "")),
    "ctypes.dlsym": (lambda library, name: name == "prctl", ""),
    "ctypes.dlopen": (lambda name: str(name).endswith(".so"), "image not found"),
    **dict.fromkeys(("socket.bind", "socket.connect"), (_has_long_path, "AF_UNIX path too long")),
}


def _not_there(function: Any) -> Any:
    """As of a file system without /proc: whether something is there may be asked."""

    def asked(path: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_linuxs(path) and _is_ours():
            raise FileNotFoundError(2, "No such file or directory", path)
        return function(path, *args, **kwargs)

    return asked


# -- modules as nbddp's files see them ------------------------------------------------------------


class View(types.ModuleType):
    """A module without some of its names, and with others of ours."""

    def __init__(self, real: types.ModuleType, missing: Sequence[str] = (), **ours: Any):
        super().__init__(real.__name__)
        object.__getattribute__(self, "__dict__").update(_real=real, _missing=set(missing), _ours=ours)

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        if name == "__class__":
            return types.ModuleType
        if name in own["_missing"]:
            raise AttributeError(f"module '{own['_real'].__name__}' has no attribute '{name}'")
        return own["_ours"][name] if name in own["_ours"] else getattr(own["_real"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "__dict__")["_real"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(object.__getattribute__(self, "__dict__")["_real"], name)


def _views() -> dict[str, View]:
    def usage(of: Any) -> Any:
        found = list(resource.getrusage(of))
        found[2] *= 1024  # macOS counts bytes
        return resource.struct_rusage(found)

    def wait4(pid: int, options: int) -> Any:
        ended, status, found = os.wait4(pid, options)
        of = list(found)
        of[2] *= 1024
        return ended, status, resource.struct_rusage(of)

    def limits(of: int) -> tuple[int, int]:
        soft, hard = resource.getrlimit(of)
        return (soft, resource.RLIM_INFINITY) if of == resource.RLIMIT_NOFILE else (soft, hard)

    def set_limits(of: int, limits: tuple[int, int]) -> None:
        if of == resource.RLIMIT_NOFILE:
            if limits[0] in (resource.RLIM_INFINITY, -1) or limits[0] > 10240:
                raise ValueError("current limit exceeds maximum limit")
            limits = limits[0], resource.getrlimit(of)[1]
        resource.setrlimit(of, limits)

    real: dict[str, types.ModuleType] = {
        "os": os, "sys": sys, "signal": signal, "socket": socket, "select": select, "time": time, "resource": resource,
    }  # fmt: skip
    ours: dict[str, dict[str, Any]] = {
        "sys": {"platform": "darwin"},
        "os": {"wait4": wait4},
        "resource": {"getrusage": usage, "getrlimit": limits, "setrlimit": set_limits},
    }
    return {name: View(module, MISSING.get(name, ()), **ours.get(name, {})) for name, module in real.items()}


def _psutil(real: Any) -> View:
    class Process(real.Process):  # type: ignore[misc,name-defined]
        def memory_full_info(self) -> Any:
            if self.pid != os.getpid():
                raise real.AccessDenied(self.pid)
            return self.memory_info()

    return View(real, ("sensors_fans",), Process=Process)


def _importing(views: dict[str, View]) -> Any:
    def importing(
        name: str, names: Any = None, local: Any = None, fromlist: Sequence[str] | None = (), level: int = 0
    ) -> Any:
        found = builtins.__import__(name, names, local, fromlist or (), level)
        of = "" if level else getattr(found, "__name__", "")
        if of == "psutil" and of not in views:
            views[of] = _psutil(found)
        return views.get(of, found)

    return importing


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module of nbddp's with the builtins that are given to it."""

    def __init__(self, name: str, path: str, own: dict[str, Any]):
        super().__init__(name, path)
        self._own = own

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module)["__builtins__"] = self._own
        super().exec_module(module)
        if module.__name__ == "nbddp.worker.engine":
            import multiprocessing

            multiprocessing.set_start_method("spawn", force=True)
        if module.__name__ == "nbddp.agent.controller":  # this system's, which macOS's known ones stand for
            vars(module)["ephemeral_ports"] = lambda: range(EPHEMERAL[0], EPHEMERAL[1] + 1)

    def get_code(self, fullname: str) -> Any:
        main = sys.modules["__main__"]
        if sys._getframe(1).f_globals.get("__name__") == "runpy" and not hasattr(main, "__file__"):
            vars(main)["__builtins__"] = self._own  # `python -m`
        return super().get_code(fullname)


class _Finder:
    def __init__(self, own: dict[str, Any]):
        self._own = own

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "nbddp":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path, self._own)
        return spec
