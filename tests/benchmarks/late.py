"""A slow way to a far agent: `python late.py SECONDS COMMAND…` runs a command whose output comes so much later.

What is on its way together stays together, as on a network: the delay does not add up over what is sent at once.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time


def main() -> int:
    delay = float(sys.argv[1])
    far = subprocess.Popen(sys.argv[2:], stdout=subprocess.PIPE)
    assert far.stdout is not None
    said, number = queue.SimpleQueue[tuple[float, bytes]](), far.stdout.fileno()

    def read() -> None:
        while chunk := os.read(number, 65536):
            said.put((time.monotonic() + delay, chunk))
        said.put((0.0, b""))

    threading.Thread(target=read, daemon=True).start()
    while True:
        due, chunk = said.get()
        if not chunk:
            return far.wait()
        time.sleep(max(0.0, due - time.monotonic()))
        while chunk:
            chunk = chunk[os.write(1, chunk) :]


if __name__ == "__main__":
    sys.exit(main())
