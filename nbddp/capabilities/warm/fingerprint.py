"""What a process has inherited and imported, as data: whether another could have become the same is a comparison.

`inherited` is what a child would have of this process and cannot be given otherwise: environment, interpreter, folder,
rights, limits, cgroup and so on. `Imports` is what a process has read when it imported, and what it looked for and did
not find; it says what of that is not so any more. Files are known by device, inode, size and the times of their last
write and change, not by their content. A time of change cannot be set back. 3000 files take 20 ms.
"""

from __future__ import annotations

import hashlib
import os
import resource
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import nbddp
from nbddp.compat.system import existing_working_dir

ROOT = Path(nbddp.__file__).parent
DISTRIBUTIONS = (".dist-info", ".egg-info", ".egg-link", ".pth")
# Variables that tell of a window, a terminal, a login or a front end; all others may be read by what is imported
HARMLESS = {
    "_", "COLUMNS", "DISPLAY", "INVOCATION_ID", "JOURNAL_STREAM", "JPY_PARENT_PID", "JPY_SESSION_NAME", "LINES",
    "OLDPWD", "PWD", "PYTEST_CURRENT_TEST", "SHLVL", "SSH_AUTH_SOCK", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY",
    "STY", "TERM", "TERM_PROGRAM", "TERM_PROGRAM_VERSION", "TMUX", "TMUX_PANE", "WAYLAND_DISPLAY", "WINDOWID",
    "XDG_SESSION_ID",
}  # fmt: skip
STATUS = (
    "Uid", "Gid", "Groups", "Umask", "NoNewPrivs", "Seccomp", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb",
    "Cpus_allowed", "Mems_allowed",
)  # fmt: skip  # of /proc/self/status
SIGNALS, SIGINT_BIT = ("SigBlk", "SigIgn"), 1 << 1  # SIGINT is the agent's own affair
LINKS = ("root", "exe", "ns/cgroup", "ns/ipc", "ns/mnt", "ns/net", "ns/pid", "ns/time", "ns/user", "ns/uts")
TEXTS = ("cgroup", "oom_score_adj", "personality", "attr/current", "timerslack_ns", "loginuid")
NO_FILES, DELETED = ("/dev/", "/memfd:", "/SYSV"), " (deleted)"  # in /proc/self/maps
Facts = dict[str, Any]
Stat = list[int]


def inherited(env: Mapping[str, str]) -> Facts:
    """What a child of this process, started with `env`, would begin with; values that may be secret as digests."""
    facts: Facts = {f"${name}": _digest(value) for name, value in env.items() if name not in HARMLESS}
    facts |= {"python": sys.version, "executable": sys.executable, "prefixes": [sys.prefix, sys.base_prefix]}
    facts |= {"nbddp": nbddp.__version__, "package": str(ROOT), "folder": existing_working_dir()}
    facts |= {"nice": os.getpriority(os.PRIO_PROCESS, 0), "scheduler": os.sched_getscheduler(0)}
    facts |= {name: list(resource.getrlimit(getattr(resource, name))) for name in dir(resource) if _is_limit(name)}
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    facts |= {name: status[name].strip() for name in STATUS if name in status}
    facts |= {name: int(status[name], 16) & ~SIGINT_BIT for name in SIGNALS}
    for name in LINKS:
        with suppress(OSError):
            facts[name] = os.readlink(f"/proc/self/{name}")
    for name in TEXTS:
        with suppress(OSError):
            facts[name] = Path(f"/proc/self/{name}").read_text()
    return facts


def differing(old: Facts, new: Facts) -> list[str]:
    """Names of what is not the same in both."""
    return sorted(name for name in {*old, *new} if old.get(name) != new.get(name))


def _digest(value: str) -> str:
    return hashlib.sha256(os.fsencode(value)).hexdigest()[:32]


def _is_limit(name: str) -> bool:
    return name.startswith("RLIMIT_")


