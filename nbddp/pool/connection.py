"""A connection to the controller that survives its client.

What a stream of the client's cannot read is dropped and counted (`dropped`). A client is replaced, under the same
session, if its thread has ended, a stream of it is closed, or it does not answer. So the ranks' messages to it are
still ours; the ranks notice nothing. `tend` looks at the beat that it asked for last time and costs microseconds;
`check` waits for one.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from nbddp.compat import ipyparallel
from nbddp.errors import PoolError
from nbddp.launch.topology import counted

DIGESTS = 8192  # signatures remembered against replay; ipyparallel's 65536 fill 8 MB over a day's cells
BEAT_TIME = 1.0  # seconds that `check` waits for a beat: the thread may be reading a large message
LOOK_EVERY, SILENT_LOOKS = 0.25, 40  # so long without a beat (10 s of looking) is a thread that is stuck
AHEAD = 1.0  # seconds that what `ask` has asked counts: the command that asked may have come to nothing
HUB_TRY = 10.0  # seconds that one client waits for a hub's answer
Connect = Callable[..., Any]  # options of ipyparallel's Client → a client


class Connection:
    """`client` is the one to use now; `renewed` counts how often it was replaced."""

    def __init__(
        self,
        connect: Connect,
        hear: ipyparallel.Hear,
        on_renewed: Callable[[], None] = lambda: None,
        noticed: ipyparallel.Noticed = lambda stream: None,
        patience: float = 0.0,
    ):
        """hear: is given what ranks publish and answer, in the client's thread. noticed: gets the news that the hub has
        spoken. patience: seconds that a hub which is just starting may take to answer; 0: as `connect` has it."""
        self._connect, self._hear, self._on_renewed, self._noticed = connect, hear, on_renewed, noticed
        self.dropped: Counter[str] = Counter()  # stream → messages
        self.last_dropped = ""
        self.renewed = 0
        self._take(patient(connect, patience) if patience else connect())

    def _take(self, client: Any) -> None:
        lacking = ipyparallel.missing(client)
        if lacking:
            raise PoolError(f"this ipyparallel lacks {', '.join(lacking)}; install ipyparallel 9")
        client.session.digest_history_size = DIGESTS
        client.session.pack = exact(client.session.pack)
        self.client = client
        self.outbox = ipyparallel.Outbox(client)
        self._receivers = ipyparallel.guard(client, self._hear, self._drop, self._noticed)
        self._closed = False
        self._beaten = threading.Event()
        self._silent, self._looked_at = 0, 0.0
        self._ahead = 0.0  # when `ask` asked (time.monotonic())
        self._ask()

    def _drop(self, stream: str, frames: list[Any], error: BaseException) -> None:
        self.dropped[stream] += 1
        self.last_dropped = f"{stream}: {type(error).__name__}: {error}; {len(frames)} frames"

    def troubles(self) -> str:
        """What went wrong with the connection so far, and was mended; or empty."""
        words = []
        if self.dropped:
            messages = counted(sum(self.dropped.values()), "message")
            words.append(f"{messages} could not be read and were dropped, the last: {self.last_dropped}")
        if self.renewed:
            words.append(f"the connection was lost and restored {counted(self.renewed, 'time')}")
        return "; ".join(words)

    def _ask(self) -> None:
        """Have the client's thread say that it lives, and look at every stream."""
        self._beaten.clear()
        ipyparallel.call_in_thread(self.client, self._beat)

    def _beat(self) -> None:
        try:
            ipyparallel.receive_with(self.client, self._receivers)
        except OSError:
            self._closed = True
        self._beaten.set()

    def ask(self) -> None:
        """Have the client asked already whether it works; `check` waits for its word."""
        asked = time.monotonic() - self._ahead <= AHEAD
        if not asked and not self._closed and ipyparallel.runs(self.client):
            self._ask()
            self._ahead = time.monotonic()

    def check(self) -> None:
        """See that the client works, waiting for its word, and replace it if it does not. Raises PoolError if the
        controller does not answer. What `ask` has asked just before is waited for."""
        if time.monotonic() - self._ahead > AHEAD:
            self._ask()
        self._ahead = 0.0
        end = time.monotonic() + BEAT_TIME
        while ipyparallel.runs(self.client) and time.monotonic() < end:
            if self._beaten.wait(0.05) and not self._closed:
                self._silent = 0
                return
        self.tend()

    def tend(self) -> None:
        """As `check`, by the last beat that was asked for."""
        if self._is_lost():
            self._renew()

    def _is_lost(self) -> bool:
        if self._closed or not ipyparallel.runs(self.client):
            return True
        if self._beaten.is_set():
            self._silent = 0
            self._ask()
        elif time.monotonic() - self._looked_at > LOOK_EVERY:  # looks are counted: a process that slept made none
            self._silent, self._looked_at = self._silent + 1, time.monotonic()
        return self._silent > SILENT_LOOKS

    def _renew(self) -> None:
        old = self.client
        try:
            client = self._connect(session=old.session.session)
        except (OSError, RuntimeError) as e:
            raise PoolError(
                f"the connection to the workers was lost, and the controller does not answer ({e}); "
                "%ddp stop, then run the cell again"
            ) from None
        client.session.message_count = old.session.message_count  # the ids go on: an old one would be taken for a new
        self._take(client)
        self.renewed += 1
        self._on_renewed()
        ipyparallel.give_up(old)

    def close(self) -> None:
        ipyparallel.give_up(self.client)


def exact(pack: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """`pack`, which makes bytes of a message, for text that a program will read, such as its arguments. Names that are
    no UTF-8 arrive unchanged too."""
    from jupyter_client.jsonutil import json_default

    @functools.wraps(pack)
    def packed(message: Any) -> bytes:
        with suppress(UnicodeEncodeError):
            if (found := pack(message)).isascii():
                return found
        return json.dumps(message, default=json_default).encode()

    return packed


def patient(connect: Connect, seconds: float) -> Any:
    """A client whose hub has answered. On a crowded machine (64 workers that start) the hub may be late; one that has
    lost a client's first message answers the next client. Raises PoolError after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        try:
            return connect(timeout=min(seconds, HUB_TRY))
        except TimeoutError:
            if time.monotonic() >= end:
                raise PoolError(
                    f"the pool's controller did not answer for {seconds:.0f} s; run the cell again, with fewer "
                    "workers or other programs if the machine is overloaded"
                ) from None
