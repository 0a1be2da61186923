"""`%ddp run`, `%ddp torchrun`, `%ddp launch` and `Pool.run_script`: a script on every rank. `%ddp errors`: how it
failed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbddp.capabilities.scripts import failures, launch
from nbddp.capabilities.scripts.part import failures_of
from nbddp.capabilities.scripts.program import SCRIPT, ScriptProgram, check_file
from nbddp.compat.system import existing_working_dir
from nbddp.errors import BadInput
from nbddp.launch.options import LaunchSpec, Parser
from nbddp.notebook.commands import Asked, CommandLine
from nbddp.protocol.request import HANG_AFTER, SHUTDOWN, Request

if TYPE_CHECKING:
    from nbddp.capabilities.scripts.logs import LogOptions
    from nbddp.output.screens import Screen
    from nbddp.pool.pool import WorkerPool


def run_script(
    pool: WorkerPool,
    script: str,
    *words: str,
    module: bool = False,
    keep: bool = False,
    logs: LogOptions | None = None,
    max_restarts: int = 0,
    hang_after: float | None = HANG_AFTER,
    timeout: float | None = None,
    shutdown_timeout: float = SHUTDOWN,
    screen: Screen | None = None,
) -> None:
    """The work of `nbddp.Pool.run_script`. screen: where the output is shown; default: this notebook or terminal."""
    program = ScriptProgram(script, module, keep)
    if not pool.spec.elsewhere:
        check_file(program, existing_working_dir())
    pool.ensure(replace(LaunchSpec() if pool.running else pool.spec, fresh=not keep))
    request = Request(
        op=SCRIPT, program=program, argv=words, logs=logs, max_restarts=max_restarts, hang_after=hang_after,
        timeout=timeout, shutdown_timeout=shutdown_timeout,
    )  # fmt: skip
    pool.carry_out(request, screen)


def run(asked: Asked, line: CommandLine) -> None:
    spec, said = launch.made_ready(line.launch, _is_elsewhere(asked.pool, line.launch))
    print(*(text + "\n" for text in (*line.notes, *said)), sep="", end="", flush=True)
    asked.run(spec)


def _is_elsewhere(pool: WorkerPool, spec: LaunchSpec) -> bool:
    """Whether workers have other files than this machine's."""
    return spec.elsewhere or (pool.running and pool.spec.elsewhere)


def errors_arguments(parser: Parser) -> None:
    parser.add_argument("--torchrun", action="store_true", help="print torchrun's summary instead")


def errors(asked: Asked, line: CommandLine) -> Any:
    run = asked.pool.last_run
    if run is None:
        raise BadInput("nothing has run yet; start with %ddp run or a %%ddp cell")
    program = run.request.program
    name = program.name if program is not None else f"Cell In[{run.request.cell}]"
    failed = failures_of(run)
    if not line.args["torchrun"]:
        return failures.Failures(name, failed)
    print(failures.summary(name, failed) if failed else f"no rank failed in {name}")
    return None
