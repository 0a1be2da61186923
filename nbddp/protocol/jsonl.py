"""JSON, one message to a line: how agent, clients and store host talk.

A message is a dict. Requests carry `op` and `id`; the answer carries the same `id`;
events carry `ev`. `LineBuffer` turns chunks of bytes into messages. Processes of ours talk on
descriptors that are nobody else's; through ssh there is only stdout, where a program may print
in between. So a line that is no message is reported, and the next one is read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

Message = dict[str, Any]
MOST_BEFORE = 65536  # bytes that are kept of it
LONGEST_UNKNOWN = 1000  # bytes that are reported of a line
MARK = b"#nbddp#"  # the line after which messages come, where a shell may have printed before
PING_EVERY = 2.0  # seconds between two signs of life of an owner at the far end of a connection


def encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def parsed(line: bytes) -> Message | None:
    """The message on a line; None if it is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def log_unknown(line: bytes) -> None:
    """Report a line that is no message on stderr, which is the log of a process of ours."""
    print(unknown_words(line), file=sys.stderr, flush=True)


def unknown_words(line: bytes) -> str:
    return f"not a message: {line[:LONGEST_UNKNOWN].decode(errors='replace').strip()}"


class LineBuffer:
    """Bytes in, whole messages out; keeps the unfinished rest."""

    def __init__(self, after: bytes = b"", unknown: Callable[[bytes], None] = log_unknown):
        """after: a line that is waited for; what comes before it is kept in `before`. unknown: called with each line
        that is no message."""
        self._rest, self._after, self._unknown = b"", after, unknown
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
                message = parsed(line)
                if message is None:
                    self._unknown(line)
                else:
                    yield message
