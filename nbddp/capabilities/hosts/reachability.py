"""By which interface hosts meet. From the connections that were tried follows an address of each host; or a sentence
that names the pair that does not reach each other, the address, and the remedy.

Pure: the connections are tried by `capabilities.hosts.on_agent`, and `capabilities.hosts.pairwise_probe` asks for
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nbddp.protocol.codec import Json

SILENCE = "no answer"
ANOTHER = "another host answers there"
LINK_LOCAL = "fe80:"
MOST_TOLD = 3  # pairs that an error names
ADVICE = {  # what was heard → what to do
    SILENCE: "a firewall drops the connection. Allow TCP connections between these hosts on all ports, or select "
    "another interface with --interface",
    "Connection refused": "a firewall rejects the connection, or the address is not that host's. Allow TCP "
    "connections between these hosts on all ports, or select another interface with --interface",
    ANOTHER: "two machines have this address. Use --interface to select an interface whose addresses differ",
}
NO_ROUTE = "there is no route between these addresses. Select another interface with --interface"
LOOPED = (
    "a loopback interface connects each host to itself. Remove --interface and GLOO_SOCKET_IFNAME, or select "
    "another interface"
)


@dataclass(frozen=True)
class Endpoint:
    """An address of a host, and the interface that has it. speed: in Mbit/s, 0 where it is not known."""

    interface: str
    address: str
    speed: int = 0
    loopback: bool = False


# (who, whom, at which of its addresses) → why it was in vain, or empty; hosts by number
Tried = Mapping[tuple[int, int, str], str]


def offers(interfaces: Sequence[Json]) -> list[Endpoint]:
    """What a host's interfaces (`agent.hardware.interfaces`) offer: of each the first address, IPv4 before IPv6, since
    that is the one that gloo takes; the fastest first, the loopback last."""
    found = []
    for one in interfaces:
        usable = [a for a in one["addresses"] if not a.lower().startswith(LINK_LOCAL)]
        for address in sorted(usable, key=lambda a: ":" in a)[:1]:
            found.append(Endpoint(one["name"], address, one["speed"], one["loopback"]))
    return sorted(found, key=lambda o: (o.loopback, -o.speed))


def offer_at(address: str, interfaces: Sequence[Json]) -> Endpoint:
    """The offer of an address that a host has."""
    for one in interfaces:
        if address in one["addresses"]:
            return Endpoint(one["name"], address, one["speed"], one["loopback"])
    return Endpoint("", address, loopback=address.startswith("127.") or address == "::1")


def joined(whom: int, offer: Endpoint, hosts: int, tried: Tried) -> bool:
    """Whether all other hosts reach this one at an address."""
    return all(tried.get((who, whom, offer.address), SILENCE) == "" for who in range(hosts) if who != whom)


def chosen(offered: Sequence[Sequence[Endpoint]], tried: Tried) -> list[Endpoint] | None:
    """For each host the address at which all others reach it; None if one has none such. An interface that has the same
    name everywhere comes before a mixture, and a fast one before a slow one."""
    good = [[o for o in own if joined(i, o, len(offered), tried)] for i, own in enumerate(offered)]
    if not all(good):
        return None
    for name in dict.fromkeys(o.interface for o in good[0]):
        same = [next((o for o in own if o.interface == name), None) for own in good]
        if None not in same:
            return [o for o in same if o is not None]
    return [own[0] for own in good]


def why_not(names: Sequence[str], offered: Sequence[Sequence[Endpoint]], tried: Tried) -> str:
    """Which hosts do not reach which, where, and what to do."""
    failed = list(_failed(names, offered, tried))
    told = [f"{who} cannot reach {whom} at {_at(offer)}: {why}" for who, whom, offer, why in _first(failed, MOST_TOLD)]
    more = len({(who, whom) for who, whom, _, _ in failed}) - len(told)
    told += [f"and {more} more pairs"] if more > 0 else []
    advice = dict.fromkeys(_advice(offer, why) for _, _, offer, why in _first(failed, MOST_TOLD))
    return "; ".join([*told, *advice])


def _failed(
    names: Sequence[str], offered: Sequence[Sequence[Endpoint]], tried: Tried
) -> Iterator[tuple[str, str, Endpoint, str]]:
    """Of hosts that have no address for all: who fails to reach them, at which address, and why."""
    for whom, own in enumerate(offered):
        if any(joined(whom, offer, len(offered), tried) for offer in own):
            continue
        for offer in sorted(own, key=lambda o: o.loopback):
            for who in range(len(offered)):
                why = tried.get((who, whom, offer.address), SILENCE)
                if who != whom and why:
                    yield names[who], names[whom], offer, why


def _first(failed: Sequence[tuple[str, str, Endpoint, str]], most: int) -> list[tuple[str, str, Endpoint, str]]:
    """Of each pair the first, and no more than so many."""
    found: dict[tuple[str, str], tuple[str, str, Endpoint, str]] = {}
    for one in failed:
        found.setdefault(one[:2], one)
    return list(found.values())[:most]


def _at(offer: Endpoint) -> str:
    return f"{offer.address} ({offer.interface})" if offer.interface else offer.address


def _advice(offer: Endpoint, why: str) -> str:
    return LOOPED if offer.loopback else ADVICE.get(why, NO_ROUTE)


def home_words(names: Sequence[str], found: Sequence[tuple[Endpoint, Sequence[str]]]) -> str:
    """That hosts do not reach the notebook's machine. found: its addresses, and for each what each host heard; the
    best is shown."""
    offer, heard = min(found, key=lambda one: (one[0].loopback, sum(map(bool, one[1]))))
    lost = {name: why for name, why in zip(names, heard, strict=True) if why}
    said = ", ".join(f"{name} ({why})" for name, why in lost.items())

    return (
        f"{said} cannot reach this machine at {_at(offer)}. Workers connect to the notebook's machine: allow TCP "
        f"connections from {', '.join(lost)} through its firewall, or start the notebook on a machine that they "
        "can reach, such as one of the hosts"
    )
