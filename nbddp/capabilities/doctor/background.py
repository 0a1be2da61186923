"""While a pool's first workers warm up, the private APIs are tested: does this torch do what nbddp leans on?

A copy of the warm process tries them (`capabilities.doctor.probe_runner`), beside the workers and at the lowest
priority. It writes the results into the folder of pools, where the next pool of the same versions finds them. `%ddp
start` and `%ddp status` say what does not work here, and what that costs; a cell prints nothing that torchrun does not.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nbddp import __version__
from nbddp.agent import runtime_dir
from nbddp.agent.client import AgentClient
from nbddp.capabilities.doctor.examination import findings, messages, versions
from nbddp.capabilities.doctor.findings import Findings
from nbddp.errors import AgentFailed
from nbddp.protocol.codec import Message

if TYPE_CHECKING:
    from nbddp.pool.state import PoolState

FOLDER = "seams"
CHANGES_THEM = ("PYTHONPATH", "NBDDP_START_METHOD")  # variables that can give the same versions other answers


class Probes:
    """The results of testing the private APIs of this machine's versions: the part of one pool."""

    def __init__(self, pool: PoolState):
        self.stopped()

    def stopped(self) -> None:
        self._path: Path | None = None
        self._unknown = ""

    def started(self, agent: AgentClient) -> None:
        """Start a test of the private APIs, if nobody has tested these versions; returns at once."""
        self._path = _path(agent.env)
        if not self._path.exists():
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            try:
                agent.request("start", **_request(os.environ, agent.home, self._path))
            except AgentFailed as e:  # no process can be started, say: a pool works without the answers
                self._unknown = f"could not be started ({e})"

    def done(self) -> bool:
        """Whether the answers are there, or none will come."""
        return bool(self._unknown) or (self._path is not None and self._path.exists())

    def shortcomings(self) -> list[str]:
        return self.describe()

    def describe(self) -> list[str]:
        """What does not work, a line for each library; none as long as that is not known."""
        if self._path is not None and self._path.exists():
            return describe(findings(messages(self._path.read_bytes()), ""))
        if self._unknown:
            return [f"the compatibility checks {self._unknown}; %ddp doctor repeats them"]
        return []

    def process_ended(self, event: Message) -> None:
        if event["kind"] != "trials" or self._path is None:  # None: they were those of a pool that has been stopped
            return
        code = event["code"]
        self._unknown = f"ended unexpectedly ({f'exit code {code}' if code >= 0 else f'signal {-code}'})"


def _path(env: Mapping[str, str]) -> Path:
    stack = [__version__, sys.executable, versions(), [env.get(name) for name in CHANGES_THEM]]
    return runtime_dir.runtime() / FOLDER / f"{hashlib.sha256(json.dumps(stack).encode()).hexdigest()[:16]}.jsonl"


def describe(found: Findings) -> list[str]:
    """`torch 2.6.0 lacks what nbddp relies on: ...`, a line for each library of which something does not work."""
    lost: dict[str, list[str]] = {}
    for seam, _ in found.broken():
        lost.setdefault(seam.library, []).append(f"{seam.key} ({seam.without})")
    return [
        f"{library} {found.versions[library]} lacks what nbddp relies on: {'; '.join(parts)}. %ddp doctor shows details"
        for library, parts in lost.items()
    ]


def _request(env: Mapping[str, str], pool: Path, path: Path) -> Message:
    return {
        "kind": "trials",
        "env": {name: value for name, value in env.items() if name != "PYTEST_CURRENT_TEST"},
        "cwd": str(pool),
        "path": list(sys.path),
        "log": str(pool / "trials.log"),
        "part": str(pool / "trials.jsonl"),
        "into": str(path),
    }
