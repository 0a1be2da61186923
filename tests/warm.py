"""Pools whose agent is the warm process that an earlier pool of these tests has left (`--keep-warm`): to import torch
anew for each takes some three seconds of a core. Tests of how a pool begins or ends start it without."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import nbddp
from nbddp.agent import taking
from nbddp.agent.handle import Agent

SECONDS = 600.0


@contextmanager
def pool(nproc: int | None = None, **options: Any) -> Iterator[nbddp.Pool]:
    """A pool that has been started, until the block ends."""
    made = begin(nproc, **options)
    try:
        made.start()
        yield made
    finally:
        made.close()


def begin(nproc: int | None = None, **options: Any) -> nbddp.Pool:
    """A pool that has not been started; `close` leaves its warm process to the next."""
    made = nbddp.Pool(nproc=nproc, agent=Agent.launch(os.environ, Agent.ask(os.environ)), **options)
    made.life.keep(SECONDS)
    return made


def end() -> None:
    """End the processes that wait."""
    for one in taking.waiting():
        one.end()
