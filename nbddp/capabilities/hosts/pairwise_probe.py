"""How the hosts of a pool reach each other and the notebook's machine: all pairs are tried before a worker starts.

The first attempt uses the address that each host's routing table selects for the others. It costs two round trips if
it succeeds. Otherwise every interface is tried, and one that connects all hosts is used
(`capabilities.hosts.reachability`).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from nbddp.agent.gather import ask_each
from nbddp.agent.stop import uninterrupted
from nbddp.capabilities.hosts import reachability
from nbddp.capabilities.hosts.node import RemoteNode
from nbddp.capabilities.hosts.reachability import Endpoint
from nbddp.errors import AgentFailed, BadInput, PoolError
from nbddp.launch.torchrun_env import INTERFACES
from nbddp.pool.node import PoolNode
from nbddp.protocol.codec import Message

SECONDS = 2.5  # that a knock may take; a lost packet is sent again after one
TOKEN_BYTES = 16
GLOO = INTERFACES[0]


@dataclass
class Probe:
    """What was tried. offered, tried: as `capabilities.hosts.reachability` has them; home: addresses of this machine,
    and for each what each host heard there."""

    names: list[str]
    offered: list[list[Endpoint]]
    tried: dict[tuple[int, int, str], str] = field(default_factory=dict)
    home: list[tuple[Endpoint, list[str]]] = field(default_factory=list)

    def chosen(self) -> list[Endpoint] | None:
        """The address of each host at which all others reach it; None if one has none such."""
        return reachability.chosen(self.offered, self.tried)

    def home_offer(self) -> Endpoint | None:
        """The address at which all hosts reach this machine; None if there is none."""
        return next((offer for offer, heard in self.home if not any(heard)), None)

    def left(
        self, home: PoolNode, hosts: Sequence[RemoteNode], wanted: Sequence[Endpoint | None]
    ) -> tuple[list[list[Endpoint]], list[Endpoint]]:
        """What is still to be tried of hosts that may take any interface, and of this machine."""
        lost, unheard = self.chosen() is None, self.home_offer() is None
        of_hosts = [
            [offer for offer in _all(node) if lost and not own and offer not in known]
            for node, own, known in zip(hosts, wanted, self.offered, strict=True)
        ]
        known = [offer for offer, _ in self.home]
        return of_hosts, [offer for offer in _all(home) if unheard and not home.address and offer not in known]

    def add(self, other: Probe) -> None:
        """What was tried after this."""
        self.offered = [[*own, *more] for own, more in zip(self.offered, other.offered, strict=True)]
        self.tried |= other.tried
        self.home += other.home


def find(home: PoolNode, hosts: Sequence[RemoteNode], interface: str | None) -> None:
    """Have every node know the address at which others reach it.

    interface: the one that all hosts are to take; else one named by GLOO_SOCKET_IFNAME in a host's set-up is that
    host's. Where this machine has an address already, the controller listens there, and it stays.

    Raises BadInput for an interface that a host does not have, PoolError where hosts do not reach each other or this
    machine.
    """
    wanted = [_wanted(node, interface) for node in hosts]
    stands = [reachability.offer_at(home.address, home.facts.interfaces)] if home.address else None
    probe = tried(home, hosts, [[own] if own else None for own in wanted], stands)
    if probe.chosen() is None or probe.home_offer() is None:
        probe.add(tried(home, hosts, *probe.left(home, hosts, wanted)))
    found, here = probe.chosen(), probe.home_offer()
    if found is None:
        raise PoolError(reachability.why_not(probe.names, probe.offered, probe.tried))
    if here is None:
        raise PoolError(reachability.home_words(probe.names, probe.home))
    home.address = here.address
    for node, offer in zip(hosts, found, strict=True):
        node.take_way(offer.address, own=not interface)


def _all(node: PoolNode) -> list[Endpoint]:
    return reachability.offers(node.facts.interfaces)


def _wanted(node: RemoteNode, interface: str | None) -> Endpoint | None:
    """The offer of the interface that is asked for."""
    name = interface or node.joining.get(GLOO, "").split(",")[0]
    if not name:
        return None
    found = _all(node)
    offer = next((o for o in found if o.interface == name), None)
    if offer is None:
        asked = f"--interface {name}" if interface else f"{GLOO}={name} in its set-up"
        raise BadInput(
            f"{asked}: {node.agent.host} has no interface {name} with an address; it has "
            f"{', '.join(f'{o.interface} ({o.address})' for o in found)}"
        )
    return offer


def tried(
    home: PoolNode,
    hosts: Sequence[RemoteNode],
    asked: Sequence[Sequence[Endpoint] | None],
    here: Sequence[Endpoint] | None,
) -> Probe:
    """Try all pairs of hosts, and this machine from all, at once. asked, here: at which addresses; None: at the one
    that the routing table takes towards the others."""
    nodes: list[PoolNode] = [*hosts, home]
    reached = [node.agent.route_to() for node in hosts]
    tokens = [secrets.token_hex(TOKEN_BYTES) for _ in nodes]
    requests = [_at(own, _other(reached, i)) for i, own in enumerate(asked)]
    with _doors(nodes, tokens, [*requests, {**_at(here, reached[0]), "quiet": True}]) as doors:
        told = [_told(node, own) for node, own in zip(nodes, doors, strict=True)]
        probe = Probe([str(node.agent.host) for node in hosts], [[offer for offer, _ in own] for own in told[:-1]])
        knocks = _knocks(told, tokens)
        answers = ask_each([n.agent for n in hosts], "knock", [{"doors": k, "seconds": SECONDS} for k in knocks])
    heard = [iter(answer["found"]) for answer in answers]
    for whom, own in enumerate(told):
        for offer, (port, why) in own:
            words = [next(heard[who]) if port else why for who in range(len(hosts)) if who != whom]
            if whom == len(hosts):
                probe.home.append((offer, words))
            else:
                others = [who for who in range(len(hosts)) if who != whom]
                probe.tried |= {(who, whom, offer.address): said for who, said in zip(others, words, strict=True)}
    return probe


Told = list[tuple[Endpoint, tuple[int, str]]]  # of a node's doors: where, the port or 0, and why there is none


def _at(offers: Sequence[Endpoint] | None, towards: str) -> Message:
    if offers is None:
        return {"addresses": [], "towards": towards}
    return {"addresses": [offer.address for offer in offers]}


def _other(reached: Sequence[str], i: int) -> str:
    return next((address for k, address in enumerate(reached) if k != i), reached[i])


def _told(node: PoolNode, doors: Sequence[Sequence[Any]]) -> Told:
    interfaces = node.facts.interfaces
    return [(reachability.offer_at(address, interfaces), (port, why)) for address, port, why in doors]


def _knocks(told: Sequence[Told], tokens: Sequence[str]) -> list[list[list[str | int]]]:
    """What each host knocks at: every door of the others, and of this machine."""
    return [
        [[o.address, port, tokens[j]] for j, own in enumerate(told) if j != i for o, (port, _) in own if port]
        for i in range(len(told) - 1)
    ]


@contextmanager
def _doors(
    nodes: Sequence[PoolNode], tokens: Sequence[str], requests: Sequence[Message]
) -> Iterator[list[list[list[Any]]]]:
    """Doors of all nodes, open until the block ends."""
    agents = [node.agent for node in nodes]
    fields = [{**request, "token": token} for request, token in zip(requests, tokens, strict=True)]
    try:
        yield [answer["doors"] for answer in ask_each(agents, "doors", fields)]
    finally:
        with uninterrupted():
            for agent in agents:
                with suppress(AgentFailed):  # one that has ended has closed them
                    agent.tell("close_doors")
