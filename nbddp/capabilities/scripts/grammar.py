"""`%ddp run`: a line of text → what it asks for. Pure; torchrun's own line is `capabilities.scripts.torchrun`'s."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from nbddp.capabilities.scripts import logs
from nbddp.errors import BadInput
from nbddp.launch.options import Parser, fault_options, launch_spec, pool_options, rank_set, trace_option
from nbddp.notebook.commands import CommandLine
from nbddp.protocol.capability import Command
from nbddp.protocol.program import Program, shutdown_of

NOTEBOOK = "%ddp run"


def arguments(parser: Parser) -> None:
    shown = parser.prog.replace("%", "%%")
    parser.usage = f"{shown} [options] SCRIPT [arguments]\n       {shown} [options] -m MODULE [arguments]"
    parser.description = (
        "Run a script on every rank, as torchrun does. Options go before the script; what follows it is passed to it."
    )
    parser.add_argument("script", metavar="SCRIPT", help="path of the script, or with -m the name of the module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's sys.argv[1:]")
    pool_options(parser)
    run = parser.add_argument_group("run")
    run.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m")
    if parser.prog == NOTEBOOK:
        run.add_argument("--fresh", action="store_true", help="start new worker processes first (the default without "
                         "--keep)")  # fmt: skip
        run.add_argument("--keep", action="store_true", help="run in the existing processes, and keep the script's "
                         "names there for the next cell")  # fmt: skip
        times = run.add_mutually_exclusive_group()
        times.add_argument("--timings", action="store_true", help="show %%ddp timings when the script has ended")
        times.add_argument("--no-timings", action="store_true", help="do not record DDP's steps")
    trace_option(run)
    output = parser.add_argument_group("output")
    output.add_argument("--show", type=rank_set, metavar="SET", help="show the output of these ranks only, or none")
    logs.add_options(output)
    fault_options(parser, "script")


def parse(command: Command, parser: Parser, words: Sequence[str]) -> CommandLine:
    """The words behind `run`. Raises BadInput, or HelpAsked."""
    space = parser.parse_strictly(words)
    notebook = parser.prog == NOTEBOOK
    keep = notebook and space.keep
    if keep and space.max_restarts:
        raise BadInput(f"{parser.prog} --max-restarts starts new processes, so --keep cannot work; leave one out")
    shutdown = shutdown_of(os.environ) if space.shutdown_timeout is None else space.shutdown_timeout
    program = Program(space.script, space.module, keep, shutdown=shutdown)
    spec = launch_spec(
        space, fresh=not keep or space.fresh, show=space.show, hang_after=space.hang_after, timeout=space.timeout,
        shutdown_timeout=shutdown, check=space.check, max_restarts=space.max_restarts,
        timings=not (notebook and space.no_timings),
        show_timings=notebook and space.timings, trace=space.trace,
        argv=tuple(space.arguments), logs=logs.of_options(space), program=program,
    )  # fmt: skip
    return CommandLine(command, {}, spec)
