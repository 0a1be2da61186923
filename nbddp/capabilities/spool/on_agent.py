"""An agent's facts on its workers' text: where copies are (`copies`), and the rest in an ended worker's pipes, which
nobody else can read."""

from __future__ import annotations

import os
import select
from contextlib import suppress
from pathlib import Path

from nbddp.agent import child_logs, runtime_dir
from nbddp.agent.server import Child, NodeAgent, Peer
from nbddp.capabilities.spool import copies
from nbddp.protocol.codec import Message

ABORTS = tuple(map(str.encode, child_logs.ABORTS))
LARGEST_PIPE = 1 << 20  # bytes; what Linux lets a user have


class WrittenText:
    """Of the newest worker of each rank: `bases`, where its copies are; `left`, by stream, what was in its pipes.
    `pipes`: pid → streams and read ends."""

    def __init__(self, agent: NodeAgent):
        self.bases: dict[int, str] = {}
        self.left: dict[int, dict[str, bytes]] = {}
        self.pipes: dict[int, list[tuple[str, int]]] = {}
        self._held = agent.held
        agent.ended.append(self.ended)

    def ended(self, child: Child) -> None:
        """Read what is left in the pipes of a child that has ended. Why the C++ library has aborted goes to its log, as
        what is read in time does; the log may have the beginning of a line already, and others behind it."""
        for stream, pipe in self.pipes.pop(child.pid, []):
            self._held.discard(pipe)
            left = emptied(pipe)
            begun = copies.unfinished(f"{self.bases[child.rank]}.{stream}") if left else b""
            self.left[child.rank][stream] = self.left[child.rank].get(stream, b"") + left
            said = [line for line in (begun + left).splitlines() if line.startswith(ABORTS)]
            with suppress(OSError), open(child.log, "ab") as log:  # a full disk
                log.write(b"".join(b"\n" + line for line in said) + b"\n" * bool(said))


def hold(agent: NodeAgent, peer: Peer, message: Message) -> Message:
    """Hold pipes open whose read ends the child `pid` has sent, one for each of `streams`. `base`: where its copies are
    to be."""
    child, text = agent.children[message["pid"]], agent.part(WrittenText)
    if child.pid not in text.pipes:
        text.bases[child.rank] = str(runtime_dir.bulk(agent.home) / Path(child.log).stem)
        text.left[child.rank], text.pipes[child.pid] = {}, []
    text.pipes[child.pid] += zip(message["streams"], peer.came, strict=True)
    agent.held |= {*peer.came}
    peer.came = []
    return {"base": text.bases[child.rank]}


def written(agent: NodeAgent, peer: Peer, message: Message) -> Message:
    """Of what ranks wrote in `run`: (rank, stream, characters that are lost, text that has not come). ranks: (rank,
    stream → characters that have come)."""
    text, found = agent.part(WrittenText), []
    for rank, came in message["ranks"]:
        for stream, count in came.items() if rank in text.bases else ():
            left = text.left[rank].get(stream, b"")
            found.append((rank, stream, *copies.missing(f"{text.bases[rank]}.{stream}", message["run"], count, left)))
    return {"written": [row for row in found if any(row[2:])]}


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
