"""What a node agent says of itself. Requests to it, and its answers, are rows of `agent.server`, of `hosts`
and of `nbddp.capabilities`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

PROTOCOL = 1  # goes up when a message gets another name or another meaning
CONTROLS_ONLY = "--controls-only"  # to an agent on its command line: import what its own process needs, without torch


@dataclass(frozen=True)
class Hello:
    """An agent's first message to its owner.

    pid, started: which process it is. protocol: its PROTOCOL. Of an agent on another host, also: its folders, its
    working directory and host, the address at which that is reached, its versions, the variables that name interfaces
    (`joining`), and the folder it was to work in, if there is none (`moved`).
    """

    ev: ClassVar[str] = "hello"
    pid: int
    started: float
    protocol: int = 0
    home: str = ""
    bulk: str = ""
    cwd: str = ""
    host: str = ""
    reached: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    joining: dict[str, str] = field(default_factory=dict)
    moved: str = ""
