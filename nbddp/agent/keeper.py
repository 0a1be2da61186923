"""The process above a node agent that clears up where the agent itself is killed (Linux).

A killed agent leaves its folder, and what its workers have started. The workers end with it. Their subprocesses, the
loader processes of a data loader, and daemons that forked twice into a session of their own do not. All of them become
children of the keeper, which kills them, removes the folder, and ends as the agent has exited. It does not wait for the
agent's owner, which may have been killed with it. If the keeper is killed, the agent clears up itself.
"""

from __future__ import annotations

import os
import resource
import signal
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from nbddp.agent import children, orphans, runtime_dir
from nbddp.compat import system

OWNER_DIED = signal.SIGUSR1  # to the keeper as its parent dies, and from there to the agent


def keep(home: Path) -> None:
    """Return in a child of this process, to be the agent of the pool in `home`; this process becomes its keeper. To be
    called while there is one thread. Elsewhere than on Linux it returns in this process."""
    if not system.is_linux():
        return
    children.adopt_orphans()
    keeper, agent = os.getpid(), os.fork()
    if agent:
        _keep(agent, home)
    children.die_with_parent(keeper, signal.SIGTERM)
    children.adopt_orphans()


def _keep(agent: int, home: Path) -> NoReturn:
    code = 1
    try:
        _leave_all(home)
        for number in (signal.SIGTERM, OWNER_DIED):
            signal.signal(number, lambda number, _: os.kill(agent, number))
        while (child := _ended_child()) != agent:
            os.waitpid(child, 0)
        for number in (signal.SIGTERM, OWNER_DIED):  # from here on its pid may be another's
            signal.signal(number, signal.SIG_IGN)
        _, status = os.waitpid(agent, 0)
        code = os.waitstatus_to_exitcode(status)
        if code:
            orphans.end()
            runtime_dir.sweep(home)
        if code < 0:
            _end_by(-code)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(abs(code))


def _ended_child() -> int:
    """Wait until a child has ended; its pid stays its own."""
    found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    assert found is not None
    return found.si_pid


def _leave_all(home: Path) -> None:
    """Hold nothing that others wait for the end of, such as the agent's connection to its owner."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    log = os.open(home / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for standard, fd in enumerate((null, log, log)):
        os.dup2(fd, standard)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir("/")


def _end_by(number: int) -> None:
    """End by the signal that has ended the agent, so that who started it sees that."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):  # SIGKILL has no action to set
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
