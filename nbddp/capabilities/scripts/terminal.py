"""`python -m nbddp run`: a launcher. It starts a pool, or takes a waiting warm process. Then it runs the script, passes
signals on to the ranks, and ends all that it has started. Exit status as torchrun's: 0, or 1 whatever went wrong.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from nbddp.agent import stop
from nbddp.agent.client import AgentClient, ask
from nbddp.capabilities.scripts import launch
from nbddp.capabilities.scripts.program import ScriptProgram
from nbddp.compat.system import working_dir
from nbddp.errors import RunFailed
from nbddp.launch.options import LaunchSpec
from nbddp.launch.units import lasts
from nbddp.notebook.commands import CommandLine
from nbddp.protocol.capability import load

if TYPE_CHECKING:
    from nbddp.pool.pool import WorkerPool

FAILED = 1
KEPT = 600.0  # seconds for which the warm process waits for the next launch from a terminal


def run(command: CommandLine) -> int:
    """Run a script on a pool of its own; the exit status. Raises BadInput before anything is started."""
    asked = command.launch
    spec, said = launch.made_ready(asked, asked.elsewhere)
    for line in (*command.notes, *said):
        print(line, file=sys.stderr)
    _leave_working_directory()
    waiting = ask(os.environ)
    agent = AgentClient.launch(os.environ, waiting)  # it imports torch while this process imports the rest
    from nbddp.pool.pool import WorkerPool

    pool = WorkerPool(agent=agent)
    keeps = _keeps_by_default(command)
    if keeps:
        pool.keep(KEPT)
    try:
        with stop.heard_at_checks(), _passing_on(pool, spec):
            return _carry_out(pool, spec, says_kept=keeps and waiting is None)
    except KeyboardInterrupt:
        print("stopped by the user", file=sys.stderr)
        return FAILED
    finally:
        pool.close()


def _keeps_by_default(command: CommandLine) -> bool:
    """Whether the process that has imported torch stays though the line does not say so. It stays for somebody at a
    terminal, who will start the script again. What a job or another program starts leaves nothing."""
    spec = command.launch
    typed = all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))
    return command.name == "run" and spec.keep_warm is None and not spec.elsewhere and typed


def _say_kept(pool: WorkerPool) -> None:
    if not pool.group.nodes[0].agent.why_not_kept():
        print(
            f"the next start is faster: the process that has imported torch stays for {lasts(KEPT)}; --keep-warm 0 "
            "ends it with the script",
            file=sys.stderr,
        )


def _carry_out(pool: WorkerPool, spec: LaunchSpec, says_kept: bool) -> int:
    from nbddp.execution import report
    from nbddp.output.screens import for_shell

    screen = for_shell(None)
    try:
        for note in pool.ensure(spec, progress=screen.progress):
            print(note, file=sys.stderr)
        if says_kept:
            _say_kept(pool)
        screen.ready()
        pool.carry_out(spec.as_request("", 1), screen)
    except RunFailed as e:
        screen.finish([])
        print(report.terminal_text(e, _signal_of(pool)), file=sys.stderr)
        return FAILED
    finally:
        for option in spec.said if pool.last_run is not None else ():
            if option.terminal:
                print(load(option.terminal)(pool, getattr(spec, option.name)), file=sys.stderr)
    return 0


def _signal_of(pool: WorkerPool) -> str:
    """The signal that has ended the run, if it was not Ctrl-C."""
    run = pool.last_run
    if run is None or run.stop_signal == signal.SIGINT:
        return ""
    return signal.Signals(run.stop_signal).name


@contextmanager
def _passing_on(pool: WorkerPool, spec: LaunchSpec) -> Iterator[None]:
    """Signals that torchrun hands on go to the ranks; before and after the run they end the launcher as Ctrl-C does."""
    assert isinstance(spec.program, ScriptProgram)
    numbers = [signal.Signals[name] for name in spec.program.signals.split(",")]

    def heard(number: int, frame: FrameType | None) -> None:
        current = pool.current
        if current is None:
            signal.raise_signal(signal.SIGINT)
        else:
            current.stop(number)

    before = {n: signal.signal(n, heard) for n in numbers if n != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_working_directory() -> None:
    """`python -m` has put the working directory before all else; a script under torchrun has its own folder there."""
    here = working_dir()
    first = sys.path[0] if sys.path else None
    ours = Path(__file__).parents[3]
    if first in ("", here) and (Path(here) != ours or here in sys.path[1:]):
        del sys.path[0]
