"""Where running pools are found: one private folder per pool, and the sweeping of dead ones.

`<runtime>/nbddp-<uid>/<pool id>/` holds pool.json (the agent's identity and the
files that belong to the pool), agent.sock (`socket_of`), and the logs. A folder whose agent has ended
is removed by whoever looks next, with the files that it lists. The folder is often in memory, so what ranks print lies
under the cache folder. Both stand where others may put things: nothing there is followed that is not a folder of ours.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from nbddp.agent.process_id import ProcessId
from nbddp.errors import AgentFailed

SOCKET, RECORD = "agent.sock", "pool.json"
NAME_BYTES = 3
NAME = re.compile(r"[0-9a-f]{6}")  # of a pool's folder, made of so many bytes
POOLS = "pools"  # in the cache folder
SHORT = Path("/tmp")  # every user's, whatever TMPDIR says
LONGEST_SOCKET = 103  # bytes of a socket's path on macOS; Linux allows 107


def runtime() -> Path:
    """This user's folder of running pools (mode 0700). Raises AgentFailed if it is not the user's own."""
    base = os.environ.get("NBDDP_RUNTIME_DIR") or os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return private(Path(base) / f"nbddp-{_uid()}")


def cache() -> Path:
    """This user's folder for what is large (mode 0700), on disk where the folder of pools often is in memory. Raises
    AgentFailed if it is not the user's own, OSError if it cannot be made."""
    base = os.environ.get("NBDDP_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return private(Path(base) / "nbddp", "NBDDP_CACHE_DIR")


def bulk(home: Path) -> Path:
    """Where a pool's output lies; its folder itself where there is no cache folder. It goes with the pool."""
    try:
        path = cache() / POOLS / home.name
        for folder in (path.parent, path):
            folder.mkdir(mode=0o700, exist_ok=True)
    except (OSError, AgentFailed):
        return home
    return path


def private_caches() -> dict[str, str]:
    """Where torch's compiler is to keep its results. Its own choice is a folder in the temporary one whose name
    everybody knows, and it loads the files there."""
    try:
        return {"TORCHINDUCTOR_CACHE_DIR": str(cache() / "torchinductor")}
    except (OSError, AgentFailed):
        return {}


def _uid() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def private(path: Path, setting: str = "NBDDP_RUNTIME_DIR") -> Path:
    """A folder that is this user's alone, made where it is missing. What stands in its place is not followed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    facts = path.lstat()
    own = not hasattr(os, "getuid") or (facts.st_uid == _uid() and not stat.S_IMODE(facts.st_mode) & 0o077)
    if not stat.S_ISDIR(facts.st_mode) or not own:
        what = "is a link" if stat.S_ISLNK(facts.st_mode) else "belongs to another user or is open to others"
        raise AgentFailed(f"{path} {what}; remove it, or set {setting} to a private folder")
    return path


def new_home() -> Path:
    """A fresh folder for one pool; its name is the pool's id."""
    return fresh(runtime())


def named(name: str) -> Path:
    """The folder of this name that `new_home` has made. Raises AgentFailed if there is none."""
    path = runtime() / name
    facts = path.lstat() if NAME.fullmatch(name) and path.exists() else None
    if facts is None or not stat.S_ISDIR(facts.st_mode) or facts.st_uid != _uid():
        raise AgentFailed(f"there is no pool folder named {name!r}")
    return path


def fresh(folder: Path) -> Path:
    """A new private folder in this one, under a name that nobody has."""
    while True:
        path = folder / secrets.token_hex(NAME_BYTES)
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return path


def socket_of(home: Path) -> Path:
    """Where the agent of this pool listens: in the pool's folder, or in one of /tmp where that path is too long."""
    own = home / SOCKET
    if len(os.fsencode(own)) <= LONGEST_SOCKET:
        return own
    folder = private(SHORT / f"nbddp-{_uid()}") / "sockets"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"{hashlib.sha256(os.fsencode(home.absolute())).hexdigest()[:16]}.sock"


def record(home: Path, agent: ProcessId, files: list[str]) -> None:
    """Write pool.json: whose pool this is and which files elsewhere belong to it."""
    new = home / f"{RECORD}.new"
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({"pid": agent.pid, "started": agent.started, "files": files}, file)
    new.replace(home / RECORD)


def running() -> list[Path]:
    """Folders of pools whose agent lives; dead ones are swept on the way."""
    alive = []
    for home in sorted(runtime().iterdir()):
        facts = None if _is_strange(home) else _read(home)
        if facts is None:
            continue  # being made at this moment, or none of ours
        if ProcessId(facts["pid"], facts["started"]).alive():
            alive.append(home)
        else:
            remove(home, facts["files"])
    return alive


def sweep(home: Path, patience: float = 2.0) -> None:
    """Remove the folder of a pool whose agent has ended, or is about to within `patience` seconds."""
    end = time.monotonic() + patience
    while (facts := _read(home)) is not None:
        if not ProcessId(facts["pid"], facts["started"]).alive():
            remove(home, facts["files"])
        elif time.monotonic() > end:
            return
        time.sleep(0.01)


def strange() -> list[str]:
    """What stands in the folder of pools and was not put there by nbddp, in words. It is left alone."""
    found = [path for path in sorted(runtime().iterdir()) if _is_strange(path)]
    return [f"{path} is not a pool's folder and is left alone" for path in found]


def _is_strange(path: Path) -> bool:
    try:
        facts = path.lstat()
    except FileNotFoundError:
        return False
    return not stat.S_ISDIR(facts.st_mode) or (hasattr(os, "getuid") and facts.st_uid != _uid())


def check_name(home: Path) -> None:
    """Raises ValueError if this is not named as `fresh` names folders: all that is in one is about to be removed."""
    if not NAME.fullmatch(home.name):
        raise ValueError(f"{home} was not created by nbddp")


def remove(home: Path, files: list[str]) -> None:
    """Remove a pool's folder, its output and the files that belong to it: plain files of this user's, no links. Raises
    ValueError for what cannot be the folder of a pool."""
    check_name(home)
    for path in map(Path, files):
        with suppress(FileNotFoundError):
            facts = path.lstat()
            if stat.S_ISREG(facts.st_mode) and facts.st_uid == _uid():
                path.unlink()
    with suppress(OSError, AgentFailed):
        shutil.rmtree(cache() / POOLS / home.name, ignore_errors=True)
    with suppress(OSError, AgentFailed):
        socket_of(home).unlink(missing_ok=True)
    shutil.rmtree(home, ignore_errors=True)


def _read(home: Path) -> dict[str, Any] | None:
    try:
        with os.fdopen(os.open(home / RECORD, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))) as file:
            facts: dict[str, Any] = json.load(file)
    except FileNotFoundError:
        return None
    return facts
