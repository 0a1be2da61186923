"""`python -m nbddp.capabilities.hosts.rejoin HOME`: an owner's new connection to the agent in the folder HOME, whose
first was lost.

What the owner says on stdin goes to the agent's socket, and what that says to stdout, after MARK.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
from pathlib import Path

from nbddp.agent import runtime_dir
from nbddp.protocol.codec import MARK

GONE = 3  # exit code: there is no such agent


def main() -> int:
    try:
        with socket.socket(socket.AF_UNIX) as agent:
            agent.connect(str(runtime_dir.socket_of(Path(sys.argv[1]))))
            os.write(1, b"\n" + MARK + b"\n")
            _pass_on(agent)
    except (FileNotFoundError, ConnectionRefusedError):
        print("the agent has exited", file=sys.stderr)
        return GONE
    return 0


def _pass_on(agent: socket.socket) -> None:
    """Until either side ends."""
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(agent, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                data = os.read(key.fd, 65536)
                if not data:
                    return
                if key.fd == 0:
                    agent.sendall(data)
                else:
                    _write(data)


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    sys.exit(main())
