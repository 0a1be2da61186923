"""Where running pools are found: one private folder per pool, and the sweeping of dead ones.

`<runtime>/nbddp-<uid>/<pool id>/` holds pool.json (the agent's identity and the
files that belong to the pool), agent.sock, and the logs. A folder whose agent has ended
is removed by whoever looks next, with the files that it lists.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

from nbddp.agent.identity import Identity
from nbddp.errors import AgentFailed

SOCKET, RECORD = "agent.sock", "pool.json"


def runtime() -> Path:
    """This user's folder of running pools (mode 0700). Raises AgentFailed if it is not the user's own."""
    base = os.environ.get("NBDDP_RUNTIME_DIR") or os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    uid = os.getuid() if hasattr(os, "getuid") else 0
    path = Path(base) / f"nbddp-{uid}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = path.stat()
    if hasattr(os, "getuid") and (facts.st_uid != uid or stat.S_IMODE(facts.st_mode) & 0o077):
        raise AgentFailed(
            f"{path} belongs to somebody else or is open to others; remove it, or set NBDDP_RUNTIME_DIR to "
            "a private folder"
        )
    return path


def new_home() -> Path:
    """A fresh folder for one pool; its name is the pool's id."""
    while True:
        path = runtime() / secrets.token_hex(3)
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return path


def record(home: Path, agent: Identity, files: list[str]) -> None:
    """Write pool.json: whose pool this is and which files elsewhere belong to it."""
    fresh = home / f"{RECORD}.new"
    fresh.write_text(json.dumps({"pid": agent.pid, "started": agent.started, "files": files}))
    fresh.replace(home / RECORD)


def running() -> list[Path]:
    """Folders of pools whose agent lives; dead ones are swept on the way."""
    alive = []
    for home in sorted(runtime().iterdir()):
        facts = _read(home)
        if facts is None:
            continue  # being made at this moment
        if Identity(facts["pid"], facts["started"]).alive():
            alive.append(home)
        else:
            remove(home, facts["files"])
    return alive


def remove(home: Path, files: list[str]) -> None:
    """Remove a pool's folder and the files that belong to it."""
    for name in files:
        Path(name).unlink(missing_ok=True)
    shutil.rmtree(home, ignore_errors=True)


def _read(home: Path) -> dict[str, Any] | None:
    try:
        facts: dict[str, Any] = json.loads((home / RECORD).read_text())
    except FileNotFoundError:
        return None
    return facts
