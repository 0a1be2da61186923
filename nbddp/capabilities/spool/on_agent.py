"""What an agent knows of its workers' text: where copies of it are (`copies`), and what was left in a worker's pipes
when that had ended, since then nobody else can read it."""

from __future__ import annotations

import os
import select
from contextlib import suppress
from pathlib import Path

from nbddp.agent import child_logs, runtime_dir
from nbddp.agent.server import Child, NodeAgent, Peer
from nbddp.capabilities.spool import copies
from nbddp.protocol.jsonl import Message

LARGEST_PIPE = 1 << 20  # bytes; what Linux lets a user have


def hold(agent: NodeAgent, peer: Peer, message: Message) -> Message:
    """Hold pipes open whose read ends the child `pid` has sent, one for each of `streams`. `base`: where its copies are
    to be."""
    return agent.part(WrittenText).hold(agent.children[message["pid"]], peer, message["streams"])


def written(agent: NodeAgent, peer: Peer, message: Message) -> Message:
    """What ranks wrote in `run`, and has not come. ranks: (rank, stream → characters that have come)."""
    text = agent.part(WrittenText)
    return {"written": [row for rank, came in message["ranks"] for row in text.missing(rank, message["run"], came)]}


class WrittenText:
    """Of the newest worker of each rank."""

    def __init__(self, agent: NodeAgent):
        self._agent = agent
        self._bases: dict[int, str] = {}  # rank → where its copies are
        self._pipes: dict[int, list[tuple[str, int]]] = {}  # pid → stream and read end
        self._left: dict[tuple[int, str], bytes] = {}  # rank and stream → what was left in its pipes
        agent.ended.append(self.ended)

    def hold(self, child: Child, peer: Peer, streams: list[str]) -> Message:
        if child.pid not in self._pipes:
            self._bases[child.rank] = str(runtime_dir.bulk(self._agent.home) / Path(child.log).stem)
            self._left = {of: left for of, left in self._left.items() if of[0] != child.rank}
        self._pipes.setdefault(child.pid, []).extend(zip(streams, peer.came, strict=True))
        self._agent.held |= {*peer.came}
        peer.came = []
        return {"base": self._bases[child.rank]}

    def ended(self, child: Child) -> None:
        """Read what is left in the pipes of a child that has ended. Why the C++ library has aborted goes to its log, as
        what is read in time does."""
        for stream, pipe in self._pipes.pop(child.pid, []):
            self._agent.held.discard(pipe)
            left = emptied(pipe)
            self._left[child.rank, stream] = self._left.get((child.rank, stream), b"") + left
            told = b"".join(f"{line}\n".encode() for line in left.decode("utf-8", "replace").splitlines()
                            if line.startswith(child_logs.ABORTS))  # fmt: skip
            with suppress(OSError), open(child.log, "ab") as log:  # a full disk
                log.write(told)

    def missing(self, rank: int, run: int, came: dict[str, int]) -> list[tuple[int, str, int, str]]:
        """(rank, stream, characters that are lost, text) for each stream of which something has not come."""
        found = []
        for stream, count in came.items() if rank in self._bases else ():
            left = self._left.get((rank, stream), b"")
            lost, text = copies.missing(copies.path(self._bases[rank], stream), run, count, left)
            if lost or text:
                found.append((rank, stream, lost, text))
        return found


def emptied(pipe: int) -> bytes:
    """What is left in a pipe, which is closed."""
    left, ready = b"", select.poll()
    ready.register(pipe, select.POLLIN)
    while len(left) < LARGEST_PIPE and ready.poll(0):  # a child of the process may still hold the other end
        chunk = os.read(pipe, 65536)
        if not chunk:
            break
        left += chunk
    os.close(pipe)
    return left
