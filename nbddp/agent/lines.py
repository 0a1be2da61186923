"""JSON, one message to a line: how agent, clients and store host talk.

A message is a dict. Requests carry `op` and `id`; the answer carries the same `id`;
events carry `ev`. `LineBuffer` turns chunks of bytes into messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]
MOST_BEFORE = 65536  # bytes that are kept of it
MARK = b"#nbddp#"  # the line after which messages come, where a shell may have printed before
PING_EVERY = 2.0  # seconds between two signs of life of an owner at the far end of a connection


def encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class LineBuffer:
    """Bytes in, whole messages out; keeps the unfinished rest."""

    def __init__(self, after: bytes = b""):
        """after: a line that is waited for; what comes before it is kept in `before`."""
        self._rest, self._after = b"", after
        self.before = b""

    def feed(self, chunk: bytes) -> Iterator[Message]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if self._after:
                if line == self._after:
                    self._after = b""
                else:
                    self.before = (self.before + line + b"\n")[-MOST_BEFORE:]
            elif line.strip():
                yield json.loads(line)
