"""JSON, one message to a line: how agent, clients and store host talk.

A message is a dict. Requests carry `op` and `id`; the answer carries the same `id`;
events carry `ev`. `LineBuffer` turns chunks of bytes into messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]


def encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class LineBuffer:
    """Bytes in, whole messages out; keeps the unfinished rest."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[Message]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if line.strip():
                yield json.loads(line)
