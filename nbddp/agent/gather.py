"""The same to several agents at once. All are asked, or left, before the first is waited for, so a slow connection
costs its time once and not for every host."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from nbddp.agent.client import AgentClient
from nbddp.errors import AgentFailed
from nbddp.protocol.codec import Message

ANSWERING = 30.0  # seconds


class AgentRequests:
    """Requests to several agents: `post` sends one and returns at once, `take` waits for all."""

    def __init__(self) -> None:
        self._posted: list[tuple[AgentClient, int | AgentFailed, bool]] = []

    def post(self, agent: AgentClient, op: str, **fields: Any) -> None:
        """`answers` reports an agent that has ended."""
        self._post(agent, False, op, fields)

    def post_if_alive(self, agent: AgentClient, op: str, **fields: Any) -> None:
        """One that is gone, or goes meanwhile, gives an empty answer: the effect of its end is reported elsewhere."""
        self._post(agent, True, op, fields)

    def _post(self, agent: AgentClient, may_be_gone: bool, op: str, fields: dict[str, Any]) -> None:
        try:
            self._posted.append((agent, agent.post(op, **fields), may_be_gone))
        except AgentFailed as e:
            self._posted.append((agent, e, may_be_gone))

    def answers(self, timeout: float = ANSWERING) -> list[Message | AgentFailed]:
        """An answer to each request, or why there is none, in the order in which they were posted."""
        found: list[Message | AgentFailed] = []
        for agent, key, may_be_gone in self._posted:
            try:
                answer = key if isinstance(key, AgentFailed) else agent.take(key, timeout)
            except AgentFailed as e:
                answer = e
            gone = may_be_gone and isinstance(answer, AgentFailed) and not agent.alive
            found.append({} if gone else answer)
        self._posted = []
        return found

    def take(self, timeout: float = ANSWERING) -> list[Message]:
        """The answers. Raises the first AgentFailed once all have been waited for."""
        return without_errors(self.answers(timeout))


def without_errors(answers: Sequence[Message | AgentFailed]) -> list[Message]:
    """Raises the first AgentFailed among them."""
    error = next((a for a in answers if isinstance(a, AgentFailed)), None)
    if error is not None:
        raise error
    return [a for a in answers if not isinstance(a, AgentFailed)]


def ask_all(agents: Sequence[AgentClient], op: str, timeout: float = ANSWERING, **fields: Any) -> list[Message]:
    """The same request to each; their answers, in order. Raises AgentFailed once all have been waited for."""
    return ask_each(agents, op, [fields] * len(agents), timeout)


def ask_each(
    agents: Sequence[AgentClient], op: str, fields: Sequence[Mapping[str, Any]], timeout: float = ANSWERING
) -> list[Message]:
    """As `ask_all`, where each is asked with fields of its own."""
    asked = AgentRequests()
    for agent, own in zip(agents, fields, strict=True):
        asked.post(agent, op, **own)
    return asked.take(timeout)


def end_all(agents: Sequence[AgentClient], keep: bool = False, timeout: float = 10.0) -> None:
    """Leave these agents, which have `timeout` seconds together; keep: processes that are to survive this one may."""
    for agent in agents:
        agent.begin_close() if keep else agent.begin_stop()
    end = time.monotonic() + timeout
    for agent in agents:
        agent.close(max(0.0, end - time.monotonic()))
