"""The process in which one learner's files are parsed: text in, the text of their cells out, in lines of JSON.

Parsing runs nothing, but a file that is nested deeply enough can still end the parser's process, or keep it busy. So it
has one of its own, under limits, forked by `nbddp.grading.sandbox.forkserver`. Imports only the standard library.
"""

from __future__ import annotations

import json
import socket

from nbddp.grading.submissions import outline
from nbddp.protocol.codec import Json


def main(request: Json) -> int:
    """Answer each line, arguments of `outline`, with its result, until nobody asks any more."""
    with socket.socket(fileno=request["channel"]) as channel, channel.makefile("rwb") as lines:
        for line in lines:
            lines.write(json.dumps(outline(**json.loads(line))).encode() + b"\n")
            lines.flush()
    return 0
