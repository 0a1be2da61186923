"""Features of the operating system that only Linux has, and the functions that are lost without them.

Linux tells in /proc what a process's threads wait for and which sockets are whose, and lets a warm process fork; on
macOS no torch may be forked and nothing tells. `tests/versions/refused.py` takes all this from nbddp's own files.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import socket
import sys
from contextlib import suppress
from typing import Any, NoReturn

from nbddp.errors import BadInput

LOOPBACK = "127.0.0.1"
DELETED = " (deleted)"  # says Linux of a folder that is gone
NAMES = {"darwin": "macOS", "win32": "Windows"}
WITHOUT_PROC = (
    "a rank that is blocked in a collective cannot be unblocked; nbddp replaces it, and its variables are lost; each "
    "worker imports torch itself, which takes seconds"
)
MORE = (  # for those who ask: `%ddp doctor`
    "whether ranks that called different collectives are blocked is judged by CPU time, because bytes are not counted",
    "peak memory is the worker's, not the last cell's",
    "a rank whose native code holds the interpreter shows no stack",
)


def name() -> str:
    return NAMES.get(sys.platform, sys.platform)


def is_linux() -> bool:
    return sys.platform == "linux"


@functools.cache
def has_proc() -> bool:
    """Whether /proc tells of this process."""
    return is_linux() and os.path.isdir("/proc/self/fd")


def prctl(option: int, value: int) -> None:
    """Linux's prctl(2); nothing elsewhere."""
    if is_linux():
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def lost() -> str:
    """What does not work on this system, in a sentence; empty on Linux."""
    return "" if is_linux() else f"on {name()} {WITHOUT_PROC}"


def parts() -> list[str]:
    """The same and less important things, a sentence each."""
    return [] if is_linux() else [lost(), *(f"on {name()} {part}" for part in MORE)]


def peak_bytes(ru_maxrss: int) -> int:
    """getrusage's peak of resident memory, which Linux counts in KiB."""
    return ru_maxrss if sys.platform == "darwin" else ru_maxrss * 1024


def has_loopback() -> bool:
    """Whether this machine has the loopback of IPv4, at which a pool's processes meet. Nothing is sent."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((LOOPBACK, 9))
        except OSError as e:
            return e.errno not in (errno.EADDRNOTAVAIL, errno.ENETUNREACH)
    return True


# -- this process's working folder, which somebody may have removed: then the system has no path for it ------


def working_dir() -> str:
    """Its path; empty if it is gone."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def existing_working_dir() -> str:
    """Its path. Raises BadInput, which names it, if it is gone: no process can start there."""
    return working_dir() or _refuse_gone()


def _refuse_gone() -> NoReturn:
    was = os.environ.get("PWD", "")
    with suppress(OSError):
        was = os.readlink("/proc/self/cwd").removesuffix(DELETED)
    raise BadInput(f"the working directory {was or 'of this process'} no longer exists; %cd FOLDER changes to another")


# -- connections to other hosts end when the host does not answer: a cut cable closes none -----------------

# The operating system asks on a connection where nothing is on its way (SO_KEEPALIVE). What is on its way it sends
# again for a quarter of an hour, unless TCP_USER_TIMEOUT sets an earlier limit; since Linux 5.11 it then also gives up
# a side that answers that it has no room. So use it for connections whose other side always reads.

IDLE, EVERY, TIMES = 2, 1, 4  # seconds, seconds, questions: 6 s until a silent host is given up
# times as long for what must outlast the owner's own patience with a host (`capabilities.hosts.remote_client.SILENT`)
SLOWER = 2


def keep_context_alive(context: Any) -> None:
    """As `keep_alive`, for all sockets that a context of zmq's makes from now on. Nobody is hurried: what zmq has sent
    is lost with the connection, and a host may be silent for less than the owner bears."""
    import zmq

    for option, value in (
        (zmq.TCP_KEEPALIVE, 1), (zmq.TCP_KEEPALIVE_IDLE, IDLE * SLOWER), (zmq.TCP_KEEPALIVE_INTVL, EVERY * SLOWER),
        (zmq.TCP_KEEPALIVE_CNT, TIMES),
    ):  # fmt: skip
        context.setsockopt(option, value)
