"""`python -m nbddp`: the running pools of this user, from a terminal, also while a cell runs.

It talks to each pool's agent over the socket in the pool's folder; it never looks for
processes by name.
"""

from __future__ import annotations

import functools
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from nbddp.agent import runtime_dir
from nbddp.agent.client import AgentClient
from nbddp.analysis.placement import describe
from nbddp.errors import BadInput, NbddpError
from nbddp.launch import options
from nbddp.launch.topology import counted
from nbddp.notebook import commands
from nbddp.notebook.commands import CommandLine
from nbddp.output.progress import StillText
from nbddp.protocol.capability import DetachedResource, load, rows

PROG = "python -m nbddp"
UNREAD = 128 + 13  # as a shell has it for a process that SIGPIPE has ended


def detached() -> list[DetachedResource]:
    """All of this user's."""
    return [one for row in rows() if row.waits for one in load(row.waits)()]


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0; 1 if the pool failed; 2 for bad input; 130 after Ctrl-C; 141 if
    the reader of the output has ended (`| head`); for a script torchrun's exit status, which is 1 for any failure."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # the locale may lack a character
    try:
        status = _carry_out(words)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at its end
        return UNREAD
    return status


def _carry_out(words: Sequence[str] | None) -> int:
    try:
        line = commands.parse_command(sys.argv[1:] if words is None else words, PROG)
        if not line.command.terminal:
            print(commands.overview(PROG))
            return 0
        line = replace(line, agents=functools.partial(chosen, line))
        status: int | None = load(line.command.terminal)(line)
        return status or 0
    except options.HelpAsked as answer:
        print(answer.text)
    except KeyboardInterrupt:
        print("stopped by the user", file=sys.stderr)
        return 130
    except NbddpError as e:
        print(e, file=sys.stderr)
        return 2 if isinstance(e, BadInput) else 1
    return 0


def stop(line: CommandLine) -> None:
    """End a pool; where there is none, what earlier kernels have left."""
    name, running = line.args["pool"], runtime_dir.running()
    found = [one for one in detached() if one.name == name or not (name or running)]
    for one in found:
        print(one.end())
    if found:
        return
    for agent in chosen(line):
        agent.tell("stop")
        _gone(agent)
        print(f"pool {agent.pool_id} stopped")


def restart(line: CommandLine) -> None:
    if line.launch.asks_for_pool():
        raise BadInput(f"{PROG} restart keeps the pool's shape; run %ddp start --nproc N in the notebook to change it")
    for agent in chosen(line):
        answer = agent.request("status")
        if "cluster" in answer["info"]:
            raise BadInput(
                f"nbddp cannot replace the engines of cluster {answer['info']['cluster']}; restart the cluster, "
                "then %ddp stop and %ddp start --cluster in the notebook"
            )
        workers = [c for c in answer["children"] if c["kind"] == "worker"]
        picked = [c for c in workers if line.args["ranks"] is None or c["rank"] in line.args["ranks"]]
        agent.request("signal", pids=[c["pid"] for c in picked], signal=int(signal.SIGKILL))
        print(
            f"pool {agent.pool_id}: {counted(len(picked), 'worker')} stopped; the next cell starts new ones, and the "
            "variables are lost"
        )


def _print_progress(text: str) -> None:
    """A line for each sentence, once, and none for its seconds."""
    if not isinstance(text, StillText):
        print(text, file=sys.stderr)


def start(line: CommandLine) -> None:
    """Hold a pool in the foreground until it is stopped."""
    from nbddp.pool.pool import WorkerPool

    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    pool = WorkerPool()
    try:
        for note in pool.ensure(line.launch, progress=_print_progress):
            print(note)
    except KeyboardInterrupt:
        pool.close()
        raise
    signal.signal(signal.SIGINT, lambda *_: ended.set())
    assert pool.agent is not None
    pool.agent.on_event(lambda event: ended.set() if event["ev"] == "gone" else None)
    print(f"pool {pool.agent.pool_id}: {describe(pool.placed())}")
    print(
        f"ipyparallel's clients find it as cluster {pool.group.source.cluster_name()}; Ctrl-C ends the pool", flush=True
    )
    ended.wait()
    pool.close()


def chosen(line: CommandLine) -> list[AgentClient]:
    found = runtime_dir.running()
    name = line.args.get("pool") or ""
    if name:
        found = [h for h in found if h.name == name]
        if not found:
            raise BadInput(f"there is no running pool {name!r}; {PROG} status lists the pools")
    if not found:
        raise BadInput(f"you have no running pool; a %%ddp cell or {PROG} start starts one")
    if len(found) > 1:
        raise BadInput(f"there are {len(found)} pools; name one: {' or '.join(h.name for h in found)}")
    return [AgentClient.connect(h) for h in found]


def _gone(agent: AgentClient) -> None:
    agent.wait_until(lambda: not agent.alive, 10)
    end = time.monotonic() + 5
    while agent.home.exists() and time.monotonic() < end:
        time.sleep(0.01)
