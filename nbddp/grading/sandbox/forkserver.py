"""A warm process that forks others for its owner, hands each of them a socket, and ends each with all it has started.

It imports what they need once, then waits for orders on one socket, in lines of JSON: `warm`, `start` and `end`. It has
one thread and does one thing at a time. Each process gets a folder of its own, which is removed with it. Nobody but
its owner can reach it: it listens nowhere, and other processes of the account can neither trace it nor read its
memory. It ends when its owner closes the socket.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar

import psutil

from nbddp.agent import children, orphans, warning_filters
from nbddp.agent.process_id import ProcessId
from nbddp.compat import system
from nbddp.compat.system import working_dir
from nbddp.grading.sandbox import rlimits
from nbddp.protocol.codec import LineBuffer, Message, encode

FOLDERS = ("work", "home", "tmp")
LONGEST_BASE = 50  # bytes of the path for temporary files; an agent's socket below it takes 57 of 107
LOG = 4096  # bytes of a log that are read


class ForkServer:
    """The loop; `serve` returns when the owner is gone, with all processes ended."""

    def __init__(self, channel: socket.socket):
        self.channel, self.lines = channel, LineBuffer()
        self.folder, self.number = _base(), itertools.count(1)
        self.left: list[str] = []  # folders that strangers have made useless
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{self.folder}/inductor"  # torch makes one when it is imported
        self.folders: dict[int, str] = {}  # pid → its own

    def serve(self) -> None:
        handed: list[int] = []
        while True:
            chunk, fds, _, _ = socket.recv_fds(self.channel, 1 << 16, 4)
            if not chunk:
                break
            handed += fds
            for message in self.lines.feed(chunk):
                self.channel.sendall(encode(self._answer(message, handed)))
                for fd in handed:
                    os.close(fd)
                handed = []
        for pid in list(self.folders):
            self._end({"pid": pid}, [])
        for folder in (self.folder, *self.left):
            remove(folder)

    def _answer(self, message: Message, fds: list[int]) -> Message:
        try:
            answer = self.ORDERS[message["op"]](self, message, fds)
        except Exception as e:
            answer = {"error": f"{type(e).__name__}: {e}"}
        return answer

    def _warm(self, message: Message, fds: list[int]) -> Message:
        """Import `modules`, then those of `spared` that are there; the name and error of what is missing, or empty."""
        gc.disable()  # what it would free leaves holes that every child fills, and so copies, page by page
        for name in () if children.why_not_fork() else (*message["modules"], *message["spared"]):
            try:
                importlib.import_module(name)
            except ImportError as e:
                if name not in message["spared"]:
                    return {"missing": f"{name}: {e}", "folder": self.folder}
        return {"missing": "", "folder": self.folder}

    def _start(self, message: Message, fds: list[int]) -> Message:
        """Start `target` with the socket that came along, and with what else is in `request`. folder: where all is."""
        folder = self._new_folder()
        own = {
            "HOME": "home", "TMPDIR": "tmp", "NBDDP_RUNTIME_DIR": "", "IPYTHONDIR": "home/ipython",
            "TORCHINDUCTOR_CACHE_DIR": "tmp/inductor",
        }  # fmt: skip
        request = {
            **message["request"],
            "channel": fds[0],
            "log": f"{folder}/log",
            "env": {**os.environ, **{name: f"{folder}/{path}" for name, path in own.items()}},
            "cwd": f"{folder}/work",
            "path": list(sys.path),
        }
        pid = children.start(message["target"], request, close=[self.channel.fileno()], keep=fds)
        self.folders[pid] = folder
        return {"pid": pid, "folder": self.folder}

    def _new_folder(self) -> str:
        """An empty one, with FOLDERS in it; strangers may have removed the one where all are."""
        number = next(self.number)
        try:
            os.mkdir(f"{self.folder}/{number}", 0o700)
        except OSError:
            self.left.append(self.folder)
            self.folder = _base()
            os.mkdir(f"{self.folder}/{number}", 0o700)
        for name in FOLDERS:
            os.mkdir(f"{self.folder}/{number}/{name}", 0o700)
        return f"{self.folder}/{number}"

    def _end(self, message: Message, fds: list[int]) -> Message:
        """End a process and all it has started, and remove its folder; `left` has those that could not be ended, `log`
        the last line that it left."""
        pid = message["pid"]
        folder = self.folders.pop(pid)
        seen = _below(pid)
        with suppress(ProcessLookupError):
            orphans.kill(pid)
        os.waitpid(pid, 0)
        left = orphans.end(self.folders)
        for process in filter(None, (identity.process() for identity in seen)):  # where nobody inherits orphans
            with suppress(psutil.NoSuchProcess):
                process.kill()
        log = _last_line(f"{folder}/log")
        remove(folder)
        return {"left": left, "log": log}

    ORDERS: ClassVar[dict[str, Callable[[ForkServer, Message, list[int]], Message]]] = {
        "warm": _warm,
        "start": _start,
        "end": _end,
    }


def _base() -> str:
    """A new folder, private, where the path of a socket is short enough."""
    long = len(os.fsencode(tempfile.gettempdir())) > LONGEST_BASE
    return tempfile.mkdtemp(prefix="nbddp-", dir="/tmp" if long else None)


def _below(pid: int) -> list[ProcessId]:
    """A process's descendants, where orphans are not inherited (not on Linux)."""
    if system.is_linux():
        return []
    found = []
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                found.append(ProcessId.of(process.pid))
    return found


def _last_line(path: str) -> str:
    """Of a log that others may have put something else in the place of."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return ""
    with os.fdopen(fd, "rb") as file:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            return ""
        file.seek(max(0, facts.st_size - LOG))
        lines = file.read(LOG).decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def remove(folder: str) -> None:
    """Remove a folder, however deep strangers have made it, and whatever they have forbidden in it."""
    removing = ["rm", "-rf", "--", folder]
    if subprocess.run(removing, check=False, stderr=subprocess.DEVNULL).returncode:
        subprocess.run(["chmod", "-R", "u+rwx", "--", folder], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(removing, check=False)


def main() -> None:
    """`python -m nbddp.grading.sandbox.forkserver DESCRIPTOR`."""
    warning_filters.put_off()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # its owner has kept it from us until now
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sys.path[:] = [
        p for p in sys.path if p not in ("", working_dir()) or p in os.environ.get("PYTHONPATH", "").split(":")
    ]
    rlimits.hide()
    children.adopt_orphans()
    ForkServer(socket.socket(fileno=int(sys.argv[1]))).serve()
    os._exit(0)  # torch's own clean-up at exit takes longer than everything else


if __name__ == "__main__":
    main()
