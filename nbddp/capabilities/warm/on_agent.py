"""How a node agent's process is kept. Its imports are noted from its begin. At its end it may wait for another owner
(`capabilities.warm.server`), whose agent it becomes."""

from __future__ import annotations

from dataclasses import dataclass, field

from nbddp.agent import keeper
from nbddp.agent.server import WARM, NodeAgent, Peer
from nbddp.capabilities.warm import server
from nbddp.capabilities.warm.fingerprint import Facts, Imports
from nbddp.compat import system
from nbddp.protocol.codec import Message


@dataclass
class Kept:
    """What is known of a process that may be kept: what it has read, where that is noted, and what it began with."""

    imports: Imports | None = None
    inherited: Facts = field(default_factory=dict)


def _kept(agent: NodeAgent) -> Kept:
    """Nothing is known of one whose begin was not noted."""
    return Kept()


def begin(agent: NodeAgent) -> None:
    """Note what the process reads from now on."""
    agent.parts[_kept] = Kept(Imports() if system.is_linux() else None)


def told(agent: NodeAgent) -> Message:
    """`unkept`: why the process cannot be kept; empty if it can."""
    imports = agent.part(_kept).imports
    if imports is not None:
        imports.end()
    return {"unkept": server.why_not() if agent.modules is WARM else "the pool's workers are on other hosts"}


def keep(agent: NodeAgent, peer: Peer, message: Message) -> Message:
    """Let the process survive the owner by `seconds`; 0 for not at all."""
    kept = agent.part(_kept)
    kept.inherited = message["inherited"]
    agent.keep = 0.0 if server.why_not() else message["seconds"]
    if agent.keep and kept.imports is not None:
        kept.imports.take()
    return {}


def go_on(agent: NodeAgent) -> NodeAgent | None:
    """Wait for another owner, in another process; None if there is nothing to take, or nobody came."""
    kept = agent.part(_kept)
    if kept.imports is None or server.why_not():
        return None
    agent.release()
    try:
        server.go_on()
        owner = server.wait(agent.keep, kept.imports, kept.inherited)
    except server.EndedUnused:
        return None
    successor = become(owner, kept)
    successor.keep = agent.keep
    return successor


def become(owner: server.NewOwner, kept: Kept) -> NodeAgent:
    """The agent of who has taken this process."""
    channel = owner.enter()
    keeper.keep(owner.home)
    agent = NodeAgent(owner.home, channel, channel, owner.pid)
    agent.parts[_kept] = kept
    return agent
