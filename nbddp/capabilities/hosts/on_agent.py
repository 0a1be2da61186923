"""The tasks of a node agent for pools on several hosts: listening ports that others try, and requests for more nodes.

Whether hosts reach each other is tried with real connections: an agent opens doors on its own addresses, and others
knock. Everything happens in the agent's loop without blocking, so that its pings go on. A door hands a token to whoever
connects; who knocks compares it, so that the right host has answered and not another with the same address. The token
serves for nothing else, so it need not be hidden.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from nbddp.agent.hardware import address_towards
from nbddp.agent.server import NodeAgent, Peer
from nbddp.capabilities.hosts.reachability import ANOTHER, SILENCE
from nbddp.protocol.codec import Message

BACKLOG = 1024
OPEN_FOR = 60.0  # seconds; who opened them closes them long before
LONGEST = 256  # bytes of a token


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


# -- doors and knocks ------------------------------------------------------------------------------


class Listeners:
    """The open doors of this host, and its knocks at others'. selector: calls the data of what is ready."""

    def __init__(self, selector: selectors.BaseSelector):
        self._selector = selector
        self._open: set[socket.socket] = set()
        self._close_at = 0.0
        self._rounds: list[ProbeRound] = []

    def open(self, doors: Sequence[tuple[str, int]], token: str) -> list[tuple[int, str]]:
        """Listen at each address, at its port or at a free one if that is 0; for each the port, or 0 and why not."""
        self._close_at = time.monotonic() + OPEN_FOR
        return [self._open_one(address, port, token.encode()) for address, port in doors]

    def _open_one(self, address: str, port: int, token: bytes) -> tuple[int, str]:
        door = socket.socket(_family(address))
        try:
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            door.bind((address, port))
            door.listen(BACKLOG)
        except OSError as e:
            door.close()
            return 0, _said(e)
        door.setblocking(False)
        self._open.add(door)
        self._selector.register(door, selectors.EVENT_READ, lambda: self._answer(door, token))
        return int(door.getsockname()[1]), ""

    def _answer(self, door: socket.socket, token: bytes) -> None:
        if door in self._open:
            with suppress(OSError):  # who knocked has gone again
                connection, _ = door.accept()
                with connection:
                    connection.send(token)

    def close(self) -> None:
        for door in self._open:
            self._selector.unregister(door)
            door.close()
        self._open.clear()

    def knock(self, doors: Sequence[Sequence[str | int]], seconds: float, done: Callable[[list[str]], None]) -> None:
        """Connect to all doors (address, port, token) at once; `done` gets for each why it was in vain, or empty."""
        if not doors:
            done([])
            return
        self._rounds.append(ProbeRound(self._selector, doors, time.monotonic() + seconds, done))

    def look(self) -> None:
        """What has taken too long is over."""
        now = time.monotonic()
        for one in self._rounds:
            if now >= one.until:
                one.give_up()
        self._rounds = [one for one in self._rounds if not one.over]
        if self._open and now >= self._close_at:
            self.close()


class ProbeRound:
    """Knocks that were begun together."""

    def __init__(
        self, selector: selectors.BaseSelector, doors: Sequence[Sequence[str | int]], until: float,
        done: Callable[[list[str]], None],
    ):  # fmt: skip
        self.until, self._done, self._selector = until, done, selector
        self._found: list[str | None] = [None] * len(doors)
        self._sockets: dict[int, socket.socket] = {}
        self._heard: dict[int, bytes] = {}
        self._tokens = [str(token).encode() for _, _, token in doors]
        for i, (address, port, _) in enumerate(doors):
            self._begin(i, str(address), int(port))

    @property
    def over(self) -> bool:
        return None not in self._found

    def _begin(self, i: int, address: str, port: int) -> None:
        knock = self._sockets[i] = socket.socket(_family(address))
        knock.setblocking(False)
        self._selector.register(knock, selectors.EVENT_WRITE, lambda: self._connected(i))
        with suppress(BlockingIOError):
            try:
                knock.connect((address, port))
            except BlockingIOError:
                raise
            except OSError as e:
                self._end(i, _said(e))

    def _connected(self, i: int) -> None:
        knock = self._sockets.get(i)
        if knock is None:
            return
        error = knock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._end(i, os.strerror(error))
        else:
            self._selector.modify(knock, selectors.EVENT_READ, lambda: self._read(i))

    def _read(self, i: int) -> None:
        knock = self._sockets.get(i)
        if knock is None:
            return
        try:
            chunk = knock.recv(LONGEST)
        except OSError as e:
            self._end(i, _said(e))
            return
        heard = self._heard[i] = self._heard.get(i, b"") + chunk
        if heard == self._tokens[i]:
            self._end(i, "")
        elif not chunk or not self._tokens[i].startswith(heard):
            self._end(i, ANOTHER)

    def _end(self, i: int, why: str) -> None:
        knock = self._sockets.pop(i)
        self._selector.unregister(knock)
        knock.close()
        self._found[i] = why
        if self.over:
            self._done([str(words) for words in self._found])

    def give_up(self) -> None:
        for i in list(self._sockets):
            self._end(i, SILENCE)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _said(error: OSError) -> str:
    return error.strerror or str(error)
