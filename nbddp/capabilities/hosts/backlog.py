"""Messages of which it is not known that the other side has read them, so that a lost connection loses none.

Each message has a number, `n`; each side's pings say how far it has `got`. Where a connection is made anew, both sides
say so again, and send the rest once more.
"""

from __future__ import annotations

from collections import deque

from nbddp.protocol.codec import Message


class Backlog:
    """What one side has sent and read. `got`: the number of the last message that was read."""

    def __init__(self) -> None:
        self.got = 0
        self._sent = 0
        self._unread: deque[Message] = deque()

    def number(self, message: Message) -> Message:
        """A message that is about to be sent."""
        self._sent += 1
        numbered = {**message, "n": self._sent}
        self._unread.append(numbered)
        return numbered

    def read(self, until: int) -> None:
        """The other side has read the messages up to this one."""
        while self._unread and self._unread[0]["n"] <= until:
            self._unread.popleft()

    def rest(self) -> list[Message]:
        """What it has not said to have read."""
        return [*self._unread]

    def is_new(self, message: Message) -> bool:
        """Whether a message that came is not there already; one without a number is."""
        number = message.get("n")
        if number is None:
            return True
        if number <= self.got:
            return False
        self.got = number
        return True
