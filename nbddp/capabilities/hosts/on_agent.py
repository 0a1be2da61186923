"""What a node agent does for pools on several hosts: doors at which others knock, and word of nodes that are wanted."""

from __future__ import annotations

from contextlib import suppress

from nbddp.agent.hardware import address_towards
from nbddp.agent.server import NodeAgent, Peer
from nbddp.capabilities.hosts.listeners import Listeners
from nbddp.protocol.jsonl import Message


def _listeners(agent: NodeAgent) -> Listeners:
    made = Listeners(agent.selector)
    agent.looks.append(made.look)
    return made


def doors(agent: NodeAgent, peer: Peer, message: Message) -> Message:
    """Open doors at own addresses, for others to knock at. towards: also at the address on the way there; quiet: at
    ports such as the controller's."""
    addresses = [*message["addresses"]]
    if message.get("towards"):
        with suppress(OSError):  # there is no way; who asks sees that no door is there
            addresses.insert(0, address_towards(message["towards"]))
    ports = [_quiet_port(address) if message.get("quiet") else 0 for address in addresses]
    opened = agent.part(_listeners).open([*zip(addresses, ports, strict=True)], message["token"])
    return {"doors": [[address, *found] for address, found in zip(addresses, opened, strict=True)]}


def knock(agent: NodeAgent, peer: Peer, message: Message) -> None:
    """Knock at others' doors; the answer comes when all have answered, or the time is over."""
    agent.part(_listeners).knock(
        message["doors"], message["seconds"], lambda found: agent.tell(peer, id=message.get("id"), found=found)
    )


def close_doors(agent: NodeAgent, peer: Peer, message: Message) -> Message:
    agent.part(_listeners).close()
    return {}


def scale(agent: NodeAgent, peer: Peer, message: Message) -> Message:
    """Tell the owner that somebody wants the pool on so many nodes."""
    agent.tell(agent.owner, ev="scale", nodes=message["nodes"])
    return {}


def _quiet_port(address: str) -> int:
    """A free port of the range in which the controller listens; 0 if there is none."""
    from nbddp.agent.controller import quiet_ports

    try:
        claim, (port,) = quiet_ports(1, address)
    except OSError:
        return 0
    claim.close()
    return port
