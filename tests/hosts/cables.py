"""An Ethernet switch in a process of its own, and a cable to each host that can be slowed, stalled, made lossy or cut.

`python cables.py NAME:DEVICE=NAMESPACE ...` makes a TAP device for each argument: in the network namespace of that
file, or in its own where none is named. Frames go from one to the others. On stdin it takes a line of JSON per change,
and answers each with a line; it ends with its stdin, and the devices with it. Uses the standard library alone.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import re
import select
import struct
import sys
import time
from typing import Any

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # linux/if_tun.h
LARGEST, AT_ONCE = 65_536, 64  # bytes of a frame; frames taken from one device in a row


class Cable:
    """What a frame meets on the way from a host to the switch, and back. delay: seconds each way; rate: bytes per
    second, 0 for any; loss: of 1, 1 for a cut one; it lets nothing through before `held`, and loses nothing then."""

    def __init__(self, name: str, device: str, namespace: str):
        self.name = name
        self.delay = self.rate = self.loss = self.held = 0.0
        self.apart: set[str] = set()  # names of those with which nothing is exchanged
        self._busy = {"up": 0.0, "down": 0.0}
        self.number = _tap(device, namespace)

    def through(self, at: float, size: int, way: str) -> float | None:
        """When a frame that comes at a time is at the other end; None if it is lost."""
        if random.random() < self.loss:
            return None
        self._busy[way] = max(at, self.held, self._busy[way]) + (size / self.rate if self.rate else 0.0)
        return self._busy[way] + self.delay


def _tap(device: str, namespace: str) -> int:
    """A descriptor by which the frames of a new device are read and written."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    if namespace:
        other = os.open(namespace, os.O_RDONLY)
        if libc.setns(other, 0):
            raise OSError(ctypes.get_errno(), f"no way into {namespace}")
        os.close(other)
    try:
        number = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(number, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI))
    finally:
        libc.setns(own, 0)
        os.close(own)
    return number


class Switch:
    """Passes frames on, each when its time has come."""

    def __init__(self, cables: dict[str, Cable]):
        self.cables = cables
        self._by_number = {cable.number: cable for cable in cables.values()}
        self._seen: dict[bytes, Cable] = {}  # a sender's address → where it is
        self._due: list[tuple[float, int, int, bytes]] = []
        self._count = 0

    def serve(self) -> None:
        """Until stdin ends."""
        rest = b""
        while True:
            wait = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            for number in select.select([0, *self._by_number], [], [], wait)[0]:
                if number:
                    self._take(self._by_number[number])
                    continue
                data = os.read(0, LARGEST)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._change(json.loads(line))
            self._deliver()

    def _change(self, said: dict[str, Any]) -> None:
        cable = self.cables[said.pop("cable")]
        for name, value in said.items():
            if name == "stall":
                cable.held = time.monotonic() + value
            elif name == "apart":
                cable.apart = set(value)
            else:
                setattr(cable, name, float(value))
        os.write(1, b"{}\n")

    def _take(self, source: Cable) -> None:
        for _ in range(AT_ONCE):
            try:
                frame = os.read(source.number, LARGEST)
            except OSError:  # nothing more; or the device is down
                return
            self._seen[frame[6:12]] = source
            at = source.through(time.monotonic(), len(frame), "up")
            known = self._seen.get(frame[:6])
            for target in [known] if known else [c for c in self.cables.values() if c is not source]:
                if at is not None and target.name not in source.apart and source.name not in target.apart:
                    self._send(target, at, frame)

    def _send(self, target: Cable, at: float, frame: bytes) -> None:
        then = target.through(at, len(frame), "down")
        if then is not None:
            self._count += 1
            heapq.heappush(self._due, (then, self._count, target.number, frame))

    def _deliver(self) -> None:
        while self._due and self._due[0][0] <= time.monotonic():
            _, _, number, frame = heapq.heappop(self._due)
            try:
                os.write(number, frame)
            except OSError:  # the device is down, as of a host that has gone
                continue


def main() -> None:
    cables = {}
    for word in sys.argv[1:]:
        name, device, namespace = re.fullmatch(r"(\w+):(\w+)=(.*)", word).groups()  # type: ignore[union-attr]
        cables[name] = Cable(name, device, namespace)
    os.write(1, b"{}\n")
    Switch(cables).serve()


if __name__ == "__main__":
    main()