def own_files() -> dict[str, Stat | None]:
    """The files of nbddp, but for what the interpreter has compiled."""
    return {
        path: _stat(path)
        for folder, _, names in os.walk(ROOT)
        if not folder.endswith("__pycache__")
        for path in (os.path.join(folder, name) for name in names)
    }


class Imports:
    """What this process has imported since this was made, by the time of `take`.

    `doubts` names files that may have changed after they were read: whoever looks at them now sees others.
    """

    def __init__(self) -> None:
        self._began = (_began() - 0.05) * 1e9  # the clock of files is coarser
        self._absent = _Absent()
        sys.meta_path.append(self._absent)
        self._files: dict[str, Stat] = {}
        self._own: dict[str, Stat | None] = {}
        self._tops: set[str] = set()
        self._folders: dict[str, list[str] | None] = {}
        self.doubts: list[str] = []

    def end(self) -> None:
        """What is not there is looked for no more."""
        if self._absent in sys.meta_path:
            sys.meta_path.remove(self._absent)

    def take(self) -> None:
        """Note what has been imported until now; once more, what has been since."""
        mapped = _mapped_files()
        self.doubts += sorted(path for path in mapped if path.endswith(DELETED))
        if not self._own:
            self._own = own_files()
            self._tops = {name.partition(".")[0] for name in sys.modules} | self._absent.tops
            self._folders = self._looked_into()
        for path in {*_module_files(), *mapped, *_distributions(), *self._own} - set(self._files):
            stat = _stat(path)
            if stat is not None:
                self._files[path] = stat
                if max(stat[3:]) >= self._began:
                    self.doubts.append(path)

    def changed(self) -> str:
        """The first thing that is not as it was then; empty if all is."""
        if self.doubts:
            return self.doubts[0]
        found = next((path for path, stat in self._files.items() if _stat(path) != stat), "")
        found = found or next(iter(set(own_files()) ^ set(self._own)), "")
        now = self._looked_into()
        return found or next((folder for folder in now if now[folder] != self._folders.get(folder)), "")

    def _looked_into(self) -> dict[str, list[str] | None]:
        """Folders in which modules were looked for, and what of those each has."""
        found = {folder: _entries(folder, names) for folder, names in self._absent.parts.items()}
        return found | {folder: _entries(folder, self._tops, DISTRIBUTIONS) for folder in _folders()}


def _began() -> float:
    """When this process began, in seconds since the epoch. (psutil's answer is a second off at worst, since Linux gives
    the time of its boot in whole seconds.)"""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


class _Absent:
    """The last finder of modules: what it is asked for is not there."""

    def __init__(self) -> None:
        self.tops: set[str] = set()
        self.parts: dict[str, set[str]] = {}  # folder of a package → modules that it lacks

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        package, _, last = name.rpartition(".")
        if not package:
            self.tops.add(last)
        for folder in path or ():
            self.parts.setdefault(os.path.abspath(folder), set()).add(last)


def _module_files() -> set[str]:
    found = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return {os.path.abspath(path) for path in found if isinstance(path, str)}


def _mapped_files() -> set[str]:
    """Files that are mapped into memory: the interpreter, extensions, and the libraries that those have loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {path for path in (line[73:] for line in lines) if path.startswith("/") and not path.startswith(NO_FILES)}


def _folders() -> list[str]:
    return list(dict.fromkeys(os.path.abspath(folder) for folder in sys.path))


def _distributions() -> set[str]:
    return {os.path.join(folder, e) for folder in _folders() for e in _entries(folder, set(), DISTRIBUTIONS) or ()}


def _entries(folder: str, stems: Iterable[str], endings: tuple[str, ...] = ()) -> list[str] | None:
    """What of these names a folder has, with any ending, and what has one of these endings; None if it is not a
    folder."""
    wanted = set(stems)
    try:
        return sorted(e for e in os.listdir(folder) if e.partition(".")[0] in wanted or e.endswith(endings))
    except OSError:
        return None


def _stat(path: str) -> Stat | None:
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return [facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns]
