"""Pools and kernels whose agent is a fork of the tests' template (tests/template.py). Tests of how an agent begins or
ends have one that was started (the fixtures `cold` and `cold_kernel`)."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nbddp.agent.client import AgentClient, Offer, ask
from nbddp.pool.pool import WorkerPool
from tests.template import Template


@functools.cache
def template() -> Template:
    """This process's, from when it is first asked for."""
    return Template()


def ready(env: Mapping[str, str] = os.environ, **facts: Any) -> None:
    """Have a fork wait for a process with this environment; see `Template.ready`. Linux has templates."""
    if hasattr(os, "pidfd_open"):
        template().ready(env, **facts)


start_cold = AgentClient.launch.__func__  # type: ignore[attr-defined]


def launch(
    cls: type[AgentClient],
    env: Mapping[str, str],
    asked: Offer | None = None,
    controls_only: bool = False,
) -> AgentClient:
    """`AgentClient.launch`, which takes a fork of the template where it would start a process."""
    if asked is None and not controls_only:
        ready(env)
        asked = ask(env)
    agent: AgentClient = start_cold(cls, env, asked, controls_only)
    return agent


@contextmanager
def pool(nproc: int | None = None, **options: Any) -> Iterator[WorkerPool]:
    """A pool that has been started, until the block ends."""
    made = begin(nproc, **options)
    try:
        made.start()
        yield made
    finally:
        made.close()


def begin(nproc: int | None = None, **options: Any) -> WorkerPool:
    """A pool that has not been started."""
    return WorkerPool(nproc=nproc, **options)


def end() -> None:
    """End the template, if there is one."""
    if template.cache_info().currsize:
        template().close()
