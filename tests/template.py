"""A process that has imported what agents import, and forks those of the tests: to import torch takes 2.4 s of a core.

Each fork is a warm process that waits, as `--keep-warm` leaves one (`nbddp.capabilities.warm.server`), and is taken as
one: all that a pool's agent does from there on is the product's own. `Template` is the tests' end. A process that could
have been started with the same environment in the same folder finds one, so the template is told of both.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nbddp.agent import children, warning_filters
from nbddp.agent import server as agent_server
from nbddp.agent.server import WARM, NodeAgent, import_all
from nbddp.capabilities.env import options as env_options
from nbddp.capabilities.warm import client, fingerprint, on_agent, server

SECONDS = 600.0  # that a fork waits
Request = dict[str, Any]
SPARE = 2  # forks that wait for processes whose start nobody announces, such as a kernel's


class Template:
    """A template, started by this process, and ended with it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "nbddp.agent.children", "tests.template:be", str(os.getpid())]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        log = str(Path(os.environ["NBDDP_RUNTIME_DIR"], "template.log"))
        request = {"env": env, "cwd": os.getcwd(), "path": sys.path, "log": log, "channel": theirs.fileno()}
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()], start_new_session=True, text=True
        )
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            json.dump(request, stdin)
        theirs.close()
        self._lines = ours.makefile("rw")
        ours.close()
        self._env = dict(os.environ)
        self.ready(os.environ)

    def ready(self, env: Mapping[str, str], **facts: Any) -> None:
        """Return when a fork waits for a process with this environment, in this folder; `facts` of that process which
        are other than here, as `footprint.inherited` has them."""
        others = [name for name in {*env, *self._env} if env.get(name) != self._env.get(name)]
        if "PYTHONPATH" in others or env_options.at_import(others):
            return  # it imports torch anew
        request = {"env": dict(env), "facts": fingerprint.inherited(env) | facts}
        self._lines.write(json.dumps(request) + "\n")
        self._lines.flush()
        if self._lines.readline() != "ready\n":
            raise RuntimeError("the tests' template has ended")

    def close(self) -> None:
        self._lines.close()
        self._process.wait()


class _Forks:
    """The template's side: who waits, by the pipe that ends when it waits no more."""

    def __init__(self, channel: socket.socket, imports: fingerprint.Imports):
        self._channel, self._imports = channel, imports
        self._waiting: dict[int, Request] = {}
        self._usual: Request = {}

    def serve(self) -> None:
        """Answer until the tests have ended."""
        with self._channel.makefile("r") as lines:
            while True:
                for pipe in _readable([self._channel.fileno(), *self._waiting]):
                    if pipe != self._channel.fileno():
                        self._taken(pipe)
                    elif not (line := lines.readline()):
                        return
                    else:
                        self._ready(json.loads(line))

    def _ready(self, wanted: Request) -> None:
        self._usual = self._usual or wanted
        if wanted not in self._waiting.values():
            self._fork(wanted)
        self._channel.sendall(b"ready\n")
        self._fill()

    def _taken(self, pipe: int) -> None:
        os.close(pipe)
        del self._waiting[pipe]
        self._fill()

    def _fill(self) -> None:
        for _ in range(SPARE - list(self._waiting.values()).count(self._usual)):
            self._fork(self._usual)

    def _fork(self, wanted: Request) -> None:
        """Returns when the new process waits."""
        template, (read, write) = os.getpid(), os.pipe()
        os.environ.update(wanted["env"])  # by which the folder is found of those who wait
        pid = os.fork()
        if not pid:
            try:
                self._channel.close()
                for pipe in (read, *self._waiting):
                    os.close(pipe)
                _wait(template, wanted["facts"], self._imports, write)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(write)
        while not any(one.identity.pid == pid for one in client.waiting()):
            if _readable([read], 5):  # it has ended: a file that was imported is another now
                os.close(read)
                return
        self._waiting[read] = wanted


def _readable(descriptors: Sequence[int], milliseconds: int | None = None) -> list[int]:
    """Those of which something can be read, or which the other end has closed. Their numbers are as high as they are in
    the tests' process, where `select` may take none of them."""
    looked = select.poll()
    for descriptor in descriptors:
        looked.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in looked.poll(milliseconds)]


def _wait(template: int, facts: fingerprint.Facts, imports: fingerprint.Imports, pipe: int) -> None:
    """In a fork: be the agent of who takes it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    os.setsid()
    children.die_with_parent(template, signal.SIGTERM)
    children.adopt_orphans()
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(null)
    os.chdir("/")
    try:
        owner = server.wait(SECONDS, imports, facts)
    except server.EndedUnused:
        return
    os.close(pipe)
    children.outlive_parent()
    agent: NodeAgent | None = on_agent.become(owner, on_agent.Kept(imports, facts))
    while agent is not None:
        agent.serve()
        agent = agent.successor()


def be(request: dict[str, Any]) -> None:
    """The template's process, as agents are spawned."""
    warning_filters.put_off()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks what became of a fork
    imports = fingerprint.Imports()
    gc.disable()
    missing = import_all(WARM)
    imports.end()
    if missing or children.why_not_fork():
        raise RuntimeError(missing or children.why_not_fork())
    imports.take()
    gc.freeze()
    _Forks(socket.socket(fileno=request["channel"]), imports).serve()


# The stack of a worker begins with these functions: to who looks at it they are the agent's, and no program's.
for _function in (be, _wait, _readable, _Forks.serve, _Forks._ready, _Forks._taken, _Forks._fill, _Forks._fork):
    _function.__code__ = _function.__code__.replace(co_filename=agent_server.__file__)
