"""The messages in which a node agent describes itself. Requests to it, and its answers, are rows of `agent.server`, of
`hosts` and of `nbddp.capabilities`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from nbddp.protocol.codec import Json

PROTOCOL = 4  # goes up when a message gets another name or another meaning
CONTROLS_ONLY = "--controls-only"  # to an agent on its command line: import what its own process needs, without torch


@dataclass(frozen=True)
class Hello:
    """An agent's first message to its owner.

    pid, started: which process it is. protocol: its PROTOCOL. An agent on another host also says: its folders; its
    working directory and host; the host's address; its versions; the variables that name interfaces (`joining`); the
    folder that it was to work in, if there is none (`moved`).
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


@dataclass(frozen=True)
class Warm:
    """What an agent says once workers can be started: what its host has, and how it starts them.

    cores: that its processes may use. devices, links, untold: of `OnAgent.gpus`. numa, interfaces: of
    `agent.hardware`. missing: what a worker needs and is not installed. spawn: why workers are not forked. more: what
    capabilities add.
    """

    ev: ClassVar[str] = "warm"
    host: str = ""
    cores: int = 1
    devices: tuple[Json, ...] = ()
    links: tuple[tuple[str, ...], ...] = ()
    untold: tuple[str, ...] = ()
    numa: tuple[Json, ...] = ()
    interfaces: tuple[Json, ...] = ()
    missing: str = ""
    spawn: str = ""
    seconds: float = 0.0
    more: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StartWorker:
    """An agent is to start a worker, which registers as `uuid`. env: its whole environment, or what is added to it
    there. url_file: the controller's, for engines. options: of the pool, for the worker's parts."""

    kind: ClassVar[str] = "worker"
    rank: int
    uuid: str
    env: dict[str, str]
    cwd: str
    path: tuple[str, ...]
    log: str
    profile_dir: str
    url_file: str
    options: Json = field(default_factory=dict)


@dataclass(frozen=True)
class StartController:
    """An agent is to start ipyparallel's controller, which listens at `ip`. state: the file in which it keeps its
    engines. args: for its command line."""

    kind: ClassVar[str] = "controller"
    env: dict[str, str]
    cwd: str
    path: tuple[str, ...]
    log: str
    state: str
    profile_dir: str
    cluster_id: str
    ip: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Started:
    """The process that was asked for, by pid and start time. spawned: it was not forked, and imports torch itself."""

    pid: int
    started: float
    spawned: bool = False


KEY_BYTES = 80  # of `OpenStore.key`: Linux signs connections by no longer key


@dataclass(frozen=True)
class OpenStore:
    """What a node's store host is asked for: a store in which ranks meet, or where `of` is set a way to that one.

    store: the number that the agent gives it. outside: the address at which other nodes reach it. key: what both sides
    of a way know, in hex. roots: processes that belong to the pool, with all that descend from them, though the agent
    has not started them.
    """

    store: int = 0
    outside: str = ""
    of: tuple[str, int] | None = None
    key: str = ""
    roots: tuple[int, ...] = ()


@dataclass(frozen=True)
class OpenedStore:
    """Where processes of the node reach it (`port`), and other nodes (`outside`; 0: nowhere). unguarded: who else does,
    and why; empty if nobody does."""

    store: int
    port: int
    unguarded: str = ""
    outside: int = 0
